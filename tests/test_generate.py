"""Steps 1 and 9: tokens in, text out, one piece at a time."""
import itertools
import random
import shutil

import llm_inference as llm
import mlx.core as mx
import pytest
from chooser import script

KINDS = list(llm.KERNELS)                               # "explicit", "fused", "numpy"


def fresh():
    return [None] * llm.N_LAYERS


@pytest.fixture
def says(monkeypatch, load):
    """A function that makes the model say given token ids, whatever its weights; returns the pieces of text."""
    load("untied")                                      # a token for every byte: characters span tokens

    def say(ids, max_tokens=100):
        script(monkeypatch, ids)
        prompt = llm.encode("hello")
        return list(llm.text_pieces(prompt, itertools.islice(llm.next_tokens(prompt, fresh()), max_tokens)))

    return say


TEXT = "naïve 日本 🦀👩‍🚀 ½"


def test_streaming_never_prints_half_a_character(says):
    ids = llm.tok.encode(TEXT).ids
    assert len(ids) == len(TEXT.encode())               # one byte a token
    pieces = says([*ids, 258])
    assert "".join(pieces) == TEXT
    assert len(pieces[:len(ids)]) == len(ids) and not any(pieces[len(ids):])
    assert all("\ufffd" not in piece for piece in pieces)
    assert pieces[2:4] == ["", "ï"]                     # two bytes: nothing, then the character


def test_a_character_cut_off_by_max_tokens_is_printed_as_u_fffd(says):
    assert says(llm.tok.encode("ab🦀").ids, max_tokens=4) == ["a", "b", "", "", "\ufffd"]


def test_bytes_that_are_no_character_do_not_stop_the_text(says):
    ids = llm.tok.encode("é").ids[:1] + llm.tok.encode(" then").ids
    assert "".join(says([*ids, 258])).endswith(" then")


@pytest.mark.parametrize("end", [256, 258])
def test_any_end_token_ends_the_text_and_is_not_printed(says, monkeypatch, end):
    for kind in KINDS:
        llm.use_kernels(kind)
        monkeypatch.setattr(llm, "EOS_IDS", {256, 258})
        assert "".join(says([*llm.tok.encode("done").ids, end, *llm.tok.encode("more").ids])) == "done", kind


def test_a_special_token_that_is_no_end_is_not_printed_and_ends_nothing(says, monkeypatch):
    monkeypatch.setattr(llm, "EOS_IDS", {256})
    assert "".join(says([*llm.tok.encode("go").ids, 257, *llm.tok.encode("on").ids, 256])) == "goon"


@pytest.fixture
def passes(monkeypatch):
    """A list to which each forward pass adds its number of tokens."""
    counted, forward = [], llm.forward
    monkeypatch.setattr(llm, "forward", lambda ids, *rest, **options: counted.append(len(ids))
                        or forward(ids, *rest, **options))
    return counted


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 2, 5])
def test_no_pass_is_computed_whose_logits_nobody_uses(says, passes, monkeypatch, kind, n):
    """The prompt's pass gives the first token, and the last token needs no pass of its own, whether max_tokens ends
    the text or an end token does. But on a GPU one pass is queued ahead."""
    llm.use_kernels(kind)
    says(llm.tok.encode("abcdefgh").ids, max_tokens=n)
    assert passes == [5] + [1] * (n - (kind != "fused"))
    passes.clear()
    says([*llm.tok.encode("abcde").ids[:n], 258])
    assert passes == [5] + [1] * (n + (kind == "fused"))
    passes.clear()
    script(monkeypatch, llm.tok.encode("abcdefgh").ids)
    assert llm.generate("hello", n) == "hello" + "abcde"[:n]
    assert passes == [5] + [1] * (n - (kind != "fused"))


def test_generate_is_the_prompt_and_its_greedy_continuation(name):
    """Against a loop without cache, pieces or look-ahead."""
    prompt, ids = "The capital", llm.encode("The capital")
    start = len(ids)
    while len(ids) < start + 12:
        token = int(llm.sample(llm.forward(ids, fresh(), 0)[-1]))
        if token in llm.EOS_IDS:
            break
        ids.append(token)
    for kind in KINDS:
        llm.use_kernels(kind)
        assert llm.generate(prompt, max_tokens=12) == llm.tok.decode(ids), kind


