"""What can go wrong: all that load_model refuses, the odd checkpoints that it takes, and the command line.

A refusal is an error of one line that names the field, the tensor or the file, and leaves the model that was
loaded before as it was.
"""
import contextlib
import errno
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import mlx.core as mx
import pytest

import fuzz
import llm_inference as llm
from checkpoints import make_checkpoint

ROOT = Path(llm.__file__).resolve().parent
OMIT = object()                                         # as a field's new value: leave the field out
IDS = [72, 105, 258, 0, 271]
WEIGHTS = "model.safetensors"
Q_PROJ, EMBEDDING = "model.layers.1.self_attn.q_proj.weight", "model.embed_tokens.weight"
ENV = {name: os.environ[name] for name in ("PATH", "SYSTEMROOT", "TMPDIR", "TEMP") if name in os.environ} | {
    "HF_HUB_OFFLINE": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}       # what children get
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"f4" * 32 + b"\nsize 1503300328\n"


def logits():
    return llm.forward(IDS, [None] * llm.N_LAYERS, 0)


@pytest.fixture
def folder(load, folder_of, tmp_path):
    """A copy of the checkpoint "tied", to be damaged; "as_many_kv_heads", another one, is loaded."""
    load("as_many_kv_heads")
    return Path(shutil.copytree(folder_of("tied"), tmp_path / "checkpoint"))


@pytest.fixture
def shards(load, folder_of, tmp_path):
    """A copy of the checkpoint "sharded", in three files; another one is loaded."""
    load("as_many_kv_heads")
    return Path(shutil.copytree(folder_of("sharded"), tmp_path / "shards"))


def configure(folder, file="config.json", **fields):
    """Change fields of a JSON file in a folder; returns the folder."""
    config = json.loads((folder / file).read_text(encoding="utf-8")) | fields
    (folder / file).write_text(json.dumps({k: v for k, v in config.items() if v is not OMIT}))
    return folder


def store(folder, tensors, drop=()):
    """Add or replace tensors in a folder's file of weights, or leave some out; returns the folder."""
    stored = mx.load(str(folder / WEIGHTS)) | tensors
    mx.eval(stored)
    mx.save_safetensors(str(folder / WEIGHTS), {name: w for name, w in stored.items() if name not in drop})
    return folder


def refused(folder, *words):
    """load_model ends in one line that holds these words, and the model loaded before is still whole."""
    with unchanged(), pytest.raises((ValueError, OSError)) as caught:
        llm.load_model(folder)
    message = str(caught.value).replace(str(folder.parent), "")
    assert message and "\n" not in message and all(str(word) in message for word in words), message
    return message


LOGITS = []                                             # a state of the model, its weights, and its logits


@contextlib.contextmanager
def unchanged():
    """What happens inside leaves the model as it was: each weight, each constant, each function, the logits.

    The logits before are those of the last time, if the state is the same.
    """
    def state():
        names = [*llm.CONSTANTS, *llm.KERNELS, "EOS_IDS", "tok", "kernels"]
        return {name: id(w) for name, w in llm.W.items()}, [getattr(llm, name) for name in names]

    before = state()
    if LOGITS[:1] != [before]:
        LOGITS[:] = before, dict(llm.W), logits()       # as long as the weights are kept, no other has the id of one
    yield
    assert state() == before and mx.array_equal(logits(), LOGITS[2])


def accepted(folder, like):
    """load_model takes the folder, and the model computes what the folder "like" does."""
    llm.load_model(like)
    wanted = logits()
    llm.load_model(folder)
    assert mx.array_equal(logits(), wanted)
    return True


# ---- config.json asks for what the program does not compute ------------------------------------------------
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}
NESTED = {"full_attention": {"rope_type": "default", "rope_theta": 5.0}}    # a model with two kinds of layer
OTHER_MODELS = {
    "model_type": ["qwen2", "qwen3_moe", "mistral", "gemma", "Qwen3", "", 3, ["qwen3"], {}, None, OMIT],
    "hidden_act": ["gelu", "relu", "SiLU", ["silu"], 0],
    "attention_bias": [True, "false", [False]],
    "mlp_bias": [True],
    "num_experts": [128, 1],
    "num_local_experts": [8],
    "sliding_window": [4096, 640, "full"],              # without use_sliding_window it is meant
    "use_sliding_window": [True, "no", [False]],
    "layer_types": [["full_attention", "sliding_attention"], ["linear_attention"] * 3, "full", [None], True],
    "is_causal": [False],
    "rope_traditional": [True],
    "quantization_config": [{"quant_method": "gptq", "bits": 4}, {"quant_method": "fp8"}, "int8"],
    "partial_rotary_factor": [0.5, 2, "1"],
    "rope_interleaved": [True],
    "tie_word_embeddings": ["true", 2, [True]],
    "rope_scaling": [
        *({key: kind, "factor": 4.0} for key in ("type", "rope_type")
          for kind in ("linear", "dynamic", "ntk", "longrope", "llama3", "proportional", "mrope", "su", 1)),
        {"type": "yarn", **YARN}, {"rope_type": "yarn", **YARN}, {"type": "default", "rope_type": "yarn"},
        {"rope_type": "default", "partial_rotary_factor": 0.5}, {"rope_type": "default", "rope_theta": 0},
        {"factor": 4.0}, NESTED, "linear", 2.0, ["yarn"]],
    "rope_parameters": [
        {"rope_type": "yarn", "rope_theta": 1e6, **YARN}, {"rope_type": "llama3", "rope_theta": 5e5},
        {"rope_theta": 1e6, "partial_rotary_factor": 0.25}, {"rope_theta": "1e6"}, {"rope_theta": -1.0},
        NESTED, "linear", 7],
}


