"""Where a model comes from: folders, the Hub's cache, the Hub (hub.py speaks its protocol on this machine).

The program is a copy, in a folder like a fresh clone's, with the SHA-256 values of a small random checkpoint
in the place of Qwen3-0.6B's, and another random checkpoint in the place of tests/tiny-qwen3.
"""
import contextlib
import hashlib
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest

import llm_inference as llm
from checkpoints import make_checkpoint
from hub import TOKEN, serve

REAL, BUNDLED = "Model:  Qwen3-0.6B  (5 layers", "Model:  tiny-qwen3  (2 layers"    # the first thing printed
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """{name: bytes} of what the server holds: a checkpoint, and files that nobody wants."""
    folder = make_checkpoint(tmp_path_factory.mktemp("hub") / "real", "untied", num_hidden_layers=5)
    (folder / "generation_config.json").write_text('{"eos_token_id": [258, 256]}')
    for unwanted in ("README.md", "pytorch_model.bin", "onnx/model.safetensors"):
        (folder / unwanted).parent.mkdir(exist_ok=True)
        (folder / unwanted).write_text("Nobody wants this.")
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.*"))}


@pytest.fixture(scope="module")
def bundled(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("bundled") / "tiny", num_hidden_layers=2)


@pytest.fixture
def clone(tmp_path, files, bundled, home):
    """A folder with the program, its Qwen3-0.6B/ as git has it, and a bundled checkpoint."""
    shutil.rmtree(home / "hub", ignore_errors=True)
    shutil.copytree(bundled, tmp_path / "tests/tiny-qwen3")
    (tmp_path / "Qwen3-0.6B").mkdir()
    (tmp_path / "Qwen3-0.6B/config.json").write_bytes(files["config.json"])
    text, count = re.subn(r'"([\w.]+)": "[0-9a-f]{64}"',
                          lambda m: f'"{m[1]}": "{hashlib.sha256(files[m[1]]).hexdigest()}"',
                          Path(llm.__file__).read_text(encoding="utf-8"))
    assert count == 3
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
    """The environment of the program with that folder as its home, the Hub at that address, and more in it.

    The user's token has expired, and a Hub that says nothing is waited for as short as the library can.
    """
    env = {name: os.environ[name] for name in ("PATH", "SYSTEMROOT", "TMPDIR", "TEMP") if name in os.environ}
    return env | {
        "HF_ENDPOINT": endpoint, "HF_HOME": str(home / "hub"), "HOME": str(home), "HF_TOKEN": "hf_expired",
        "HF_HUB_ETAG_TIMEOUT": "1", "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1", "OPENBLAS_NUM_THREADS": "1", **more}


@pytest.fixture
def start(clone, home, hub):
    """A function that starts the program in the clone as a process.

    What started the tests may have told their children to ignore Ctrl-C: this process heeds it.
    """
    def start():
        heed = None if os.name == "nt" else lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
        command = [sys.executable, str(clone / "llm_inference.py"), "--max-tokens", "2"]
        return subprocess.Popen(command, cwd=clone, env=environment(home, hub.url), stdin=subprocess.DEVNULL,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", preexec_fn=heed)
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
def library(home, hub, libraries, monkeypatch):
    """A function that gives a context in which huggingface_hub is that of an environment."""
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: sleep(min(seconds, 0.02)))   # a second before it tries again

    @contextlib.contextmanager
    def library(**more):
        wanted = environment(home, hub.url, **more)
        key = str(wanted | {"HF_TOKEN": ""})                        # which the library reads when it needs it
        sys.modules.update(libraries.get(key, {}))
        logging.getLogger("huggingface_hub").handlers.clear()       # they hold another test's stderr
        with mock.patch.dict(os.environ, wanted, clear=True):
            yield
        libraries[key] = take_out_the_library()

    return library


@pytest.fixture
def run(clone, library, program, monkeypatch):
    """A function that runs the program in the clone, in this process, and returns what finish does."""
    monkeypatch.chdir(clone)

    def run(*args, **more):
        with library(**more):
            status, out, err = program("--max-tokens", "2", *args, file=clone / "llm_inference.py")
        return status, out, lines(err)

    return run


def works(result):
    """Status 0, the real model's answer, and nothing on stderr."""
    status, out, err = result
    assert status == 0 and out.startswith(REAL) and err == [], result
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


def fetched(hub):
    """The names of the files whose bytes were asked for; what was asked before is forgotten."""
    names = {name for method, name, _ in hub.asked if method == "GET"} - {"api"}
    hub.asked.clear()
    return names


