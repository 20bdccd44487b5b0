"""Text as it appears: the pieces shown, joined, are the text of all tokens without the prompt's part."""
import random

import llm_inference as llm
import pytest
from chooser import LETTERS, TOKENIZERS, chain, write_chooser

BYTE_TOKEN = {"byte_level": LETTERS.get, "byte_fallback": "<0x{:02X}>".format}      # a byte's name, if bytes are tokens
PROMPTS = ["", "The", " the all", "the\n", "do not. ", "naïve", "日本 🦀", "語", "ends in \ufffd", "<s>", "a<x>", "<|x|>"]


def letters(data):
    """The token of these bytes in a tokenizer like Qwen3's."""
    return "".join(LETTERS[byte] for byte in data)


def ids_of(*tokens):
    ids = [llm.tok.token_to_id(token) for token in tokens]
    assert None not in ids, tokens
    return ids


def bytes_of(kind, text):
    """A text's ids, byte by byte."""
    return ids_of(*map(BYTE_TOKEN[kind], text.encode()))


def pieces_of(prompt, new):
    """The piece of each new token, and the rest at the end, which is "" if it is missing."""
    pieces = [*llm.text_pieces(prompt, iter(new)), ""]
    assert len(pieces) <= len(new) + 2
    return pieces[:len(new)], "".join(pieces[len(new):])


@pytest.fixture
def use(monkeypatch):
    """A function that makes a tokenizer of some kind the program's."""
    return lambda kind: monkeypatch.setattr(llm, "tok", TOKENIZERS[kind](), raising=False)


@pytest.fixture(params=TOKENIZERS)
def kind(request, use):
    """Every kind of tokenizer in turn, in use."""
    use(request.param)
    return request.param


# ---- Any tokens ----------------------------------------------------------------------------------------------
def random_ids(kind, rng):
    """Ids of any tokens and of none, and characters byte by byte, some of them cut off, also at the end.

    For bytes alone the second kind of tokenizer says U+FFFD in the place of whole characters, too, if they are
    next to a wrong byte. So there a character that is cut off stands between words.
    """
    ids, any_id = [], range(llm.tok.get_vocab_size() + 2)
    if kind == "byte_fallback":
        any_id = [i for i in any_id if not str(llm.tok.id_to_token(i)).startswith("<0x")]
    for _ in range(rng.randint(1, 6)):
        choice = rng.random() if kind in BYTE_TOKEN else 0
        if choice < 0.5:
            ids.append(rng.choice(any_id))
        elif choice < 0.9:
            ids += bytes_of(kind, rng.choice(["é", "日", "🦀", "\ufffd", "日本"]))
        else:
            ids += ids_of("a") + bytes_of(kind, rng.choice(["日", "🦀"]))[:rng.randint(1, 2)] + ids_of("a")
    return ids[:-1] if choice >= 0.9 else ids


def test_the_pieces_joined_are_the_text_of_all_tokens_less_the_prompt_s(kind):
    """And each time that this text is whole, all of it has been shown; else nothing has come."""
    rng, unfinished = random.Random(kind), 0
    for _ in range(500):
        prompt, new = llm.encode(rng.choice(PROMPTS)), random_ids(kind, rng)
        texts = [llm.tok.decode(prompt + new[:i]).removeprefix(llm.tok.decode(prompt)) for i in range(len(new) + 1)]
        pieces, rest = pieces_of(prompt, new)
        assert "".join(pieces) + rest == texts[-1], (prompt, new)
        for i in range(1, len(new) + 1):
            whole = [text for text in texts[:i + 1] if not text.endswith("\ufffd")]
            assert "".join(pieces[:i]) == whole[-1], (prompt, new, i)
        unfinished += texts[-1].endswith("\ufffd")
    assert unfinished > 10


def test_a_token_costs_the_same_however_long_the_text_is(kind, monkeypatch):
    """After the first, each is decoded with no more tokens than two characters have: 8 where bytes are tokens."""
    class Counting:
        def decode(self, ids, tok=llm.tok):
            given.append(len(ids))
            return tok.decode(ids)

    text, prompt = "日本 the naïve . do" * 60, llm.encode("the all . " * 60)
    new = bytes_of(kind, text) if kind in BYTE_TOKEN else llm.encode(text)
    shown, given = llm.tok.decode(prompt + new)[len(llm.tok.decode(prompt)):], []
    monkeypatch.setattr(llm, "tok", Counting())
    pieces = llm.text_pieces(prompt, iter(new))
    joined = ""
    while not joined:
        joined += next(pieces)
    given.clear()
    assert joined + "".join(pieces) == shown and len(new) > 60
    assert len(given) <= 2 * len(new) and max(given) <= (8 if kind in BYTE_TOKEN else 2)


# ---- Which piece comes when ----------------------------------------------------------------------------------
SUN, BOOK, CRAB = b"\xe6\x97\xa5", b"\xe6\x9c\xac", b"\xf0\x9f\xa6\x80"        # 日, 本 and 🦀