@pytest.mark.parametrize("field", OTHER_MODELS)
def test_what_would_be_computed_wrongly_is_refused(folder, field):
    """The field is named, or where RoPE is set in an object, one inside it."""
    for value in OTHER_MODELS[field]:
        message = refused(configure(folder, **{field: value}), "config.json")
        names = [field]
        if field in ("rope_scaling", "rope_parameters"):
            names = value if isinstance(value, dict) else ["rope_type", field]
        assert any(name in message for name in names), (value, message)


@pytest.mark.parametrize("packing", [
    {"bits": 4, "group_size": 32, "mode": "mxfp4"}, {"bits": "4", "group_size": 64},
    {"bits": 4, "group_size": 0}, "4"], ids=str)
def test_a_quantisation_that_is_not_known_is_refused(folder, packing):
    assert refused(configure(folder, quantization=packing), "quantization")


# ---- numbers in config.json --------------------------------------------------------------------------------
SHAPES = ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"]
NEEDED = [*SHAPES, "max_position_embeddings", "rms_norm_eps"]
COUNTS = [*SHAPES, "max_position_embeddings", "num_key_value_heads", "head_dim"]
NO_NUMBERS = [0, -1, -2**63, 10**30, float("nan"), float("inf"), -float("inf"), "16", "", [16], {}, True]


@pytest.mark.parametrize("field", NEEDED)
def test_a_number_that_is_missing_is_named(folder, field):
    for value in (OMIT, None):
        assert refused(configure(folder, **{field: value}), "config.json", field)


@pytest.mark.parametrize("field", [*COUNTS, "rms_norm_eps", "rope_theta"])
def test_a_value_that_is_no_positive_number_is_named(folder, field):
    for value in NO_NUMBERS:
        assert refused(configure(folder, **{field: value}), "config.json", field), value


@pytest.mark.parametrize("field", COUNTS)
def test_a_count_that_is_a_fraction_is_named(folder, field):
    for value in (16.5, 16.0, 1e300):
        assert refused(configure(folder, **{field: value}), "config.json", field), value


@pytest.mark.parametrize("field", [*SHAPES, "num_key_value_heads", "head_dim"])
def test_a_huge_count_is_refused_at_once_and_nothing_is_allocated(folder, field):
    for value in (10**6, 2**31, 2**40, 2**53 - 2):
        before, began = mx.get_peak_memory(), time.time()
        assert refused(configure(folder, **{field: value}))
        assert time.time() - began < 1 and mx.get_peak_memory() - before < 10**6, value


@pytest.mark.parametrize("heads, kv_heads", [(4, 3), (4, 5), (4, 8), (3, 2)])
def test_heads_that_are_not_a_multiple_of_kv_heads_are_refused(folder, heads, kv_heads):
    configure(folder, num_attention_heads=heads, num_key_value_heads=kv_heads)
    assert refused(folder, "num_attention_heads", "num_key_value_heads", heads, kv_heads)


def test_an_odd_head_dim_is_refused(folder):
    assert refused(configure(folder, head_dim=15), "head_dim", 15)
    configure(folder, model_type="llama", head_dim=OMIT, num_attention_heads=16)
    assert refused(folder, "head_dim", 3)               # 48 / 16


def test_more_heads_than_dimensions_are_refused(folder):
    """Where there is no head_dim that says otherwise: a Llama's dimensions are cut into heads."""
    configure(folder, model_type="llama", head_dim=OMIT, num_attention_heads=50, num_key_value_heads=50)
    assert refused(folder, "head_dim")


@pytest.mark.parametrize("value", [OMIT, None], ids=["omitted", "null"])
def test_a_qwen3_without_head_dim_has_heads_of_128(folder, tmp_path, value):
    """As in transformers' Qwen3Config: it is not 48 / 4."""
    wide = make_checkpoint(tmp_path / "wide", "tied", head_dim=128)
    assert accepted(configure(Path(shutil.copytree(wide, tmp_path / "copy")), head_dim=value), wide)
    assert llm.D_HEAD == 128
    assert refused(configure(folder, head_dim=value), "k_norm", (16,), (128,))  # what it holds is of 16


