"""--explain and --trace: every number they print, against counts made another way."""
import ast
import contextlib
import functools
import io
import json
import math
import os
import re
import string
import sys
import unicodedata
from pathlib import Path

import llm_inference as llm
import mlx.core as mx
import numpy as np
import pytest
import reference
from checkpoints import byte_tokenizer, make_checkpoint
from chooser import LETTERS

ROOT = Path(__file__).resolve().parent.parent
PROMPT = "The capital of France is"
FOREIGN = "日本 🦀"
SHAPES = ["tiny-qwen3", "one_kv_head", "llama_head_dim"]        # the last is a Llama with a head of its own
IN_ALL_SETS = pytest.mark.parametrize("name, kernels", [
    (name, kernels) for name in SHAPES for kernels in llm.KERNELS], indirect=["name"])
NUMBER = r"-?\d[\d,]*\.?\d*(?:e[+-]\d+)?"


def numbers(line):
    """The numbers of a line, after what is in quotes was taken away."""
    return [float(n.replace(",", "")) for n in re.findall(NUMBER, re.sub(r"(['\"]).*", "", line))]


def quoted(line):
    """The token at the end of a line: its text, or its name."""
    return ast.literal_eval(re.search(r"(['\"]).*\1", line)[0])


@pytest.fixture
def explained(capsys):
    """A function from a prompt to what explain prints: a list of sections, each a list of lines."""
    def explain(prompt=PROMPT):
        llm.explain(prompt)
        return [section.splitlines() for section in capsys.readouterr().out.strip("\n").split("\n\n")]
    return explain


