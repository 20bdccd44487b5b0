"""Text as it appears: the pieces shown are what the tokenizer makes of all tokens, without the prompt's part."""
import functools
import random

import llm_inference as llm
import pytest
from chooser import LETTERS, TOKENIZERS, chain, script, write_chooser

BYTE_OF = {letter: byte for byte, letter in LETTERS.items()}


def letters(data):
    """The token of these bytes in a tokenizer like Qwen3's."""
    return "".join(LETTERS[byte] for byte in data)


def ids_of(*tokens):
    ids = [llm.tok.token_to_id(token) for token in tokens]
    assert None not in ids, tokens
    return ids


@pytest.fixture
def use(monkeypatch):
    """A function that makes a tokenizer of some kind the program's."""
    return lambda kind: monkeypatch.setattr(llm, "tok", TOKENIZERS[kind](), raising=False)


@pytest.fixture(params=TOKENIZERS)
def kind(request, use):
    """Every kind of tokenizer in turn, in use."""
    use(request.param)
    return request.param


# ---- What the right text is, worked out here from the tokens' names and from decoding everything ------------

def bytes_of_piece(kind, piece):
    if kind == "byte_level" and all(letter in BYTE_OF for letter in piece):
        return bytes(BYTE_OF[letter] for letter in piece)
    if kind == "byte_fallback" and piece.startswith("<0x"):
        return bytes([int(piece[3:5], 16)])
    return piece.encode()


def held(kind, ids):
    """How many bytes at the end belong to a character that later bytes can complete."""
    special = {i for i, token in llm.tok.get_added_tokens_decoder().items() if token.special}
    found = [llm.tok.id_to_token(i) for i in ids if i not in special]
    data = b"".join(bytes_of_piece(kind, piece) for piece in found[-4:] if piece is not None)
    return next((n for n in (1, 2, 3) if can_be_completed(data[-n:])), 0)


def before_cut(kind, prompt):
    """The text of a prompt without the character that it ends in, if more bytes can complete that."""
    if kind == "byte_level":                                    # where the last token may begin with another one
        return llm.tok.decode(prompt)[:-1]
    while held(kind, prompt):
        prompt = prompt[:-1]
    return llm.tok.decode(prompt)


@functools.cache
def can_be_completed(data):
    for more in [fill * n for fill in (b"\x80", b"\xbf") for n in (1, 2, 3)]:
        try:
            if len((data + more).decode()) == 1:
                return True
        except UnicodeDecodeError:
            pass
    return False


def random_ids(kind, rng, n):
    """About n ids: any tokens, ids without a token, words, bytes in an order that makes characters or none."""
    size, ids = llm.tok.get_vocab_size(), []
    while len(ids) < n:
        choice = rng.random()
        if choice < 0.3 or kind not in ("byte_level", "byte_fallback"):
            ids.append(rng.randrange(size + 2))
        elif choice < 0.4:
            ids.append(rng.randrange(size - 20, size))
        else:
            data = rng.choice(["日", "é", "🦀", "\ufffd", "\n", "a", "\u07ff"]).encode()
            data = rng.choice([data, data, data[:rng.randint(1, 4)], data[1:], rng.randbytes(2)])
            name = letters if kind == "byte_level" else lambda byte: f"<0x{byte[0]:02X}>"
            ids += ids_of(*[name(bytes([byte])) for byte in data])
    return ids


# ---- Any tokens ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("seed", range(3))
def test_the_pieces_are_the_decoded_text_without_the_prompt_s_part(kind, seed):
    rng = random.Random(seed)
    for _ in range(80):
        prompt, new = (random_ids(kind, rng, rng.randint(low, 8)) for low in (0, 1))
        base, text = llm.tok.decode(prompt), llm.tok.decode(prompt + new)
        pieces = list(llm.text_pieces(prompt, new))
        joined = "".join(pieces)
        assert len(pieces) - len(new) in (0, 1) and all(pieces[len(new):])
        steps = [prompt + new[:i] for i in range(len(new)) if not held(kind, prompt + new[:i])]
        texts = [*map(llm.tok.decode, steps), text]             # each time all of it was shown
        if all(after.startswith(before) for before, after in zip(texts, texts[1:])):
            if text.startswith(base):
                assert joined == text[len(base):], (prompt, new)
            else:                                               # the prompt ended inside a character
                assert joined == text[len(before_cut(kind, prompt)):], (prompt, new)
        else:
            assert kind == "byte_fallback"
        if not held(kind, prompt):
            # Where a later byte changed the text, decode says U+FFFD for what was shown, and nothing else differs
            assert len(base + joined) == len(text), (prompt, new)
            assert all(a in (b, "\ufffd") for a, b in zip(text[len(base):], joined)), (prompt, new)