def test_a_llama_without_head_dim_cuts_its_dimensions_into_heads(folder_of, tmp_path):
    source = folder_of("llama_no_head_dim")
    assert accepted(configure(Path(shutil.copytree(source, tmp_path / "copy")), head_dim=8), source)    # 48 / 6
    llm.load_model(source)
    assert llm.D_HEAD == 8


@pytest.mark.parametrize("value", ["2", 2.0, True, [2, "3"], [[2]], [None, 1.5], {"a": 2}], ids=str)
def test_an_end_token_that_is_no_id_is_refused(folder, value):
    assert refused(configure(folder, eos_token_id=value), "eos_token_id")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    assert refused(configure(folder, eos_token_id=2), "eos_token_id")


# ---- files -------------------------------------------------------------------------------------------------
NOT_JSON = {
    "empty": b"", "a blank": b" ", "cut off": b'{"model_type": "qw', "garbage": bytes(range(256)),
    "zeros": b"\0" * 99, "not UTF-8": b'{"model_type": "qwen\xff3"}', "HTML": b"<!DOCTYPE html><html></html>",
    "arrays": b"[" * 200_000, "objects": b'{"a":' * 200_000, "digits": b'{"head_dim": ' + b"9" * 9999 + b"}",
    "Git LFS": LFS_POINTER,
}
NO_OBJECTS = [b"[]", b'"qwen3"', b"3", b"null", b"true"]
EMPTY_HEADER = (2).to_bytes(8, "little")


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "generation_config.json"])
def test_a_file_that_is_not_json_is_named(folder, file):
    for kind, content in NOT_JSON.items():
        (folder / file).write_bytes(content)
        assert refused(folder, file), kind


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json"])
def test_a_file_that_holds_no_object_is_named(folder, file):
    for content in NO_OBJECTS:
        (folder / file).write_bytes(content)
        assert refused(folder, file), content


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", WEIGHTS])
def test_a_missing_file_is_named(folder, file):
    (folder / file).unlink()
    assert refused(folder, file)
    (folder / file).mkdir()                             # or a folder where the file should be
    assert refused(folder, file)


def test_a_folder_that_is_not_there_or_not_a_folder_is_named(folder):
    assert refused(folder / "not there", "not there")
    assert refused(folder / "config.json", "config.json")


def test_a_truncated_file_of_weights_is_refused(folder):
    whole = (folder / WEIGHTS).read_bytes()
    for length in (0, 1, 7, 8, 9, 100, 4000, len(whole) // 2, len(whole) - 1):
        (folder / WEIGHTS).write_bytes(whole[:length])
        assert refused(folder, WEIGHTS), length


@pytest.mark.parametrize("content", [
    LFS_POINTER, b"garbage " * 999, b"\0" * 999, b"\xff" * 999, b"PK\3\4" * 99, b"\0" * 7 + b"\x80{}",
    EMPTY_HEADER + b"{}", EMPTY_HEADER + b"[]", EMPTY_HEADER + b"00"], ids=lambda content: repr(content[:10]))
def test_what_is_no_file_of_weights_is_refused(folder, content):
    (folder / WEIGHTS).write_bytes(content)
    assert refused(folder)


def test_a_missing_or_truncated_shard_is_named(shards):
    second = shards / "model-00002-of-00003.safetensors"
    second.write_bytes(second.read_bytes()[:-1])
    assert refused(shards, second.name)
    second.unlink()
    assert refused(shards, second.name)


def test_a_broken_index_is_refused(shards):
    index = shards / "model.safetensors.index.json"
    names = json.loads(index.read_text())["weight_map"]
    for kind, content in NOT_JSON.items():
        index.write_bytes(content)
        assert refused(shards, index.name), kind
    index.write_text("{}")
    for files in (1, None, ["b"], "", ".", "\0", "\ud800", "model-00001-of-00003.safetensors"):
        assert refused(configure(shards, index.name, weight_map=dict.fromkeys(names, files))), files
    for weight_map in (OMIT, None, {}, [], 3, "x"):
        assert refused(configure(shards, index.name, weight_map=weight_map)), weight_map


# ---- tensors -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", [
    Q_PROJ, EMBEDDING, "model.norm.weight", "model.layers.2.self_attn.k_norm.weight",
    "model.layers.0.mlp.down_proj.weight"])
def test_a_missing_tensor_is_named(folder, name):
    assert refused(store(folder, {}, drop=[name]), name)


@pytest.mark.parametrize("name", [
    "extra", "model.layers.3.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias",
    "model.layers.0.mlp.gate.weight", "model.layers.0.self_attn.q_proj.scales", "x.inv_freq.weight"])
def test_an_extra_tensor_is_named(folder, name):
    assert refused(store(folder, {name: mx.zeros((64, 48))}), name)


@pytest.mark.parametrize("name, wrong, right", [
    (Q_PROJ, (48, 64), (64, 48)), (Q_PROJ, (64 * 48,), (64, 48)), (Q_PROJ, (1, 64, 48), (64, 48)),
    (EMBEDDING, (271, 48), (272, 48)), ("model.layers.0.self_attn.k_norm.weight", (64,), (16,)),
    ("model.norm.weight", (48, 1), (48,)), ("model.norm.weight", (), (48,))])
