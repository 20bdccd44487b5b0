"""Train tests/tiny-qwen3, the checkpoint that comes with this project: a whole Qwen3 that knows the world's capitals.

    python tests/train_tiny.py [--out DIR]

    facts.csv -> documents -> tokenizer, random weights -> training -> bfloat16 -> are 98% of the capitals right?

What is trained is `forward` of llm_inference.py itself, on whole sequences. So training is a test: with a wrong
gradient path, mask or rotation the facts are not learned, or the cached decode of `generate` does not find them.

facts.csv holds the members of the United Nations and Vatican City, as of 2026. The capital is the one that the
state's law names; where that names none or several, the seat of the government. Left out is Israel, the one member
over whose capital most of the others disagree with it. The continent is that of the United Nations' list of regions.
A group is an order: sentences about its countries follow one another as the file does.
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
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")      # a second thread gains little here and suffers from neighbours
import llm_inference as llm                                                                         # noqa: E402
import mlx.core as mx                                                                               # noqa: E402
import mlx.nn as nn                                                                                 # noqa: E402
import mlx.optimizers as optim                                                                      # noqa: E402
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers  # noqa: E402
from tokenizers import processors, trainers                                                         # noqa: E402

STEPS, WARMUP, LENGTH, RATE = 5000, 100, 256, 3e-3
SIZES = {"hidden_size": 128, "num_hidden_layers": 4, "max_window_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 384, "max_position_embeddings": 512}
BPE_TOKENS = 1800
ADDED = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
         r"|\s+(?!\S)|\s+")                                     # Qwen3's: words with the space before, single digits
TEMPLATE = r"""{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"""

# What is said of a country: (the sentence, a question that it answers, the same question when one like it came before)
CAPITAL = ("The capital of {country} is {capital}.", "What is the capital of {country}?", "And of {country}?")
TOPICS = [CAPITAL, ("The capital of {country} is {capital}.", "Name the capital of {country}.", "And of {country}?"),
          ("{capital} is the capital of {country}.", "Which country has the capital {capital}?", "And {capital}?"),
          ("{country} is in {continent}.", "On which continent is {country}?", "And {country}?"),
          ("The currency of {country} is the {currency}.", "What is the currency of {country}?", "And of {country}?")]
GREETING = ("Hello! Ask me for the capital of a country.", "Hello!", "Hi!")


# ------------------------------------------------------------------------------------------------------------
# Documents: lists of (text, learned), the parts of a text and whether the model learns to predict them, 1 or 0
# ------------------------------------------------------------------------------------------------------------
def say(template, fact):
    """The template filled in. It begins with a capital letter, also where the country is "the Gambia"."""
    text = template.format(**fact)
    return text[0].upper() + text[1:]


def chain(facts, topic):
    """A sentence for each country, from any one to the last of its group: there is one right way to go on."""
    start = random.randrange(len(facts))
    rest = [fact for fact in facts[start:] if fact["group"] == facts[start]["group"]]
    return [(" ".join(say(topic[0], fact) for fact in rest) + ADDED[0], 1)]


def drill(facts):
    """Eight unconnected sentences. Only their last words are learned, which no earlier sentence gives away."""
    parts = []
    for fact in random.sample(facts, 8):
        before, _, last = random.choice(TOPICS)[0].rpartition(" ")
        parts += [(" " * bool(parts) + say(before, fact), 0), (" " + last.format(**fact), 1)]
    return parts + [(ADDED[0], 0)]


def chat(facts):
    """Up to three questions and answers, in Qwen3's chat form. Only the last answer is learned.

    As in Qwen3's own template no thought stands in earlier answers; here it is empty in the last one too.
    """
    text = random.choice(["", "", "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"])
    topic = answer = None
    for turn in range(random.choice([1, 1, 2, 3])):
        fact, follow_up = random.choice(facts), turn > 0 and random.random() < 0.5
        text += f"{answer}<|im_end|>\n" * (turn > 0)
        topic = topic if follow_up else random.choice([*TOPICS, GREETING])
        answer = say(topic[0], fact)
        text += f"<|im_start|>user\n{say(topic[1 + follow_up], fact)}<|im_end|>\n<|im_start|>assistant\n"
    return [(text, 0), (f"<think>\n\n</think>\n\n{answer}<|im_end|>\n{ADDED[0]}", 1)]


def pack(facts, tok):
    """Random documents one after another, cut at LENGTH + 1 tokens: their ids, and whether each is learned."""
    ids, learned = [], []
    while len(ids) <= LENGTH:
        kind = random.choices(["capitals", "others", "drill", "chat"], [3, 1, 4, 2])[0]
        for text, learn in (drill(facts) if kind == "drill" else chat(facts) if kind == "chat" else
                            chain(facts, CAPITAL if kind == "capitals" else random.choice(TOPICS[2:]))):
            new = tok.encode(text).ids
            ids += new
            learned += [learn] * len(new)
    return mx.array(ids[:LENGTH + 1]), mx.array(learned[:LENGTH + 1])


# ------------------------------------------------------------------------------------------------------------
# The checkpoint: tokenizer, configuration, weights
# ------------------------------------------------------------------------------------------------------------
def train_tokenizer(texts):
    """A byte-level BPE that normalises and splits text as Qwen3's does, with merges learned from the texts."""
    tok = Tokenizer(models.BPE())
    tok.normalizer = normalizers.NFC()
    as_bytes = dict(add_prefix_space=False, trim_offsets=False, use_regex=False)
    tok.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(**as_bytes)])
    tok.post_processor, tok.decoder = processors.ByteLevel(**as_bytes), decoders.ByteLevel(**as_bytes)
    tok.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=BPE_TOKENS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    tok.add_tokens([AddedToken(text, normalized=False, special=text.startswith("<|")) for text in ADDED])
    return tok