@pytest.mark.parametrize("seed", range(3))
def test_what_can_be_completed_is_held_back_and_all_else_shows_at_once(kind, seed):
    rng = random.Random(seed)
    for _ in range(60):
        prompt, new = random_ids(kind, rng, 2), random_ids(kind, rng, 8)
        if held(kind, prompt):
            continue
        shown = len(llm.tok.decode(prompt))
        for i, piece in enumerate(llm.text_pieces(prompt, new), 1):
            ids = prompt + new[:i]
            shown, text, waits = shown + len(piece), llm.tok.decode(ids), held(kind, ids) * (i <= len(new))
            if not waits:
                assert shown == len(text), (prompt, new, i)
            else:
                assert shown <= len(text) - (waits if kind == "byte_fallback" else 1), (prompt, new, i)
                assert shown >= len(text.rstrip("\ufffd")), (prompt, new, i)


def test_random_bytes_never_end_the_text(use):
    """With tokenizers' own DecodeStream over a third of such runs end with "Invalid prefix"."""
    use("byte_fallback")
    rng = random.Random(0)
    for _ in range(500):
        new = [rng.choice([*range(1, 257), *ids_of("a", "ll", "\u2581the")]) for _ in range(6)] + ids_of("a")
        text = llm.tok.decode(ids_of("a") + new)[1:]
        joined = "".join(llm.text_pieces(ids_of("a"), new))
        assert len(joined) == len(text) and joined.endswith("a")
        assert joined == text or "\ufffd" in text


def test_a_long_text_is_exact(kind):
    """Prompts and texts of hundreds of tokens, among them characters of several tokens without end."""
    rng, size = random.Random(1), llm.tok.get_vocab_size()
    byte = {"byte_level": lambda b: letters(bytes([b])), "byte_fallback": "<0x{:02X}>".format}.get(kind)
    several = ("語" * 61 + "🦀" * 30 + "è" * 50).encode()
    for length in (1, 102, 103, 250):
        ids = [rng.randrange(max(0, size - 12), size - 3) for _ in range(400)]
        for ids in [ids] if byte is None else [ids, ids_of(*map(byte, several))]:
            base, text = llm.tok.decode(ids[:length]), llm.tok.decode(ids)
            joined = "".join(llm.text_pieces(ids[:length], ids[length:]))
            assert joined == text[len(base if text.startswith(base) else before_cut(kind, ids[:length])):]


# ---- A U+FFFD, chosen or completed ---------------------------------------------------------------------------

@pytest.mark.parametrize("kind, token", [
    ("byte_level", "\ufffd"), ("byte_level", letters(b"\xef\xbf\xbd")), ("byte_level", letters(b"\xff")),
    ("byte_fallback", "\ufffd"), ("byte_fallback", "<0xFF>"), ("byte_fallback", "<0x80>"),
    ("unigram", "\ufffd"), ("word_piece", "##\ufffd"), ("word_piece", "\ufffd"), ("word_level", "\ufffd")])
def test_a_replacement_character_that_nothing_can_complete_shows_at_once(use, kind, token):
    use(kind)
    new = ids_of(token, "." if kind != "byte_level" else "a")
    first, second = llm.text_pieces(new[1:], new)
    assert first.strip() == "\ufffd" and second.strip() in list(".a")


@pytest.mark.parametrize("kind, parts, whole", [
    ("byte_level", [letters(b"\xe6\x97"), letters(b"\xa5")], "日"),
    ("byte_level", [letters(b"\xef"), letters(b"\xbf"), letters(b"\xbd")], "\ufffd"),
    ("byte_level", ["a", letters(b"\xe6\x97"), "<|x|>", letters(b"\xa5\xe6"), letters(b"\x9c"), letters(b"\xac")],
     "a日本"),
    ("byte_fallback", ["<0xF0>", "<0x9F>", "<0xA6>", "<0x80>"], "🦀"),
    ("byte_fallback", ["<0xF0>", "<0x9F>", "<x>", "<0xA6>", "<x>", "<0x80>"], "🦀")])
