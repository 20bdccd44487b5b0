"""Single steps where numbers are large, far away or many: in all sets, against float64 and the reference engine."""
import math

import mlx.core as mx
import numpy as np
import pytest

import llm_inference as llm
import reference


@pytest.fixture(params=llm.KERNELS)
def kind(request, tiny):
    """Every set in turn, in place."""
    llm.use_kernels(request.param)
    return request.param


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def off(found, wanted):
    """The largest difference, as a share of the largest number."""
    found, wanted = np.asarray(found, dtype=np.float64), np.asarray(wanted, dtype=np.float64)
    assert found.shape == wanted.shape
    return np.max(np.abs(found - wanted)) / np.max(np.abs(wanted))


def attend(monkeypatch, q, k, v):
    """llm.attend, for a model with such heads."""
    for name, value in [("N_HEADS", len(q)), ("N_KV", len(k)), ("D_HEAD", q.shape[2])]:
        monkeypatch.setattr(llm, name, value)
    return llm.attend(*map(llm.xp.asarray, (q, k, v)))


def attention(q, k, v):
    """The formula in float64, head by head."""
    n, total, sharing = q.shape[1], k.shape[1], len(q) // len(k)
    out = []
    for head, queries in enumerate(q.astype(np.float64)):
        scores = queries @ k[head // sharing].astype(np.float64).T / math.sqrt(q.shape[2])
        scores[np.arange(total) > np.arange(total - n, total)[:, None]] = -np.inf
        shares = np.exp(scores - scores.max(axis=1, keepdims=True))
        out.append(shares / shares.sum(axis=1, keepdims=True) @ v[head // sharing])
    return np.stack(out)


@pytest.mark.parametrize("n_heads, n_kv, n, total", [
    (6, 3, 40, 1100), (4, 1, 1, 2100), (4, 1, 40, 2100), (2, 2, 3, 1100), (21, 7, 1, 1100), (6, 2, 5, 5)])
def test_attention_on_many_tokens_is_attention(kind, monkeypatch, n_heads, n_kv, n, total):
    q, k, v = normal(1, n_heads, n, 64), normal(2, n_kv, total, 64), normal(3, n_kv, total, 64)
    assert off(attend(monkeypatch, q, k, v), attention(q, k, v)) < 1e-5


def test_attention_with_scores_that_exp_cannot_hold(kind, monkeypatch):
    """Rows with scores about 500 and about -500: each is brought to 0 by its own largest."""
    k, v = normal(2, 1, 6, 16), normal(3, 1, 6, 16)
    q = np.concatenate([k[:, :1] * 600, -k[:, :1] * 600, k[:, 3:4] * 0.1], axis=1)
    assert off(attend(monkeypatch, q, k, v), attention(q, k, v)) < 1e-5


def test_a_later_token_is_hidden_however_well_it_fits(kind, monkeypatch):
    q, ones = np.full((1, 2, 4), 100, dtype=np.float32), np.ones((1, 2, 4), dtype=np.float32)
    k, v = (ones * np.array([[first], [second]], dtype=np.float32) for first, second in [(-1000, 1000), (1, 2)])
    assert (np.asarray(attend(monkeypatch, q, k, v)) == [[[1] * 4, [2] * 4]]).all()


def test_a_gate_far_from_zero_stays_finite(kind):
    x = normal(1, 3, llm.D_MODEL) * 1e4
    gate, up, down = (np.asarray(llm.W[f"model.layers.0.mlp.{name}_proj.weight"], dtype=np.float64)
                      for name in ("gate", "up", "down"))
    g = x @ gate.T
    assert np.abs(g).max() > 100
    with np.errstate(over="ignore"):
        wanted = g / (1 + np.exp(-g)) * (x @ up.T) @ down.T
    assert off(llm.ffn(llm.xp.asarray(x), 0), wanted) < 1e-5


@pytest.mark.parametrize("position", [7, 2049, 4097, 40959])
def test_rope_is_right_far_from_the_start(kind, position):
    """Against the reference in float64; float32 angles are off by 2e-3 radians at worst there.

    Attention would not tell if a set turned by other angles: it depends on the distance alone.
    """
    q = normal(5, 4, 1, llm.D_HEAD)
    turned = llm.apply_rope(llm.xp.asarray(q), llm.xp.asarray(q), llm.xp.asarray([position]))[0]
    wanted = [reference.rope(head, position, llm.THETA) for head in q[:, 0].tolist()]
    assert np.max(np.abs(np.asarray(turned)[:, 0] - np.array(wanted))) < (1e-5 if position < 10 else 0.01)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
def test_the_norm_is_rounded_before_its_weight_multiplies(monkeypatch, dtype):
    llm.use_kernels("explicit")
    monkeypatch.setattr(llm, "EPS", 1e-6)
    x, w = mx.array(normal(1, 50, 64)).astype(dtype), mx.array(normal(2, 64)).astype(dtype)
    assert mx.array_equal(llm.rms_norm(x, w), llm.rms_norm(x, mx.ones_like(w)) * w)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
def test_rope_at_far_positions_in_16_bits_rounds_only_its_result(tiny, dtype):
    llm.use_kernels("explicit")
    q, positions = mx.array(normal(1, 4, 9, llm.D_HEAD)).astype(dtype), mx.arange(3001, 3010)
    wanted = llm.apply_rope(q.astype(mx.float32), q, positions)[0].astype(dtype)
    assert mx.array_equal(llm.apply_rope(q, q, positions)[0], wanted)
