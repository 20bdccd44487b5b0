"""The exercises of the lesson "The forward pass end to end", answered by running code.

    python tests/exercises.py N        N from 2 to 5; the first one is llm_inference.py --trace
"""
import json
import os
import random
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import llm_inference as llm                                         # noqa: E402
import mutations                                                    # noqa: E402
import reference                                                    # noqa: E402
from checkpoints import make_checkpoint                             # noqa: E402

LESSON = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_key_value_heads": 2, "intermediate_size": 24}        # the lesson's config


def fresh():
    return [None] * llm.N_LAYERS


def exercise_2():
    """Set n_kv = 4 (full multi-head). Does cache equality still hold? What happens to bytes per token?"""
    for kv_heads in (2, 4):
        config = LESSON | {"num_key_value_heads": kv_heads, "vocab_size": 272, "head_dim": 4}
        with tempfile.TemporaryDirectory() as place:
            llm.load_model(make_checkpoint(Path(place) / "model", **config))
        prompt, cache = [3, 14, 15, 9, 2, 6], fresh()
        ids, logits, equal = list(prompt), llm.forward(prompt, cache, 0), True
        for _ in range(10):
            recomputed = llm.forward(ids, fresh(), 0)
            equal = equal and int(llm.sample(logits[-1])) == int(llm.sample(recomputed[-1]))
            ids.append(int(llm.sample(logits[-1])))
            logits = llm.forward(ids[-1:], cache, len(ids) - 1)
        print(f"{kv_heads} key/value heads: cached = recomputed {equal}, "
              f"{reference.kv_bytes_per_token(config)} bytes of cache a token")


def exercise_3():
    """Make generate sample with temperature=0.8 and a fixed seed. Is it reproducible? Why?"""
    llm.load_model(ROOT / "tests/tiny-qwen3")
    texts = []
    for seed in (1, 1, 2):
        random.seed(seed)
        texts.append(llm.generate("Once", 12, temperature=0.8))
    print(f"seed 1 and seed 1: {'the same text' if texts[0] == texts[1] else 'different texts'}")
    print(f"seed 1 and seed 2: {'the same text' if texts[0] == texts[2] else 'different texts'}")


def exercise_4():
    """Count the multiply-adds in one decode step for this config. (Hint: sum of matrix sizes.)"""
    real = json.loads((ROOT / "Qwen3-0.6B/config.json").read_text())
    for name, config in [("the lesson's model", LESSON), ("with heads of 16", LESSON | {"head_dim": 16}),
                         ("Qwen3-0.6B", real)]:
        print(f"{name}: {reference.multiply_adds_per_token(config):,} multiply-adds")


def exercise_5():
    """Intentionally break RoPE (skip it for keys). Does the cache-vs-recompute test still pass?"""
    mutations.apply("RoPE left off the keys")
    with tempfile.TemporaryDirectory() as place:
        folders = mutations.make_folders(Path(place))
        for check in ("cache = no cache", "pure Python", "Hugging Face"):
            print(f"{check}: {'sees it' if mutations.fails(check, folders) else 'passes all the same'}")


if __name__ == "__main__":
    if len(sys.argv) != 2 or f"exercise_{sys.argv[1]}" not in globals():
        sys.exit(__doc__)
    globals()[f"exercise_{sys.argv[1]}"]()
