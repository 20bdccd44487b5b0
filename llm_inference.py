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

First comes the model, in nine steps, each formula as it is written on paper. Then follow faster versions of
the same functions, text that appears while it is made, a chat, two ways to look inside, how the model's files
are loaded and which are refused, and the command line. Python looks a function up when it is called, so a
step may use one that stands further below.

By default the program computes with the faster versions. Whoever changes a line in a step, and wants to see
what becomes of the text, adds --kernels explicit: this computes with the functions of the steps.

Shapes are written (rows, columns), and (16, n, 128) is 16 such matrices; n is the number of tokens in a pass:
first those of the prompt, then one at a time. The numbers in comments are Qwen3-0.6B's. Arrays are MLX's,
used like NumPy's, but lazy: an expression only notes what to compute; work is done when a value is needed.
"""
import argparse
import contextlib
import hashlib
import importlib.util
import json
import math
import os
import re
import shutil
import sys
import time
from pathlib import Path

# If one of these is missing: pip install "mlx[cpu]" tokenizers numpy (tokenizers brings tqdm)
import mlx.core as mx
from tokenizers import Tokenizer
from tqdm import tqdm

if importlib.util.find_spec("numpy"):   # optional: on a CPU it multiplies faster than MLX
    import numpy as np

# ==== The model: weights, a tokenizer and some numbers. load_model, near the end, reads them from files =====
W: dict[str, mx.array] = {}     # every weight under its Hugging Face name
tok: Tokenizer                  # turns text into token ids and back
EOS_IDS = {151645, 151643}      # the tokens that end a text: <|im_end|> and <|endoftext|>
N_LAYERS = 28                   # transformer blocks, which are also called layers
D_MODEL = 1024                  # numbers in the vector of one token
D_FF = 3072                     # numbers inside the feed-forward network (Step 6)
N_HEADS = 16                    # attention asks 16 questions side by side (Step 5): query heads
N_KV = 8                        # key/value heads: each answers two query heads
D_HEAD = 128                    # numbers in a head's vectors
VOCAB = 151936                  # rows of the embedding: one per token, and some to spare
MAX_POSITIONS = 40960           # the longest text, in tokens
EPS = 1e-6                      # keeps RMSNorm (Step 3) from dividing by zero
THETA = 1000000                 # the base of RoPE's angles (Step 4)

# W holds model.embed_tokens.weight (151936, 1024), model.norm.weight (1024,), lm_head.weight (151936, 1024),
# which in Qwen3-0.6B is the embedding again, and for each block, "model.layers.0." to "model.layers.27.", the
# tensors below. Matrices are stored as (out, in); 2048 is 16 heads x 128, and k and v have 8 x 128 = 1024.
#     input_layernorm.weight   (1024,)         post_attention_layernorm.weight (1024,)       Step 3
#     self_attn.q_proj.weight  (2048, 1024)    self_attn.q_norm.weight         (128,)        Step 5
#     self_attn.k_proj.weight  (1024, 1024)    self_attn.k_norm.weight         (128,)
#     self_attn.v_proj.weight  (1024, 1024)    self_attn.o_proj.weight         (1024, 2048)
#     mlp.gate_proj.weight     (3072, 1024)    mlp.up_proj.weight              (3072, 1024)  Step 6
#     mlp.down_proj.weight     (1024, 3072)


# ==== Step 1: tokenization turns text into integers =========================================================
def encode(prompt):
    """A text's token ids: "The| capital| of| France| is" becomes [785, 6722, 315, 9625, 374].

    A model computes with numbers, so text is cut into tokens, each with a number. Byte pair encoding starts
    with a word's bytes, and joins neighbours into longer pieces. The list of pairs to join was made with the
    tokenizer: join the most frequent pair everywhere in many texts, count again, join again, and so on. So a
    frequent word is one token, often with the space before it; a rare word, or a rare character, is several.
    """
    return tok.encode(prompt).ids


# ==== Step 2: embedding turns integers into vectors =========================================================
def embed(token_ids):
    """The row of the embedding matrix for each of n token ids: (n,) -> (n, 1024).

    An id says nothing about a token; the 1024 numbers, learned in training, say what it has in common with
    others: tokens that are used alike have rows that point in similar directions.
    """
    return W["model.embed_tokens.weight"][mx.array(token_ids)]


# ==== Step 3: RMSNorm scales every vector to a root mean square of 1, then weighs its dimensions ============
def rms_norm(x, w):
    """x / sqrt(mean(x^2) + EPS) * w, over the last axis: x (..., d), w (d,). Zhang and Sennrich 2019.

    Each of the 28 blocks adds to x, so x's numbers grow from block to block. What a block reads is therefore
    a normed copy, which has the same scale in all of them; w, learned, says how much each dimension counts.
    """
    x32 = x.astype(mx.float32)                                  # if x has 16 bits, squares lose digits
    normed = x32 * mx.rsqrt(mx.mean(x32 * x32, axis=-1, keepdims=True) + EPS)   # rsqrt(a) is 1 / sqrt(a)
    return normed.astype(x.dtype) * w                           # back in x's type first, as Hugging Face does


# ==== Step 4: RoPE puts a token's position into its queries and keys ========================================
# In attention (Step 5), the only step in which tokens exchange anything, three kinds of vectors are computed
# from each token's x. A query is what the token looks for, a key is what it can be found by, and a value is
# what it hands over. The larger the dot product of its query with any token's key, the more it takes of that
# token's value. One vector could not be all three: what a token looks for is not what it has to offer. A
# token has 16 queries of 128 numbers, so it looks for 16 things at once, each with a head of its own. Two
# heads share a key and a value (Step 5), so it has 8 of each.
#
# A dot product does not show which of two tokens comes first, nor how far apart they are, but it should: "dog
# bites man" is not "man bites dog". So RoPE turns queries and keys, two dimensions at a time, by angles that
# grow with the position.
def apply_rope(q, k, positions):
    """Turn every query and key by its position's angles. Su et al. 2021, "RoFormer".

    q (16, n, 128), k (8, n, 128), positions n integers; the same shapes come back. Dimensions i and i + 64
    (i < 64) of a vector are taken as a point (x1, x2) in a plane. For the token at position p it is turned
    about the origin by the angle p * THETA^(-i/64), in radians. Pair i = 0 turns by 1 radian per token, so it
    is nearly back after 6 tokens and can only tell close neighbours apart; pair 32 turns by 0.001, and serves
    for distant ones. Turning two points by the same angle leaves their dot product as it is. So if a query
    is turned by a and a key by b, turning both back by b changes nothing: only a - b, their distance, counts.
    """
    half = D_HEAD // 2
    freqs = THETA ** (-mx.arange(half, dtype=mx.float32) / half)                # (64,) radians per token
    angles = mx.array(positions, dtype=mx.float32)[:, None] * freqs             # (n, 64)
    cos, sin = mx.cos(angles), mx.sin(angles)                                   # (n, 64), for all heads

    def rotate(x):
        x1, x2 = x[..., :half], x[..., half:]                                   # each (heads, n, 64)
        turned = mx.concatenate([x1 * cos - x2 * sin, x1 * sin + x2 * cos], axis=-1)
        return turned.astype(x.dtype)                                           # cos had made it float32

    return rotate(q), rotate(k)


# ==== Step 5: attention with grouped query heads and a KV cache =============================================
# attention, the last function of this step, makes queries, keys and values, and uses the three before it.
def linear(x, name):
    """x @ w.T for the weight w of that name: (n, in) -> (n, out). Model files store w as (out, in)."""
    return x @ W[name].T


def extend_cache(cache, layer_idx, k, v):
    """Add the keys and values of n new tokens, (8, n, 128); return those of all tokens, (8, total, 128).

    cache is a list with an entry for each layer: None, or (keys, values). What a block computes for a token
    depends on that token and earlier ones, never on later ones, which attend hides. So a token's key, turned
    by RoPE, and its value never change; but all later tokens need both. They are kept: 28 layers x 2 (key and
    value) x 8 heads x 128 = 57,344 numbers per token. Without this cache each new token would need a pass
    over the whole text. A query is used once, by its own token, and not kept.
    """
    if cache[layer_idx] is not None:
        old_k, old_v = cache[layer_idx]
        k, v = mx.concatenate([old_k, k], axis=1), mx.concatenate([old_v, v], axis=1)
    cache[layer_idx] = (k, v)
    return k, v


def attend(q, k, v):
    r"""softmax(q k^T / sqrt(128)) v -> (16, n, 128). Vaswani et al. 2017.

    q (16, n, 128): queries of the n new tokens; k and v (8, total, 128): of all tokens, the new ones last.

    In each head, a row of q k^T / sqrt(128) holds a token's scores s. Softmax makes them shares e^s / (sum of
    all e^s): none negative, the largest for the largest score, together 1. So what comes out is a weighted
    mean of values. Why sqrt(128)? A score is a sum of 128 terms, some positive, some negative, that partly
    cancel: it is typically sqrt(128), about 11, times as large as one term. Without the division the scores
    would lie so far apart that the largest share is nearly 1, and a token would take from one token only.

    Query heads 0 and 1 share key/value head 0, heads 2 and 3 share head 1, and so on: this takes half the
    cache that 16 key/value heads would, for nearly the same quality. The rows of two query heads are stacked
    into one matrix, which is multiplied with the keys that they share:

        q (16, n, 128)    head 0 | head 1 | head 2 | head 3 | ...      n rows each
                          \_____________/   \_____________/
          (8, 2n, 128)      uses k[0]         uses k[1]      ...       2n rows each

    No token may look at a later one: in training each had to predict the next, and would only have copied
    it. So a later token's score becomes -inf, and its share e^-inf = 0. For n = 3 new tokens on 2 cached:

                               position 0 1 2 3 4
        new token at position 2         . . . x x       x: hidden
        new token at position 3         . . . . x
        new token at position 4         . . . . .
    """
    n, total = q.shape[1], k.shape[1]
    q = q.reshape(N_KV, -1, D_HEAD)                                             # (8, 2n, 128)
    scores = (q @ k.transpose(0, 2, 1)).astype(mx.float32) / math.sqrt(D_HEAD)  # (8, 2n, total)
    future = mx.arange(total) > mx.arange(total - n, total)[:, None]            # (n, total), as drawn above
    future = mx.tile(future, (N_HEADS // N_KV, 1))                              # (2n, total): two heads' rows
    shares = mx.softmax(mx.where(future, -mx.inf, scores), axis=-1)             # (8, 2n, total)
    return (shares.astype(v.dtype) @ v).reshape(N_HEADS, n, -1)                 # (8, 2n, 128) -> (16, n, 128)


def attention(x, layer_idx, cache, positions):
    """Each of n new tokens gathers from all tokens up to itself: x (n, 1024) -> (n, 1024).

    positions: the n places in the text. cache[layer_idx] holds the keys and values of all earlier tokens; the
    new ones' are added. The last matrix, o_proj, mixes what the 16 heads have found.
    """
    name = f"model.layers.{layer_idx}.self_attn"
    # (n, 2048) -> (n, 16, 128) -> (16, n, 128): 16 vectors per token, then one matrix per head
    q = linear(x, f"{name}.q_proj.weight").reshape(-1, N_HEADS, D_HEAD).transpose(1, 0, 2)
    k = linear(x, f"{name}.k_proj.weight").reshape(-1, N_KV, D_HEAD).transpose(1, 0, 2)     # (8, n, 128)
    v = linear(x, f"{name}.v_proj.weight").reshape(-1, N_KV, D_HEAD).transpose(1, 0, 2)     # (8, n, 128)
    # RMSNorm of every head's vector keeps the scores small. Llamas, which this file runs as well, do without.
    if f"{name}.q_norm.weight" in W:
        q = rms_norm(q, W[f"{name}.q_norm.weight"])
        k = rms_norm(k, W[f"{name}.k_norm.weight"])
    q, k = apply_rope(q, k, positions)
    k, v = extend_cache(cache, layer_idx, k, v)                 # (8, total, 128) each
    out = attend(q, k, v)                                       # (16, n, 128)
    out = out.transpose(1, 0, 2).reshape(-1, N_HEADS * D_HEAD)  # (n, 2048): a token's 16 heads side by side
    return linear(out, f"{name}.o_proj.weight")                 # (n, 1024)


# ==== Step 6: the SwiGLU feed-forward network ===============================================================
def silu(gate):
    """gate * sigmoid(gate) for each number by itself; sigmoid(a) = 1 / (1 + e^-a) lies between 0 and 1.

    Far below 0 the result is nearly 0, far above 0 nearly gate. Another name is swish; a SwiGLU is a
    swish-gated linear unit.
    """
    gate32 = gate.astype(mx.float32)
    return (gate32 * mx.sigmoid(gate32)).astype(gate.dtype)


def ffn(x, layer_idx):
    """down(silu(gate(x)) * up(x)), for every token by itself: (n, 1024) -> (n, 1024). Shazeer 2020.

    gate, up and down multiply by matrices that are nearly half of all weights. up computes 3072 features of a
    token, the gate decides how much each of them counts here, and down turns them into what is added to x.
    Without the gate, down after up would be no more than one matrix: each number that comes out would be a
    sum of x's numbers with fixed weights. With it, those weights depend on x itself: an "if".
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
    """For each of n new tokens, score how well every token of the vocabulary would follow it: (n, 151936).

    Such a score, which may be any number, is called a logit. token_ids: the n tokens; start_pos: how many the
    cache holds already. last_only: only the last row, (1, 151936), from which the next token is chosen.
    """
    positions = mx.arange(start_pos, start_pos + len(token_ids))
    x = embed(token_ids)                                        # (n, 1024)
    for layer_idx in range(N_LAYERS):
        x = transformer_block(x, layer_idx, cache, positions)
    x = rms_norm(x[-1:] if last_only else x, W["model.norm.weight"])            # x has grown in every block
    return linear(x, "lm_head.weight")                          # x's dot product with a row for each token


