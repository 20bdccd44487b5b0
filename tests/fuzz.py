"""Damage a small checkpoint in thousands of ways: load_model must refuse it in one line, or be right.

    python tests/fuzz.py [CASES] [FIRST]        # 2000 cases from number 0; the same number is the same damage

A child process works through a batch of cases, so that a crash, a hang (10 seconds) or more than 1 GB of
memory is seen, and which case it was. Prints what went wrong, and how many cases ended in which way.
"""
import copy
import json
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import llm_inference as llm                             # noqa: E402
from checkpoints import make_checkpoint                 # noqa: E402
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers, processors    # noqa: E402

BASES = ["tied", "untied", "bfloat16", "llama_head_dim", "sharded"]
IDS, PROMPT = [72, 105, 258, 0], "Hi, naïve 日本 <|im_end|> 12345"
ODD = [None, True, False, 0, -1, 1, 2, 3, 0.5, 1e-9, 1e308, float("nan"), float("inf"), 2**31, 2**63, 2**64,
       10**400, "", "x", "1", "\ud800", "F32", "silu", "a" * 10_000, [], [1], [None], {},
       {"type": "linear"}, {"a": {"b": []}}]
SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
ROBERTA = {"type": "RobertaProcessing", "cls": ["<s>", 1], "trim_offsets": True, "add_prefix_space": True}
PARTS = {                                               # parts of a tokenizer.json: whole, and out of place
    "normalizer": [
        None, {"type": "Lowercase"}, {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
        {"type": "Replace", "pattern": {"Regex": "^|$"}, "content": "x"}],
    "pre_tokenizer": [
        None, {"type": "Whitespace"}, {"type": "Digits", "individual_digits": True},
        SPLIT | {"pattern": {"Regex": "("}}, SPLIT | {"pattern": {"Regex": "(a*)*b|^"}}],
    "post_processor": [
        None, {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True},
        *(ROBERTA | {"sep": ["<s>", row]} for row in (300, 99_999, 2**32 - 1))],
    "decoder": [
        None, {"type": "Fuse"}, {"type": "WordPiece", "prefix": "", "cleanup": True},
        {"type": "Strip", "content": "a", "start": 1, "stop": 50}],
    "model": [
        {"type": "WordLevel", "vocab": {"Hi": 1}, "unk_token": "nowhere"},
        {"type": "Unigram", "vocab": [["a", 0.0], ["H", -1.0]], "unk_id": None},
        *({"type": "BPE", "vocab": v, "merges": []} for v in ({}, {"a": 0, "b": 400}, {"a": 7, "b": 7}))],
}


# ---- the format of weights: 8 bytes, the length of the header; the header in JSON; the data ----------------
def split(file):
    """A file of weights as (header, data)."""
    end = 8 + int.from_bytes(file[:8], "little")
    return json.loads(file[8:end]), file[end:]


def join(header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def dress(folder):
    """Give a checkpoint's tokenizer one of everything that can be damaged, and a generation_config.json."""
    bare = json.loads((folder / "tokenizer.json").read_text())
    bare["model"]["vocab"] |= {"Hi": 259, "ï»": 260, "unknown": 261}
    bare["model"] |= {"merges": [["H", "i"], ["ï", "»"]], "unk_token": "unknown"}
    tokenizer = Tokenizer.from_str(json.dumps(bare))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace("\t", "  ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|\s+(?!\S)|\s+"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", pair="$A $B", special_tokens=[("<|im_start|>", 257)])
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text('{"eos_token_id": [258, 256], "temperature": 0.6}')


# ---- damage ------------------------------------------------------------------------------------------------
def mutate_bytes(rng, data):
    """Flip bits, cut off, insert, leave out or repeat a few bytes, or swap two pieces."""
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        at = rng.randrange(len(data) + 1) if rng.random() < 0.5 else rng.randrange(min(len(data), 400) + 1)
        length = rng.choice([1, 1, 2, 8, 100])
        kind = rng.randrange(6)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[at:]
        elif kind == 2:
            data[at:at] = rng.randbytes(length)
        elif kind == 3:
            del data[at:at + length]
        elif kind == 4:
            data[at:at] = data[at:at + length]
        else:
            data[at:at + length] = rng.randbytes(length)
    return bytes(data)


def places(value, path=()):
    """The path to every value inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else []
    for key, child in items:
        yield (*path, key)
        yield from places(child, (*path, key))


def mutate_json(rng, value):
    """Delete values in a JSON value, replace them by odd ones or by others of the file, or rename fields."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        paths = list(places(value))
        if not paths:
            break
        depth = rng.randrange(1, 1 + max(map(len, paths)))      # so that all depths are tried as often
        paths = [path for path in paths if len(path) == depth]
        *path, last = rng.choice(paths)
        inside = value
        for key in path:
            inside = inside[key]
        kind = rng.randrange(5)
        if kind == 0:
            del inside[last]
        elif kind == 1 and isinstance(inside[last], (int, float)):
            inside[last] = inside[last] * rng.choice([-1, 0, 2, 2**16, 0.5]) + rng.choice([0, 1, -1])
        elif kind == 2 and isinstance(inside, dict):
            inside[rng.choice([f"{last}x", str(last).upper(), "", "model_type", "type"])] = inside.pop(last)
        elif kind == 3:
            *path, other = rng.choice(paths)
            source = value
            for key in path:
                source = source[key]
            inside[last] = copy.deepcopy(source[other])
        else:
            inside[last] = copy.deepcopy(rng.choice(ODD))
    return value


def damage(rng, folder):
    """Damage one file of a checkpoint, and say which and how."""
    files = sorted(path.name for path in folder.iterdir())
    shards = [name for name in files if name.endswith(".safetensors")]
    name = rng.choice(["config.json", "tokenizer.json", rng.choice(shards), rng.choice(files)])
    file, how = folder / name, rng.choice(["bytes", "fields", "fields"])
    whole = file.read_bytes()
    if name == "tokenizer.json" and rng.random() < 0.2:
        part = rng.choice([*PARTS])
        file.write_text(json.dumps(json.loads(whole) | {part: rng.choice(PARTS[part])}))
        return f"{name} {part}"
    if name not in shards:
        file.write_bytes(mutate_bytes(rng, whole) if how == "bytes"
                         else json.dumps(mutate_json(rng, json.loads(whole))).encode())
        return f"{name} {how}"
    header, data = split(whole)
    how = rng.choice(["bytes", "header", "fields", "fields", "length"])
    if how == "bytes":
        file.write_bytes(mutate_bytes(rng, whole))
    elif how == "header":
        file.write_bytes(join(mutate_bytes(rng, json.dumps(header).encode()), data))
    elif how == "fields":
        file.write_bytes(join(json.dumps(mutate_json(rng, header)).encode(), data))
    else:
        size, length = len(whole), int.from_bytes(whole[:8], "little")
        near = [length - 1, length + 1, size - 8, size]
        length = rng.choice([0, 1, *near, 2**31, 2**32 + length, 2**63, 2**64 - 1])
        file.write_bytes(length.to_bytes(8, "little") + whole[8:])
    return f"{name} {how}"


# ---- one case, a batch of cases, and all -------------------------------------------------------------------
def logits():
    return llm.forward(IDS, [None] * llm.N_LAYERS, 0)


def outcome(folder, right, exact):
    """What the program makes of a folder: "refused", "same", "other logits", "no text"; or "FAULT" and what.

    exact: the damage changed neither weights nor settings, so if it loads, the logits must be the same.
    """
    try:
        llm.load_model(folder)
    except (ValueError, OSError) as error:
        return "refused" if str(error) and "\n" not in str(error) else f"FAULT not one line: {error!r}"
    except BaseException as error:
        return f"FAULT load_model: {type(error).__name__}: {error}"
    try:
        same = llm.mx.array_equal(logits(), right).item()
    except BaseException as error:
        return f"FAULT forward: {type(error).__name__}: {error}"
    if exact and not same:
        return "FAULT wrong logits"
    try:
        llm.generate(PROMPT, max_tokens=2)
    except KeyboardInterrupt:
        raise
    except BaseException:                               # of tokenizers; Rust's PanicException is no Exception
        return "no text"
    return "same" if same else "other logits"


def batch(cases, work):
    """Work through cases in this process; prints [case, outcome], first what it is if the process ends."""
    rights = {}
    for base in BASES:
        if not (work / base).exists():
            dress(make_checkpoint(work / base, base))
        llm.load_model(work / base)
        rights[base] = logits()
    for case in cases:
        rng = random.Random(case)
        base, folder = rng.choice(BASES), work / f"case-{case}"
        shutil.copytree(work / base, folder)
        what = f"case {case}: {base}: {damage(rng, folder)}"
        print(json.dumps([case, f"FAULT a crash, or 10 seconds: {what}"]), flush=True)
        signal.alarm(10)                                        # ends the process, wherever it is
        result = outcome(folder, rights[base], exact="tokenizer" in what or "generation" in what)
        signal.alarm(0)
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss     # in KB, on a Mac in bytes
        memory /= 2**30 if sys.platform == "darwin" else 2**20
        if memory > 1:
            result = f"FAULT {memory:.1f} GB of memory"
        print(json.dumps([case, f"{result}: {what}" if result.startswith("FAULT") else result]), flush=True)
        shutil.rmtree(folder)
        if memory > 1:
            return                                              # it stays the maximum: go on in a new process


def run(cases, work, counts=None):
    """Try all cases, in a folder of its own; returns the faults. counts is a Counter, for the outcomes."""
    cases, faults = list(cases), []
    while cases:
        todo = [str(case) for case in cases[:250]]
        done = subprocess.run([sys.executable, __file__, "--batch", str(work), *todo], capture_output=True)
        results = dict(json.loads(line) for line in done.stdout.decode().splitlines())
        if not results:
            return [*faults, f"no case was tried: {done.stderr.decode(errors='replace')[-500:]}"]
        faults += [result for result in results.values() if result.startswith("FAULT")]
        if counts is not None:
            counts.update(result.split(":")[0] for result in results.values())
        cases = [case for case in cases if case > max(results)]
    return faults


if __name__ == "__main__":
    if sys.argv[1:2] == ["--batch"]:
        batch(map(int, sys.argv[3:]), Path(sys.argv[2]))
        sys.exit()
    if not all(map(str.isdigit, sys.argv[1:])):
        sys.exit(__doc__)
    number, first = [*map(int, sys.argv[1:]), *[2000, 0][len(sys.argv) - 1:]]
    outcomes = Counter()
    with tempfile.TemporaryDirectory() as folder:
        found = run(range(first, first + number), Path(folder), outcomes)
    print(*found, f"{number} cases:", *(f"{n:6} {kind}" for kind, n in outcomes.most_common()), sep="\n")
    sys.exit(bool(found))
