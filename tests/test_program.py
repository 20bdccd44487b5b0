"""The command line, end to end, as a reader runs it: what it prints, its options, and how it ends."""
import contextlib
import errno
import io
import json
import os
import re
import selectors
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer, processors

import llm_inference as llm

ROOT = Path(llm.__file__).resolve().parent
TINY = ["--model", str(ROOT / "tests/tiny-qwen3")]
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}     # of processes


@pytest.fixture
def run(program):
    """A function that runs the program on the bundled checkpoint."""
    return lambda *args, stdin=b"", encoding="utf-8": program(*TINY, *args, stdin=stdin, encoding=encoding)


def output(result):
    """The line with the text, of a run in which all is well."""
    status, out, err = result
    assert (status, err) == (0, ""), result
    return out.splitlines()[3]


@pytest.fixture
def call(tiny, monkeypatch, capsys):
    """A function that runs main of the imported file in this process and returns what it prints."""
    def main(*args):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
        monkeypatch.setattr(sys, "argv", ["llm_inference.py", *TINY, *args])
        try:
            llm.main()
        except SystemExit as left:
            assert not left.code
        return capsys.readouterr().out
    return main


# ---- what it prints ----------------------------------------------------------------------------------------
def test_the_output_is_the_article_s():
    """In a process of its own, which uses nothing that Python is about to drop."""
    command = [sys.executable, "-W", "error::DeprecationWarning:__main__", ROOT / "llm_inference.py", *TINY]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=60)
    assert done.returncode == 0 and done.stderr == ""
    model, prompt, line, text, timing = done.stdout.splitlines()
    sizes = "4 layers, 128 dim, 4 Q heads, 2 KV heads"
    assert re.fullmatch(rf"Model:  tiny-qwen3  \({sizes}, {llm.kernels}: faster .+\)", model)
    assert prompt == "Prompt: The capital of France is"
    assert line == "-" * 60
    assert text.startswith("Output: The capital of France is Paris. The capital of Italy is Rome. "
                           "The capital of Spain is Madrid.")
    assert re.fullmatch(r"Time:   \d+\.\d\ds  \(prefill 5 tokens: \d+ tokens/s, decode \d+ tokens: \d+ tokens/s\)",
                        timing), timing


def test_the_first_line_names_the_functions_that_are_replaced(run):
    said = {kind: run("--kernels", kind, "--max-tokens", "1")[1].splitlines()[0] for kind in llm.KERNELS}
    assert said["numpy"].endswith(" numpy: faster extend_cache and attend)")
    assert said["explicit"].endswith(" explicit)")
    names = re.split(", | and ", said["fused"].partition(" fused: faster ")[2].removesuffix(")"))
    assert names == [*llm.KERNELS["fused"]] and {"attend", "rms_norm", "apply_rope"} <= {*names}


def test_stdin_is_the_prompt_when_it_is_a_dash(run):
    given = run("The capital of Japan is", "--max-tokens", "6")
    piped = run("-", "--max-tokens", "6", stdin=b"The capital of Japan is\n")
    assert output(given) == output(piped) and "Tokyo" in output(piped)


FRANCE = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@pytest.mark.parametrize("prompt", [FRANCE, " The capital of Japan is ", "\n\nOnce\n\n"])
def test_a_prompt_is_the_same_from_stdin_but_for_one_newline_at_its_end(run, prompt):
    """Also if the newline is that of Windows."""
    given = run("--max-tokens", "8", prompt)[1].split("Time:")[0]
    for newline in ("\n", "\r\n"):
        assert run("--max-tokens", "8", "-", stdin=(prompt + newline).encode())[1].split("Time:")[0] == given
    assert prompt != FRANCE or "The capital of France is Paris." in given


def test_max_tokens_is_the_number_of_tokens(run):
    tokenizer = Tokenizer.from_file(str(ROOT / "tests/tiny-qwen3/tokenizer.json"))
    result = run("--max-tokens", "3")
    assert "decode 2 tokens" in result[1]               # the first of three is prefill's
    ids = tokenizer.encode("The capital of France is Paris. The capital of Italy is Rome.").ids
    assert output(result) == "Output: " + tokenizer.decode(ids[:8])
    assert "decode 0 tokens: 0 tokens/s" in run("--max-tokens", "1")[1]


@pytest.mark.parametrize("options", ["", "--temperature 0.9 --seed 5"], ids=["greedy", "drawn"])
def test_all_kernels_say_the_same(run, options):
    """One seed draws the same text in all three sets."""
    texts = {output(run("Once", *options.split(), "--kernels", kind, "--max-tokens", "20")) for kind in llm.KERNELS}
    assert len(texts) == 1