def nucleus(logits, temperature, top_p):
    """All token ids, the likeliest first, and the probability of drawing each: (151936,) both.

    Take softmax(logits / temperature), largest first. A temperature below 1 makes likely tokens likelier, one
    above 1 evens them out. Then keep the nucleus, the fewest of the likeliest tokens whose probabilities add
    up to top_p, and give all others 0. Why? Each of the others is unlikely, but there are so many that one
    would be drawn now and then, and spoil all that follows. Holtzman et al. 2019.
    """
    logits = logits.astype(mx.float32)
    temperature, top_p = max(temperature, 1e-30), max(top_p, 1e-30)     # 0 would divide by 0, or keep none
    probs = mx.softmax(logits / temperature)
    order = mx.argsort(-probs)
    probs = probs[order]
    if top_p < 1:
        likelier = mx.cumsum(probs, inclusive=False)            # the sum of all before it: 0 for the first
        probs = mx.where(likelier < top_p, probs, 0)            # 0 if those before it reach top_p already
    return order, probs / mx.sum(probs)


def sample(logits, temperature=0.0, top_p=0.95):
    """Choose a token id: logits (151936,) -> a 0-d array; its item() is the integer.

    Temperature 0 takes the likeliest token ("greedy"). Such texts tend to repeat themselves; above 0 a token
    of the nucleus is drawn at random, each as often as its probability says.
    """
    if temperature == 0:
        return mx.argmax(logits)
    order, probs = nucleus(logits, temperature, top_p)
    return order[mx.random.categorical(mx.log(probs))]          # it wants logarithms; log(0) is never drawn


# ==== Step 9: the generation loop, prefill and then decode ==================================================
def prefill(ids, cache, start_pos=0):
    """Pass the ids through the model, 256 at once, to fill the cache; returns the last logits, (1, 151936).

    In pieces, since attention's scores, one per head for each pair of tokens, would take much memory if a
    long text were one pass. On a terminal tqdm shows a bar if this takes over a second.
    """
    for i in tqdm(range(0, len(ids), 256), desc="prefill", delay=1, leave=False, disable=None):
        logits = forward(ids[i:i + 256], cache, start_pos + i, last_only=True)
        mx.eval(logits)                                         # compute now, free what is not needed later
    return logits


def next_tokens(ids, cache, start_pos=0, choose=sample):
    """Yield each token that the model adds to ids, until it is one that ends the text.

    After prefill comes decode: every pass takes one token, and finds the keys and values of all others in the
    cache. start_pos: how many tokens the cache holds before ids (in a chat, earlier turns). choose makes a
    token of logits (151936,); stream, below, gives it a temperature and top_p.
    """
    logits, pos = prefill(ids, cache, start_pos), start_pos + len(ids)          # score
    while True:
        token = choose(logits[-1]).item()                                       # choose
        if token in EOS_IDS:
            return
        yield token                                                             # hand out
        logits, pos = forward([token], cache, pos), pos + 1                     # append to the cache, score


def generate(prompt, max_tokens=100, temperature=0.0, top_p=0.95):
    """The prompt and its continuation by up to max_tokens tokens, as one text.

    stream, below, takes up to max_tokens tokens from next_tokens and makes text of them with tok.decode, the
    opposite of encode. [None] * N_LAYERS is an empty cache. Raises ValueError if the prompt is empty, or too
    long for the context, or if damaged weights make logits infinite or NaN.
    """
    return prompt + "".join(stream(encode(prompt), [None] * N_LAYERS, 0, max_tokens, temperature, top_p))


# ==== The same, faster ======================================================================================
# Three sets of functions compute the same numbers, except for rounding: the "explicit" ones of the steps, and
# "fused" and "numpy" here. use_kernels puts one set in place. Only the fused set can compute with matrices
# that load_model has left packed, a few bits for each number: such an entry of W is a tuple (w, scales,
# biases, {"group_size", "bits"}). An entry of the cache has 2 parts in the explicit set, 3 in the fused and 4
# in the numpy set. So a set that gets a cache which another one has filled raises a ValueError.
#
# ---- "fused", for a GPU: a kernel is a program that runs on the GPU. Each takes a while to start, so a few
# large ones, which MLX has ready, are faster than many small ones.
def fused_embed(token_ids):
    """embed, also where the matrix is packed: then only the rows that are asked for are unpacked."""
    ids, w = mx.array(token_ids), W["model.embed_tokens.weight"]
    return mx.dequantize(*[part[ids] for part in w[:3]], **w[3]) if isinstance(w, tuple) else w[ids]