def test_a_character_shows_when_its_last_part_comes(use, kind, parts, whole):
    use(kind)
    pieces = list(llm.text_pieces(ids_of("a"), ids_of(*parts)))
    assert pieces[-1] == whole[-1] and "".join(pieces) == whole and len(pieces) == len(parts)


def test_a_token_of_parts_of_two_characters_shows_the_first(use):
    use("byte_level")
    new = ids_of(letters(b"\xe6\x97"), letters(b"\xa5\xe6"), letters(b"\x9c"), letters(b"\xac"), letters(b"a\xe6"))
    assert list(llm.text_pieces(ids_of("a"), new)) == ["", "日", "", "本", "a", "\ufffd"]


@pytest.mark.parametrize("half", [b"\xed\xa0", b"\xed\xbf", b"\xe0\x80", b"\xf0\x80", b"\xf4\x90"])
def test_two_bytes_that_begin_no_character_are_not_held(use, half):
    use("byte_level")
    assert list(llm.text_pieces(ids_of("a"), ids_of(letters(half[:1]), letters(half[1:])))) == ["", "\ufffd\ufffd"]


@pytest.mark.parametrize("end, new, wanted", [
    (b"\xe6\x97", [b"\xa5"], "日"), (b"\xe6", [b"\x97", b"\xa5"], "日"), (b"\xe6\x97", [b"a"], "a"),
    (b"\xe6", [b"\x97"], ""), (b"\xe6", [b"\x97", b"a"], "a"), (b"\xef\xbf", [b"\xbd", b"a"], "a"),
    (b"\xff\xe6", [b"\x97", b"\xa5"], "日"), (b"\xff\xe6", [b"a"], "a"), (b"\xef\xbf\xbd", [b"a"], "a"),
    (b"\xef\xbf\xbd", [b"\xe6"], "\ufffd"), (b"\xe6", [b"\xe6", b"a"], "\ufffda"), (b"\xe6", [b"\xff"], "\ufffd"),
    (b"\xff", [b"\xff", b"\xff"], "\ufffd\ufffd"), 
    (b"\xe6\x97", [b"\xa5\xe6", b"\x97", b"\xa5"], "日日")])
def test_a_prompt_that_ends_inside_a_character_or_in_one_that_looks_so(use, end, new, wanted):
    """Of a prompt's last character only what completes it shows; of a U+FFFD that is whole, nothing."""
    use("byte_level")
    prompt = ids_of("a", *[letters(bytes([byte])) for byte in end])
    assert "".join(llm.text_pieces(prompt, ids_of(*map(letters, new)))) == wanted


def test_a_prompt_that_ends_inside_a_character_of_byte_tokens(use):
    use("byte_fallback")
    prompt = ids_of("a", "\ufffd", "<0xE6>")
    assert list(llm.text_pieces(prompt, ids_of("<0x97>", "<0xA5>", "ll"))) == ["", "日", "ll"]
    assert list(llm.text_pieces(prompt, ids_of("<0x97>", "ll"))) == ["", "\ufffdll"]
    assert list(llm.text_pieces(prompt, ids_of("ll"))) == ["ll"]
    assert list(llm.text_pieces(prompt, [])) == []
    assert list(llm.text_pieces(prompt, ids_of("<0x97>"))) == ["", "\ufffd"]


def test_a_byte_that_changes_what_is_shown_ends_nothing(use):
    use("byte_fallback")
    assert llm.tok.decode(ids_of("a", "<0x0A>", "<0xE2>", "a", "ll")) == "a\ufffd\ufffdall"
    assert list(llm.text_pieces(ids_of("a"), ids_of("<0x0A>", "<0xE2>", "a", "ll"))) == ["\n", "", "\ufffda", "ll"]
    assert list(llm.text_pieces(ids_of("<0x0A>"), ids_of("<0xE2>", "a"))) == ["", "\ufffda"]
    assert list(llm.text_pieces(ids_of("a"), ids_of("<0x0A>", "<0xE2>", "<0x82>", "<0xAC>"))) == ["\n", "", "", "€"]
    assert list(llm.text_pieces(ids_of("a"), ids_of("<0xC3>", "<0xA9>", "<0xFF>", "ll"))) == ["", "é", "\ufffd\ufffd", "ll"]


