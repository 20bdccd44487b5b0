"""The command line, end to end, as a reader runs it, on the bundled checkpoint."""
import contextlib
import os
import re
import selectors
import subprocess
import sys
import time
from pathlib import Path

import llm_inference as llm
import mlx.core as mx
import pytest
from tokenizers import Tokenizer, processors

ROOT = Path(__file__).resolve().parent.parent
TINY = ["--model", str(ROOT / "tests/tiny-qwen3")]


@pytest.fixture
def run(program):
    """A function that runs the program on the bundled checkpoint."""
    return lambda *args, stdin=b"": program(*TINY, *args, stdin=stdin)


def test_the_output_is_the_article_s():
    """In a process of its own."""
    command = [sys.executable, ROOT / "llm_inference.py", *TINY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr == ""
    model, prompt, line, output, timing = done.stdout.splitlines()
    assert re.fullmatch(r"Model:  tiny-qwen3  \(\d+ layers, \d+ dim, \d+ Q heads, \d+ KV heads\)", model)
    assert prompt == "Prompt: The capital of France is"
    assert line == "-" * 60
    assert output.startswith("Output: The capital of France is Paris. The capital of Italy is Rome. "
                             "The capital of Spain is Madrid.")
    assert re.fullmatch(r"Time:   \d+\.\d\ds  \(prefill 5 tokens: \d+ tokens/s, decode \d+ tokens: \d+ tokens/s\)",
                        timing), timing


def test_stdin_is_the_prompt_when_it_is_a_dash(run):
    given = run("The capital of Japan is", "--max-tokens", "6")
    piped = run("-", "--max-tokens", "6", stdin=b"The capital of Japan is\n")
    assert given[1].splitlines()[:4] == piped[1].splitlines()[:4] and "Tokyo" in piped[1]


def test_max_tokens_is_the_number_of_tokens(run):
    tiny_tokenizer = Tokenizer.from_file(str(ROOT / "tests/tiny-qwen3/tokenizer.json"))
    out = run("--max-tokens", "3")[1]
    assert "decode 2 tokens" in out                     # the first of three is prefill's
    ids = tiny_tokenizer.encode("The capital of France is Paris. The capital of Italy is Rome.").ids
    assert out.splitlines()[3] == "Output: " + tiny_tokenizer.decode(ids[:8])


def test_a_seed_repeats_a_drawn_text(run):
    options = ["Once", "--temperature", "1.5", "--top-p", "1", "--max-tokens", "20", "--seed"]
    first, again, other = (run(*options, seed)[1].splitlines()[3] for seed in ("5", "5", "6"))
    assert first == again != other


def test_all_kernels_say_the_same(run):
    assert len({run("--kernels", kind, "--max-tokens", "12")[1].splitlines()[3] for kind in llm.KINDS}) == 1


@pytest.mark.parametrize("text", ["日本 🦀", "naïve\tcafé", "ends with a newline\n\nin the middle"])
def test_text_of_any_kind_is_shown_as_it_is(run, text):
    status, out, err = run(text, "--max-tokens", "2")
    assert status == 0 and err == "" and f"Output: {text}" in out


def test_help_fits_a_terminal_and_names_every_option(run):
    status, out, err = run("--help")
    assert status == 0 and err == "" and max(map(len, out.splitlines())) <= 80
    for option in ("PROMPT", "--model", "--max-tokens", "--temperature", "--top-p", "--seed", "--kernels"):
        assert option in out
    assert out.partition("examples:")[2].count("\n  python llm_inference.py ") == 3


def test_importing_prints_nothing_loads_nothing_and_asks_no_network():
    code = ("import socket\nsocket.socket = None\nimport llm_inference as llm\n"
            "assert llm.W == {} and not hasattr(llm, 'tok')\nimport sys\nassert 'huggingface_hub' not in sys.modules")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_the_module_runs_whatever_was_imported_before():
    code = ("import numpy, mlx.core as mx, llm_inference as llm; llm.load_model('tests/tiny-qwen3'); "
            "print(llm.generate('The capital of Japan is', 20))")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.startswith("The capital of Japan is Tokyo.") and done.stderr == ""


FRANCE = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@pytest.mark.parametrize("prompt", [FRANCE, " The capital of Japan is ", "\n\nOnce\n\n", "a\r\n"])
def test_a_prompt_is_the_same_from_stdin_but_for_one_newline_at_its_end(run, prompt):
    given = run("--max-tokens", "8", prompt)
    for newline in ("\n", "\r\n"):
        piped = run("--max-tokens", "8", "-", stdin=(prompt + newline).encode())
        assert piped[1].split("Time:")[0] == given[1].split("Time:")[0]
    if prompt == FRANCE:
        assert "The capital of France is Paris." in given[1]


@pytest.mark.parametrize("prompt", ["-5", "-5 degrees", "- 5", "-x"])
def test_a_prompt_that_begins_with_a_dash_runs_where_it_can_be_no_option(run, prompt):
    status, out, err = run("--max-tokens", "1", prompt)
    assert (status, err) == (0, "") and f"Prompt: {prompt}\n" in out


def test_a_prompt_that_could_be_an_option_needs_two_dashes(run):
    status, out, err = run("--hello")
    assert (status, out) == (2, "") and err.count("\n") == 1 and " -- " in err
    assert "Prompt: --hello\n" in run("--max-tokens", "1", "--", "--hello")[1]


@pytest.mark.parametrize("args", [["--chat", "--explain"], ["--explain", "--trace"], ["--trace", "--chat"],
                                  ["--system", ""], ["--system", "x", "--explain"], ["--think", "--trace"]], ids=str)
def test_modes_and_options_that_do_not_go_together_are_refused(run, args):
    status, out, err = run(*args)
    assert (status, out) == (2, "") and err.count("\n") == 1


@pytest.fixture
def call(tiny, monkeypatch, capsys):
    """A function that runs main in this process and returns what it prints."""
    def main(*args):
        monkeypatch.setattr(sys, "argv", ["llm_inference.py", *TINY, *args])
        llm.main()
        return capsys.readouterr().out
    return main


def test_options_reach_the_model(call, monkeypatch):
    seen, chat, load = {}, llm.chat, llm.load_model
    monkeypatch.setattr(llm, "chat", lambda *args: seen.update(chat=args[1:]) or True)
    call("--chat", "Hi", "--system", "Be brief.", "--think", "--max-tokens", "7", "--temperature", "0.5", "--top-p", "0.7")
    assert seen["chat"] == ("Be brief.", True, 7, 0.5, 0.7)
    monkeypatch.setattr(llm, "load_model", lambda *args, **options: seen.update(options) or load(*args, **options))
    call("--quantize", "8", "--max-tokens", "1")
    assert seen["quantize"] == 8
    for kind in llm.KINDS:
        call("--kernels", kind, "--max-tokens", "1")
        assert llm.kernels == kind and llm.attend is llm.KERNELS["attend"][llm.KINDS.index(kind)]


def test_without_a_seed_two_runs_differ(call):
    texts = {call("Once", "--temperature", "3", "--top-p", "1", "--max-tokens", "12").split("Time:")[0] for _ in range(3)}
    assert len(texts) > 1


def test_when_an_end_token_comes_first_the_output_still_shows_the_prompt(call, monkeypatch):
    monkeypatch.setattr(llm, "sample", lambda *args: mx.array(min(llm.EOS_IDS)))
    assert "Output: Once\nTime: " in call("Once")


def test_a_token_is_seen_when_it_is_made():
    """Through a pipe the first arrives long before the last is computed: each takes 0.1 seconds here.

    A plain text and a chat, at the same time; what comes is read from either pipe as it comes.
    """
    code = ("import sys, time, llm_inference as llm\nforward = llm.forward\n"
            "def slow(ids, *rest, **options):\n    time.sleep(0.1 * (len(ids) == 1))\n"
            "    return forward(ids, *rest, **options)\n"
            "llm.forward = slow\nsys.argv = ['x', *sys.argv[1:], 'The capital of France is', '--max-tokens', '5']\n"
            "llm.main()")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    programs = [subprocess.Popen([sys.executable, "-c", code, *TINY, *chat], cwd=ROOT, stdout=subprocess.PIPE,
                                 env=environment) for chat in ([], ["--chat"])]
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


@pytest.mark.parametrize("options", [[], ["--temperature", "1"]], ids=["greedy", "drawn"])
def test_logits_that_stop_being_finite_later_are_refused(call, monkeypatch, options):
    forward = llm.forward
    monkeypatch.setattr(llm, "forward", lambda ids, cache, start, *a, **k: forward(ids, cache, start, *a, **k)
                        + (mx.nan if start == 7 else 0))
    with pytest.raises(ValueError, match="not finite"):
        call("The capital of France is", *options)


@pytest.mark.parametrize("n", [255, 256, 257, 513])
def test_prompts_of_whole_pieces_run_and_equal_one_pass(tiny, n):
    ids = [i % 200 for i in range(n)]
    pieces = llm.prefill(ids, [None] * llm.N_LAYERS)
    whole = llm.forward(ids, [None] * llm.N_LAYERS, 0, last_only=True)
    assert mx.max(mx.abs(pieces - whole)).item() < 1e-4 * mx.max(mx.abs(whole)).item()


def test_a_tokenizer_that_adds_a_token_to_every_text_adds_it_to_a_prompt(tiny, monkeypatch):
    other = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    end = other.token_to_id("<|endoftext|>")
    other.post_processor = processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", end)])
    plain = llm.encode("Once")
    monkeypatch.setattr(llm, "tok", other)
    assert llm.encode("Once") == [end, *plain]