@pytest.mark.parametrize("encoding", ["utf-8", "cp1252", "ascii"])
@pytest.mark.parametrize("text", ["日本 🦀 Łódź", "naïve\tcafé", "ends with a newline\n\nin the middle"])
def test_text_of_any_kind_goes_through_pipes_as_utf_8(run, text, encoding):
    """Whatever PYTHONIOENCODING or the system's code page says."""
    for args, stdin in [([text], b""), (["-"], text.encode())]:
        status, out, err = run(*args, "--max-tokens", "2", stdin=stdin, encoding=encoding)
        assert status == 0 and err == "" and f"Output: {text}" in out


@pytest.mark.parametrize("folder, name", [
    ("models--Qwen--Qwen3-0.6B/snapshots/c1899de2", "Qwen3-0.6B"), ("models--a--b--c/snapshots/1", "b--c"),
    ("snapshots/step-1000", "step-1000"), ("run7/snapshots/step-1000", "step-1000"), ("models--a--b/x", "x"),
    ("models--a--b/snapshots/1/x", "x"), (".", "checkpoint"), ("x\x1b[2J\x07\u202e", r"x\x1b[2J\x07\u202e")])
def test_a_model_is_called_by_its_folder_or_in_the_hub_s_cache_by_its_name(
        tiny, folder, name, tmp_path, monkeypatch, capsys):
    """And no name steers the terminal."""
    (tmp_path / "checkpoint").mkdir()
    monkeypatch.chdir(tmp_path / "checkpoint")
    llm.complete(Path(folder), "Once", 1, 0.0, 0.95)
    assert capsys.readouterr().out.startswith(f"Model:  {name}  (")


def test_a_checkpoint_of_a_training_run_runs(tiny, tmp_path, monkeypatch, program):
    shutil.copytree(tiny, tmp_path / "run7/snapshots/step-1000")
    monkeypatch.chdir(tmp_path / "run7")
    status, out, err = program("--model", "snapshots/step-1000", "--max-tokens", "3")
    assert (status, err) == (0, "") and out.startswith("Model:  step-1000  (")


def test_prefill_and_decode_are_timed_apart(call, monkeypatch):
    """By a clock that only a pass moves: prefill takes 2 s, and each of ten more 0.25 s; there is no eleventh."""
    now, forward = [0.0], llm.forward

    def timed(ids, *rest, **options):
        now[0] += 2 if len(ids) > 1 else 0.25
        return forward(ids, *rest, **options)

    monkeypatch.setattr(llm, "forward", timed)
    monkeypatch.setattr(llm.time, "perf_counter", lambda: now[0])
    said = call("The capital of France is" * 4, "--max-tokens", "11", "--kernels", "numpy")
    assert said.splitlines()[-1] == "Time:   4.50s  (prefill 20 tokens: 10 tokens/s, decode 10 tokens: 4 tokens/s)"


def test_when_an_end_token_comes_first_the_output_still_shows_the_prompt(call, monkeypatch):
    monkeypatch.setattr(llm, "sample", lambda *args: min(llm.EOS_IDS))
    assert "\nOutput: Once\nTime: " in call("Once")


def test_a_token_is_seen_when_it_is_made():
    """Through a pipe the first arrives long before the last is computed: each takes 0.1 seconds here.

    A plain text and a chat, at the same time; what comes is read from either pipe as it comes.
    """
    code = ("import sys, time, llm_inference as llm\nforward = llm.forward\n"
            "def slow(ids, *rest, **options):\n    time.sleep(0.1 * (len(ids) == 1))\n"
            "    return forward(ids, *rest, **options)\n"
            "llm.forward = slow\nsys.argv = ['x', *sys.argv[1:], 'The capital of France is', '--max-tokens', '5']\n"
            "llm.main()")
    programs = [subprocess.Popen([sys.executable, "-c", code, *TINY, *chat], cwd=ROOT, stdout=subprocess.PIPE,
                                 env=ENVIRONMENT) for chat in ([], ["--chat"])]
    seen, times = {program: b"" for program in programs}, {program: [] for program in programs}
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as pipes:
        for program in programs:
            stack.enter_context(program)
            pipes.register(program.stdout, selectors.EVENT_READ, program)
        while pipes.get_map():
            for key, _ in pipes.select():
                if block := os.read(key.fd, 4096):
                    seen[key.data] += block
                    times[key.data].append(time.monotonic())
                else:
                    pipes.unregister(key.fileobj)
    for program, moments in times.items():
        assert program.returncode == 0 and len(moments) > 3 and moments[-1] - moments[0] > 0.25, seen[program]


