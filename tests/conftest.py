"""What all tests share: the program to import or run, no network, one copy of every random checkpoint."""
import functools
import gc
import io
import os
import sys
from pathlib import Path
from unittest import mock

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"                      # before huggingface_hub can be imported; children inherit it
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")      # matrices are small here: threads would only wait
os.environ["MLX_ENABLE_TF32"] = "0"                     # on some GPUs float32 products would keep 11 bits of 24
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import checkpoints                                      # noqa: E402
import llm_inference as llm                             # noqa: E402
import numpy as np                                      # noqa: E402
from checkpoints import CHECKPOINTS, make_checkpoint    # noqa: E402

gc.freeze()                                             # what is imported stays: never look through it again
gc.set_threshold(100_000, 50, 50)


def pytest_configure(config):
    """A RuntimeWarning, as of NumPy's division by 0, is an error, and so is a use of what Python deprecates."""
    for warning in ("RuntimeWarning", "DeprecationWarning:llm_inference", "DeprecationWarning:__main__"):
        config.addinivalue_line("filterwarnings", f"error::{warning}")


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory):
    """A function from a checkpoint's name, random or tiny-qwen3, to its folder."""
    made = {"tiny-qwen3": HERE / "tiny-qwen3"}

    def get(name):
        if name not in made:
            made[name] = make_checkpoint(tmp_path_factory.mktemp("checkpoints") / name, name)
        return made[name]

    return get


@pytest.fixture(scope="session")
def load(folder_of):
    """A function that loads a checkpoint by its name, in float32 or another type, and returns its folder.

    Its files are read once. Tests of loading call load_model themselves.
    """
    def put(name, dtype=llm.mx.float32):
        checkpoints.load(folder_of(name), dtype)
        return folder_of(name)

    yield put
    for (folder, dtype), (weights, _, tokenizer) in checkpoints.LOADED.items():     # no test has changed them
        llm.load_model(folder, dtype)
        assert weights.keys() == llm.W.keys() and tokenizer == llm.tok.to_str(), folder
        assert all(llm.mx.array_equal(*map(llm.mx.array, (weights[name], llm.W[name]))) for name in weights), folder


@pytest.fixture(params=[*CHECKPOINTS, "tiny-qwen3"])
def name(request, load):
    """Every checkpoint in turn, loaded in float32."""
    load(request.param)
    return request.param


@pytest.fixture
def tiny(load):
    """tests/tiny-qwen3, loaded in float32; its folder."""
    return load("tiny-qwen3")


@functools.cache
def compiled(text):
    return compile(text, "llm_inference.py", "exec")


@pytest.fixture
def program(capfd):
    """A function that runs llm_inference.py as a program: arguments and stdin to (status, stdout, stderr).

    The file runs from its first line to its last, with variables of its own, but in this process: a new one
    would take half a second to import its libraries. Tests of processes, signals and terminals start one.
    """
    def run(*args, stdin=b"", encoding="utf-8", file=Path(llm.__file__)):
        given, out, err = (io.TextIOWrapper(io.BytesIO(data), encoding, errors) for data, errors in [
            (stdin, "strict"), (b"", "strict"), (b"", "backslashreplace")])
        argv, status = ["llm_inference.py", *map(os.fsdecode, args)], 0
        text, names = file.read_text(encoding="utf-8"), {"__name__": "__main__", "__file__": str(file)}
        stdout = os.dup(1)
        with mock.patch.multiple(sys, argv=argv, stdin=given, stdout=out, stderr=err), np.errstate():
            try:
                exec(compiled(text), names)
            except SystemExit as left:
                status = left.code or 0
            finally:
                os.dup2(stdout, 1)                      # after an error the program has put os.devnull in its place
                os.close(stdout)
            out.flush(), err.flush()
        past = capfd.readouterr()                       # what libraries write without Python
        said = [stream.buffer.getvalue().decode(stream.encoding) for stream in (out, err)]
        return status, said[0] + past.out, said[1] + past.err

    return run


@pytest.fixture(autouse=True)
def kernels_are_put_back():
    """A test that chooses kernels, or loads a model that needs others, changes nothing for the next one."""
    wanted = llm.wanted_kernels
    yield
    if any(isinstance(w, tuple) for w in llm.W.values()):
        llm.W.clear()                                   # packed weights that only the fused kernels can use
    llm.use_kernels(wanted)
