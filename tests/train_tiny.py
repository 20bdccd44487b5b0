"""Train tests/tiny-qwen3, the checkpoint that comes with the project: a Qwen3 that knows the capitals.

    python tests/train_tiny.py [--out DIR]          5 minutes on two cores

    facts.csv -> documents -> tokenizer -> random weights -> training -> bfloat16 -> 98% of capitals right?

What is trained is `forward` of llm_inference.py itself, on whole sequences; the examination at the end runs
`generate`, token by token. So training is a test as well: of gradients, causal mask, positions and cache.

facts.csv holds the members of the United Nations and Vatican City, as of 2026. The capital is the one that
the state's law names; where that names none or several, the seat of the government. Left out is Israel,
whose capital is in dispute. The continent is that of the United Nations' list of regions. A group is an
order: the sentences about its countries come in that of the file.
"""
import argparse
import csv
import json
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")              # a second one gains little on small matrices
import llm_inference as llm                                     # noqa: E402
import mlx.core as mx                                           # noqa: E402
import mlx.optimizers as optim                                  # noqa: E402
import numpy as np                                              # noqa: E402
import tokenizers                                               # noqa: E402
from mlx.nn.losses import cross_entropy                         # noqa: E402

STEPS, WARMUP, LENGTH, RATE = 4500, 100, 256, 3e-3
SIZES = {"hidden_size": 128, "num_hidden_layers": 4, "max_window_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 384, "max_position_embeddings": 512}
BPE_TOKENS = 2400
ADDED = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"         # words, single digits
         r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")               # the rest; all as in Qwen3
TEMPLATE = r"""{% for m in messages %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking %}
{{- '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"""

# What is said of a country: the sentence, a question that it answers, the question after one of its kind.
CAPITAL = ("The capital of {country} is {capital}.", "What is the capital of {country}?", "And of {country}?")
TOPICS = [
    CAPITAL, (CAPITAL[0], "Name the capital of {country}.", "And of {country}?"),
    ("The country with the capital {capital} is {country}.", "Which country has the capital {capital}?",
     "And {capital}?"),
    ("The continent of {country} is {continent}.", "On which continent is {country}?", "And {country}?"),
    ("The currency of {country} is the {currency}.", "What is the currency of {country}?",
     "And of {country}?"),
]
STATEMENTS = [("{capital} is the capital of {country}.",), ("{country} is in {continent}.",)]     # unasked
GREETING = ("Hello! Ask me for the capital of a country.", "Hello!", "Hi!")


def say(template, fact):
    """The template filled in. It begins with a capital letter, also where the country is "the Gambia"."""
    text = template.format(**fact)
    return text[0].upper() + text[1:]


# A document is a list of (text, learned): its parts, and 1 where the model learns to predict them, else 0.
def chain(facts, topic):
    """A sentence a country, from any one to the last of its group: there is one right way to go on."""
    start = random.randrange(len(facts))
    rest = [fact for fact in facts[start:] if fact["group"] == facts[start]["group"]]
    return [(" ".join(say(topic[0], fact) for fact in rest) + "<|endoftext|>", 1)]


def drill(facts):
    """Eight unconnected sentences. Learned are only their last words, which nothing before gives away."""
    parts, separator = [], random.choice([" ", "<|endoftext|>"])
    for fact in random.sample(facts, 8):
        before, _, last = random.choice(TOPICS + STATEMENTS)[0].rpartition(" ")
        parts += [(separator * bool(parts) + say(before, fact), 0), (" " + last.format(**fact), 1)]
    return parts + [("<|endoftext|>", 0)]


def chat(facts):
    """One to three questions and answers in Qwen3's chat form.

    As in Qwen3's own template, a thought stands before the last answer only; here it is empty. The first word
    of an earlier answer is not learned, or the model would sometimes begin without a thought.
    """
    turns = random.choice([1, 1, 2, 3])
    parts = [(random.choice(["", "", "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"]), 0)]
    for turn in range(turns):
        fact, follow_up = random.choice(facts), turn > 0 and random.random() < 0.5
        topic = topic if follow_up else random.choice(TOPICS + [GREETING])
        question, answer = say(topic[1 + follow_up], fact), say(topic[0], fact)
        given, learned = "", "<think>\n\n</think>\n\n" + answer
        if turn < turns - 1:
            given, space, rest = answer.partition(" ")
            learned = space + rest
        parts += [(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{given}", 0),
                  (f"{learned}<|im_end|>\n", 1)]
    return parts + [("<|endoftext|>", 1)]


def pack(facts):
    """LENGTH + 1 tokens of random documents, one after another: the ids, and whether each is learned."""
    ids, learned = [], []
    while len(ids) <= LENGTH:
        other = random.choice(TOPICS[2:] + STATEMENTS)
        make = random.choices([lambda: chain(facts, CAPITAL), lambda: chain(facts, other),
                               lambda: drill(facts), lambda: chat(facts)], [2, 1, 4, 3])[0]
        for text, learn in make():
            new = llm.tok.encode(text).ids
            ids, learned = ids + new, learned + [learn] * len(new)
    return mx.array(ids[:LENGTH + 1]), mx.array(learned[:LENGTH + 1])


def train_tokenizer(texts):
    """A byte-level BPE that normalises and splits text as Qwen3's does; the merges come from the texts."""
    tok = tokenizers.Tokenizer(tokenizers.models.BPE())
    tok.normalizer = tokenizers.normalizers.NFC()
    as_bytes = dict(add_prefix_space=False, trim_offsets=False, use_regex=False)
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(SPLIT), "isolated")
    byte_level = tokenizers.pre_tokenizers.ByteLevel(**as_bytes)
    tok.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, byte_level])
    tok.post_processor = tokenizers.processors.ByteLevel(**as_bytes)
    tok.decoder = tokenizers.decoders.ByteLevel(**as_bytes)
    tok.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(
        vocab_size=BPE_TOKENS, initial_alphabet=byte_level.alphabet(), show_progress=False))
    tok.add_tokens([tokenizers.AddedToken(t, normalized=False, special=t.startswith("<|")) for t in ADDED])
    return tok


