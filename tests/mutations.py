"""Wrong versions of llm_inference.py, each a line or two changed, and which kind of check sees which of them.

    python tests/mutations.py            prints the table
    python tests/mutations.py --write    puts it into README.md, where test_mutations.py holds it true

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
from checkpoints import make_checkpoint                             # noqa: E402
from tokenizers.decoders import DecodeStream                        # noqa: E402

SOURCE = (ROOT / "llm_inference.py").read_text()
FUNCTIONS = {node.name: ast.get_source_segment(SOURCE, node).replace(
                 ast.get_source_segment(SOURCE, node.body[0]), "0", 1)                      # the docstring goes
             for node in ast.parse(SOURCE).body if isinstance(node, ast.FunctionDef)}

# What is wrong: the function, the code in it, and what stands there instead. The code must occur exactly once.
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
    "no mask": ("attend", "if n > 1", "if False"),
    "mask that ignores the cache": ("attend", "mx.arange(total - n, total)[:, None]", "mx.arange(n)[:, None]"),
    "heads tiled (0, 2, 4 ..) instead of grouped (0, 1, 2 ..)": (
        "attend", "in_parallel(heads, q.reshape(n_kv, -1, d_head), k, v).reshape(n_heads, n, -1)",
        "in_parallel(heads, q.reshape(-1, n_kv, n, d_head).swapaxes(0, 1).reshape(n_kv, -1, d_head), k, v)"
        ".reshape(n_kv, -1, n, d_head).swapaxes(0, 1).reshape(n_heads, n, d_head)"),
    "all query heads use the first key/value head": ("attend", "(q @ k.", "(q @ mx.repeat(k[:1], n_kv, axis=0)."),
    "scores not scaled": ("attend", " * d_head ** -0.5", ""),
    "scores scaled by the hidden size": ("attend", "d_head ** -0.5  ", "D_MODEL ** -0.5  "),
    "scores in bfloat16": ("attend", ".astype(mx.float32)", ".astype(mx.bfloat16)"),
    "weights that do not add up to 1": ("attend", " / mx.sum(weights, axis=-1, keepdims=True)", ""),
    "QK-norm left out": ("attention", 'if f"{p}.q_norm.weight" in W', "if False"),
    "QK-norm after RoPE": (
        "attention", "    q, k = apply_rope(q, k, positions)\n",
        "    w, ones = (W.get(f'{p}.{i}_norm.weight') for i in 'qk'), mx.ones(D_HEAD)\n"
        "    q, k = apply_rope(q, k, positions)\n"
        "    q, k = (x if i is None else rms_norm(x, ones) * i for x, i in zip((q, k), w))\n"),
    "QK-norm over all heads at once": (
        "attention", "q = rms_norm(q, W", "q = q * mx.rsqrt(mx.mean(q * q, axis=(0, 2), keepdims=True) + EPS) * (W"),
    "keys' norm weight used for the queries": (
        "attention", 'rms_norm(q, W[f"{p}.q_norm', 'rms_norm(q, W[f"{p}.k_norm'),
    "keys and values swapped": ("attention", "attend(q, k, v)", "attend(q, v, k)"),
    "norm without its weight": ("rms_norm", ".astype(x.dtype) * w", ".astype(x.dtype)"),
    "norm that subtracts the mean (LayerNorm)": (
        "rms_norm", "x32 = x.astype(mx.float32)", "x32 = x.astype(mx.float32) - mx.mean(x, axis=-1, keepdims=True)"),
    "norm with EPS 1e-2": ("rms_norm", "+ EPS", "+ 1e-2"),
    "norm computed in bfloat16": ("rms_norm", "x32 = x.astype(mx.float32)", "x32 = x.astype(mx.bfloat16)"),
    "SiLU replaced by ReLU": ("ffn", "gate / (1 + exp(-gate))", "mx.maximum(gate, 0)"),
    "SiLU replaced by GELU": ("ffn", "gate / (1 + exp(-gate))", "gate * (1 + mx.erf(gate * 0.5 ** 0.5)) / 2"),
    "gate and up swapped": ("ffn", "exp(-gate))).astype(x.dtype), gate)", "exp(-gate))).astype(x.dtype), up); up = linear(x, f'{p}.gate_proj.weight')"),
    "residual around attention left out": ("transformer_block", "x = x + attention", "x = attention"),
    "residual around the feed-forward layer left out": ("transformer_block", "return x + ffn", "return ffn"),
    "norm after attention instead of before": (
        "transformer_block", 'attention(rms_norm(x, W[f"{p}.input_layernorm.weight"]), layer_idx, cache, positions)',
        'rms_norm(attention(x, layer_idx, cache, positions), W[f"{p}.input_layernorm.weight"])'),
    "the second norm's weight used for the first": (
        "transformer_block", ".input_layernorm", ".post_attention_layernorm"),
    "final norm left out": ("forward", 'rms_norm(x[-1:] if last_only else x, W["model.norm.weight"])',
                            "x[-1:] if last_only else x"),
    "last block left out": ("forward", "range(N_LAYERS)", "range(N_LAYERS - 1)"),
    "always the embedding as the head": ("forward", '"lm_head.weight"', '"model.embed_tokens.weight"'),
    "cache not written": ("extend_cache", "cache[layer_idx] = (keys, values, total)", "pass"),
    "cache written one position late": (
        "extend_cache", "slice_update(keys, k, mx.array([length])",
        "slice_update(keys, k, mx.array([length + (length > 0)])"),
    "cache shared between the layers": ("extend_cache", "cache[layer_idx] or", "cache[0] or"),
    "values cached unchanged from the first call": (
        "extend_cache", "values = mx.slice_update(values, v, mx.array([length]), axes=[1])",
        "values = mx.slice_update(values, v, mx.array([length]), axes=[1]) if length == 0 else values"),
    "decode passes the wrong position": ("stream", "cache, pos)", "cache, pos + 1)"),
    "prefill's second piece at position 0": ("prefill", "start_pos + i", "start_pos"),
    "only the first end token ends the text": ("stream", "in EOS_IDS", "== min(EOS_IDS)"),
    "top-p keeps one token too few": ("nucleus", "likelier < top_p", "likelier + probs < top_p"),
    "top-p keeps one token too many": ("nucleus", "likelier < top_p", "likelier - mx.pad(probs[:-1], (1, 0)) < top_p"),
    "top-p cuts before sorting": ("nucleus", "probs = probs[order]", "pass"),
    "temperature after the softmax": (
        "nucleus", "mx.softmax((logits - mx.max(logits)) / temperature)", "mx.softmax(logits) / temperature"),
    "temperature multiplies": ("nucleus", "/ temperature)", "* temperature)"),
    "the place in the sorted order returned as the token": (
        "sample", "order[mx.random.categorical(mx.log(probs))]", "mx.random.categorical(mx.log(probs))"),
    "greedy takes the least likely token": ("sample", "mx.argmax(logits)", "mx.argmin(logits)"),
}


def apply(what):
    """Put a wrong version in place; returns a function that puts the right one back."""
    function, old, new = MUTATIONS[what]
    source, right = FUNCTIONS[function], getattr(llm, function)
    assert source.count(old) == 1, f"{what}: {function} has {old!r} {source.count(old)} times"
    exec(compile(source.replace(old, new), what, "exec"), llm.__dict__)
    return lambda: setattr(llm, function, right)


# ---- The checks. Each takes a folder of checkpoints and says whether all is well ------------------------------
IDS = [72, 101, 20, 108, 111, 44, 32, 200, 111, 250, 108, 100]


def close(found, wanted, tolerance=2e-5):
    return found.shape == wanted.shape and (
        mx.max(mx.abs(found - wanted)) <= tolerance * mx.max(mx.abs(wanted))).item()


def cache_equals_no_cache(folders):
    """Logits of pieces of 5, 1, 4, 1 and 1 tokens on one cache, and of all 12 in one pass."""
    llm.load_model(folders["small_qwen3"])
    cache, rows = [None] * llm.N_LAYERS, []
    for start, end in [(0, 5), (5, 6), (6, 10), (10, 11), (11, 12)]:
        rows.append(llm.forward(IDS[start:end], cache, start))
    return close(mx.concatenate(rows), llm.forward(IDS, [None] * llm.N_LAYERS, 0))


def generate_equals_recomputation(folders):
    """`generate` after a prompt of 261 tokens: its text, and the logits it samples from, and those of whole passes."""
    llm.load_model(folders["small_qwen3"])
    ids, seen, sample = llm.encode("Hello, world! " * 19)[:261], [], llm.sample
    prompt, wanted = llm.tok.decode(ids), []
    for _ in range(4):
        wanted.append(llm.forward(ids, [None] * llm.N_LAYERS, 0)[-1])
        ids.append(mx.argmax(wanted[-1]).item())
    llm.EOS_IDS = {0, ids[-1]}                                      # two end tokens: the text ends at the second
    llm.sample = lambda logits, *rest: seen.append(logits) or sample(logits, *rest)
    try:
        made = llm.generate(prompt, 4)
    finally:
        llm.sample = sample
    text, new = DecodeStream(ids[:261], skip_special_tokens=True), ids[261:ids.index(ids[-1], 261)]
    return (made == prompt + "".join(text.step(llm.tok, i) or "" for i in new)
            and all(close(found, row) for found, row in zip(seen, wanted)))


@functools.cache
def reference_logits(folder):
    model = reference.load(folder)
    cache = reference.new_cache(model)
    return mx.array([reference.forward_token(model, token, pos, cache) for pos, token in enumerate(IDS[:6])])


def logits_equal_the_reference(folders):
    """A pass over 6 tokens, and the pure-Python engine, for a Qwen3 and a Llama checkpoint."""
    well = True
    for name in ("small_qwen3", "small_llama"):
        llm.load_model(folders[name])
        well &= close(llm.forward(IDS[:6], [None] * llm.N_LAYERS, 0), reference_logits(folders[name]))
    return well


def logits_equal_hugging_face(folders):
    """A pass over 12 tokens, and the golden files, for a Qwen3 and a Llama checkpoint."""
    well = True
    for name in ("three_queries_a_kv_head", "llama_no_head_dim"):
        llm.load_model(folders[name])
        wanted = mx.load(str(ROOT / f"tests/golden/{name}.safetensors"))
        well &= close(llm.forward(wanted["ids"].tolist(), [None] * llm.N_LAYERS, 0), wanted["logits"])
    return well


def draws_follow_the_probabilities(folders):
    """Draws by chi-square for six pairs of temperature and top-p, and greedy."""
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
    small = {"hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "tie_word_embeddings": False}
    return {name: make_checkpoint(place / name, name) for name in names} | {
        "small_qwen3": make_checkpoint(place / "small_qwen3", "tied", **small),
        "small_llama": make_checkpoint(place / "small_llama", "llama_no_head_dim", **small)}


def fails(check, folders):
    """Does the check see that something is wrong? An error in the wrong code counts as seen."""
    try:
        return not CHECKS[check](folders)
    except Exception:
        return True


def row(what, seen):
    """A line of the README's table: what is wrong, in which function, and for every check whether it saw that."""
    return f"| {what} | `{MUTATIONS[what][0]}` | " + " | ".join("**seen**" if s else "" for s in seen) + " |"


def table(folders):
    """The README's table as Markdown: a row for every wrong version, a column for every check."""
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
    readme = (ROOT / "README.md").read_text()
    before, rest = readme.split("<!-- mutations -->\n")
    after = rest.split("<!-- end of mutations -->")[1]
    (ROOT / "README.md").write_text(
        f"{before}<!-- mutations -->\n{made}\n<!-- end of mutations -->{after}")


if __name__ == "__main__":
    main()
