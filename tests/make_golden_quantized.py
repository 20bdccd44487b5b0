"""Make tests/golden/quantized*.safetensors and mixed*.safetensors: what mlx-lm and transformers compute for
checkpoints that mlx-lm quantised.

Run by hand, never by pytest, in an environment with mlx, mlx-lm, torch and transformers:

    python tests/make_golden_quantized.py

quantized.safetensors holds the tensors that mlx_lm.convert made of the random checkpoint in QUANTIZED below, of 4 bits
in groups of 64, and in its metadata the config.json. quantized_logits.safetensors holds, for 4 and for 8 bits, `ids`
(n,); `mlx_lm.4` (n, vocab), mlx-lm's logits in float32; `transformers.4`, those of transformers in float32 for a
checkpoint of the weights that mlx.core.dequantize gives back; `greedy.4` (24,), what mlx-lm goes on with.

mixed.safetensors and mixed_logits.safetensors hold the same, without a number after the names, for the checkpoint in
MIXED as `mlx_lm.convert -q --quant-predicate mixed_4_6` packs it: some matrices with 4 bits, some with 6.
"""
import json
import random
import tempfile
from pathlib import Path

import mlx.core as mx
import torch
import transformers
from checkpoints import make_checkpoint
from mlx.utils import tree_map
from mlx_lm import convert, load

HERE = Path(__file__).resolve().parent
QUANTIZED = {"name": "bfloat16", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
             "intermediate_size": 128}
MIXED = QUANTIZED | {"tie_word_embeddings": False}


def dequantized(folder, out):
    """Write the checkpoint in folder without its quantisation: float32 weights, for transformers."""
    config = json.loads((folder / "config.json").read_text())
    packing = config.pop("quantization")
    del config["quantization_config"]
    stored = mx.load(str(folder / "model.safetensors"))
    for name in [name for name in stored if name.endswith(".scales")]:
        own = packing | packing.get(name.removesuffix(".scales"), {})
        parts = [stored.pop(name.replace("scales", part)) for part in ("weight", "scales", "biases")]
        stored[name.replace("scales", "weight")] = mx.dequantize(
            parts[0], parts[1].astype(mx.float32), parts[2].astype(mx.float32), own["group_size"] or 64, own["bits"])
    out.mkdir()
    (out / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
    mx.save_safetensors(str(out / "model.safetensors"), {n: w.astype(mx.float32) for n, w in stored.items()},
                        metadata={"format": "pt"})


def judge(folder, scratch, ids):
    """(mlx-lm's logits, transformers' logits, 24 ids mlx-lm goes on with) for the quantised checkpoint in folder."""
    model, _ = load(str(folder))
    model.update(tree_map(lambda w: w if w.dtype == mx.uint32 else w.astype(mx.float32), model.parameters()))
    text = list(ids)
    for _ in range(24):
        text.append(mx.argmax(model(mx.array(text)[None])[0, -1]).item())
    plain = scratch / f"{folder.name} plain"
    dequantized(folder, plain)
    peer = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = peer(torch.tensor([ids])).logits[0].numpy()
    return model(mx.array(ids)[None])[0], mx.array(logits), mx.array(text[len(ids):])


def save(name, folder):
    """Keep the tensors of the checkpoint in folder, with its config.json, as one golden file."""
    mx.save_safetensors(str(HERE / f"golden/{name}.safetensors"), dict(mx.load(str(folder / "model.safetensors"))),
                        metadata={"config.json": (folder / "config.json").read_text()})


def differ(kind, mlx_lm, peer):
    print(f"{kind}: mlx-lm and transformers differ by at most", mx.abs(mlx_lm - peer).max().item())


def main():
    ids = [random.Random("quantized").randrange(256) for _ in range(12)]
    arrays, mixed = {"ids": mx.array(ids)}, {"ids": mx.array(ids)}
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        source = make_checkpoint(scratch / "source", **QUANTIZED)
        for bits in (4, 8):
            folder = scratch / f"quantized{bits}"
            convert(hf_path=str(source), mlx_path=str(folder), quantize=True, q_bits=bits, q_group_size=64)
            arrays |= zip((f"mlx_lm.{bits}", f"transformers.{bits}", f"greedy.{bits}"), judge(folder, scratch, ids))
            differ(f"{bits} bits", arrays[f"mlx_lm.{bits}"], arrays[f"transformers.{bits}"])
            if bits == 4:
                save("quantized", folder)
        source = make_checkpoint(scratch / "mixed source", **MIXED)
        folder = scratch / "mixed"              # as the command line does it, which leaves the group size open
        convert(hf_path=str(source), mlx_path=str(folder), quantize=True, quant_predicate="mixed_4_6")
        mixed |= zip(("mlx_lm", "transformers", "greedy"), judge(folder, scratch, ids))
        differ("mixed", mixed["mlx_lm"], mixed["transformers"])
        save("mixed", folder)
    mx.save_safetensors(str(HERE / "golden/quantized_logits.safetensors"), arrays)
    mx.save_safetensors(str(HERE / "golden/mixed_logits.safetensors"), mixed)


if __name__ == "__main__":
    main()
