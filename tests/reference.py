"""A second engine, kept to judge the first: Qwen3 and Llama-style models in plain Python.

    python tests/reference.py "The capital of France is"

It shares no line with llm_inference.py and is in no hurry. Numbers are Python floats (64 bits), a vector
is a list, a matrix is a list of rows, and one token at a time goes through the formulas as the papers
write them. Where two programs with nothing in common give the same numbers, a slip would have to have
been made twice.

In the shapes below d is hidden_size, D is head_dim, and n counts the cached positions, this token's too.
"""
import argparse
import json
import math
import struct
from operator import mul
from pathlib import Path


# ---- What config.json alone tells ----

def head_sizes(config):
    """(query heads, KV heads, D); where the config gives no D it is d / query heads."""
    heads, d = config["num_attention_heads"], config["hidden_size"]
    return heads, config.get("num_key_value_heads") or heads, config.get("head_dim") or d // heads


def kv_bytes_per_token(config, bytes_per_number=2):
    """By how much a token makes the KV cache grow: a key and a value for each KV head of each layer."""
    _, kv_heads, head_dim = head_sizes(config)
    return 2 * config["num_hidden_layers"] * kv_heads * head_dim * bytes_per_number


def multiply_adds_per_token(config):
    """The sizes, rows times columns, of all the matrices that one token's vector is multiplied by.

    The embedding is not among them, since a row is looked up, but the head is, even where a tied model has
    one matrix for both. Attention's own sums, which grow with the text, are left out.
    """
    (heads, kv_heads, head_dim), d = head_sizes(config), config["hidden_size"]
    attention = 2 * (heads * head_dim * d) + 2 * (kv_heads * head_dim * d)      # q and o, k and v
    feed_forward = 3 * (config["intermediate_size"] * d)                        # gate, up, down
    return config["num_hidden_layers"] * (attention + feed_forward) + config["vocab_size"] * d


# ---- Reading a checkpoint ----

def read_safetensors(path):
    """The tensors of one .safetensors file: name -> vector or matrix, from float32, float16 or bfloat16.

    The file: 8 bytes that hold the header's length; the header, JSON, name -> type, shape and the span of
    its bytes after the header; then all the bytes, little-endian, row after row.
    """
    raw, tensors = path.read_bytes(), {}
    start = 8 + int.from_bytes(raw[:8], "little")
    for name, entry in json.loads(raw[8:start]).items():
        if name == "__metadata__":
            continue
        kind, shape, (first, last) = entry["dtype"], entry["shape"], entry["data_offsets"]
        data = raw[start + first:start + last]
        if kind == "BF16":  # the upper half of a float32, whose lower half was dropped: zeros in its place
            data = b"".join(b"\0\0" + data[i:i + 2] for i in range(0, len(data), 2))
        elif kind not in ("F16", "F32"):
            raise ValueError(f"{name} is stored as {kind}; this engine reads F32, F16 and BF16")
        tensor = list(struct.unpack(f"<{math.prod(shape)}{'e' if kind == 'F16' else 'f'}", data))
        for columns in reversed(shape[1:]):
            tensor = [tensor[i:i + columns] for i in range(0, len(tensor), columns)]
        tensors[name] = tensor
    return tensors


class Model:
    """The sizes and weights that the formulas need, from a config.json and weights by Hugging Face names.

    embedding and head are (vocab_size, d), final_norm is (d,); layers holds a dict for each layer, "q_proj"
    and so on -> weight. ValueError for what the formulas would silently leave out, KeyError for a weight
    that is not there.
    """

    def __init__(self, config, weights, end_ids=()):
        settings = config | (config.get("rope_parameters") or config.get("rope_scaling") or {})
        known = {"hidden_act": "silu", "use_sliding_window": False, "rope_type": "default", "type": "default"}
        for name, value in known.items():
            if settings.get(name, value) != value:
                raise ValueError(f"config.json: {name} is {settings[name]!r}, not {value!r}")
        self.heads, self.kv_heads, self.head_dim = head_sizes(config)
        self.eps, self.theta = config["rms_norm_eps"], settings.get("rope_theta", 10000.0)
        self.embedding, self.final_norm = weights["model.embed_tokens.weight"], weights["model.norm.weight"]
        self.head = self.embedding if config.get("tie_word_embeddings") else weights["lm_head.weight"]
        if any(name.endswith(".bias") for name in weights):
            raise ValueError("the checkpoint has biases; this engine would leave them out")
        self.layers = [{name.split(".")[-2]: weight for name, weight in weights.items()
                        if name.startswith(f"model.layers.{i}.")} for i in range(config["num_hidden_layers"])]
        self.end_ids = set(end_ids)


