"""Wrong versions of llm_inference.py, each a line or two changed, and which kind of check sees which of them.

    python tests/mutations.py            prints the table
    python tests/mutations.py --write    puts it into tests/README.md, where test_mutations.py holds it true

Every check compares, and can see only what its two sides do not share: a cache with no cache in the same code, or this
code with code that others wrote, or draws with the probabilities that they were asked for.
"""
import ast
import functools
import random
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import llm_inference as llm                                         # noqa: E402
import mlx.core as mx                                               # noqa: E402
import reference                                                    # noqa: E402
from checkpoints import load, make_checkpoint                       # noqa: E402

SOURCE = (ROOT / "llm_inference.py").read_text(encoding="utf-8")
LINES = SOURCE.splitlines()


def code_of(node):
    """A function's source from "def" on, its docstring replaced by a 0."""
    first, start, end = node.body[0], node.lineno - 1, node.end_lineno
    lines = [*LINES[start:first.lineno - 1], " " * first.col_offset + "0", *LINES[first.end_lineno:end]]
    return "\n".join(lines)


FUNCTIONS = {node.name: code_of(node) for node in ast.parse(SOURCE).body if isinstance(node, ast.FunctionDef)}

# What is wrong: the function, the code in it, and what stands there instead, or several pairs of them. Each code must
# occur exactly once. The checks run with the set that the name of what is wrong begins with, or else explicit.
MUTATIONS = {
    "the next id's row of the embedding": ("embed", "xp.asarray(token_ids)", "xp.asarray(token_ids) + 1"),
    "norm without its weight": ("rms_norm", "dtype=x.dtype) * w", "dtype=x.dtype)"),
    "norm that subtracts the mean (LayerNorm)": (
        "rms_norm", "x32 = xp.asarray(x, dtype=xp.float32)", "x32 = x - xp.mean(x, axis=-1, keepdims=True)"),
    "norm with EPS 1e-2": ("rms_norm", "+ EPS", "+ 1e-2"),
    "norm without its square root": ("rms_norm", "xp.sqrt(", "("),
    "norm by the mean size instead of its square's root": ("rms_norm", "xp.mean(x32 * x32, axis=-1, keepdims=True)",
                                                           "xp.mean(xp.abs(x32), axis=-1, keepdims=True) ** 2"),
    "RoPE left off the keys": ("apply_rope", "rotate(q), rotate(k)", "rotate(q), k"),
    "RoPE left off queries and keys": ("apply_rope", "rotate(q), rotate(k)", "q, k"),
    "RoPE turns neighbouring dimensions (i, i + 1)": (
        "apply_rope", "x[..., :half], x[..., half:]", "x[..., 0::2], x[..., 1::2]"),
    "RoPE turns backwards": ("apply_rope", "x1 * cos - x2 * sin, x1 * sin + x2 * cos",
                             "x1 * cos + x2 * sin, x2 * cos - x1 * sin"),
    "RoPE for the keys one position late": (
        "apply_rope", "return rotate(q), rotate(k)", "turned = rotate(q)\n"
        "    cos, sin = xp.cos(angles + freqs), xp.sin(angles + freqs)\n    return turned, rotate(k)"),
    "RoPE from position 0 in every call": ("apply_rope", "xp.asarray(positions, dtype=xp.float32)",
                                           "xp.arange(len(positions), dtype=xp.float32)"),
    "theta 500,000 whatever config.json says": ("apply_rope", "THETA **", "500000.0 **"),
    "product not turned back": ("linear", "(W[name] @ x.T).T", "(W[name] @ x.T)"),
    "QK-norm left out": ("attention", 'if f"{name}.q_norm.weight" in W', "if False"),
    "QK-norm after RoPE": (
        "attention", 'q = rms_norm(q, W[f"{name}.q_norm.weight"])', "q_w = W[f'{name}.q_norm.weight']",
        'k = rms_norm(k, W[f"{name}.k_norm.weight"])', "k_w = W[f'{name}.k_norm.weight']",
        "    q, k = apply_rope(q, k, positions)\n",
        "    q, k = apply_rope(q, k, positions)\n"
        "    if f'{name}.q_norm.weight' in W:\n        q, k = rms_norm(q, q_w), rms_norm(k, k_w)\n"),
    "QK-norm over all heads at once": (
        "attention", "q = rms_norm(q, W", "q = q / xp.sqrt(xp.mean(q * q, axis=(0, 2), keepdims=True) + EPS) * (W"),
    "keys' norm weight used for the queries": (
        "attention", 'rms_norm(q, W[f"{name}.q_norm', 'rms_norm(q, W[f"{name}.k_norm'),
    "keys and values swapped": ("attention", "attend(q, k, v)", "attend(q, v, k)"),
    "a token's heads not put side by side": ("attention", "out.transpose(1, 0, 2).reshape", "out.reshape"),
    "cache not written": ("extend_cache", "cache[layer_idx] = (k, v)", "pass"),
    "cache overwritten by the new tokens": (
        "extend_cache", "cache[layer_idx] is not None", "cache[layer_idx] is None", "old_k, old_v = cache[layer_idx]",
        "old_k, old_v = k[:, :0], v[:, :0]"),
    "new keys put before the old ones": (
        "extend_cache", "xp.concatenate([old_k, k], axis=1)", "xp.concatenate([k, old_k], axis=1)"),
    "cache shared between the layers": ("extend_cache", "old_k, old_v = cache[layer_idx]", "old_k, old_v = cache[0]"),
    "mask off by one: the next token is seen": ("attend", "key_pos > query_pos", "key_pos > query_pos + 1"),
    "mask off by one: a token can't see itself": (
        "attend", "key_pos > query_pos", "key_pos >= xp.maximum(query_pos, 1)"),
    "no mask": ("attend", "xp.where(is_later, -math.inf, scores)", "scores"),
    "mask that ignores the cache": ("attend", "xp.arange(total - n, total)[:, None]", "xp.arange(n)[:, None]"),
    "heads tiled (0, 2, 4 ..) instead of grouped (0, 1, 2 ..)": (
        "attend", "xp.repeat(a, N_HEADS // N_KV, axis=0)", "xp.concatenate([a] * (N_HEADS // N_KV), axis=0)"),
    "keys grouped, but values tiled": (
        "attend", ") @ v", ") @ xp.concatenate([v[::N_HEADS // N_KV]] * (N_HEADS // N_KV), axis=0)"),
    "all query heads use the first key/value head": ("attend", "q @ k.transpose", "q @ k[:1].transpose"),
    "scores not scaled": ("attend", " / math.sqrt(D_HEAD)", ""),
    "scores scaled by the hidden size": ("attend", "math.sqrt(D_HEAD)", "math.sqrt(D_MODEL)"),
    "scores capped softly, 30 tanh(s / 30)": (
        "attend", "xp.where(is_later, -math.inf, scores)", "xp.where(is_later, -math.inf, 30 * xp.tanh(scores / 30))"),
    "shares that do not add up to 1": ("softmax", "exps / xp.sum(exps, axis=-1, keepdims=True)", "exps"),
    "softmax over the heads": ("softmax", "xp.max(scores, axis=-1", "xp.max(scores, axis=0",
                               "xp.sum(exps, axis=-1", "xp.sum(exps, axis=0"),
    "the largest score not subtracted": ("softmax", "scores - xp.max(scores, axis=-1, keepdims=True)", "scores"),
    "SiLU replaced by ReLU": ("silu", "gate32 / (1 + xp.exp(-gate32))", "xp.maximum(gate32, 0)"),
    "SiLU replaced by GELU": (
        "silu", "gate32 / (1 + xp.exp(-gate32))",
        "gate32 * (1 + xp.tanh(0.79788 * (gate32 + 0.044715 * gate32 * gate32 * gate32))) / 2"),
    "SiLU with the sign turned": ("silu", "xp.exp(-gate32)", "xp.exp(gate32)"),
    "SiLU without its gate": ("silu", "gate32 / (1", "1 / (1"),
    "gate and up swapped": ("ffn", "silu(gate) * up", "silu(up) * gate"),
    "residual around attention left out": ("transformer_block", "x = x + attention", "x = attention"),
    "residual around the feed-forward layer left out": ("transformer_block", "return x + ffn", "return ffn"),
    "norm after attention instead of before": (
        "transformer_block", 'attention(rms_norm(x, W[f"{name}.input_layernorm.weight"]), layer_idx, cache, positions)',
        'rms_norm(attention(x, layer_idx, cache, positions), W[f"{name}.input_layernorm.weight"])'),
    "the second norm's weight used for the first": (
        "transformer_block", ".input_layernorm", ".post_attention_layernorm"),
    "positions from 0 again after the cache": (
        "forward", "xp.arange(start_pos, start_pos + len(token_ids))", "xp.arange(len(token_ids))"),
    "positions one too high after the cache": (
        "forward", "xp.arange(start_pos, start_pos + len(token_ids))",
        "xp.arange(start_pos, start_pos + len(token_ids)) + (start_pos > 0)"),
    "final norm left out": ("forward", 'x = rms_norm(x, W["model.norm.weight"])', "pass"),
    "last block left out": ("forward", "range(N_LAYERS)", "range(N_LAYERS - 1)"),
    "always the embedding as the head": ("forward", '"lm_head.weight"', '"model.embed_tokens.weight"'),
    "the first row's logits instead of the last's": ("forward", "x[-1:]", "x[:1]"),
    "top-p keeps one token too few": ("nucleus", "xp.cumsum(falling) - falling", "xp.cumsum(falling)"),
    "top-p keeps one token too many": (
        "nucleus", "xp.cumsum(falling) - falling",
        "xp.cumsum(falling) - falling - xp.concatenate([0 * falling[:1], falling[:-1]])"),
    "top-p cuts without sorting": ("nucleus", "-xp.sort(-probs)", "probs"),
    "top-p keeps the unlikeliest": ("nucleus", "-xp.sort(-probs)", "xp.sort(probs)"),
    "temperature after the softmax": ("nucleus", "softmax(xp.asarray(logits, dtype=xp.float32) / temperature)",
                                      "softmax(xp.asarray(logits, dtype=xp.float32)) / temperature"),
    "temperature multiplies": ("nucleus", "/ temperature)", "* temperature)"),
    "a token drawn before the probabilities are added up": ("sample", "xp.cumsum(", "("),
    "numbers drawn from one half of their range only": ("sample", "random.random()", "random.random() / 2"),
    "greedy takes the least likely token": ("sample", "xp.argmax(logits)", "xp.argmin(logits)"),
    "prefill's second piece at position 0": ("prefill", "start_pos + i", "start_pos"),
    "a token lost between two pieces": ("prefill", "ids[i:i + CHUNK]", "ids[i:i + CHUNK - 1]"),
    "decode passes the wrong position": ("next_tokens", "cache, pos)", "cache, pos + 1)"),
    "decode never goes on to the next position": ("next_tokens", "pos += 1", "pos += 0"),
    "each token chosen from the prompt's logits": ("next_tokens", "logits = forward(", "forward("),
    "only the first end token ends the text": ("next_tokens", "in EOS_IDS", "== min(EOS_IDS)"),
    # ---- fused
    "fused: the next id's row of the embedding": ("fused_embed", "mx.asarray(token_ids)", "mx.asarray(token_ids) + 1"),
    "fused: product with the matrix's rows moved by one": ("fused_linear", "x @ w.T", "x @ mx.roll(w, 1, axis=0).T"),
    "fused: RoPE turns neighbouring dimensions": ("fused_apply_rope", '"traditional": False', '"traditional": True'),
    "fused: RoPE from position 0 in every call": ("fused_apply_rope", "positions[:1]", "0"),
    "fused: no mask": ("fused_attend", '"causal" if q.shape[1] > 1 else None', "None"),
    "fused: scores scaled by the hidden size": ("fused_attend", "D_HEAD ** -0.5", "D_MODEL ** -0.5"),
    "fused: norm without its weight": ("fused_rms_norm", "(x, w, EPS)", "(x, None, EPS)"),
    "fused: norm with EPS 1e-2": ("fused_rms_norm", "(x, w, EPS)", "(x, w, 1e-2)"),
    "fused: the pass queued ahead one position late": (
        "fused_next_tokens", "start_pos + len(ids)", "start_pos + len(ids) + 1"),
    "fused: each token chosen from the prompt's logits": ("fused_next_tokens", "logits = next_logits", "pass"),
    "fused: only the first end token ends the text": ("fused_next_tokens", "in EOS_IDS", "== min(EOS_IDS)"),
    "fused: cache shared between the layers": ("fused_extend_cache", "cache[layer_idx] or", "cache[0] or"),
    "fused: cache written one position late": (
        "fused_extend_cache", "keys[:, length:total], values[:, length:total] = k, v",
        "keys[:, length + (length > 0):total + (length > 0)], values[:, length:total] = k, v"),
    "fused: values cached unchanged from the first call": (
        "fused_extend_cache", "keys[:, length:total], values[:, length:total] = k, v",
        "keys[:, length:total], values[:, length:total] = k, v if length == 0 else values[:, length:total]"),
    "fused: a cache that grows forgets what it held": ("fused_extend_cache", "= old_k, old_v", "= old_k, 0 * old_v"),
    "fused: two texts write into one cache": ("fused_extend_cache", "keys, values = keys[:], values[:]", "pass"),
    # ---- numpy
    "numpy: heads tiled instead of grouped": (
        "numpy_attend", "k[head * N_KV // N_HEADS], v[head * N_KV // N_HEADS]", "k[head % N_KV], v[head % N_KV]"),
    "numpy: all query heads use the first head's values": ("numpy_attend", "v[head * N_KV // N_HEADS]", "v[0]"),
    "numpy: mask on the first columns instead of the last": (
        "numpy_attend", "scores[:, -n:] += mask", "scores[:, :n] += mask"),
    "numpy: mask off by one: the next token is seen": (
        "numpy_attend", "dtype=np.float32), 1)", "dtype=np.float32), 2)"),
    "numpy: scores not scaled": ("numpy_attend", " / np.float32(math.sqrt(D_HEAD))", ""),
    "numpy: shares that do not add up to 1": ("numpy_attend", " / scores.sum(axis=1, keepdims=True)", ""),
    "numpy: two texts write into one cache": (
        "fused_extend_cache", "not np.isnan(", "False and not np.isnan("),
    "numpy: cache shared between the layers": ("fused_extend_cache", "cache[layer_idx] or", "cache[0] or"),
    "numpy: cache written one position late": (
        "fused_extend_cache", "keys[:, length:total], values[:, length:total] = k, v",
        "keys[:, length + (length > 0):total + (length > 0)], values[:, length:total] = k, v"),
    "numpy: a cache that grows forgets what it held": ("fused_extend_cache", "= old_k, old_v", "= old_k, 0 * old_v"),
}


