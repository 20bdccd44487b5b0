"""Small random checkpoints of many shapes, in Hugging Face form, the same on every machine.

Every weight is a multiple of 1/512 with at most 8 significant bits, so float32, float16 and bfloat16 files hold
exactly the same numbers. The bytes come from Python's generator, which gives the same on every version and system.
"""
import json
import random

import mlx.core as mx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

BASE = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_act": "silu", "attention_bias": False,
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 272, "max_position_embeddings": 640,
    "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": True, "eos_token_id": 258,
}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "mlp_bias": False, "rope_theta": 10000.0}

# name: what differs from BASE; None leaves a field out. "dtype" and "shards" are about the files, not in config.json.
CHECKPOINTS = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "one_kv_head": {"num_key_value_heads": 1, "head_dim": 24},
    "as_many_kv_heads": {"num_key_value_heads": 4, "rms_norm_eps": 1e-5},
    "three_queries_a_kv_head": {"num_attention_heads": 6, "head_dim": 10, "tie_word_embeddings": False},
    "float16": {"dtype": mx.float16, "num_attention_heads": 8},
    "bfloat16": {"dtype": mx.bfloat16, "hidden_size": 40, "rope_theta": None,
                 "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0}},
    "sharded": {"shards": 3, "tie_word_embeddings": False, "num_hidden_layers": 4},
    "llama_head_dim": LLAMA | {"head_dim": 20, "tie_word_embeddings": False},
    "llama_no_head_dim": LLAMA | {"head_dim": None, "num_attention_heads": 6, "num_key_value_heads": 3},
}


def random_weights(config, seed=0):
    """{name: float32 array} for a config dict: matrices uniform in [-1/4, 1/4), norm weights in [1/2, 3/2)."""
    rng = random.Random(seed)

    def weight(rows, columns):
        return (mx.array(list(rng.randbytes(rows * columns)), dtype=mx.float32).reshape(rows, columns) - 128) / 512

    def norm(size):
        return 1 + (mx.array(list(rng.randbytes(size)), dtype=mx.float32) - 128) / 256

    d, ff, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    d_head = config.get("head_dim") or d // heads
    kv = config["num_key_value_heads"]
    weights = {"model.embed_tokens.weight": weight(config["vocab_size"], d), "model.norm.weight": norm(d)}
    for i in range(config["num_hidden_layers"]):
        block = {
            "input_layernorm": norm(d), "post_attention_layernorm": norm(d),
            "self_attn.q_proj": weight(heads * d_head, d), "self_attn.k_proj": weight(kv * d_head, d),
            "self_attn.v_proj": weight(kv * d_head, d), "self_attn.o_proj": weight(d, heads * d_head),
            "mlp.gate_proj": weight(ff, d), "mlp.up_proj": weight(ff, d), "mlp.down_proj": weight(d, ff),
        }
        if config["model_type"] == "qwen3":
            block |= {"self_attn.q_norm": norm(d_head), "self_attn.k_norm": norm(d_head)}
        weights |= {f"model.layers.{i}.{name}.weight": w for name, w in block.items()}
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = weight(config["vocab_size"], d)
    return weights


def byte_tokenizer():
    """A tokenizer with a token for each of the 256 bytes and the three special ones of Qwen3, 256 to 258."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    return tokenizer


def make_checkpoint(folder, name="tied", **overrides):
    """Write one of CHECKPOINTS, with further config fields changed, into a new folder; returns the folder."""
    config = BASE | CHECKPOINTS[name] | overrides
    dtype, shards = config.pop("dtype", mx.float32), config.pop("shards", 1)
    config = {field: value for field, value in config.items() if value is not None}
    config["torch_dtype"] = str(dtype).removeprefix("mlx.core.")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    weights = {n: w.astype(dtype) for n, w in random_weights(config, seed=len(name)).items()}
    if shards == 1:
        mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "pt"})
        return folder
    names, weight_map = sorted(weights), {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {n: weights[n] for n in names[shard::shards]}
        mx.save_safetensors(str(folder / file), part, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


LOADED = {}                     # (folder, type): weights, constants and the tokenizer's text, as load_model made them


def load(folder, dtype=mx.float32):
    """load_model for a folder that nobody changes: its files are read for the first caller only.

    All others get the same weights and constants back, whatever was put in their places meanwhile.
    """
    import llm_inference as llm                         # make_golden.py does without it
    if (folder, dtype) not in LOADED:
        llm.load_model(folder, dtype)
        constants = {name: getattr(llm, name) for name in [*llm.CONSTANTS, "EOS_IDS", "tok"]}
        LOADED[folder, dtype] = dict(llm.W), constants | {"EOS_IDS": set(llm.EOS_IDS)}, llm.tok.to_str()
    weights, constants, _ = LOADED[folder, dtype]
    llm.W.clear()
    llm.W.update(weights)
    vars(llm).update(constants, EOS_IDS=set(constants["EOS_IDS"]))
    llm.tok.encode_special_tokens = False               # which a chat changes
    llm.use_kernels(llm.wanted_kernels)                 # which brings the weights into this set's arrays
