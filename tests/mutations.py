"""Wrong versions of llm_inference.py, each a line or two changed, and which kind of check sees which of them.

    python tests/mutations.py            prints the table
    python tests/mutations.py --write    puts it into tests/README.md, where test_mutations.py holds it true

Every check compares, and can see only what its two sides do not share: a cache with no cache in the same code, or this
code with code that others wrote, or draws with the probabilities that they were asked for.
"""
import ast
import functools
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import llm_inference as llm                                         # noqa: E402
import mlx.core as mx                                               # noqa: E402
import reference                                                    # noqa: E402
from checkpoints import load, make_checkpoint                           # noqa: E402

SOURCE = (ROOT / "llm_inference.py").read_text()
LINES = SOURCE.splitlines()


def code_of(node):
    """A function's source from "def" on, its docstring replaced by a 0."""
    first, start, end = node.body[0], node.lineno - 1, node.end_lineno
    lines = [*LINES[start:first.lineno - 1], " " * first.col_offset + "0", *LINES[first.end_lineno:end]]
    return "\n".join(lines)


FUNCTIONS = {node.name: code_of(node) for node in ast.parse(SOURCE).body if isinstance(node, ast.FunctionDef)}
TABLE = next(ast.get_source_segment(SOURCE, node) for node in ast.parse(SOURCE).body
             if isinstance(node, ast.Assign) and node.targets[0].id == "KERNELS")   # where the shortest stand