# ---- the module --------------------------------------------------------------------------------------------
def test_importing_prints_nothing_loads_nothing_and_asks_no_network():
    code = ("import socket, sys\nsocket.socket.connect = socket.getaddrinfo = None\nimport llm_inference as llm\n"
            "assert llm.W == {} and not hasattr(llm, 'tok') and 'huggingface_hub' not in sys.modules")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_it_runs_in_another_thread(tiny):
    said = []
    thread = threading.Thread(target=lambda: said.append(llm.generate("The capital of France is", 2)))
    thread.start(), thread.join()
    assert said == ["The capital of France is Paris."]


def test_a_tokenizer_that_adds_a_token_to_every_text_adds_it_to_a_prompt(tiny, monkeypatch):
    other = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    end = other.token_to_id("<|endoftext|>")
    other.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", end)])
    plain = llm.encode("Once")
    monkeypatch.setattr(llm, "tok", other)
    assert llm.encode("Once") == [end, *plain]


# ---- options -----------------------------------------------------------------------------------------------
def test_help_fits_a_terminal_and_names_every_option(run):
    status, out, err = run("--help")
    assert status == 0 and err == "" and max(map(len, out.splitlines())) <= 80
    assert {*re.findall(r"--[\w-]+|PROMPT", out)} == {
        "PROMPT", "--help", "--model", "--max-tokens", "--temperature", "--top-p", "--seed", "--quantize", "--kernels",
        "--chat", "--system", "--think", "--explain", "--trace"}


BAD_OPTIONS = {
    "--max-tokens": ["0", "-1", "1.5", "nan", "", "many", "1e3", "\udcff"],
    "--temperature": ["-0.1", "nan", "inf", "-inf", "", "hot", "1e999"],
    "--top-p": ["0", "-1", "1.1", "nan", "inf", "", "most"],
    "--seed": ["1.5", "nan", "", "x", "9" * 5000],
    "--quantize": ["3", "16", "", "x"],
    "--kernels": ["cuda", ""],
}


@pytest.fixture
def wrong(monkeypatch, capsys):
    """A function from arguments that the program can't take to what it says of them: usage, and why, status 2."""
    def said(*args):
        monkeypatch.setattr(sys, "argv", ["llm_inference.py", *args])
        with pytest.raises(SystemExit) as left:
            llm.parse_arguments()
        out, err = capsys.readouterr()
        *usage, why = err.splitlines()
        assert left.value.code == 2 and out == "" and usage[0].startswith("usage: llm_inference.py ")
        assert why.startswith("llm_inference.py: error: ")
        return why
    return said


@pytest.mark.parametrize("option", BAD_OPTIONS)
def test_an_option_out_of_range_is_refused_by_name(option, wrong):
    for value in BAD_OPTIONS[option]:
        assert option in wrong(f"{option}={value}")


@pytest.mark.parametrize("args", [
    ["--nonsense"], ["two", "prompts"], ["--model"], ["--seed"], ["--max-tokens"], ["--chat", "--explain"],
    ["--explain", "--trace"], ["--trace", "--chat"], ["--think"], ["--think", "--trace"], ["--system", ""],
    ["--system", "x", "--explain"]], ids=str)
def test_arguments_that_are_unknown_or_not_whole_or_do_not_go_together_are_refused(args, wrong):
    assert wrong(*args)


def test_options_are_looked_at_before_anything_is_loaded(program):
    for args in (["--top-p", "7"], ["--think"]):
        status, out, err = program("--model", "nowhere", *args)
        assert (status, out) == (2, "") and "nowhere" not in err and "Traceback" not in err


def test_a_prompt_that_begins_with_a_dash_needs_two_dashes(run):
    assert run("--hello")[0] == 2
    for prompt in ("--hello", "-x", "-5 degrees"):
        assert output(run("--max-tokens", "1", "--", prompt)).startswith(f"Output: {prompt}")


def test_a_seed_repeats_a_drawn_text_and_without_one_two_runs_differ(run):
    options = ["Once", "--temperature", "3", "--top-p", "1", "--max-tokens", "20"]
    seeds = [["--seed", "5"], ["--seed", "5"], ["--seed", "6"], ["--seed", str(-2**70)], [], []]
    first, again, *others = (output(run(*options, *seed)) for seed in seeds)
    assert first == again and len({first, *others}) == 5


