"""Steps 1 and 9: tokens in, text out, one piece at a time."""
import llm_inference as llm
import mlx.core as mx
import pytest


@pytest.fixture
def says(monkeypatch, load):
    """A function that makes the model say given token ids, whatever its weights; returns the pieces of text."""
    load("untied")                                      # a token for every byte: characters span tokens

    def say(ids, **options):
        script = iter(ids)
        monkeypatch.setattr(llm, "sample", lambda *args: mx.array(next(script, 0)))
        return list(llm.stream(llm.encode("hello"), [None] * llm.N_LAYERS, **options))

    return say


TEXT = "naïve 日本 🦀👩‍🚀 ½"


def test_streaming_never_prints_half_a_character(says):
    ids = llm.tok.encode(TEXT).ids
    assert len(ids) == len(TEXT.encode())               # one byte a token
    pieces = says([*ids, 258])
    assert "".join(pieces) == TEXT
    assert len(pieces) == len(ids)
    assert all("\ufffd" not in piece for piece in pieces)
    assert pieces[2:4] == ["", "ï"]                     # two bytes: nothing, then the character


def test_a_character_cut_off_by_max_tokens_is_printed_as_u_fffd(says):
    assert says(llm.tok.encode("ab🦀").ids, max_tokens=4) == ["a", "b", "", "", "\ufffd"]


def test_bytes_that_are_no_character_do_not_stop_the_text(says):
    ids = llm.tok.encode("é").ids[:1] + llm.tok.encode(" then").ids
    assert "".join(says([*ids, 258])).endswith(" then")


@pytest.mark.parametrize("end", [256, 258])
def test_any_end_token_ends_the_text_and_is_not_printed(says, monkeypatch, end):
    monkeypatch.setattr(llm, "EOS_IDS", {256, 258})
    assert "".join(says([*llm.tok.encode("done").ids, end, *llm.tok.encode("more").ids])) == "done"


def test_a_special_token_that_is_no_end_is_not_printed_and_ends_nothing(says, monkeypatch):
    monkeypatch.setattr(llm, "EOS_IDS", {256})
    assert "".join(says([*llm.tok.encode("go").ids, 257, *llm.tok.encode("on").ids, 256])) == "goon"


@pytest.mark.parametrize("n", [1, 2, 5])
def test_max_tokens_steps_cost_max_tokens_forward_passes(says, monkeypatch, n):
    """The prompt's pass gives the first token, and the last token needs no pass of its own."""
    calls, forward = [], llm.forward
    monkeypatch.setattr(llm, "forward", lambda ids, *a, **k: calls.append(len(ids)) or forward(ids, *a, **k))
    says(llm.tok.encode("abcdefgh").ids, max_tokens=n)
    assert calls == [5] + [1] * (n - 1)


def test_generate_is_the_prompt_and_its_greedy_continuation(name):
    """Against a loop without cache, pieces or look-ahead."""
    prompt, ids = "The capital", llm.encode("The capital")
    start = len(ids)
    while len(ids) < start + 12:
        token = llm.sample(llm.forward(ids, [None] * llm.N_LAYERS, 0)[-1]).item()
        if token in llm.EOS_IDS:
            break
        ids.append(token)
    assert llm.generate(prompt, max_tokens=12) == llm.tok.decode(ids)


def test_a_prompt_of_several_pieces_goes_on_as_one_pass_would(tiny):
    ids = llm.encode("The capital of France is Paris. " * 40)[:300]
    assert len(ids) == 300                              # two pieces of prefill
    token = llm.sample(llm.forward(ids, [None] * llm.N_LAYERS, 0)[-1]).item()
    first = next(llm.stream(ids, [None] * llm.N_LAYERS, 0, 1))
    assert first == llm.tok.decode([token])


def test_stream_goes_on_where_a_cache_stands(tiny):
    """A second text on the same cache, as a chat needs it: the same as both texts at once."""
    first, second = llm.encode("The capital of France is Paris."), llm.encode(" The capital of Italy is")
    cache = [None] * llm.N_LAYERS
    llm.prefill(first, cache)
    whole = "".join(llm.stream(first + second, [None] * llm.N_LAYERS, 0, 8))
    assert "".join(llm.stream(second, cache, len(first), 8)) == whole


def test_a_prefill_of_more_than_a_piece_on_a_cache_equals_one_pass(load):
    load("untied")
    ids = [(7 * i) % 250 for i in range(380)]
    for kind in llm.KINDS:
        llm.use_kernels(kind)
        cache = [None] * llm.N_LAYERS
        llm.prefill(ids[:80], cache)
        found = llm.prefill(ids[80:], cache, 80)
        whole = llm.forward(ids, [None] * llm.N_LAYERS, 0, last_only=True)
        assert mx.abs(found - whole).max().item() < 1e-3, kind


def test_a_stream_that_would_outgrow_the_context_is_refused(tiny):
    cache = [None] * llm.N_LAYERS
    held = llm.MAX_POSITIONS - 2 - 3
    llm.stream([300, 301], cache, held, 3)
    with pytest.raises(ValueError, match="context"):
        llm.stream([300, 301], cache, held, 4)


def test_an_empty_prompt_is_refused(tiny):
    with pytest.raises(ValueError, match="empty"):
        llm.generate("")


def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers(tiny):
    fitting = llm.MAX_POSITIONS - len(llm.encode("one two"))
    llm.check_prompt(llm.encode("one two"), fitting)
    with pytest.raises(ValueError, match=rf"\b{fitting + 1}\b.*\b{llm.MAX_POSITIONS}\b"):
        llm.generate("one two", max_tokens=fitting + 1)


def test_the_same_seed_gives_the_same_text(tiny):
    texts = set()
    for seed in (1, 1, 2, 3):
        mx.random.seed(seed)
        texts.add((seed, llm.generate("The", 20, temperature=1.5, top_p=1.0)))
    assert len(texts) == 3 and len({text for _, text in texts}) > 1


def test_truncation_and_padding_in_a_tokenizer_file_do_not_touch_the_prompt(tmp_path, folder_of):
    """tokenizer.json may ask for both, for training; here they would change the prompt without a word."""
    import shutil
    folder = shutil.copytree(folder_of("tied"), tmp_path / "copy")
    llm.load_model(folder)
    llm.tok.enable_truncation(4)
    llm.tok.enable_padding(length=9)
    llm.tok.save(str(folder / "tokenizer.json"))
    llm.load_model(folder)
    assert len(llm.encode("abcdef")) == 6