def kind_of(what):
    """The set of functions that a wrong version is tried with."""
    return what.split(":")[0] if what.split(":")[0] in llm.KERNELS else "explicit"


def other_kinds(what):
    """The other sets in which the wrong function stands as well. Where attend is another, softmax makes no shares."""
    function = MUTATIONS[what][0].replace("softmax", "attend")
    return [kind for kind in llm.KERNELS if kind_of(what) == "explicit" != kind and function not in llm.KERNELS[kind]]


def put(function, new):
    """Put a function in all places where the one of that name stands: in the module, and in its tables of functions."""
    for table in [vars(llm), *llm.KERNELS.values(), *(t for t in vars(llm).values() if type(t) is dict)]:
        for name, old in table.items():
            if (getattr(old, "__name__", None), getattr(old, "__module__", None)) == (function, llm.__name__):
                table[name] = new


def apply(what):
    """Put a wrong version in place, with the set it is tried with; returns a function that puts the right one back."""
    function, *changes = MUTATIONS[what]
    right_source = source = FUNCTIONS[function]
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert right_source.count(old) == 1, f"{what}: {function} has {old!r} not once"
        source = source.replace(old, new)
    made, before = {}, llm.wanted_kernels
    llm.use_kernels("explicit")                                     # so that each function stands under its own name
    right = vars(llm)[function]
    exec(compile(source, what, "exec"), vars(llm), made)
    made[function].__module__ = llm.__name__
    put(function, made[function])
    llm.use_kernels(kind_of(what))

    def undo():
        put(function, right)
        llm.use_kernels(before)

    return undo


