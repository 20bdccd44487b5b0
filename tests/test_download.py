"""The download of the real model, tried on a server that speaks the Hub's protocol on this machine (hub.py).

The program is a copy, in a folder like a fresh clone's, with the SHA-256 values of a small random checkpoint
in the place of Qwen3-0.6B's, and another random checkpoint in the place of tests/tiny-qwen3.
"""
import hashlib
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest

import llm_inference as llm
from checkpoints import make_checkpoint
from hub import serve

REAL, BUNDLED = "Model:  Qwen3-0.6B  (5 layers", "Model:  tiny-qwen3  (2 layers"    # the first thing printed
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """{name: bytes} of a checkpoint, and of a file that nobody wants."""
    folder = make_checkpoint(tmp_path_factory.mktemp("hub") / "real", "untied", num_hidden_layers=5)
    (folder / "generation_config.json").write_text('{"eos_token_id": [258, 256]}')
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "README.md").write_text("A model.")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def files(stored, request):
    """{name: bytes} of what the server holds. A test may ask for so many blanks in the weights, of 0.5 MB.

    They are at the end of the header, as safetensors allows.
    """
    end = 8 + int.from_bytes(stored[WEIGHTS][:8], "little")
    header = stored[WEIGHTS][8:end] + b" " * getattr(request, "param", 0)
    return stored | {WEIGHTS: len(header).to_bytes(8, "little") + header + stored[WEIGHTS][end:]}


# huggingface_hub writes 10 MB at a time, so it takes more than 20 MB for half a file to be kept
more_than_20_mb = pytest.mark.parametrize("files", [22_000_000], indirect=True, ids=[""])


@pytest.fixture
def clone(tmp_path, files, home):
    """A folder with the program, its Qwen3-0.6B/ as git has it, and a bundled checkpoint."""
    shutil.rmtree(home / "hub", ignore_errors=True)
    make_checkpoint(tmp_path / "tests/tiny-qwen3", num_hidden_layers=2)
    (tmp_path / "Qwen3-0.6B").mkdir()
    (tmp_path / "Qwen3-0.6B/config.json").write_bytes(files["config.json"])
    text, count = re.subn(r'"([\w.]+)": "[0-9a-f]{64}"',
                          lambda m: f'"{m[1]}": "{hashlib.sha256(files[m[1]]).hexdigest()}"',
                          Path(llm.__file__).read_text(encoding="utf-8"))
    assert count == 3 and text.count("timeout=4") == 2
    text = text.replace("timeout=4", "timeout=1")       # a silent Hub is waited for as long, and no test need be
    (tmp_path / "llm_inference.py").write_text(text, encoding="utf-8")
    yield tmp_path
    shutil.rmtree(tmp_path / "Qwen3-0.6B", ignore_errors=True)


@pytest.fixture(scope="module")
def server():
    with serve({}) as server:
        yield server


@pytest.fixture
def hub(server, files):
    server.begin(files)
    yield server
    server.begin({})                                    # no request waits any longer


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The library's folder: the same in all tests, so that the environment is, and empty when one begins."""
    return tmp_path_factory.mktemp("home")


