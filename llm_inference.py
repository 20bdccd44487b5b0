"""Inside an LLM: all that happens between a prompt and its continuation, in one file, for Qwen3-0.6B.

    python llm_inference.py "The capital of France is"

    text -> tokens --> embedding --> [ transformer block x 28 ] --> norm, head --> logits --> sample --> token
             step 1     step 2          step 7: norm (3)             step 8                    step 8      |
                ^                               RoPE (4)                                                   |
                |                               attention (5)  <--> KV cache                               |
                |                               feed-forward (6)                                           |
                +------------------------ step 9: once more, for the next token ---------------------------+

Read it from top to bottom: loading the weights (a first reading may skip that), Steps 1 to 9, what goes
beyond them (kernels, chat, two looks inside), the command line. A function stands below all it needs. Shapes
are written (rows, columns), and (16, n, 128) is 16 such matrices; n is the number of new tokens; the numbers
in comments are Qwen3-0.6B's. MLX is lazy: an expression notes what is to be computed, and the work is done
when a value is asked for.
"""
import os
import signal

if __name__ == "__main__":      # Ctrl-C: leave at once and with no traceback, also while the rest is imported
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

import argparse
import contextlib
import ctypes
import functools
import hashlib
import json
import math
import re
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path


def load_openblas():
    """Let OpenBLAS compute MLX's float32 matrix products on a Linux CPU. Returns True if it was found.

    MLX's Linux wheel brings the reference BLAS, which is written to be clear, not fast. A library that was
    loaded before it with RTLD_GLOBAL answers in its place. PyPI's cmeel-openblas asks for libgfortran.so.5,
    which a new machine lacks; MLX brings that under another name, so here a copy of it is loaded with the
    name put right.
    """
    folders = [Path(p) for p in sys.path]
    with contextlib.suppress(OSError):
        for runtime in [r for f in folders for r in f.glob("mlx_cpu.libs/libgfortran-*")]:
            ctypes.CDLL(str(runtime))                           # it finds libquadmath, which the copy can't
            with tempfile.NamedTemporaryFile() as copy:
                name = b"libgfortran.so.5".ljust(len(runtime.name), b"\0")
                copy.write(runtime.read_bytes().replace(runtime.name.encode(), name))
                copy.flush()
                ctypes.CDLL(copy.name)
    for library in [f / "cmeel.prefix/lib/libopenblas.so.0" for f in folders] + ["libopenblas.so.0"]:
        with contextlib.suppress(OSError):
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
            return True
    return False


HAS_OPENBLAS = sys.platform == "linux" and load_openblas()      # before MLX is imported: later is too late

try:
    import mlx.core as mx
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tqdm import tqdm                                       # tokenizers brings it
except ImportError as error:                                    # on Linux also an MLX without its CPU part
    sys.exit(f'llm_inference.py: {" ".join(str(error).split())}: pip install "mlx[cpu]" tokenizers')

# ==== The model: weights, a tokenizer and some numbers, all filled in by load_model =========================
W: dict[str, mx.array] = {}     # every weight under its Hugging Face name; if packed, (w, scales, biases)
tok: Tokenizer                  # text <-> token ids
EOS_IDS: set[int]               # the tokens that end a text: 151645 and 151643
PACKING: dict | None            # how quantised matrices are packed: their bits and group_size
NUMBERS = {                     # more global variables, each with its field in config.json
    "N_LAYERS": "num_hidden_layers",                # transformer blocks: 28
    "D_MODEL": "hidden_size",                       # numbers that describe one token: 1024
    "D_FF": "intermediate_size",                    # numbers inside the feed-forward layer: 3072
    "N_HEADS": "num_attention_heads",               # query heads: 16
    "N_KV": "num_key_value_heads",                  # key/value heads, shared by the query heads: 8
    "D_HEAD": "head_dim",                           # numbers in a head: 128
    "VOCAB": "vocab_size",                          # rows of the embedding: 151936
    "MAX_POSITIONS": "max_position_embeddings",     # the longest text, in tokens: 40960
    "EPS": "rms_norm_eps",                          # keeps RMSNorm from dividing by zero: 1e-06
    "THETA": "rope_theta",                          # the base of RoPE's angles: 1000000
}

# MLX's quantised weights: integers of a few bits, and for each group of them in a row a scale and a bias
QUANTIZED = [{"group_size": group_size, "bits": bits} | mode for group_size in (32, 64, 128)
             for bits in (2, 3, 4, 5, 6, 8) for mode in ({}, {"mode": "affine"})]
# What fields of config.json may say, where not null, for this file to compute the checkpoint exactly
SUPPORTED = {
    "model_type": ["qwen3", "llama"], "hidden_act": ["silu"], "attention_bias": [False], "mlp_bias": [False],
    "rope_scaling": [{}], "rope_parameters": [{}], "rope_interleaved": [False], "rope_traditional": [False],
    "partial_rotary_factor": [1], "use_sliding_window": [False], "sliding_window": [], "layer_types": [],
    "is_causal": [True], "num_experts": [], "num_local_experts": [], "tie_word_embeddings": [True, False],
    "quantization": QUANTIZED, "quantization_config": QUANTIZED}

FLOATS = (mx.bfloat16, mx.float16, mx.float32)                  # what weights may be stored and computed in


def read_json(path):
    """The JSON object in a file, as a dict. ValueError names a file that holds none."""
    try:
        return dict(json.loads(path.read_bytes()))              # dict: fails for a number, a string or null
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is not a JSON object ({error})") from None