# ---- The checks. Each takes a folder of checkpoints and says whether all is well ------------------------------
IDS = [72, 101, 20, 108, 111, 44, 32, 200, 111, 250, 108, 100]
MORE = [(7 * i) % 250 for i in range(258)]                          # a cache has room for 256 more than it first held


def fresh():
    return [None] * llm.N_LAYERS


def close(found, wanted, tolerance=2e-5):
    found, wanted = mx.array(found), mx.array(wanted)
    return found.shape == wanted.shape and (
        mx.max(mx.abs(found - wanted)) <= tolerance * mx.max(mx.abs(wanted))).item()


def cache_equals_no_cache(folders):
    """Logits of pieces of 5, 1, 4, 1 and 1 tokens on one cache, and of all in one pass; 258 more fill its free rows.

    In between, another text goes on from a copy of the cache that was made after 6 tokens.
    """
    load(folders["small_qwen3"])
    cache, rows, copy, ids = fresh(), [], [], IDS + MORE * (llm.kernels != "explicit")
    for start, end in [(0, 5), (5, 6), (6, 10), (10, 11), (11, 12), (12, 270)]:
        if start == 6:
            copy = list(cache)
        if start == 10:
            other = llm.forward([7, 8], copy, 6)
        if start < len(ids):
            rows.append(mx.array(llm.forward(ids[start:end], cache, start)))
    return (close(other, llm.forward(ids[:6] + [7, 8], fresh(), 0)[6:])
            and close(mx.concatenate(rows), llm.forward(ids, fresh(), 0)))


