"""The three sets: what each puts in place, in whose arrays it computes, what it refuses, and what a GPU has to do."""
import contextlib
import importlib.util
import inspect
import itertools
import re
import time
from collections import Counter

import llm_inference as llm
import mlx.core as mx
import numpy as np
import pytest
from test_forward import KINDS, difference, fresh

PLACES = sorted({name for replacements in llm.KERNELS.values() for name in replacements})


# ---- what stands in place -----------------------------------------------------------------------------------
def test_each_set_puts_its_functions_in_place_and_the_steps_own_elsewhere(tiny):
    for kind in [*KINDS, *KINDS[::-1]]:
        llm.use_kernels(kind)
        assert llm.kernels == llm.wanted_kernels == kind
        for name in PLACES:
            function = getattr(llm, name)
            assert function is llm.KERNELS[kind].get(name, function), (kind, name)
            assert (function.__name__ == name) == (name not in llm.KERNELS[kind]), (kind, name)


def test_numpy_replaces_two_functions_and_explicit_none():
    assert (llm.KERNELS["explicit"], set(llm.KERNELS["numpy"])) == ({}, {"extend_cache", "attend"})


def test_a_replacement_takes_what_the_step_takes():
    llm.use_kernels("explicit")
    for kind, replacements in llm.KERNELS.items():
        for name, function in replacements.items():
            assert inspect.signature(function) == inspect.signature(getattr(llm, name)), (kind, name)


def test_a_set_that_does_not_exist_is_refused_and_changes_nothing(tiny):
    llm.use_kernels("explicit")
    with pytest.raises(ValueError, match="'metal'"):
        llm.use_kernels("metal")
    assert (llm.kernels, llm.wanted_kernels, llm.xp) == ("explicit", "explicit", mx)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("first", [True, False])
def test_numpy_means_the_explicit_functions_where_weights_have_16_bits(folder_of, dtype, first):
    """Whether it was asked for before or after the model was loaded; in float32 it means itself again."""
    llm.load_model(folder_of("tiny-qwen3"), mx.float32 if first else dtype)
    llm.use_kernels("numpy")
    if first:
        llm.load_model(folder_of("tiny-qwen3"), dtype)
    assert (llm.kernels, llm.wanted_kernels, llm.xp) == ("explicit", "numpy", mx)
    assert [getattr(llm, name).__name__ for name in PLACES] == PLACES
    assert llm.forward([1, 2], fresh(), 0).dtype == dtype
    llm.load_model(folder_of("tiny-qwen3"), mx.float32)
    assert (llm.kernels, llm.xp) == ("numpy", np)
    assert all(getattr(llm, name) is function for name, function in llm.KERNELS["numpy"].items())


def test_on_a_gpu_the_fused_set_and_large_pieces_are_the_default(monkeypatch):
    """The file as it is imported where MLX says that it computes on a GPU, and where it does not."""
    assert llm.CHUNK == 256
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    spec = importlib.util.spec_from_file_location("on_a_gpu", llm.__file__)
    on_a_gpu = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(on_a_gpu)
    assert (on_a_gpu.kernels, on_a_gpu.CHUNK, on_a_gpu.xp) == ("fused", 2048, mx)


# ---- in whose arrays ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
def test_all_results_are_float32_arrays_of_the_set_s_library(tiny, kind):
    llm.use_kernels(kind)
    library, array = (np, np.ndarray) if kind == "numpy" else (mx, mx.array)
    assert llm.xp is library and all(isinstance(w, array) for w in llm.W.values())
    cache = fresh()
    for logits in [llm.forward([1, 2, 3], cache, 0), llm.forward([4], cache, 3), llm.prefill([5, 6], cache, 4),
                   llm.forward(list(range(40)), fresh(), 0, last_only=True), llm.forward(mx.array([7]), cache, 6),
                   llm.forward(np.array([7, 8]), fresh(), 0), llm.nucleus(llm.embed([9])[0], 0.7, 0.9)]:
        assert isinstance(logits, array) and logits.dtype == library.float32
    for layer in cache:
        assert all(isinstance(part, array) for part in layer[:2])


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_numpy_s_weights_are_views_of_mlx_s_and_a_tied_head_stays_one_array(load, name):
    """In every order of the sets: what NumPy made goes back to MLX by a copy, but W never holds a head twice."""
    load(name)
    for kind in [*KINDS, *KINDS[::-1], *KINDS]:
        before = dict(llm.W)
        llm.use_kernels(kind)
        if kind == "numpy":
            assert all(np.shares_memory(w, np.asarray(before[key])) for key, w in llm.W.items())
        assert (llm.W["lm_head.weight"] is llm.W["model.embed_tokens.weight"]) == (name == "tied"), kind
        assert all(mx.array_equal(mx.array(w), mx.array(before[key])) for key, w in llm.W.items())


