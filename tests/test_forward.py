"""Is the arithmetic right? Judged by Hugging Face's numbers (tests/golden), by recomputation, and by symmetry."""
import random
import tracemalloc
from pathlib import Path

import llm_inference as llm
import mlx.core as mx
import numpy as np
import pytest

GOLDEN = Path(__file__).resolve().parent / "golden"
KINDS = list(llm.KERNELS)                               # "explicit", "fused", "numpy"
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
    found, wanted = (np.asarray(mx.array(x).astype(mx.float32)) for x in (found, wanted))
    assert found.shape == wanted.shape
    return abs(found - wanted).max() / abs(wanted).max()


def in_pieces(ids, sizes):
    """The logits of all ids, computed in pieces of the given sizes on one cache."""
    cache, rows, start = fresh(), [], 0
    for size in sizes:
        rows.append(llm.forward(ids[start:start + size], cache, start))
        start += size
    assert start == len(ids)
    return llm.xp.concatenate(rows)


# ---- against Hugging Face transformers -----------------------------------------------------------------------
def test_logits_equal_hugging_face(name):
    wanted = golden(name)
    for kind in each_set():
        assert difference(llm.forward(wanted["ids"].tolist(), fresh(), 0), wanted["logits"]) < 2e-5, kind


def test_logits_after_500_tokens_equal_hugging_face(name):
    """In pieces of 256 as prefill does it, and then one token on a long cache. The largest only with NumPy."""
    wanted = golden(name)
    long = wanted["long"].tolist()
    assert difference(llm.prefill(long, fresh()), wanted["long.logits"]) < 2e-5
    for kind in each_set(["numpy"] if name == "tiny-qwen3" else KINDS):
        cache = fresh()
        llm.prefill(long[:-1], cache)
        assert difference(llm.forward(long[-1:], cache, len(long) - 1), wanted["long.logits"]) < 2e-5, kind


def test_every_block_equals_hugging_face(name):
    """Each block is given Hugging Face's input, so that an error is seen in the block that makes it."""
    wanted = golden(name)
    for kind in each_set():
        positions = llm.xp.arange(len(wanted["ids"]))
        assert difference(llm.embed(wanted["ids"].tolist()), wanted["hidden.0"]) < 1e-6, kind
        for i in range(llm.N_LAYERS):
            out = llm.transformer_block(llm.xp.asarray(wanted[f"hidden.{i}"]), i, fresh(), positions)
            assert difference(out, wanted[f"hidden.{i + 1}"]) < 2e-5, f"{kind}, block {i}"


def test_greedy_tokens_equal_hugging_face(name):
    wanted = golden(name)
    ids = wanted["ids"].tolist()
    for kind in each_set():
        cache, made = fresh(), []
        logits = llm.forward(ids, cache, 0)
        for pos in range(len(ids), len(ids) + 8):
            made.append(int(llm.sample(logits[-1])))
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


# ---- the weights ---------------------------------------------------------------------------------------------
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


# ---- cached against recomputed -------------------------------------------------------------------------------
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
            ids.append(int(llm.sample(cached[-1])))
            assert ids[-1] == int(llm.sample(recomputed[-1])), kind
            cached = llm.forward(ids[-1:], cache, len(ids) - 1)


@pytest.mark.parametrize("name", ["untied"], indirect=True)
def test_pieces_that_cross_the_cache_s_room_equal_one_pass(name):
    """A cache has room for 256 more tokens than it held when it grew: cross it by one, by several, and exactly."""
    ids = golden(name)["long"].tolist()[:270]
    for kind in each_set():
        whole = llm.forward(ids, fresh(), 0)
        for sizes in [(256, 14), (1, 256, 1, 12)] if kind == "explicit" else [
                (256, 14), (255, 1, 1, 13), (250, 10, 10), (100, 170), (1, 255, 1, 13), (1, 256, 1, 12),
                (10, 20, 235, 1, 1, 3)]:
            assert difference(in_pieces(ids, sizes), whole) < 1e-5, (kind, sizes)


def rolled_back(cache, n):
    """A copy of the cache, cut off after n tokens, on the same arrays."""
    if llm.kernels == "explicit":
        return [(keys[:, :n], values[:, :n]) for keys, values in cache]
    return [(keys, values, n) for keys, values, _ in cache]


