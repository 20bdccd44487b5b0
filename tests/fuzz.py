"""Damage a small checkpoint in thousands of ways: load_model must refuse it in one line, or be right.

    python tests/fuzz.py [CASES] [FIRST]        # 2000 cases from number 0; the same number is the same damage

What is right, reference.py says: it computes the logits from the same damaged files, which `expected` reads in its
own way. A refusal must leave the model that was loaded before as it was. A child process works through a batch of
cases, so that a crash, a hang (10 seconds) or more than 1 GB of memory is seen, and which case it was. Prints what
went wrong, and how many cases ended in which way.
"""
import copy
import json
import math
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import llm_inference as llm                             # noqa: E402
import reference                                        # noqa: E402
from checkpoints import byte_tokenizer, make_checkpoint     # noqa: E402
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers, processors    # noqa: E402

BASES = ["tied", "untied", "bfloat16", "llama_head_dim", "sharded", "packed"]
IDS, PROMPT = [72, 105, 258, 0], "Hi, naïve 日本 <|im_end|> 12345"
ODD = [None, True, False, 0, -1, 1, 2, 3, 0.5, 1e-9, 1e308, float("nan"), float("inf"), 2**31, 2**63, 2**64,
       10**400, "", "x", "1", "\ud800", "F32", "silu", "a" * 10_000, "a\nb\r\x1b[2J", [], [1], [None], {},
       {"type": "linear"}, {"a": {"b": []}}]
# Fields of config.json that may ask for something else, each with values that mean it and some that do not
ROPES = [{"rope_type": "yarn", "factor": 4.0}, {"type": "linear", "factor": 2}, {"type": "linear", "factor": 1.0},
         {"rope_type": "dynamic", "factor": 1.0}, {"rope_type": "llama3", "factor": 8.0}, {"rope_theta": 5e5},
         {"rope_type": "default", "rope_theta": 100.0}, {"full_attention": {"rope_theta": 5.0}},
         {"type": "yarn", "rope_type": "default"}, {"partial_rotary_factor": 0.5}, {}, [], "yarn"]