# What is wrong: the function, the code in it, and what stands there instead, or several pairs of them. Each code must
# occur exactly once, in the function or else in the table KERNELS. The checks run with the set that the function
# belongs to: fused_..., numpy_..., or else explicit.
MUTATIONS = {
    "RoPE left off the keys": ("apply_rope", "rotate(q), rotate(k)", "rotate(q), k"),
    "RoPE left off queries and keys": ("apply_rope", "rotate(q), rotate(k)", "q, k"),
    "RoPE turns neighbouring dimensions (i, i + 1)": (
        "apply_rope", "x[..., :half], x[..., half:]", "x[..., 0::2], x[..., 1::2]"),
    "RoPE turns backwards": ("apply_rope", "x1 * cos - x2 * sin, x1 * sin + x2 * cos",
                             "x1 * cos + x2 * sin, x2 * cos - x1 * sin"),
    "RoPE for the keys one position late": (
        "apply_rope", "return rotate(q), rotate(k)", "turned = rotate(q)\n"
        "    cos, sin = mx.cos(angles + freqs), mx.sin(angles + freqs)\n    return turned, rotate(k)"),
    "theta 500,000 whatever config.json says": ("apply_rope", "THETA **", "500000.0 **"),
    "positions from 0 again after the cache": (
        "forward", "mx.arange(start_pos, start_pos + len(token_ids))", "mx.arange(len(token_ids))"),
    "positions one too high after the cache": (
        "forward", "mx.arange(start_pos, start_pos + len(token_ids))",
        "mx.arange(start_pos, start_pos + len(token_ids)) + (start_pos > 0)"),
    "mask off by one: the next token is seen": ("attend", "mx.arange(total) > ", "mx.arange(total) > 1 + "),
    "mask off by one: a token can't see itself": (
        "attend", "mx.arange(total) > ", "mx.maximum(mx.arange(total), 1) >= "),
    "no mask": ("attend", "mx.where(future, -mx.inf, scores)", "scores"),
    "mask that ignores the cache": ("attend", "mx.arange(total - n, total)[:, None]", "mx.arange(n)[:, None]"),
    "heads tiled (0, 2, 4 ..) instead of grouped (0, 1, 2 ..)": (
        "attend", "q.reshape(N_KV, -1, D_HEAD)",
        "q.reshape(-1, N_KV, n, D_HEAD).swapaxes(0, 1).reshape(N_KV, -1, D_HEAD)",
        ".reshape(N_HEADS, n, -1)", ".reshape(N_KV, -1, n, D_HEAD).swapaxes(0, 1).reshape(N_HEADS, n, -1)"),
    "all query heads use the first key/value head": ("attend", "(q @ k.", "(q @ mx.repeat(k[:1], N_KV, axis=0)."),
    "scores not scaled": ("attend", " / math.sqrt(D_HEAD)", ""),
    "scores scaled by the hidden size": ("attend", "math.sqrt(D_HEAD)", "math.sqrt(D_MODEL)"),
    "scores capped softly, 30 tanh(s / 30)": (
        "attend", "mx.where(future, -mx.inf, scores)", "mx.where(future, -mx.inf, 30 * mx.tanh(scores / 30))"),
    "weights that do not add up to 1": ("attend", "mx.softmax(mx.where(future, -mx.inf, scores), axis=-1)",
                                        "mx.exp(mx.where(future, -mx.inf, scores))"),
    "QK-norm left out": ("attention", 'if f"{name}.q_norm.weight" in W', "if False"),
    "QK-norm after RoPE": (
        "attention", 'q = rms_norm(q, W[f"{name}.q_norm.weight"])', "q_w = W[f'{name}.q_norm.weight']",
        'k = rms_norm(k, W[f"{name}.k_norm.weight"])', "k_w = W[f'{name}.k_norm.weight']",
        "    q, k = apply_rope(q, k, positions)\n",
        "    q, k = apply_rope(q, k, positions)\n"
        "    if f'{name}.q_norm.weight' in W:\n        q, k = rms_norm(q, q_w), rms_norm(k, k_w)\n"),
    "QK-norm over all heads at once": (
        "attention", "q = rms_norm(q, W", "q = q * mx.rsqrt(mx.mean(q * q, axis=(0, 2), keepdims=True) + EPS) * (W"),
    "keys' norm weight used for the queries": (
        "attention", 'rms_norm(q, W[f"{name}.q_norm', 'rms_norm(q, W[f"{name}.k_norm'),
    "keys and values swapped": ("attention", "attend(q, k, v)", "attend(q, v, k)"),
    "norm without its weight": ("rms_norm", ".astype(x.dtype) * w", ".astype(x.dtype)"),
    "norm that subtracts the mean (LayerNorm)": (
        "rms_norm", "x32 = x.astype(mx.float32)", "x32 = x.astype(mx.float32) - mx.mean(x, axis=-1, keepdims=True)"),
    "norm with EPS 1e-2": ("rms_norm", "+ EPS", "+ 1e-2"),
    "norm by the mean size instead of its square's root": ("rms_norm", "mx.mean(x32 * x32, axis=-1, keepdims=True)",
                                                           "mx.mean(mx.abs(x32), axis=-1, keepdims=True) ** 2"),
    "SiLU replaced by ReLU": ("silu", "gate32 * mx.sigmoid(gate32)", "mx.maximum(gate32, 0)"),
    "SiLU replaced by GELU": (
        "silu", "gate32 * mx.sigmoid(gate32)", "gate32 * (1 + mx.erf(gate32 * 0.5 ** 0.5)) / 2"),
    "gate and up swapped": ("ffn", "silu(gate) * up", "silu(up) * gate"),
    "residual around attention left out": ("transformer_block", "x = x + attention", "x = attention"),
    "residual around the feed-forward layer left out": ("transformer_block", "return x + ffn", "return ffn"),
    "norm after attention instead of before": (
        "transformer_block", 'attention(rms_norm(x, W[f"{name}.input_layernorm.weight"]), layer_idx, cache, positions)',
        'rms_norm(attention(x, layer_idx, cache, positions), W[f"{name}.input_layernorm.weight"])'),
    "the second norm's weight used for the first": (
        "transformer_block", ".input_layernorm", ".post_attention_layernorm"),
    "final norm left out": ("forward", 'rms_norm(x[-1:] if last_only else x, W["model.norm.weight"])',
                            "x[-1:] if last_only else x"),
    "last block left out": ("forward", "range(N_LAYERS)", "range(N_LAYERS - 1)"),
    "always the embedding as the head": ("forward", '"lm_head.weight"', '"model.embed_tokens.weight"'),
    "cache not written": ("extend_cache", "cache[layer_idx] = (k, v)", "pass"),
    "cache overwritten by the new tokens": (
        "extend_cache", "cache[layer_idx] is not None", "cache[layer_idx] is None", "old_k, old_v = cache[layer_idx]",
        "old_k, old_v = k[:, :0], v[:, :0]"),
    "new keys put before the old ones": (
        "extend_cache", "mx.concatenate([old_k, k], axis=1)", "mx.concatenate([k, old_k], axis=1)"),
    "cache shared between the layers": ("extend_cache", "old_k, old_v = cache[layer_idx]", "old_k, old_v = cache[0]"),
    "decode passes the wrong position": ("next_tokens", "cache, pos)", "cache, pos + 1)"),
    "decode never goes on to the next position": ("next_tokens", "pos + 1 ", "pos "),
    "prefill's second piece at position 0": ("prefill", "start_pos + i", "start_pos"),
    "only the first end token ends the text": ("next_tokens", "in EOS_IDS", "== min(EOS_IDS)"),
    "top-p keeps one token too few": ("nucleus", "likelier < top_p", "likelier + probs < top_p"),
    "top-p keeps one token too many": ("nucleus", "likelier < top_p", "likelier - mx.pad(probs[:-1], (1, 0)) < top_p"),
    "top-p cuts before sorting": ("nucleus", "probs = probs[order]", "pass"),
    "temperature after the softmax": (
        "nucleus", "mx.softmax(logits / temperature)", "mx.softmax(logits) / temperature"),
    "temperature multiplies": ("nucleus", "/ temperature)", "* temperature)"),
    "the place in the sorted order returned as the token": (
        "sample", "order[mx.random.categorical(mx.log(probs))]", "mx.random.categorical(mx.log(probs))"),
    "greedy takes the least likely token": ("sample", "mx.argmax(logits)", "mx.argmin(logits)"),
    # ---- fused
    "fused: RoPE turns neighbouring dimensions": ("fused_apply_rope", '"traditional": False', '"traditional": True'),
    "fused: RoPE from position 0 in every call": ("fused_apply_rope", "positions[0]", "0"),
    "fused: no mask": ("fused_attend", '"causal" if q.shape[1] > 1 else None', "None"),
    "fused: scores scaled by the hidden size": ("fused_attend", "D_HEAD ** -0.5", "D_MODEL ** -0.5"),
    "fused: norm without its weight": ("fused_rms_norm", "(x, w, EPS)", "(x, None, EPS)"),
    "fused: SiLU without its gate": ("fused_silu", "gate * mx.sigmoid(gate)", "mx.sigmoid(gate)"),
    "fused: cache written one position late": (
        "fused_extend_cache", "slice_update(keys, k, mx.array([length])",
        "slice_update(keys, k, mx.array([length + (length > 0)])"),
    "fused: cache shared between the layers": ("fused_extend_cache", "cache[layer_idx] or", "cache[0] or"),
    "fused: values cached unchanged from the first call": (
        "fused_extend_cache", "values = mx.slice_update(values, v, mx.array([length]), axes=[1])",
        "values = mx.slice_update(values, v, mx.array([length]), axes=[1]) if length == 0 else values"),
    "fused: the pass queued ahead one position late": (
        "fused_next_tokens", "start_pos + len(ids)", "start_pos + len(ids) + 1"),
    "fused: only the first end token ends the text": ("fused_next_tokens", "in EOS_IDS", "== min(EOS_IDS)"),
    # ---- numpy
    "numpy: the next id's row of the embedding": ("numpy_embed", "np.asarray(token_ids)", "(np.asarray(token_ids) + 1)"),
    "numpy: product not turned back": ("numpy_linear", "np.asarray(x).T).T", "np.asarray(x).T)"),
    "numpy: norm without its square root": ("numpy_rms_norm", "np.sqrt(mean + np.float32(EPS))",
                                            "(mean + np.float32(EPS))"),
    "numpy: norm with EPS 1e-2": ("numpy_rms_norm", "np.float32(EPS)", "np.float32(1e-2)"),
    "numpy: RoPE turns backwards": ("numpy_apply_rope", "a * cos - b * sin, a * sin + b * cos",
                                    "a * cos + b * sin, b * cos - a * sin"),
    "numpy: RoPE from position 0 in every call": (
        "numpy_apply_rope", "np.asarray(positions, dtype=np.float32)", "np.arange(len(positions), dtype=np.float32)"),
    "numpy: heads tiled instead of grouped": (
        "numpy_attend", "np.asarray(q).reshape(N_KV, -1, D_HEAD)",
        "np.asarray(q).reshape(-1, N_KV, n, D_HEAD).swapaxes(0, 1).reshape(N_KV, -1, D_HEAD)",
        "out.reshape(N_HEADS, n, -1)", "out.reshape(N_KV, -1, n, D_HEAD).swapaxes(0, 1).reshape(N_HEADS, n, -1)"),
    "numpy: mask on the first columns instead of the last": (
        "numpy_attend", "scores[:, total - n:] += future", "scores[:, :n] += future"),
    "numpy: mask off by one: the next token is seen": (
        "numpy_attend", "dtype=np.float32), 1), (N", "dtype=np.float32), 2), (N"),
    "numpy: scores not scaled": ("numpy_attend", " * np.float32(D_HEAD ** -0.5)", ""),
    "numpy: weights that do not add up to 1": (
        "numpy_attend", "np.divide(scores @ values, scores.sum(axis=1, keepdims=True), out=mixed)",
        "mixed[:] = scores @ values"),
    "numpy: keys cached one position late": (
        "numpy_extend_cache", "keys[:, length:total], values",
        "keys[:, length + (length > 0):total + (length > 0)], values"),
    "numpy: a cache that grows forgets what it held": (
        "numpy_extend_cache", "values[:, :length] = old", "values[:, :length] = old[0], 0 * old[1]"),
    "numpy: two texts write into one cache": ("numpy_extend_cache", " or length < written[0]", ""),
    "numpy: SiLU with the sign turned": ("numpy_silu", "np.exp(-part)", "np.exp(part)"),
}


