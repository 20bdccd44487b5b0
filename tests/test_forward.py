"""Is the arithmetic right? Judged by Hugging Face's numbers (tests/golden), by recomputation, and by symmetry."""
import itertools
import tracemalloc
from pathlib import Path

import llm_inference as llm
import mlx.core as mx
import numpy as np
import pytest

GOLDEN = Path(__file__).resolve().parent / "golden"
KINDS = llm.KINDS                                       # "explicit", "fused", "numpy"
SHAPES = ["one_kv_head", "as_many_kv_heads", "three_queries_a_kv_head", "sharded", "llama_no_head_dim"]


def golden(name):
    return mx.load(str(GOLDEN / f"{name}.safetensors"))


def fresh():
    return [None] * llm.N_LAYERS


def each_set(kinds=KINDS):
    """Put each set of functions in place, one after another, and give its name."""
    for kind in kinds:
        llm.use_kernels(kind)
        yield kind


def difference(found, wanted):
    """The largest difference, as a part of the largest number wanted."""
    found, wanted = (np.array(mx.array(x).astype(mx.float32)) for x in (found, wanted))
    return abs(found - wanted).max() / abs(wanted).max()


def in_pieces(ids, sizes):
    """The logits of all ids, computed in pieces of the given sizes on one cache."""
    cache, rows, start = fresh(), [], 0
    for size in sizes:
        rows.append(llm.forward(ids[start:start + size], cache, start))
        start += size
    assert start == len(ids)
    return mx.concatenate(rows)


# ---- against Hugging Face transformers ----------------------------------------------------------------------
def test_logits_equal_hugging_face(name):
    wanted = golden(name)
    for kind in each_set():
        assert difference(llm.forward(wanted["ids"].tolist(), fresh(), 0), wanted["logits"]) < 2e-5, kind


def test_logits_after_500_tokens_equal_hugging_face(name):
    """In pieces of 256 as prefill does it, and then one token on a long cache: with NumPy for every one of
    the checkpoints, and with the sets that take longer for one."""
    wanted = golden(name)
    long = wanted["long"].tolist()
    for kind in each_set(KINDS if name == "three_queries_a_kv_head" else ["numpy"]):
        cache = fresh()
        assert difference(llm.prefill(long, fresh()), wanted["long.logits"]) < 2e-5, kind
        llm.prefill(long[:-1], cache)
        assert difference(llm.forward(long[-1:], cache, len(long) - 1), wanted["long.logits"]) < 2e-5, kind


def test_every_block_equals_hugging_face(name):
    """Each block is given Hugging Face's input, so that an error is seen in the block that makes it."""
    wanted = golden(name)
    positions = mx.arange(len(wanted["ids"]))
    for kind in each_set():
        assert difference(llm.embed(wanted["ids"].tolist()), wanted["hidden.0"]) < 1e-6, kind
        for i in range(llm.N_LAYERS):
            out = llm.transformer_block(wanted[f"hidden.{i}"], i, fresh(), positions)
            assert difference(out, wanted[f"hidden.{i + 1}"]) < 2e-5, f"{kind}, block {i}"


def test_greedy_tokens_equal_hugging_face(name):
    wanted = golden(name)
    ids = wanted["ids"].tolist()
    for kind in each_set():
        cache, made = fresh(), []
        logits = llm.forward(ids, cache, 0)
        for pos in range(len(ids), len(ids) + 8):
            made.append(llm.sample(logits[-1]).item())
            logits = llm.forward(made[-1:], cache, pos)
        assert made == wanted["greedy"].tolist()[:8], kind


def test_bfloat16_is_as_near_to_float32_as_hugging_face_is(name, load):
    """Two bfloat16 computations round differently. Measured over all checkpoints: 1 to 3 percent of the largest
    logit between either of them and float32, and between the two."""
    load(name, mx.bfloat16)
    wanted = golden(name)
    for kind in each_set(["explicit", "fused"]):
        logits = llm.forward(wanted["ids"].tolist(), fresh(), 0)
        assert logits.dtype == mx.bfloat16
        assert difference(logits, wanted["logits.bfloat16"]) < 0.04, kind
        assert difference(logits, wanted["logits"]) < 0.04, kind


