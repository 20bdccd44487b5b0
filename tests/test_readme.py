"""What the README says is so: its commands print what it shows, its names exist, its figures are counted again."""
import ast
import functools
import io
import json
import os
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import llm_inference as llm
import mutations
import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
SOURCE = (ROOT / "llm_inference.py").read_text()


def console_blocks():
    """(command, what it prints) for every `$ command` in a console block."""
    for indent, block in re.findall(r"^( *)```console\n(.*?)^ *```", README, re.S | re.M):
        block = re.sub(f"^{indent}", "", block, flags=re.M)
        for command, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.M):
            yield command, shown


def without_times(text):
    """The text without trailing blanks, with zeros for what no two runs share: speeds and rounding errors."""
    text = "\n".join(line.rstrip() for line in text.strip("\n").splitlines())
    text = re.sub(r"\d\.\d\de-\d\d", "0", text)
    return re.sub(r"^Time: .*|\S+ tokens/s ask for .*", lambda m: re.sub(r"\d+(\.\d+)?", "0", m[0]), text, flags=re.M)


@pytest.fixture(scope="module")
def printed():
    """A function from a command to what it prints, first stdout and then stderr. All of them run at the same time."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    running = {command: subprocess.Popen(command, shell=True, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                         text=True, env=os.environ | {"PATH": path, "NO_COLOR": "1"})
               for command, _ in console_blocks()}
    yield lambda command: "".join(running[command].communicate(timeout=60))
    for process in running.values():
        process.kill()


@pytest.mark.parametrize("command, shown", list(console_blocks()))
def test_a_command_prints_what_is_shown(command, shown, printed):
    if "--explain" in command and llm.mx.default_device() == llm.mx.gpu:
        pytest.skip("the README shows a run on a CPU")
    assert without_times(printed(command)) == without_times(shown)


def test_the_lines_of_python_run(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    exec(re.sub("^    ", "", re.search(r"(    import llm_inference.*\n(    .*\n)+)", README)[0], flags=re.M), {})
    assert capsys.readouterr().out.startswith("The capital of Japan is Tokyo.")


def test_the_nine_steps_name_their_functions_in_the_order_of_the_file():
    rows = re.findall(r"^\| (\d) \| (.*?) \| (.*?) \|$", README, re.M)
    assert [int(step) for step, _, _ in rows] == list(range(1, 10))
    banners = {int(step): SOURCE.index(f"# ==== Step {step}:") for step, _, _ in rows} | {10: len(SOURCE)}
    for step, functions, sentence in rows:
        for name in re.findall(r"`(\w+)`", functions + sentence):
            assert banners[int(step)] < SOURCE.index(f"\ndef {name}(") < banners[int(step) + 1], name


def test_imports_are_imports():
    """At the top of the file, none inside a `try`, none after a handler of signals."""
    tree = ast.parse(SOURCE)
    imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert {"mlx.core", "argparse"} <= {alias.name for node in imports for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Try):
            assert not any(isinstance(n, (ast.Import, ast.ImportFrom)) for n in ast.walk(node))
    assert not any(word in SOURCE for word in ("os._exit", "import signal", "import ctypes"))


def test_the_options_are_the_program_s(program):
    options = set(re.findall(r"--[a-z][a-z-]*", program("--help")[1])) - {"--help"}
    table = README.split("## Options")[1].split("## Other models")[0]
    assert set(re.findall(r"--[a-z][a-z-]*", table)) == options


def test_every_file_that_is_named_is_there():
    made_later = {"Qwen3-0.6B/", "SmolLM2-135M", "model.safetensors", "tokenizer.json", "config.json"}
    for name in set(re.findall(r"`((?:tests/)?[\w.-]+\.(?:py|csv|txt)|tests/[\w/-]+)`", README)) - made_later:
        assert (ROOT / name).exists(), name


def test_the_figures_are_those_of_the_real_model():
    config = json.loads((ROOT / "Qwen3-0.6B/config.json").read_text())
    assert f"{config['hidden_size']:,} numbers that stand for the token" in README
    assert f"All {config['num_hidden_layers']} blocks" in README
    assert f"{len(mutations.MUTATIONS)} times" in README
    assert f"nine steps of {len(steps_code())} code lines" in README


def test_what_must_be_installed_is_said_alike_in_the_file_and_in_requirements_txt():
    """A script's own block, "# /// script" as in PEP 723, is what uv reads."""
    (block,) = re.findall(r"^# /// script\n((?:#.*\n)+?)# ///$", SOURCE, re.M)
    form = r'# requires-python = ">=(\S+)"\n# dependencies = (\[\n(?:#.*\n)*# \])\n'
    oldest, dependencies = re.fullmatch(form, block).groups()
    wanted = ["mlx[cpu]>=0.32.0", "mlx-cpu>=0.32.0; sys_platform == 'win32'", "tokenizers>=0.20.0", "numpy>=1.23.2"]
    assert ast.literal_eval(dependencies.replace("\n#", "\n")) == wanted
    assert (ROOT / "requirements.txt").read_text().replace('"', "'").splitlines() == wanted
    assert f"Python {oldest} to 3.13" in README and "uv run llm_inference.py" in README


@functools.cache
def code_lines(source):
    """The numbers of the lines with code: not blank, comment or docstring."""
    no_code = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines = {line for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type not in no_code
             for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return lines


@functools.cache
def steps_code():
    """The numbers of the lines with code from the banner of Step 1 to the one after Step 9."""
    banners = [i for i, line in enumerate(SOURCE.splitlines(), 1) if line.startswith("# ==== ")]
    first = next(i for i in banners if "Step 1:" in SOURCE.splitlines()[i - 1])
    last = banners[next(n for n, i in enumerate(banners) if "Step 9:" in SOURCE.splitlines()[i - 1]) + 1]
    assert first <= 100 and last <= 350
    return {i for i in code_lines(SOURCE) if first <= i < last}


def test_the_file_keeps_to_its_size():
    """The reader's patience: 110 columns, at most 40 lines of code in a function, the model first and short."""
    assert len(SOURCE.splitlines()) <= 1020 and max(map(len, SOURCE.splitlines())) <= 110
    code = code_lines(SOURCE)
    assert len(code) <= 590 and len(steps_code()) <= 120
    for node in ast.parse(SOURCE).body:
        if isinstance(node, ast.FunctionDef):
            assert len(code & set(range(node.lineno, node.end_lineno + 1))) <= 40, node.name


def test_defaults_are_those_said():
    assert llm.generate.__defaults__ == (100, 0.0, 0.95) and llm.sample.__defaults__ == (0.0, 0.95)
    assert "add at most N tokens (default: 100, " in README and "together (0.95)" in README


def test_it_can_be_read_in_one_go():
    assert len(README.splitlines()) <= 280