@pytest.mark.parametrize("kind, new, wanted, at_the_end", [
    # a character in parts is shown with the last of them
    ("byte_level", [letters(SUN[:2]), letters(SUN[2:]), "a"], ["", "日", "a"], ""),
    ("byte_level", [letters(CRAB[i:i + 1]) for i in range(4)], ["", "", "", "🦀"], ""),
    ("byte_level", ["a", letters(SUN[:2]), "<|x|>", letters(SUN[2:])], ["a", "", "", "日"], ""),
    ("byte_level", [letters(b"a" + SUN[:1]), letters(SUN[1:2]), letters(SUN[2:])], ["", "", "a日"], ""),
    ("byte_level", [letters(SUN[:2]), letters(SUN[2:] + BOOK[:1]), letters(BOOK[1:2]), letters(BOOK[2:])],
     ["", "", "", "日本"], ""),
    ("byte_fallback", [f"<0x{byte:02X}>" for byte in SUN + BOOK], ["", "", "日", "", "", "本"], ""),
    ("byte_fallback", ["<0xF0>", "<0x9F>", "<x>", "<0xA6>", "<x>", "<0x80>"], ["", "", "", "", "", "🦀"], ""),
    # one that is cut off, or bytes that are none, with what comes next or at the end
    ("byte_level", ["a", letters(SUN[:2])], ["a", ""], "\ufffd"),
    ("byte_level", ["a", letters(SUN[:2]), "b"], ["a", "", "\ufffdb"], ""),
    ("byte_level", [letters(b"\xff"), letters(b"\xed"), letters(b"\xa0")], ["", "", ""], "\ufffd\ufffd\ufffd"),
    ("byte_fallback", ["a", "<0xE6>", "<0x97>"], ["a", "", ""], "\ufffd\ufffd"),
    ("byte_fallback", ["a", "<0xE6>", "<0x97>", "ll"], ["a", "", "", "\ufffd\ufffdll"], ""),
    # and so is a U+FFFD that was meant
    ("byte_level", ["\ufffd", "a"], ["", "\ufffda"], ""),
    ("byte_level", [letters(b"\xef\xbf\xbd"), letters(b"\xef\xbf"), letters(b"\xbd")], ["", "", ""], "\ufffd\ufffd"),
    ("byte_fallback", ["\ufffd", "a"], ["", "\ufffda"], ""),
    ("unigram", ["\u2581\ufffd", "a"], ["", " \ufffda"], ""),
    ("word_piece", ["##\ufffd", "the", "\ufffd"], ["", "\ufffd the", ""], " \ufffd"),
    ("word_level", ["a\ufffd", "the", "\ufffd"], ["", " a\ufffd the", ""], " \ufffd"),
    # a space before a word, where the decoder drops the one before a text's first
    ("byte_fallback", ["\u2581", "\u2581a", "ll", "\u2581the"], [" ", " a", "ll", " the"], ""),
    ("unigram", ["\u2581", "\u2581a", "ll", "\u2581the"], [" ", " a", "ll", " the"], ""),
    ("word_piece", ["do", "##ing", ".", "the"], [" do", "ing", ".", " the"], "")], ids=ascii)
def test_what_is_shown_with_each_token_and_what_at_the_end(use, kind, new, wanted, at_the_end):
    use(kind)
    prompt = ids_of({"word_piece": "the", "word_level": "the"}.get(kind, "."))
    assert pieces_of(prompt, ids_of(*new)) == (wanted, at_the_end)


def test_special_tokens_and_ids_without_a_token_show_nothing(kind):
    size, word = llm.tok.get_vocab_size(), 64 if kind == "byte_level" else 1
    again = llm.tok.decode([word, word])[len(llm.tok.decode([word])):]
    assert pieces_of([word], [size - 1, size + 5, word]) == (["", "", again], "")


# ---- The same with a model that says such tokens -------------------------------------------------------------
@pytest.fixture
def told(tmp_path, program):
    """A function that makes and loads a model with Qwen3's kind of tokenizer, which goes on from one token with
    others and then an end token. It returns a function from a prompt and options to the text the program shows."""
    def make(prompt_end, *said):
        tokenizer = TOKENIZERS["byte_level"]()
        ids = [tokenizer.token_to_id(token) for token in (prompt_end, *said)]
        folder = write_chooser(tmp_path / "model", tokenizer, chain(*ids), eos=[tokenizer.token_to_id("<|end|>")])
        llm.load_model(folder)

        def shown(prompt, *options):
            status, out, err = program("--model", folder, prompt, *options)
            assert (status, err) == (0, "")
            return out.partition("Output: ")[2]
        return shown
    return make


def test_a_prompt_that_ends_in_a_replacement_character_shows_once(told):
    prompt = "The capital of France is\ufffd"
    shown = told("\ufffd", "a", *map(letters, (SUN[:1], SUN[1:2], SUN[2:])))
    assert llm.generate(prompt, 10) == prompt + "a日"
    assert shown(prompt).startswith(prompt + "a日\nTime:")


def test_what_is_held_when_the_text_ends_shows_as_decode_shows_it(told):
    """The text ends at max_tokens or at an end token, inside a character; the rest is no token in the count."""
    shown = told("b", "a", letters(SUN[:2]))
    for max_tokens in (2, 9):
        assert llm.generate("b", max_tokens) == "ba\ufffd"
        assert shown("b", "--max-tokens", str(max_tokens)).startswith("ba\ufffd\nTime:")
    assert "decode 1 tokens" in shown("b", "--max-tokens", "2")


def test_a_first_token_that_ends_the_text_shows_nothing(told):
    shown = told("b")
    assert llm.generate("b", 5) == "b" and shown("b").startswith("b\nTime:")