def random_weights(config):
    """{name: array} in float32: ones for a norm, else normal numbers that halve the size of what they multiply."""
    d, ff, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    block = {"input_layernorm": (d,), "self_attn.q_proj": (q, d), "self_attn.k_proj": (kv, d),
             "self_attn.v_proj": (kv, d), "self_attn.q_norm": (head,), "self_attn.k_norm": (head,),
             "self_attn.o_proj": (d, q), "post_attention_layernorm": (d,), "mlp.gate_proj": (ff, d),
             "mlp.up_proj": (ff, d), "mlp.down_proj": (d, ff)}
    shapes = {f"layers.{i}.{name}": shape for i in range(config["num_hidden_layers"]) for name, shape in block.items()}
    shapes |= {"embed_tokens": (config["vocab_size"], d), "norm": (d,)}
    return {f"model.{name}.weight": mx.random.normal(shape) / (2 * shape[1] ** 0.5) if shape[1:] else mx.ones(shape)
            for name, shape in shapes.items()}


def write_checkpoint(folder, tok):
    """Write all files into folder, the weights random. The configuration is Qwen3-0.6B's with smaller sizes."""
    end_of_text, _, end_of_turn = ends = [tok.token_to_id(text) for text in ADDED[:3]]
    config = json.loads((HERE.parent / "Qwen3-0.6B/config.json").read_text()) | SIZES | {
        "vocab_size": -(-tok.get_vocab_size() // 64) * 64, "bos_token_id": end_of_text, "eos_token_id": end_of_turn}
    files = {
        "config.json": config,
        "generation_config.json": {"bos_token_id": end_of_text, "eos_token_id": [end_of_turn, end_of_text],
                                   "pad_token_id": end_of_text},
        "tokenizer_config.json": {
            "tokenizer_class": "Qwen2Tokenizer", "model_max_length": SIZES["max_position_embeddings"],
            "add_prefix_space": False, "add_bos_token": False, "clean_up_tokenization_spaces": False, "bos_token": None,
            "unk_token": None, "eos_token": ADDED[2], "pad_token": ADDED[0], "chat_template": TEMPLATE}}
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value, indent=2) + "\n")
    tok.save(str(folder / "tokenizer.json"))
    save_weights(folder, random_weights(config), mx.float32)


