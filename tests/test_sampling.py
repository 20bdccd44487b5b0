"""Does `sample` draw what it should? Frequencies are judged by chi-square, the edges one by one."""
import random

import llm_inference as llm
import mlx.core as mx
import numpy as np
import pytest

KINDS = list(llm.KERNELS)                               # "explicit", "fused", "numpy"
PROBS = [0.05, 0.4, 0.1, 0.2, 0.25]                     # not sorted, so that a lost order is seen
LOGITS = np.log(np.array(PROBS, dtype=np.float32)) + 3  # a constant changes no probability


@pytest.fixture(autouse=True, params=["explicit", "numpy"])
def library(request):
    """Each test with MLX's arrays and with NumPy's; the fused set replaces neither sample nor nucleus."""
    llm.W.clear()                                       # of 16 bits, maybe, with which NumPy would not compute
    llm.use_kernels(request.param)
    assert not {"sample", "nucleus", "softmax"} & llm.KERNELS["fused"].keys()


def array(numbers, dtype=None):
    """An array of the set in place, in float32 or one of its other types."""
    return llm.xp.asarray(numbers, dtype=dtype or llm.xp.float32)


def draw(logits, n, **options):
    random.seed(7)
    return [int(llm.sample(array(logits), **options)) for _ in range(n)]


def chi_square(ids, probs):
    """Pearson's statistic of the draws against probabilities; infinite if an impossible token was drawn."""
    total = 0.0
    for i, p in enumerate(probs):
        if p == 0 and i in ids:
            return float("inf")
        total += (ids.count(i) - len(ids) * p) ** 2 / (len(ids) * p) if p else 0
    return total


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_softmax_of_logits_over_temperature(temperature):
    weights = [p ** (1 / temperature) for p in PROBS]
    ids = draw(LOGITS, 400, temperature=temperature, top_p=1.0)
    assert chi_square(ids, [w / sum(weights) for w in weights]) < 18.5     # 4 degrees of freedom: 1 in 1,000


@pytest.mark.parametrize("top_p, nucleus", [
    (0.3, [1]), (0.39, [1]), (0.41, [1, 4]), (0.64, [1, 4]), (0.66, [1, 4, 3]), (0.84, [1, 4, 3]),
    (0.86, [1, 4, 3, 2]), (0.94, [1, 4, 3, 2]), (0.96, [1, 4, 3, 2, 0]), (1.0, [1, 4, 3, 2, 0]), (1e-9, [1])])
def test_the_nucleus_is_the_smallest_set_that_reaches_top_p(top_p, nucleus):
    """Drawn from in proportion: nobody outside it is drawn, everybody inside is."""
    mass = sum(PROBS[i] for i in nucleus)
    wanted = [PROBS[i] / mass if i in nucleus else 0 for i in range(5)]
    assert np.asarray(llm.nucleus(array(LOGITS), 1.0, top_p)).tolist() == pytest.approx(wanted, abs=1e-6)
    ids = draw(LOGITS, 150, temperature=1.0, top_p=top_p)
    assert set(ids) == set(nucleus)
    assert chi_square(ids, wanted) < 18.5


@pytest.mark.parametrize("top_p", [1e-30, 1e-50, 5e-324])
def test_the_tiniest_top_p_leaves_the_likeliest(top_p):
    assert np.asarray(llm.nucleus(array(LOGITS), 1, top_p)).tolist() == [0, 1, 0, 0, 0]
    assert draw(LOGITS, 5, temperature=2.0, top_p=top_p) == [1] * 5


def test_probabilities_come_by_id_and_add_up_to_one():
    """As softmax(logits / temperature), cut and then raised in proportion."""
    squares = {1: 0.16, 4: 0.0625, 3: 0.04, 2: 0.01, 0: 0.0025}         # 0.275 in all
    for top_p, nucleus in [(0.9, [1, 4, 3]), (0.8, [1, 4]), (1.0, [0, 1, 2, 3, 4])]:
        mass = sum(squares[i] for i in nucleus)
        found = np.asarray(llm.nucleus(array(LOGITS), 0.5, top_p))
        assert found.tolist() == pytest.approx([squares[i] / mass * (i in nucleus) for i in range(5)], abs=1e-6)