SETTINGS = {
    "rope_scaling": ROPES, "rope_parameters": ROPES, "model_type": ["qwen3", "llama", "qwen2", ["qwen3"], []],
    "hidden_act": ["silu", "gelu", "SiLU", ["gelu"], []], "attention_bias": [True, False, 1, [True]],
    "mlp_bias": [True, False], "use_sliding_window": [True, False, "yes"], "sliding_window": [2, 4096, None],
    "layer_types": [["full_attention"] * 3, ["full_attention", "sliding_attention"], "sliding_attention", []],
    "num_experts": [0, 8], "num_key_value_heads": [1, 2, 4, None], "head_dim": [16, 12, None],
    "tie_word_embeddings": [True, False, None, [False], [], 1], "rope_theta": [1e4, 5e5, 10, 1.0, None],
    "rms_norm_eps": [1e-5, 0.1, 3, None], "num_hidden_layers": [1, 2, 3, 4], "eos_token_id": [[], [1, 2], -1, None],
    "quantization": [{"bits": 4, "group_size": 64}, {"bits": 4, "group_size": 32, "mode": "mxfp4"}, {"bits": 8}],
    "quantization_config": [{"quant_method": "gptq", "bits": 4}, {"quant_method": "fp8"}, {}, "int8",
                            {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}],
}
SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
ROBERTA = {"type": "RobertaProcessing", "cls": ["<s>", 1], "trim_offsets": True, "add_prefix_space": True}
PARTS = {                                               # parts of a tokenizer.json: whole, and out of place
    "normalizer": [
        None, {"type": "Lowercase"}, {"type": "Replace", "pattern": {"Regex": "^|$"}, "content": "x"}],
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


# ---- the checkpoints before the damage ---------------------------------------------------------------------
def write_base(folder, name):
    """One of BASES; "packed" is what mlx-lm made of a checkpoint, with matrices of 4 bits."""
    if name != "packed":
        make_checkpoint(folder, name)
    else:
        folder.mkdir()
        shutil.copy(HERE / "golden/quantized.safetensors", folder / "model.safetensors")
        header = split((folder / "model.safetensors").read_bytes())[0]
        (folder / "config.json").write_text(header["__metadata__"]["config.json"])
        byte_tokenizer().save(str(folder / "tokenizer.json"))
    dress(folder)
    return folder


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


def mutate_tensors(rng, header, data):
    """Rename, drop, add, swap, turn, convert or overwrite whole tensors; a file of weights."""
    tensors = {name: (entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])])
               for name, entry in header.items() if name != "__metadata__"}
    names = sorted(tensors)
    one, other = rng.choice(names), rng.choice(names)
    kind, shape, raw = tensors[one]
    how = rng.randrange(10)
    if how == 0:
        prefix = rng.choice(["_orig_mod.", "model.", "module.", "base_model.model."])
        tensors = {prefix + name: tensor for name, tensor in tensors.items()}
    elif how == 1:
        tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    elif how == 2:
        del tensors[one]
    elif how == 3:
        new = [one.replace("weight", "bias"), "lm_head.weight", "model.layers.9.mlp.up_proj.weight", "lm_head.bias",
               one.replace("weight", "scales"), "model.layers.0.self_attn.rotary_emb.inv_freq"]
        tensors[rng.choice(new)] = tensors[rng.choice([one, "model.embed_tokens.weight", other])
                                           if "model.embed_tokens.weight" in tensors else one]
    elif how == 4:
        tensors[one], tensors[other] = tensors[other], tensors[one]
    elif how == 5:
        tensors[one] = kind, rng.choice([shape[::-1], [1, *shape], [math.prod(shape)], shape[:1]]), raw
    elif how == 6:
        tensors[one] = rng.choice(["F16", "BF16", "I16", "U32", "I32", "F32", "F8_E4M3", "U8"]), shape, raw
    elif how == 7 and kind == "F32":
        tensors[one] = "F16", shape, np.frombuffer(raw, "<f4").astype("<f2").tobytes()
    elif how == 8 and kind == "F32":
        at, value = rng.randrange(math.prod(shape)), rng.choice([0, 3, -1e3, 1e30, math.inf, math.nan])
        tensors[one] = kind, shape, raw[:4 * at] + np.float32(value).tobytes() + raw[4 * at + 4:]
    else:
        tensors[one] = kind, shape, rng.choice([bytes(len(raw)), tensors[other][2], raw[::-1]])
    found, data = {}, b""
    for name, (kind, shape, raw) in tensors.items():
        found[name] = {"dtype": kind, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    return join(found, data)


def damage(rng, folder):
    """Damage one file of a checkpoint, and say which and how."""
    files = sorted(path.name for path in folder.iterdir())
    shards = [name for name in files if name.endswith(".safetensors")]
    name = rng.choice(["config.json", "config.json", "tokenizer.json", rng.choice(shards), rng.choice(files)])
    file, how = folder / name, rng.choice(["bytes", "fields", "fields", "settings", "settings"])
    whole = file.read_bytes()
    if name == "tokenizer.json" and rng.random() < 0.2:
        part = rng.choice([*PARTS])
        file.write_text(json.dumps(json.loads(whole) | {part: rng.choice(PARTS[part])}))
        return f"{name} {part}"
    if name == "config.json" and how == "settings":
        fields = rng.sample([*SETTINGS], rng.choice([1, 1, 2]))
        config = json.loads(whole) | {field: rng.choice(SETTINGS[field]) for field in fields}
        file.write_text(json.dumps(config))
        return f"{name} { {field: config[field] for field in fields} }"
    if name not in shards:
        file.write_bytes(mutate_bytes(rng, whole) if how == "bytes"
                         else json.dumps(mutate_json(rng, json.loads(whole))).encode())
        return f"{name} {how}"
    header, data = split(whole)
    how = rng.choice(["bytes", "header", "fields", "fields", "length", "tensors", "tensors", "tensors"])
    if how == "bytes":
        file.write_bytes(mutate_bytes(rng, whole))
    elif how == "header":
        file.write_bytes(join(mutate_bytes(rng, json.dumps(header).encode()), data))
    elif how == "fields":
        file.write_bytes(join(json.dumps(mutate_json(rng, header)).encode(), data))
    elif how == "tensors":
        file.write_bytes(mutate_tensors(rng, header, data))
    else:
        size, length = len(whole), int.from_bytes(whole[:8], "little")
        near = [length - 1, length + 1, size - 8, size]
        length = rng.choice([0, 1, *near, 2**31, 2**32 + length, 2**63, 2**64 - 1])
        file.write_bytes(length.to_bytes(8, "little") + whole[8:])
    return f"{name} {how}"


# ---- what a damaged checkpoint asks for, found in another way ----------------------------------------------
class Other(Exception):
    """These files ask for something that reference.py does not compute."""


def settings(folder):
    """config.json as reference.Model wants it, with transformers' defaults. Raises Other."""
    config = {k: v for k, v in json.loads((folder / "config.json").read_bytes()).items() if v is not None}
    rope = config.pop("rope_scaling", None) or config.pop("rope_parameters", None) or {}
    config.pop("rope_parameters", None)
    rope_type, layer_types = rope.get("rope_type") or rope.get("type") or "default", config.get("layer_types", [])
    quantised = config.get("quantization_config", {})
    wrong = {
        "model_type": config["model_type"] not in ("qwen3", "llama"),
        "hidden_act": config.get("hidden_act", "silu") != "silu",
        "biases": config.get("attention_bias") or config.get("mlp_bias"),
        "sliding windows": config.get("use_sliding_window") or "sliding_attention" in layer_types,
        "experts": config.get("num_experts") or config.get("num_local_experts"),
        "RoPE": rope_type not in ("default", "linear") or rope_type == "linear" and rope.get("factor", 1) != 1,
        "RoPE for each kind of layer": "full_attention" in rope or "sliding_attention" in rope,
        "quantisation": not isinstance(quantised, dict) or "quant_method" in quantised}
    if any(wrong.values()):
        raise Other(", ".join(name for name in wrong if wrong[name]))
    theta = rope.get("rope_theta") or config.pop("rope_theta", 10000.0)
    if config["model_type"] == "qwen3":
        config.setdefault("head_dim", 128)
    return config | {"rope_theta": theta, "rope_parameters": None}


def unpack(parts, width):
    """A packed matrix as mlx-lm stores it: every row is one long number whose digits are the small integers."""
    packed, scales, biases = parts
    bits, group = 32 * packed.shape[1] // width, width // scales.shape[1]
    rows = [int.from_bytes(row.astype("<u4").tobytes(), "little") for row in packed]
    small = np.array([[row >> bits * i & 2**bits - 1 for i in range(width)] for row in rows])
    return small * np.repeat(scales, group, axis=1) + np.repeat(biases, group, axis=1)


def tensors_of(folder, config):
    """{name: nested lists} of all weights. Raises Other for tensors that reference.py would leave out."""
    index, found = folder / "model.safetensors.index.json", {}
    files = ["model.safetensors"]
    if not (folder / files[0]).exists():
        files = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    for file in files:
        header, data = split((folder / file).read_bytes())
        header.pop("__metadata__", None)
        if header.keys() & found.keys():
            raise Other("a tensor in two files")
        for name, entry in header.items():
            raw = data[slice(*entry["data_offsets"])]
            types = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "U32": "<u4"}
            numbers = np.frombuffer(raw, types[entry["dtype"]]).reshape(entry["shape"])
            if entry["dtype"] == "BF16":
                numbers = (numbers.astype("<u4") << 16).view("<f4")
            found[name] = numbers if entry["dtype"] == "U32" else numbers.astype(np.float64)
    tied = config.get("tie_word_embeddings", "lm_head.weight" not in found)
    for name in [name for name in found if name.startswith("lm_head.") and tied]:
        if not np.array_equal(found.pop(name), found.get(name.replace("lm_head", "model.embed_tokens"))):
            raise Other("a tied head that is not the embedding")
    for name in [name for name in found if name.endswith(".scales")]:
        base = name.removesuffix(".scales")
        width = {"down_proj": config["intermediate_size"], "o_proj": config["num_attention_heads"] * config["head_dim"]}
        parts = [found.pop(f"{base}.{part}") for part in ("weight", "scales", "biases")]
        found[f"{base}.weight"] = unpack(parts, width.get(base.split(".")[-1], config["hidden_size"]))
    block = r"model\.layers\.\d+\.(self_attn\.([qkvo]_proj|[qk]_norm)|mlp\.(gate|up|down)_proj|\w+_layernorm)\.weight"
    for name in found:
        if not re.fullmatch(rf"{block}|(model\.embed_tokens|model\.norm|lm_head)\.weight|.*inv_freq", name):
            raise Other(f"a tensor {name}")
    return {name: numbers.tolist() for name, numbers in found.items()}