@pytest.mark.parametrize("kind", KINDS)
def test_texts_that_go_on_from_copies_of_one_cache_are_all_right(tiny, kind):
    """Two copies from their end, one that is cut off before it, and then each of them again."""
    llm.use_kernels(kind)
    ids, cache = [10, 11, 12, 13], fresh()
    llm.forward(ids, cache, 0)
    copy, shorter = list(cache), rolled_back(cache, 2)
    for which, text, new in [(cache, ids, [20]), (copy, ids, [30, 31]), (shorter, ids[:2], [40, 41]),
                             (cache, [*ids, 20], [50]), (copy, [*ids, 30, 31], [60]),
                             (shorter, [*ids[:2], 40, 41], [70])]:
        found = llm.forward(new, which, len(text), last_only=True)
        assert difference(found, llm.forward(text + new, fresh(), 0, last_only=True)) < 1e-5, (text, new)


@pytest.mark.parametrize("kind", KINDS)
def test_copies_of_a_cache_hold_their_own_keys_and_values(tiny, kind):
    """300 times one of many texts goes on by a few rows or fills its room; before, it may be copied or cut off."""
    llm.use_kernels(kind)
    choose, numbers = random.Random(5), np.random.default_rng(5)
    texts, full = [(np.zeros((llm.N_KV, 0, llm.D_HEAD), dtype=np.float32), [None])], 0

    def go_on(which, n):
        rows, cache = texts[which]
        new = numbers.standard_normal((llm.N_KV, n, llm.D_HEAD), dtype=np.float32)
        texts[which] = np.concatenate([rows, new], axis=1), cache
        for found, wanted in zip(llm.extend_cache(cache, 0, *map(llm.xp.asarray, (new, -new))), (1, -1)):
            assert np.array_equal(found, wanted * texts[which][0])

    for step in range(300):
        which = choose.randrange(len(texts))
        rows, cache = texts[which]
        held = rows.shape[1]
        if step % 2:
            texts.append((rows, list(cache)))
            if step % 4 == 1 and held > 3:
                texts[which] = rows[:, :held - 3], rolled_back(cache, held - 3)
        elif held < 700:
            room = cache[0][0].shape[1] - held if cache[0] else 0
            n = choose.choice([1, 1, 1, 2, 9, room or 1])
            go_on(which, n)
            full += n == room
    assert full > 5 or kind == "explicit"               # which has no room
    for which in range(len(texts)):
        go_on(which, 1)


def test_last_only_is_the_last_row(name):
    ids = golden(name)["ids"].tolist()
    for kind in each_set():
        last = llm.forward(ids, fresh(), 0, last_only=True)
        assert last.shape == (1, llm.VOCAB)
        assert difference(last, llm.forward(ids, fresh(), 0)[-1:]) < 1e-5, kind


