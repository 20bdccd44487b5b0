"""The command line, end to end, as a reader runs it: in a process of its own, on the bundled checkpoint."""
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
TINY = ["--model", str(ROOT / "tests/tiny-qwen3")]


def run(*args, stdin=b"", **options):
    """(status, stdout, stderr) of the program; text is UTF-8."""
    done = subprocess.run([sys.executable, ROOT / "llm_inference.py", *args], input=stdin, capture_output=True,
                          timeout=60, **options)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def test_the_output_is_the_article_s():
    status, out, err = run(*TINY)
    assert status == 0 and err == ""
    model, prompt, line, output, timing = out.splitlines()
    assert re.fullmatch(r"Model:  tiny-qwen3  \(\d+ layers, \d+ dim, \d+ Q heads, \d+ KV heads\)", model)
    assert prompt == "Prompt: The capital of France is"
    assert line == "-" * 60
    assert output.startswith("Output: The capital of France is Paris. The capital of Italy is Rome. "
                             "The capital of Spain is Madrid.")
    assert re.fullmatch(r"Time:   \d+\.\d\ds  \(prefill 5 tokens: \d+ tokens/s, decode \d+ tokens: \d+ tokens/s\)",
                        timing), timing


def test_stdin_is_the_prompt_when_it_is_a_dash():
    given = run(*TINY, "The capital of Japan is", "--max-tokens", "6")
    piped = run(*TINY, "-", "--max-tokens", "6", stdin=b"The capital of Japan is\n")
    assert given[1].splitlines()[:4] == piped[1].splitlines()[:4] and "Tokyo" in piped[1]


def test_max_tokens_is_the_number_of_tokens():
    tiny_tokenizer = Tokenizer.from_file(str(ROOT / "tests/tiny-qwen3/tokenizer.json"))
    out = run(*TINY, "--max-tokens", "3")[1]
    assert "decode 2 tokens" in out                     # the first of three is prefill's
    ids = tiny_tokenizer.encode("The capital of France is Paris. The capital of Italy is Rome.").ids
    assert out.splitlines()[3] == "Output: " + tiny_tokenizer.decode(ids[:8])


def test_a_seed_repeats_a_drawn_text():
    options = [*TINY, "Once", "--temperature", "1.5", "--top-p", "1", "--max-tokens", "20", "--seed"]
    first, again, other = (run(*options, seed)[1].splitlines()[3] for seed in ("5", "5", "6"))
    assert first == again != other


def test_both_kernels_say_the_same():
    explicit, fused = (run(*TINY, "--kernels", kind)[1].splitlines()[3] for kind in ("explicit", "fused"))
    assert explicit == fused


@pytest.mark.parametrize("text", ["日本 🦀", "naïve\tcafé", "ends with a newline\n\nin the middle"])
def test_text_of_any_kind_is_shown_as_it_is(text):
    status, out, err = run(*TINY, text, "--max-tokens", "2")
    assert status == 0 and err == "" and f"Output: {text}" in out


def test_help_fits_a_terminal_and_names_every_option():
    status, out, err = run("--help")
    assert status == 0 and err == "" and max(map(len, out.splitlines())) <= 80
    for option in ("PROMPT", "--model", "--max-tokens", "--temperature", "--top-p", "--seed", "--kernels"):
        assert option in out


def test_importing_prints_nothing_loads_nothing_and_asks_no_network():
    code = ("import socket\nsocket.socket = None\nimport llm_inference as llm\n"
            "assert llm.W == {} and not hasattr(llm, 'tok')\nimport sys\nassert 'huggingface_hub' not in sys.modules")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_a_missing_openblas_is_said_once_and_does_no_harm():
    if sys.platform != "linux":
        pytest.skip("only Linux needs it")
    code = ("import ctypes, runpy, sys\n"
            "def none(*args, **named): raise OSError\n"
            "ctypes.CDLL = none\nsys.argv[0] = 'llm_inference.py'\n"
            "runpy.run_path('llm_inference.py', run_name='__main__')")
    done = subprocess.run([sys.executable, "-c", code, *TINY, "--max-tokens", "2"], cwd=ROOT, capture_output=True)
    assert done.returncode == 0 and b"Paris" in done.stdout
    assert done.stderr.decode().splitlines() == ["OpenBLAS was not found, so this will be slow: "
                                                 "pip install cmeel-openblas"]


def test_openblas_is_what_computes_where_requirements_are_installed():
    """The claim of the first function in the file: cblas_sgemm is OpenBLAS's."""
    if sys.platform != "linux":
        pytest.skip("only Linux needs it")
    code = "import ctypes, llm_inference as llm; assert llm.HAS_OPENBLAS; ctypes.CDLL(None).openblas_get_config"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
