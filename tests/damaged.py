"""Changes to a checkpoint's files, and what load_model must make of them: a refusal, or the right logits."""
import contextlib
import json

import llm_inference as llm
import mlx.core as mx
import numpy as np
import pytest

OMIT = object()                                         # as a field's new value: leave the field out
IDS = [72, 105, 258, 0, 271]
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
Q_PROJ, EMBEDDING = "model.layers.1.self_attn.q_proj.weight", "model.embed_tokens.weight"


def configure(folder, file="config.json", **fields):
    """Change fields of a JSON file in a folder; returns the folder."""
    config = json.loads((folder / file).read_text(encoding="utf-8")) | fields
    (folder / file).write_text(json.dumps({k: v for k, v in config.items() if v is not OMIT}))
    return folder


def stored(folder):
    """{name: array} of a folder's file of weights, read whole, so that the file may be written anew."""
    weights = mx.load(str(folder / WEIGHTS))
    mx.eval(weights)
    return weights


def store(folder, tensors, drop=()):
    """Add or replace tensors in a folder's file of weights, or leave some out; returns the folder."""
    weights = {name: w for name, w in (stored(folder) | tensors).items() if name not in drop}
    mx.save_safetensors(str(folder / WEIGHTS), weights)
    return folder


def logits():
    return np.array(llm.forward(IDS, [None] * llm.N_LAYERS, 0))


@contextlib.contextmanager
def unchanged():
    """What happens inside leaves the loaded model as it was: it computes and reads the same."""
    def state():
        return logits().tolist(), llm.encode("Hi, 日本<|im_end|>"), llm.EOS_IDS, llm.MAX_POSITIONS, llm.kernels

    before = state()
    yield
    assert state() == before


def refused(folder, *words, **options):
    """load_model ends in one line that holds these words, and the model loaded before is still whole."""
    with unchanged(), pytest.raises((ValueError, OSError)) as caught:
        llm.load_model(folder, **options)
    message = str(caught.value).replace(str(folder.parent), "")
    assert len(message.splitlines()) == 1 and all(str(word) in message for word in words), message
    return message


def accepted(folder, like):
    """load_model takes the folder, and the model computes what the folder "like" does."""
    llm.load_model(like)
    wanted = logits()
    llm.load_model(folder)
    assert np.array_equal(logits(), wanted)
    return True