def test_what_has_no_effect_without_a_temperature_is_said_in_one_line(run):
    greedy = output(run("Once", "--max-tokens", "3"))
    for args in (["--seed", "5"], ["--top-p", "0.5"], ["--seed", "0", "--temperature", "0"]):
        status, out, err = run("Once", "--max-tokens", "3", *args)
        assert status == 0 and out.splitlines()[3] == greedy
        assert err.count("\n") == 1 and "no effect at temperature 0" in err
    assert run("Once", "--max-tokens", "3", "--temperature", "0.5", "--seed", "5")[2] == ""


def test_options_reach_the_model(call, monkeypatch):
    seen, chat, load = {}, llm.chat, llm.load_model
    monkeypatch.setattr(llm, "chat", lambda *args: seen.update(chat=args) or True)
    options = ["--max-tokens", "7", "--temperature", "0.5", "--top-p", "0.7"]
    call("--chat", "Hi", "--system", "Be brief.", "--think", *options)
    assert seen["chat"] == (["Hi"], "Be brief.", True, 7, 0.5, 0.7)
    monkeypatch.setattr(llm, "load_model", lambda *args, **options: seen.update(options) or load(*args, **options))
    call("--quantize", "8", "--max-tokens", "1")
    assert seen["quantize"] == 8
    for kind in llm.KERNELS:
        call("--kernels", kind, "--max-tokens", "1")
        assert llm.kernels == kind


@pytest.mark.parametrize("mode", [[], ["--chat"]], ids=["text", "chat"])
def test_temperature_and_top_p_reach_every_draw(call, monkeypatch, mode):
    seen = []
    monkeypatch.setattr(llm, "sample", lambda logits, *options: seen.append(options) or 300)
    call("hi", "--max-tokens", "3", "--temperature", "0.3", "--top-p", "0.6", "--kernels", "numpy", *mode)
    assert seen == [(0.3, 0.6)] * 3


def test_without_options_a_text_is_greedy_whatever_the_model_s_authors_advise_for_chats(call, monkeypatch):
    seen = []
    monkeypatch.setattr(llm, "complete", lambda folder, prompt, *options: seen.append((prompt, *options)))
    monkeypatch.setattr(llm, "read_generation_config", lambda folder: {"do_sample": True, "temperature": 0.6})
    call()
    assert seen == [("The capital of France is", 100, 0.0, 0.95)]


# ---- errors in one line ------------------------------------------------------------------------------------
def is_one_line(status, err, *words):
    """Status 1, and on stderr one line of at most 300 characters after the program's name, with these words."""
    assert status == 1 and err.count("\n") == 1 and err.endswith("\n"), (status, err)
    assert err[:-1].isprintable() and len(err) <= len("llm_inference.py: ") + 300 + 1, err
    assert err.startswith("llm_inference.py: ") and all(str(word) in err for word in words), err
    return True


@pytest.fixture
def one_line(program):
    """A function that runs the program with arguments: it ends with one line that holds these words."""
    def check(args, *words, **options):
        status, out, err = program(*args, **options)
        return out == "" and is_one_line(status, err, *words)
    return check


def test_a_model_that_can_t_be_loaded_is_one_line(tiny, tmp_path, one_line):
    (tmp_path / "\x1b[2J").mkdir()
    for model, word in [(tmp_path, "config.json"), (tiny / "config.json", "config.json"), ("/dev/null", "/dev/null"),
                        ("a\nb", "no folder"), ("x" * 5000, "xxx"), (tmp_path / "\x1b[2J", r"\x1b[2J"),
                        ("日本", "no folder"), (b"\xe9", "no folder")]:
        assert one_line(["--model", model], word)
    assert one_line(["--model", "日本"], encoding="ascii")


def test_a_prompt_that_can_t_be_used_is_one_line(folder_of, one_line):
    """Empty, not UTF-8, or longer than the context; then both numbers are shown."""
    model = ["--model", folder_of("tied")]
    for prompt in (b"", b"\n"):
        assert one_line([*model, "-"], "empty", stdin=prompt)
    assert one_line([*model, ""], "empty")
    assert one_line([*model, b"caf\xe9"], "UTF-8") and one_line([*model, "-"], "UTF-8", stdin=b"caf\xe9")
    assert one_line([*model, "a" * 700, "--max-tokens", "1"], 700, 640)
    assert one_line([*model, "a", "--max-tokens", str(2**40)], 2**40, 640)
    assert one_line([*model, "-"], 60_000 * len("word "), 640, stdin=b"word " * 60_000)
    assert one_line([*model, "--chat", " "], "empty")
    assert one_line([*model, "--chat", "Hi", "--system", b"\xe9"], "UTF-8")