def read_config(path):
    """config.json, without what asks for nothing special, and its numbers under this file's names.

    ValueError names the first field that is missing, or that asks for something this file would get wrong.
    """
    config = read_json(path)
    plain = {"rope_type": "default", "type": "default", "partial_rotary_factor": 1}
    for field in ("rope_parameters", "rope_scaling"):           # transformers 5: rope_theta is in the former
        rope = config.get(field) or {}
        if isinstance(rope, dict):
            theta = rope.pop("rope_theta", None)
            config["rope_theta"] = config.get("rope_theta") if theta is None else theta
            config[field] = {key: value for key, value in rope.items() if plain.get(key) != value}
    if config.get("use_sliding_window") is False:
        config["sliding_window"] = None                         # a width that is written but not used
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and all(kind == "full_attention" for kind in kinds):
        config["layer_types"] = None
    # A field that is null is left out, as if it were missing; but model_type must be there to be checked
    config = {"model_type": None} | {field: value for field, value in config.items() if value is not None}
    for field, values in SUPPORTED.items():
        if field in config and config[field] not in values:
            raise ValueError(f"{path}: {field} is {json.dumps(config[field])}, which is not supported")

    config = {"num_key_value_heads": config.get("num_attention_heads"), "rope_theta": 10000} | config
    numbers = {}
    for name, field in NUMBERS.items():
        if name == "D_HEAD":                                    # if it isn't given, D_MODEL is cut into heads
            config.setdefault(field, numbers["D_MODEL"] // numbers["N_HEADS"])
        value, kinds = config.get(field), (int, float) if name in ("EPS", "THETA") else (int,)
        if type(value) not in kinds or not 0 < value < 2**53:
            raise ValueError(f"{path}: {field} is {json.dumps(value)}, not a positive {kinds[-1].__name__}")
        numbers[name] = value
    if numbers["N_HEADS"] % numbers["N_KV"] or numbers["D_HEAD"] % 2:
        raise ValueError(f"{path}: num_attention_heads {numbers['N_HEADS']} is not a multiple of "
                         f"num_key_value_heads {numbers['N_KV']}, or head_dim {numbers['D_HEAD']} is odd")
    return config, numbers


def expected_shapes(c, qk_norm, own_head):
    """{name: shape} of the tensors that a checkpoint with the numbers c must hold, no more and no fewer.

    qk_norm: has every block Qwen3's norms of queries and keys? own_head: is lm_head.weight stored?
    """
    d, q, kv = c["D_MODEL"], c["N_HEADS"] * c["D_HEAD"], c["N_KV"] * c["D_HEAD"]
    block = {
        "input_layernorm": (d,), "self_attn.q_proj": (q, d), "self_attn.k_proj": (kv, d),
        "self_attn.v_proj": (kv, d), "self_attn.o_proj": (d, q), "post_attention_layernorm": (d,),
        "mlp.gate_proj": (c["D_FF"], d), "mlp.up_proj": (c["D_FF"], d), "mlp.down_proj": (d, c["D_FF"])}
    if qk_norm:
        block |= {"self_attn.q_norm": (c["D_HEAD"],), "self_attn.k_norm": (c["D_HEAD"],)}
    shapes = {"model.embed_tokens.weight": (c["VOCAB"], d), "model.norm.weight": (d,)}
    if own_head:
        shapes["lm_head.weight"] = (c["VOCAB"], d)
    for i in range(c["N_LAYERS"]):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in block.items()}
    return shapes


def read_weights(folder):
    """{name: array} of model.safetensors or the shards in its index. Lazy: so far only headers are read.

    ValueError: a file is cut off, is none of weights, or its tensors don't fill it one after another.
    """
    files, index = ["model.safetensors"], folder / "model.safetensors.index.json"
    if index.exists() and not (folder / files[0]).exists():
        weight_map = read_json(index).get("weight_map")
        files = sorted({str(file) for file in weight_map.values()}) if isinstance(weight_map, dict) else []
    stored = {}
    for file in files:
        try:
            stored |= mx.load(str(folder / file), format="safetensors")
            with open(folder / file, "rb") as opened:           # whose header has each tensor's place
                header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
                size = (folder / file).stat().st_size - opened.tell()
            spans = sorted(entry["data_offsets"] for name, entry in header.items() if name != "__metadata__")
            if [begin for begin, _ in spans] + [size] != [0] + [end for _, end in spans]:
                raise ValueError("its tensors leave gaps or overlap")
        except (RuntimeError, ValueError, TypeError) as error:  # half a download, say, or a Git LFS pointer
            raise ValueError(f"{folder / file} can't be read as weights: {error}") from None
    return {name: w for name, w in stored.items() if not name.endswith("rotary_emb.inv_freq")}  # old Llamas'


def read_tokenizer(path, rows):
    """A tokenizers.Tokenizer from tokenizer.json. ValueError if it is none, or has ids beyond the rows."""
    try:
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.no_truncation()                               # the file may ask for all three, for training
        tokenizer.no_padding()
        if hasattr(tokenizer.model, "dropout"):                 # of merges, by chance
            tokenizer.model.dropout = None
        largest = max([0, *tokenizer.get_vocab().values(), *tokenizer.encode("").ids])
    except BaseException as error:                              # a panic in Rust is no Exception
        raise ValueError(f"{path} can't be read as a tokenizer: {error}") from None
    if largest >= rows:
        raise ValueError(f"{path} has {largest + 1} tokens, the embedding only {rows} rows (vocab_size)")
    return tokenizer


def read_eos(config, path):
    """The set of end tokens in config.json and, if there is one, in generation_config.json."""
    found = [config.get("eos_token_id"), read_json(path).get("eos_token_id") if path.exists() else None]
    ids = [i for entry in found for i in (entry if isinstance(entry, list) else [entry]) if i is not None]
    if not all(type(i) is int for i in ids):
        raise ValueError(f"{path.parent}: eos_token_id is {json.dumps(ids)}, not token ids")
    return set(ids)


def unpack(folder, stored, packing, bits):
    """Replace the parts of quantised matrices in stored by their values; return {name: (w, scales, biases)}.

    A value is scale * integer + bias. packing: bits and group_size, or None. bits: quantise the matrices
    first, or None. ValueError names a matrix that can't be packed so.
    """
    packed = {}
    for name in [name for name in sorted(stored) if name.endswith(".weight")]:
        parts = [name.replace(".weight", part) for part in (".weight", ".scales", ".biases")]
        try:
            if bits and stored[name].ndim == 2:                 # now it is as if it had been stored so
                stored |= zip(parts, mx.quantize(stored[name], **packing))
            if packing and parts[1] in stored and parts[2] in stored:
                w, scales, biases = packed[name] = tuple(stored.pop(part) for part in parts)
                if scales.shape != biases.shape or scales.dtype not in FLOATS or biases.dtype not in FLOATS:
                    raise ValueError("its scales and biases are of different shapes, or no floats")
                stored[name] = mx.dequantize(w, *[x.astype(mx.float32) for x in (scales, biases)], **packing)
        except ValueError as error:
            raise ValueError(f"{folder}: {name}: {error}") from None
    return packed


def check_weights(folder, stored, shapes):
    """ValueError if a tensor is missing, misshapen, too many or of another type."""
    for name in sorted(shapes.keys() | stored.keys()):
        found, wanted = getattr(stored.get(name), "shape", "nothing"), shapes.get(name, "nothing")
        if found != wanted:
            raise ValueError(f"{folder}: {name}: the weights hold {found}, config.json asks for {wanted}")
        if stored[name].dtype not in FLOATS:
            raise ValueError(f"{folder}: {name} is {stored[name].dtype}, which is not supported")


def fill_weights(folder, weights):
    """Move weights into W, computing one at a time. ValueError: they are larger than the memory."""
    needed = sum(part.nbytes for w in weights.values() for part in (w if isinstance(w, tuple) else (w,)))
    if needed > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
        raise ValueError(f"{folder}: the weights take {needed / 1e9:.1f} GB, more memory than there is")
    W.clear()
    for name in list(weights):
        W[name] = weights.pop(name)
        mx.eval(W[name])                                        # now, so that what was stored can go