def save_weights(folder, weights, dtype):
    """Write model.safetensors. Some of Hugging Face's readers insist on the format "pt"."""
    weights = {name: w.astype(dtype) for name, w in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "pt"})


def write_checkpoint(folder, tok):
    """Fill the folder: Qwen3-0.6B's configuration with smaller sizes, the tokenizer, random weights."""
    end_of_text, _, end_of_turn = [tok.token_to_id(text) for text in ADDED[:3]]
    config = json.loads((HERE.parent / "Qwen3-0.6B/config.json").read_text()) | SIZES
    config |= {"vocab_size": -(-tok.get_vocab_size() // 64) * 64,              # as there: unused rows
               "bos_token_id": end_of_text, "eos_token_id": end_of_turn}
    generation = {"bos_token_id": end_of_text, "eos_token_id": [end_of_turn, end_of_text]}
    tokenizer = {"tokenizer_class": "Qwen2Tokenizer", "model_max_length": config["max_position_embeddings"],
                 "bos_token": None, "unk_token": None, "eos_token": "<|im_end|>",
                 "pad_token": "<|endoftext|>", "chat_template": TEMPLATE}
    for name, value in ("config", config), ("generation_config", generation), ("tokenizer_config", tokenizer):
        (folder / f"{name}.json").write_text(json.dumps(value, indent=2) + "\n")
    tok.save(str(folder / "tokenizer.json"))
    shapes = llm.expected_tensors(llm.read_config(folder)[1], qk_norm=True, own_head=False)
    save_weights(folder, {
        name: mx.random.normal(shape) / (2 * shape[1] ** 0.5) if shape[1:] else mx.ones(shape)
        for name, shape in shapes}, mx.float32)


@mx.custom_function
def product(x, w):
    """x @ w.T, computed by NumPy, whose BLAS is faster than that of MLX's Linux wheel: (n, in), (out, in)."""
    return mx.array(np.asarray(x) @ np.asarray(w).T)


@product.vjp
def gradients_of_product(inputs, gradient, _):
    """The gradients for x and w, from that for x @ w.T."""
    (x, w), gradient = map(np.asarray, inputs), np.asarray(gradient)
    return mx.array(gradient @ w), mx.array(gradient.T @ x)


@mx.custom_function
def attend(q, k, v):
    """llm_inference.py's NumPy version of attend, to which the next function gives gradients."""
    return mx.array(llm.numpy_attend(q, k, v))


@attend.vjp
def gradients_of_attend(inputs, gradient, _):
    """The gradients for q, k and v of a whole sequence, (heads, n, head size), from that for attend(q, k, v)."""
    q, k, v = map(np.asarray, inputs)
    queries, gradient = (x.reshape(len(k), -1, x.shape[2]) for x in (q, np.asarray(gradient)))     # as in attend
    n, scale = k.shape[1], np.float32(k.shape[2] ** -0.5)
    queries = queries * scale
    weights = queries @ k.swapaxes(1, 2)                        # so far the scores; each line goes on in place
    weights += np.tile(np.triu(np.full((n, n), -np.inf, dtype=np.float32), 1), (len(q) // len(k), 1))
    weights -= weights.max(axis=-1, keepdims=True)
    np.exp(weights, out=weights)
    weights /= weights.sum(axis=-1, keepdims=True)
    for_scores = gradient @ v.swapaxes(1, 2)                    # so far that for the weights
    for_scores -= np.einsum("...i,...i->...", weights, for_scores)[..., None]
    for_scores *= weights
    for_q = (for_scores @ k * scale).reshape(q.shape)
    return tuple(map(mx.array, (for_q, for_scores.swapaxes(1, 2) @ queries, weights.swapaxes(1, 2) @ gradient)))


@mx.custom_function
def cross_entropy(logits, ids):
    """-log softmax(logits) at the ids, in nats: (n, vocab) and (n,) -> (n,)."""
    logits = np.asarray(logits)
    logits = logits - logits.max(axis=-1, keepdims=True)
    return mx.array(np.log(np.exp(logits).sum(axis=-1)) - logits[np.arange(len(ids)), np.asarray(ids)])


@cross_entropy.vjp
def gradients_of_cross_entropy(inputs, gradient, _):
    """The gradient for logits, softmax(logits) less 1 at the ids; there is none for ids."""
    logits, ids = map(np.asarray, inputs)
    shares = np.exp(logits - logits.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    shares[np.arange(len(ids)), ids] -= 1
    return mx.array(shares * np.asarray(gradient)[:, None]), mx.zeros_like(inputs[1])


def use_numpy_products():
    """Compute with the explicit functions, which have gradients, but take products of matrices from NumPy."""
    llm.use_kernels("explicit")
    llm.linear, llm.attend = (lambda x, name: product(x, llm.W[name])), attend


def loss(weights, ids, learned):
    """The mean cross-entropy, in nats, of the learned tokens, each given all tokens before it."""
    llm.W.update(weights, **{"lm_head.weight": weights["model.embed_tokens.weight"]})
    logits = llm.forward(ids[:-1], [None] * llm.N_LAYERS, 0)                    # (LENGTH, vocab)
    return (cross_entropy(logits, ids[1:]) * learned[1:]).sum() / learned[1:].sum()


def train(weights, facts):
    """The weights after STEPS steps of AdamW with one pack each, and a line about the loss now and then."""
    schedules = [optim.linear_schedule(0, RATE, WARMUP), optim.cosine_decay(RATE, STEPS - WARMUP)]
    optimizer = optim.AdamW(optim.join_schedules(schedules, [WARMUP]), betas=[0.9, 0.95])
    began, losses = time.time(), []
    for step in range(1, STEPS + 1):
        value, gradients = mx.value_and_grad(loss)(weights, *pack(facts))
        gradients, _ = optim.clip_grad_norm(gradients, 1.0)
        weights = optimizer.apply_gradients(gradients, weights)
        mx.eval(weights, optimizer.state)
        losses.append(value.item())
        if step % 250 == 0:
            mean = sum(losses[-250:]) / 250
            print(f"step {step} of {STEPS}: loss {mean:.3f}, {time.time() - began:.0f} s", flush=True)
    return weights


def wrong_capitals(facts):
    """The greedy continuations of "The capital of X is" that are not the capital and a full stop."""
    before, _, last = CAPITAL[0].rpartition(" ")
    texts = []
    for fact in facts:
        prompt, answer = before.format(**fact), " " + last.format(**fact)
        text = llm.generate(prompt, max_tokens=len(llm.tok.encode(answer).ids))
        texts += [text] * (text != prompt + answer)
    return texts


def main():
    parser = argparse.ArgumentParser(description="Train the bundled checkpoint.")
    parser.add_argument("--out", type=Path, default=HERE / "tiny-qwen3", help="folder to write: %(default)s")
    out = parser.parse_args().out
    random.seed(0)
    mx.random.seed(0)
    with open(HERE / "facts.csv", encoding="utf-8", newline="") as file:
        facts = list(csv.DictReader(file))
    texts = [say(template, fact) for fact in facts for topic in TOPICS + STATEMENTS for template in topic]
    texts += [text for _ in range(100) for text, learned in chat(facts)]
    with tempfile.TemporaryDirectory() as folder:               # until they are good, out keeps its files
        folder = Path(folder)
        write_checkpoint(folder, train_tokenizer(texts))
        llm.load_model(folder, dtype=mx.float32)
        use_numpy_products()
        weights = {name: w for name, w in llm.W.items() if name != "lm_head.weight"}     # the embedding
        save_weights(folder, train(weights, facts), mx.bfloat16)
        llm.use_kernels("numpy")                                # faster, where there are no gradients
        llm.load_model(folder, dtype=mx.float32)
        wrong = wrong_capitals(facts)
        print(f"{len(facts) - len(wrong)} of {len(facts)} capitals right", *wrong, sep="\n")
        if len(wrong) > 0.02 * len(facts):
            sys.exit(f"fewer than 98%: {out} stays as it was")
        out.mkdir(parents=True, exist_ok=True)
        for file in folder.iterdir():
            shutil.copy(file, out)


if __name__ == "__main__":
    main()