def test_temperature_acts_before_the_nucleus_is_cut():
    """At temperature 0.5 the likeliest token has 0.16 / 0.275 = 58%, so top_p = 0.5 leaves only that one."""
    assert set(draw(LOGITS, 60, temperature=0.5, top_p=0.5)) == {1}
    assert set(draw(LOGITS, 60, temperature=1.0, top_p=0.5)) == {1, 4}


def test_temperature_zero_is_argmax():
    assert draw(LOGITS, 3, temperature=0, top_p=0.5) == [1, 1, 1]


def test_the_first_of_equals_is_the_likeliest():
    assert draw([1, 2, 0, 2, 2], 1, temperature=0) == [1]


@pytest.mark.parametrize("temperature", [1e-3, 1e-5, 1e-6, 1e-30])
@pytest.mark.parametrize("scale", [1, 1000])
def test_a_tiny_temperature_is_argmax_and_not_nan(temperature, scale):
    assert draw(LOGITS * scale, 20, temperature=temperature, top_p=1.0) == [1] * 20


def test_top_p_one_keeps_every_token():
    """Also those that are so unlikely, here e^-80, that a running sum in float32 does not notice them, and all of as
    many equal ones as Qwen3 has tokens."""
    assert (np.asarray(llm.nucleus(array([0.0, -80.0, -40.0]), 1.0, 1.0)) > 0).all()
    assert (np.asarray(llm.nucleus(array(np.zeros(151936)), 1.0, 1.0)) > 0).all()


def test_equal_logits_are_kept_or_cut_together():
    """Those that equal the last of the nucleus are kept, so that their ids make no difference."""
    assert (np.asarray(llm.nucleus(array([0, 1, 1, 1, 0]), 1.0, 0.3)) > 0).tolist() == [False, True, True, True, False]
    assert set(draw(np.zeros(8), 200, temperature=1.0, top_p=0.5)) == set(range(8))


def test_the_sum_of_many_small_probabilities_stops_the_nucleus_where_it_should():
    """Of 151,936 logits that rise evenly: float64 says how many of the likeliest it takes to reach one half."""
    logits = np.linspace(-4, 4, 151936, dtype=np.float32)
    exact = np.exp(logits.astype(np.float64))
    wanted = 1 + np.count_nonzero(np.cumsum(exact[::-1]) < exact.sum() / 2)
    assert np.count_nonzero(np.asarray(llm.nucleus(array(logits), 1.0, 0.5))) == pytest.approx(wanted, rel=1e-3)


def test_logits_of_16_bits_are_computed_in_32(library):
    """In bfloat16 the running sum would stop growing long before the end."""
    if llm.xp is mx:
        logits = mx.linspace(-4, 4, 151936).astype(mx.bfloat16)
        found, wanted = llm.nucleus(logits, 0.7, 0.5), llm.nucleus(logits.astype(mx.float32), 0.7, 0.5)
        assert found.dtype == mx.float32 and mx.array_equal(found, wanted)


def test_minus_infinity_is_never_drawn():
    assert set(draw([0.0, -np.inf, 0.0], 50, temperature=1.0, top_p=1.0)) == {0, 2}


@pytest.mark.parametrize("number", [0.0, 1e-17, 0.2, 0.5, 1 - 1e-4, 1 - 2**-25, 1 - 2**-53])
def test_whatever_number_is_drawn_a_token_of_no_probability_is_never_chosen(monkeypatch, number):
    """Where the sum of many probabilities stays below 1 by rounding, too: the largest numbers choose the last token."""
    monkeypatch.setattr(random, "random", lambda: number)
    assert draw([-90.0, 0.0, -90.0, 1.0, -90.0], 1, temperature=1.0, top_p=0.99)[0] in (1, 3)
    many = np.random.default_rng(1).standard_normal(151936) * 3
    many[:1000] = many[-1000:] = -200
    assert 1000 <= draw(many, 1, temperature=1.0, top_p=1.0)[0] < 150936


def test_the_same_seed_gives_the_same_draws_and_no_other_generator_is_used():
    np.random.seed(1)
    mx.random.seed(1)
    first = draw(LOGITS, 50, temperature=1.0)
    np.random.seed(2)
    mx.random.seed(2)
    assert first == draw(LOGITS, 50, temperature=1.0) and len(set(first)) > 1