def load_model(folder, dtype=None, quantize=None):
    """Fill W, tok and all the other globals from a folder in Hugging Face form, such as Qwen3-0.6B/.

    dtype: what to compute in. None: as stored on a GPU; float32 on a CPU, where bfloat16 products are slow.
    quantize: the bits, 4 or 8, to which the matrices are rounded; None leaves them as they are. On a GPU they
    take less memory so; on a CPU the rounded numbers are float32 again, as its packed products are slow.
    OSError: a file can't be read. ValueError, in one line that names field or tensor: this file would not
    compute the checkpoint exactly. After either, the model that was loaded before is still whole.
    """
    if quantize not in (None, 4, 8) or (dtype or mx.float32) not in FLOATS:
        raise ValueError(f"quantize is {quantize}, dtype {dtype}: 4, 8 and a type of float are supported")
    folder, on_gpu = Path(folder), mx.default_device() == mx.gpu
    config, numbers = read_config(folder / "config.json")
    eos = read_eos(config, folder / "generation_config.json")
    tokenizer = read_tokenizer(folder / "tokenizer.json", numbers["VOCAB"])
    stored = read_weights(folder)
    if numbers["N_LAYERS"] > len(stored):                       # before a list of so many tensors is made
        raise ValueError(f"{folder}: num_hidden_layers is {numbers['N_LAYERS']} with {len(stored)} tensors")
    tied = config.get("tie_word_embeddings", "lm_head.weight" not in stored)
    for name in [name for name in stored if tied and name.startswith("lm_head.")]:      # stored all the same
        head, embedding = stored.pop(name), stored.get(name.replace("lm_head", "model.embed_tokens"))
        if embedding is None or not mx.array_equal(head, embedding):
            raise ValueError(f"{folder}: tie_word_embeddings is true, but {name} is not the embedding's")
    packing = {"group_size": 64, "bits": quantize} if quantize else None
    if as_stored := config.get("quantization") or config.get("quantization_config"):
        if quantize:
            raise ValueError(f"{folder} is quantised already, to {as_stored['bits']} bits")
        packing = QUANTIZED[QUANTIZED.index(as_stored)]         # with 4 where JSON may say 4.0
    packed = unpack(folder, stored, packing, quantize)
    check_weights(folder, stored, expected_shapes(numbers, config["model_type"] == "qwen3", not tied))
    if not tied and not mx.isfinite(stored["model.embed_tokens.weight"]).all():
        raise ValueError(f"{folder}: model.embed_tokens.weight is not finite")      # tied, the head shows it
    dtype = dtype or (stored["model.norm.weight"].dtype if on_gpu else mx.float32)
    weights = {name: w.astype(dtype) for name, w in stored.items()}
    for name, (w, *rest) in packed.items() if on_gpu else ():   # a CPU is slow with packed ones
        weights[name] = (w, *[part.astype(dtype) for part in rest])
    stored = packed = head = embedding = None                   # else these would keep all that is stored
    fill_weights(folder, weights)
    W.setdefault("lm_head.weight", W["model.embed_tokens.weight"])      # tied
    globals().update(numbers, tok=tokenizer, EOS_IDS=eos, PACKING=packing)      # N_LAYERS = 28 and so on


# ==== Step 1: tokenization turns text into integers =========================================================
def check_length(ids, max_tokens):
    """The ids again. ValueError: there are none, or they and max_tokens new ones exceed the context."""
    if not ids:
        raise ValueError("the prompt is empty")
    if len(ids) + max_tokens > MAX_POSITIONS:
        raise ValueError(f"the prompt's {len(ids)} tokens and {max_tokens} new ones do not fit in the "
                         f"context of {MAX_POSITIONS} tokens")
    return ids


def encode(prompt, max_tokens=0):
    """A prompt's token ids by byte pair encoding: "The capital of France is" is 785, 6722, 315, 9625, 374.

    ValueError as in check_length.
    """
    return check_length(tok.encode(prompt).ids, max_tokens)


# ==== Step 2: embedding turns integers into vectors =========================================================
def embed(token_ids):
    """The row of the embedding matrix for each of n token ids: (n,) -> (n, 1024)."""
    ids, w = mx.array(token_ids), W["model.embed_tokens.weight"]
    if isinstance(w, tuple):                                    # packed
        return mx.dequantize(*[part[ids] for part in w], **PACKING)
    return w[ids]


# ==== Tools for Steps 5, 6 and 8: a product with a weight matrix, e^x, and all cores of a CPU ===============
STREAMS = []                    # on a CPU MLX's queues of work, one for each of up to 8 cores
if mx.default_device() == mx.cpu:
    STREAMS = [mx.default_stream(mx.cpu)] + [mx.new_stream(mx.cpu) for _ in range(os.cpu_count() or 1)[1:8]]


def in_parallel(compute, *arrays):
    """compute(*arrays); on a CPU with the arrays' first axis cut into a part for every stream.

    MLX computes all but large matrix products on one core, but each of its streams on a core of its own.
    """
    own_thread = threading.current_thread() is threading.main_thread()      # MLX's streams belong to a thread
    if not STREAMS or not own_thread or max(array.size for array in arrays) < 2**17:
        return compute(*arrays)                                 # on a GPU, in another thread, or too little
    length, results = len(arrays[0]), []
    for i, core in enumerate(STREAMS):
        start, end = length * i // len(STREAMS), length * (i + 1) // len(STREAMS)
        if start < end:
            with mx.stream(core):
                results.append(compute(*[array[start:end] for array in arrays]))
    return mx.concatenate(results)


def exp(x):
    """e^x in float32: mx.exp(x) but for rounding, and MLX's power takes less than half the time on a CPU."""
    return mx.e ** x.astype(mx.float32)


def linear(x, name):
    """x @ w.T for a weight matrix w, which is stored as (out, in): (n, in) -> (n, out).

    For a few rows, as in decode, OpenBLAS first copies the whole matrix, unless it comes in small pieces,
    which MLX would join again without [None].
    """
    w = W[name]
    if isinstance(w, tuple):                                    # packed: it is unpacked as it is multiplied
        return mx.quantized_matmul(x, *w, **PACKING)
    if len(x) > 8 or not STREAMS:
        return x @ w.T
    pieces = w.reshape(-1, math.gcd(len(w), 64), w.shape[1])    # (out / 64, 64, in)
    out = in_parallel(lambda part: part @ x.T[None], pieces)    # (out / 64, 64, n)
    return out.reshape(-1, len(x)).T