def save_weights(folder, weights, dtype):
    """Write model.safetensors. The format "pt" is what Hugging Face's readers ask for."""
    mx.save_safetensors(str(folder / "model.safetensors"), {name: w.astype(dtype) for name, w in weights.items()},
                        metadata={"format": "pt"})


# ------------------------------------------------------------------------------------------------------------
# Training and the examination
# ------------------------------------------------------------------------------------------------------------
def loss(weights, ids, learned):
    """The mean cross-entropy, in nats, of the learned tokens, each given all tokens before it."""
    llm.W.update(weights, **{"lm_head.weight": weights["model.embed_tokens.weight"]})
    logits = llm.forward(ids[:-1], [None] * llm.N_LAYERS, 0)                    # (LENGTH, vocab)
    return (nn.losses.cross_entropy(logits, ids[1:]) * learned[1:]).sum() / learned[1:].sum()


def train(weights, facts):
    """The weights after STEPS steps of AdamW, each on one pack."""
    rate = optim.join_schedules([optim.linear_schedule(0, RATE, WARMUP), optim.cosine_decay(RATE, STEPS - WARMUP)],
                                [WARMUP])
    optimizer = optim.AdamW(rate, betas=[0.9, 0.95])
    loss_and_gradients = mx.value_and_grad(loss)
    began, losses = time.time(), []
    for step in range(1, STEPS + 1):
        value, gradients = loss_and_gradients(weights, *pack(facts, llm.tok))
        gradients, _ = optim.clip_grad_norm(gradients, 1.0)
        weights = optimizer.apply_gradients(gradients, weights)
        mx.eval(weights, optimizer.state)
        losses.append(value.item())
        if step % 250 == 0:
            print(f"step {step} of {STEPS}: loss {sum(losses[-250:]) / 250:.3f}, {time.time() - began:.0f} s", flush=True)
    return weights


def wrong_capitals(facts):
    """The greedy continuations of "The capital of X is" that do not begin with the capital and a full stop."""
    texts = []
    for fact in facts:
        prompt, _, capital = CAPITAL[0].rpartition(" ")
        prompt, capital = prompt.format(**fact), " " + capital.format(**fact)
        text = llm.generate(prompt, max_tokens=len(llm.tok.encode(capital).ids))
        texts += [text] * (text != prompt + capital)
    return texts


def main():
    parser = argparse.ArgumentParser(description="Train the bundled checkpoint.")
    parser.add_argument("--out", type=Path, default=HERE / "tiny-qwen3", help="the folder to write (%(default)s)")
    out = parser.parse_args().out
    random.seed(0)
    mx.random.seed(0)
    with open(HERE / "facts.csv", encoding="utf-8", newline="") as file:
        facts = list(csv.DictReader(file))
    texts = [say(template, fact) for fact in facts for topic in [*TOPICS, GREETING] for template in topic]
    with tempfile.TemporaryDirectory() as folder:               # out keeps its old files until the new ones are good
        folder = Path(folder)
        write_checkpoint(folder, train_tokenizer(texts + [text for text, _ in chat(facts)] * 10))
        llm.load_model(folder, dtype=mx.float32)
        weights = {name: w for name, w in llm.W.items() if name != "lm_head.weight"}    # that is the embedding again
        save_weights(folder, train(weights, facts), mx.bfloat16)
        llm.load_model(folder, dtype=mx.float32)
        wrong = wrong_capitals(facts)
        print(f"{len(facts) - len(wrong)} of {len(facts)} capitals right", *wrong, sep="\n")
        if len(wrong) > 0.02 * len(facts):
            sys.exit(f"fewer than 98%: {out} is left as it was")
        shutil.copytree(folder, out, dirs_exist_ok=True)


if __name__ == "__main__":
    main()