def test_float16_is_eight_times_nearer_to_float32_than_bfloat16_may_be(name, load):
    """It has three more bits."""
    load(name, mx.float16)
    for kind in each_set(["explicit", "fused"]):
        logits = llm.forward(golden(name)["ids"].tolist(), fresh(), 0)
        assert logits.dtype == mx.float16
        assert difference(logits, golden(name)["logits"]) < 0.04 / 8, kind


# ---- the three sets of functions ----------------------------------------------------------------------------
def test_each_function_of_a_set_is_put_in_place(tiny):
    for i, kind in enumerate(each_set()):
        assert llm.kernels == kind
        for function, versions in llm.KERNELS.items():
            assert getattr(llm, function) is versions[i], (kind, function)


def test_each_set_has_its_own_functions_in_the_order_of_their_names():
    """But for one: NumPy needs no queue of passes, so it takes the plain next_tokens."""
    for function, versions in llm.KERNELS.items():
        numpy_name = "next_tokens" if function == "next_tokens" else f"numpy_{function}"
        for version, name in zip(versions, [function, f"fused_{function}", numpy_name], strict=True):
            assert version.__name__ in (name, "<lambda>") and (version.__name__ == name) == hasattr(llm, name)
        assert len(set(versions)) == (2 if function == "next_tokens" else 3)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("first", [True, False])
def test_numpy_means_the_explicit_functions_where_weights_have_16_bits(folder_of, dtype, first):
    """Whether it was asked for before or after the model was loaded; in float32 it means itself again."""
    llm.load_model(folder_of("tiny-qwen3"), mx.float32 if first else dtype)
    llm.use_kernels("numpy")
    if first:
        llm.load_model(folder_of("tiny-qwen3"), dtype)
    for name, (explicit, _, _) in llm.KERNELS.items():
        assert getattr(llm, name) is explicit, name
    assert llm.forward([1, 2], fresh(), 0).dtype == dtype
    llm.load_model(folder_of("tiny-qwen3"), mx.float32)
    for name, (_, _, numpy) in llm.KERNELS.items():
        assert getattr(llm, name) is numpy, name


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_mlx_arrays_in_float32(tiny, kind):
    llm.use_kernels(kind)
    cache = fresh()
    for logits in [llm.forward([1, 2, 3], cache, 0), llm.forward([4], cache, 3), llm.prefill([5, 6], cache, 4),
                   llm.forward(list(range(40)), fresh(), 0, last_only=True), llm.forward(mx.array([7, 8]), fresh(), 0)]:
        assert isinstance(logits, mx.array) and logits.dtype == mx.float32


