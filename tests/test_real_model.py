"""Qwen3-0.6B itself: its config.json is in the repository, tokenizer and weights are tested where they are."""
import ast
import functools
import json
import math
from pathlib import Path

import llm_inference as llm
import numpy as np
import pytest
from tokenizers import Tokenizer

FOLDER = Path(__file__).resolve().parent.parent / "Qwen3-0.6B"
needs_tokenizer = pytest.mark.skipif(not (FOLDER / "tokenizer.json").exists(),
                                     reason="Qwen3-0.6B/tokenizer.json is not there")
needs_weights = pytest.mark.skipif(not (FOLDER / "model.safetensors").exists(),
                                   reason="Qwen3-0.6B/model.safetensors is not there")


@functools.cache
def real_tokenizer():
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def test_the_constants_at_the_top_of_the_source_are_the_model_s():
    """They stand there as literals, each with Qwen3-0.6B's value, which load_model would put there."""
    constants = llm.read_config(FOLDER)[1]
    assert constants.keys() == {*llm.CONSTANTS, "EOS_IDS"}
    constants["EOS_IDS"] |= {151643}                            # which is in generation_config.json
    source = (FOLDER.parent / "llm_inference.py").read_text(encoding="utf-8")
    literals = {node.targets[0].id: ast.literal_eval(node.value) for node in ast.parse(source).body
                if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") in constants}
    assert {"N_LAYERS", "N_HEADS", "N_KV", "D_HEAD", "EPS", "THETA", "EOS_IDS"} <= literals.keys()
    assert literals == {name: constants[name] for name in literals}


def test_the_expected_tensors_are_the_311_of_the_published_file():
    """310 and lm_head.weight; with the head they take the 1,503,300,328 bytes that it has, less its header."""
    shapes = dict(llm.expected_tensors(llm.read_config(FOLDER)[1], qk_norm=True, own_head=True))
    assert len(shapes) == 311
    parameters = sum(math.prod(shape) for shape in shapes.values())
    assert 0 < 1_503_300_328 - 2 * parameters < 50_000


@needs_tokenizer
@pytest.mark.parametrize("text, ids", [
    ("The capital of France is", [785, 6722, 315, 9625, 374]),
    ("Hello, world!", [9707, 11, 1879, 0]),
    ("12345", [16, 17, 18, 19, 20]),
    ("<|im_end|><|endoftext|>", [151645, 151643])])
def test_token_ids(text, ids):
    tokenizer = real_tokenizer()
    assert tokenizer.encode(text).ids == ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@needs_tokenizer
def test_the_vocabulary_fits_the_embedding():
    tokenizer = real_tokenizer()
    assert tokenizer.get_vocab_size() == 151669
    assert json.loads((FOLDER / "config.json").read_text())["vocab_size"] == 151936


@needs_weights
def test_the_five_most_likely_tokens_are_the_article_s():
    llm.load_model(FOLDER)
    logits = llm.prefill(llm.encode("The capital of France is"), [None] * llm.N_LAYERS)[-1]
    probs = np.array(llm.nucleus(logits, 1.0, 1.0))
    top = np.argsort(-probs)[:5].tolist()
    assert [llm.tok.decode([i]).strip() for i in top[:3]] == ["Paris", "located", "the"]
    assert probs[top] == pytest.approx([0.6582, 0.0274, 0.0233, 0.0157, 0.0136], abs=0.01)


@needs_weights
def test_greedy_text():
    llm.load_model(FOLDER)
    text = llm.generate("The capital of France is", max_tokens=20)
    assert text.startswith("The capital of France is Paris. The capital of Italy is Rome. "
                           "The capital of Spain is Madrid")
