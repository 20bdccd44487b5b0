"""Is the arithmetic right? Judged by Hugging Face's numbers (tests/golden), by recomputation, and by symmetry."""
from pathlib import Path

import llm_inference as llm
import mlx.core as mx
import pytest

GOLDEN = Path(__file__).resolve().parent / "golden"
KINDS = ("explicit", "fused")
SHAPES = ["untied", "one_kv_head", "as_many_kv_heads", "three_queries_a_kv_head", "sharded", "llama_no_head_dim",
          "tiny-qwen3"]                                 # six random checkpoints and the trained one


def golden(name):
    return mx.load(str(GOLDEN / f"{name}.safetensors"))


def fresh():
    return [None] * llm.N_LAYERS


def difference(found, wanted):
    """The largest difference, as a part of the largest number wanted."""
    return (mx.max(mx.abs(found.astype(mx.float32) - wanted)) / mx.max(mx.abs(wanted))).item()


def in_pieces(ids, sizes):
    """The logits of all ids, computed in pieces of the given sizes on one cache."""
    cache, rows, start = fresh(), [], 0
    for size in sizes:
        rows.append(llm.forward(ids[start:start + size], cache, start))
        start += size
    assert start == len(ids)
    return mx.concatenate(rows)


# ---- against Hugging Face transformers ----------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_hugging_face(name, kind):
    llm.use_kernels(kind)
    wanted = golden(name)
    assert difference(llm.forward(wanted["ids"].tolist(), fresh(), 0), wanted["logits"]) < 2e-5


@pytest.mark.parametrize("kind", KINDS)
def test_logits_after_500_tokens_equal_hugging_face(name, kind):
    """In pieces of 256 as prefill does it, and then one token on a long cache."""
    llm.use_kernels(kind)
    wanted, cache = golden(name), fresh()
    long = wanted["long"].tolist()
    assert difference(llm.prefill(long, fresh()), wanted["long.logits"]) < 2e-5
    llm.prefill(long[:-1], cache)
    assert difference(llm.forward(long[-1:], cache, len(long) - 1), wanted["long.logits"]) < 2e-5


@pytest.mark.parametrize("kind", KINDS)
def test_every_block_equals_hugging_face(name, kind):
    """Each block is given Hugging Face's input, so that an error is seen in the block that makes it."""
    llm.use_kernels(kind)
    wanted = golden(name)
    positions = mx.arange(len(wanted["ids"]))
    assert difference(llm.embed(wanted["ids"].tolist()), wanted["hidden.0"]) < 1e-6
    for i in range(llm.N_LAYERS):
        out = llm.transformer_block(wanted[f"hidden.{i}"], i, fresh(), positions)
        assert difference(out, wanted[f"hidden.{i + 1}"]) < 2e-5, f"block {i}"


def test_greedy_tokens_equal_hugging_face(name):
    wanted, cache, made = golden(name), fresh(), []
    ids = wanted["ids"].tolist()
    logits = llm.forward(ids, cache, 0)
    for pos in range(len(ids), len(ids) + 24):
        made.append(llm.sample(logits[-1]).item())
        logits = llm.forward(made[-1:], cache, pos)
    assert made == wanted["greedy"].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_as_near_to_float32_as_hugging_face_is(name, kind, folder_of):
    """Two bfloat16 computations round differently. Measured over all checkpoints: 1 to 3 percent of the largest
    logit between either of them and float32, and between the two."""
    llm.load_model(folder_of(name), mx.bfloat16)
    llm.use_kernels(kind)
    wanted = golden(name)
    logits = llm.forward(wanted["ids"].tolist(), fresh(), 0)
    assert logits.dtype == mx.bfloat16
    assert difference(logits, wanted["logits.bfloat16"]) < 0.04
    assert difference(logits, wanted["logits"]) < 0.04


# ---- cached against recomputed ------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SHAPES, indirect=True)
@pytest.mark.parametrize("sizes", [(1,) * 20, (7, 1, 7, 5), (16, 1, 1, 1, 1), (18, 2)], ids=str)
def test_pieces_on_a_cache_equal_one_pass(name, sizes, kind):
    llm.use_kernels(kind)
    ids = golden(name)["long"].tolist()[:20]
    assert difference(in_pieces(ids, sizes), llm.forward(ids, fresh(), 0)) < 1e-5


@pytest.mark.parametrize("name", SHAPES, indirect=True)
def test_cached_decode_equals_recomputed_decode(name):
    """64 tokens, each chosen from the cache and, again, from a forward pass over the whole text."""
    ids, cache = golden(name)["ids"].tolist(), fresh()
    cached = llm.forward(ids, cache, 0)
    for _ in range(64):
        recomputed = llm.forward(ids, fresh(), 0, last_only=True)
        assert difference(cached[-1:], recomputed) < 1e-5
        ids.append(llm.sample(cached[-1]).item())
        assert ids[-1] == llm.sample(recomputed[-1]).item()
        cached = llm.forward(ids[-1:], cache, len(ids) - 1)