@pytest.mark.parametrize("first, second", [*itertools.permutations(KINDS, 2)])
def test_a_cache_that_another_set_filled_is_refused(tiny, first, second):
    llm.use_kernels(first)
    llm.forward([1, 2, 3], cache := fresh(), 0)
    llm.use_kernels(second)
    with pytest.raises(ValueError, match="unpack"):
        llm.forward([4], cache, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_model_and_a_new_weight_are_seen(tiny, folder_of, kind):
    """Nothing of the weights is kept elsewhere than in W."""
    llm.use_kernels(kind)
    before = llm.forward([1, 2, 3], fresh(), 0)
    for weight in ("model.layers.1.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight",
                   "model.embed_tokens.weight"):
        kept, llm.W[weight] = llm.W[weight], llm.W[weight] * 2
        assert difference(llm.forward([1, 2, 3], fresh(), 0), before) > 1e-2, weight
        llm.W[weight] = kept
    assert difference(llm.forward([1, 2, 3], fresh(), 0), before) == 0
    llm.load_model(folder_of("untied"), mx.float32)
    ids = golden("untied")["ids"].tolist()
    assert difference(llm.forward(ids, fresh(), 0), golden("untied")["logits"]) < 2e-5


WEIGHTS = ["model.embed_tokens.weight", "model.layers.0.input_layernorm.weight",
           "model.layers.0.self_attn.k_proj.weight", "model.layers.1.self_attn.q_norm.weight",
           "model.layers.2.mlp.gate_proj.weight", "lm_head.weight"]


def loss_of(weight):
    def loss(value):
        kept, llm.W[weight] = llm.W[weight], value
        try:
            return mx.logsumexp(llm.forward([1, 2, 3, 4], fresh(), 0)[-1])
        finally:
            llm.W[weight] = kept

    return loss


@pytest.mark.parametrize("weight", WEIGHTS)
def test_the_explicit_functions_give_gradients(load, weight):
    """Along a random direction the slope is what the loss says a small step to either side."""
    load("untied")
    llm.use_kernels("explicit")
    loss, w = loss_of(weight), llm.W[weight]
    gradient = mx.grad(loss)(w)
    step = 1e-2 * gradient / mx.linalg.norm(gradient)
    slope = ((loss(w + step) - loss(w - step)) / 2).item()
    assert slope == pytest.approx(mx.sum(gradient * step).item(), rel=0.02)
    assert slope > 0


@pytest.mark.parametrize("weight", WEIGHTS)
def test_the_numpy_functions_refuse_to_give_gradients(load, weight):
    """Zeros would be worse."""
    load("untied")
    llm.use_kernels("numpy")
    with pytest.raises(ValueError, match='use_kernels."explicit". has'):
        mx.grad(loss_of(weight))(llm.W[weight])


# ---- cached against recomputed ------------------------------------------------------------------------------
@pytest.mark.parametrize("name", SHAPES, indirect=True)
def test_pieces_on_a_cache_equal_one_pass(name):
    ids = golden(name)["long"].tolist()[:8]
    for kind in each_set():
        whole = llm.forward(ids, fresh(), 0)
        for sizes in [(1,) * 8, (5, 1, 2), (6, 2)]:
            assert difference(in_pieces(ids, sizes), whole) < 1e-5, (kind, sizes)


@pytest.mark.parametrize("name", SHAPES, indirect=True)
def test_cached_decode_equals_recomputed_decode(name):
    """8 tokens, each chosen from the cache and, again, from a forward pass over the whole text."""
    for kind in each_set():
        ids, cache = golden(name)["ids"].tolist(), fresh()
        cached = llm.forward(ids, cache, 0)
        for _ in range(8):
            recomputed = llm.forward(ids, fresh(), 0, last_only=True)
            assert difference(cached[-1:], recomputed) < 1e-5, kind
            ids.append(llm.sample(cached[-1]).item())
            assert ids[-1] == llm.sample(recomputed[-1]).item(), kind
            cached = llm.forward(ids[-1:], cache, len(ids) - 1)


@pytest.mark.parametrize("name", ["untied"], indirect=True)
def test_pieces_that_cross_the_cache_s_room_equal_one_pass(name):
    """The cache's room is a multiple of 256, or 256 more: cross it by one token, by several, and exactly."""
    ids = golden(name)["long"].tolist()[:270]
    for kind in each_set():
        whole = llm.forward(ids, fresh(), 0)
        for sizes in [(256, 14), (255, 1, 1, 13), (250, 10, 10), (100, 170), (1, 255, 1, 13),
                      (1, 256, 1, 12), (10, 20, 235, 1, 1, 3)]:
            assert difference(in_pieces(ids, sizes), whole) < 1e-5, (kind, sizes)


@pytest.mark.parametrize("kind", KINDS)
def test_a_copied_cache_is_not_changed_through_the_original(tiny, kind):
    """Continuations of one prompt, from one cache copied as a list, do not write into each other."""
    llm.use_kernels(kind)
    cache = fresh()
    llm.forward([10, 11, 12], cache, 0)
    other, third = list(cache), list(cache)
    first = llm.forward([20], cache, 3)
    second = llm.forward([30], other, 3)
    assert difference(first, llm.forward([10, 11, 12, 20], fresh(), 0)[-1:]) < 1e-5
    assert difference(second, llm.forward([10, 11, 12, 30], fresh(), 0)[-1:]) < 1e-5
    later = list(cache)
    assert difference(llm.forward([40], cache, 4), llm.forward([10, 11, 12, 20, 40], fresh(), 0)[-1:]) < 1e-5
    for copy, ids in [(other, [10, 11, 12, 30, 50, 51]), (third, [10, 11, 12, 60]), (later, [10, 11, 12, 20, 70]),
                      (cache, [10, 11, 12, 20, 40, 80])]:
        held = {6: 4, 4: 3, 5: 4}[len(ids)] if copy is not cache else 5
        assert difference(llm.forward(ids[held:], copy, held)[-1:], llm.forward(ids, fresh(), 0)[-1:]) < 1e-5


def test_last_only_is_the_last_row(name):
    ids = golden(name)["ids"].tolist()
    for kind in each_set():
        last = llm.forward(ids, fresh(), 0, last_only=True)
        assert last.shape == (1, llm.VOCAB)
        assert difference(last, llm.forward(ids, fresh(), 0)[-1:]) < 1e-5, kind


# ---- what must hold whatever the weights --------------------------------------------------------------------
def test_a_later_token_changes_no_earlier_logit(name):
    ids = golden(name)["ids"].tolist()
    for kind in each_set():
        logits = llm.forward(ids, fresh(), 0)
        for i in (1, len(ids) // 2, len(ids) - 1):
            changed = ids[:i] + [(ids[i] + 1) % 200] + ids[i + 1:]
            rows = llm.forward(changed, fresh(), 0)
            assert difference(rows[:i], logits[:i]) < 1e-6, (kind, i)
            assert difference(rows[i:], logits[i:]) > 1e-3, (kind, i)


def test_rope_depends_on_relative_position_only(name):
    q = mx.random.normal((llm.N_HEADS, 1, llm.D_HEAD), key=mx.random.key(1))
    k = mx.random.normal((llm.N_HEADS, 1, llm.D_HEAD), key=mx.random.key(2))

    def product(q_pos, k_pos):
        turned_q, turned_k = llm.apply_rope(q, q, [q_pos])[0], llm.apply_rope(k, k, [k_pos])[1]
        return (mx.array(turned_q) * mx.array(turned_k)).sum(axis=-1)

    for kind in each_set():
        near = product(3, 1)
        assert difference(product(203, 201), near) < 1e-4, kind
        assert difference(product(1, 3), near) > 1e-2, kind     # the other way round is something else
        assert difference(product(7, 1), near) > 1e-2, kind     # and so is another distance
        assert difference(product(0, 0), (q * k).sum(axis=-1)) < 1e-6, kind


def test_rope_turns_and_does_not_stretch(name):
    q = mx.random.normal((llm.N_HEADS, 9, llm.D_HEAD), key=mx.random.key(3))
    k = mx.random.normal((llm.N_KV, 9, llm.D_HEAD), key=mx.random.key(4))
    for kind in each_set():
        for before, after in zip((q, k), llm.apply_rope(q, k, list(range(9)))):
            assert difference((mx.array(after) ** 2).sum(axis=-1), (before ** 2).sum(axis=-1)) < 1e-5, kind


def test_the_residual_stream_keeps_the_weights_type(load):
    """A float32 table or norm that leaks into the stream would make every later product convert its weights."""
    for dtype in (mx.float16, mx.bfloat16, mx.float32):
        load("untied", dtype)
        for kind in ("explicit", "fused"):
            llm.use_kernels(kind)
            x = llm.transformer_block(llm.embed([1, 2, 3]), 0, cache := fresh(), mx.arange(3))
            assert {a.dtype for a in [x, llm.W["lm_head.weight"], *cache[0][:2]]} == {dtype}, (dtype, kind)


def test_large_activations_do_not_overflow_in_float16(load):
    """Squares of 300 exceed float16's 65,504; the norm is taken in float32."""
    load("untied", mx.float16)
    for kind in ("explicit", "fused"):
        llm.use_kernels(kind)
        x = mx.full((1, llm.D_MODEL), 300, dtype=mx.float16)
        ones = mx.ones(llm.D_MODEL, dtype=mx.float16)
        assert difference(llm.rms_norm(x, ones), mx.ones((1, llm.D_MODEL))) < 1e-3, kind


# ---- the cache's cost ---------------------------------------------------------------------------------------
def test_a_decoded_token_copies_neither_cache_nor_heads(tiny):
    """With the fused functions peak memory of one more attention step stays far below a copy of 4,000 keys."""
    llm.use_kernels("fused")
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


def test_a_decoded_token_copies_no_cache_with_numpy(tiny):
    """NumPy tells tracemalloc what it allocates: far less than a copy of 4,000 keys, and the arrays stay in place."""
    llm.use_kernels("numpy")
    k = np.zeros((llm.N_KV, 4000, llm.D_HEAD), dtype=np.float32)
    cache = fresh()
    llm.extend_cache(cache, 0, k, k)
    keys = cache[0][0]
    q, one = k[:1, :1].repeat(llm.N_HEADS, axis=0), k[:, :1]
    llm.extend_cache(cache, 0, one, one)
    tracemalloc.start()
    try:
        llm.attend(q, *llm.extend_cache(cache, 0, one, one))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert cache[0][0] is keys and cache[0][2] == 4002
    assert peak < k.nbytes / 4
