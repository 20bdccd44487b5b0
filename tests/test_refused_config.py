"""What load_model refuses because of config.json or generation_config.json.

A refusal is an error of one line that names the field and leaves the loaded model as it was.
"""
import shutil
import time
from pathlib import Path

import mlx.core as mx
import pytest

import llm_inference as llm
from damaged import OMIT, accepted, configure, refused


@pytest.fixture
def folder(load, folder_of, tmp_path):
    """A copy of the checkpoint "tied", to be changed; "as_many_kv_heads", another one, is loaded."""
    load("as_many_kv_heads")
    return Path(shutil.copytree(folder_of("tied"), tmp_path / "checkpoint"))


# ---- fields that ask for what the nine steps do not compute --------------------------------------------------
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}
NESTED = {"full_attention": {"rope_type": "default", "rope_theta": 5.0}}    # a model with two kinds of layer
OTHER_MODELS = {
    "model_type": ["qwen2", "qwen3_moe", "mistral", "gemma", "Qwen3", "", 3, ["qwen3"], [], {}, None, OMIT],
    "hidden_act": ["gelu", "relu", "SiLU", ["silu"], [], 0],
    "attention_bias": [True, "false", [True]],
    "mlp_bias": [True],
    "num_experts": [128, 1],
    "num_local_experts": [8],
    "use_sliding_window": [True, "no"],
    "layer_types": [["full_attention", "sliding_attention"], ["linear_attention"] * 3, "full",
                    [None], [["full_attention"]], True],
    "is_causal": [False],
    "rope_traditional": [True],
    "partial_rotary_factor": [0.5, 2, "1"],
    "rope_interleaved": [True],
    "tie_word_embeddings": ["true", 2],
    "rope_scaling": [
        *({key: kind, "factor": 4.0} for key in ("type", "rope_type")
          for kind in ("linear", "dynamic", "ntk", "longrope", "llama3", "proportional", "mrope", "su", 1)),
        {"type": "yarn", **YARN}, {"rope_type": "yarn", **YARN}, {"type": "default", "rope_type": "yarn"},
        {"rope_type": "default", "partial_rotary_factor": 0.5}, {"rope_type": "default", "rope_theta": 0},
        {"factor": 4.0}, {"type": "dynamic", "factor": 1.0}, NESTED, "linear", 2.0, ["yarn"]],
    "rope_parameters": [
        {"rope_type": "yarn", "rope_theta": 1e6, **YARN}, {"rope_type": "llama3", "rope_theta": 5e5},
        {"rope_theta": 1e6, "partial_rotary_factor": 0.25}, {"rope_theta": "1e6"}, {"rope_theta": -1.0},
        {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0}, NESTED, "linear", 7],
    "quantization_config": [
        {"quant_method": "gptq", "bits": 4}, {"quant_method": "awq"}, {"quant_method": "fp8"},
        {"quant_method": "bitsandbytes", "load_in_4bit": True}, {"quant_method": "compressed-tensors"},
        {"quant_method": "bitnet", "quantization_mode": "online", "linear_class": "autobitlinear"}, "int8"],
}


@pytest.mark.parametrize("field", OTHER_MODELS)
def test_what_would_be_computed_wrongly_is_refused(folder, field):
    """The field is named, or where an object is merged into the others, one inside it."""
    for value in OTHER_MODELS[field]:
        message = refused(configure(folder, **{field: value}), "config.json")
        assert any(f"{name} is " in message for name in [field, *(value if isinstance(value, dict) else [])]), message


def test_of_two_rope_objects_the_one_that_transformers_reads_is_looked_at(folder):
    """rope_scaling: rope_parameters says nothing where it is there."""
    configure(folder, rope_parameters={"rope_type": "default", "rope_theta": 1e6, "factor": 1.0, "type": "default"})
    for rope_type in ("dynamic", "yarn"):
        assert refused(configure(folder, rope_scaling={"rope_type": rope_type, "factor": 4.0}), "config.json")


# ---- numbers -------------------------------------------------------------------------------------------------
SHAPES = ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"]
NEEDED = [*SHAPES, "max_position_embeddings", "rms_norm_eps"]
COUNTS = [*SHAPES, "max_position_embeddings", "num_key_value_heads", "head_dim"]
NO_NUMBERS = [0, -1, -2**63, 10**30, float("nan"), float("inf"), -float("inf"), "16", "", [16], {}, True]
NO_COUNTS = [16.5, 16.0, 1e300]


