"""Checkpoints that say what a test wants, and five kinds of tokenizers to say it with.

`write_chooser` writes a real checkpoint, one layer of Llama whose attention and feed-forward layer add nothing. The
embedding gives each token a vector of its own, and the head answers that vector with a chosen next token, so the
unchanged program says any chain of tokens, from the command line too. Where a token must be followed by different
ones at different times, `script` puts ids in place of what `sample` would choose.
"""
import json

import llm_inference as llm
import mlx.core as mx
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
LETTERS = {byte: chr(byte) for byte in PRINTABLE}       # how GPT-2's and Qwen3's tokenizers write bytes
LETTERS |= {byte: chr(256 + i) for i, byte in enumerate(b for b in range(256) if b not in LETTERS)}


def write_chooser(folder, tokenizer, then, eos=(), **fields):
    """Write a checkpoint that answers a token with the one that the dict `then` names; returns the folder.

    A token that is not in `then` is answered with the first of the end tokens `eos` (or with 0). `fields` are
    further fields of config.json.
    """
    rows = -(-tokenizer.get_vocab_size() // 32) * 32
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "attention_bias": False,
        "hidden_size": rows, "intermediate_size": 2, "num_hidden_layers": 1, "num_attention_heads": 1,
        "num_key_value_heads": 1, "head_dim": 2, "vocab_size": rows, "max_position_embeddings": 640,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False, "mlp_bias": False,
        "eos_token_id": list(eos)} | fields
    zero, block = mx.zeros((2, rows)), "model.layers.0."
    answers = mx.array([then.get(token, next(iter(eos), 0)) for token in range(rows)])
    weights = {
        "model.embed_tokens.weight": mx.eye(rows), "model.norm.weight": mx.ones(rows),
        "lm_head.weight": (mx.arange(rows)[:, None] == answers).astype(mx.float32),
        f"{block}input_layernorm.weight": mx.ones(rows), f"{block}post_attention_layernorm.weight": mx.ones(rows),
        f"{block}self_attn.o_proj.weight": zero.T, f"{block}mlp.down_proj.weight": zero.T,
        **{f"{block}self_attn.{x}_proj.weight": zero for x in "qkv"},
        **{f"{block}mlp.{x}_proj.weight": zero for x in ("gate", "up")}}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    tokenizer.save(str(folder / "tokenizer.json"))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "pt"})
    return folder


def chain(*ids):
    """A dict for write_chooser, in which each of the ids is answered with the next."""
    assert len(set(ids[:-1])) == len(ids) - 1, "a token can't be answered in two ways: use script"
    return dict(zip(ids, ids[1:]))


def script(monkeypatch, ids):
    """From now on the loaded model says these ids, and then an end token for ever."""
    coming = iter(ids)
    monkeypatch.setattr(llm, "sample", lambda *rest: mx.array(next(coming, min(llm.EOS_IDS, default=0))))


def byte_level():
    """Like Qwen3's: every token is bytes, and some are parts of two characters."""
    pieces = [bytes([i]) for i in range(256)]
    merged = [b"\xe6\x97", b"\xe6\x97\xa5", b"\xa5\xe6", b"a\xe6", b" \xe6", b"\xef\xbf", b"\xef\xbf\xbd", b" the"]
    letters = ["".join(LETTERS[byte] for byte in piece) for piece in pieces + merged]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(["\ufffd", "naïve"])
    tokenizer.add_special_tokens(["<|end|>", "<|begin\u2581of\u2581text|>", "<|x|>"])
    return tokenizer


WORDS = ["\u2581", "\u2581the", "\u2581a", "a", "ll", "é", "日", "\u2581日本", ".", "\ufffd", "\u2581\ufffd", "b"]


def byte_fallback():
    """Like Llama 2's: tokens are whole characters, and each byte of a character without a token is one."""
    vocab = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), *WORDS]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(vocab)}, merges=[], unk_token="<unk>",
                                     byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
                                           decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens(["<s>", "</s>", "<x>"])
    return tokenizer


def unigram():
    """Like T5's: SentencePiece's pieces without bytes, where a space that begins the text is dropped."""
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), *((word, -len(word)) for word in WORDS)], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<s>", "</s>", "<x>"])
    return tokenizer


def word_piece():
    """Like BERT's: a space before each word but the first, none before the rest of a word and some marks."""
    vocab = ["[UNK]", "the", "##ing", "##s", "do", "not", "n't", "'s", "'", ".", ",", "?", "日", "\ufffd", "##\ufffd"]
    tokenizer = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(vocab)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    tokenizer.add_special_tokens(["[CLS]", "[SEP]", "[X]"])
    return tokenizer


def word_level():
    """Whole words, and no decoder: they are joined with spaces."""
    vocab = ["<unk>", "the", "all", "naïve", "日本", ".", "\ufffd", "a\ufffd"]
    tokenizer = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(vocab)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>", "<x>"])
    return tokenizer


TOKENIZERS = {make.__name__: make for make in (byte_level, byte_fallback, unigram, word_piece, word_level)}
