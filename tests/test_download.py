"""The download of the real model, tried on a server that speaks the Hub's protocol on this machine (hub.py).

The program is a copy, in a folder like a fresh clone's, with the SHA-256 values of a small random checkpoint
in the place of Qwen3-0.6B's, and another random checkpoint in the place of tests/tiny-qwen3.
"""
import hashlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import llm_inference as llm
from checkpoints import make_checkpoint
from hub import serve

REAL, BUNDLED = "Model:  Qwen3-0.6B  (5 layers", "Model:  tiny-qwen3  (2 layers"    # the first thing printed
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """{name: bytes} of what the server holds: a checkpoint, and a file that nobody wants.

    huggingface_hub writes 10 MB at a time, so it takes more than 20 MB for half a file to be kept. The
    weights are 0.5 MB, and the rest is blanks at the end of the header, as safetensors allows.
    """
    folder = make_checkpoint(tmp_path_factory.mktemp("hub") / "real", "untied", num_hidden_layers=5)
    (folder / "generation_config.json").write_text('{"eos_token_id": [258, 256]}')
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "README.md").write_text("A model.")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    end = 8 + int.from_bytes(files[WEIGHTS][:8], "little")
    header = files[WEIGHTS][8:end] + b" " * 25_000_000
    return files | {WEIGHTS: len(header).to_bytes(8, "little") + header + files[WEIGHTS][end:]}


@pytest.fixture
def clone(tmp_path, files):
    """A folder with the program, its Qwen3-0.6B/ as git has it, and a bundled checkpoint."""
    make_checkpoint(tmp_path / "tests/tiny-qwen3", num_hidden_layers=2)
    (tmp_path / "Qwen3-0.6B").mkdir()
    (tmp_path / "Qwen3-0.6B/config.json").write_bytes(files["config.json"])
    text, count = re.subn(r'"([\w.]+)": "[0-9a-f]{64}"',
                          lambda m: f'"{m[1]}": "{hashlib.sha256(files[m[1]]).hexdigest()}"',
                          Path(llm.__file__).read_text(encoding="utf-8"))
    assert count == 3 and text.count("timeout=4") == 1
    text = text.replace("timeout=4", "timeout=1")       # a silent Hub is waited for as long, and no test need be
    (tmp_path / "llm_inference.py").write_text(text, encoding="utf-8")
    yield tmp_path
    shutil.rmtree(tmp_path / "Qwen3-0.6B", ignore_errors=True)


@pytest.fixture
def hub(files):
    with serve(files) as server:
        yield server


def start(clone, endpoint, *args):
    """The program in that folder, started, with the Hub at that address."""
    gone = {"HF_HUB_OFFLINE", "HF_TOKEN", "HF_HUB_DISABLE_PROGRESS_BARS"}
    env = {k: v for k, v in os.environ.items() if k not in gone and not k.lower().endswith("_proxy")}
    env |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(clone / "home"), "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1"}
    command = [sys.executable, str(clone / "llm_inference.py"), "--max-tokens", "2", *args]
    return subprocess.Popen(command, cwd=clone, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            encoding="utf-8")


def run(clone, endpoint, *args, within=20):
    """(status, stdout, lines of stderr without progress bars) of the program."""
    process = start(clone, endpoint, *args)
    try:
        out, err = process.communicate(timeout=within)
    finally:
        process.kill()
    lines = [line for line in err.splitlines() if line.strip() and not re.search(r"\d+%\|| B/s|\dit/s", line)]
    return process.returncode, out, lines


def refused(result, *words):
    """Status 1, nothing on stdout, no traceback, and as the last line on stderr one with these words."""
    status, out, err = result
    assert status == 1 and out == "" and err, result
    assert err[-1].startswith("llm_inference.py: ") and all(word in err[-1] for word in words), err
    assert not any("Traceback" in line for line in err), err
    return True


def fell_back(result, clone):
    """Two lines on stderr, and the bundled model's answer."""
    status, out, err = result
    assert status == 0 and out.startswith(BUNDLED), result
    assert len(err) == 2 and "can't be reached" in err[0] and "tests/tiny-qwen3" in err[0], err
    assert "by hand" in err[1] and WEIGHTS in err[1] and str(clone / "Qwen3-0.6B") in err[1], err
    return True


def resumed(hub):
    """The server was asked for the end of the weights, and never for the whole."""
    ranges = [wanted for method, name, wanted in hub.asked if method == "GET" and name == WEIGHTS]
    assert ranges and all(wanted and int(wanted[6:-1]) >= 10_000_000 for wanted in ranges), hub.asked
    return True


def present(clone, name=WEIGHTS):
    return (clone / "Qwen3-0.6B" / name).exists()