def generate_equals_recomputation(folders):
    """`generate` after 261 tokens: its text, and the logits that it samples from, and those of one pass.

    The third token that it chooses becomes the second end token, which must end the text.
    """
    load(folders["narrow"])
    ids, seen, said, sample = llm.encode("Hello, world! " * 19)[:261], [], [], llm.sample
    prompt, piece, llm.EOS_IDS, llm.CHUNK = llm.tok.decode(ids), llm.CHUNK, {0}, 256

    def choose(logits, *rest):
        token = sample(logits, *rest)
        seen.append(logits)
        said.append(int(token))
        if len(said) == 3:
            llm.EOS_IDS = {0, said[2]}
        return token

    llm.sample = choose
    try:
        made = llm.generate(prompt, 4)
    finally:
        llm.sample, llm.CHUNK = sample, piece
    wanted = mx.array(llm.forward(ids + said[:2], fresh(), 0)[-3:])
    return (len(seen) == 3 and all(close(found[None], row) for found, row in zip(seen, mx.split(wanted, 3)))
            and made == llm.tok.decode(ids + mx.argmax(wanted[:2], axis=-1).tolist()))


@functools.cache
def reference_logits(folder):
    model = reference.load(folder)
    cache = reference.new_cache(model)
    return mx.array([reference.forward_token(model, token, pos, cache) for pos, token in enumerate(IDS[:6])])