def load(folder):
    """The model in a Hugging Face folder: config.json and model.safetensors, or shards and their index."""
    folder = Path(folder)
    config = json.loads((folder / "config.json").read_bytes())
    index, generation = folder / "model.safetensors.index.json", folder / "generation_config.json"
    files = ["model.safetensors"]
    if index.exists():
        files = set(json.loads(index.read_bytes())["weight_map"].values())
    weights = {name: weight for file in files for name, weight in read_safetensors(folder / file).items()}
    settings = config | (json.loads(generation.read_bytes()) if generation.exists() else {})
    ends = settings.get("eos_token_id")     # one id, a list of them, or null
    return Model(config, weights, ends if isinstance(ends, list) else [ends])


# ---- The formulas ----

def dot(a, b):
    """Sum of a_i b_i: two vectors of one length -> a number."""
    if len(a) != len(b):
        raise ValueError(f"a product of vectors of the lengths {len(a)} and {len(b)}")
    return sum(map(mul, a, b))


def matvec(matrix, x):
    """M x, one dot product a row: (rows, columns) and (columns,) -> (rows,)."""
    return [dot(row, x) for row in matrix]


def add(a, b):
    """a + b, number by number: (d,) and (d,) -> (d,)."""
    return [x + y for x, y in zip(a, b, strict=True)]


def rms_norm(x, weight, eps):
    """w_i x_i / sqrt(mean(x^2) + eps), a mean square of one before the weight: (m,) and (m,) -> (m,)."""
    root = math.sqrt(dot(x, x) / len(x) + eps)
    return [w * v / root for w, v in zip(weight, x, strict=True)]


def softmax(scores):
    """exp(s_i) / sum of exp(s_j), n shares of one: (n,) -> (n,). Less the largest, no exp is out of range."""
    top = max(scores)
    powers = [math.exp(s - top) for s in scores]
    total = sum(powers)
    return [p / total for p in powers]


def silu(z):
    """z / (1 + e^-z), number to number; below -700, where e^-z leaves the floats, the answer is 0 anyway."""
    return z / (1 + math.exp(min(-z, 700.0)))


def rope(head, pos, theta):
    """Rotary position embedding: pair i turns by the angle pos * theta^(-2i/D). (D,) -> (D,).

    Number i pairs with number i + D/2, as in Hugging Face checkpoints. The paper pairs neighbours, which is
    the same with the rows of q_proj and k_proj in another order.
    """
    half, turned = len(head) // 2, head[:]
    for i in range(half):
        angle = pos * theta ** (-2 * i / len(head))
        cos, sin = math.cos(angle), math.sin(angle)
        turned[i] = head[i] * cos - head[i + half] * sin
        turned[i + half] = head[i] * sin + head[i + half] * cos
    return turned


def project(model, layer, letter, x):
    """x through q_proj, k_proj or v_proj, cut into heads: (d,) -> a list of heads, each (D,).

    Qwen3 then norms each head of q and k by itself, all of them with the same weight (D,).
    """
    y, norm = matvec(layer[f"{letter}_proj"], x), layer.get(f"{letter}_norm")
    heads = [y[i:i + model.head_dim] for i in range(0, len(y), model.head_dim)]
    return [rms_norm(head, norm, model.eps) for head in heads] if norm else heads