def present(clone):
    """Which of the files that the program knows are in the folder, beside git's config.json."""
    return [name for name in llm.FILES if (clone / "Qwen3-0.6B" / name).is_file() and name != "config.json"]


def wait_for(condition):
    deadline = time.time() + 15
    while not condition():
        assert time.time() < deadline
        time.sleep(0.02)


# ---- Qwen3-0.6B, into its folder ---------------------------------------------------------------------------
def test_a_good_download_runs_and_is_not_asked_for_again(clone, hub, files, run, start):
    """Without a folder to begin with, from a Hub that tells no sizes; nobody learns the user's token."""
    shutil.rmtree(clone / "Qwen3-0.6B")
    hub.sizes = False
    assert works(finish(start()))
    assert set(hub.tokens) == {None}
    assert {name for _, name, _ in hub.asked} == {*llm.FILES, "api"}        # each in the model's root
    found = {path.name for path in (clone / "Qwen3-0.6B").iterdir() if not path.name.startswith(".")}
    assert found == {*llm.FILES}
    assert all((clone / "Qwen3-0.6B" / name).read_bytes() == files[name] for name in llm.FILES)
    hub.asked.clear()
    assert works(run()) and hub.asked == []


def test_a_connection_that_breaks_is_made_again(clone, hub, files, run):
    hub.cut[WEIGHTS], hub.then = len(files[WEIGHTS]) // 2, 200
    status, out, _ = run()                              # the library says on stderr that it tries again
    assert status == 0 and out.startswith(REAL) and not hub.cut
    assert (clone / "Qwen3-0.6B" / WEIGHTS).read_bytes() == files[WEIGHTS]


def test_a_download_that_is_cut_off_says_so_and_the_next_fetches_what_is_missing(clone, hub, files, run):
    """It ends with an error: the bundled model is not for this."""
    hub.cut[WEIGHTS] = len(files[WEIGHTS]) // 2
    assert refused(run(), "503") and WEIGHTS not in present(clone)
    hub.mend()
    hub.asked.clear()
    assert works(run()) and fetched(hub) == {WEIGHTS, "tokenizer.json"}         # which comes after it


def test_ctrl_c_ends_a_download_at_once_and_the_next_is_right(clone, hub, files, run, start):
    hub.stall[WEIGHTS] = len(files[WEIGHTS]) // 2
    process = start()
    wait_for(lambda: ("GET", WEIGHTS, None) in hub.asked)
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)                  # as it waits for the rest
    assert finish(process, within=3) == (130, "", []) and WEIGHTS not in present(clone)
    hub.stall = {}
    assert works(run()) and (clone / "Qwen3-0.6B" / WEIGHTS).read_bytes() == files[WEIGHTS]


def test_a_tampered_file_is_thrown_away_and_the_next_download_is_right(clone, hub, run):
    """Each in turn of those whose SHA-256 is known, of the same size; also if the Hub says the right SHA-256."""
    right = dict(hub.files)
    for name in [name for name, sha256 in llm.FILES.items() if sha256]:
        (clone / "Qwen3-0.6B" / name).unlink(missing_ok=True)
        hub.files[name] = right[name][:-9] + b"tampered "
        hub.named = {name: right[name]} if name == "tokenizer.json" else {}
        assert refused(run(), name, "SHA-256") and not (clone / "Qwen3-0.6B" / name).exists()
        hub.files[name] = right[name]
    hub.asked.clear()
    assert works(run()) and fetched(hub) == {WEIGHTS, "tokenizer.json"}


def test_a_file_that_the_hub_lacks_or_that_has_no_place_is_named_and_the_next_download_is_right(clone, hub, files, run):
    del hub.files[WEIGHTS]
    assert refused(run(), WEIGHTS)
    hub.files = dict(files)
    (clone / "Qwen3-0.6B/generation_config.json").unlink()
    (clone / "Qwen3-0.6B/generation_config.json").mkdir()
    assert refused(run(), "generation_config.json")
    (clone / "Qwen3-0.6B/generation_config.json").rmdir()
    assert works(run())


def test_a_disk_that_is_full_is_said_and_the_next_download_is_right(clone, run, start):
    resource = pytest.importorskip("resource")          # a file of no more than 300 kB stands for it
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
    try:
        process = start()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert refused(finish(process), "too large") and WEIGHTS not in present(clone)
    assert works(run())