def fused_linear(x, name):
    """linear, also for a packed matrix, which is unpacked as it is multiplied."""
    w = W[name]
    return mx.quantized_matmul(x, *w[:3], **w[3]) if isinstance(w, tuple) else x @ w.T


def fused_apply_rope(q, k, positions):
    """apply_rope as two kernels, for consecutive positions. x[None]: MLX wants a batch axis in front."""
    options = {"traditional": False, "base": THETA, "scale": 1.0, "offset": positions[0]}
    return tuple(mx.fast.rope(x[None], D_HEAD, **options)[0] for x in (q, k))


def fused_extend_cache(cache, layer_idx, k, v):
    """extend_cache with free rows: entries are (keys, values, length), and their arrays grow by 256 tokens.

    Writing into a free row costs the same for every token, while concatenating copies all earlier ones. (MLX
    writes in place if no other variable refers to the array, and otherwise into a copy.)
    """
    keys, values, length = cache[layer_idx] or (k[:, :0], v[:, :0], 0)
    total = length + k.shape[1]
    if total > keys.shape[1]:
        room = [(0, 0), (0, math.ceil(total / 256) * 256 - length), (0, 0)]     # to a multiple of 256 tokens
        keys, values = mx.pad(keys[:, :length], room), mx.pad(values[:, :length], room)
    keys = mx.slice_update(keys, k, mx.array([length]), axes=[1])
    values = mx.slice_update(values, v, mx.array([length]), axes=[1])
    cache[layer_idx] = (keys, values, total)
    return keys[:, :total], values[:, :total]


def fused_attend(q, k, v):
    """attend in one kernel, which never writes the scores to memory ("FlashAttention", Dao et al. 2022)."""
    mask = "causal" if q.shape[1] > 1 else None
    return mx.fast.scaled_dot_product_attention(q[None], k[None], v[None], scale=D_HEAD ** -0.5, mask=mask)[0]


def fused_next_tokens(ids, cache, start_pos=0, choose=sample):
    """next_tokens, but each pass is queued before the token that it starts from is read.

    So the GPU does not have to wait for Python. When the text ends, one pass too many has been queued.
    """
    logits, pos = prefill(ids, cache, start_pos), start_pos + len(ids)
    while True:
        token = choose(logits[-1])
        logits, pos = forward(token[None], cache, pos), pos + 1
        mx.async_eval(token, logits)
        if token.item() in EOS_IDS:
            return
        yield token.item()


# ---- "numpy", for a CPU: NumPy multiplies matrices with all cores and with the processor's vector
# instructions, MLX's Linux wheel does not. And a small operation takes NumPy 1 to 2 microseconds where MLX
# takes 20 to 40. np.asarray of an MLX array is a view of it, so W is never copied.
def numpy_embed(token_ids):
    """embed, column by column in memory, as numpy_linear leaves x."""
    return np.asfortranarray(np.asarray(W["model.embed_tokens.weight"])[np.asarray(token_ids)])


def numpy_linear(x, name):
    """linear as (w @ x.T).T. For x @ w.T, BLAS, NumPy's library, would first copy w into another order.

    So the result lies column by column in memory. NumPy's operations keep that order, which makes the next
    product faster, too: a prefill takes a tenth less time. If x is one row, w is multiplied with a vector.
    """
    out = (np.asarray(W[name]) @ np.asarray(x).T).T
    if name == "lm_head.weight":
        # mx.array of a NumPy array can lose a Ctrl-C that comes meanwhile; of a memoryview it does not
        return as_logits(mx.array(memoryview(np.ascontiguousarray(out))), *W.values())
    return out


# MLX does not see what NumPy computes: it would say that every gradient is 0. So as_logits, which only hands
# the logits on, is given all weights, and if somebody asks for a gradient (vjp), it raises a ValueError.
as_logits = mx.custom_function(lambda logits, *weights: logits)
as_logits.vjp(lambda *_: refuse(True, 'the "numpy" functions have no gradients: use_kernels("explicit") has'))


def numpy_rms_norm(x, w):
    """rms_norm. einsum adds up x_i * x_i without an array for the squares."""
    x = np.asarray(x)
    mean = np.einsum("...i,...i->...", x, x)[..., None] / np.float32(x.shape[-1])
    return x * (1 / np.sqrt(mean + np.float32(EPS))) * np.asarray(w)


def numpy_apply_rope(q, k, positions):
    """apply_rope in NumPy: the same lines."""
    half = D_HEAD // 2
    freqs = np.float32(THETA) ** (-np.arange(half, dtype=np.float32) / half)
    angles = np.asarray(positions, dtype=np.float32)[:, None] * freqs
    cos, sin = np.cos(angles), np.sin(angles)
    halves = [(x[..., :half], x[..., half:]) for x in map(np.asarray, (q, k))]
    return tuple(np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1) for a, b in halves)


def numpy_extend_cache(cache, layer_idx, k, v):
    """extend_cache with free rows for 256 more tokens: an entry is (keys, values, length, [rows written]).

    A copied cache shares the arrays, and the list, which says how many of their rows are in use. If these are
    more than this entry's length, another text has gone on from here. Its rows must stay, so copies are made.
    """
    keys, values, length, written = cache[layer_idx] or (k[:, :0], v[:, :0], 0, [0])
    total = length + k.shape[1]
    if total > keys.shape[1] or length < written[0]:
        old, written = (keys[:, :length], values[:, :length]), [0]
        keys, values = (np.empty((N_KV, total + 256, D_HEAD), dtype=np.float32) for _ in range(2))
        keys[:, :length], values[:, :length] = old
    keys[:, length:total], values[:, length:total], written[0] = k, v, total
    cache[layer_idx] = (keys, values, total, written)
    return keys[:, :total], values[:, :total]