@pytest.mark.parametrize("first, second", [*itertools.permutations(KINDS, 2)])
def test_a_cache_that_another_set_filled_is_right_or_refused(tiny, first, second):
    llm.use_kernels(first)
    llm.forward([1, 2, 3], cache := fresh(), 0)
    llm.use_kernels(second)
    with contextlib.suppress(TypeError, ValueError):
        found = llm.forward([4], cache, 3)
        assert difference(found, llm.forward([1, 2, 3, 4], fresh(), 0)[-1:]) < 1e-5


# ---- gradients ----------------------------------------------------------------------------------------------
WEIGHTS = ["model.embed_tokens.weight", "model.layers.0.input_layernorm.weight",
           "model.layers.0.self_attn.k_proj.weight", "model.layers.1.self_attn.q_norm.weight",
           "model.layers.2.mlp.gate_proj.weight", "model.norm.weight", "lm_head.weight"]


def loss_of(weight):
    def loss(value):
        kept, llm.W[weight] = llm.W[weight], value
        try:
            return mx.logsumexp(mx.array(llm.forward([1, 2, 3, 4], fresh(), 0)[-1]))
        finally:
            llm.W[weight] = kept

    return loss


@pytest.mark.parametrize("weight", WEIGHTS)
def test_the_explicit_functions_give_gradients(load, weight):
    """Along the gradient the slope is what the loss says a small step to either side."""
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
    """Zeros would be worse. Where an MLX array comes first, in the embedding and in the first block's products, it is
    a library that refuses to mix it with NumPy's."""
    load("untied")
    llm.use_kernels("numpy")
    for ask in (mx.grad, mx.value_and_grad):
        with pytest.raises((TypeError, ValueError)) as refused:
            ask(loss_of(weight))(mx.array(llm.W[weight]))
        if "embed" not in weight and "0.self_attn" not in weight:
            assert '"explicit"' in str(refused.value)


# ---- what a GPU has to do, seen on a CPU --------------------------------------------------------------------
def test_a_token_is_handed_out_before_the_pass_that_starts_from_it_is_done(tiny, monkeypatch):
    """Decode passes are made heavy, 0.15 s, by products of matrices, and are under way when the token is there."""
    llm.use_kernels("fused")
    matrix, forward, products = mx.random.uniform(0, 1e-3, (320, 320)), llm.forward, 1

    def heavy(token_ids, cache, start_pos, **options):
        logits = forward(token_ids, cache, start_pos, **options)
        if len(token_ids) > 1:
            return logits
        product = matrix + logits[0, 0]
        for _ in range(products):
            product = product @ matrix
        return logits + 0 * product[0, 0]

    def seconds(run):
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    cache = fresh()
    mx.eval(matrix, llm.prefill([1, 2, 3], cache))
    while (one_pass := seconds(lambda: mx.eval(heavy([4], list(cache), 3)))) < 0.15:
        products *= 2
    monkeypatch.setattr(llm, "forward", heavy)
    tokens = llm.next_tokens([1, 2, 3], fresh())
    assert seconds(lambda: next(tokens)) < one_pass / 2
    assert seconds(mx.synchronize) > one_pass / 3       # it had been queued
    assert seconds(lambda: next(tokens)) < one_pass / 2
    mx.synchronize()


# Primitives of MLX that only look at memory in another way, and start no kernel where an array is contiguous.
VIEWS = {"Broadcast", "ExpandDims", "Flatten", "Reshape", "Slice", "Squeeze", "Transpose", "Unflatten"}