@pytest.mark.parametrize("error, line", [
    (ValueError("a\n  b\tc"), "a b c"), (KeyError(), "KeyError"), ("é 日 🦀", "é 日 🦀"),
    ("\x1b[2J\x9b\u202e", r"\x1b[2J\x9b\u202e"), ("a" * 200 + "z" * 200, "a" * 147 + "..." + "z" * 150)], ids=range(5))
def test_an_error_is_shown_in_one_line_that_steers_no_terminal(error, line):
    assert llm.one_line(error) == line


# ---- processes: how they end -------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def endless(folder_of, tmp_path_factory):
    """The folder of a checkpoint that generates thousands of tokens: it knows of no end token."""
    folder = shutil.copytree(folder_of("tied"), tmp_path_factory.mktemp("endless") / "checkpoint")
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 10**6}
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    return folder


def start(*args, **options):
    """Start the program. If its parents were told to ignore Ctrl-C, as with nohup or &, it heeds it all the same."""
    heed = None if os.name == "nt" else lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    command = [sys.executable, ROOT / "llm_inference.py", *args]
    return subprocess.Popen(command, env=ENVIRONMENT, preexec_fn=heed, **options)


def end(process):
    """(status, stderr) of a process, which has 20 seconds to end."""
    try:
        _, err = process.communicate(timeout=20)
    finally:
        process.kill()
    return process.returncode, err.decode()


def test_ctrl_c_ends_it_without_a_word(endless, tmp_path):
    """While it loads the model, and in the middle of a text.

    A pipe is in the place of config.json: opening it to write waits until the program opens it to read.
    """
    os.mkfifo(tmp_path / "config.json")
    loading, writing = start("--model", tmp_path), start("--model", endless, "--max-tokens", "100000")
    with open(tmp_path / "config.json", "wb"):
        loading.send_signal(signal.SIGINT)
        assert end(loading) == (130, "")
    assert writing.stdout.readline().startswith(b"Model:")
    writing.send_signal(signal.SIGINT)
    assert end(writing) == (130, "")


def test_a_reader_that_has_seen_enough_ends_it_without_a_word(endless):
    """As | head -1 does: the pipe is closed while tokens are printed."""
    with start("--model", endless, "--max-tokens", "100000") as process:
        assert process.stdout.readline().startswith(b"Model:")
        process.stdout.close()
        err = process.stderr.read().decode()
    assert (process.returncode, err) == (1, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk_is_one_line(folder_of):
    with open("/dev/full", "w") as full:
        started = [start("--model", folder_of("tied"), "abc", "--max-tokens", "9", *mode, stdout=full)
                   for mode in ([], ["--chat"], ["--trace"])]
        for status, err in map(end, started):
            assert is_one_line(status, err, os.strerror(errno.ENOSPC))


def screen(written):
    """The lines that a terminal shows after this text, in which \\r goes back to a line's begin to write over it."""
    lines = []
    for line in written.replace("\r\n", "\n").split("\n"):
        shown = []
        for part in line.split("\r"):
            shown[:len(part)] = part
        lines.append("".join(shown).rstrip())
    return lines


def test_on_a_terminal_the_bar_leaves_nothing_behind_and_letters_that_it_lacks_are_replaced():
    """What was printed before the bar came stands there when it is gone.

    Prefill goes in pieces of two tokens here, by a clock that moves a second with every look at it.
    """
    pty, fcntl, termios = map(pytest.importorskip, ("pty", "fcntl", "termios"))
    code = ("import itertools, sys, tqdm.std, llm_inference as llm\nllm.CHUNK = 2\n"
            "tqdm.std.time = map(float, itertools.count()).__next__\nllm.main()")
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))       # rows and columns
    args = [*TINY, "Łódź. The capital of France is", "--max-tokens", "2"]
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    process = subprocess.Popen([sys.executable, "-c", code, *args], cwd=ROOT, **streams,
                               env=ENVIRONMENT | {"PYTHONIOENCODING": "ascii", "TERM": "xterm"})
    os.close(theirs)
    written = b""
    with contextlib.suppress(OSError):                  # which Linux raises when the other side is closed
        while block := os.read(ours, 4096):
            written += block
    os.close(ours)
    assert process.wait(20) == 0
    written = written.decode()
    model, prompt, line, text, timing, rest = screen(written)
    assert "prefill:" in written and model.startswith("Model:  tiny-qwen3") and line == "-" * 60
    assert prompt == "Prompt: ??d?. The capital of France is"
    assert text == "Output: ??d?. The capital of France is Paris."
    assert timing.startswith("Time: ") and rest == ""
