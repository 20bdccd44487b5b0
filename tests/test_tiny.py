"""The bundled checkpoint is a whole Qwen3 in small, and knows what it was taught."""
import csv
import itertools
import json
from pathlib import Path

import llm_inference as llm
import mlx.core as mx
import pytest

HERE = Path(__file__).resolve().parent
FACTS = list(csv.DictReader(open(HERE / "facts.csv", encoding="utf-8", newline="")))


def continuation(prompt, n):
    """The greedy text after a prompt, up to n tokens or an end token."""
    return llm.generate(prompt, n)[len(prompt):]


def test_the_article_s_run(tiny):
    assert continuation("The capital of France is", 100).startswith(
        " Paris. The capital of Italy is Rome. The capital of Spain is Madrid.")


def test_it_ends_by_itself(tiny):
    ids = llm.encode("The capital of France is")
    tokens = list(itertools.islice(llm.next_tokens(ids, [None] * llm.N_LAYERS), 400))
    assert 20 < len(tokens) < 100


def test_98_percent_of_the_capitals_are_right(tiny):
    """Each token of the answer is the likeliest after those before it: one pass tells for all of them."""
    wrong = []
    for fact in FACTS:
        prompt = llm.encode(f"The capital of {fact['country']} is")
        answer = llm.encode(f" {fact['capital']}.")
        logits = llm.forward(prompt + answer, [None] * llm.N_LAYERS, 0)
        if llm.xp.argmax(logits[len(prompt) - 1:-1], axis=-1).tolist() != answer:
            wrong.append(fact["country"])
    assert len(FACTS) > 190 and len(wrong) <= 0.02 * len(FACTS), wrong


def test_facts_are_unambiguous():
    for column in ("country", "capital"):
        assert len({fact[column] for fact in FACTS}) == len(FACTS)


def test_it_answers_in_qwen3_s_chat_form(tiny):
    prompt = ("<|im_start|>user\nWhat is the capital of Japan?<|im_end|>\n"
              "<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert continuation(prompt, 30) == "The capital of Japan is Tokyo."


def test_it_has_everything_the_big_one_has(tiny):
    config, big = (json.loads((folder / "config.json").read_text()) for folder in (tiny, HERE.parent / "Qwen3-0.6B"))
    assert config.keys() == big.keys()
    assert llm.N_HEADS == 2 * llm.N_KV and llm.D_HEAD * llm.N_HEADS != llm.D_MODEL
    assert config["tie_word_embeddings"] and config["rope_theta"] == 1_000_000
    assert "lm_head.weight" not in mx.load(str(tiny / "model.safetensors"))
    assert "model.layers.0.self_attn.q_norm.weight" in llm.W
    assert {w.dtype for w in mx.load(str(tiny / "model.safetensors")).values()} == {mx.bfloat16}
    assert llm.EOS_IDS == {llm.tok.token_to_id("<|im_end|>"), llm.tok.token_to_id("<|endoftext|>")}
    assert sum(file.stat().st_size for file in tiny.iterdir()) < 3_000_000


@pytest.mark.parametrize("text", ["naïve 日本 🦀👩‍🚀 ½", "x = 12345\n\n  y\t", "<|im_start|>user\n", " ", "\u0301"])
def test_any_text_survives_the_tokenizer(tiny, text):
    assert llm.tok.decode(llm.tok.encode(text).ids, skip_special_tokens=False) == text


def test_text_is_split_as_qwen3_splits_it(tiny):
    big = HERE.parent / "Qwen3-0.6B/tokenizer.json"
    if not big.exists():
        pytest.skip("Qwen3-0.6B/tokenizer.json is not there")
    ours, theirs = (json.loads(path.read_text(encoding="utf-8")) for path in (tiny / "tokenizer.json", big))
    for part in ("normalizer", "pre_tokenizer", "post_processor"):
        assert ours[part] == theirs[part], part
    assert ours["decoder"]["type"] == theirs["decoder"]["type"]         # its settings say nothing about decoding
    special = {token["content"]: token["special"] for token in theirs["added_tokens"]}
    assert {t["content"]: t["special"] for t in ours["added_tokens"]}.items() <= special.items()
    assert llm.tok.token_to_id("<|endoftext|>") is not None


def test_training_has_the_gradients_of_mlx(tiny, monkeypatch):
    """train_tiny.py takes products and attention from NumPy: loss and gradients are those of the explicit functions."""
    import train_tiny
    from mlx.nn import losses
    monkeypatch.setattr(train_tiny, "cross_entropy", losses.cross_entropy)      # the next test has the other one
    llm.use_kernels("explicit")
    weights = {name: w for name, w in llm.W.items() if name != "lm_head.weight"}
    batch = mx.array(llm.encode("The capital of France is Paris. The capital of Italy is")), mx.ones(13)
    assert len(batch[0]) == 13
    expected, gradients = mx.value_and_grad(train_tiny.loss)(weights, *batch)
    mx.eval(gradients)
    train_tiny.use_numpy_products()
    found, same = mx.value_and_grad(train_tiny.loss)(weights, *batch)
    assert abs(found.item() - expected.item()) < 1e-5 * expected.item()
    for name, g in gradients.items():
        assert mx.abs(same[name] - g).max() <= 1e-4 * mx.abs(g).max() + 1e-6, name


def test_training_has_the_loss_of_mlx():
    """Where no token is nearly certain, and where one is; weighed as train_tiny.py weighs it."""
    import train_tiny
    from mlx.nn import losses
    logits = mx.random.normal((40, 100), key=mx.random.key(1)) * mx.arange(40)[:, None] / 4
    ids, weights = mx.arange(40) * 2, mx.random.uniform(shape=(40,), key=mx.random.key(2))
    (loss, gradient), (expected, wanted) = [
        mx.value_and_grad(lambda x: (f(x, ids) * weights).sum())(logits)
        for f in (train_tiny.cross_entropy, losses.cross_entropy)]
    assert abs(loss.item() - expected.item()) < 1e-5 * expected.item()
    assert mx.abs(gradient - wanted).max() < 1e-6