# ==== Step 3: RMSNorm brings every vector to the same size ==================================================
def rms_norm(x, w):
    """x / sqrt(mean(x^2) + EPS) * w, over the last axis: any shape (..., d), w (d,). Zhang and Sennrich 2019.

    Squares lose digits in 16 bits, so the norm is taken in float32, and rounded back before w multiplies it,
    as in Hugging Face's code.
    """
    x32 = x.astype(mx.float32)
    x32 = x32 * mx.rsqrt(mx.mean(x32 * x32, axis=-1, keepdims=True) + EPS)
    return x32.astype(x.dtype) * w


# ==== Step 4: RoPE weaves position into the vectors =========================================================
def apply_rope(q, k, positions):
    """Turn every query and key by angles that grow with its position. Su et al. 2021, "RoFormer".

    q (16, n, 128), k (8, n, 128), positions n integers; the same shapes come back. Dimensions i and i + 64
    are the coordinates of a point in a plane, which turns by position * THETA^(-i/64) radians. So the dot
    product of a query and a key depends on what they hold and how far apart they are, not on where they are.
    """
    half = D_HEAD // 2
    freqs = THETA ** (-mx.arange(half, dtype=mx.float32) / half)                # (64,) radians per position
    angles = mx.array(positions, dtype=mx.float32)[:, None] * freqs             # (n, 64)
    cos, sin = mx.cos(angles), mx.sin(angles)                                   # float32, and so is x1 * cos

    def rotate(x):
        x1, x2 = x[..., :half], x[..., half:]                                   # each (heads, n, 64)
        return mx.concatenate([x1 * cos - x2 * sin, x1 * sin + x2 * cos], axis=-1).astype(x.dtype)

    return rotate(q), rotate(k)