def logits_equal_the_reference(folders):
    """A pass over 6 tokens, and the pure-Python engine, for a Qwen3 and a Llama checkpoint."""
    well = True
    for name in ("small_qwen3", "small_llama"):
        load(folders[name])
        well &= close(llm.forward(IDS[:6], fresh(), 0), reference_logits(folders[name]))
    return well


def logits_equal_hugging_face(folders):
    """A pass over 12 tokens, and the golden files, for a Qwen3 and a Llama checkpoint."""
    well = True
    for name in ("three_queries_a_kv_head", "llama_no_head_dim"):
        load(folders[name])
        wanted = mx.load(str(ROOT / f"tests/golden/{name}.safetensors"))
        well &= close(llm.forward(wanted["ids"].tolist(), fresh(), 0), wanted["logits"])
    return well


def draws_follow_the_probabilities(folders):
    """Draws by chi-square for six pairs of temperature and top-p, and greedy."""
    return draws_are_well(llm.xp, llm.sample, llm.nucleus, llm.softmax)


@functools.cache
def draws_are_well(*what_draws):
    """The same for the functions that draw, and nothing else does: once for each version of them."""
    probs = [0.05, 0.4, 0.1, 0.2, 0.25]
    logits = llm.xp.asarray(mx.log(mx.array(probs)) + 100)              # 100 changes no probability, but e^100 is large
    well = int(llm.sample(llm.xp.asarray(mx.array([0.0, 2.0, 1.0])))) == 1
    random.seed(7)
    for temperature, top_p, nucleus in [(1.0, 1.0, {0, 1, 2, 3, 4}), (1.0, 0.66, {1, 4, 3}), (1.0, 0.5, {1, 4}),
                                        (0.5, 1.0, {0, 1, 2, 3, 4}), (0.5, 0.66, {1, 4}), (0.5, 0.5, {1})]:
        drawn = [int(llm.sample(logits, temperature, top_p)) for _ in range(60)]
        weights = {i: probs[i] ** (1 / temperature) for i in nucleus}
        expected = {i: 60 * w / sum(weights.values()) for i, w in weights.items()}
        well &= set(drawn) <= nucleus
        well &= sum((drawn.count(i) - e) ** 2 / e for i, e in expected.items()) < 20
    return well