def find(sections, start):
    """The rows under each title that begins so, and the title: [(title, rows)].

    Between them stand a line that says what to look for and, but over sentences, a heading.
    """
    found = [s for s in sections if s[0].startswith(start)]
    assert all(s[1].startswith("Look at ") for s in found)
    return [(s[0], s[2 if start.startswith("What") else 3:]) for s in found]


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def width_of(text):
    """The width of a line in a terminal's columns."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text if not unicodedata.combining(c))


@functools.cache
def judged(folder):
    """What the reference engine finds for the prompt: logits, and for its last token the probabilities after each
    layer, the shares of attention, [layer * heads + head][position], and the vectors that RoPE turned in the last
    layer: query heads and then key heads."""
    model, shares, hidden, turned = reference.load(folder), [], [], []
    softmax, rope, cache = reference.softmax, reference.rope, reference.new_cache(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "softmax", lambda scores: shares.append(softmax(scores)) or shares[-1])
        patch.setattr(reference, "rope", lambda head, *rest: turned.append(head) or rope(head, *rest))
        for pos, token in enumerate(llm.tok.encode(PROMPT).ids):
            shares.clear()
            hidden.clear()
            logits = reference.forward_token(model, token, pos, cache, hidden)
    lens = [softmax(reference.matvec(model.head, reference.rms_norm(x, model.final_norm, model.eps))) for x in hidden]
    return logits, lens, shares, turned[-model.heads - model.kv_heads:]


@pytest.mark.parametrize("prompt", [PROMPT, FOREIGN, "é", "a\n\tb"])
def test_the_tokens_are_the_prompt_with_nothing_lost(tiny, explained, prompt):
    """A token that is no whole character is shown by its name, in which a letter stands for each byte."""
    rows, byte_of = find(explained(prompt), "Step 1")[0][1], {letter: byte for byte, letter in LETTERS.items()}
    ids = llm.tok.encode(prompt).ids
    assert [numbers(row) for row in rows] == [[i, t] for i, t in enumerate(ids)]
    is_whole = ["\ufffd" not in llm.tok.decode([t]) for t in ids]
    shown = [quoted(row).encode() if whole else bytes(map(byte_of.get, quoted(row)))
             for whole, row in zip(is_whole, rows)]
    assert b"".join(shown) == prompt.encode() and all(is_whole) == (prompt != FOREIGN)


def test_tokens_of_other_tokenizers_are_spelled_too(tiny, monkeypatch):
    from tokenizers import Tokenizer, decoders, models
    vocab = {"<unk>": 0, "the": 1, "é": 2, "<0xE6>": 3, "\ufffd": 4}
    other = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    other.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                       decoders.Strip(" ", 1, 0)])
    monkeypatch.setattr(llm, "tok", other)
    assert [llm.spell(i) for i in range(6)] == ["'<unk>'", "'the'", "'é'", "'<0xE6>'", "'\ufffd'", "''"]


# ---- What a token costs --------------------------------------------------------------------------------------
class Sizes:
    """A config's sizes, and what the pass of the token after n others costs by them, with 4 bytes a number.

    adds: multiply-adds of a product with a matrix are as many as its numbers; in attention each query head has
    two products of head_dim terms with each of n + 1 tokens. read: bytes of weights, and of n + 1 keys and values.
    """

    def __init__(self, c, n):
        self.layers, self.d, self.ff, self.vocab = (c[field] for field in (
            "num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size"))
        self.heads, self.kv, self.head_dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        q, k, qk_norms = self.heads * self.head_dim, self.kv * self.head_dim, 2 * self.head_dim
        qk_norms *= c["model_type"] == "qwen3"
        projections, feed_forward, head = (q + k + k + q) * self.d, 3 * self.ff * self.d, self.vocab * self.d
        self.over_cache, self.kv_bytes = self.layers * 2 * q * (n + 1), 4 * self.layers * 2 * k
        self.adds = {"attention": self.layers * projections + self.over_cache, "ffn": self.layers * feed_forward,
                     "linear": head}
        self.read = {"embed": 4 * self.d, "rms_norm": 4 * (self.layers * (2 * self.d + qk_norms) + self.d),
                     "attention": 4 * self.layers * (projections + qk_norms) + self.kv_bytes * (n + 1),
                     "ffn": 4 * self.layers * feed_forward, "linear": 4 * head}
        for costs, norms in (self.adds, 0), (self.read, 4 * self.d):            # of a vector of d numbers
            costs["transformer_block"] = costs["attention"] + costs["ffn"] + 2 * self.layers * norms
            costs["forward"] = costs["transformer_block"] + costs.get("embed", 0) + norms + costs["linear"]
        copies = 1 if c["tie_word_embeddings"] else 2
        self.weights = copies * head + self.layers * (projections + feed_forward + qk_norms + 2 * self.d) + self.d


@IN_ALL_SETS
def test_shapes_shares_and_costs_are_what_the_config_says(name, kernels, folder_of, explained):
    llm.use_kernels(kernels)
    c, n, sections = config_of(folder_of(name)), len(llm.tok.encode(PROMPT).ids), explained()
    s, x = Sizes(c, n), (n, c["hidden_size"])
    turned = f"{(s.heads, n, s.head_dim)} {(s.kv, n, s.head_dim)}"
    shapes = {"embed": f"{(n,)} {x}", "rms_norm": f"{(1, s.d)} {(s.d,)} {(1, s.d)}", "apply_rope": f"{turned} {turned}",
              "attention": f"{x} {x}", "ffn": f"{x} {x}", "transformer_block": f"{x} {x}",
              "linear": f"{(1, s.d)} {(1, s.vocab)}", "forward": f"{(n,)} {(1, s.vocab)}", "sample": f"{(s.vocab,)} ()"}
    rows = find(sections, "Steps 2 to 8")[0][1]
    assert [row.split()[1] for row in rows] == list(shapes)
    for row, (step, shape) in zip(rows, shapes.items()):
        assert " ".join(re.sub(r"[\d.]+%", "", row).split()[2:]) == shape
        shares = [f"{100 * costs.get(step, 0) / costs['forward']:.2f}" for costs in (s.adds, s.read)]
        assert re.findall(r"([\d.]+)%", row) == shares, step

    rows = find(sections, "What the next token costs")[0][1]
    assert numbers(rows[0]) == [s.weights, 4 * s.weights]
    assert numbers(rows[1]) == [s.kv_bytes, s.kv_bytes * s.heads / s.kv]
    assert numbers(rows[2]) == [s.adds["forward"] - s.over_cache, s.over_cache]
    read, speed, bandwidth = numbers(rows[3])
    assert read == s.read["forward"]
    assert speed > 0 and bandwidth == pytest.approx(read * speed / 1e9, abs=0.006)


# ---- RoPE ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["tiny-qwen3", "bfloat16", "three_queries_a_kv_head", "llama_no_head_dim"],
                         indirect=True)
def test_angles_are_the_paper_s_and_a_product_depends_on_the_distance_alone(name, folder_of, explained):
    c = config_of(folder_of(name))
    _, _, head_dim = reference.head_sizes(c)
    theta = c.get("rope_theta") or c["rope_parameters"]["rope_theta"]
    rows = [numbers(row) for row in find(explained(), "Step 4")[0][1]]
    n = len(llm.tok.encode(PROMPT).ids)
    assert [row[0] for row in rows] == [*range(n), n + 96]
    for pos, *angles, near, far in rows:
        pairs = (0, head_dim // 4, head_dim // 2 - 1)
        assert angles == pytest.approx([math.degrees(pos * theta ** (-2 * i / head_dim)) for i in pairs], rel=1e-5)
        assert (near, far) == pytest.approx(rows[0][4:], abs=0.01)
    assert abs(rows[0][4] - rows[0][5]) > 0.01


@pytest.mark.parametrize("name", ["tiny-qwen3", "one_kv_head", "llama_no_head_dim"], indirect=True)
def test_the_product_is_that_of_the_last_token_s_first_query_and_key_in_the_last_layer(name, folder_of, explained):
    c, turned = config_of(folder_of(name)), judged(folder_of(name))[3]
    theta, (heads, _, _) = c["rope_theta"], reference.head_sizes(c)
    row = numbers(find(explained(), "Step 4")[0][1][0])
    for apart, shown in zip((1, 4), row[4:], strict=True):
        expected = reference.dot(reference.rope(turned[0], apart, theta), turned[heads])
        assert shown == pytest.approx(expected, abs=0.002)


def test_a_product_that_depends_on_the_position_would_be_seen(tiny, explained, monkeypatch):
    monkeypatch.setattr(llm, "apply_rope", lambda q, k, positions: (q * positions[:, None], k))
    rows = [numbers(row) for row in find(explained(), "Step 4")[0][1]]
    assert rows[0][4] != pytest.approx(rows[1][4], abs=0.01)


# ---- Where the last token looks, and the lens ----------------------------------------------------------------
def picture(sections):
    """What Steps 5 and 7 show: {token: the column above which it stands}, and for each layer (line, head, share,
    next token)."""
    _, rows = find(sections, "Steps 5 and 7")[0]
    layers = [re.fullmatch(r"layer +(\d+) (.*?) +(\d+)  #* *(\d\.\d{4}) (.*)", row)
              for row in rows if row.startswith("layer")]
    assert [int(layer[1]) for layer in layers] == list(range(len(layers)))
    columns = {quoted(row): re.search(r"['\"]", row).start() for row in rows[:-len(layers)]}
    return columns, [(layer[0], int(layer[3]), float(layer[4]), quoted(layer[5])) for layer in layers]


def shade_of(line, column, width):
    """How dark a cell is, from 0 to 9."""
    shades = {" .:-=+*#%@".index(sign) for sign in line[column:column + width]}
    assert len(shades) == 1
    return shades.pop()


def test_where_the_last_token_looks_is_the_reference_s(tiny, explained):
    """The shade of a cell is the largest weight of any head, in ninths."""
    shares, (heads, *_) = judged(tiny)[2], reference.head_sizes(config_of(tiny))
    columns, layers = picture(explained())
    assert "".join(columns) == PROMPT and len(layers) == len(shares) // heads
    for layer, (line, head, _, _) in enumerate(layers):
        here = shares[layer * heads:(layer + 1) * heads]
        assert max(map(max, here)) == max(here[head])
        for i, column in enumerate(columns.values()):
            assert abs(shade_of(line, column, 2) - 9 * max(h[i] for h in here)) < 0.51


@pytest.mark.parametrize("kernels", llm.KERNELS)
@pytest.mark.parametrize("n, width", [(2, 2), (12, 2), (13, 1), (24, 1), (25, 1), (60, 1)])
def test_the_shades_stand_under_the_right_tokens(load, explained, monkeypatch, n, width, kernels):
    """Shares from the queries and keys of a pass, in NumPy. Every token of the prompt is another one, and sharp
    attention (queries 8 times as long) makes dark cells. Over 24, the first 4 and the last 20 are shown."""
    load("tied")
    llm.use_kernels(kernels)
    for layer in range(llm.N_LAYERS):
        name = f"model.layers.{layer}.self_attn.q_norm.weight"
        monkeypatch.setitem(llm.W, name, llm.W[name] * 8)
    prompt, seen = string.ascii_letters[:n] + string.digits[:max(0, n - 52)], set()
    calls = llm.watch(lambda: llm.prefill(llm.encode(prompt), [None] * llm.N_LAYERS))
    sections = explained(prompt)
    columns, layers = picture(sections)
    assert list(columns) == list(prompt if n <= 24 else prompt[:4] + prompt[-20:])
    assert [*columns.values()] == [*range(9, 9 + width * len(columns), width)]
    for (line, head, _, _), (_, (q, k, _), _) in zip(
            layers, [call for call in calls if call[0][-1] == "attend"], strict=True):
        q, k = np.asarray(q)[:, -1], np.repeat(np.asarray(k), llm.N_HEADS // llm.N_KV, axis=0)
        powers = np.exp(np.einsum("hd,htd->ht", q, k) / math.sqrt(llm.D_HEAD))
        shares = powers / powers.sum(axis=1, keepdims=True)
        assert shares[head].max() == shares.max()
        for token, column in columns.items():
            shade = shade_of(line, column, width)
            assert abs(shade - 9 * shares[:, prompt.index(token)].max()) < 0.51, token
            seen.add(shade)
        assert line[9 + width * len(columns)] == " "
    assert len(seen) > 3 or n == 2
    heading = next(s for s in sections if s[0].startswith("Steps 5 and 7"))[2]
    assert ("first 4 and last 20" in heading) == (n > 24)


def test_the_lens_is_the_reference_s_and_ends_at_the_answer(tiny, explained):
    lens, sections = judged(tiny)[1], explained()
    _, layers = picture(sections)
    assert len(layers) == len(lens)
    for (_, _, share, said), probs in zip(layers, lens):
        assert share == pytest.approx(max(probs), abs=1e-3)
        assert said == llm.tok.decode([probs.index(max(probs))])
    first = find(sections, "Step 8")[0][1][0]
    assert numbers(first)[1] == layers[-1][2] and quoted(first) == layers[-1][3] == " Paris"


@pytest.mark.parametrize("layers", [1, 2])
def test_models_of_one_and_two_layers_are_explained(tmp_path, explained, layers):
    llm.load_model(make_checkpoint(tmp_path / "m", "untied", num_hidden_layers=layers))
    assert len(picture(explained("abc"))[1]) == layers


# ---- The next tokens -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["tiny-qwen3", "untied", "llama_no_head_dim"], indirect=True)
def test_the_table_is_the_reference_s(name, folder_of, explained):
    logits = judged(folder_of(name))[0]
    title, rows = find(explained(), "Step 8")[0]
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    plain = [math.exp(logits[i] - logits[order[0]]) for i in order]
    cool = [math.exp((logits[i] - logits[order[0]]) / 0.7) for i in order]
    size, mass = 0, 0.0
    while mass < 0.95 * sum(cool):
        mass += cool[size]
        size += 1
    assert abs(numbers(title)[-1] - size) <= (0 if size < 9 else 1)
    for i, row in enumerate(rows):
        token, p, left = numbers(row)
        assert token == order[i]
        assert p == pytest.approx(plain[i] / sum(plain), abs=2e-4)
        assert left == pytest.approx(cool[i] / mass if i < size else 0, abs=2e-3)


def test_cached_and_recomputed_tokens_are_the_reference_s(load, explained):
    folder = load("tied")
    rows = [numbers(row) for row in find(explained("by cache"), "Step 9")[0][1]]
    expected = reference.generate(reference.load(folder), llm.tok.encode("by cache").ids, 8)
    assert [row[0] for row in rows] == [row[1] for row in rows] == expected
    assert all(row[2] < 1e-4 for row in rows)


def test_the_largest_difference_is_that_of_the_logits(tiny, explained, monkeypatch):
    """With values in the cache that are 1 too high, so that the difference is no mere rounding."""
    extend, seen, forward = llm.extend_cache, [], llm.forward
    monkeypatch.setattr(llm, "extend_cache", lambda cache, i, k, v: extend(cache, i, k, v + (k.shape[1] == 1)))
    monkeypatch.setattr(llm, "forward", lambda *args, **options: seen.append(forward(*args, **options)) or seen[-1])
    rows = [numbers(row) for row in find(explained(), "Step 9")[0][1]]
    decoded, again = np.concatenate(seen[:8]), seen[-1][-8:]
    expected = np.abs(decoded - again).max(axis=-1)
    assert expected.max() > 0.1
    assert [row[2] for row in rows] == pytest.approx(expected.tolist(), rel=0.01)


def test_the_speed_is_that_of_the_eight_steps(tiny, explained, monkeypatch):
    """By a clock that goes on a second with every pass."""
    passes, forward = [], llm.forward
    monkeypatch.setattr(llm, "forward", lambda *args, **options: passes.append(1) or forward(*args, **options))
    monkeypatch.setattr(llm.time, "perf_counter", lambda: len(passes))
    assert numbers(find(explained(), "What the next token costs")[0][1][3])[1] == 1.0


def test_a_cache_that_is_wrong_would_be_seen(tiny, explained, monkeypatch):
    extend = llm.extend_cache
    monkeypatch.setattr(llm, "extend_cache", lambda cache, i, k, v: extend(cache, i, k if k.shape[1] > 1 else 0 * k, v))
    assert max(numbers(row)[2] for row in find(explained(), "Step 9")[0][1]) > 1e-2


# ---- What else may be explained, and what not ----------------------------------------------------------------
@pytest.mark.parametrize("kind, kernels", [("untied", "explicit"), ("llama_head_dim", "fused")])
def test_bfloat16_is_explained(kind, kernels, load, explained):
    c = config_of(load(kind, mx.bfloat16))
    llm.use_kernels(kernels)
    before = {name: getattr(llm, name) for name in llm.WATCHED}
    sections = explained("abc")
    assert {name: getattr(llm, name) for name in llm.WATCHED} == before
    rows = find(sections, "What the next token costs")[0][1]
    assert numbers(rows[1])[0] == reference.kv_bytes_per_token(c)
    not_read = (c["vocab_size"] - 1) * c["hidden_size"]         # untied: of the embedding but one row
    assert numbers(rows[3])[0] == numbers(rows[0])[1] - 2 * not_read + 4 * reference.kv_bytes_per_token(c)
    rows = [numbers(row) for row in find(sections, "Step 4")[0][1]]
    assert all(row[4:] == pytest.approx(rows[0][4:], abs=0.002) for row in rows)        # turned in float32
    assert picture(sections)[1][-1][2] == numbers(find(sections, "Step 8")[0][1][0])[1]
    assert all(numbers(row)[2] < 0.2 for row in find(sections, "Step 9")[0][1])


def test_a_long_prompt_shows_every_token_and_an_over_long_one_is_refused(load, explained):
    load("tied")
    sections = explained("a" * 256)
    assert [numbers(row)[0] for row in find(sections, "Step 1")[0][1]] == list(range(256))
    assert max(width_of(line) for section in sections for line in section) <= 100
    with pytest.raises(ValueError, match="256 tokens.* 257"):
        llm.explain("a" * 257)
    with pytest.raises(ValueError, match="context of 640"):
        llm.explain("a" * 633)
    for look in (llm.explain, llm.trace):
        with pytest.raises(ValueError, match="empty"):
            look("")


def test_trace_needs_room_for_the_token_that_it_adds(tiny, monkeypatch):
    monkeypatch.setattr(llm, "MAX_POSITIONS", len(llm.encode("The")) + 1)
    with pytest.raises(ValueError, match="context"):
        llm.trace("The")


def test_no_line_is_wider_than_a_hundred_columns_with_the_real_model_s_sizes(explained, capsys, monkeypatch):
    """But 11 layers, which have numbers of two digits, too, and vectors of 20 numbers that are called 1024."""
    constants = {"N_LAYERS": 11, "D_MODEL": 20, "D_FF": 3072, "N_HEADS": 16, "N_KV": 8, "D_HEAD": 128,
                 "VOCAB": 151936, "MAX_POSITIONS": 40960, "EPS": 1e-6, "THETA": 1e6}
    for key, value in constants.items():
        monkeypatch.setattr(llm, key, value, raising=False)
    draw = np.random.default_rng(0).standard_normal
    monkeypatch.setattr(llm, "W", {name: llm.xp.asarray(draw(shape, dtype=np.float32) / 8)
                                   for name, shape in llm.expected_tensors(constants, True, True)})
    monkeypatch.setattr(llm, "tok", byte_tokenizer(), raising=False)
    monkeypatch.setattr(llm, "spell", lambda token_id, spell=llm.spell: spell(token_id) and "'" + "日" * 19)
    monkeypatch.setattr(llm, "shapes_of", lambda values, named=llm.shapes_of: named(values).replace("20", "1024"))
    sections = explained("a" * 13)
    assert max(width_of(line) for section in sections for line in section) <= 100
    llm.trace("a" * 9)
    out = capsys.readouterr().out
    assert max(map(width_of, out.splitlines())) <= 100 and "(1, 1024) (1024,) -> (1, 1024)" in out


def test_a_vocabulary_of_three_is_explained(tmp_path, capsys):
    from tokenizers import Tokenizer, models
    folder = make_checkpoint(tmp_path / "m", "untied", vocab_size=3, eos_token_id=None)
    Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "c": 2}, merges=[])).save(str(folder / "tokenizer.json"))
    llm.load_model(folder)
    llm.explain("abc")
    section = capsys.readouterr().out.split("Step 8")[1].split("\n\n")[0]
    assert sorted(numbers(row)[0] for row in section.splitlines()[3:]) == [0, 1, 2]


def test_weights_that_are_not_numbers_are_named(tiny, monkeypatch):
    name = "model.layers.1.mlp.up_proj.weight"
    monkeypatch.setitem(llm.W, name, llm.W[name] * math.nan)
    with pytest.raises(ValueError, match=rf"neither is {re.escape(name)}"):
        llm.explain(PROMPT)


def test_packed_weights_are_not_explained(tiny, monkeypatch):
    llm.use_kernels("fused")
    name = "model.layers.1.mlp.up_proj.weight"
    monkeypatch.setitem(llm.W, name, tuple(mx.quantize(llm.W[name])))
    with pytest.raises(ValueError, match="packed"):
        llm.explain(PROMPT)


def test_explain_prints_into_a_file_without_an_encoding(tiny):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        llm.explain(PROMPT)
    assert "####" in out.getvalue()


def test_special_tokens_are_spelled_and_texts_of_15_letters_are_whole(tiny, monkeypatch):
    assert llm.spell(llm.tok.token_to_id("<|im_end|>")) == "'<|im_end|>'"
    other = byte_tokenizer()
    other.add_tokens(["fifteen letters"])
    monkeypatch.setattr(llm, "tok", other)
    assert llm.spell(259) == "'fifteen letters'"


def test_long_token_texts_are_cut(tiny, monkeypatch):
    long = byte_tokenizer()
    long.add_tokens(["日" * 50])
    monkeypatch.setattr(llm, "tok", long)
    assert width_of(llm.spell(259)) <= 40


# ---- --trace -------------------------------------------------------------------------------------------------
@IN_ALL_SETS
def test_trace_shows_every_call_of_a_decode_pass(name, kernels, folder_of, capsys):
    llm.use_kernels(kernels)
    c = config_of(folder_of(name))
    heads, kv, head_dim = reference.head_sizes(c)
    d, vocab, n = c["hidden_size"], c["vocab_size"], len(llm.tok.encode(PROMPT).ids)
    before = {f: getattr(llm, f) for f in llm.WATCHED}
    llm.trace(PROMPT)
    assert {f: getattr(llm, f) for f in llm.WATCHED} == before
    lines = capsys.readouterr().out.splitlines()
    ff = c["intermediate_size"]
    x, q, k, all_k = (1, d), (heads, 1, head_dim), (kv, 1, head_dim), (kv, n + 1, head_dim)

    def linear(layer, part, into, out):
        return f"linear model.layers.{layer}.{part}_proj.weight: {(1, into)} -> {(1, out)} float32"

    def norm(weight, shape):
        return f"rms_norm {weight}.weight: {shape} {shape[-1:]} -> {shape} float32"

    expected = [f"forward: (1,) -> {(1, vocab)} float32", f"  embed: (1,) -> {x} float32"]
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}"
        qk_norms = [norm(f"{p}.self_attn.q_norm", q), norm(f"{p}.self_attn.k_norm", k)]
        expected += [
            f"  transformer_block layer {i}: {x} (1,) -> {x} float32", "    " + norm(f"{p}.input_layernorm", x),
            f"    attention layer {i}: {x} (1,) -> {x} float32",
            *["      " + line for line in [
                linear(i, "self_attn.q", d, heads * head_dim), linear(i, "self_attn.k", d, kv * head_dim),
                linear(i, "self_attn.v", d, kv * head_dim), *qk_norms * (c["model_type"] == "qwen3"),
                f"apply_rope: {q} {k} (1,) -> {q} {k} float32",
                f"extend_cache layer {i}: {k} {k} -> {all_k} {all_k} float32",
                f"attend: {q} {all_k} {all_k} -> {q} float32", linear(i, "self_attn.o", heads * head_dim, d)]],
            "    " + norm(f"{p}.post_attention_layernorm", x), f"    ffn layer {i}: {x} -> {x} float32",
            *["      " + line for line in [
                linear(i, "mlp.gate", d, ff), linear(i, "mlp.up", d, ff), f"silu: {(1, ff)} -> {(1, ff)} float32",
                linear(i, "mlp.down", ff, d)]]]
    expected += ["  " + norm("model.norm", x), f"  linear lm_head.weight: {x} -> {(1, vocab)} float32",
                 f"sample: {(vocab,)} -> () {'int64' if kernels == 'numpy' else 'uint32'}"]
    assert lines == expected


def test_the_functions_are_put_back_after_an_error(tiny, monkeypatch):
    monkeypatch.setattr(llm, "ffn", lambda x, layer_idx: 1 / 0)
    before = {name: getattr(llm, name) for name in llm.WATCHED}
    with pytest.raises(ZeroDivisionError):
        llm.explain(PROMPT)
    assert {name: getattr(llm, name) for name in llm.WATCHED} == before


# ---- The command line ----------------------------------------------------------------------------------------
@pytest.fixture
def shown(program):
    """A function from options to what the program prints for the bundled model."""
    def run(*args, **options):
        status, out, err = program("--model", ROOT / "tests/tiny-qwen3", *args, **options)
        assert (status, err) == (0, "")
        return out
    return run


def test_a_pipe_gets_no_colour_and_whole_characters(shown):
    out = shown("--explain", FOREIGN)
    assert "\x1b" not in out and "####" in out and "\ufffd" not in out
    assert len(find([s.splitlines() for s in out.split("\n\n")], "Steps 5 and 7")) == 1


def test_trace_from_the_command_line(shown):
    out = shown("--trace", PROMPT).splitlines()
    assert "      attend: (4, 1, 64) (2, 6, 64) (2, 6, 64) -> (4, 1, 64) float32" in out


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")    # the child calls exec at once
def test_titles_are_bold_on_a_terminal():
    pty = pytest.importorskip("pty")
    pid, terminal = pty.fork()
    if pid == 0:
        program, model = str(ROOT / "llm_inference.py"), str(ROOT / "tests/tiny-qwen3")
        os.execv(sys.executable, [sys.executable, program, "--model", model, "--explain", PROMPT])
    out = b""
    with contextlib.suppress(OSError):                  # how Linux says that the other end is closed
        while block := os.read(terminal, 65536):
            out += block
    os.close(terminal)
    assert os.waitpid(pid, 0)[1] == 0 and b"####" in out
    assert b"\x1b[1mStep 1" in out and out.count(b"\x1b[1m") == out.count(b"\x1b[0m") == 7