def environment(home, endpoint, **more):
    """The environment of the program with that folder as its home, the Hub at that address, and more in it."""
    env = {name: os.environ[name] for name in ("PATH", "SYSTEMROOT", "TMPDIR", "TEMP") if name in os.environ}
    return env | {
        "HF_ENDPOINT": endpoint, "HF_HOME": str(home / "hub"), "HOME": str(home), "HF_TOKEN": "hf_expired",
        "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "OPENBLAS_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8", **more}


@pytest.fixture
def start(clone, home):
    """A function that starts the program in the clone as a process."""
    def start(endpoint):
        command = [sys.executable, str(clone / "llm_inference.py"), "--max-tokens", "2"]
        return subprocess.Popen(command, cwd=clone, env=environment(home, endpoint), stdin=subprocess.DEVNULL,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8")
    return start


def lines(text):
    return [line for line in text.splitlines() if line.strip()]


def finish(process, within=20):
    """(status, stdout, lines of stderr) of a program that was started."""
    try:
        out, err = process.communicate(timeout=within)
    finally:
        process.kill()
    return process.returncode, out, lines(err)


def take_out_the_library():
    """Remove huggingface_hub's modules from those that are imported, and return them."""
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "huggingface_hub"}


@pytest.fixture(scope="module")
def libraries():
    """huggingface_hub reads its environment when it is imported: its modules for each environment."""
    before = take_out_the_library()
    yield {}
    sys.modules.update(before)


@pytest.fixture
def run(clone, home, program, monkeypatch, libraries):
    """A function that runs the program in the clone, in this process, and returns what finish does."""
    sleep = time.sleep
    monkeypatch.chdir(clone)
    monkeypatch.setattr(time, "sleep", lambda seconds: sleep(min(seconds, 0.02)))   # a second before it tries again

    def run(endpoint, *args, **more):
        wanted = environment(home, endpoint, **more)
        sys.modules.update(libraries.get(str(wanted), {}))
        logging.getLogger("huggingface_hub").handlers.clear()       # they hold another test's stderr
        with mock.patch.dict(os.environ, wanted, clear=True):
            status, out, err = program("--max-tokens", "2", *args, file=clone / "llm_inference.py")
        libraries[str(wanted)] = take_out_the_library()
        return status, out, lines(err)

    return run


@pytest.fixture(scope="module")
def nowhere():
    """An address where connections are refused."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))                       # and not listened to
        yield f"http://127.0.0.1:{closed.getsockname()[1]}"


def works(result):
    """Status 0, and the real model's answer."""
    status, out, _ = result
    assert status == 0 and out.startswith(REAL), result
    return True


def refused(result, *words):
    """Status 1, nothing on stdout, no traceback, and as the last line on stderr one with these words."""
    status, out, err = result
    assert status == 1 and out == "" and err, result
    assert err[-1].startswith("llm_inference.py: ") and all(word in err[-1] for word in words), err
    assert not any("Traceback" in line for line in err), err
    return True


def fell_back(result, clone, *words):
    """Two lines on stderr, the first with the reason, and the bundled model's answer."""
    status, out, err = result
    assert status == 0 and out.startswith(BUNDLED), result
    assert len(err) == 2 and "can't be reached" in err[0] and "tests/tiny-qwen3" in err[0], err
    assert all(word in err[0] for word in words), (words, err)
    assert "by hand" in err[1] and WEIGHTS in err[1] and str(clone / "Qwen3-0.6B") in err[1], err
    return True


def fetched(hub, name=WEIGHTS):
    """The Range of each request for a file's bytes, None for the whole file; what was asked before is forgotten."""
    ranges = [wanted for method, asked, wanted in hub.asked if method == "GET" and asked == name]
    hub.asked.clear()
    return ranges


def present(clone, *names):
    """Which of the files (by default of all that the program knows) are in the folder, beside git's config.json."""
    return [name for name in names or llm.FILES
            if (clone / "Qwen3-0.6B" / name).is_file() and name != "config.json"]


def wait_for(condition):
    deadline = time.time() + 15
    while not condition():
        assert time.time() < deadline
        time.sleep(0.02)


def test_a_good_download_runs_and_is_not_asked_for_again(clone, hub, files, run, start):
    """Without a folder to begin with, with a token that has expired, from a Hub that tells no sizes."""
    shutil.rmtree(clone / "Qwen3-0.6B")
    hub.sizes = False
    result = finish(start(hub.url))
    assert works(result) and result[2] == []
    assert {name for _, name, _ in hub.asked} == {*llm.FILES, "api"}
    assert {path.name for path in (clone / "Qwen3-0.6B").iterdir()} == {*llm.FILES}
    assert all((clone / "Qwen3-0.6B" / name).read_bytes() == files[name] for name in llm.FILES)
    assert not any(path.is_symlink() for path in (clone / "Qwen3-0.6B").iterdir())
    hub.asked.clear()
    assert works(run(hub.url)) and hub.asked == []


@more_than_20_mb
def test_a_second_program_says_that_it_waits_for_the_first_and_both_run(clone, hub, files, start):
    """And when the first one's connection breaks, it asks for the rest only."""
    half = hub.stall[WEIGHTS] = len(files[WEIGHTS]) // 2
    first = start(hub.url)
    wait_for(lambda: ("GET", WEIGHTS, None) in hub.asked)
    second = start(hub.url)
    try:
        said = second.stderr.readline()                     # at once: the first still waits for its weights
        assert first.poll() is None and "began before" in said and str(clone / "Qwen3-0.6B") in said
        time.sleep(0.3)                                     # for it to reach the weights and wait there
        assert fetched(hub) == [None]
        hub.stall = {}
        assert works(finish(first)) and works(finish(second))
    finally:
        first.kill()
        second.kill()
    ranges = fetched(hub)
    assert ranges and ranges[0] and 0 < int(ranges[0][6:-1]) <= half, ranges
    assert all((clone / "Qwen3-0.6B" / name).read_bytes() == files[name] for name in llm.FILES)


def test_a_download_that_is_cut_off_says_so_and_the_next_fetches_what_is_missing(clone, hub, files, run):
    hub.cut[WEIGHTS] = len(files[WEIGHTS]) // 2
    assert refused(run(hub.url), llm.REPO, "run again") and not present(clone)
    hub.cut, hub.status = {}, 200
    hub.asked.clear()
    assert works(run(hub.url))
    assert {name for method, name, _ in hub.asked if method == "GET"} == {"api", WEIGHTS}
    assert not (clone / "Qwen3-0.6B/.incoming").exists()


@more_than_20_mb
def test_ctrl_c_ends_a_download_at_once_and_the_next_is_right(clone, hub, files, run, start):
    hub.stall[WEIGHTS] = len(files[WEIGHTS]) // 2
    process = start(hub.url)
    wait_for(lambda: any(path.stat().st_size > 10_000_000 for path in (clone / "Qwen3-0.6B").rglob("*")))
    process.send_signal(signal.SIGINT)                      # as it waits for the rest
    status, out, err = finish(process, within=3)
    assert status in (130, -signal.SIGINT) and out == "" and "Traceback" not in "".join(err), err
    assert not present(clone)
    hub.stall = {}
    assert works(run(hub.url)) and not (clone / "Qwen3-0.6B/.incoming").exists()


def test_a_tampered_file_is_thrown_away_and_the_next_download_is_right(clone, hub, run):
    """Each in turn of those whose SHA-256 is known, of the same size; on a system without links, like Windows."""
    right, no_links = dict(hub.files), {"HF_HUB_DISABLE_SYMLINKS": "1"}
    for name in [name for name, sha256 in llm.FILES.items() if sha256]:
        hub.files[name] = right[name][:-9] + b"tampered "
        assert refused(run(hub.url, **no_links), name, "SHA-256", "run again") and not present(clone)
        hub.files[name] = right[name]
    hub.asked.clear()
    assert works(run(hub.url, **no_links))
    assert {name for method, name, _ in hub.asked if method == "GET"} == {"api", WEIGHTS}


def test_a_tampered_file_under_the_right_tag_is_thrown_away_with_the_link_to_it(clone, hub, run):
    right = hub.files["tokenizer.json"]
    hub.named["tokenizer.json"] = right
    hub.files["tokenizer.json"] = right[:-9] + b"tampered "
    assert refused(run(hub.url), "tokenizer.json", "SHA-256") and not present(clone)
    hub.files["tokenizer.json"] = right
    assert works(run(hub.url))


def test_a_file_that_the_hub_lacks_or_that_has_no_place_is_named_and_the_next_download_is_right(
        clone, hub, files, run):
    del hub.files[WEIGHTS]
    assert refused(run(hub.url), WEIGHTS, "run again") and not present(clone)
    hub.files = dict(files)
    (clone / "Qwen3-0.6B/tokenizer.json").mkdir()
    assert refused(run(hub.url), "tokenizer.json", "run again") and not present(clone, WEIGHTS)
    (clone / "Qwen3-0.6B/tokenizer.json").rmdir()
    hub.asked.clear()
    assert works(run(hub.url)) and fetched(hub) == []       # the weights were complete before


def test_a_disk_that_is_full_is_said_and_the_next_download_is_right(clone, hub, run, start):
    resource = pytest.importorskip("resource")              # a file of no more than 300 kB stands for it
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
    try:
        process = start(hub.url)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert refused(finish(process), "too large", "run again") and not present(clone)
    assert works(run(hub.url))


def test_a_hub_that_does_not_answer_as_one_is_said_and_the_bundled_model_runs(clone, hub, nowhere, run):
    """The reason is told in the library's own words."""
    began = time.time()
    for words, fault in [("500", {"status": 500}), ("404", {"status": 404}), ("JSON", {"garbage": True}),
                         ("time", {"silent": True})]:
        vars(hub).update({"status": 200, "garbage": False} | fault)
        assert fell_back(run(hub.url), clone, words)
    assert fell_back(run(nowhere), clone, "refused")
    assert fell_back(run(nowhere.removeprefix("http://")), clone, "protocol")
    assert fell_back(run(nowhere, ALL_PROXY="socks5://127.0.0.1:9"), clone, "socks")
    assert time.time() - began < 10


def test_a_folder_that_cannot_be_written_is_an_error_that_names_it(clone, hub, run):
    folder = clone / "Qwen3-0.6B"
    (folder / "config.json").unlink()
    folder.rmdir()
    folder.write_text("a file, where the folder should be")
    assert refused(run(hub.url), "Qwen3-0.6B")
    assert folder.read_text() == "a file, where the folder should be"
    if os.geteuid():                                        # root may write anywhere
        folder.unlink()
        folder.mkdir(mode=0o500)
        assert refused(run(hub.url), "Qwen3-0.6B")


def test_an_explicit_folder_is_never_replaced_and_the_hub_never_asked(clone, hub, run):
    bad, good = clone / "mine", clone / "tests/tiny-qwen3"
    assert refused(run(hub.url, "--model", "./mine"), "mine", "config.json")     # as a folder, from here
    bad.mkdir()
    assert refused(run(hub.url, "--model", str(bad)), "mine")
    assert run(hub.url, "--model", "tests/tiny-qwen3")[1].startswith(BUNDLED)
    shutil.copytree(good, clone / llm.REPO)                 # a folder whose name is that of a model on the Hub
    assert run(hub.url, "--model", llm.REPO)[1].startswith("Model:  Qwen3-0.6B  (2 layers")
    assert hub.asked == []


def test_owner_and_name_are_fetched_into_the_hubs_cache_which_the_default_uses_too(clone, home, hub, nowhere, run):
    assert works(run(hub.url, "--model", llm.REPO)) and not present(clone)
    assert {name for _, name, _ in hub.asked} == {"api", *llm.FILES, "tokenizer_config.json"}     # no README
    hub.asked.clear()
    hub.silent = True                                       # a Hub that is gone, or never answers: the copy runs
    for endpoint, *args in [(hub.url, "--model", llm.REPO), (nowhere, "--model", llm.REPO), (nowhere,)]:
        result = run(endpoint, *args)
        assert works(result) and result[2] == []
    (cached,) = home.rglob("snapshots/*/tokenizer.json")
    cached.unlink()                                         # a copy that is not complete is not used
    assert fell_back(run(nowhere), clone) and refused(run(nowhere, "--model", llm.REPO), llm.REPO)
    hub.silent = False
    assert works(run(hub.url)) and fetched(hub, "tokenizer.json") == [None]


def test_a_model_that_the_hub_does_not_give_is_named_in_one_line(hub, nowhere, run):
    """With the reason, in the library's own words; a Hub that does not answer is not waited for."""
    began = time.time()
    for endpoint, silent, word in [
            (hub.url, False, "401"), (hub.url, True, "timed out"), (nowhere, False, "refused")]:
        hub.silent = silent
        result = run(endpoint, "--model", "nobody/nothing")
        assert refused(result, "nobody/nothing", word) and len(result[2]) == 1
    assert time.time() - began < 8
