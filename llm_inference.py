"""Inside an LLM: all that happens between a prompt and its continuation, in one file, for Qwen3-0.6B.

    python llm_inference.py "The capital of France is"

A language model knows a fixed list of pieces of text, called tokens. Given a text, it scores each of them:
how well would it come next? One is chosen and added to the text, and then all are scored once more.

    text --> token ids --> x: one vector per token --> 28 blocks --> x --> last norm, output matrix --> logits
         Step 1        Step 2                          Step 7              Step 8                         |
                         ^                                                                                v
         text <----------+--------- Step 9: once more, with the next token <--------- sampling, Step 8 ---+

    One of the blocks (Step 7). Both halves read a normed copy of x, and their results are added to x:

    x --+--> norm --> attention ------------------> + --+--> norm --> feed-forward --> + --> x
        |    Step 3   Step 5, with RoPE (Step 4)    ^   |    Step 3   Step 6           ^
        |             on queries and keys, and a    |   |                              |
        |             cache of keys and values      |   |                              |
        +-------------------------------------------+   +------------------------------+

First comes the model, in nine steps, each formula as it is written on paper. On a CPU these lines are what
runs: if you change one, the text changes; only extend_cache and attend with its softmax, in Step 5, have
faster versions. On a GPU seven do; with --kernels explicit none does. After the steps come what is refused,
these versions, text that appears while it is made, a chat, two ways to look inside, loading, the command
line. Python looks a function up when it is called, so a step may use one that stands further below. Llamas
run, too, if their RoPE is that of Step 4: they are Qwen3s without two of the norms (Step 5).

Shapes are written (rows, columns), and (16, n, 128) is 16 such matrices; n is how many tokens go through the
model at once, in a pass: first those of the prompt, then one at a time. The numbers are Qwen3-0.6B's.
"""
import argparse, contextlib, functools, hashlib, itertools, json, math, os, random, re, sys, time
from pathlib import Path
from unittest import mock

# What must be installed. uv reads these lines, too, and installs it: uv run llm_inference.py
# /// script
# requires-python = ">=3.10"
# dependencies = [
#     "mlx[cpu]>=0.32.0",
#     "mlx-cpu>=0.32.0; sys_platform == 'win32'",
#     "tokenizers>=0.20.0",
#     "numpy>=1.23.2",
# ]
# ///
import mlx.core as mx
import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm

xp = mx     # what computes: MLX on a GPU, NumPy on a CPU. The steps use what both have under the same name

# ==== The model: weights, a tokenizer and some numbers. load_model, near the end, reads them from files =====
W = {}                          # every weight, an array of xp, under its Hugging Face name
tok: Tokenizer                  # turns text into token ids and back
EOS_IDS = {151645, 151643}      # the tokens that end a text: <|im_end|> and <|endoftext|>
N_LAYERS = 28                   # transformer blocks, which are also called layers
D_MODEL = 1024                  # numbers in the vector of one token
N_HEADS = 16                    # attention asks 16 questions side by side (Step 5): query heads
N_KV = 8                        # key/value heads: each answers two query heads
D_HEAD = 128                    # numbers in a head's vectors
MAX_POSITIONS = 40960           # the longest text, in tokens
EPS = 1e-6                      # keeps RMSNorm (Step 3) from dividing by zero
THETA = 1000000                 # the base of RoPE's angles (Step 4)

# W holds model.embed_tokens.weight (151936, 1024), a row per token and some to spare, model.norm.weight
# (1024,), lm_head.weight, in Qwen3-0.6B the embedding again, and for each block, "model.layers.0." to
# "model.layers.27.", the tensors below. Matrices are (out, in); q's out is 16 x 128, k's and v's 8 x 128.
#     input_layernorm.weight   (1024,)         post_attention_layernorm.weight (1024,)       Step 3
#     self_attn.q_proj.weight  (2048, 1024)    self_attn.q_norm.weight         (128,)        Step 5
#     self_attn.k_proj.weight  (1024, 1024)    self_attn.k_norm.weight         (128,)
#     self_attn.v_proj.weight  (1024, 1024)    self_attn.o_proj.weight         (1024, 2048)
#     mlp.gate_proj.weight     (3072, 1024)    mlp.up_proj.weight              (3072, 1024)  Step 6
#     mlp.down_proj.weight     (1024, 3072)


# ==== Step 1: tokenization turns text into integers =========================================================
def encode(prompt):
    """A text's token ids: "The| capital| of| France| is" becomes [785, 6722, 315, 9625, 374].

    Byte pair encoding starts with a word's bytes, and joins neighbours into longer pieces. The list of pairs
    to join was made once, before training: join the most frequent pair everywhere in many texts, count again,
    join again, and so on. So a frequent word is one token, often with the space before it; a rare word, or a
    rare character, is several.
    """
    return tok.encode(prompt).ids


# ==== Step 2: embedding turns integers into vectors =========================================================
def embed(token_ids):
    """The row of the embedding matrix for each of n token ids: (n,) -> (n, 1024).

    An id says nothing about a token; the 1024 numbers, learned in training, say what it has in common with
    others: tokens that are used alike have rows that point in similar directions.
    """
    return W["model.embed_tokens.weight"][xp.asarray(token_ids)]


# ==== Step 3: RMSNorm scales every vector to a root mean square of 1, then weighs its dimensions ============
def rms_norm(x, w):
    """x / sqrt(mean(x^2) + EPS) * w, over the last axis: x (..., d), w (d,). Zhang and Sennrich 2019.

    Each of the 28 blocks adds to x, so x's numbers grow from block to block. What a block reads is therefore
    a normed copy, which has the same scale in all of them; w, learned, says how much each dimension counts.
    """
    x32 = xp.asarray(x, dtype=xp.float32)                       # x itself, or if it has 16 bits, a copy in 32
    normed = x32 / xp.sqrt(xp.mean(x32 * x32, axis=-1, keepdims=True) + EPS)
    return xp.asarray(normed, dtype=x.dtype) * w                # back in x's type first, as Hugging Face does


# ==== Step 4: RoPE puts a token's position into its queries and keys ========================================
# Step 5 makes of each token queries, for what it looks for, and keys, by which others find it. Their dot
# product, which says how well they match, should depend on the tokens' order and distance: "dog bites man" is
# not "man bites dog". So RoPE turns both, two dimensions at a time, by angles that grow with the position.
def apply_rope(q, k, positions):
    """Turn every query and key by its position's angles. Su et al. 2021, "RoFormer".

    q (16, n, 128), k (8, n, 128), positions n integers; the same shapes come back. Dimensions i and i + 64
    (i < 64) of a vector are taken as a point (x1, x2) in a plane. For the token at position p it is turned
    about the origin by the angle p * THETA^(-i/64), in radians. Pair i = 0 turns by 1 radian per token, so it
    is nearly back after 6 tokens and only tells near tokens apart; pair 32 turns by 0.001, and serves for far
    ones. A dot product sums over the pairs, and turning query and key by the same angle does not change it.
    So if a query is turned by a and a key by b, only a - b counts, which is proportional to the distance.
    """
    half = D_HEAD // 2
    freqs = THETA ** (-xp.arange(half, dtype=xp.float32) / half)                # (64,) radians per token
    angles = xp.asarray(positions, dtype=xp.float32)[:, None] * freqs             # (n, 64)
    cos, sin = xp.cos(angles), xp.sin(angles)                                   # (n, 64), for all heads

    def rotate(x):
        x1, x2 = x[..., :half], x[..., half:]                                   # each (heads, n, 64)
        turned = xp.concatenate([x1 * cos - x2 * sin, x1 * sin + x2 * cos], axis=-1)
        return xp.asarray(turned, dtype=x.dtype)                                # cos had made it 32 bits

    return rotate(q), rotate(k)