def kind_of(function):
    """The set of functions that a function belongs to."""
    prefix = function.split("_")[0]
    return prefix if prefix in llm.KINDS else "explicit"


def apply(what):
    """Put a wrong version in place, with the set it belongs to; returns a function that puts the right one back."""
    function, *changes = MUTATIONS[what]
    right_source = source = FUNCTIONS.get(function, TABLE)
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert right_source.count(old) == 1, f"{what}: {function} has {old!r} not once"
        source = source.replace(old, new)
    before, kernels, right = llm.kernels, llm.KERNELS, vars(llm).get(function)
    plain = {versions[0].__name__: versions[0] for versions in kernels.values()}
    exec(compile(source, what, "exec"), llm.__dict__ if right else vars(llm) | plain, made := {})
    vars(llm).update(made)
    if right:                                                       # load_model takes the functions from the table
        llm.KERNELS = {name: tuple(made[function] if f.__name__ == function else f for f in versions)
                       for name, versions in kernels.items()}
    llm.use_kernels(kind_of(function))

    def undo():
        llm.KERNELS = kernels
        if right:
            setattr(llm, function, right)
        llm.use_kernels(before)

    return undo


# ---- The checks. Each takes a folder of checkpoints and says whether all is well ------------------------------
IDS = [72, 101, 20, 108, 111, 44, 32, 200, 111, 250, 108, 100]