def attention(model, layer, x, pos, keys, values):
    """softmax(q K^T / sqrt(D)) V for each query head, then all of them through o_proj: (d,) -> (d,).

    keys and values are this layer's cache: for each position the KV heads, each (D,). This token's go in
    first, so that it attends to itself too; later tokens are not there yet, so that no mask is needed.
    """
    queries = [rope(query, pos, model.theta) for query in project(model, layer, "q", x)]
    keys.append([rope(key, pos, model.theta) for key in project(model, layer, "k", x)])
    values.append(project(model, layer, "v", x))
    mixed = []
    for head, query in enumerate(queries):
        shared = head // (model.heads // model.kv_heads)    # neighbouring query heads share a KV head
        shares = softmax([dot(query, key[shared]) / math.sqrt(model.head_dim) for key in keys])
        for i in range(model.head_dim):
            mixed.append(sum(share * value[shared][i] for share, value in zip(shares, values, strict=True)))
    return matvec(layer["o_proj"], mixed)


def feed_forward(layer, x):
    """SwiGLU, down (silu(gate x) * up x): (d,) -> (intermediate_size,) -> (d,)."""
    gate, up = matvec(layer["gate_proj"], x), matvec(layer["up_proj"], x)
    return matvec(layer["down_proj"], [silu(g) * u for g, u in zip(gate, up, strict=True)])


def new_cache(model):
    """An empty KV cache: for each layer a list of keys and a list of values, one entry a position in each."""
    return [([], []) for _ in model.layers]


def forward_token(model, token, pos, cache, hidden=None):
    """One token id at position pos, after those in the cache -> its logits, a list of vocab_size floats.

    The cache grows by this token. A list given as hidden receives the vector (d,) that leaves each layer.
    """
    x = model.embedding[token]
    for layer, (keys, values) in zip(model.layers, cache, strict=True):
        h = rms_norm(x, layer["input_layernorm"], model.eps)
        x = add(x, attention(model, layer, h, pos, keys, values))
        x = add(x, feed_forward(layer, rms_norm(x, layer["post_attention_layernorm"], model.eps)))
        if hidden is not None:
            hidden.append(x)
    return matvec(model.head, rms_norm(x, model.final_norm, model.eps))


# ---- From logits to text ----

def continuation(model, ids, n_new):
    """Greedy decoding: yield the n_new likeliest next ids one by one, each fed back in like the prompt's."""
    ids, cache = list(ids), new_cache(model)
    for pos in range(len(ids) + n_new - 1):
        logits = forward_token(model, ids[pos], pos, cache)
        if pos == len(ids) - 1:
            ids.append(logits.index(max(logits)))
            yield ids[-1]


def generate(model, ids, n_new):
    """The n_new ids that greedy decoding puts after the prompt's, as a list; end tokens do not stop it."""
    return list(continuation(model, ids, n_new))


def main():
    """The command line: print a prompt and, token by token, how the model goes on."""
    parser = argparse.ArgumentParser(description="Continue a text greedily, in plain Python.")
    parser.add_argument("prompt")
    parser.add_argument("--model", type=Path, default=Path(__file__).parent / "tiny-qwen3", metavar="DIR")
    parser.add_argument("--max-tokens", type=int, default=20, metavar="N")
    args = parser.parse_args()
    try:
        from tokenizers import Tokenizer, decoders  # only words need them; the engine has ids, and no library
        model = load(args.model)
        tokenizer = Tokenizer.from_str((args.model / "tokenizer.json").read_text(encoding="utf-8"))
        ids = tokenizer.encode(args.prompt).ids
        if not ids:
            raise ValueError("the prompt has no tokens")
        print(args.prompt, end="", flush=True)
        stream = decoders.DecodeStream(ids)     # holds a character back until all its tokens are there
        for token in continuation(model, ids, args.max_tokens):
            if token in model.end_ids:
                break
            print(stream.step(tokenizer, token) or "", end="", flush=True)
        print()
    except Exception as error:      # of all kinds: tokenizers raises nothing narrower
        raise SystemExit(f"cannot run {args.model}: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