def primitives(path, monkeypatch, dtype):
    """How many nodes of each kind the graph of one fused decode pass has, drawn before it is computed.

    On a CPU MLX spells its fast functions out in many small ones. On a GPU each is a kernel, so for the drawing each
    is replaced by a function that is one node, of a kind that occurs nowhere else; what it leaves out is drawn, too.
    """
    cache, ids, left_out = fresh(), mx.array([4]), []
    mx.eval(llm.forward([1, 2, 3], cache, 0), cache, ids)
    with monkeypatch.context() as patch:
        patch.setattr(mx.fast, "rms_norm", lambda x, w, eps: mx.erf(x))
        patch.setattr(mx.fast, "rope", lambda x, *rest, offset, **options: left_out.append(offset) or mx.arctan(x))
        patch.setattr(mx.fast, "scaled_dot_product_attention",
                      lambda q, k, v, **options: left_out.extend([k, v]) or mx.arccosh(q))
        logits = llm.forward(ids, cache, 3)
    mx.export_to_dot(str(path), logits, *left_out)
    assert logits.dtype == dtype
    names = {"Erf": "norm", "ArcTan": "rope", "ArcCosh": "attention"}
    return Counter(names.get(kind, kind) for kind in re.findall(r'\[label ="(\w+)", shape=rectangle', path.read_text()))


@pytest.mark.parametrize("dtype, silu", [
    (mx.float32, {"Negative": 1, "Exp": 1, "Add": 1, "Divide": 1}),
    (mx.bfloat16, {"AsType": 2, "Negative": 1, "Exp": 1, "Add": 1, "Divide": 1})])
def test_a_fused_decode_pass_has_19_kernels_a_layer_and_those_of_silu(load, tmp_path, monkeypatch, dtype, silu):
    """7 products, 4 norms, 2 turns by RoPE, 1 attention, 2 writes into the cache, 1 product with the gate, 2 additions
    to x. Views are not counted. Outside the layers: the token's row of the embedding, its position, norm and head."""
    load("tiny-qwen3", dtype)
    llm.use_kernels("fused")
    found = primitives(tmp_path / "pass.dot", monkeypatch, dtype)
    found = Counter({kind: n for kind, n in found.items() if kind not in VIEWS})
    found -= Counter({"Gather": 1, "Arange": 1, "norm": 1, "Matmul": 1})
    layer = Counter({"Matmul": 7, "norm": 4, "rope": 2, "attention": 1, "SliceUpdate": 2, "Multiply": 1, "Add": 2})
    assert layer.total() == 19
    assert found == Counter({kind: llm.N_LAYERS * n for kind, n in (layer + Counter(silu)).items()})


def test_memory_that_mlx_keeps_is_given_back_after_each_piece_and_every_256_tokens(tiny, monkeypatch):
    calls, passes = [], []
    monkeypatch.setattr(mx, "clear_cache", lambda: calls.append(len(passes)))
    monkeypatch.setattr(llm, "CHUNK", 16)
    row = mx.zeros((1, llm.VOCAB))

    def forward(token_ids, *rest, **options):
        passes.append(len(token_ids))
        return row

    monkeypatch.setattr(llm, "forward", forward)
    monkeypatch.setattr(llm, "EOS_IDS", set())
    llm.use_kernels("fused")
    list(itertools.islice(llm.next_tokens(list(range(40)), fresh()), 600))
    assert passes[:4] == [16, 16, 8, 1] and calls[:3] == [1, 2, 3]
    assert len(calls) == 5 and calls[4] - calls[3] == 256


def test_scores_that_lie_far_apart_and_a_longer_text_beside_a_shorter_one(load):
    """NumPy: a row has its own largest score, and a pass of many tokens leaves another text's few rows alone."""
    load("tied")
    llm.use_kernels("numpy")
    ids = [5, 6, 7]
    cache, zeros = [None] * llm.N_LAYERS, [None] * llm.N_LAYERS
    llm.forward(ids, cache, 0)
    copy = list(cache)
    llm.forward([8], cache, 3)
    llm.forward([9, 10, 11, 12], copy, 3)
    found = llm.forward([13], cache, 4)
    wanted = llm.forward([*ids, 8, 13], zeros, 0)[-1:]
    assert np.abs(found - wanted).max() < 1e-4 * np.abs(wanted).max()
    q = np.ones((llm.N_HEADS, 2, llm.D_HEAD), dtype=np.float32) * np.float32([[1], [-500]])
    k = np.ones((llm.N_KV, 2, llm.D_HEAD), dtype=np.float32)
    assert np.allclose(llm.attend(q, k, k), 1)