def close(found, wanted, tolerance=2e-5):
    return found.shape == wanted.shape and (
        mx.max(mx.abs(found - wanted)) <= tolerance * mx.max(mx.abs(wanted))).item()


def cache_equals_no_cache(folders):
    """Logits of pieces of 5, 1, 4, 1 and 1 tokens on one cache, and of all 12 in one pass.

    In between, another text goes on from a copy of the cache that was made after 6 tokens.
    """
    load(folders["small_qwen3"])
    cache, rows, copy = [None] * llm.N_LAYERS, [], []
    for start, end in [(0, 5), (5, 6), (6, 10), (10, 11), (11, 12)]:
        if start == 6:
            copy = list(cache)
        if start == 10:
            other = llm.forward([7, 8], copy, 6)
        rows.append(llm.forward(IDS[start:end], cache, start))
    return close(other, llm.forward(IDS[:6] + [7, 8], [None] * llm.N_LAYERS, 0)[6:]) and close(mx.concatenate(rows), llm.forward(IDS, [None] * llm.N_LAYERS, 0))


def generate_equals_recomputation(folders):
    """`generate` after 261 tokens: its text, and the logits that it samples from, and those of one pass.

    The third token that it chooses becomes the second end token, which must end the text.
    """
    load(folders["narrow"])
    ids, seen, said, sample = llm.encode("Hello, world! " * 19)[:261], [], [], llm.sample
    prompt, llm.EOS_IDS = llm.tok.decode(ids), {0}

    def choose(logits, *rest):
        seen.append(logits)
        said.append(sample(logits, *rest))
        if len(said) == 3:
            llm.EOS_IDS = {0, said[2].item()}
        return said[-1]

    llm.sample = choose
    try:
        made = llm.generate(prompt, 4)
    finally:
        llm.sample = sample
    wanted = llm.forward(ids + [token.item() for token in said[:2]], [None] * llm.N_LAYERS, 0)[-3:]
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
        well &= close(llm.forward(IDS[:6], [None] * llm.N_LAYERS, 0), reference_logits(folders[name]))
    return well


