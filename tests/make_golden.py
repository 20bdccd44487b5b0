"""Make tests/golden/*.safetensors: what Hugging Face transformers computes for the checkpoints in checkpoints.py.

Run by hand, never by pytest, in an environment with torch, transformers and mlx:

    python tests/make_golden.py

For every checkpoint, and for tests/tiny-qwen3, one file holds `ids` (n,), `logits` (n, vocab), the hidden state before
the first and after every block, `hidden.0` to `hidden.N` (n, hidden), and `greedy` (24,), all in float32, and
`logits.bfloat16`, the logits when transformers computes in bfloat16. `long` is a text of 500 ids, `long.logits`
(1, vocab) are the logits after its last.
"""
import random
import sys
import tempfile
from pathlib import Path

import mlx.core as mx
import torch
import transformers
from checkpoints import CHECKPOINTS, make_checkpoint

HERE = Path(__file__).resolve().parent


def golden(folder, ids, long):
    """{name: mx.array} for one checkpoint folder and two lists of token ids."""
    tokens = torch.tensor([ids])
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    states, hooks = [], []
    for block in model.model.layers:
        hooks.append(block.register_forward_hook(lambda module, args, out: states.append(out)))
    with torch.no_grad():
        logits = model(tokens).logits[0]
        for hook in hooks:
            hook.remove()
        states = [model.model.embed_tokens(tokens)] + [s[0] if isinstance(s, tuple) else s for s in states]
        made = model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=24,
                              eos_token_id=None, pad_token_id=0)[0, len(ids):]
        long_logits = model(torch.tensor([long])).logits[0, -1:]
        low = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        logits16 = low(tokens).logits[0].float()
    arrays = {"logits": logits, "logits.bfloat16": logits16, "long.logits": long_logits}
    arrays |= {f"hidden.{i}": state.reshape(len(ids), -1) for i, state in enumerate(states)}
    return {"ids": mx.array(ids), "greedy": mx.array(made.tolist()), "long": mx.array(long)} | {
        name: mx.array(array.numpy()) for name, array in arrays.items()}


def main():
    (HERE / "golden").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        folders = {name: make_checkpoint(Path(scratch) / name, name) for name in CHECKPOINTS}
        folders["tiny-qwen3"] = HERE / "tiny-qwen3"
        for name, folder in folders.items():
            if len(sys.argv) > 1 and name not in sys.argv[1:] or not folder.exists():
                continue
            vocab = 256 if name != "tiny-qwen3" else 1000
            rng = random.Random(name)
            ids, long = ([rng.randrange(vocab) for _ in range(n)] for n in (12, 500))
            arrays = golden(folder, ids, long)
            mx.save_safetensors(str(HERE / "golden" / f"{name}.safetensors"), arrays)
            print(name, len(arrays), "arrays")


if __name__ == "__main__":
    main()