def test_a_misshapen_tensor_is_named_with_both_shapes(folder, name, wrong, right):
    assert refused(store(folder, {name: mx.zeros(wrong)}), name, wrong, right)


@pytest.mark.parametrize("dtype", [mx.int8, mx.uint8, mx.uint32, mx.int64, mx.complex64, mx.bool_], ids=str)
def test_a_tensor_that_holds_no_floats_is_named_with_its_type(folder, dtype):
    assert refused(store(folder, {Q_PROJ: mx.zeros((64, 48), dtype)}), Q_PROJ, dtype)


@pytest.mark.parametrize("dtype, size", [("F64", 8), ("F8_E4M3", 1), ("F4", 1), ("float32", 4)])
def test_a_type_of_float_that_the_program_does_not_compute_in_is_refused(folder, dtype, size):
    header, data = fuzz.split((folder / WEIGHTS).read_bytes())
    header["model.norm.weight"] |= {"dtype": dtype, "data_offsets": [len(data), len(data) + 48 * size]}
    (folder / WEIGHTS).write_bytes(fuzz.join(header, data + bytes(48 * size)))
    assert refused(folder)


def test_tensors_that_overlap_or_leave_gaps_are_refused(folder):
    """Python's safetensors refuses such files; what they hold would depend on who reads them."""
    header, data = fuzz.split((folder / WEIGHTS).read_bytes())
    shifted, twice = json.loads(json.dumps(header)), json.loads(json.dumps(header))
    shifted[Q_PROJ]["data_offsets"] = [offset + 4 for offset in header[Q_PROJ]["data_offsets"]]
    twice[Q_PROJ]["data_offsets"] = header["model.layers.2.self_attn.q_proj.weight"]["data_offsets"]
    for broken in (fuzz.join(shifted, data), fuzz.join(twice, data), fuzz.join(header, data + bytes(4))):
        (folder / WEIGHTS).write_bytes(broken)
        assert refused(folder, WEIGHTS, "overlap")


def test_an_index_that_names_no_file_of_weights_is_refused(shards):
    """MLX reads .npz files, too."""
    mx.savez(str(shards / "good.npz"), **mx.load(str(shards / "model-00001-of-00003.safetensors")))
    index = json.loads((shards / "model.safetensors.index.json").read_text())["weight_map"]
    weight_map = {k: v.replace("model-00001-of-00003.safetensors", "good.npz") for k, v in index.items()}
    assert refused(configure(shards, "model.safetensors.index.json", weight_map=weight_map), "good.npz")


def test_quantised_tensors_without_a_word_of_it_in_config_json_are_refused(folder):
    layer = Q_PROJ.removesuffix(".weight")
    packed, scales, biases = mx.quantize(mx.ones((64, 64)), group_size=64, bits=4)
    store(folder, {Q_PROJ: packed, f"{layer}.scales": scales, f"{layer}.biases": biases})
    assert refused(folder, layer)


def test_a_head_that_differs_from_tied_embeddings_is_refused(folder):
    store(folder, {"lm_head.weight": mx.load(str(folder / WEIGHTS))[EMBEDDING] * 2})
    assert refused(folder, "tie_word_embeddings", "lm_head.weight")


def test_a_head_that_is_its_own_and_missing_is_named(folder):
    assert refused(configure(folder, tie_word_embeddings=False), "lm_head.weight", (272, 48))


# ---- the tokenizer -----------------------------------------------------------------------------------------
def add_tokens(folder, last):
    """Add 14 tokens, <0> to <12> and one named last, which has the id 272, beyond the embedding's rows."""
    added = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    added += [added[0] | {"id": 259 + i, "content": f"<{i}>" if i < 13 else last} for i in range(14)]
    return configure(folder, "tokenizer.json", added_tokens=added)


@pytest.fixture
def beyond(folder):
    """A checkpoint whose tokenizer has the added tokens <0> to <13>: the last has no row in the embedding."""
    return add_tokens(folder, "<13>")


@pytest.mark.parametrize("run", [llm.generate, llm.trace, llm.explain], ids=lambda run: run.__name__)
def test_an_added_token_without_a_row_is_refused_by_name_where_a_prompt_uses_it(beyond, folder_of, capsys, run):
    """As in transformers the model loads: what has rows is computed."""
    assert accepted(beyond, folder_of("tied"))
    assert llm.encode("Hi<12>")[2:] == [271] and llm.generate("Hi<12>", 3).startswith("Hi<12>")
    with pytest.raises(ValueError, match=r"'<13>' with the id 272.* 272 rows"):
        run("Hi<13>!")
    assert capsys.readouterr().out == ""


def test_an_added_token_that_is_typed_in_a_chat_is_five_letters(beyond, capsys):
    llm.load_model(beyond)
    assert llm.chat(["Hi<13>!"], max_tokens=4) and capsys.readouterr().err == ""
    assert llm.chat(["Hi!"], system="<13>", max_tokens=4) and capsys.readouterr().err == ""