def logits_equal_hugging_face(folders):
    """A pass over 12 tokens, and the golden files, for a Qwen3 and a Llama checkpoint."""
    well = True
    for name in ("three_queries_a_kv_head", "llama_no_head_dim"):
        load(folders[name])
        wanted = mx.load(str(ROOT / f"tests/golden/{name}.safetensors"))
        well &= close(llm.forward(wanted["ids"].tolist(), [None] * llm.N_LAYERS, 0), wanted["logits"])
    return well


def draws_follow_the_probabilities(folders):
    """Draws by chi-square for six pairs of temperature and top-p, and greedy."""
    return draws_are_well(llm.sample, llm.nucleus)


@functools.cache
def draws_are_well(*functions):
    """The same for the functions that draw, and nothing else does: once for each version of them."""
    probs = [0.05, 0.4, 0.1, 0.2, 0.25]
    logits, well = mx.log(mx.array(probs)), llm.sample(mx.array([0.0, 2.0, 1.0])).item() == 1
    mx.random.seed(7)
    for temperature, top_p, nucleus in [(1.0, 1.0, {0, 1, 2, 3, 4}), (1.0, 0.66, {1, 4, 3}), (1.0, 0.5, {1, 4}),
                                        (0.5, 1.0, {0, 1, 2, 3, 4}), (0.5, 0.66, {1, 4}), (0.5, 0.5, {1})]:
        drawn = mx.stack([llm.sample(logits, temperature, top_p) for _ in range(60)]).tolist()
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
    function = MUTATIONS[what][0] if MUTATIONS[what][0] in FUNCTIONS else "KERNELS"
    return f"| {what} | `{function}` | " + " | ".join("**seen**" if s else "" for s in seen) + " |"


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