def test_a_folder_that_cannot_be_written_is_an_error_that_names_it(clone, run):
    folder = clone / "Qwen3-0.6B"
    shutil.rmtree(folder)
    folder.write_text("a file, where the folder should be")
    assert refused(run(), "Qwen3-0.6B")
    assert folder.read_text() == "a file, where the folder should be"
    if os.geteuid():                                    # root may write anywhere
        folder.unlink()
        folder.mkdir(mode=0o500)
        assert refused(run(), "Qwen3-0.6B")


# ---- the Hub can't be asked --------------------------------------------------------------------------------
def test_a_hub_that_does_not_answer_as_one_is_said_and_the_bundled_model_runs(clone, hub, run):
    """The reason is told in the library's own words."""
    for words, fault in [("500", {"status": 500}), ("404", {"status": 404}), ("Expecting value", {"garbage": True})]:
        hub.mend()
        vars(hub).update(fault)
        assert fell_back(run(), clone, words)
    with hub.gone():
        assert fell_back(run(), clone, "refused")
    assert fell_back(run(ALL_PROXY="socks5://127.0.0.1:9"), clone, "socks")
    assert fetched(hub) == set()


def test_how_long_a_slow_hub_is_waited_for_is_the_library_s_own_setting(clone, hub, run):
    hub.delay = 1.1
    assert fell_back(run(), clone, "timed out")         # as a second is the limit here
    assert works(run(HF_HUB_ETAG_TIMEOUT="3"))


def test_without_a_setting_a_slow_hub_is_waited_for_as_long_as_the_library_does(monkeypatch):
    import huggingface_hub
    asked = []
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *args, **options: asked.append(options) or 1 / 0)
    with pytest.raises(ValueError, match="^someone/something can.t be fetched: division by zero"):
        llm.find_model("someone/something")
    assert asked[0]["timeout"] == huggingface_hub.constants.DEFAULT_ETAG_TIMEOUT


def test_a_model_that_the_hub_does_not_give_is_named_in_one_line(hub, run):
    """With the reason, in the library's own words; no other model runs."""
    (status, _, err) = result = run("--model", "nobody/nothing")
    assert refused(result, "nobody/nothing", "401") and len(err) == 1
    with hub.gone():
        assert refused(run("--model", "nobody/nothing"), "nobody/nothing", "refused")


# ---- whose models need a token -----------------------------------------------------------------------------
@pytest.mark.parametrize("fault", [{"private": 401}, {"private": 403}, {"gated": True}], ids=str)
def test_the_user_s_token_opens_a_model_that_is_not_public(hub, run, fault):
    """It is sent after a first question without it; one that opens nothing is told of in the library's words."""
    vars(hub).update(fault)
    for token, word in [("hf_expired", "401"), ("", "403" if fault == {"private": 403} else "401")]:
        result = run("--model", llm.REPO, HF_TOKEN=token)
        assert refused(result, llm.REPO, word) and "again" not in result[2][-1]
    hub.tokens.clear()
    assert works(run("--model", llm.REPO, HF_TOKEN=TOKEN))
    assert hub.tokens[0] is None and set(hub.tokens) == {None, TOKEN}


# ---- other folders, other models ---------------------------------------------------------------------------
def test_an_explicit_folder_is_never_replaced_and_the_hub_never_asked(clone, bundled, hub, run):
    (clone / "mine").mkdir()
    assert refused(run("--model", "mine"), "mine", "config.json")
    assert run("--model", "tests/tiny-qwen3")[1].startswith(BUNDLED)
    shutil.copytree(bundled, clone / llm.REPO)          # a folder whose name is that of a model on the Hub
    assert run("--model", llm.REPO)[1].startswith("Model:  Qwen3-0.6B  (2 layers")
    assert hub.asked == []


@pytest.mark.parametrize("name", [
    "https://huggingface.co/Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B/", "/Qwen/Qwen3-0.6B", "Qwen3-0.6B-typo",
    "./Qwen/typo", "../typo/x", "a/b/c", "a/b c", "C:\\models\\x", " "])
def test_what_is_no_folder_and_no_owner_and_name_is_said_to_be_neither(name):
    with pytest.raises(ValueError, match="^" + re.escape(name) + " is no folder, and no OWNER/NAME"):
        llm.find_model(name)