# ==== Step 5: attention with grouped query heads and a KV cache =============================================
def attention(x, layer_idx, cache, positions):
    """Each of n new tokens gathers from all tokens up to itself: x (n, 1024) -> (n, 1024).

    This is the only step in which tokens exchange anything. Three kinds of vectors are computed from each
    token's x: a query is what the token looks for, a key is what it can be found by, and a value is what it
    hands over. The better its query fits a token's key, the more it takes of that token's value. One vector
    could not be all three: what a token looks for is not what it has to offer. All this is done 16 times side
    by side, in "heads": a token has 16 queries, but 8 keys and 8 values, each of which serves two heads.
    positions: the n tokens' places in the text. cache[layer_idx] holds the keys and values of earlier tokens.
    """
    name = f"model.layers.{layer_idx}.self_attn"
    # (n, 2048) -> (n, 16, 128) -> (16, n, 128): 16 vectors per token, then one matrix per head
    q = linear(x, f"{name}.q_proj.weight").reshape(-1, N_HEADS, D_HEAD).transpose(1, 0, 2)
    k = linear(x, f"{name}.k_proj.weight").reshape(-1, N_KV, D_HEAD).transpose(1, 0, 2)     # (8, n, 128)
    v = linear(x, f"{name}.v_proj.weight").reshape(-1, N_KV, D_HEAD).transpose(1, 0, 2)     # (8, n, 128)
    if f"{name}.q_norm.weight" in W:                            # Llamas do without these two norms, which
        q = rms_norm(q, W[f"{name}.q_norm.weight"])             # keep the dot products small
        k = rms_norm(k, W[f"{name}.k_norm.weight"])
    q, k = apply_rope(q, k, positions)
    k, v = extend_cache(cache, layer_idx, k, v)                 # (8, total, 128) each: old and new tokens
    out = attend(q, k, v)                                       # (16, n, 128)
    out = out.transpose(1, 0, 2).reshape(-1, N_HEADS * D_HEAD)  # (n, 2048): a token's 16 heads side by side
    return linear(out, f"{name}.o_proj.weight")                 # (n, 1024): mixes what the heads have found


def linear(x, name):
    """The matrix w of that name, (out, in), times each token's vector: x (n, in) -> (n, out).

    This is the same as x @ w.T; with w first, as it is stored, NumPy is often a little faster.
    """
    return (W[name] @ x.T).T


def extend_cache(cache, layer_idx, k, v):
    """Add the keys and values of n new tokens, (8, n, 128); return those of all tokens, (8, total, 128).

    cache is a list with an entry for each layer: None, or (keys, values). What a block computes for a token
    depends on that token and earlier ones, never on later ones, which attend hides. So a token's key, turned
    by RoPE, and its value never change; but all later tokens need both. They are kept: 28 layers x 2 (key and
    value) x 8 heads x 128 = 57,344 numbers per token. Without them each new token would need a pass over the
    whole text. A query is used once, by its own token, and not kept.
    """
    if cache[layer_idx] is not None:
        old_k, old_v = cache[layer_idx]
        k, v = xp.concatenate([old_k, k], axis=1), xp.concatenate([old_v, v], axis=1)
    cache[layer_idx] = (k, v)
    return k, v