@pytest.mark.parametrize("field", NEEDED)
def test_a_number_that_is_missing_is_named(folder, field):
    for value in (OMIT, None):
        assert refused(configure(folder, **{field: value}), "config.json", field)


@pytest.mark.parametrize("field", [*COUNTS, "rms_norm_eps", "rope_theta"])
def test_a_value_that_is_no_positive_number_is_named(folder, field):
    for value in NO_NUMBERS + NO_COUNTS * (field in COUNTS):
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
    assert refused(folder, "num_attention_heads", "num_key_value_heads")


def test_an_odd_head_dim_is_refused(folder):
    assert refused(configure(folder, head_dim=15), "head_dim", 15)
    configure(folder, model_type="llama", head_dim=OMIT, num_attention_heads=16)
    assert refused(folder, "head_dim", 3)               # 48 / 16


def test_more_heads_than_dimensions_are_refused(folder):
    """Where there is no head_dim that says otherwise: a Llama's dimensions are cut into heads."""
    configure(folder, model_type="llama", head_dim=OMIT, num_attention_heads=50, num_key_value_heads=50)
    assert refused(folder, "head_dim")


# ---- end tokens ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("value", ["2", 2.0, True, [2, "3"], [[2]], [None, 1.5], {"a": 2}], ids=str)
def test_an_end_token_that_is_no_id_is_refused(folder, value):
    assert refused(configure(folder, eos_token_id=value), "eos_token_id")
    (folder / "generation_config.json").write_text("{}")
    configure(folder, "generation_config.json", eos_token_id=value)
    assert refused(configure(folder, eos_token_id=2), "eos_token_id")


@pytest.mark.parametrize("own, further, ids", [
    (2, OMIT, {2}), ([2, 3], OMIT, {2, 3}), (OMIT, OMIT, set()), (None, [5], {5}), (2, None, {2}),
    ([], 7, {7}), (2, 2, {2}), ([2, 3], [3, 4], {2, 3, 4})])
def test_end_tokens_are_one_or_a_list_and_those_of_generation_config_too(folder, own, further, ids):
    (folder / "generation_config.json").write_text("{}")
    configure(folder, "generation_config.json", eos_token_id=further)
    llm.load_model(configure(folder, eos_token_id=own))
    assert llm.EOS_IDS == ids


# ---- files that are no JSON ----------------------------------------------------------------------------------
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"f4" * 32 + b"\nsize 1503300328\n"
NOT_JSON = {
    "empty": b"", "a blank": b" ", "cut off": b'{"model_type": "qw', "garbage": bytes(range(256)),
    "zeros": b"\0" * 99, "not UTF-8": b'{"model_type": "qwen\xff3"}', "HTML": b"<!DOCTYPE html>\n<html></html>\n",
    "arrays": b"[" * 200_000, "objects": b'{"a":' * 200_000, "digits": b'{"head_dim": ' + b"9" * 9999 + b"}",
    "Git LFS": LFS_POINTER,
}
NO_OBJECTS = [b"[]", b'"qwen3"', b"3", b"null", b"true", b'[["eos_token_id", 65]]']


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "generation_config.json"])
def test_a_file_that_is_not_json_or_holds_no_object_is_named(folder, file):
    for content in [*NOT_JSON.values(), *NO_OBJECTS]:
        (folder / file).write_bytes(content)
        assert refused(folder, file).count(file) == 1, content[:20]


def test_a_broken_index_is_named(load, folder_of, tmp_path):
    load("as_many_kv_heads")
    folder = Path(shutil.copytree(folder_of("sharded"), tmp_path / "shards"))
    index = folder / "model.safetensors.index.json"
    for content in [*NOT_JSON.values(), *NO_OBJECTS, b"{}"]:
        index.write_bytes(content)
        assert refused(folder, index.name).count(index.name) == 1, content[:20]
    for weight_map in (OMIT, None, [], 3, "x"):
        assert refused(configure(folder, index.name, weight_map=weight_map), index.name), weight_map
    assert refused(configure(folder, index.name, weight_map={}), "model.embed_tokens.weight")


def test_a_byte_order_mark_is_no_part_of_the_text(folder, folder_of):
    (folder / "config.json").write_bytes(b"\xef\xbb\xbf" + (folder / "config.json").read_bytes())
    assert accepted(folder, folder_of("tied"))