def test_pieces_that_cross_the_cache_s_room_equal_one_pass(tiny):
    """The cache grows by 256 positions at a time: cross that border by one token, by several, and exactly."""
    ids = golden("tiny-qwen3")["long"].tolist()[:300]
    whole = llm.forward(ids, fresh(), 0)
    for sizes in [(256, 44), (255, 1, 1, 43), (250, 20, 30), (100, 200)]:
        assert difference(in_pieces(ids, sizes), whole) < 1e-5, sizes


def test_a_copied_cache_is_not_changed_through_the_original(tiny):
    """Two continuations of one prompt, from one cache copied as a list, do not write into each other."""
    cache = fresh()
    llm.forward([10, 11, 12], cache, 0)
    other = list(cache)
    first = llm.forward([20], cache, 3)
    second = llm.forward([30], other, 3)
    assert difference(first, llm.forward([10, 11, 12, 20], fresh(), 0)[-1:]) < 1e-5
    assert difference(second, llm.forward([10, 11, 12, 30], fresh(), 0)[-1:]) < 1e-5
    assert difference(llm.forward([40], cache, 4), llm.forward([10, 11, 12, 20, 40], fresh(), 0)[-1:]) < 1e-5


def test_last_only_is_the_last_row(name):
    ids = golden(name)["ids"].tolist()
    last = llm.forward(ids, fresh(), 0, last_only=True)
    assert last.shape == (1, llm.VOCAB)
    assert difference(last, llm.forward(ids, fresh(), 0)[-1:]) < 1e-5


# ---- what must hold whatever the weights --------------------------------------------------------------------
def test_a_later_token_changes_no_earlier_logit(name):
    ids = golden(name)["ids"].tolist()
    logits = llm.forward(ids, fresh(), 0)
    for i in range(1, len(ids)):
        changed = ids[:i] + [(ids[i] + 1) % 200] + ids[i + 1:]
        rows = llm.forward(changed, fresh(), 0)
        assert difference(rows[:i], logits[:i]) < 1e-6
        assert difference(rows[i:], logits[i:]) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_rope_depends_on_relative_position_only(name, kind):
    llm.use_kernels(kind)
    q = mx.random.normal((llm.N_HEADS, 1, llm.D_HEAD), key=mx.random.key(1))
    k = mx.random.normal((llm.N_HEADS, 1, llm.D_HEAD), key=mx.random.key(2))

    def product(q_pos, k_pos):
        return (llm.apply_rope(q, q, [q_pos])[0] * llm.apply_rope(k, k, [k_pos])[1]).sum(axis=-1)

    near = product(3, 1)
    assert difference(product(203, 201), near) < 1e-4
    assert difference(product(1, 3), near) > 1e-2       # the other way round is something else
    assert difference(product(7, 1), near) > 1e-2       # and so is another distance
    assert difference(product(0, 0), (q * k).sum(axis=-1)) < 1e-6


def test_rope_turns_and_does_not_stretch(name):
    q = mx.random.normal((llm.N_HEADS, 9, llm.D_HEAD), key=mx.random.key(3))
    k = mx.random.normal((llm.N_KV, 9, llm.D_HEAD), key=mx.random.key(4))
    for before, after in zip((q, k), llm.apply_rope(q, k, list(range(9)))):
        assert difference((after ** 2).sum(axis=-1), (before ** 2).sum(axis=-1)) < 1e-5


def test_the_residual_stream_keeps_the_weights_type(folder_of):
    """A float32 table or norm that leaks into the stream would make every later product convert its weights."""
    for dtype in (mx.float16, mx.bfloat16, mx.float32):
        llm.load_model(folder_of("untied"), dtype)
        for kind in KINDS:
            llm.use_kernels(kind)
            x = llm.transformer_block(llm.embed([1, 2, 3]), 0, cache := fresh(), mx.arange(3))
            assert {a.dtype for a in [x, llm.W["lm_head.weight"], *cache[0][:2]]} == {dtype}, (dtype, kind)


def test_large_activations_do_not_overflow_in_float16(folder_of):
    """Squares of 300 exceed float16's 65,504; the norm is taken in float32."""
    llm.load_model(folder_of("untied"), mx.float16)
    x = mx.full((1, llm.D_MODEL), 300, dtype=mx.float16)
    assert difference(llm.rms_norm(x, mx.ones(llm.D_MODEL, dtype=mx.float16)), mx.ones((1, llm.D_MODEL))) < 1e-3


# ---- the cache's cost ---------------------------------------------------------------------------------------
def test_a_decoded_token_copies_neither_cache_nor_heads(tiny):
    """Peak memory of one more attention step stays far below a copy of the 4,000 positions' keys."""
    k = mx.zeros((llm.N_KV, 4000, llm.D_HEAD))
    cache = fresh()
    mx.eval(llm.extend_cache(cache, 0, k, k))
    q, one = mx.zeros((llm.N_HEADS, 1, llm.D_HEAD)), mx.zeros((llm.N_KV, 1, llm.D_HEAD))
    mx.eval(q, one, cache)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    keys, values = llm.extend_cache(cache, 0, one, one)
    mx.eval(llm.attend(q, keys, values), cache)
    assert mx.get_peak_memory() - before < k.nbytes / 4