# ==== Step 5: attention with grouped query heads and a KV cache =============================================
def extend_cache(cache, layer_idx, k, v):
    """Add the keys and values of n new tokens, (8, n, 128); return those of all tokens, (8, total, 128).

    A layer's entry is (keys, values, length); the arrays grow by room for 256 tokens. Writing into that room
    costs the same for every token, where concatenating would copy all that came before it. (MLX writes in
    place where nobody else holds the array, and copies where somebody does.)
    """
    n_kv, n, d_head = k.shape
    keys, values, length = cache[layer_idx] or (k[:, :0], v[:, :0], 0)
    total = length + n
    if total > keys.shape[1]:
        room = mx.zeros((n_kv, -(-total // 256) * 256 - length, d_head), dtype=k.dtype)
        keys, values = (mx.concatenate([x[:, :length], room], axis=1) for x in (keys, values))
    keys = mx.slice_update(keys, k, mx.array([length]), axes=[1])
    values = mx.slice_update(values, v, mx.array([length]), axes=[1])
    cache[layer_idx] = (keys, values, total)
    return keys[:, :total], values[:, :total]


def attend(q, k, v):
    """softmax(q k^T / sqrt(128)) v, for the last n of all tokens. Vaswani et al. 2017.

    q (16, n, 128), k and v (8, total, 128) -> (16, n, 128). Grouped queries: heads 0 and 1 use key/value head
    0, heads 2 and 3 use 1, and so on. The rows of such heads become one matrix: no key need be repeated.
    """
    (n_heads, n, d_head), (n_kv, total, _) = q.shape, k.shape
    future = mx.arange(total) > mx.arange(total - n, total)[:, None]            # (n, total)
    future = mx.tile(future, (n_heads // n_kv, 1))                              # (2n, total): two heads' rows

    def heads(q, k, v):                                                         # some of the key/value heads
        scores = (q @ k.transpose(0, 2, 1)).astype(mx.float32) * d_head ** -0.5             # (8, 2n, total)
        if n > 1:                                                               # a single one may look at all
            scores = mx.where(future, -mx.inf, scores)
        weights = exp(scores - mx.max(scores, axis=-1, keepdims=True))          # <= 1: it can't overflow
        weights = weights / mx.sum(weights, axis=-1, keepdims=True)             # softmax: a row adds up to 1
        return weights.astype(v.dtype) @ v

    return in_parallel(heads, q.reshape(n_kv, -1, d_head), k, v).reshape(n_heads, n, -1)


def attention(x, layer_idx, cache, positions):
    """Each of n new tokens gathers from all tokens up to itself: x (n, 1024) -> (n, 1024).

    positions: the n places in the text. cache[layer_idx] holds keys and values of all tokens before;
    afterwards those of the new ones too.
    """
    p = f"model.layers.{layer_idx}.self_attn"
    q = linear(x, f"{p}.q_proj.weight").reshape(-1, N_HEADS, D_HEAD).transpose(1, 0, 2)     # (16, n, 128)
    k = linear(x, f"{p}.k_proj.weight").reshape(-1, N_KV, D_HEAD).transpose(1, 0, 2)        # (8, n, 128)
    v = linear(x, f"{p}.v_proj.weight").reshape(-1, N_KV, D_HEAD).transpose(1, 0, 2)        # (8, n, 128)
    if f"{p}.q_norm.weight" in W:                               # QK-norm: Qwen3 has it, Llama has not
        q = rms_norm(q, W[f"{p}.q_norm.weight"])
        k = rms_norm(k, W[f"{p}.k_norm.weight"])
    q, k = apply_rope(q, k, positions)
    k, v = extend_cache(cache, layer_idx, k, v)                 # (8, total, 128)
    out = attend(q, k, v)                                       # (16, n, 128)
    out = out.transpose(1, 0, 2).reshape(-1, N_HEADS * D_HEAD)  # (n, 2048)
    return linear(out, f"{p}.o_proj.weight")                    # (n, 1024)


# ==== Step 6: the SwiGLU feed-forward layer =================================================================
def ffn(x, layer_idx):
    """down(SiLU(gate(x)) * up(x)) for every token by itself: (n, 1024) -> (n, 1024). Shazeer 2020.

    SiLU(g) = g * sigmoid(g) decides how much of each of the 3072 numbers in up(x) gets through.
    """
    p = f"model.layers.{layer_idx}.mlp"
    gate = linear(x, f"{p}.gate_proj.weight")                   # (n, 3072)
    up = linear(x, f"{p}.up_proj.weight")                       # (n, 3072)
    gate = in_parallel(lambda gate: (gate / (1 + exp(-gate))).astype(x.dtype), gate)    # SiLU, in float32
    return linear(gate * up, f"{p}.down_proj.weight")


# ==== Step 7: the transformer block =========================================================================
def transformer_block(x, layer_idx, cache, positions):
    """Attention, then feed-forward; each reads a normed copy of x and adds to x: (n, 1024) -> (n, 1024)."""
    p = f"model.layers.{layer_idx}"
    x = x + attention(rms_norm(x, W[f"{p}.input_layernorm.weight"]), layer_idx, cache, positions)
    return x + ffn(rms_norm(x, W[f"{p}.post_attention_layernorm.weight"]), layer_idx)


# ==== Step 8: all blocks and the head make logits, sampling makes a token ===================================
def forward(token_ids, cache, start_pos, last_only=False):
    """Score every token of the vocabulary as the one that follows each of n new tokens: logits (n, 151936).

    token_ids: n integers, which come after the start_pos tokens that the cache holds. last_only leaves out
    all rows but the last, (1, 151936): no more is needed to go on, and the head is the largest matrix of all.
    """
    positions = mx.arange(start_pos, start_pos + len(token_ids))
    x = embed(token_ids)                                        # (n, 1024)
    for layer_idx in range(N_LAYERS):
        x = transformer_block(x, layer_idx, cache, positions)
    x = rms_norm(x[-1:] if last_only else x, W["model.norm.weight"])
    return linear(x, "lm_head.weight")


def nucleus(logits, temperature, top_p):
    """All token ids, the most likely first, and the probability to draw each: (151936,) both.

    It is 0 outside the nucleus, the fewest tokens whose softmax(logits / temperature) adds up to at least
    top_p, and in proportion to that inside. Holtzman et al. 2019.
    """
    logits = logits.astype(mx.float32)
    temperature, top_p = max(temperature, 1e-30), max(top_p, 1e-30)     # float32 makes 0 of smaller ones
    probs = mx.softmax((logits - mx.max(logits)) / temperature)     # minus the largest: none can overflow
    order = mx.argsort(-probs)
    probs = probs[order]
    if top_p < 1:
        likelier = mx.cumsum(probs, inclusive=False)            # the sum of all before it: 0 for the first
        probs = mx.where(likelier < top_p, probs, 0)
    return order, probs / mx.sum(probs)


def sample(logits, temperature=0.0, top_p=0.95):
    """Choose a token id: logits (151936,) -> a 0-d array, not yet evaluated.

    Temperature 0 takes the most likely token ("greedy"); else one of the nucleus is drawn, in proportion.
    """
    if temperature == 0:
        return mx.argmax(logits)
    order, probs = nucleus(logits, temperature, top_p)
    return order[mx.random.categorical(mx.log(probs))]


# ==== Step 9: the generation loop, prefill and then decode ==================================================
def prefill(ids, cache, start_pos=0):
    """Run n tokens through the model, 256 at a time: fills the cache, returns the last logits (1, 151936).

    In pieces the scores of the masked future are mostly not computed, and their memory is bounded. The logits
    of all pieces but the last are never asked for, so MLX never computes them.
    """
    for i in tqdm(range(0, len(ids), 256), desc="prefill", delay=1, leave=False, disable=None):
        logits = forward(ids[i:i + 256], cache, start_pos + i, last_only=True)
        mx.eval(cache)
        mx.clear_cache()                                        # MLX's, of freed memory, not the KV cache
    if not mx.isfinite(logits).all():
        bad = [name for name, w in W.items() for part in (w[1:] if isinstance(w, tuple) else (w,))
               if not mx.isfinite(part).all()]
        raise ValueError(f"the logits are not finite; neither is {bad[0] if bad else 'a step on the way'}")
    return logits


def stream(ids, cache, start_pos=0, max_tokens=100, temperature=0.0, top_p=0.95):
    """Yield the text of each token that the model adds to ids, which follow start_pos tokens in the cache.

    The text is "" where a token ends inside a character. Ends after max_tokens, or at an end token, which is
    not shown. On a GPU the next step is queued before a token is read, so that it need not wait for Python.
    """
    text = decoders.DecodeStream(ids, skip_special_tokens=True)     # holds a character back until it is whole
    upcoming = sample(prefill(ids, cache, start_pos)[-1], temperature, top_p)
    first_pos, end_pos = start_pos + len(ids), start_pos + len(ids) + max_tokens
    for pos in range(first_pos, end_pos):
        token = upcoming
        if pos + 1 < end_pos:                                   # queue the next step first
            upcoming = sample(forward(token[None], cache, pos)[-1], temperature, top_p)
            if not STREAMS:                                     # a GPU begins now; a CPU when it is asked for
                mx.async_eval(upcoming)
        if token.item() in EOS_IDS:
            return
        yield text.step(tok, token.item()) or ""


def generate(prompt, max_tokens=100, temperature=0.0, top_p=0.95):
    """The prompt and its continuation, as one text. ValueError as in encode."""
    ids, cache = encode(prompt, max_tokens), [None] * N_LAYERS
    return prompt + "".join(stream(ids, cache, 0, max_tokens, temperature, top_p))


# ==== Beyond the article: the same maths as single kernels ==================================================
def fused_rms_norm(x, w):
    """rms_norm in one kernel."""
    return mx.fast.rms_norm(x, w, EPS)


def fused_apply_rope(q, k, positions):
    """apply_rope as two kernels, for positions in a row. A batch of one: MLX has lost heads without it."""
    options = {"traditional": False, "base": THETA, "scale": 1.0, "offset": positions[0]}
    return tuple(mx.fast.rope(x[None], D_HEAD, **options)[0] for x in (q, k))


def fused_attend(q, k, v):
    """attend in one kernel, which never writes the scores to memory ("FlashAttention", Dao et al. 2022)."""
    mask = "causal" if q.shape[1] > 1 else None
    return mx.fast.scaled_dot_product_attention(q[None], k[None], v[None], scale=D_HEAD ** -0.5, mask=mask)[0]


KERNELS = {"explicit": (rms_norm, apply_rope, attend),
           "fused": (fused_rms_norm, fused_apply_rope, fused_attend)}


def use_kernels(kind):
    """From now on compute with the "explicit" functions or the "fused" ones. On a CPU these gain nothing."""
    global rms_norm, apply_rope, attend
    rms_norm, apply_rope, attend = KERNELS[kind]


use_kernels("fused" if mx.default_device() == mx.gpu else "explicit")


# ==== Beyond the article: a conversation, in Qwen3's chat template ==========================================
def terminal_code(number):
    """The escape code for plain (0), bold (1) or dim (2) text; empty where nobody wants colour."""
    return f"\033[{number}m" if sys.stdout.isatty() and "NO_COLOR" not in os.environ else ""


def ids_of(text, typed=False):
    """Token ids of a piece of the template, or of text that was typed, where "<|im_end|>" has no meaning."""
    text.encode()                                               # fails for what is not UTF-8
    tok.encode_special_tokens = typed
    return tok.encode(text, add_special_tokens=False).ids


def turn_ids(role, text):
    """Token ids of one turn; role is "system", "user" or "assistant"."""
    return ids_of("<|im_start|>") + ids_of(f"{role}\n{text}", typed=True) + ids_of("<|im_end|>\n")


def typed_lines():
    """The lines of stdin that are not blank. At a terminal readline edits them."""
    with contextlib.suppress(ImportError):
        import readline                                         # noqa: F401  (from now on input uses it)
    if sys.stdin.isatty():                                      # Ctrl-C stops an answer, not the program
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with contextlib.suppress(EOFError):
        while True:
            if (line := input("> " if sys.stdin.isatty() else "")).strip():
                yield line


def chat(questions, system=None, think=False, max_tokens=1000, temperature=0.0, top_p=0.95):
    """Print an answer to each of the questions, as turns of one conversation.

    Without think an answer begins with an empty thought, so that the model thinks no more. Thoughts are not
    kept, as in Qwen3's own template: once an answer is there the cache goes back to the end of the question,
    and the answer without its thought is run again, in one go, with the next question. So an answer may break
    off anywhere: Ctrl-C at a terminal stops it, and what was shown stays part of the conversation.
    """
    if tok.token_to_id("<|im_end|>") not in EOS_IDS:
        raise ValueError("--chat needs a model that ends its turns with <|im_end|>, such as Qwen3-0.6B")
    thought = "" if think or tok.token_to_id("<think>") is None else "<think>\n\n</think>\n\n"
    opening = ids_of(f"<|im_start|>assistant\n{thought}")
    dim, plain = terminal_code(2), terminal_code(0)              # for thoughts
    start = [] if system is None else turn_ids("system", system)
    said, held, cache = start, 0, [None] * N_LAYERS             # tokens, and how many of them the cache holds
    for question in questions:
        if said != start and len(said + turn_ids("user", question) + opening) + max_tokens > MAX_POSITIONS:
            print(f"(The context of {MAX_POSITIONS} tokens is full: a new chat begins.)", file=sys.stderr)
            said, held, cache = start, 0, [None] * N_LAYERS
        said = said + turn_ids("user", question)
        new, answer = check_length(said + opening, max_tokens)[held:], ""
        with contextlib.suppress(KeyboardInterrupt):
            for piece in stream(new, cache, held, max_tokens, temperature, top_p):
                answer += piece
                piece = piece.replace("<think>", dim + "<think>").replace("</think>", "</think>" + plain)
                print(piece, end="", flush=True)
        print(plain)
        held = min(len(said), cache[-1][2] if cache[-1] else 0)  # without the answer; Ctrl-C leaves less
        cache = [entry and (*entry[:2], held) for entry in cache]
        said = said + turn_ids("assistant", answer.split("</think>")[-1].lstrip("\n"))


# ==== Beyond the article: every call of a decode step, with --trace =========================================
WATCHED = ["embed", "rms_norm", "apply_rope", "extend_cache", "attend", "attention", "ffn",
           "transformer_block", "linear", "forward", "sample"]


def watch(run):
    """Call run(), and note each call of a function in WATCHED meanwhile: [depth, name, arguments, result]."""
    calls, functions = [], {name: globals()[name] for name in WATCHED}

    def watched(name, *args, **options):
        call = [sum(len(c) == 3 for c in calls), name, args]    # as deep as there are calls without a result
        calls.append(call)
        call.append(functions[name](*args, **options))
        return call[-1]

    globals().update({name: functools.partial(watched, name) for name in WATCHED})
    try:
        run()
    finally:
        globals().update(functions)
    return calls


def shapes_of(values):
    """The shapes of an array, or of the arrays in a tuple, as text."""
    values = values if isinstance(values, tuple) else (values,)
    return " ".join(str(value.shape) for value in values if isinstance(value, mx.array))


def trace(prompt):
    """Print each call of a function in WATCHED in one decode step: weight or layer, shapes in, out, dtype."""
    ids, cache = encode(prompt, 2), [None] * N_LAYERS
    token = sample(prefill(ids, cache)[-1])
    names = {id(w): name for name, w in W.items()}
    for depth, name, args, result in watch(lambda: sample(forward(token[None], cache, len(ids))[-1])):
        labels = [names.get(id(a), a) for a in args if id(a) in names or isinstance(a, str)]
        labels += [f"layer {a}" for a in args if isinstance(a, int) and name != "forward"]
        dtype = str((result if isinstance(result, mx.array) else result[0]).dtype).removeprefix("mlx.core.")
        print(f"{'  ' * depth}{' '.join([name, *labels])}: {shapes_of(args)} -> {shapes_of(result)} {dtype}")


# ==== Beyond the article: the nine steps on your own prompt, with --explain =================================
# A step's number and function, and a regex for what it reads for a token: "" matches all of W, "-" nothing
STEPS = {"2 embed": "embed", "3 rms_norm": "norm", "4 apply_rope": "-", "5 attention": "self_attn",
         "6 ffn": "mlp", "7 transformer_block": "layers", "8 linear": "lm_head", "8 forward": "",
         "8 sample": "-"}


def spell(token_id):
    """A token in quotes, so that a space before it shows; as bytes where these are not whole characters.

    In tokenizers like Llama 2's a space is written "\u2581", a byte "<0xE6>". In those like Qwen3's each byte
    is a letter: the one with its number, or for the bytes without such a letter one from chr(256) on.
    """
    piece = tok.id_to_token(token_id) or ""
    text = piece.replace("\u2581", " ") if "\u2581" in piece else tok.decode([token_id], False)
    if "\ufffd" in text and "\ufffd" not in piece:
        rest = sorted(set(range(256)) - set(map(ord, pre_tokenizers.ByteLevel.alphabet())))
        text = bytes(ord(c) if ord(c) < 256 else rest[ord(c) - 256] for c in piece)
        text = bytes.fromhex(piece[3:5]) if piece.startswith("<0x") else text
    return repr(text)[:20]


def show(title, rows):
    """Print a title, bold on a terminal, and rows of cells; a float is a share of 1, and gets a bar."""
    block = "#" if "\u2588".encode(sys.stdout.encoding or "utf-8", "replace") == b"?" else "\u2588"
    print(f"\n{terminal_code(1)}{title}{terminal_code(0)}")
    for row in rows:
        print(*[f"{block * round(16 * c):16} {c:.4f}" if isinstance(c, float) else f"{c:8}" for c in row])


def show_costs(seen, n, speed):
    """Print what one token after n others costs, step by step and in all; speed in tokens/s.

    seen: {function: [(arguments, result) of each call]}. A product with a matrix takes as many multiply-adds
    as that has numbers. A step's share includes the steps that it calls.
    """
    kv_bytes = sum(k.nbytes + v.nbytes for (_, k, v), _ in seen["attend"]) // n
    parts = {name: (w.size * (w.ndim - 1), w.nbytes) for name, w in W.items()}      # none for a norm's vector
    parts["model.embed_tokens.weight"] = (0, W["model.embed_tokens.weight"][0].nbytes)      # a row is read
    # The cache's share has a name that the patterns for attention and for all blocks find
    parts["layers: self_attn, cache"] = (2 * N_LAYERS * N_HEADS * D_HEAD * (n + 1), kv_bytes * (n + 1))
    costs = {step: [sum(c) for c in zip((0, 0), *[parts[name] for name in parts if re.search(regex, name)])]
             for step, regex in STEPS.items()}
    (adds, read), (cache_adds, _) = costs["8 forward"], parts["layers: self_attn, cache"]
    show("Steps 2 to 8: the prompt's shapes in, out; shares of the next token's multiply-adds, bytes read",
         [(f"{step:19} {shapes_of(args[:2]):29} {shapes_of(result):28} {a / adds:8.2%} {b / read:8.2%}",)
          for step, (a, b) in costs.items() for args, result in seen[step[2:]][-1:]])
    stored = {id(w): w for w in W.values()}.values()            # tied: one array under two names
    show("What the next token costs", [
        (f"{sum(w.size for w in stored):,} parameters, {sum(w.nbytes for w in stored):,} bytes of weights",),
        (f"{kv_bytes:,} bytes of KV cache; {kv_bytes * N_HEADS // N_KV:,} if each query head had its own",),
        (f"{adds - cache_adds:,} multiply-adds with weights, {cache_adds:,} with the cache",),
        (f"{read:,} bytes read: {speed:.1f} tokens/s ask for {read * speed / 1e9:.2f} GB/s",)])


def explain(prompt):
    """Print what happens to a prompt, step by step.

    ValueError as in encode, for the prompt and 8 tokens more; if it has over 256 tokens, more than a piece of
    prefill; or if weights are packed, which show_costs can't count.
    """
    ids, cache = encode(prompt, 8), [None] * N_LAYERS
    n = len(ids)
    if n > 256 or any(isinstance(w, tuple) for w in W.values()):
        raise ValueError(f"--explain needs weights that are not packed, and up to 256 tokens: here are {n}")
    calls = watch(lambda: sample(prefill(mx.array(ids), cache)[-1]))
    seen = {name: [call[2:] for call in calls if call[1] == name] for name in WATCHED}
    longer, by_cache, times = list(ids), [seen["forward"][0][1][-1]], []
    for pos in range(n, n + 8):
        longer.append(sample(by_cache[-1]).item())
        times.append(time.perf_counter())
        by_cache.append(forward(longer[-1:], cache, pos)[-1])

    show("Step 1: position; id; text or bytes", [(i, token, spell(token)) for i, token in enumerate(ids)])
    show_costs(seen, n, 6 / (times[7] - times[1]))              # the first step may still prepare kernels

    turn = [180 / math.pi * THETA ** (-2 * pair / D_HEAD) for pair in (0, D_HEAD // 4, D_HEAD // 2 - 1)]
    q, k = (mx.repeat(x[:1, -1:].astype(mx.float32), n + 101, axis=1) for x in seen["apply_rope"][-1][0][:2])
    q, k = apply_rope(q, k, mx.arange(n + 101))                 # one query and one key, at every position
    qk1, qk4 = (mx.sum(q[0, apart:] * k[0, :-apart], axis=-1).tolist() for apart in (1, 4))
    show("Step 4: position; degrees the first, middle, last pair turn; q @ k 1 apart, 4 apart: constant",
         [(i, *[f"{i * t:12.6g}" for t in turn], f" {qk1[i]:.3f} {qk4[i]:.3f}") for i in [*range(n), n + 96]])

    for layer in sorted({0, N_LAYERS // 2, N_LAYERS - 1}):
        (q, k, _), _ = seen["attend"][layer]
        # value i is 1 in place i and 0 elsewhere, so what comes out are the weights: (16, n)
        weights = attend(q[:, -1:], k, mx.stack([mx.eye(n)] * N_KV))[:, 0]
        head = mx.argmax(mx.max(weights, axis=-1)).item()       # the most focused
        show(f"Step 5: position; where the last token looks in layer {layer}: head {head}; mean of all heads",
             [(i, weights[head, i].item(), mx.mean(weights[:, i]).item(), spell(ids[i])) for i in range(n)])

    x = mx.concatenate([x[-1:] for _, x in seen["transformer_block"]])      # (28, 1024)
    lens = linear(rms_norm(x, W["model.norm.weight"]), "lm_head.weight").astype(mx.float32)     # (28, 151936)
    show("Step 7: block; the most likely next token, if the final norm and the head came right after it",
         [(i, mx.max(mx.softmax(row)).item(), spell(mx.argmax(row).item())) for i, row in enumerate(lens)])

    (order, probs), (_, kept) = nucleus(by_cache[0], 1, 1), nucleus(by_cache[0], 0.7, 0.95)
    show(f"Step 8: id; probability; at temperature 0.7 and top-p 0.95, kept: {mx.sum(kept > 0).item()}",
         [(i, p, q, spell(i)) for i, p, q in zip(*[x[:5].tolist() for x in (order, probs, kept)])])

    again = forward(longer[:-1], [None] * N_LAYERS, 0)[-8:]     # at once, with nothing cached
    show("Step 9: the next 8 tokens: id by cached decode; recomputed; largest difference of the logits",
         [(token, mx.argmax(new).item(), f"{mx.max(mx.abs(old - new)).item():10.2e}", spell(token))
          for token, old, new in zip(longer[n:], by_cache, again)])


# ==== The command line: find a model, run it, say how fast it was ===========================================
HERE = Path(__file__).resolve().parent
REPO, REVISION = "Qwen/Qwen3-0.6B", "c1899de289a04d12100db370d81485cdf75e47ca"
FILES = {                                                       # each with its SHA-256, where it is known
    "generation_config.json": None,
    "config.json": "660db3b73d788119c04535e48cf9be5f55bc3100841a718637ae695b442f27dd",
    "tokenizer.json": "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4",
    "model.safetensors": "f47f71177f32bcd101b7573ec9171e6a57f4f4d31148d38e382306f42996874b",
}


def download(folder):
    """Fetch Qwen3-0.6B from the Hugging Face Hub into folder, and return that.

    Or say that the Hub can't be reached, and return the bundled model's. Files appear in the folder only when
    all are there and right; a download that was cut off goes on later.
    """
    from filelock import FileLock                           # these come with tokenizers, and import slowly
    from huggingface_hub import HfApi, hf_hub_url
    from huggingface_hub.file_download import http_get
    incoming = folder / ".incoming"
    try:
        info = HfApi().repo_info(REPO, revision=REVISION, timeout=4, files_metadata=True)
    except Exception as error:                              # offline, no such host, a proxy that refuses, ...
        print(f"Qwen3-0.6B is not here and the Hugging Face Hub can't be reached ({type(error).__name__}): "
              f"the bundled tests/tiny-qwen3 runs.\nTo get the real model by hand, put {', '.join(FILES)} "
              f"of {REPO} into {folder}", file=sys.stderr)
        return HERE / "tests/tiny-qwen3"
    sizes = {file.rfilename: file.size for file in info.siblings}
    try:
        incoming.mkdir(parents=True, exist_ok=True)
        with FileLock(incoming / ".lock", timeout=0):           # only one download at a time
            for name, sha256 in FILES.items():
                with open(incoming / name, "ab") as file:       # what is there of it is not fetched again
                    http_get(hf_hub_url(REPO, name, revision=REVISION), file, resume_size=file.tell(),
                             expected_size=sizes.get(name), displayed_filename=name)
                if sha256 and hashlib.sha256((incoming / name).read_bytes()).hexdigest() != sha256:
                    (incoming / name).unlink()
                    raise ValueError(f"{name} came with a wrong SHA-256, and is thrown away")
            for name in FILES:                                  # the weights last: find_model looks for them
                (incoming / name).replace(folder / name)
            shutil.rmtree(incoming)
    except Exception as error:
        raise ValueError(f"the download of {REPO} failed; run again to go on: {error}") from None
    return folder


def find_model():
    """Qwen3-0.6B's folder, beside this file, in the current one or downloaded; or the bundled model's."""
    for folder in (HERE / "Qwen3-0.6B", Path("Qwen3-0.6B")):
        if any(folder.glob("model*.safetensors")):
            return folder
    return download(HERE / "Qwen3-0.6B")


def parse_arguments():
    """The command line's options; one line on stderr and status 2 where they are out of range or conflict."""
    parser = argparse.ArgumentParser(
        prog="llm_inference.py", formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Continue a text with Qwen3-0.6B, or another Qwen3 or Llama model.", epilog="""examples:
  python llm_inference.py "The capital of France is"
  python llm_inference.py "Once upon a time" --temperature 0.8 --seed 1
  python llm_inference.py - --model tests/tiny-qwen3 < prompt.txt""")
    parser.error = lambda message: parser.exit(2, f"llm_inference.py: {message} (--help shows the options)\n")
    add = parser.add_argument
    add("prompt", metavar="PROMPT", nargs="?",
        help='the text to continue, "-" for stdin (default: "The capital of France is")')
    add("--model", metavar="DIR", help="a checkpoint's folder (default: Qwen3-0.6B, downloaded once)")
    add("--max-tokens", metavar="N", type=int, help="add up to N tokens (default: 100, or context/4 in chat)")
    add("--temperature", metavar="T", type=float, default=0.0,
        help="0 takes the most likely token, 1 draws by probability (default: %(default)s)")
    add("--top-p", metavar="P", type=float, default=0.95,
        help="draw from the fewest tokens that have P of the probability (default: %(default)s)")
    add("--seed", metavar="S", type=int, default=time.time_ns(), help="a number that repeats the same draws")
    add("--quantize", metavar="BITS", type=int, choices=(4, 8), help="round the weights to 4 or 8 bits")
    add("--kernels", choices=KERNELS, help="for norm, RoPE and attention (default: fused on a GPU)")
    mode = parser.add_mutually_exclusive_group().add_argument
    mode("--chat", action="store_true", help="answer PROMPT, or questions typed one after another")
    add("--system", metavar="TEXT", help="what the model is told before a chat")
    add("--think", action="store_true", help="let the model think before it answers in a chat")
    mode("--explain", action="store_true", help="show what happens to PROMPT in each of the nine steps")
    mode("--trace", action="store_true", help="show each call of the functions in one decode step")
    args = parser.parse_args()
    sampling_is_valid = 0 <= args.temperature < math.inf and 0 < args.top_p <= 1
    if not sampling_is_valid or args.max_tokens is not None and args.max_tokens < 1:
        parser.error("--max-tokens must be at least 1, --temperature at least 0, --top-p above 0 and up to 1")
    if (args.system is not None or args.think) and not args.chat:
        parser.error("--system and --think go with --chat")
    if not 0 <= args.seed < 2**64:
        parser.error("--seed must be from 0 to 2**64 - 1")
    return args


def main():
    """Run the program; whatever goes wrong comes out as an exception, which the last lines make one line."""
    args = parse_arguments()
    if None in (sys.stdin, sys.stdout, sys.stderr):
        raise ValueError("stdin, stdout or stderr is closed")
    prompt = "The capital of France is" if args.prompt is None else args.prompt
    try:
        if prompt == "-":
            prompt = sys.stdin.buffer.read().decode().rstrip("\r\n")
        f"{prompt}{args.system}".encode()                   # fails for an argument that is not UTF-8
    except UnicodeError as error:
        raise ValueError(f"the prompt or --system is not UTF-8 text: {error}") from None
    if args.kernels:
        use_kernels(args.kernels)
    if sys.platform == "linux" and mx.default_device() == mx.cpu and not HAS_OPENBLAS:
        print("OpenBLAS was not found, so this will be slow: pip install cmeel-openblas", file=sys.stderr)
    folder = Path(args.model) if args.model is not None else find_model()
    load_model(folder, quantize=args.quantize)
    mx.random.seed(args.seed)
    sys.stdout.reconfigure(errors="replace")                    # for a terminal that has no Japanese, say
    max_tokens = args.max_tokens or (MAX_POSITIONS // 4 if args.chat else 100)
    if args.explain or args.trace:
        return explain(prompt) if args.explain else trace(prompt)
    if args.chat:
        if not prompt.strip():
            raise ValueError("the prompt is empty")
        questions = typed_lines() if args.prompt is None else [prompt]
        return chat(questions, args.system, args.think, max_tokens, args.temperature, args.top_p)
    ids = encode(prompt, max_tokens)

    print(f"Model:  {folder.resolve().name}  ({N_LAYERS} layers, {D_MODEL} dim, {N_HEADS} Q heads, "
          f"{N_KV} KV heads)\nPrompt: {prompt}\n{'-' * 60}", flush=True)
    shown, times = f"Output: {prompt}", [time.perf_counter()]     # the start, and then when each token came
    for piece in stream(ids, [None] * N_LAYERS, 0, max_tokens, args.temperature, args.top_p):
        print(shown + piece, end="", flush=True)
        shown = ""
        times.append(time.perf_counter())
    times += [time.perf_counter()] * (len(times) == 1)      # an end token came first
    n, prefilled, decoded = len(times) - 2, times[1] - times[0], times[-1] - times[1]
    print(f"{shown}\nTime:   {prefilled + decoded:.2f}s  "
          f"(prefill {len(ids)} tokens: {len(ids) / prefilled:.0f} tokens/s, "
          f"decode {n} tokens: {n / decoded if n else 0:.0f} tokens/s)", flush=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        os._exit(130)
    except SystemExit:
        raise
    except BaseException as error:                              # a panic in tokenizers' Rust is no Exception
        print("llm_inference.py:", *(str(error) or type(error).__name__).split(), file=sys.stderr, flush=True)
        os._exit(1)                                         # at once: stdout is not flushed again
