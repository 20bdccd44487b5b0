"""Make tests/golden/quantized*.safetensors: what mlx-lm and transformers compute for checkpoints that mlx-lm quantised.

Run by hand, never by pytest, in an environment with mlx, mlx-lm, torch and transformers:

    python tests/make_golden_quantized.py

quantized.safetensors holds the tensors that mlx_lm.convert made of the random checkpoint in QUANTIZED below, of 4 bits
in groups of 64, and in its metadata the config.json. quantized_logits.safetensors holds, for 4 and for 8 bits, `ids`
(n,); `mlx_lm.4` (n, vocab), mlx-lm's logits in float32; `transformers.4`, those of transformers in float32 for a
checkpoint of the weights that mlx.core.dequantize gives back; `greedy.4` (24,), what mlx-lm goes on with.
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


def dequantized(folder, out):
    """Write the checkpoint in folder without its quantisation: float32 weights, for transformers."""
    config = json.loads((folder / "config.json").read_text())
    packing = config.pop("quantization")
    del config["quantization_config"]
    stored = mx.load(str(folder / "model.safetensors"))
    for name in [name for name in stored if name.endswith(".scales")]:
        parts = [stored.pop(name.replace("scales", part)) for part in ("weight", "scales", "biases")]
        stored[name.replace("scales", "weight")] = mx.dequantize(
            parts[0], parts[1].astype(mx.float32), parts[2].astype(mx.float32), packing["group_size"], packing["bits"])
    out.mkdir()
    (out / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
    mx.save_safetensors(str(out / "model.safetensors"), {n: w.astype(mx.float32) for n, w in stored.items()},
                        metadata={"format": "pt"})


def main():
    ids = [random.Random("quantized").randrange(256) for _ in range(12)]
    arrays = {"ids": mx.array(ids)}
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        source = make_checkpoint(scratch / "source", **QUANTIZED)
        for bits in (4, 8):
            folder, plain = scratch / f"quantized{bits}", scratch / f"plain{bits}"
            convert(hf_path=str(source), mlx_path=str(folder), quantize=True, q_bits=bits, q_group_size=64)
            model, _ = load(str(folder))
            model.update(tree_map(lambda w: w if w.dtype == mx.uint32 else w.astype(mx.float32), model.parameters()))
            arrays[f"mlx_lm.{bits}"] = model(mx.array(ids)[None])[0]
            text = list(ids)
            for _ in range(24):
                text.append(mx.argmax(model(mx.array(text)[None])[0, -1]).item())
            arrays[f"greedy.{bits}"] = mx.array(text[len(ids):])
            dequantized(folder, plain)
            peer = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
            with torch.no_grad():
                arrays[f"transformers.{bits}"] = mx.array(peer(torch.tensor([ids])).logits[0].numpy())
            if bits == 4:
                mx.save_safetensors(str(HERE / "golden/quantized.safetensors"),
                                    dict(mx.load(str(folder / "model.safetensors"))),
                                    metadata={"config.json": (folder / "config.json").read_text()})
    mx.save_safetensors(str(HERE / "golden/quantized_logits.safetensors"), arrays)
    for bits in (4, 8):
        print(bits, "bits: mlx-lm and transformers differ by at most",
              mx.abs(arrays[f"mlx_lm.{bits}"] - arrays[f"transformers.{bits}"]).max().item())


if __name__ == "__main__":
    main()