def expected(folder):
    """The logits of IDS in 64 bits. Raises Other; of what can't be read, any other exception."""
    config = settings(folder)
    weights = tensors_of(folder, config)
    if "lm_head.weight" not in weights and config.get("tie_word_embeddings") is False:
        raise Other("a head that is missing")
    model = reference.Model(config | {"tie_word_embeddings": "lm_head.weight" not in weights}, weights)
    cache = reference.new_cache(model)
    return np.array([reference.forward_token(model, token, pos, cache) for pos, token in enumerate(IDS)])


# ---- one case, a batch of cases, and all -------------------------------------------------------------------
def logits():
    return np.array(llm.forward(IDS, [None] * llm.N_LAYERS, 0))


def state():
    """What a refusal must not change."""
    return logits().tolist(), llm.encode(PROMPT), llm.EOS_IDS, llm.MAX_POSITIONS


def agree(found, wanted):
    return found.shape == wanted.shape and np.abs(found - wanted).max() < 1e-3 * max(1, np.abs(wanted).max())


def outcome(folder, right, exact):
    """What the program makes of a folder: "refused", "same", "other logits", ..., or "FAULT" and what.

    exact: the damage changed neither weights nor settings, so if it loads, the logits must be the same.
    """
    before = state()
    try:
        llm.load_model(folder)
    except (ValueError, OSError) as error:
        if len(str(error).strip().splitlines()) != 1:
            return f"FAULT not one line: {error!r}"
        return "refused" if state() == before else f"FAULT refused, and the loaded model is another: {error}"
    except Exception as error:
        return f"FAULT load_model: {type(error).__name__}: {error}"
    except BaseException as error:
        if type(error).__name__ != "PanicException":            # of Rust, in tokenizers: nobody catches it
            raise
        return "panic" if state() == before else "FAULT a panic, and the loaded model is another"
    found = logits()
    if not np.isfinite(found[-1]).all():
        try:
            next(llm.next_tokens(IDS, [None] * llm.N_LAYERS))
        except ValueError as error:
            return "not finite" if "not finite" in str(error) else f"FAULT another reason: {error}"
        return "FAULT not finite, and a token all the same"
    if max(np.abs(np.array(w)).max() for w in llm.W.values()) > 1e15 or llm.THETA < 0.01:
        return "beyond float32"                                 # squares, or angles that are known to no digit
    same = np.array_equal(found, right)
    if exact and not same:
        return "FAULT wrong logits"
    if not exact:
        try:
            wanted = expected(folder)
        except Other as other:
            return f"FAULT accepted: {other}"
        except Exception as error:                              # it can't be read in another way than MLX's
            wanted = right if same else error
        if isinstance(wanted, Exception) or not agree(found, wanted):
            return f"FAULT other logits than the reference's {str(wanted)[:20]}"
    try:
        llm.generate(PROMPT, max_tokens=2)
    except BaseException as error:
        of_tokenizers = type(error) is Exception or type(error).__name__ == "PanicException"
        return "no text" if of_tokenizers or "not finite" in str(error) else f"FAULT generate: {error!r}"
    return "same" if same else "other logits, and right"


def batch(cases, work):
    """Work through cases in this process; prints [case, outcome], first what it is if the process ends."""
    rights = {}
    for base in [*BASES, "as_many_kv_heads"]:
        if not (work / base).exists():
            write_base(work / base, base)
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
        if result not in ("refused", "panic"):
            llm.load_model(work / "as_many_kv_heads")


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