def numpy_attend(q, k, v):
    """attend, one key/value head after another: they all write their scores into the same buffer.

    The mask is added to the new tokens' columns only. A long text has more scores than q and the result have
    numbers: so q is scaled, and the result is divided by the sum. The queries of a single new token are
    multiplied one by one: a matrix with a vector is faster.
    """
    n, total = q.shape[1], k.shape[1]
    q = np.asarray(q).reshape(N_KV, -1, D_HEAD) * np.float32(D_HEAD ** -0.5)
    out = np.empty((*q.shape[:2], v.shape[2]), dtype=np.float32)
    future = np.tile(np.triu(np.full((n, n), -np.inf, dtype=np.float32), 1), (N_HEADS // N_KV, 1))
    buffer = np.empty((q.shape[1], total), dtype=np.float32)
    for keys, values, queries, mixed in zip(np.asarray(k), np.asarray(v), q, out):
        scores = np.matmul(queries, keys.T, out=buffer) if n > 1 else np.array([keys @ x for x in queries])
        scores[:, total - n:] += future
        scores -= scores.max(axis=1, keepdims=True)
        np.exp(scores, out=scores)
        np.divide(scores @ values, scores.sum(axis=1, keepdims=True), out=mixed)
    return out.reshape(N_HEADS, n, -1)


def numpy_silu(gate):
    """silu as gate / (1 + e^-gate), on parts that fit in the processor's cache: twice as fast."""
    out, step = np.empty_like(gate), 1 + 16384 // len(gate)
    with np.errstate(over="ignore"):                            # e^89 is infinity, and gate / infinity is 0
        for i in range(0, gate.shape[1], step):
            part = gate[:, i:i + step]
            np.divide(part, 1 + np.exp(-part), out=out[:, i:i + step])
    return out


def refuse(wrong, message):
    """Raise a ValueError with that message if the condition is true."""
    if wrong:
        raise ValueError(message)


KINDS = ("explicit", "fused", "numpy")
KERNELS = {                     # three versions of each function, in that order
    "embed": (embed, fused_embed, numpy_embed),
    "linear": (linear, fused_linear, numpy_linear),
    "rms_norm": (rms_norm, lambda x, w: mx.fast.rms_norm(x, w, EPS), numpy_rms_norm),
    "apply_rope": (apply_rope, fused_apply_rope, numpy_apply_rope),
    "extend_cache": (extend_cache, fused_extend_cache, numpy_extend_cache),
    "attend": (attend, fused_attend, numpy_attend),
    "silu": (silu, lambda gate: gate * mx.sigmoid(gate), numpy_silu),   # fused: rounds twice in 16 bits
    "next_tokens": (next_tokens, fused_next_tokens, next_tokens)}


def use_kernels(kind):
    """From now on compute with the "explicit" functions of the steps, the "fused" or the "numpy" ones.

    NumPy has no bfloat16 and is slow with float16: if W is not float32, "numpy" means the explicit ones.
    Raises ValueError if there is no such set, or if it can't compute with what is in W.
    """
    global kernels
    refuse(kind not in KINDS or kind == "numpy" and "np" not in globals(), f"there are no {kind!r} kernels")
    refuse(kind != "fused" and any(type(w) is tuple for w in W.values()), "packed weights need fused kernels")
    kernels = kind                                              # for load_model, which calls this again
    if kind == "numpy" and any(w.dtype != mx.float32 for w in W.values()):
        kind = "explicit"
    globals().update({name: versions[KINDS.index(kind)] for name, versions in KERNELS.items()})


use_kernels("fused" if mx.default_device() == mx.gpu else "numpy" if "np" in globals() else "explicit")


# ==== Text as it appears ====================================================================================
# A token can hold half a character: an emoji has 4 bytes, and may come as 3 tokens. Decoded too early, it is
# U+FFFD, the sign for damaged text. So what may still become a character waits. Tokenizers like Qwen3's name
# a token by a letter for each byte: chr(byte), or if that is not printable, one of chr(256), chr(257), ...
UNPRINTABLE = [*range(33), *range(127, 161), 173]               # blanks, control characters, the soft hyphen


def bytes_of(token_id):
    """The UTF-8 bytes that a token adds to a text: maybe parts of characters, none for a special token."""
    piece = tok.id_to_token(token_id) or ""                     # its name; an id without a token has none
    text = tok.decode([token_id] * 2).removeprefix(tok.decode([token_id]))      # the first may lose its space
    if "\ufffd" not in text or "\ufffd" in piece:               # whole characters; U+FFFD may be one of them
        return text.encode()
    if piece.startswith("<0x"):                                 # in tokenizers like Llama 2's: "<0xE6>"
        return bytes.fromhex(piece[3:5])
    return bytes(ord(c) if ord(c) < 256 else UNPRINTABLE[ord(c) - 256] for c in piece)


def whole_text(ids):
    """The text of some tokens, without a character at its end that later tokens may still complete."""
    text, data = tok.decode(ids), b"".join(map(bytes_of, ids[-8:]))     # 4 would do if all tokens had bytes
    # A character's later bytes are 0x80 to 0xBF: if the first or the last of them adds no sign, one was open
    now, *later = (len((data + more).decode(errors="replace")) for more in (b"", b"\x80", b"\xbf"))
    return text.rstrip("\ufffd") if now in later else text


def text_pieces(prompt_ids, new_ids):
    """Yield the text that each new token adds; at the end also what was held back until then, if any.

    Joined, the pieces are the text of all tokens without the prompt's. All are decoded every time (0.5 ms for
    1,000), since a token's text can depend on its neighbours: in tokenizers like Llama 2's a wrong byte turns
    good ones before it into U+FFFD. Shown text can't change: the next piece begins after as many characters.
    """
    ids, base = list(prompt_ids), tok.decode(prompt_ids)
    # A number of characters. One cut off at the prompt's end can spoil those before it: look before it, too
    shown = max(len(whole_text(ids[:i])) for i in range(max(0, len(ids) - 8), len(ids) + 1))
    for token in new_ids:
        ids.append(token)
        text = whole_text(ids)
        # If the prompt ends inside a character, what the new tokens have not changed counts as shown, too
        shown = max(shown, len(os.path.commonprefix([base, text])))
        yield text[shown:]
        shown = max(shown, len(text))
    text = tok.decode(ids)
    if rest := text[max(shown, len(os.path.commonprefix([base, text]))):]:
        yield rest


def stream(ids, cache, start_pos=0, max_tokens=100, temperature=0.0, top_p=0.95):
    """An iterator over the texts of up to max_tokens tokens that the model adds to ids.

    cache holds the start_pos tokens before ids. As in text_pieces, one more piece may follow, with what was
    held back. Raises ValueError as check_prompt does, or if logits are not finite.
    """
    largest = []                                                # of each token's logits

    def choose(logits):
        largest.append(mx.max(mx.abs(logits)))
        mx.async_eval(largest[-1])                              # on a GPU: before the next pass is queued
        return sample(logits, temperature, top_p)

    check_prompt(ids, start_pos + max_tokens)
    new = zip(range(max_tokens), next_tokens(ids, cache, start_pos, choose))
    return text_pieces(ids, (check_finite(token, largest[-1].item()) for _, token in new))


def check_prompt(ids, max_tokens):
    """Returns the ids. Raises ValueError if there are none, too many, or one beyond the embedding's rows."""
    refuse(not ids, "the prompt is empty")
    refuse(len(ids) + max_tokens > MAX_POSITIONS,
           f"{len(ids)} tokens and {max_tokens} new ones do not fit in the context of {MAX_POSITIONS} tokens")
    refuse(max(ids) >= VOCAB, f"the prompt has the token {tok.id_to_token(max(ids))!r} with the id "
           f"{max(ids)}, but the embedding has only {VOCAB} rows")
    return ids


def check_finite(value, number):
    """Returns the value. Raises ValueError, naming a weight that is not finite, if the number is not."""
    if not math.isfinite(number):
        bad = [name for name, w in W.items() for part in (w[1:3] if type(w) is tuple else [w])
               if not mx.isfinite(part).all()]
        raise ValueError(f"the logits are not finite; neither is {bad[0] if bad else 'a step on the way'}")
    return value


# ==== A conversation in Qwen3's chat template, with --chat ==================================================
# "Hello" becomes <|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n, and the
# model goes on. Below: the SHA-256 of Qwen3-0.6B's template, and of tests/tiny-qwen3's, which does the same.
CHAT_FORMS = ("a55ee1b1660128b7098723e0abcd92caa0788061051c62d51cbe87d9cf1974d8",
              "9f2987732d38039af61231dccba6509f5ae1c9d8b4b2df7b63c335f2ff2bf4dd")


def check_chat_form(folder):
    """Say on stderr if a model's chat template is not Qwen3's. Raises ValueError if the model can't chat."""
    refuse(tok.token_to_id("<|im_end|>") not in EOS_IDS, "--chat needs a model that ends turns in <|im_end|>")
    # Llama 2's tokenizer puts a space (U+2581) before a text: here before each part of a turn, so too many
    refuse("\u2581" in "".join(tok.encode("a", add_special_tokens=False).tokens),
           "--chat needs a tokenizer that does not mark the beginning of a text")
    file, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    text = file.read_text("utf-8", "replace") if file.exists() else (
        read_json(config).get("chat_template") if config.exists() else None)
    if text and hashlib.sha256(str(text).encode(errors="replace")).hexdigest() not in CHAT_FORMS:
        print("This model has a chat template of its own, but the conversation is held in Qwen3-0.6B's form: "
              "its answers may be worse.", file=sys.stderr)


def ids_of(text, typed=False):
    """Token ids of a part of the template, or, if typed, of a text in which "<|im_end|>" means nothing."""
    refuse(re.search("[\ud800-\udfff]", text), "this is not UTF-8 text")        # how Python reads bad bytes
    tok.encode_special_tokens = typed                           # True: special tokens are spelled like others
    return tok.encode(text, add_special_tokens=False).ids


def turn_ids(role, text):
    """Token ids of one turn; role is "system", "user" or "assistant"."""
    return ids_of("<|im_start|>") + ids_of(f"{role}\n{text}", typed=True) + ids_of("<|im_end|>\n")


def typed_lines():
    """The lines of stdin, without the newline at their end. At a terminal readline helps to edit them."""
    with contextlib.suppress(ImportError):                      # there is no readline on Windows
        import readline                                         # noqa: F401  (from now on input uses it)
    with contextlib.suppress(EOFError):
        while True:
            yield input("> " if sys.stdin.isatty() else "")


def chat(questions, system=None, think=False, max_tokens=1000, temperature=0.0, top_p=0.95):
    """Print an answer to each of the questions, as turns of one conversation. False if one was refused.

    Without think the model is given an empty thought to begin with, so it does not think. Thoughts are not
    kept, as in Qwen3's own template: an answer goes into a copy of the cache, which is then dropped. With the
    next question the answer's text, without its thought, is computed again. At a terminal Ctrl-C stops an
    answer, and what was shown of it stays part of the conversation.
    """
    thought = "" if think or tok.token_to_id("<think>") is None else "<think>\n\n</think>\n\n"
    opening = ids_of(f"<|im_start|>assistant\n{thought}")
    dim, plain, all_well = terminal_code(2), terminal_code(0), True             # dim: for thoughts
    start = [] if system is None else turn_ids("system", system)
    # All tokens so far, and a cache of the first `held` of them; answers are written into copies of it
    said, kept, held = start, [None] * N_LAYERS, 0
    for question in questions:
        try:
            refuse(not question.strip(), "the question is empty")
            refuse(question.startswith("<tool_response>") and question.endswith("</tool_response>"),
                   "a whole <tool_response> is no question to Qwen3's template")
            turn = turn_ids("user", question)
            fits = len(said + turn + opening) + max_tokens <= MAX_POSITIONS
            check_prompt((said if fits else start) + turn + opening, max_tokens)
        except ValueError as error:
            print("llm_inference.py:", one_line(error), file=sys.stderr)
            all_well = False
            continue
        if not fits:
            print(f"(The context of {MAX_POSITIONS} tokens is full: a new chat begins.)", file=sys.stderr)
            said, kept, held = start, [None] * N_LAYERS, 0
        said, cache, answer = said + turn, list(kept), ""
        try:
            prefill(said[held:], cache, held)
            kept, held = cache, len(said)
            for piece in stream(opening, list(kept), held, max_tokens, temperature, top_p):
                answer += piece
                piece = piece.replace("<think>", dim + "<think>").replace("</think>", "</think>" + plain)
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            if isinstance(questions, list) or not sys.stdin.isatty():           # no question can follow
                raise
        finally:
            print(plain)
        said = said + turn_ids("assistant", re.sub(r"(?s)^.*</think>\n*", "", answer))
    return all_well


# ==== Looking inside: every call of one decode pass, with --trace ===========================================
WATCHED = ["embed", "rms_norm", "apply_rope", "extend_cache", "attend", "attention", "silu", "ffn",
           "transformer_block", "linear", "forward", "sample"]


def watch(run):
    """Call run(); return its calls of functions in WATCHED, each as [depth, name, arguments, result]."""
    calls, functions = [], {name: globals()[name] for name in WATCHED}

    def watched(name, *args, **options):
        call = [sum(len(c) == 3 for c in calls), name, args]    # depth: how many calls have no result yet
        calls.append(call)
        call.append(functions[name](*args, **options))
        return call[-1]

    globals().update({name: lambda *args, name=name, **options: watched(name, *args, **options)
                      for name in WATCHED})
    try:
        run()
    finally:
        globals().update(functions)
    return calls


def shapes_of(values):
    """The shapes of an array, or of the arrays in a tuple, as text."""
    values = values if isinstance(values, tuple) else (values,)
    return " ".join(str(value.shape) for value in values if hasattr(value, "shape"))


def trace(prompt):
    """Print each call of a function in WATCHED in one decode pass: weight or layer, shapes in, out, dtype."""
    ids, cache = check_prompt(encode(prompt), 2), [None] * N_LAYERS
    logits, names = prefill(ids, cache)[-1], {id(w): name for name, w in W.items()}
    token = sample(check_finite(logits, mx.max(mx.abs(logits)).item()))
    for depth, name, args, result in watch(lambda: sample(forward(token[None], cache, len(ids))[-1])):
        labels = [names.get(id(a), a) for a in args if id(a) in names or isinstance(a, str)]
        labels += [f"layer {a}" for a in args if isinstance(a, int) and name != "forward"]
        dtype = str((result[0] if isinstance(result, tuple) else result).dtype).removeprefix("mlx.core.")
        print(f"{'  ' * depth}{' '.join([name, *labels])}: {shapes_of(args)} -> {shapes_of(result)} {dtype}")


# ==== Looking inside: the nine steps on your own prompt, with --explain =====================================
# {a step's number and function: a text that is in the names of all weights it reads}; "-" is in no name
STEPS = {"2 embed": "embed", "3 rms_norm": "norm", "4 apply_rope": "-", "5 attention": "self_attn",
         "6 ffn": "mlp", "7 transformer_block": "layers", "8 linear": "lm_head", "8 forward": "",
         "8 sample": "-"}


def terminal_code(number):
    """The escape code for plain (0), bold (1) or dim (2) text; empty if colour is not wanted."""
    wanted = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return f"\033[{number}m" if wanted else ""


def spell(token_id):
    """A token in quotes, so that a space before it shows; as bytes where these are not whole characters."""
    data = bytes_of(token_id) or (tok.id_to_token(token_id) or "").encode()     # the name of a special token
    text = data.decode(errors="replace")
    return repr(text if text.encode() == data else data)[:20]


def bar(share, width=16):
    """A bar for a share between 0 and 1, and the share in digits."""
    return f"{'#' * round(width * share):{width}} {share:.4f}"


def show(title, look, *lines):
    """Print a title, bold on a terminal, what to look for, and the lines: text, or a heading and its rows."""
    print(f"\n{terminal_code(1)}{title}{terminal_code(0)}", look, *lines, sep="\n")


def show_costs(seen, n, speed):
    """Print what the token after n others costs, step by step and in all; speed in tokens/s.

    seen: {function: [(arguments, result) of each call]}. A matrix takes as many multiply-adds as it has
    numbers. A step's share includes the steps that it calls.
    """
    kv_bytes = sum(k.nbytes + v.nbytes for (_, k, v), _ in seen["attend"]) // n
    # {weight: (multiply-adds, bytes read)}: a norm's vector takes no multiply-adds, the embedding gives a row
    work = {name: (w.size * (w.ndim - 1), w.nbytes) for name, w in W.items()}
    work["model.embed_tokens.weight"] = (0, W["model.embed_tokens.weight"][0].nbytes)
    # The cache, which is no weight, gets a name that STEPS finds for attention, for blocks and for forward
    work["layers, self_attn: cache"] = (2 * N_LAYERS * N_HEADS * D_HEAD * (n + 1), kv_bytes * (n + 1))
    costs = {step: [sum(column) for column in zip((0, 0), *[work[name] for name in work if part in name])]
             for step, part in STEPS.items()}
    (adds, read), (cache_adds, _) = costs["8 forward"], work["layers, self_attn: cache"]
    show("Steps 2 to 8: the shapes of the prompt's pass; each step's share of the work for the next token",
         "Look at how little norm, RoPE and embedding cost: nearly all is products with matrices.",
         f"{'step':19} {'shapes in':29} {'shapes out':28} {'mul-adds':>8} {'bytes':>8}",
         *[f"{step:19} {shapes_of(args[:2]):29} {shapes_of(result):28} {a / adds:8.2%} {b / read:8.2%}"
           for step, (a, b) in costs.items() for args, result in seen[step[2:]][-1:]])
    stored = {id(w): w for w in W.values()}.values()            # tied: one array under two names
    show("What the next token costs", "Look at the last line: in a large model, memory sets the pace.",
         f"{sum(w.size for w in stored):,} parameters, {sum(w.nbytes for w in stored):,} bytes of weights",
         f"{kv_bytes:,} bytes of KV cache a token; {kv_bytes * N_HEADS // N_KV:,} if no heads shared theirs",
         f"{adds - cache_adds:,} multiply-adds with weights, {cache_adds:,} with the cache",
         f"{read:,} bytes read: {speed:.1f} tokens/s ask for {read * speed / 1e9:.2f} GB/s")


def show_layers(ids, seen):
    """Print for each layer where the last token looks, and the answer if no layer followed ("logit lens")."""
    n, shades = len(ids), " .:-=+*#%@"
    columns = sorted({*range(n)[:4], *range(n)[-20:]})          # all, if there are up to 24
    width = 2 if n <= 12 else 1
    x = mx.concatenate([mx.array(x[-1:]) for _, x in seen["transformer_block"]])    # (28, 1024)
    logits = linear(rms_norm(x, W["model.norm.weight"]), "lm_head.weight")
    lens = mx.softmax(logits.astype(mx.float32), axis=-1)                           # (28, 151936)
    rows = [" " * 9 + "|".ljust(width) * column + spell(ids[i]) for column, i in enumerate(columns)]
    for layer, ((q, k, _), _) in enumerate(seen["attend"]):
        # Value i is 1 in place i and 0 elsewhere, so the weighted mean of values is the shares: (16, n)
        shares = mx.array(attend(q[:, -1:], k, mx.stack([mx.eye(n)] * N_KV)))[:, 0]
        largest, head = mx.max(shares, axis=0).tolist(), mx.argmax(mx.max(shares, axis=-1)).item()
        strip = "".join(shades[round(9 * largest[i])] * width for i in columns)
        said = mx.argmax(lens[layer]).item()
        rows.append(f"layer {layer:2} {strip} {head:5}  {bar(lens[layer, said].item(), 12)} {spell(said)}")
    show("Steps 5 and 7: in each layer, where the last token looks, and the answer if the model ended there",
         "Look at which token is dark where the answer appears"
         + ("; idle heads look at the first token." if n <= 24 else ". Shown: the first 4 and the last 20."),
         f"{'':9}{'looks at':{width * len(columns)}} {'head':>5}  {'probability of':19} next token", *rows)


def explain(prompt):
    """Print what happens to a prompt, step by step. Raises ValueError as check_prompt does, or if the prompt
    has over 256 tokens (prefill would cut it), or if weights are packed (show_costs can't count them)."""
    ids, cache = check_prompt(encode(prompt), 8), [None] * N_LAYERS
    n, half = len(ids), D_HEAD // 2
    refuse(n > 256 or any(isinstance(w, tuple) for w in W.values()),
           f"--explain needs weights that are not packed, and up to 256 tokens: here are {n}")
    calls = watch(lambda: sample(prefill(mx.array(ids), cache)[-1]))
    seen = {name: [call[2:] for call in calls if call[1] == name] for name in WATCHED}
    longer, first, start = list(ids), seen["forward"][0][1][-1], time.perf_counter()
    by_cache = [check_finite(first, mx.max(mx.abs(first)).item())]
    for pos in range(n, n + 8):
        longer.append(sample(by_cache[-1]).item())
        by_cache.append(forward(longer[-1:], cache, pos)[-1])
    mx.eval(by_cache)
    speed = 8 / (time.perf_counter() - start)

    show("Step 1: the prompt's tokens", "Look at the spaces: they belong to the word that follows.",
         "position       id  text or bytes", *[f"{i:8} {t:8}  {spell(t)}" for i, t in enumerate(ids)])
    show_costs(seen, n, speed)

    turn = [math.degrees(THETA ** (-pair / half)) for pair in (0, half // 2, half - 1)]
    q, k = (mx.repeat(mx.array(x)[:1, -1:].astype(mx.float32), n + 101, axis=1)
            for x in seen["apply_rope"][-1][0][:2])
    q, k = map(mx.array, apply_rope(q, k, mx.arange(n + 101)))  # one query and one key, at every position
    qk1, qk4 = (mx.sum(q[0, apart:] * k[0, :-apart], axis=-1).tolist() for apart in (1, 4))
    show("Step 4: how far RoPE turns, in degrees, and a query times a key that stand 1 and 4 tokens apart",
         "Look at the last two columns: the position changes nothing, only the distance does.",
         "position   first pair  middle pair    last pair   1 apart   4 apart",
         *[f"{i:8} " + " ".join(f"{i * t:12.6g}" for t in turn) + f" {qk1[i]:9.3f} {qk4[i]:9.3f}"
           for i in [*range(n), n + 96]])                        # and a place far away
    show_layers(ids, seen)

    (order, probs), (_, kept) = nucleus(by_cache[0], 1, 1), nucleus(by_cache[0], 0.7, 0.95)
    show(f"Step 8: the likeliest next tokens; at temperature 0.7 top-p 0.95 keeps {mx.sum(kept > 0).item()}",
         "Look at how temperature and top-p sharpen the choice.",
         f"{'id':>8} {'probability':23} {'at 0.7 and 0.95':23} token",
         *[f"{i:8} {bar(p)} {bar(q)} {spell(i)}"
           for i, p, q in zip(*[x[:5].tolist() for x in (order, probs, kept)])])

    again = forward(longer[:-1], [None] * N_LAYERS, 0)[-8:]     # at once, with nothing cached
    show("Step 9: the next 8 tokens, decoded from the cache and recomputed without one",
         "Look at both ids: they should be the same, and the logits differ by rounding only.",
         "  cached  recomputed  largest difference of the logits",
         *[f"{token:8} {mx.argmax(new).item():11} {mx.max(mx.abs(old - new)).item():11.2e}  {spell(token)}"
           for token, old, new in zip(longer[n:], by_cache, again)])


# ==== Loading a checkpoint ==================================================================================
FLOATS = (mx.bfloat16, mx.float16, mx.float32)                  # what weights may be stored and computed in


def load_model(folder, dtype=None, quantize=None):
    """Fill W, tok and the constants from a folder in Hugging Face form, such as Qwen3-0.6B/.

    dtype: what to compute in. None: as stored on a GPU; float32 on a CPU, where bfloat16 products are slow.
    quantize: the bits, 4 or 8, to which the matrices are rounded; None leaves them as they are. On a GPU this
    saves memory; on a CPU the rounded numbers are float32 again, since its packed products are slow. Raises
    OSError if a file can't be read, and ValueError, in one line that names the field or tensor, if this would
    not compute the checkpoint exactly. After an error the model that was loaded before is still in place.
    """
    refuse(quantize not in (None, 4, 8), f"quantize is {quantize}, not 4 or 8")
    refuse((dtype or mx.float32) not in FLOATS, f"dtype is {dtype}, not one of {FLOATS}")
    folder, as_stored = Path(folder), mx.default_device() == mx.gpu and kernels != "numpy"
    config, constants = read_config(folder / "config.json")                     # N_LAYERS and so on
    constants["tok"] = read_tokenizer(folder / "tokenizer.json", constants["VOCAB"])
    stored = read_weights(folder, config)                       # {name: array}; so far only headers are read
    packed = unpack(folder, config, stored, quantize)
    check_weights(folder, config, stored, constants)
    dtype = dtype or (stored["model.norm.weight"].dtype if as_stored else mx.float32)
    weights = {name: w.astype(dtype) for name, w in stored.items()}
    for name, (w, scales, biases, how) in packed.items() if as_stored and kernels == "fused" else ():
        weights[name] = (w, scales.astype(dtype), biases.astype(dtype), how)    # these stay packed
    stored = packed = None                                      # so each can be freed after its conversion
    evaluate(folder, weights)
    W.clear()
    W.update({"lm_head.weight": weights["model.embed_tokens.weight"]} | weights)        # the same, if tied
    globals().update(constants)
    use_kernels(kernels)                                        # which of them can run depends on W's type


def evaluate(folder, weights):
    """Read and convert the weights, one at a time. Raises ValueError if they are larger than the memory."""
    arrays = [part for w in weights.values() for part in (w[:3] if type(w) is tuple else (w,))]
    needed = sum(array.nbytes for array in arrays)              # there is no sysconf on Windows
    refuse(hasattr(os, "sysconf") and needed > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
           f"{folder}: the weights take {needed / 1e9:.1f} GB, more memory than there is")
    for array in arrays:
        mx.eval(array)


# ---- What a checkpoint may say. Everything else is refused, rather than computed wrongly.
CONSTANTS = {                   # the constants at the top of the file, each with its field in config.json
    "N_LAYERS": "num_hidden_layers", "D_MODEL": "hidden_size", "D_FF": "intermediate_size",
    "N_HEADS": "num_attention_heads", "N_KV": "num_key_value_heads", "D_HEAD": "head_dim",
    "VOCAB": "vocab_size", "MAX_POSITIONS": "max_position_embeddings", "EPS": "rms_norm_eps",
    "THETA": "rope_theta"}
# MLX's packed weights: integers of a few bits; a group of them in a row is scale * integer + bias
QUANTIZED = [{"group_size": group_size, "bits": bits} | mode for group_size in (32, 64, 128)
             for bits in (2, 3, 4, 5, 6, 8) for mode in ({}, {"mode": "affine"})]
# Fields of config.json, and what each may be if it is there and not null; []: it may not be there
SUPPORTED = {
    "model_type": ["qwen3", "llama"], "hidden_act": ["silu"], "attention_bias": [False], "mlp_bias": [False],
    "rope_scaling": [{}], "rope_parameters": [{}], "rope_interleaved": [False], "rope_traditional": [False],
    "partial_rotary_factor": [1], "use_sliding_window": [False], "sliding_window": [], "is_causal": [True],
    "layer_types": [[], ["full_attention"]], "num_experts": [], "num_local_experts": [],
    "tie_word_embeddings": [True, False], "quantization": QUANTIZED, "quantization_config": QUANTIZED}


def read_json(path):
    """The JSON object in a file, as a dict. ValueError names a file that holds none."""
    try:
        return dict(**json.loads(path.read_bytes()))            # **: an error for all that is no object
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is not a JSON object ({error})") from None


def read_config(path):
    """Returns config.json, without entries that change nothing, and {name: value} of the constants.

    Raises ValueError, naming the field, if one is missing or asks for what would be computed wrongly.
    """
    config, plain = read_json(path), {"rope_type": "default", "type": "default", "partial_rotary_factor": 1}
    for field in ("rope_parameters", "rope_scaling"):           # transformers 5: rope_theta is in the former
        if isinstance(rope := config.get(field) or {}, dict):
            theta = rope.pop("rope_theta", None)
            config["rope_theta"] = config.get("rope_theta") if theta is None else theta
            config[field] = {key: value for key, value in rope.items() if plain.get(key) != value}
    if config.get("use_sliding_window") is False:
        config["sliding_window"] = None                         # a width that is given but not used
    if isinstance(layers := config.get("layer_types"), list):
        config["layer_types"] = sorted(set(map(str, layers)))
    for field in ("quantization_config", "quantization"):       # and by name, how single matrices are packed
        if isinstance(entries := config.get(field), dict):
            packings = {name: e | {"group_size": e.get("group_size") or 64} if type(e) is dict else e
                        for name, e in entries.items() if type(e) in (dict, bool)}
            wrong = {name: e for name, e in packings.items() if type(e) is dict and e not in QUANTIZED}
            # What is checked below: the wrong ones, or if all are right, how the other matrices are packed
            config[field] = wrong or {k: v for k, v in entries.items() if k not in packings} or None
            config["packings"] = {name: e for name, e in packings.items() if e is not True}     # True: usual
    # A field that is null is left out, as if it were missing; but model_type must be there to be checked
    config = {"model_type": None} | {field: value for field, value in config.items() if value is not None}
    for field, values in SUPPORTED.items():
        refuse(field in config and config[field] not in values,
               f"{path}: {field} is {json.dumps(config.get(field))}, which is not supported")
    return config, read_constants(path, config)


def read_constants(path, config):
    """{name: value} of the constants, with transformers' default values. ValueError names the field."""
    config = {"num_key_value_heads": config.get("num_attention_heads"), "rope_theta": 10000} | config
    found = {}
    for name, field in CONSTANTS.items():
        if name == "D_HEAD" and field not in config:            # in Llamas, D_MODEL / N_HEADS
            config[field] = 128 if config["model_type"] == "qwen3" else found["D_MODEL"] // found["N_HEADS"]
        found[name], kind = config.get(field), float if name in ("EPS", "THETA") else int
        refuse(type(found[name]) not in (int, kind) or not 0 < found[name] < 2**53,
               f"{path}: {field} is {json.dumps(found[name])}, not a positive {kind.__name__}")
    heads, kv = found["N_HEADS"], found["N_KV"]
    refuse(heads % kv, f"{path}: num_attention_heads {heads} is no multiple of num_key_value_heads {kv}")
    refuse(found["D_HEAD"] % 2, f"{path}: head_dim {found['D_HEAD']} is odd")
    general = path.with_name("generation_config.json")          # end tokens are in one of the two, or in both
    ends = [config.get("eos_token_id"), read_json(general).get("eos_token_id") if general.exists() else None]
    ends = [i for end in ends for i in (end if isinstance(end, list) else [end]) if i is not None]
    refuse({*map(type, ends)} - {int}, f"{path.parent}: eos_token_id is {json.dumps(ends)}, not token ids")
    return found | {"EOS_IDS": set(ends)}


def read_tokenizer(path, rows):
    """A tokenizers.Tokenizer from tokenizer.json. Raises ValueError if it is none, or has too large ids.

    Tokens that were added to a tokenizer may have larger ids: check_prompt refuses a prompt that uses one.
    """
    try:
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.no_truncation()                               # what a file may set for training
        tokenizer.no_padding()
        if hasattr(tokenizer.model, "dropout"):                 # would leave out merges at random
            tokenizer.model.dropout = None
        largest = max([0, *tokenizer.get_vocab(with_added_tokens=False).values(), *tokenizer.encode("").ids])
    except KeyboardInterrupt:
        raise
    except BaseException as error:                              # a Rust panic is no Exception
        raise ValueError(f"{path} can't be read as a tokenizer: {error}") from None
    refuse(largest >= rows, f"{path} has {largest + 1} tokens, the embedding only {rows} rows (vocab_size)")
    return tokenizer


def read_weights(folder, config):
    """{name: array}, lazy, of model.safetensors or of its shards; config then says if the head is tied.

    Tied means that it is the embedding again, so it is left out. Raises ValueError if a file is cut off, if
    its tensors leave gaps or overlap, or if a head that is said to be tied differs from the embedding.
    """
    paths, index, stored = [folder / "model.safetensors"], folder / "model.safetensors.index.json", {}
    if index.exists() and not paths[0].exists():
        shards = read_json(index).get("weight_map")
        shards = shards.values() if type(shards) is dict else ()
        paths = [folder / name for name in sorted({*map(str, shards)})]         # the same order in every run
    for path in paths:
        try:
            found = mx.load(str(path), format="safetensors")
            refuse(found.keys() & stored.keys(), "it has a tensor that another shard has, too")
            stored |= found
            with open(path, "rb") as file:                      # its header, JSON, has each tensor's place
                header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
                size = path.stat().st_size - file.tell()
            spans = sorted(entry["data_offsets"] for name, entry in header.items() if name != "__metadata__")
            begins, ends = [begin for begin, _ in spans], [end for _, end in spans]
            refuse(begins + [size] != [0] + ends, "its tensors leave gaps or overlap")
        except (RuntimeError, ValueError, TypeError) as error:  # half a download, a Git LFS pointer, ...
            raise ValueError(f"{path} can't be read as weights: {error}") from None
    if not any(name.startswith("model.") for name in stored):   # without a head, transformers omits "model."
        stored = {name if name.startswith("lm_head.") else f"model.{name}": w for name, w in stored.items()}
    tied = config.setdefault("tie_word_embeddings", "lm_head.weight" not in stored)
    for name in [name for name in stored if tied and name.startswith("lm_head.")]:
        embedding = stored.get(name.replace("lm_head", "model.embed_tokens"), mx.array(0))
        same = mx.array_equal(stored.pop(name), embedding)
        refuse(not same, f"{folder}: tie_word_embeddings is true, but {name} is not the embedding's")
    # Old Llamas hold a table of frequencies, which is not needed
    return {name: w for name, w in stored.items() if not name.endswith("rotary_emb.inv_freq")}


def unpack(folder, config, stored, bits):
    """In stored, put one matrix, scale * integer + bias, in the place of the three parts of a quantised one.

    Returns the parts: {name: (w, scales, biases, {"group_size", "bits"})}. bits: quantise all matrices first,
    or None. ValueError names a matrix that can't be packed so.
    """
    usual, packed = config.get("quantization") or config.get("quantization_config"), {}
    refuse(bits and usual, f"{folder} is quantised already: {usual}")
    usual, own = ({"group_size": 64, "bits": bits}, {}) if bits else (usual, config.get("packings", {}))
    for name in sorted(name for name in stored if name.endswith(".weight")):
        parts = [name.replace(".weight", part) for part in (".weight", ".scales", ".biases")]
        packing = own.get(name.removesuffix(".weight"), usual)  # False: this one is not packed
        try:
            if bits and stored[name].ndim == 2:                 # as if it had been stored like this
                stored |= zip(parts, mx.quantize(stored[name], **packing))
            if packing and parts[1] in stored and parts[2] in stored:
                packing = QUANTIZED[QUANTIZED.index(packing)]   # 4 instead of 4.0, which JSON allows
                w, scales, biases = (stored.pop(part) for part in parts)
                refuse(scales.shape != biases.shape or any(x.dtype not in FLOATS for x in (scales, biases)),
                       "its scales and biases are of different shapes, or no floats")
                packed[name] = w, scales, biases, packing
                stored[name] = mx.dequantize(w, *[x.astype(mx.float32) for x in (scales, biases)], **packing)
        except ValueError as error:
            raise ValueError(f"{folder}: {name}: {error}") from None
    return packed


def expected_shapes(c, qk_norm, own_head):
    """{name: shape} of the tensors that a checkpoint with the constants c must hold, no more and no fewer.

    qk_norm: whether blocks have Qwen3's norms of queries and keys. own_head: whether the head is not tied.
    """
    d, ff, q, kv = c["D_MODEL"], c["D_FF"], c["N_HEADS"] * c["D_HEAD"], c["N_KV"] * c["D_HEAD"]
    block = {"input_layernorm": (d,), "post_attention_layernorm": (d,), "self_attn.q_proj": (q, d),
             "self_attn.k_proj": (kv, d), "self_attn.v_proj": (kv, d), "self_attn.o_proj": (d, q),
             "mlp.gate_proj": (ff, d), "mlp.up_proj": (ff, d), "mlp.down_proj": (d, ff)}
    block |= {f"self_attn.{name}_norm": (c["D_HEAD"],) for name in ("q", "k") if qk_norm}
    shapes = {f"model.layers.{i}.{name}.weight": block[name] for i in range(c["N_LAYERS"]) for name in block}
    shapes |= {"lm_head.weight": (c["VOCAB"], d)} if own_head else {}
    return shapes | {"model.embed_tokens.weight": (c["VOCAB"], d), "model.norm.weight": (d,)}


def check_weights(folder, config, stored, constants):
    """Raises ValueError if tensors are missing, of a wrong shape or type, not known, or not finite."""
    layers = constants["N_LAYERS"]                              # a huge one would make a huge list below
    refuse(layers > len(stored), f"{folder}: num_hidden_layers is {layers} with {len(stored)} tensors")
    shapes = expected_shapes(constants, config["model_type"] == "qwen3", not config["tie_word_embeddings"])
    for name in sorted(shapes.keys() | stored.keys()):
        found, wanted = getattr(stored.get(name), "shape", "nothing"), shapes.get(name, "nothing")
        refuse(found != wanted, f"{folder}: {name}: the weights hold {found}, config.json asks for {wanted}")
        refuse(stored[name].dtype not in FLOATS, f"{folder}: {name}: {stored[name].dtype} is not supported")
    # If the head is tied, a bad value reaches the logits, and check_finite reports it
    finite = config["tie_word_embeddings"] or mx.isfinite(stored["model.embed_tokens.weight"]).all()
    refuse(not finite, f"{folder}: model.embed_tokens.weight is not finite")


# ==== The command line: find a model, run it, say how fast it was ===========================================
REPO, REVISION = "Qwen/Qwen3-0.6B", "c1899de289a04d12100db370d81485cdf75e47ca"
FILES = {"generation_config.json": None,                        # each with its SHA-256, where it is known
         "config.json": "660db3b73d788119c04535e48cf9be5f55bc3100841a718637ae695b442f27dd",
         "tokenizer.json": "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4",
         "model.safetensors": "f47f71177f32bcd101b7573ec9171e6a57f4f4d31148d38e382306f42996874b"}


def find_model(wanted=None):
    """The folder of a model: Qwen3-0.6B's by default, or wanted, a folder's name or OWNER/NAME on the Hub.

    Raises ValueError if it can't be downloaded, or if what comes is not right.
    """
    folder = Path(__file__).resolve().parent / "Qwen3-0.6B"
    if wanted is None:
        for place in (folder, Path("Qwen3-0.6B")):
            if any(place.glob("model*.safetensors")):
                return place
    elif Path(wanted).exists() or not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", wanted):     # OWNER/NAME
        return Path(wanted)
    try:
        return download_qwen(folder) if wanted is None else download(wanted)
    except Exception as error:
        if wanted is None and (folder / "model.safetensors").exists():
            return folder                                       # another process has finished the download
        raise ValueError(f"{wanted or REPO} is no folder and did not download, run again: {error}") from None


def download(repo):
    """Fetch OWNER/NAME into the Hub's usual cache, and return its folder there.

    Without a network an earlier copy serves. token=False: a public model needs none, and an expired one that
    this computer keeps would be refused.
    """
    from huggingface_hub import HfApi, snapshot_download        # here, since importing it is slow
    files = [*FILES, "tokenizer_config.json", "chat_template.jinja", "model*.safetensors*"]
    try:                                                        # snapshot_download alone can wait very long
        HfApi().model_info(repo, timeout=4, token=False)
    except Exception:
        with contextlib.suppress(Exception):
            return Path(snapshot_download(repo, allow_patterns=files, local_files_only=True))
        raise
    return Path(snapshot_download(repo, allow_patterns=files, token=False))


def download_qwen(folder):
    """Fetch Qwen3-0.6B into folder, where its files appear when all are complete and right.

    Returns the folder to use: that one, the Hub's cache if that has a copy, or, where the Hub can't be
    reached, the bundled model's.
    """
    from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache
    # A cached copy is not hashed: 1.5 GB in every run would be slow, and the library checked the files' sizes
    cached = [try_to_load_from_cache(REPO, name, revision=REVISION) for name in FILES]
    if all(isinstance(path, str) for path in cached):
        return Path(cached[0]).parent
    try:                                                        # hf_hub_download alone would try for 23 s
        HfApi().model_info(REPO, revision=REVISION, timeout=4, token=False)
    except Exception as error:                                  # offline, no such host, a proxy refuses, ...
        print(f"Qwen3-0.6B is not here and the Hugging Face Hub can't be reached ({type(error).__name__}: "
              f"{one_line(error)}): the bundled tests/tiny-qwen3 runs.\nTo get the real model by hand, put "
              f"{', '.join(FILES)} of {REPO} into {folder}", file=sys.stderr)
        return folder.parent / "tests/tiny-qwen3"
    if (incoming := folder / ".incoming").exists():             # the library locks a file while it fetches it
        print(f"A download into {folder} began before; if it still runs, this waits for it.", file=sys.stderr)
    for name, sha256 in FILES.items():
        path = Path(hf_hub_download(REPO, name, revision=REVISION, cache_dir=incoming, token=False))
        if sha256 and hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
            path.resolve().unlink()                             # the file itself: path may be a link to it
            raise ValueError(f"{name} came with a wrong SHA-256, and is thrown away")
    for name in FILES:                                          # in order: find_model looks for the last one
        (path.parent / name).resolve().replace(folder / name)
    shutil.rmtree(incoming, ignore_errors=True)
    return folder


def one_line(text):
    """A text or an error as one line of at most 300 characters, without control characters."""
    words = " ".join(str(text).split()) or type(text).__name__
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in words)
    return line if len(line) <= 300 else f"{line[:147]}...{line[-150:]}"    # the end often has the reason


def parse_arguments():
    """The command line's options; one line on stderr and status 2 where they are out of range or conflict."""
    parser = argparse.ArgumentParser("llm_inference.py", formatter_class=argparse.RawDescriptionHelpFormatter,
                                     description="Continue a text with a Qwen3 or Llama.", epilog="""examples:
  python llm_inference.py "The capital of France is"
  python llm_inference.py "Once upon a time" --temperature 0.8 --seed 1
  python llm_inference.py - --model tests/tiny-qwen3 < prompt.txt""")
    parser.error = lambda message: parser.exit(2, f"llm_inference.py: {one_line(message)} (--help shows the "
                                               "options; -- comes before a prompt that begins with a dash)\n")
    add, mode = parser.add_argument, parser.add_mutually_exclusive_group().add_argument
    add("prompt", nargs="?", metavar="PROMPT", help='"-" reads stdin (default: "The capital of France is")')
    add("--model", help="a folder, or OWNER/NAME on the Hugging Face Hub (default: Qwen3-0.6B)")
    add("--max-tokens", type=int, metavar="N", help="add up to N tokens (default: 100; context/4 in a chat)")
    add("--temperature", type=float, metavar="T", default=0.0, help="0 (default): the likeliest token")
    add("--top-p", type=float, metavar="P", default=0.95, help="draw from the fewest tokens that add up to P")
    add("--seed", type=int, metavar="S", default=time.time_ns(), help="a number that repeats the same draws")
    add("--quantize", type=int, choices=(4, 8), help="round the weights to so many bits")
    add("--kernels", choices=KINDS, help="the functions that compute: fused is for a GPU, numpy for a CPU")
    mode("--chat", action="store_true", help="answer the prompt, or questions typed one after another")
    add("--system", metavar="TEXT", help="what the model is told before a chat")
    add("--think", action="store_true", help="let the model think before it answers in a chat")
    mode("--explain", action="store_true", help="show what happens to the prompt in each of the nine steps")
    mode("--trace", action="store_true", help="show each call of the functions in one decode pass")
    args, others = parser.parse_known_args()
    if len(others) == 1 and args.prompt is None and others[0][:2] != "--":      # so "-x" is a prompt
        args.prompt, others = others[0], []
    wrong = [message for message, well in {
        f"unrecognized arguments: {' '.join(others)} (a prompt of several words needs quotes)": not others,
        "--max-tokens must be at least 1": args.max_tokens is None or args.max_tokens > 0,
        "--temperature must be at least 0, and finite": 0 <= args.temperature < math.inf,
        "--top-p must be above 0 and up to 1": 0 < args.top_p <= 1,
        "--seed must be from 0 to 2**64 - 1": 0 <= args.seed < 2**64,
        "--system and --think go with --chat": args.chat or args.system is None and not args.think
    }.items() if not well]
    return parser.error(wrong[0]) if wrong else args


def complete(folder, prompt, max_tokens, temperature, top_p):
    """Print the prompt with its continuation, each token as it is made, and how long that took."""
    ids = check_prompt(encode(prompt), max_tokens)
    # The Hub's cache has models--OWNER--NAME/snapshots/COMMIT
    name = folder.parts[-3].split("--")[-1] if folder.parent.name == "snapshots" else folder.resolve().name
    print(f"Model:  {one_line(name)}  ({N_LAYERS} layers, {D_MODEL} dim, {N_HEADS} Q heads, {N_KV} KV heads)")
    print(f"Prompt: {prompt}\n{'-' * 60}", flush=True)
    times, pieces = [time.perf_counter()], stream(ids, [None] * N_LAYERS, 0, max_tokens, temperature, top_p)
    print(f"Output: {prompt}{next(pieces, '')}", end="", flush=True)    # '' if an end token comes first
    times.append(time.perf_counter())                           # after the start, when each piece came
    for piece in pieces:
        print(piece, end="", flush=True)
        times.append(time.perf_counter())
    # stream may end with one more piece than tokens
    n, prefilled, decoded = min(len(times) - 2, max_tokens - 1), times[1] - times[0], times[-1] - times[1]
    print(f"\nTime:   {prefilled + decoded:.2f}s  "
          f"(prefill {len(ids)} tokens: {len(ids) / prefilled:.0f} tokens/s, "
          f"decode {n} tokens: {n / decoded if n else 0:.0f} tokens/s)", flush=True)


def main():
    """Run the program. Errors are exceptions, which are printed in one line at the end of the file."""
    args = parse_arguments()
    refuse(None in (sys.stdin, sys.stdout, sys.stderr), "stdin, stdout or stderr is closed")
    with contextlib.suppress(AttributeError):                   # a notebook's have no reconfigure
        sys.stdout.reconfigure(errors="replace")                # for letters that a terminal does not have
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")       # chat refuses bad lines
    prompt = "The capital of France is" if args.prompt is None else args.prompt
    if prompt == "-":                                           # all of stdin, but for one newline at its end
        prompt = re.sub("\r?\n\\Z", "", sys.stdin.buffer.read().decode(errors="surrogateescape"))
    refuse(re.search("[\ud800-\udfff]", f"{prompt}{args.system}"), "the prompt or --system is not UTF-8 text")
    if "np" in globals():
        np.seterr(all="ignore")                                 # check_finite reports what is not finite
    use_kernels(args.kernels or kernels)
    load_model(folder := find_model(args.model), quantize=args.quantize)
    mx.random.seed(args.seed)
    if args.explain or args.trace:
        return explain(prompt) if args.explain else trace(prompt)
    options = args.max_tokens or (MAX_POSITIONS // 4 if args.chat else 100), args.temperature, args.top_p
    if not args.chat:
        return complete(folder, prompt, *options)
    check_chat_form(folder)
    all_well = chat(typed_lines() if args.prompt is None else [prompt], args.system, args.think, *options)
    if not all_well and (args.prompt is not None or not sys.stdin.isatty()):
        sys.exit(1)


if __name__ == "__main__":
    status = 0
    try:
        main()
        sys.stdout.flush()
    except BaseException as error:                              # a Rust panic is not an Exception
        status = {SystemExit: getattr(error, "code", 1), KeyboardInterrupt: 130}.get(type(error), 1)
        if not isinstance(error, (SystemExit, KeyboardInterrupt, BrokenPipeError)):     # | head closes a pipe
            print(f"llm_inference.py: {one_line(error)}", file=sys.stderr, flush=True)
    try:
        sys.stdout.flush()
    except (AttributeError, OSError):                           # else Python would flush again and complain
        status = status or 1
        with contextlib.suppress(AttributeError, OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if status:
        sys.exit(status)
