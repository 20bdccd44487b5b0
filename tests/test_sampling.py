"""Does `sample` draw what it should? Frequencies are judged by chi-square, the edges one by one."""
import llm_inference as llm
import mlx.core as mx
import pytest

PROBS = [0.05, 0.4, 0.1, 0.2, 0.25]                     # not sorted, so that a lost order is seen
LOGITS = mx.log(mx.array(PROBS)) + 3                    # a constant changes no probability


def draw(logits, n, **options):
    mx.random.seed(7)
    return mx.stack([llm.sample(logits, **options) for _ in range(n)]).tolist()


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
    ids = draw(LOGITS, 150, temperature=1.0, top_p=top_p)
    assert set(ids) == set(nucleus)
    assert chi_square(ids, [PROBS[i] / mass if i in nucleus else 0 for i in range(5)]) < 18.5


@pytest.mark.parametrize("top_p", [1e-30, 1e-50, 5e-324])
def test_a_top_p_that_float32_cannot_hold_leaves_the_likeliest(top_p):
    order, probs = llm.nucleus(LOGITS, 1, top_p)
    assert (order.tolist(), probs.tolist()) == ([1, 4, 3, 2, 0], [1, 0, 0, 0, 0])


def test_the_nucleus_is_given_with_probabilities_that_add_up_to_one():
    """As softmax(logits / temperature), cut and then raised in proportion."""
    order, probs = llm.nucleus(LOGITS, 0.5, 0.9)
    squares = [p * p for p in (0.4, 0.25, 0.2)]         # 0.275 in all, of which the first two have 81%
    assert order.tolist() == [1, 4, 3, 2, 0]
    assert probs.tolist() == pytest.approx([p / sum(squares) for p in squares] + [0, 0], abs=1e-6)


def test_temperature_acts_before_the_nucleus_is_cut():
    """At temperature 0.5 the likeliest token has 0.16 / 0.275 = 58%, so top_p = 0.5 leaves only that one."""
    assert set(draw(LOGITS, 60, temperature=0.5, top_p=0.5)) == {1}
    assert set(draw(LOGITS, 60, temperature=1.0, top_p=0.5)) == {1, 4}


def test_temperature_zero_is_argmax():
    assert draw(LOGITS, 3, temperature=0, top_p=0.5) == [1, 1, 1]


@pytest.mark.parametrize("temperature", [1e-6, 1e-30])
@pytest.mark.parametrize("scale", [1, 1000])
def test_a_tiny_temperature_is_argmax_and_not_nan(temperature, scale):
    assert draw(LOGITS * scale, 20, temperature=temperature, top_p=1.0) == [1] * 20


@pytest.fixture
def count_kept(monkeypatch):
    """A function that says among how many tokens `sample` draws."""
    seen, categorical = [], mx.random.categorical
    monkeypatch.setattr(mx.random, "categorical", lambda x: seen.append(x) or categorical(x))

    def count(logits, **options):
        mx.eval(llm.sample(logits, **options))
        return mx.isfinite(seen.pop()).sum().item()

    return count


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_top_p_one_keeps_all_of_151936_equal_logits(count_kept, dtype):
    """A running sum that rounds up to 1 too early would cut the end off."""
    assert count_kept(mx.zeros(151936, dtype=dtype), temperature=1.0, top_p=1.0) == 151936


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_half_the_probability_is_half_of_151936_equal_logits(count_kept, dtype):
    """In bfloat16 the running sum would stop growing long before the end."""
    kept = count_kept(mx.zeros(151936, dtype=dtype), temperature=1.0, top_p=0.5)
    assert abs(kept / 151936 - 0.5) < 1e-3


def test_equal_logits_keep_half_with_top_p_one_half():
    assert len(set(draw(mx.zeros(8), 100, temperature=1.0, top_p=0.5))) == 4


def test_minus_infinity_is_never_drawn():
    logits = mx.array([0.0, -mx.inf, 0.0])
    assert set(draw(logits, 50, temperature=1.0, top_p=1.0)) == {0, 2}


def test_the_answer_is_a_scalar_array_and_not_evaluated():
    assert isinstance(llm.sample(LOGITS, 1.0), mx.array) and llm.sample(LOGITS, 1.0).shape == ()
    assert isinstance(llm.sample(LOGITS), mx.array) and llm.sample(LOGITS).shape == ()


def test_the_same_seed_gives_the_same_draws():
    first = draw(LOGITS, 50, temperature=1.0)
    assert first == draw(LOGITS, 50, temperature=1.0) and len(set(first)) > 1