def attend(q, k, v):
    r"""softmax(q k^T / sqrt(128), later tokens hidden) v -> (16, n, 128). Vaswani et al. 2017.

    q (16, n, 128): queries of the n new tokens; k and v (8, total, 128): of all tokens, the new ones last.

    A row of q k^T / sqrt(128) holds a token's scores, which softmax turns into shares; so what comes out is a
    weighted mean of values. Why sqrt(128)? A score is a sum of 128 terms, some positive, some negative, that
    partly cancel: it is typically sqrt(128), about 11, times as large as one term. Without the division the
    largest share would be nearly 1, and a token would take from one token only. Two query heads share a
    key/value head: this takes half the cache of 16 key/value heads, for nearly the same quality.

        q (16, n, 128)              head 0   head 1   head 2   head 3   ...   head 14   head 15
        k and v (8, total, 128)     \__ head 0 __/    \__ head 1 __/    ...    \___ head 7 ___/

    No token may look at a later one: in training each had to predict the next, and would only have copied
    it. So a later token's score becomes -inf, and its share e^-inf = 0. For n = 3 new tokens on 2 cached:

                         key_pos  0 1 2 3 4
        new token at query_pos 2  . . . x x       x: hidden
        new token at query_pos 3  . . . . x
        new token at query_pos 4  . . . . .
    """
    n, total = q.shape[1], k.shape[1]
    k, v = (xp.repeat(a, N_HEADS // N_KV, axis=0) for a in (k, v))              # (16, total, 128) each
    scores = xp.asarray(q @ k.transpose(0, 2, 1), dtype=xp.float32) / math.sqrt(D_HEAD)     # (16, n, total)
    key_pos, query_pos = xp.arange(total), xp.arange(total - n, total)[:, None]
    is_later = key_pos > query_pos                                              # (n, total), as drawn above
    shares = softmax(xp.where(is_later, -math.inf, scores))                     # (16, n, total)
    return xp.asarray(shares, dtype=v.dtype) @ v                                # (16, n, 128)


def softmax(scores):
    """e^s / (sum of all e^s) for the scores s in each row: shares that are not negative and add up to 1.

    Subtracting the row's largest score from all makes numerator and denominator smaller by the same factor:
    this changes no share, but no e^s can become infinite.
    """
    exps = xp.exp(scores - xp.max(scores, axis=-1, keepdims=True))
    return exps / xp.sum(exps, axis=-1, keepdims=True)


# ==== Step 6: the SwiGLU feed-forward network ===============================================================
def silu(gate):
    """gate / (1 + e^-gate), also called swish: nearly 0 far below 0, and nearly gate far above it."""
    gate32 = xp.asarray(gate, dtype=xp.float32)
    return xp.asarray(gate32 / (1 + xp.exp(-gate32)), dtype=gate.dtype)


def ffn(x, layer_idx):
    """down(silu(gate(x)) * up(x)), for every token by itself: (n, 1024) -> (n, 1024). Shazeer 2020.

    gate, up and down multiply by matrices that are nearly half of all weights. up computes 3072 features of a
    token, the gate decides how much each of them counts here, and down turns them into what is added to x.
    Without the gate, down after up would be no more than one matrix, a sum of x's numbers with fixed weights.
    With it, those weights depend on x itself: an "if".
    """
    name = f"model.layers.{layer_idx}.mlp"
    gate = linear(x, f"{name}.gate_proj.weight")                # (n, 3072)
    up = linear(x, f"{name}.up_proj.weight")                    # (n, 3072)
    return linear(silu(gate) * up, f"{name}.down_proj.weight")  # (n, 1024)


# ==== Step 7: the transformer block =========================================================================
def transformer_block(x, layer_idx, cache, positions):
    """Attention, then feed-forward; each reads a normed copy of x and adds to x: (n, 1024) -> (n, 1024).

    Adding instead of replacing keeps what earlier blocks have found: a block learns only what is missing.
    """
    name = f"model.layers.{layer_idx}"
    x = x + attention(rms_norm(x, W[f"{name}.input_layernorm.weight"]), layer_idx, cache, positions)
    return x + ffn(rms_norm(x, W[f"{name}.post_attention_layernorm.weight"]), layer_idx)


# ==== Step 8: all blocks and the output matrix make logits, sampling makes a token ==========================
def forward(token_ids, cache, start_pos, last_only=False):
    """For each of n new tokens, score every token of the vocabulary as the one that comes next: (n, 151936).

    Such a score, which may be any number, is called a logit. start_pos: how many tokens the cache holds. The
    next token is chosen from the last row alone, (1, 151936) if last_only; training needs all rows.
    """
    positions = xp.arange(start_pos, start_pos + len(token_ids))
    x = embed(token_ids)                                        # (n, 1024)
    for layer_idx in range(N_LAYERS):
        x = transformer_block(x, layer_idx, cache, positions)
    if last_only: x = x[-1:]                                    # (1, 1024)
    x = rms_norm(x, W["model.norm.weight"])                     # x has grown in every block
    return linear(x, "lm_head.weight")                          # (n, 151936): x times the row of each token


def nucleus(logits, temperature, top_p):
    """The probability of drawing each token: (151936,) -> (151936,). Holtzman et al. 2019.

    softmax(logits / temperature): a temperature below 1 makes likely tokens likelier, one above 1 evens them
    out. Then the nucleus is kept, the fewest of the likeliest tokens that together reach top_p (and any as
    likely as the last of them), and all others get 0: each is unlikely, but they are so many that one would
    be drawn now and then, and spoil all that follows.
    """
    probs = softmax(xp.asarray(logits, dtype=xp.float32) / temperature)
    if top_p < 1:
        falling = -xp.sort(-probs)                              # the largest first
        before = xp.cumsum(falling) - falling                   # the sum of the likelier: 0 for the first
        least = xp.min(xp.where(before < top_p, falling, falling[:1]))          # the rest can't be the least
        probs = xp.where(probs >= least, probs, 0)
    return probs / xp.sum(probs)


def sample(logits, temperature=0.0, top_p=0.95):
    """Choose a token: logits (151936,) -> its id, a single integer of xp.

    Temperature 0 takes the likeliest token ("greedy"); such texts tend to repeat themselves. Above 0, draw a
    number up to 1, add up nucleus's probabilities, and take the first token at which the sum reaches it.
    """
    if temperature < 1e-5:                                      # 0, or too little to divide by
        return xp.argmax(logits)
    number = 1 - random.random()                                # above 0, and up to 1
    sums = xp.cumsum(nucleus(logits, temperature, top_p))       # the last may be 0.9999
    return xp.argmax(sums >= number * sums[-1:])                # argmax finds the first that is true


# ==== Step 9: the generation loop, prefill and then decode ==================================================
CHUNK = 2048 if mx.default_device() == mx.gpu else 256          # the most tokens in one pass


def prefill(ids, cache, start_pos=0):
    """Pass the ids through the model, which fills the cache; return the last token's logits, (1, 151936).

    A long text goes in chunks, since attention's scores, one per head for each pair of tokens, would take
    much memory. On a terminal tqdm shows a bar if this takes over a second. NumPy needs neither mx line.
    """
    for i in tqdm(range(0, len(ids), CHUNK), desc="prefill", delay=1, leave=False, disable=None):
        logits = forward(ids[i:i + CHUNK], cache, start_pos + i, last_only=True)
        mx.eval(logits)                                         # MLX computes only when it has to,
        mx.clear_cache()                                        # and keeps freed memory until it is told
    return logits


def next_tokens(ids, cache, start_pos=0, temperature=0.0, top_p=0.95):
    """Yield each token that the model adds to ids, until one ends the text.

    The prompt comes first, in prefill. Then comes decode: each pass takes one token, and finds the keys and
    values of all others in the cache. start_pos: how many tokens the cache holds before ids (in a chat).
    """
    logits = prefill(ids, cache, start_pos)
    pos = start_pos + len(ids)                                  # the place of the next token
    while True:
        check_finite(xp.isfinite(logits).all())                 # raises if a damaged weight has spoilt them
        token = int(sample(logits[-1], temperature, top_p))     # choose
        if token in EOS_IDS: return                             # stop
        yield token                                             # hand out
        logits = forward([token], cache, pos)                   # pass it through the model: the cache grows
        pos += 1


def generate(prompt, max_tokens=100, temperature=0.0, top_p=0.95):
    """The prompt and its continuation by up to max_tokens tokens, as one text, for use from Python; complete,
    near the end, prints the same as it comes. [None] * N_LAYERS is an empty cache. Errors are ValueErrors."""
    ids = check_prompt(encode(prompt), max_tokens)
    new = itertools.islice(next_tokens(ids, [None] * N_LAYERS, 0, temperature, top_p), max_tokens)
    return prompt + "".join(text_pieces(ids, new))


# ==== What is refused while a text is made ==================================================================
def refuse(wrong, message):
    """Raise a ValueError with that message if wrong is true. The program prints it as one line."""
    if wrong: raise ValueError(message)


def check_utf8(text):
    """Returns the text. Raises ValueError if its bytes were not UTF-8: Python reads these as surrogates."""
    refuse(re.search("[\ud800-\udfff]", text), "this is not UTF-8 text")
    return text


def check_prompt(ids, new):
    """Returns the ids. Raises ValueError if there are none, or with the new ones too many for the context."""
    refuse(not ids, "the prompt is empty")
    refuse(len(ids) + new > MAX_POSITIONS, f"{len(ids)} + {new} tokens exceed the context of {MAX_POSITIONS}")
    return ids


def check_finite(all_finite):
    """Raises ValueError if not all logits are finite numbers, and names a damaged weight if there is one."""
    if not all_finite:
        damaged = [name for name, w in W.items() for part in parts(w) if not xp.isfinite(part).all()]
        raise ValueError(f"the logits are not finite; neither is {(damaged or ['a step on the way'])[0]}")


# ==== The same, faster ======================================================================================
# Three sets of functions compute the same numbers, except for rounding; use_kernels puts one in place.
#     "explicit"  the steps as they stand, on MLX's arrays: for gradients, and for 16 bits on a CPU
#     "fused"     the steps on MLX's arrays, but for the functions that begin with fused_: for a GPU
#     "numpy"     the steps on NumPy's arrays, but for the two that begin with numpy_: for a CPU
# A kernel is a program that runs on the GPU. Each takes a while to start, so a few large ones, which MLX has
# ready, are faster than many small ones.
def fused_rms_norm(x, w):
    """rms_norm as one kernel."""
    return mx.fast.rms_norm(x, w, EPS)


def fused_apply_rope(q, k, positions):
    """apply_rope as two kernels, for consecutive positions. x[None]: MLX wants a batch axis in front."""
    options = {"traditional": False, "base": THETA, "scale": 1.0, "offset": positions[:1]}  # False: i, i + 64
    return tuple(mx.fast.rope(x[None], D_HEAD, **options).squeeze(0) for x in (q, k))


def fused_attend(q, k, v):
    """attend as one kernel, which never writes the scores to memory ("FlashAttention", Dao et al. 2022)."""
    options = {"scale": D_HEAD ** -0.5, "mask": "causal" if q.shape[1] > 1 else None}
    return mx.fast.scaled_dot_product_attention(q[None], k[None], v[None], **options).squeeze(0)


def fused_extend_cache(cache, layer_idx, k, v):
    """extend_cache with free rows: an entry is (keys, values, length), where the arrays have room for more.

    Concatenating copies all earlier rows for each token, writing into a free row copies one. But two texts
    may go on from copies of one cache, and neither may overwrite the other's rows. keys[:] is a new array on
    the same memory; when MLX writes into it, it copies what is still needed. NumPy does not: so there a free
    row begins with NaN ("not a number"); if the next does not, all are copied. mx.grad puts MLX arrays in W.
    """
    refuse(xp is np and not layer_idx and mx.array in map(type, W.values()), 'gradients need "explicit"')
    keys, values, length = cache[layer_idx] or (k[:, :0], v[:, :0], 0)
    total = length + k.shape[1]
    if total > keys.shape[1] or (xp is np and not np.isnan(keys[0, length, 0])):
        old_k, old_v, shape = keys[:, :length], values[:, :length], (N_KV, total + 256, D_HEAD)
        keys, values = xp.zeros(shape, dtype=k.dtype), xp.zeros(shape, dtype=k.dtype)
        keys[:, :length], values[:, :length], keys[0, length:, 0] = old_k, old_v, math.nan
    keys, values = keys[:], values[:]
    keys[:, length:total], values[:, length:total] = k, v
    cache[layer_idx] = (keys, values, total)
    return keys[:, :total], values[:, :total]


numpy_extend_cache = fused_extend_cache                         # xp makes it serve both sets


def fused_linear(x, name):
    """linear, also for a matrix that is packed to save memory. Its entry in W is then three arrays: w, where
    each 32-bit integer holds several small ones, and a scale and a bias for each group of these in a row.
    A number is scale * integer + bias."""
    w, *how = parts(W[name])                                    # how: nothing, or scales and biases
    return mx.quantized_matmul(x, w, *how, **packing(w, x.shape[-1], *how)) if how else x @ w.T


def fused_embed(token_ids):
    """embed, also for a packed matrix, of which only the rows that are asked for are unpacked."""
    w, *how = [part[mx.asarray(token_ids)] for part in parts(W["model.embed_tokens.weight"])]
    return mx.dequantize(w, *how, **packing(w, D_MODEL, *how)) if how else w


def parts(w):
    """The arrays of an entry of W, as a tuple: one, or three if it is packed."""
    return w if isinstance(w, tuple) else (w,)


def packing(w, width, scales, biases):
    """How a matrix is packed whose rows have width numbers: the bits of each, and how many share a scale."""
    return {"bits": 32 * w.shape[-1] // width, "group_size": width // scales.shape[-1]}


def fused_next_tokens(ids, cache, start_pos=0, temperature=0.0, top_p=0.95):
    """next_tokens, but each pass is queued before Python knows the token that it starts from: so the GPU does
    not wait for Python. When the text ends, one pass too many has been queued. What one call of async_eval
    queues is ready together: so the token has a call of its own, before the pass."""
    logits = prefill(ids, cache, start_pos)
    for pos in itertools.count(start_pos + len(ids)):
        token, finite = sample(logits.squeeze(0), temperature, top_p), mx.isfinite(logits).all()
        mx.async_eval(token, finite)
        next_logits = forward(token[None], cache, pos)
        mx.async_eval(next_logits)
        check_finite(finite)
        if int(token) in EOS_IDS: return
        yield int(token)
        logits = next_logits
        if pos % 256 == 0: mx.clear_cache()                     # as in prefill


def numpy_attend(q, k, v):
    """attend, one query head after another, so that all can write their scores into the same memory.

    In a long text there are more scores than numbers in q or the result: so q is scaled, and the result
    divided by the sums. Only the last n columns can belong to later tokens.
    """
    n, q = q.shape[1], q / np.float32(math.sqrt(D_HEAD))                        # (16, n, 128)
    mask = np.triu(np.full((n, n), -np.inf, dtype=np.float32), 1)               # -inf for later tokens
    scores = np.empty((n, k.shape[1]), dtype=np.float32)                        # (n, total)
    out = np.empty((N_HEADS, n, v.shape[2]), dtype=np.float32)                  # (16, n, 128)
    for head in range(N_HEADS):
        keys, values = k[head * N_KV // N_HEADS], v[head * N_KV // N_HEADS]     # (total, 128) each
        np.matmul(q[head], keys.T, out=scores)
        scores[:, -n:] += mask
        scores -= scores.max(axis=1, keepdims=True)                             # from here on it is softmax
        np.exp(scores, out=scores)
        out[head] = scores @ values / scores.sum(axis=1, keepdims=True)
    return out


KERNELS = {kind: {name.removeprefix(f"{kind}_"): function for name, function in globals().items()
                  if name.startswith(f"{kind}_")} for kind in ("explicit", "fused", "numpy")}
STEPS_OWN = {name: globals()[name] for name in KERNELS["fused"]}  # KERNELS["fused"]["attend"]: fused_attend


def use_kernels(wanted):
    """Compute with one of the sets from now on. NumPy has no bfloat16, and is slow with float16: for such a W
    "numpy" means the explicit set. Raises ValueError if there is no such set, or it can't compute with W."""
    global xp, kernels, wanted_kernels
    refuse(wanted not in KERNELS, f"there are no {wanted!r} kernels")
    refuse(wanted != "fused" and any(isinstance(w, tuple) for w in W.values()), "packed weights need fused")
    has_16_bits = any(part.dtype in (mx.bfloat16, mx.float16) for w in W.values() for part in parts(w))
    wanted_kernels, kernels = wanted, "explicit" if wanted == "numpy" and has_16_bits else wanted
    xp = np if kernels == "numpy" else mx
    np.seterr(all="ignore")                                     # as in MLX: e^89 in silu may be infinite
    arrays = {id(w): w if isinstance(w, tuple) else xp.asarray(w) for w in W.values()}
    W.update({name: arrays[id(w)] for name, w in W.items()})    # a tied head and the embedding stay one array
    globals().update(STEPS_OWN | KERNELS[kernels])


use_kernels("fused" if mx.default_device() == mx.gpu else "numpy")


# ==== Text as it appears ====================================================================================
def text_pieces(prompt_ids, new_ids):
    """Yield the text that each new token adds, "" while a character is not whole; at the end the rest.

    A token can be part of a character: an emoji has 4 bytes, and may come as 3 tokens. Decoded too early, it
    is U+FFFD, the sign for damaged text: what ends in it is held back. A token's text may depend on the one
    before it: so the last tokens handed out are decoded alone and with the new ones; the difference is new.
    """
    ids, begin, shown = list(prompt_ids), 0, len(prompt_ids)    # ids[:shown] is out, ids[begin:shown] last
    for token in new_ids:
        ids.append(token)
        piece = tok.decode(ids[begin:])[len(tok.decode(ids[begin:shown])):]
        if is_whole := (piece != "" and not piece.endswith("\ufffd")): begin, shown = shown, len(ids)
        yield piece if is_whole else ""
    yield tok.decode(ids[begin:])[len(tok.decode(ids[begin:shown])):]


# ==== A conversation in Qwen3's chat template, with --chat ==================================================
# "Hello" becomes <|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n, and the
# model goes on. With this empty thought it answers at once; with --think it has to write one of its own.
def ids_of(text, typed=False):
    """Token ids of a part of the template, or, if typed, of a text in which "<|im_end|>" means nothing."""
    tok.encode_special_tokens = typed                           # True: special tokens are spelled like others
    return tok.encode(text, add_special_tokens=False).ids


def turn_ids(role, text):
    """Token ids of one turn; role is "system", "user" or "assistant"."""
    return ids_of("<|im_start|>") + ids_of(f"{role}\n{text}", typed=True) + ids_of("<|im_end|>\n")


def typed_lines():
    """The lines of stdin, without the newline at their end. At a terminal readline helps to edit them."""
    with contextlib.suppress(ImportError): import readline      # which input then uses; not on Windows
    with contextlib.suppress(EOFError):
        while True: yield input("> " if sys.stdin.isatty() else "")


def chat(questions, system=None, think=False, max_tokens=1000, temperature=0.0, top_p=0.95):
    """Print an answer to each of the questions, as turns of one conversation. False if one was refused.

    Thoughts are not kept, as in Qwen3's own template: an answer is made with a copy of the cache, and only
    its text after the thought goes into the next question's pass. At a terminal Ctrl-C stops an answer.
    """
    refuse(tok.token_to_id("<|im_end|>") not in EOS_IDS, "--chat needs a model that ends turns in <|im_end|>")
    thought = "" if think or tok.token_to_id("<think>") is None else "<think>\n\n</think>\n\n"
    opening = ids_of(f"<|im_start|>assistant\n{thought}")
    ids = [] if system is None else turn_ids("system", system)  # the conversation so far
    cache, cached, all_well = [None] * N_LAYERS, 0, True        # cached: how many of the ids the cache holds
    for question in questions:
        try:
            refuse(not question.strip(), "the question is empty")
            turn = turn_ids("user", check_utf8(question))
            check_prompt(ids + turn + opening, max_tokens)
        except ValueError as error:
            print("llm_inference.py:", one_line(error), file=sys.stderr)
            all_well = False
            continue
        ids, longer, answer = ids + turn, list(cache), ""
        try:
            prefill(ids[cached:], longer, cached)
            cache, cached = longer, len(ids)
            new = next_tokens(opening, list(cache), cached, temperature, top_p)
            for piece in text_pieces(opening, itertools.islice(new, max_tokens)):
                answer += piece
                piece = piece.replace("<think>", DIM + "<think>").replace("</think>", "</think>" + PLAIN)
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            if isinstance(questions, list) or not sys.stdin.isatty(): raise     # no question can follow
        finally:
            print(PLAIN)
        ids = ids + turn_ids("assistant", re.sub(r"(?s)^.*</think>\n*", "", answer))
    return all_well


# ==== Looking inside: every call of one decode pass, with --trace ===========================================
WATCHED = ("embed", "rms_norm", "apply_rope", "extend_cache", "attend", "attention", "silu", "ffn",
           "transformer_block", "linear", "forward", "sample")


def watch(run):
    """Call run(); return the calls of functions in WATCHED, as they began: [path, arguments, result] each.
    path: the functions that were running, its own last, such as ("forward", "transformer_block", "ffn")."""
    calls, running, functions = [], [], {name: globals()[name] for name in WATCHED}

    def watched(name, *args, **options):
        running.append(name)
        call = [tuple(running), args]
        calls.append(call)
        call.append(functions[name](*args, **options))
        running.pop()
        return call[-1]

    with mock.patch.dict(globals(), {name: functools.partial(watched, name) for name in WATCHED}): run()
    return calls                                                # patch.dict has put the old functions back


def shapes_of(values):
    """The shapes of an array, or of the arrays in a tuple, as text."""
    return " ".join(str(value.shape) for value in parts(values) if hasattr(value, "shape"))


def trace(prompt):
    """Print each call in one decode pass: the weight or layer, shapes in, shapes out, and their type."""
    ids, cache = check_prompt(encode(prompt), 2), [None] * N_LAYERS
    names, token = {id(w): name for name, w in W.items()}, int(sample(prefill(ids, cache)[-1]))
    for path, args, result in watch(lambda: sample(forward(xp.asarray([token]), cache, len(ids))[-1])):
        labels = [names.get(id(a), a) for a in args if id(a) in names or isinstance(a, str)]
        labels += [f"layer {a}" for a in args if isinstance(a, int) and path[-1] != "forward"]
        dtype = str(parts(result)[0].dtype).removeprefix("mlx.core.")
        call = "  " * (len(path) - 1) + " ".join([path[-1], *labels])
        print(f"{call}: {shapes_of(args)} -> {shapes_of(result)} {dtype}", flush=True)


# ==== Looking inside: the nine steps on your own prompt, with --explain =====================================
# What a call costs: multiply-adds in products of matrices (the others are few), and bytes that it reads
COSTS = {"embed": lambda token_ids, x: (0, x.nbytes), "rms_norm": lambda x, w, normed: (0, w.nbytes),
         "linear": lambda x, name, out: (len(x) * W[name].size, W[name].nbytes),
         "attend": lambda q, k, v, out: (2 * q.size * k.shape[1], k.nbytes + v.nbytes)}
PLAIN, BOLD, DIM = ("\033[0m", "\033[1m", "\033[2m") if sys.stdout.isatty() else ("", "", "")
STEPS = ("2 embed", "3 rms_norm", "4 apply_rope", "5 attention", "6 ffn", "7 transformer_block", "8 linear",
         "8 forward", "8 sample", "5 attend")                  # the last serves only for the cache's share


def spell(token_id):
    """A token in quotes, so that a space before it shows; its name, if it is no whole character."""
    text = tok.decode([token_id], skip_special_tokens=False)
    return repr(tok.id_to_token(token_id) if "\ufffd" in text else text)[:20]


def bar(share, width=16):
    """A bar for a share between 0 and 1, and the share in digits."""
    return f"{'#' * round(width * share):{width}} {share:.4f}"


def show(title, look, *lines):
    """Print a title, bold on a terminal, what to look for, and the lines: text, or a heading and its rows."""
    print(f"\n{BOLD}{title}{PLAIN}", look, *lines, sep="\n", flush=True)


def show_costs(seen, calls, n, speed):
    """Print what the token after n others costs, in all and step by step, from the calls of its pass. A step
    has the costs of all calls on whose path it is. seen: the prompt's pass, by function. speed: tokens/s."""
    costs = [(path, COSTS[path[-1]](*args, result)) for path, args, result in calls if path[-1] in COSTS]
    steps = {step: [sum(c[i] for path, c in costs if step[2:] in path) for i in (0, 1)] for step in STEPS}
    (adds, read), (cache_adds, cache_read) = steps["8 forward"], steps.pop("5 attend")
    steps["8 linear"] = costs[-1][1]                            # that of the output matrix, the last call
    show("Steps 2 to 8: the shapes of the prompt's pass; each step's share of the work for the next token",
         "Look at which matrices cost most; the arithmetic of norm and RoPE is little, and not counted.",
         f"{'step':19} {'shapes in':29} {'shapes out':28} {'mul-adds':>8} {'bytes':>8}",
         *[f"{step:19} {shapes_of(args[:2]):29} {shapes_of(result):28} {a / adds:8.2%} {b / read:8.2%}"
           for step, (a, b) in steps.items() for _, args, result in seen[step[2:]][-1:]])
    stored, kv_bytes = {id(w): w for w in W.values()}.values(), cache_read // (n + 1)   # a tied head: once
    show("What the next token costs", "Look at the last line: in a large model, memory sets the pace.",
         f"{sum(w.size for w in stored):,} parameters, {sum(w.nbytes for w in stored):,} bytes of weights",
         f"{kv_bytes:,} bytes of KV cache a token; {kv_bytes * N_HEADS // N_KV:,} if no heads shared theirs",
         f"{adds - cache_adds:,} multiply-adds with weights, {cache_adds:,} with the cache",
         f"{read:,} bytes read: {speed:.1f} tokens/s ask for {read * speed / 1e9:.2f} GB/s")


def show_rope(q, k, n):
    """Print how far RoPE turns, and a query (of q) times a key (of k), the key put at each position."""
    half, far = D_HEAD // 2, n + 101
    turn = [math.degrees(THETA ** (-pair / half)) for pair in (0, half // 2, half - 1)]
    q, k = (xp.repeat(xp.asarray(x[:1, -1:], dtype=xp.float32), far, axis=1) for x in (q, k))
    q, k = apply_rope(q, k, xp.arange(far))                     # (1, far, 128) each
    by_1, by_4 = (xp.sum(q[0, apart:] * k[0, :-apart], axis=-1).tolist() for apart in (1, 4))
    show("Step 4: how far RoPE turns, in degrees, and a query times a key that stand 1 and 4 tokens apart",
         "Look at the last two columns: the position changes nothing, only the distance does.",
         "position   first pair  middle pair    last pair   1 apart   4 apart",
         *["%8d %12.6g %12.6g %12.6g %9.3f %9.3f" % (i, *[i * t for t in turn], by_1[i], by_4[i])
           for i in [*range(n), n + 96]])                       # and a place far away


def show_layers(ids, seen):
    """Print for each layer where the last token looks, and the answer if no layer followed ("logit lens")."""
    n, shades = len(ids), " .:-=+*#%@"
    columns, width = sorted({*range(n)[:4], *range(n)[-20:]}), 2 if n <= 12 else 1      # all, if n <= 24
    x = rms_norm(xp.concatenate([x[-1:] for _, _, x in seen["transformer_block"]]), W["model.norm.weight"])
    lens = softmax(xp.asarray(linear(x, "lm_head.weight"), dtype=xp.float32))           # (28, 151936)
    rows = [" " * 9 + "|".ljust(width) * column + spell(ids[i]) for column, i in enumerate(columns)]
    for layer, (_, (q, k, _), _) in enumerate(seen["attend"]):
        # If the values are the rows of the identity matrix, their weighted means are the shares: (16, n)
        shares = attend(q[:, -1:], k, xp.stack([xp.eye(n, dtype=q.dtype)] * N_KV))[:, 0]
        largest, head = xp.max(shares, axis=0).tolist(), int(xp.argmax(xp.max(shares, axis=-1)))
        strip = "".join(shades[round(9 * largest[i])] * width for i in columns)
        best = int(xp.argmax(lens[layer]))
        rows.append(f"layer {layer:2} {strip} {head:5}  {bar(lens[layer, best].item(), 12)} {spell(best)}")
    show("Steps 5 and 7: in each layer, where the last token looks, and the answer if the model ended there",
         "Look at dark cells: a head takes much there; head is which takes most. Idle ones see the first.",
         f"{'':9}{'looks at' if n <= 24 else 'first 4 and last 20':{width * len(columns)}} "
         f"{'head':>5}  {'probability of':19} next token", *rows)


def explain(prompt):
    """Print what happens to a prompt, step by step. Raises ValueError as check_prompt does, or if the prompt
    has over 256 tokens (prefill may cut it), or if weights are packed (COSTS can't count them)."""
    ids, cache = check_prompt(encode(prompt), 8), [None] * N_LAYERS
    n, packed = len(ids), any(isinstance(w, tuple) for w in W.values())
    refuse(n > 256 or packed, f"--explain needs unpacked weights and up to 256 tokens: here are {n}")
    calls = watch(lambda: sample(prefill(xp.asarray(ids), cache)[-1]))
    seen = {name: [call for call in calls if call[0][-1] == name] for name in WATCHED}
    logits, passes = [seen["sample"][0][1][0]], []              # the first argument of sample's only call
    check_finite(xp.isfinite(logits[0]).all())
    longer, start = [*ids, int(sample(logits[0]))], time.perf_counter()
    for pos in range(n, n + 8):
        passes.append(watch(lambda: logits.append(forward(longer[-1:], cache, pos)[-1])))
        longer.append(int(sample(logits[-1])))
    speed = 8 / (time.perf_counter() - start)
    show("Step 1: the prompt's tokens", "Look at the spaces: they belong to the word that follows.",
         "position       id  text or name", *[f"{i:8} {t:8}  {spell(t)}" for i, t in enumerate(ids)])
    show_costs(seen, passes[0], n, speed)
    show_rope(*seen["apply_rope"][-1][1][:2], n)
    show_layers(ids, seen)
    probs, kept = nucleus(logits[0], 1, 1), nucleus(logits[0], 0.7, 0.95)
    show(f"Step 8: the likeliest next tokens; at temperature 0.7, top-p 0.95 keeps {int(xp.sum(kept > 0))}",
         "Look at how temperature and top-p sharpen the choice.",
         f"{'id':>8} {'probability':23} {'at 0.7 and 0.95':23} token",
         *[f"{i:8} {bar(probs[i].item())} {bar(kept[i].item())} {spell(i)}"
           for i in xp.argsort(-probs)[:5].tolist()])
    recomputed = forward(longer[:n + 7], [None] * N_LAYERS, 0)[n - 1:]          # at once, with nothing cached
    show("Step 9: the next 8 tokens, decoded from the cache and recomputed without one",
         "Look at both ids: they should be the same, and the logits differ by rounding only.",
         "  cached  recomputed  largest difference of the logits",
         *[f"{token:8} {int(xp.argmax(new)):11} {xp.max(xp.abs(old - new)).item():11.2e}  {spell(token)}"
           for token, old, new in zip(longer[n:], logits, recomputed)])


# ==== Loading a checkpoint: what it must hold, and what is refused ==========================================
FLOATS = (mx.bfloat16, mx.float16, mx.float32)                  # the types that weights may have
CONSTANTS = {"N_LAYERS": "num_hidden_layers", "D_MODEL": "hidden_size", "D_FF": "intermediate_size",
             "N_HEADS": "num_attention_heads", "N_KV": "num_key_value_heads", "D_HEAD": "head_dim",
             "VOCAB": "vocab_size", "MAX_POSITIONS": "max_position_embeddings", "EPS": "rms_norm_eps",
             "THETA": "rope_theta"}                             # those at the top, and two more
# Fields that may ask for other steps than these nine, each with the values that do not
SUPPORTED = dict.fromkeys(("attention_bias", "mlp_bias", "use_sliding_window", "num_experts",
                           "num_local_experts", "rope_interleaved", "rope_traditional"), [False])   # or 0
SUPPORTED |= {"model_type": ["qwen3", "llama"], "hidden_act": ["silu"], "layer_types": ["full_attention"],
              "is_causal": [True], "partial_rotary_factor": [1], "tie_word_embeddings": [True, False],
              "rope_type": ["default", "linear"], "type": ["default", "linear"], "factor": [1],
              "full_attention": [None], "quant_method": [None], "mode": ["affine"]}  # None: absent


def load_model(folder, dtype=None, quantize=None):
    """Fill W, tok and the constants from a folder in Hugging Face form, such as Qwen3-0.6B/.

    To load is to check that config.json and the weights ask for these nine steps and no others, and to bring
    the weights into the type that is computed in. dtype: that type; None: as stored on a GPU, float32 on a
    CPU, where bfloat16 products are slow. quantize: the bits to which matrices are rounded, or None. On a GPU
    the fused set keeps them packed, which saves memory; otherwise they are unpacked again.
    Raises OSError if a file can't be read, and ValueError, which names the field or tensor, if these steps
    would not compute the checkpoint exactly. Then the model that was loaded before is still in place.
    """
    folder, on_gpu = Path(folder), mx.default_device() == mx.gpu and wanted_kernels != "numpy"
    config, constants = read_config(folder)
    constants["tok"] = read_tokenizer(folder / "tokenizer.json", constants["VOCAB"])
    stored, weights = {}, {}
    for path in model_files(folder)[2:]:                        # those of the weights
        with naming(path):
            for name, w in mx.load(str(path), format="safetensors").items():    # lazy: it reads a header
                refuse(name in stored, f"{name} is in another file, too")
                stored[name] = w
    dtype = dtype or (None if on_gpu else mx.float32)           # None: as stored
    tied = config.get("tie_word_embeddings", "lm_head.weight" not in stored)    # is the head the embedding?
    for name in [name for name in stored if tied and name.startswith("lm_head.")]:      # but stored, too
        embedding = stored.get(name.replace("lm_head", "model.embed_tokens"), mx.array(0))
        refuse(not mx.array_equal(stored.pop(name), embedding), f"{folder}: {name} is not tied: it differs")
    for name, shape in expected_tensors(constants, config["model_type"] == "qwen3", own_head=not tied):
        with naming(f"{folder}: {name}"):
            weights[name] = take(stored, name, shape, dtype, quantize, on_gpu and wanted_kernels == "fused")
    for name in stored: refuse(not name.endswith("rotary_emb.inv_freq"), f"{folder}: {name}: no step uses it")
    for w in weights.values(): mx.eval(w)                       # now they are read, one after another
    W.clear()
    W.update({"lm_head.weight": weights["model.embed_tokens.weight"]} | weights)        # the same, if tied
    globals().update(constants)
    use_kernels(wanted_kernels)                                 # which of them can run depends on W's type


@contextlib.contextmanager
def naming(thing):
    """Put a file's or tensor's name before what an error in the block says. An OSError already has it."""
    try:
        yield
    except Exception as error:                                  # tokenizers raises no narrower class
        raise error if isinstance(error, OSError) else ValueError(one_line(f"{thing}: {error}")) from None


def read_json(path):
    """The JSON object in a file, as a dict, without fields that are null. ValueError names the file."""
    with naming(path):
        found = json.loads(path.read_bytes(), object_hook=lambda o: {k: o[k] for k in o if o[k] is not None})
        refuse(not isinstance(found, dict), "it is not a JSON object")
    return found


def read_generation_config(folder):
    """The end tokens, and what a model's authors advise for sampling: {} without the file."""
    path = folder / "generation_config.json"
    return read_json(path) if path.exists() else {}


def read_config(folder):
    """config.json as a dict, and {name: value} of the constants. ValueError names a field."""
    config = {"model_type": "missing", "rope_theta": 10000} | read_json(folder / "config.json")
    c, advice = {}, read_generation_config(folder)
    with naming(folder / "config.json"):
        rope = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
        for field in (rope, "quantization_config"):
            refuse(not isinstance(config.get(field, {}), dict), f"{field} is {json.dumps(config.get(field))}")
            config |= config.get(field, {})                     # so their fields are checked with the others
        for field, supported in SUPPORTED.items():
            value = config.get(field, supported[0])
            values = value if field == "layer_types" and isinstance(value, list) else [value]
            refuse(any(v not in supported for v in values), f"{field} is {json.dumps(value)}: not supported")
        config.setdefault("num_key_value_heads", config.get("num_attention_heads"))
        qwen3 = config["model_type"] == "qwen3"
        for name, field in CONSTANTS.items():
            if name == "D_HEAD": config.setdefault(field, 128 if qwen3 else c["D_MODEL"] // c["N_HEADS"])
            value, kind = config.get(field), float if name in ("EPS", "THETA") else int
            refuse(type(value) not in (int, kind) or not 0 < value < 2**53,
                   f"{field} is {json.dumps(value)}, not a positive {kind.__name__}")
            c[name] = value                                     # in this order: D_HEAD may need others
        refuse(c["N_HEADS"] % c["N_KV"], "num_attention_heads is no multiple of num_key_value_heads")
        refuse(c["D_HEAD"] % 2, f"head_dim {c['D_HEAD']} is odd")
        ends = [source.get("eos_token_id", []) for source in (config, advice)]
        ends = [i for end in ends for i in (end if isinstance(end, list) else [end])]
        refuse(any(type(i) is not int for i in ends), f"eos_token_id is {json.dumps(ends)}, not token ids")
    return config, c | {"EOS_IDS": set(ends)}


def read_tokenizer(path, rows):
    """A tokenizers.Tokenizer from tokenizer.json. ValueError if it is none, or has more tokens than rows."""
    with naming(path):
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.no_truncation()                               # what a file may set for training
        tokenizer.no_padding()
        if hasattr(tokenizer.model, "dropout"): tokenizer.model.dropout = None  # else merges vary
        largest = max([0, *tokenizer.get_vocab().values(), *tokenizer.encode("").ids])
        refuse(largest >= rows, f"it has the id {largest}, but the embedding only {rows} rows (vocab_size)")
    return tokenizer


def model_files(folder):
    """The paths of config.json, tokenizer.json, and model.safetensors or the shards in its index."""
    names, index = ["model.safetensors"], folder / "model.safetensors.index.json"
    if index.exists() and not (folder / names[0]).exists():
        with naming(index): names = sorted({*map(str, json.loads(index.read_bytes())["weight_map"].values())})
    return [folder / name for name in ["config.json", "tokenizer.json", *names]]


def expected_tensors(c, qk_norm, own_head):
    """Yield (name, shape) of each tensor of a checkpoint with the constants c. own_head: it is not tied."""
    d, ff, q, kv = c["D_MODEL"], c["D_FF"], c["N_HEADS"] * c["D_HEAD"], c["N_KV"] * c["D_HEAD"]
    block = {"input_layernorm": (d,), "post_attention_layernorm": (d,), "self_attn.q_proj": (q, d),
             "self_attn.k_proj": (kv, d), "self_attn.v_proj": (kv, d), "self_attn.o_proj": (d, q),
             "mlp.gate_proj": (ff, d), "mlp.up_proj": (ff, d), "mlp.down_proj": (d, ff)}
    block |= {f"self_attn.{x}_norm": (c["D_HEAD"],) for x in "qk" if qk_norm}
    yield "model.embed_tokens.weight", (c["VOCAB"], d)
    for layer_idx in range(c["N_LAYERS"]):
        yield from ((f"model.layers.{layer_idx}.{name}.weight", shape) for name, shape in block.items())
    yield "model.norm.weight", (d,)
    if own_head: yield "lm_head.weight", (c["VOCAB"], d)


def take(stored, name, shape, dtype, bits, stay_packed):
    """Take a tensor out of stored, as an entry of W. ValueError if it is not as expected.
    bits: round a matrix to so many, or None. stay_packed: whether packed matrices are left packed."""
    w, scales, biases = (stored.pop(name[:-6] + part, None) for part in ("weight", "scales", "biases"))
    refuse(w is None, f"it is missing; left over is {min(stored, default='nothing')}")
    packed = scales is not None or biases is not None
    if not packed:
        refuse(not {w.dtype, dtype or w.dtype} <= {*FLOATS}, f"its type {w.dtype}, or {dtype}, is unknown")
        refuse(w.shape != shape, f"its shape is {w.shape}, config.json asks for {shape}")
        if bits is None or w.ndim == 1: return w.astype(dtype or w.dtype)
        w, scales, biases = mx.quantize(w, group_size=64, bits=bits)
    affine = all(x is not None and x.dtype in FLOATS and x.shape == scales.shape for x in (scales, biases))
    refuse(not affine or packed and bits, "it is packed already" if affine else "not in MLX's affine form")
    options, dtype = packing(w, shape[-1], scales, biases), dtype or scales.dtype       # here w is packed
    unpacked = mx.dequantize(w, scales.astype(mx.float32), biases.astype(mx.float32), **options)
    refuse(unpacked.shape != shape, f"unpacked, its shape is {unpacked.shape}, config.json asks for {shape}")
    return (w, scales.astype(dtype), biases.astype(dtype)) if stay_packed else unpacked.astype(dtype)


# ==== The command line: find a model, run it, say how fast it was ===========================================
REPO, REVISION = "Qwen/Qwen3-0.6B", "c1899de289a04d12100db370d81485cdf75e47ca"
FILES = {"generation_config.json": None,                        # each with its SHA-256, where it is known
         "config.json": "660db3b73d788119c04535e48cf9be5f55bc3100841a718637ae695b442f27dd",
         "tokenizer.json": "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4",
         "model.safetensors": "f47f71177f32bcd101b7573ec9171e6a57f4f4d31148d38e382306f42996874b"}


def find_model(wanted=None):
    """The folder of a model; wanted: a folder, OWNER/NAME on the Hub, or None: Qwen3-0.6B. Or ValueError.
    Qwen3-0.6B is sought in its own folder, the Hub's cache and the Hub; else tests/tiny-qwen3 serves."""
    folder = Path(wanted) if wanted else Path(__file__).resolve().parent / "Qwen3-0.6B"
    if all(path.exists() for path in ([folder] if wanted else model_files(folder))): return folder
    refuse(wanted and not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", wanted),
           f"{wanted} is no folder, and no OWNER/NAME of a model on the Hugging Face Hub")
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache      # this is slow
    repo, revision, place = (wanted, None, None) if wanted else (REPO, REVISION, folder)
    with contextlib.suppress(Exception):                        # there may be no copy, or no cache
        copy = Path(try_to_load_from_cache(repo, "config.json", revision=revision)).parent
        if all(path.exists() for path in model_files(copy)): return copy
    try:
        info, token = ask_hub(repo, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception as error:                                  # offline, no such host, a proxy refuses, ...
        refuse(wanted, f"{repo} can't be fetched: {error}")
        print(f"The Hugging Face Hub can't be reached ({one_line(error)}): tests/tiny-qwen3 runs instead.\n"
              f"To get Qwen3-0.6B by hand, put {', '.join(FILES)} of {REPO} into {folder}", file=sys.stderr)
        return folder.parent / "tests/tiny-qwen3"
    for name in sorted({"config.json", *(file.rfilename for file in info.siblings)}):
        if name in FILES or re.fullmatch(r"model.*\.safetensors(\.index\.json)?", name):
            path = Path(hf_hub_download(repo, name, revision=revision, local_dir=place, token=token))
            if place and FILES.get(name) not in (None, hashlib.sha256(path.read_bytes()).hexdigest()):
                path.unlink()                                   # the library itself checks sizes only
                raise ValueError(f"{name} came with a wrong SHA-256, and is thrown away")
    return path.parent


def ask_hub(repo, **options):
    """What the Hub says of a model, and for which token: none (False), or if need be the user's (None)."""
    from huggingface_hub import HfApi
    try:
        info = HfApi().model_info(repo, **options, token=False)                 # the Hub refuses a stale one
        return info, None if info.gated else False
    except OSError as error:                                    # those of HTTP have a response
        if getattr(getattr(error, "response", None), "status_code", 0) not in (401, 403): raise
        return HfApi().model_info(repo, **options, token=None), None


def one_line(text):
    """A text or an error as one line of at most 300 characters, without control characters."""
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in " ".join(str(text).split()))
    return (line if len(line) <= 300 else f"{line[:147]}...{line[-150:]}") or type(text).__name__


def parse_arguments():
    """The command line's options. If one is wrong, argparse ends the program with status 2."""
    parser = argparse.ArgumentParser("llm_inference.py", description="Continue a text with a Qwen3 or Llama.")
    add, mode = parser.add_argument, parser.add_mutually_exclusive_group().add_argument
    add("prompt", nargs="?", metavar="PROMPT", help='"-" reads stdin (default: "The capital of France is")')
    add("--model", help="a folder, or OWNER/NAME on the Hugging Face Hub (default: Qwen3-0.6B)")
    add("--max-tokens", type=int, metavar="N", help="add up to N tokens (default: 100; context/4 in a chat)")
    add("--temperature", type=float, metavar="T", help="0: the likeliest token (default, but not in chats)")
    add("--top-p", type=float, metavar="P", help="draw from the fewest tokens with P in all (default: 0.95)")
    add("--seed", type=int, metavar="S", help="a number that repeats the same draws")
    add("--quantize", type=int, choices=(4, 8), help="round the weights to so many bits")
    add("--kernels", choices=KERNELS, help="the functions that compute: fused is for a GPU, numpy for a CPU")
    mode("--chat", action="store_true", help="answer the prompt, or questions typed one after another")
    add("--system", metavar="TEXT", help="what the model is told before a chat")
    add("--think", action="store_true", help="let the model think before it answers in a chat")
    mode("--explain", action="store_true", help="show what happens to the prompt in each of the nine steps")
    mode("--trace", action="store_true", help="show each call of the functions in one decode pass")
    args = parser.parse_args()
    for message, well in {
            "--max-tokens must be at least 1": args.max_tokens is None or args.max_tokens > 0,
            "--temperature must be at least 0, and finite": 0 <= (args.temperature or 0) < math.inf,
            "--top-p must be above 0 and up to 1": args.top_p is None or 0 < args.top_p <= 1,
            "--system and --think need --chat": args.chat or args.system is None and not args.think}.items():
        if not well: parser.error(message)
    return args


def complete(folder, prompt, max_tokens, temperature, top_p):
    """Print the prompt with its continuation, each token as it is made, and how long that took."""
    ids = check_prompt(encode(prompt), max_tokens)
    in_cache = re.search(r"/models--[^/]+?--([^/]+)/snapshots/[^/]+$", folder.resolve().as_posix())
    replaced, name = ", ".join(KERNELS[kernels]), in_cache[1] if in_cache else folder.resolve().name
    print(f"Model:  {one_line(name)}  ({N_LAYERS} layers, {D_MODEL} dim, {N_HEADS} Q heads, {N_KV} KV heads, "
          f"{kernels}{': faster ' if replaced else ''}{' and '.join(replaced.rsplit(', ', 1))})")
    print(f"Prompt: {prompt}\n{'-' * 60}", flush=True)
    new = itertools.islice(next_tokens(ids, [None] * N_LAYERS, 0, temperature, top_p), max_tokens)
    times = [time.perf_counter()]                               # of the start, each token, and the end
    for piece in text_pieces(ids, new):
        print(piece if times[1:] else f"Output: {prompt}{piece}", end="", flush=True)
        times.append(time.perf_counter())
    m, n, prefilled, decoded = len(ids), max(0, len(times) - 3), times[1] - times[0], times[-1] - times[1]
    print(f"\nTime:   {prefilled + decoded:.2f}s  (prefill {m} tokens: {m / prefilled:.0f} tokens/s, "
          f"decode {n} tokens: {n / decoded if n else 0:.0f} tokens/s)", flush=True)


def main():
    """Run the program. Errors are exceptions, which are printed in one line at the end of the file."""
    args = parse_arguments()
    sys.stdout.reconfigure(encoding=None if sys.stdout.isatty() else "utf-8", errors="replace")
    sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")           # check_utf8 refuses bad bytes
    prompt = "The capital of France is" if args.prompt is None else args.prompt
    if prompt == "-": prompt = sys.stdin.read().removesuffix("\n")
    check_utf8(f"{prompt}{args.system}")
    random.seed(args.seed)
    use_kernels(args.kernels or kernels)
    load_model(folder := find_model(args.model), quantize=args.quantize)
    if args.explain or args.trace: return explain(prompt) if args.explain else trace(prompt)
    advice = {"temperature": 1.0, "top_p": 1.0} | read_generation_config(folder)        # 1.0: if not there
    advice = advice if args.chat and advice.get("do_sample") is True else {"temperature": 0.0, "top_p": 0.95}
    temperature = advice["temperature"] if args.temperature is None else args.temperature
    if temperature == 0 and (args.seed is not None or args.top_p is not None):
        print("--seed and --top-p have no effect at temperature 0", file=sys.stderr)
    top_p, most = args.top_p or advice["top_p"], args.max_tokens or (MAX_POSITIONS // 4 if args.chat else 100)
    with naming(f"generation_config.json: temperature {temperature!r}, top_p {top_p!r}"):
        refuse(not 0 <= temperature < math.inf or not 0 < top_p <= 1, "these are out of range")
    if not args.chat: return complete(folder, prompt, most, temperature, top_p)
    lines = typed_lines() if args.prompt is None else [prompt]
    well = chat(lines, args.system, args.think, most, temperature, top_p)
    sys.exit(0 if well or args.prompt is None and sys.stdin.isatty() else 1)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt: sys.exit(130)
    except Exception as error:
        if type(error) is not BrokenPipeError: print(f"llm_inference.py: {one_line(error)}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)            # so Python's last flush can't fail
        sys.exit(1)