def test_a_space_at_the_beginning_is_dropped_only_where_the_text_begins(use):
    for kind in ("byte_fallback", "unigram"):
        use(kind)
        assert list(llm.text_pieces(ids_of("\u2581the"), ids_of("\u2581", "\u2581a", "ll"))) == [" ", " a", "ll"]
        assert list(llm.text_pieces(ids_of("<s>"), ids_of("\u2581a", "\u2581a"))) == ["a", " a"]


def test_a_text_that_repeats_its_prompt_loses_nothing(kind):
    special, word = llm.tok.get_vocab_size() - 1, 64 if kind == "byte_level" else 1
    prompt, new = [word] * 100, [word, special] * 150
    assert "".join(llm.text_pieces(prompt, new)) == llm.tok.decode(prompt + new)[len(llm.tok.decode(prompt)):]


def test_special_tokens_and_ids_without_a_token_show_nothing(kind):
    size, word = llm.tok.get_vocab_size(), 64 if kind == "byte_level" else 1
    again = llm.tok.decode([word, word])[len(llm.tok.decode([word])):]
    assert list(llm.text_pieces([word], [size - 1, size + 5, word])) == ["", "", again]


# ---- The same with a model that says such tokens -------------------------------------------------------------

def told(tmp_path, kind, prompt_end, *said):
    """A loaded model that goes on from the token prompt_end with those said; returns its folder."""
    tokenizer = TOKENIZERS[kind]()
    ids = [tokenizer.token_to_id(token) for token in (prompt_end, *said)]
    end = tokenizer.get_vocab_size() - 3
    folder = write_chooser(tmp_path / "model", tokenizer, chain(*ids), eos=[end])
    llm.load_model(folder)
    return folder


@pytest.fixture
def run(program):
    """A function from a model's folder and a prompt to the program's status and the text that it shows."""
    def output(folder, prompt):
        status, out, _ = program("--model", folder, prompt)
        return status, out.split("Output: ")[-1].split("\nTime:")[0]
    return output


def test_a_prompt_that_ends_in_a_replacement_character_shows_once(tmp_path, run):
    prompt = "The capital of France is\ufffd"
    folder = told(tmp_path, "byte_level", "\ufffd", "a", letters(b"\xe6"), letters(b"\x97"), letters(b"\xa5"))
    assert llm.generate(prompt, 10) == prompt + "a日"
    assert run(folder, prompt) == (0, prompt + "a日")


def test_bytes_that_fit_nothing_come_out_of_the_program(tmp_path, run):
    folder = told(tmp_path, "byte_fallback", "b", "<0x0A>", "<0xE2>", "a", "ll")
    assert run(folder, "b") == (0, "b\n\ufffdall")


@pytest.mark.parametrize("max_tokens", [2, 9])
def test_what_is_held_when_the_text_ends_shows_as_decode_shows_it(tmp_path, run, max_tokens):
    """The text ends at max_tokens or at an end token, inside a character."""
    folder = told(tmp_path, "byte_level", "b", "a", letters(b"\xe6\x97"))
    assert llm.generate("b", max_tokens) == "ba\ufffd"
    assert list(llm.stream(llm.encode("b"), [None], 0, max_tokens)) == ["a", "", "\ufffd"]
    if max_tokens == 9:
        assert run(folder, "b") == (0, "ba\ufffd")


def test_a_first_token_that_ends_the_text_shows_nothing(tmp_path):
    told(tmp_path, "byte_level", "b")
    assert list(llm.stream(llm.encode("b"), [None], 0, 5)) == []


def test_a_text_that_repeats_its_tokens_can_be_scripted(tmp_path, monkeypatch, kind):
    told(tmp_path, kind, *(["a", "b"] if kind == "byte_level" else ["."]))
    rng, prompt = random.Random(2), llm.encode("b" if kind == "byte_level" else ".")
    for _ in range(5):
        new = [i for i in random_ids(kind, rng, 12) if i not in llm.EOS_IDS and i < llm.VOCAB]
        script(monkeypatch, new)
        assert list(llm.stream(prompt, [None], 0, 40)) == list(llm.text_pieces(prompt, new))


def test_a_piece_that_was_held_back_is_no_token_in_the_count(tmp_path, capsys):
    llm.complete(told(tmp_path, "byte_level", "b", letters(b"\xe6")), "b", 1, 0.0, 0.95)
    assert "Output: b\ufffd\n" in (out := capsys.readouterr().out) and "decode 0 tokens" in out