# ---- what must hold whatever the weights ---------------------------------------------------------------------
def test_a_later_token_changes_no_earlier_logit(name):
    ids = golden(name)["ids"].tolist()
    for kind in each_set():
        logits = llm.forward(ids, fresh(), 0)
        for i in (1, len(ids) // 2, len(ids) - 1):
            changed = ids[:i] + [(ids[i] + 1) % 200] + ids[i + 1:]
            rows = llm.forward(changed, fresh(), 0)
            assert difference(rows[:i], logits[:i]) < 1e-6, (kind, i)
            assert difference(rows[i:], logits[i:]) > 1e-3, (kind, i)


def random_heads(heads, n, seed):
    """(heads, n, D_HEAD) random numbers, an array of the set in place."""
    return llm.xp.asarray(mx.random.normal((heads, n, llm.D_HEAD), key=mx.random.key(seed)))


def test_rope_depends_on_relative_position_only(name):
    def product(q_pos, k_pos):
        q, k = (random_heads(llm.N_HEADS, 1, seed) for seed in (1, 2))
        turned_q, _ = llm.apply_rope(q, q, llm.xp.arange(q_pos, q_pos + 1))
        _, turned_k = llm.apply_rope(k, k, llm.xp.arange(k_pos, k_pos + 1))
        return (turned_q * turned_k).sum(axis=-1)

    for kind in each_set():
        near = product(3, 1)
        assert difference(product(203, 201), near) < 1e-4, kind
        assert difference(product(1, 3), near) > 1e-2, kind     # the other way round is something else
        assert difference(product(7, 1), near) > 1e-2, kind     # and so is another distance
        q, k = (random_heads(llm.N_HEADS, 1, seed) for seed in (1, 2))
        assert difference(product(0, 0), (q * k).sum(axis=-1)) < 1e-6, kind


def test_rope_turns_and_does_not_stretch(name):
    for kind in each_set():
        q, k = random_heads(llm.N_HEADS, 9, 3), random_heads(llm.N_KV, 9, 4)
        for before, after in zip((q, k), llm.apply_rope(q, k, llm.xp.arange(9))):
            assert difference((after ** 2).sum(axis=-1), (before ** 2).sum(axis=-1)) < 1e-5, kind


def test_the_residual_stream_keeps_the_weights_type(load):
    """A float32 table or norm that leaks into the stream would make every later product convert its weights."""
    for dtype in (mx.float16, mx.bfloat16, mx.float32):
        load("untied", dtype)
        for kind in ("explicit", "fused"):
            llm.use_kernels(kind)
            x = llm.transformer_block(llm.embed([1, 2, 3]), 0, cache := fresh(), mx.arange(3))
            assert {a.dtype for a in [x, llm.W["lm_head.weight"], *cache[0][:2]]} == {dtype}, (dtype, kind)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_silu_in_16_bits_is_the_float32_result_rounded_once(dtype):
    """For every finite number of the type: 65,536 patterns of bits, without those that are infinite or no number."""
    llm.use_kernels("explicit")
    every = mx.arange(65536).astype(mx.uint16).view(dtype)
    gate = every[mx.array(np.flatnonzero(mx.isfinite(every)))]
    assert gate.size == {mx.bfloat16: 65536 - 2 * 128, mx.float16: 65536 - 2 * 1024}[dtype]
    exact = np.asarray(gate.astype(mx.float32)).astype(np.float64)
    with np.errstate(over="ignore"):
        exact = exact / (1 + np.exp(-exact))
    in_32 = llm.silu(gate.astype(mx.float32))
    assert np.allclose(in_32, exact, rtol=1e-5, atol=1e-36)
    found = llm.silu(gate)
    assert found.dtype == dtype and mx.array_equal(found.view(mx.uint16), in_32.astype(dtype).view(mx.uint16))


def test_large_activations_do_not_overflow_in_float16(load):
    """Squares of 300 exceed float16's 65,504; the norm is taken in float32."""
    load("untied", mx.float16)
    for kind in ("explicit", "fused"):
        llm.use_kernels(kind)
        x = mx.full((1, llm.D_MODEL), 300, dtype=mx.float16)
        ones = mx.ones(llm.D_MODEL, dtype=mx.float16)
        assert difference(llm.rms_norm(x, ones), mx.ones((1, llm.D_MODEL))) < 1e-3, kind


# ---- memory --------------------------------------------------------------------------------------------------
def peak_memory(run):
    """How many bytes run() needs on top of what is held before. NumPy tells tracemalloc what it allocates."""
    if llm.xp is np:
        tracemalloc.start()
        try:
            run()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    run()
    return mx.get_peak_memory() - before


@pytest.mark.parametrize("kind", ["fused", "numpy"])
def test_a_decoded_token_copies_neither_cache_nor_heads(tiny, kind):
    """One more attention step on 4,000 cached tokens needs far less memory than a copy of their keys."""
    llm.use_kernels(kind)
    k, q = llm.xp.zeros((llm.N_KV, 4000, llm.D_HEAD), dtype=llm.xp.float32), random_heads(llm.N_HEADS, 1, 1)
    one, cache = k[:, :1] + 1, fresh()
    mx.eval(llm.extend_cache(cache, 0, k, k), q, one, cache)

    def step():
        mx.eval(llm.attend(q, *llm.extend_cache(cache, 0, one, one)), cache)

    step()
    keys = cache[0][0] if kind == "numpy" else None     # which would make MLX copy them
    assert peak_memory(step) < k.nbytes / 4
    assert cache[0][2] == 4002 and (kind == "fused" or np.shares_memory(cache[0][0], keys))


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_prefill_needs_the_memory_of_its_last_piece(load, monkeypatch, kind):
    """As much as the pass over that piece needs on the cache of all others, and far less than one pass over all."""
    load("one_kv_head")
    monkeypatch.setattr(llm, "CHUNK", 32)
    llm.use_kernels(kind)
    ids, cache, forward, passes = [(7 * i) % 250 for i in range(512)], fresh(), llm.forward, []

    def counted(new, *rest, **options):
        logits = forward(new, *rest, **options)
        passes.append((len(new), len(logits)))
        return logits

    monkeypatch.setattr(llm, "forward", counted)
    mx.eval(llm.prefill(ids[:-32], cache), cache)
    held = sum(part.nbytes for entry in cache for part in entry[:2])
    last_piece = peak_memory(lambda: mx.eval(forward(ids[-32:], cache, len(ids) - 32, last_only=True)))
    one_pass = peak_memory(lambda: mx.eval(forward(ids, fresh(), 0, last_only=True)))
    passes.clear()
    needed = peak_memory(lambda: mx.eval(llm.prefill(ids, fresh())))
    assert needed < held + 1.5 * last_piece < one_pass / 2
    assert passes == [(32, 1)] * 16