def test_a_good_download_runs_and_is_not_asked_for_again(clone, hub, files):
    status, out, err = run(clone, hub.url)
    assert status == 0 and out.startswith(REAL), (out, err)
    wanted = {*files} - {"README.md", "tokenizer_config.json"}     # the four that the program reads
    assert {name for _, name, _ in hub.asked} == wanted | {"api"}
    assert {path.name for path in (clone / "Qwen3-0.6B").iterdir() if path.is_file()} == wanted
    assert all((clone / "Qwen3-0.6B" / name).read_bytes() == files[name] for name in wanted)
    hub.asked.clear()
    assert run(clone, hub.url)[1].startswith(REAL) and hub.asked == []


def test_two_at_once_do_no_harm(clone, hub, files):
    """One downloads; the other, if it comes before that is done, says that it can't."""
    results = []
    for process in [start(clone, hub.url), start(clone, hub.url)]:
        out, err = process.communicate(timeout=20)
        results.append((process.returncode, out, err.splitlines()))
    assert any(status == 0 and out.startswith(REAL) for status, out, _ in results), results
    assert all(status == 0 or refused((status, out, err), ".lock") for status, out, err in results)
    assert all((clone / "Qwen3-0.6B" / name).read_bytes() == files[name] for name in llm.FILES)
    assert not (clone / "Qwen3-0.6B/.incoming").exists() and run(clone, hub.url)[1].startswith(REAL)


def test_a_download_that_is_cut_off_says_so_and_goes_on_next_time(clone, hub, files):
    hub.cut[WEIGHTS] = len(files[WEIGHTS]) // 2
    assert refused(run(clone, hub.url), llm.REPO, "run again") and not present(clone)
    hub.cut, hub.status = {}, 200
    hub.asked.clear()
    status, out, err = run(clone, hub.url)
    assert status == 0 and out.startswith(REAL), err
    assert resumed(hub)


def test_ctrl_c_ends_a_download_at_once_and_it_goes_on_next_time(clone, hub, files):
    hub.stall[WEIGHTS] = len(files[WEIGHTS]) // 2
    process = start(clone, hub.url)
    try:
        deadline = time.time() + 15
        while not any(path.stat().st_size > 10_000_000 for path in (clone / "Qwen3-0.6B").rglob("*")):
            assert time.time() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)                  # as it waits for the rest
        out, err = process.communicate(timeout=3)
    finally:
        process.kill()
    assert process.returncode in (130, -signal.SIGINT) and out == "" and "Traceback" not in err, err
    assert not present(clone)
    hub.stall = {}
    hub.asked.clear()
    assert run(clone, hub.url)[1].startswith(REAL)
    assert resumed(hub)


@pytest.mark.parametrize("name", [WEIGHTS])
def test_a_tampered_file_is_not_used_and_the_next_download_is_right(clone, hub, files, name):
    hub.files[name] = files[name][:-9] + b"tampered "
    assert refused(run(clone, hub.url), name, "SHA-256") and not present(clone)
    hub.files[name] = files[name]
    assert run(clone, hub.url)[1].startswith(REAL)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", WEIGHTS])
def test_a_file_that_the_hub_lacks_is_an_error_that_names_it(clone, hub, name):
    del hub.files[name]
    assert refused(run(clone, hub.url), name) and not present(clone)


@pytest.mark.parametrize("fault", [{"status": 500}, {"status": 404}, {"garbage": True}, {"silent": True}],
                         ids=["500", "404", "garbage", "silence"])
def test_a_hub_that_does_not_answer_as_one_is_said_and_the_bundled_model_runs(clone, hub, fault):
    vars(hub).update(fault)
    began = time.time()
    assert fell_back(run(clone, hub.url), clone) and time.time() - began < 10


def test_without_a_network_the_bundled_model_runs_at_once(clone):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))                       # and not listened to: connections are refused
        began = time.time()
        assert fell_back(run(clone, f"http://127.0.0.1:{closed.getsockname()[1]}"), clone)
        assert time.time() - began < 5


def test_a_folder_that_cannot_be_written_is_an_error_that_names_it(clone, hub):
    folder = clone / "Qwen3-0.6B"
    (folder / "config.json").unlink()
    folder.rmdir()
    folder.write_text("a file, where the folder should be")
    assert refused(run(clone, hub.url), "Qwen3-0.6B")
    assert folder.read_text() == "a file, where the folder should be"
    if os.geteuid():                                        # root may write anywhere
        folder.unlink()
        folder.mkdir(mode=0o500)
        assert refused(run(clone, hub.url), "Qwen3-0.6B")


def test_an_explicit_model_is_never_replaced_and_the_hub_never_asked(clone, hub):
    bad = clone / "mine"
    assert refused(run(clone, hub.url, "--model", str(bad)), "mine")
    bad.mkdir()
    assert refused(run(clone, hub.url, "--model", str(bad)), "mine")
    assert run(clone, hub.url, "--model", str(clone / "tests/tiny-qwen3"))[1].startswith(BUNDLED)
    assert hub.asked == []