def test_a_prompt_of_several_pieces_goes_on_as_one_pass_would(tiny):
    ids = llm.encode("The capital of France is Paris. " * 40)[:300]
    assert len(ids) == 300                              # two pieces of prefill
    token = int(llm.sample(llm.forward(ids, fresh(), 0)[-1]))
    assert next(llm.next_tokens(ids, fresh())) == token


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_go_on_where_a_cache_stands(tiny, kind):
    """A second text on the same cache, as a chat needs it: the same as both texts at once."""
    llm.use_kernels(kind)
    first, second = llm.encode("The capital of France is Paris."), llm.encode(" The capital of Italy is")
    cache = fresh()
    llm.prefill(first, cache)
    whole = list(itertools.islice(llm.next_tokens(first + second, fresh()), 8))
    assert list(itertools.islice(llm.next_tokens(second, cache, len(first)), 8)) == whole


def test_a_prefill_of_more_than_a_piece_on_a_cache_equals_one_pass(load):
    load("untied")
    ids = [(7 * i) % 250 for i in range(380)]
    whole = mx.array(llm.forward(ids, fresh(), 0, last_only=True))
    for kind in KINDS:
        llm.use_kernels(kind)
        cache = fresh()
        llm.prefill(ids[:80], cache)
        found = llm.prefill(ids[80:], cache, 80)
        assert mx.abs(mx.array(found) - whole).max().item() < 1e-3, kind


def test_an_empty_prompt_is_refused(tiny):
    with pytest.raises(ValueError, match="empty"):
        llm.generate("")


def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers(tiny):
    fitting = llm.MAX_POSITIONS - len(llm.encode("one two"))
    llm.check_prompt(llm.encode("one two"), fitting)
    with pytest.raises(ValueError, match=rf"\b{fitting + 1}\b.*\b{llm.MAX_POSITIONS}\b"):
        llm.generate("one two", max_tokens=fitting + 1)


@pytest.mark.parametrize("temperature, top_p", [(0.9, 0.95), (1.5, 1.0)])
def test_one_seed_draws_one_text_whatever_the_set(tiny, temperature, top_p):
    """And another seed another."""
    texts = {}
    for kind, seed in itertools.product([*KINDS, "numpy"], (1, 2)):
        llm.use_kernels(kind)
        random.seed(seed)
        texts.setdefault(seed, set()).add(llm.generate("Once", 12, temperature, top_p))
    assert [len(found) for found in texts.values()] == [1, 1] and texts[1] != texts[2]


# ---- damaged weights ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_logits_that_are_not_finite_are_refused_in_prefill(load, kind, number, temperature):
    """A single one is enough: token 200 and no other gets it."""
    load("untied")
    damage("lm_head.weight", 200, number)
    llm.use_kernels(kind)
    with pytest.raises(ValueError, match="not finite.*lm_head.weight"):
        llm.generate("hello", 5, temperature)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", ["nan", "inf"])
def test_logits_that_are_not_finite_are_refused_in_decode(load, monkeypatch, kind, number):
    """Token 200 has a damaged row of the embedding: what comes before it is handed out, and so is the token."""
    load("untied")
    damage("model.embed_tokens.weight", 200, number)
    llm.use_kernels(kind)
    script(monkeypatch, [65, 66, 200, 67, 68])
    tokens = llm.next_tokens(llm.encode("hello"), fresh())
    assert [next(tokens), next(tokens), next(tokens)] == [65, 66, 200]
    with pytest.raises(ValueError, match="not finite.*embed_tokens"):
        next(tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_overflows_is_refused_without_blaming_a_weight(load, kind):
    load("untied")
    llm.use_kernels(kind)
    llm.W["model.norm.weight"] = llm.W["model.norm.weight"] * 1e30
    llm.W["lm_head.weight"] = llm.W["lm_head.weight"] * 1e30
    with pytest.raises(ValueError, match="not finite.*a step"):
        llm.generate("hello", 5)


def damage(name, row, number):
    """Put one number that is not finite into a row of a matrix of the loaded model."""
    w = mx.array(llm.W[name])
    w[row, 3] = float(number)
    llm.W[name] = w
    llm.use_kernels(llm.wanted_kernels)


def test_truncation_and_padding_in_a_tokenizer_file_do_not_touch_the_prompt(tmp_path, folder_of):
    """tokenizer.json may ask for both, for training; here they would change the prompt without a word."""
    folder = shutil.copytree(folder_of("tied"), tmp_path / "copy")
    llm.load_model(folder)
    llm.tok.enable_truncation(4)
    llm.tok.enable_padding(length=9)
    llm.tok.save(str(folder / "tokenizer.json"))
    llm.load_model(folder)
    assert len(llm.encode("abcdef")) == 6