CHECKS = {
    "cache = no cache": cache_equals_no_cache, "generate = recompute": generate_equals_recomputation,
    "pure Python": logits_equal_the_reference, "Hugging Face": logits_equal_hugging_face,
    "draws": draws_follow_the_probabilities,
}


def make_folders(place):
    """The checkpoints that the checks need. An EPS of 1e-6 and norm weights far from 1 hide nothing."""
    names = ("three_queries_a_kv_head", "llama_no_head_dim")
    small = {"hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "head_dim": 8,
             "tie_word_embeddings": False}
    return {name: make_checkpoint(place / name, name) for name in names} | {
        "narrow": make_checkpoint(place / "narrow", "one_kv_head", **small | {"num_attention_heads": 2}),
        "small_qwen3": make_checkpoint(place / "small_qwen3", "tied", **small),
        "small_llama": make_checkpoint(place / "small_llama", "llama_no_head_dim", **small)}


def fails(check, folders):
    """Does the check see that something is wrong? An error in the wrong code counts as seen."""
    try:
        return not CHECKS[check](folders)
    except Exception:
        return True


def row(what, seen):
    """A line of the table: what is wrong, in which function, and for every check whether it saw that."""
    return f"| {what} | `{MUTATIONS[what][0]}` | " + " | ".join("**seen**" if s else "" for s in seen) + " |"


def table(folders):
    """The table as Markdown: a row for every wrong version, a column for every check."""
    lines = ["| what is wrong | in | " + " | ".join(CHECKS) + " |", "|---|---|" + "---|" * len(CHECKS)]
    for what in MUTATIONS:
        undo = apply(what)
        lines.append(row(what, [fails(check, folders) for check in CHECKS]))
        undo()
    return "\n".join(lines)


def main():
    with tempfile.TemporaryDirectory() as place:
        made = table(make_folders(Path(place)))
    if "--write" not in sys.argv:
        return print(made)
    readme = (ROOT / "tests/README.md").read_text(encoding="utf-8")
    before, rest = readme.split("<!-- mutations -->\n")
    after = rest.split("<!-- end of mutations -->")[1]
    (ROOT / "tests/README.md").write_text(
        f"{before}<!-- mutations -->\n{made}\n<!-- end of mutations -->{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