def test_an_added_token_without_a_row_is_one_line(beyond, one_line):
    assert one_line(["--model", beyond, "Hi<13>!", "--max-tokens=3"], "'<13>'", 272)


def test_a_token_of_the_vocabulary_without_a_row_is_refused(folder):
    vocab = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    vocab["vocab"]["Hi"] = 272
    assert refused(configure(folder, "tokenizer.json", model=vocab), "tokenizer.json", 273, 272)


@pytest.mark.parametrize("row", [272, 99_999, 2**32 - 1])
def test_a_tokenizer_that_adds_an_id_without_a_row_is_refused(folder, row):
    """The id is not in the vocabulary, but in the template that every text is put into."""
    configure(folder, "tokenizer.json", post_processor=fuzz.ROBERTA | {"sep": ["</s>", row]})
    assert refused(folder, "tokenizer.json")


def test_a_tokenizer_s_dropout_is_for_training(tiny, tmp_path):
    """With it "Paris" would be another row of tokens each time."""
    folder = Path(shutil.copytree(tiny, tmp_path / "copy"))
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    wanted = llm.encode("The capital of France is Paris.")
    llm.load_model(configure(folder, "tokenizer.json", model=model | {"dropout": 0.5}))
    assert all(llm.encode("The capital of France is Paris.") == wanted for _ in range(20))


def test_the_largest_id_counts_and_not_the_number_of_tokens(folder):
    from tokenizers import Tokenizer, models
    Tokenizer(models.BPE(vocab={"a": 0, "b": 400}, merges=[])).save(str(folder / "tokenizer.json"))
    assert refused(folder, "401 tokens", 272)


def test_a_tokenizer_that_makes_its_library_panic_is_refused(folder):
    """What Rust code raises, PanicException, is no Exception."""
    configure(folder, "tokenizer.json", normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"})
    assert refused(folder, "tokenizer.json")


# ---- what is odd and right ---------------------------------------------------------------------------------
@pytest.mark.parametrize("fields", [
    {"rope_theta": OMIT, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}},
    {"rope_theta": OMIT, "rope_scaling": {"type": "default", "rope_theta": 1000000}},
    {"rope_scaling": None, "rope_parameters": None}, {"rope_scaling": {}},
    {"rope_scaling": {"type": "default"}},
    {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28},
    {"sliding_window": None, "layer_types": ["full_attention"] * 3}, {"layer_types": None},
    {"tie_word_embeddings": OMIT}, {"tie_word_embeddings": None}, {"attention_bias": OMIT},
    {"hidden_act": OMIT},
    {"torch_dtype": "float99", "architectures": ["Unknown"], "transformers_version": 4, "extra": {"a": [1]}},
    {"rope_theta": OMIT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 1.0}},
    {"partial_rotary_factor": 1.0}, {"rms_norm_eps": 1e-06, "attention_dropout": 0.0},
], ids=lambda fields: ",".join(fields))
def test_a_config_that_says_the_same_is_taken(folder, folder_of, fields):
    assert accepted(configure(folder, **fields), folder_of("tied"))


def test_a_tied_head_that_is_stored_all_the_same_is_taken(folder, folder_of):
    store(folder, {"lm_head.weight": mx.load(str(folder / WEIGHTS))[EMBEDDING]})
    assert accepted(folder, folder_of("tied"))
    assert accepted(configure(folder, tie_word_embeddings=OMIT), folder_of("tied"))