def test_owner_and_name_are_fetched_into_the_hub_s_cache_which_the_default_uses_too(clone, home, hub, run):
    assert works(run("--model", llm.REPO)) and not present(clone)
    assert fetched(hub) == {*llm.FILES}                 # and no other file
    for args in [["--model", llm.REPO], []]:            # which then are not asked again
        assert works(run(*args)) and works(run(*args, HF_HUB_OFFLINE="1"))
    assert hub.asked == []
    (cached,) = home.rglob("snapshots/*/tokenizer.json")
    cached.unlink()                                     # a copy that is not complete is not used
    with hub.gone():
        assert fell_back(run(), clone) and refused(run("--model", llm.REPO), llm.REPO)
    hub.asked.clear()
    assert works(run("--model", llm.REPO)) and fetched(hub) <= {"tokenizer.json"}


def test_a_copy_that_another_program_put_into_the_cache_runs_where_there_is_no_network(hub, library, run):
    """It has less than the Hub has, and less than this program would fetch; and a list of all that the Hub has."""
    with library():
        from huggingface_hub import snapshot_download
        snapshot_download(llm.REPO, token=False, allow_patterns=["config.json", "tokenizer.json", "*.safetensors"],
                          ignore_patterns=["onnx/*"])
    hub.asked.clear()
    for args in [["--model", llm.REPO], []]:
        assert works(run(*args, HF_HUB_OFFLINE="1"))
        with hub.gone():
            assert works(run(*args))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A function that puts a file into a snapshot in the Hub's cache, which is otherwise empty."""
    from huggingface_hub import constants
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(llm, "__file__", str(tmp_path / "llm_inference.py"))

    def put(name, content="{}", repo=llm.REPO, revision=llm.REVISION):
        model = tmp_path / "cache" / f"models--{repo.replace('/', '--')}"
        for path, text in [(model / "refs/main", revision), (model / f"snapshots/{revision}/{name}", content)]:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return path.parent

    return put


NEEDED = ["config.json", "tokenizer.json", WEIGHTS]


def test_only_the_pinned_revision_in_the_hub_s_cache_is_used(cache, tmp_path, capsys):
    other = [cache(name, revision="e" * 40) for name in NEEDED][0]
    assert llm.find_model(llm.REPO) == other            # which asks for no revision
    assert llm.find_model() == tmp_path / "tests/tiny-qwen3"
    assert capsys.readouterr().err.count("\n") == 2
    pinned = [cache(name) for name in NEEDED][0]
    assert llm.find_model() == llm.find_model(llm.REPO) == pinned != other


INDEX = '{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}'
SHARDS = ["config.json", "tokenizer.json", "model.safetensors.index.json", *sorted(re.findall(r"model[\w.-]+", INDEX))]


@pytest.mark.parametrize("names", [NEEDED, SHARDS], ids=["one file", "shards"])
def test_a_model_is_there_when_all_that_it_needs_is(cache, tmp_path, names):
    """Beside the program, or in the Hub's cache: no file may be missing, and no shard that the index names."""
    for missing in names:
        folder = [cache(name, INDEX, "someone/something") for name in names][0]
        (folder / missing).unlink()
        with pytest.raises(ValueError, match="^someone/something can.t be fetched: "):
            llm.find_model("someone/something")
    folder = cache(missing, INDEX, "someone/something")
    assert llm.find_model("someone/something") == folder
    beside = tmp_path / "Qwen3-0.6B"
    beside.mkdir()
    for name in names:
        assert llm.find_model() == tmp_path / "tests/tiny-qwen3"
        (beside / name).write_text(INDEX)
    assert llm.find_model() == beside


def test_shards_are_fetched_and_one_that_is_lost_is_fetched_again(clone, home, hub, folder_of, run):
    hub.files = {path.name: path.read_bytes() for path in folder_of("sharded").iterdir()}
    first = run("--model", llm.REPO)
    assert first[0] == 0 and first[1].startswith("Model:  Qwen3-0.6B  (4 layers")
    assert fetched(hub) == {*hub.files}
    (shard,) = home.rglob("snapshots/*/model-00002-of-00003.safetensors")
    shard.resolve().unlink()
    shard.unlink()
    with hub.gone():
        assert refused(run("--model", llm.REPO), llm.REPO)
    assert run("--model", llm.REPO)[0] == 0 and fetched(hub) == {shard.name}


def test_a_repository_without_a_model_says_what_it_lacks(hub, run):
    hub.files = {"README.md": b"Weights in another form.", "model-Q4.gguf": b"GGUF"}
    assert refused(run("--model", llm.REPO), llm.REPO, "config.json")