def test_an_old_llama_s_stored_frequencies_are_passed_over(folder, folder_of):
    store(folder, {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": mx.zeros((8,)) for i in range(3)})
    assert accepted(folder, folder_of("tied"))


def test_tensors_without_the_prefix_of_a_base_model_s_save_are_taken(folder_of, tmp_path):
    """transformers' Qwen3Model.save_pretrained writes "layers.0...." and no head; a head keeps its name."""
    for name in ("tied", "untied"):
        folder = Path(shutil.copytree(folder_of(name), tmp_path / name))
        stored = mx.load(str(folder / WEIGHTS))
        mx.eval(stored)
        mx.save_safetensors(str(folder / WEIGHTS), {n.removeprefix("model."): w for n, w in stored.items()})
        assert accepted(folder, folder_of(name))


def test_only_some_tensors_without_the_prefix_are_refused(folder):
    store(folder, {Q_PROJ.removeprefix("model."): mx.load(str(folder / WEIGHTS))[Q_PROJ]}, drop=[Q_PROJ])
    assert refused(folder, Q_PROJ.removeprefix("model."))


@pytest.mark.parametrize("stored, further, ids", [
    (2, OMIT, {2}), ([2, 3], OMIT, {2, 3}), (OMIT, OMIT, set()), (None, [5], {5}), (2, None, {2}),
    ([], 7, {7}), (2, 2, {2}), ([2, 3], [3, 4], {2, 3, 4})])
def test_end_tokens_are_one_or_a_list_and_those_of_generation_config_too(folder, stored, further, ids):
    (folder / "generation_config.json").write_text("{}")
    configure(folder, "generation_config.json", eos_token_id=further)
    llm.load_model(configure(folder, eos_token_id=stored))
    assert llm.EOS_IDS == ids


@pytest.mark.filterwarnings("ignore:invalid value")                             # NumPy's own, which main turns off
@pytest.mark.parametrize("value", [mx.nan, mx.inf])
def test_weights_that_are_not_numbers_are_named_and_give_no_text(folder, value):
    llm.load_model(store(folder, {Q_PROJ: mx.full((64, 48), value)}))
    with pytest.raises(ValueError, match=Q_PROJ.replace(".", r"\.")):
        llm.generate("Hi", max_tokens=4)


# ---- a load that fails changes nothing, wherever it fails -----------------------------------------------------
def test_weights_that_do_not_fit_in_memory_are_refused_before_they_are_read(folder, monkeypatch):
    """A machine of 16 pages of one byte, so to speak."""
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": 16}[name])
    assert refused(folder, "memory")


@pytest.mark.parametrize("error", [RuntimeError("[malloc] no memory"), KeyboardInterrupt()], ids=["error", "ctrl_c"])
@pytest.mark.parametrize("done", [0, 1, 20, 34])
def test_a_load_that_breaks_off_while_it_reads_the_weights_changes_nothing(folder, monkeypatch, done, error):
    """After so many of 35 tensors."""
    evaluate, left = mx.eval, [done]

    def breaks_off(*arrays):
        left[0] -= 1
        if left[0] < 0:
            raise error
        evaluate(*arrays)

    with unchanged(), monkeypatch.context() as patch:
        patch.setattr(mx, "eval", breaks_off)
        with pytest.raises(type(error)):
            llm.load_model(folder)
        assert left == [-1]
        patch.undo()


def test_loading_takes_little_more_memory_than_the_weights(tmp_path):
    """What was stored, in bfloat16, is not kept beside it: that would be half as much, or as much, again."""
    folder = make_checkpoint(tmp_path / "m", "bfloat16", hidden_size=64, intermediate_size=128, num_hidden_layers=24)
    for dtype, quantize in itertools.product([mx.float32, mx.bfloat16], [None, 4]):
        llm.load_model(folder)
        llm.W.clear()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        llm.load_model(folder, dtype, quantize)
        size = sum(w.nbytes for w in {id(w): w for w in llm.W.values()}.values())
        assert size > 24 * 60_000 * dtype.size / 4, (dtype, quantize)
        assert mx.get_peak_memory() - before < 1.2 * size, (dtype, quantize)


def test_a_few_mutated_checkpoints_are_refused_or_right(tmp_path):
    """python tests/fuzz.py tries many more."""
    assert fuzz.run(range(60), tmp_path) == []


# ---- the command line --------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def long(folder_of, tmp_path_factory):
    """The folder of a checkpoint that generates thousands of tokens: it knows of no end token."""
    folder = shutil.copytree(folder_of("tied"), tmp_path_factory.mktemp("long") / "checkpoint")
    return configure(folder, eos_token_id=OMIT, max_position_embeddings=10**6)


def start(*args, **options):
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE,
               "env": ENV} | options
    return subprocess.Popen([sys.executable, ROOT / "llm_inference.py", *args], **options)


def end(process, stdin=None):
    """(status, stdout, stderr) of a process, which has 20 seconds to end."""
    try:
        out, err = process.communicate(stdin, timeout=20)
    finally:
        process.kill()
    return process.returncode, out, err.decode()


def is_one_line(status, err, *words):
    """Status 1 or 2, and one line on stderr that holds these words.

    It is of at most 300 characters, after the program's name, and none of them steers a terminal.
    """
    assert status in (1, 2) and err.count("\n") == 1 and err.endswith("\n"), (status, err)
    assert err[:-1].isprintable() and len(err) <= len("llm_inference.py: ") + 300 + 1, err
    assert err.startswith("llm_inference.py: ") and all(str(word) in err for word in words), err
    return True


@pytest.fixture
def one_line(program):
    """A function that runs the program with arguments: it ends with one line that holds these words."""
    def check(args, *words, **options):
        status, _, err = program(*args, **options)
        return is_one_line(status, err, *words)
    return check


@pytest.fixture
def refused_line(monkeypatch, capsys):
    """A function from arguments that the program can't take to the line that it leaves on stderr, with status 2."""
    def line(*args):
        monkeypatch.setattr(sys, "argv", ["llm_inference.py", *args])
        with pytest.raises(SystemExit) as left:
            llm.parse_arguments()
        out, err = capsys.readouterr()
        assert left.value.code == 2 and out == "" and err.count("\n") == 1 and err.startswith("llm_inference.py: ")
        return err
    return line


BAD_OPTIONS = {
    "--max-tokens": ["0", "-1", "1.5", "nan", "", "many", "1e3", "\udcff"],
    "--temperature": ["-0.1", "nan", "inf", "-inf", "", "hot", "1e999"],
    "--top-p": ["0", "-1", "1.1", "nan", "inf", "", "most"],
    "--seed": ["-1", str(2**64), "1.5", "nan", "", "x", "9" * 5000],
}


@pytest.mark.parametrize("option", BAD_OPTIONS)
def test_an_option_out_of_range_is_one_line(option, refused_line):
    for value in BAD_OPTIONS[option]:
        assert option in refused_line("--model", "nowhere", f"{option}={value}")


def test_arguments_that_are_not_known_or_not_whole_are_one_line(refused_line):
    for args in [["--nonsense"], ["two", "prompts"], ["--model"], ["--seed"], ["--max-tokens"],
                 ["--chat", "--explain"], ["--think"], ["--system", "Be brief."], ["--quantize", "3"]]:
        assert refused_line(*args)


def test_a_folder_that_can_t_be_loaded_is_one_line(folder, one_line):
    assert one_line(["--model", "not there"], "not there")
    assert one_line(["--model="])
    assert one_line(["--model", folder / "config.json"], "config.json")    # a file
    assert one_line(["--model", "/dev/null"], "/dev/null")
    assert one_line(["--model", "a\nb"], "config.json")
    assert one_line(["--model", "x" * 5000])


STEERING = "\x1b[2J\x07\u202e\x9b1m"                    # clears the screen, rings, turns the direction of writing


@pytest.mark.parametrize("where", ["tensor", "value", "field", "token", "file"])
def test_names_and_values_from_files_do_not_steer_the_terminal(folder, where, one_line):
    if where == "tensor":
        store(folder, {f"model.{STEERING}x": mx.zeros(1)})
    elif where == "value":
        configure(folder, model_type=f"{STEERING}x")
    elif where == "field":
        configure(folder, quantization={"bits": 4, "group_size": 64, f"{STEERING}x": {"bits": 4, "mode": "other"}})
    elif where == "token":
        add_tokens(folder, f"{STEERING}x")
    else:
        folder = folder.rename(folder.parent / f"{STEERING}x")
        (folder / "config.json").unlink()
    shown = r"\u001b[2J\u0007\u202e\u009b1mx" if where in ("value", "field") else r"\x1b[2J\x07\u202e\x9b1mx"   # JSON's
    assert one_line(["--model", folder, f"Hello {STEERING}x"], shown)


def test_a_folder_s_name_does_not_steer_the_terminal_when_all_is_well(folder, program):
    folder = folder.rename(folder.parent / f"{STEERING}x")
    status, out, err = program("--model", folder, "Hello", "--max-tokens", "1")
    assert (status, err) == (0, "") and out.startswith(r"Model:  \x1b[2J\x07\u202e\x9b1mx  (")


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    folder = make_checkpoint(tmp_path / "m", "sharded")
    first, second = sorted(folder.glob("model-0000*.safetensors"))[:2]
    name, tensor = next(iter(mx.load(str(second)).items()))
    mx.save_safetensors(str(first), dict(mx.load(str(first))) | {name: tensor * 0})
    with pytest.raises(ValueError, match="another shard"):
        llm.load_model(folder)


def test_a_list_of_pairs_is_no_json_object_and_a_byte_order_mark_is_none_of_the_text(folder):
    (folder / "generation_config.json").write_text('[["eos_token_id", 65]]')
    with pytest.raises(ValueError, match="generation_config.json is not a JSON object"):
        llm.load_model(folder)
    (folder / "generation_config.json").unlink()
    (folder / "config.json").write_bytes(b"\xef\xbb\xbf" + (folder / "config.json").read_bytes())
    llm.load_model(folder)


def test_a_very_long_name_or_value_is_cut(folder, one_line):
    configure(folder, model_type="x" * 5000)
    assert one_line(["--model", folder], "model_type is", "xxx...xxx", "which is not supported")
    configure(folder, model_type="qwen3")
    store(folder, {"y" * 5000: mx.zeros(1)})
    assert one_line(["--model", folder], "yyy...yyy", "the weights hold (1,)")


def test_a_prompt_that_can_t_be_used_is_one_line(folder, one_line):
    """Empty, not UTF-8, or longer than the context; then both numbers are shown."""
    def piped(stdin, *words):
        return one_line(["--model", folder, "-"], *words, stdin=stdin)

    assert one_line(["--model", folder, ""], "empty") and piped(b"", "empty") and piped(b"\n", "empty")
    assert one_line(["--model", folder, b"caf\xe9"], "UTF-8") and piped(b"caf\xe9", "UTF-8")
    assert one_line(["--model", folder, "a" * 700, "--max-tokens", "1"], 700, 640)
    assert one_line(["--model", folder, "a", "--max-tokens", str(2**40)], 2**40, 640)
    assert piped(b"word " * 60_000, 60_000 * len("word "), 640)


def test_a_tokenizer_that_can_t_read_the_prompt_is_one_line(folder, one_line):
    model = {"type": "WordLevel", "vocab": {"Hi": 0}, "unk_token": "nowhere"}
    configure(folder, "tokenizer.json", pre_tokenizer=None, model=model)
    assert one_line(["--model", folder, "日本"], "UNK")


def test_a_stream_that_is_closed_from_the_start_is_one_line(folder):
    """Without stderr it stands on stdout. The three run at the same time."""
    command = [sys.executable, ROOT / "llm_inference.py", "Hi", "--model", folder]
    running = {closed: subprocess.Popen(["sh", "-c", f'exec "$@" {closed}', "sh", *command], stdin=subprocess.DEVNULL,
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENV)
               for closed in ("<&-", ">&-", "2>&-")}
    ended = {closed: end(process) for closed, process in running.items()}
    said = "llm_inference.py: stdin, stdout or stderr is closed\n"
    for closed, (status, out, err) in ended.items():
        assert (status, out.decode(), err) == ((1, said, "") if closed == "2>&-" else (1, "", said)), closed


def test_a_reader_that_has_seen_enough_ends_it(long):
    """| head -1: the pipe is closed while tokens are printed. It ends without a word, and not well."""
    with start("--model", long, "--max-tokens", "100000") as process:
        assert process.stdout.readline().startswith(b"Model:")
        process.stdout.close()
        err = process.stderr.read().decode()
    assert (process.returncode, err) == (1, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk_is_one_line(folder):
    with open("/dev/full", "w") as full:
        started = [start("--model", folder, "abc", *mode, stdout=full) for mode in ([], ["--explain"], ["--trace"])]
        for status, _, err in map(end, started):
            assert is_one_line(status, err, os.strerror(errno.ENOSPC))


def test_letters_that_a_terminal_does_not_have_are_shown_as_others(folder, program, one_line):
    for prompt in ("日本 🦀", "-"):
        args = ["--model", folder, prompt, "--max-tokens=3"]
        status, out, err = program(*args, stdin="naïve".encode(), encoding="ascii")
        assert (status, err) == (0, "") and "Time:" in out
    for model in ("日本", b"\xe9"):
        assert one_line(["--model", model], encoding="ascii")


# A stand-in for a notebook, whose streams have neither reconfigure nor a file: %run, cell after cell
NOTEBOOK = """
import io, json, runpy, sys
file, *cells = json.loads(sys.argv[1])
for sys.argv in [[file, *args] for args in cells]:
    terminal, sys.stdout, sys.stderr, ended = sys.stdout, io.StringIO(), io.StringIO(), None
    try:
        runpy.run_path(file, run_name="__main__")
    except SystemExit as left:
        ended = left.code
    shown, sys.stdout, sys.stderr = [sys.stdout.getvalue(), sys.stderr.getvalue()], terminal, sys.__stderr__
    print(json.dumps([*shown, ended]))
"""


def test_in_a_notebook_it_prints_and_the_kernel_goes_on():
    cells = [(["The capital of France is"], "Output: The capital of France is Paris.", "", None),
             (["The capital of France is", "--explain"], "Step 9", "", None),
             (["What is the capital of France?", "--chat"], "Paris", "", None),
             (["--chat", ""], "", "empty", 1), ([""], "", "empty", 1),
             (["--model", "nowhere"], "", "nowhere", 1),
             (["--top-p", "7"], "", "--top-p", 2)]
    args = [["--model", str(ROOT / "tests/tiny-qwen3"), *args] for args, *_ in cells]
    command = [sys.executable, "-c", NOTEBOOK, json.dumps([str(ROOT / "llm_inference.py"), *args])]
    process = subprocess.Popen(command, env=ENV, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)
    kernel, out, err = end(process)
    assert (kernel, err) == (0, "")
    for (args, printed, said, status), cell in zip(cells, out.splitlines(), strict=True):
        out, err, ended = json.loads(cell)
        assert printed in out and said in err and err.count("\n") == bool(said) and ended == status, args


# ---- signals -----------------------------------------------------------------------------------------------
def interrupted(process, number):
    """The process, now in the middle of something, ends at the signal, with nothing on stderr."""
    process.send_signal(number)
    status, _, err = end(process)
    assert (status, err) == (130 if number == signal.SIGINT else -number, "")
    return True


SIGNALS = signal.SIGINT, signal.SIGTERM


def test_a_signal_ends_it_in_the_middle_of_a_text(long):
    running = {number: start("--model", long, "--max-tokens", "100000") for number in SIGNALS}
    for number, process in running.items():
        assert process.stdout.readline().startswith(b"Model:")
        assert interrupted(process, number)


def test_a_signal_ends_it_while_it_loads_the_model(folder, tmp_path):
    """A pipe is in the place of config.json: opening it to write waits until the program opens it to read."""
    folders = {number: shutil.copytree(folder, tmp_path / number.name) for number in SIGNALS}
    for folder in folders.values():
        (folder / "config.json").unlink()
        os.mkfifo(folder / "config.json")
    running = {number: start("--model", folder) for number, folder in folders.items()}
    for number, process in running.items():
        with open(folders[number] / "config.json", "wb"):
            assert interrupted(process, number)
