"""What load_model refuses because of the files, the tensors in them, or the tokenizer.

A refusal is an error of one line that names the file or the tensor and leaves the loaded model as it was.
"""
import json
import shutil
from pathlib import Path

import mlx.core as mx
import pytest
from tokenizers import Tokenizer, models

import fuzz
import llm_inference as llm
from damaged import EMBEDDING, INDEX, OMIT, Q_PROJ, WEIGHTS, configure, refused, store, stored
from test_refused_config import LFS_POINTER


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


# ---- files ---------------------------------------------------------------------------------------------------
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


EMPTY_HEADER = (2).to_bytes(8, "little")


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


def test_an_index_that_names_no_files_of_weights_is_refused(shards):
    """MLX reads .npz files, too."""
    names = json.loads((shards / INDEX).read_text())["weight_map"]
    first = "model-00001-of-00003.safetensors"
    mx.savez(str(shards / "good.npz"), **mx.load(str(shards / first)))
    for file in (1, ["b"], {}, "", ".", "\0", "\ud800", "a\nb", "not there", "good.npz"):
        instead = {name: file if shard == first else shard for name, shard in names.items()}
        assert refused(configure(shards, INDEX, weight_map=instead)), file
    assert refused(configure(shards, INDEX, weight_map=instead), "good.npz")
    assert refused(configure(shards, INDEX, weight_map=dict.fromkeys(names, first)), "it is missing")


# ---- tensors -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", [
    Q_PROJ, EMBEDDING, "model.norm.weight", "model.layers.2.self_attn.k_norm.weight",
    "model.layers.0.mlp.down_proj.weight"])
def test_a_missing_tensor_is_named(folder, name):
    assert refused(store(folder, {}, drop=[name]), name)


@pytest.mark.parametrize("name", [
    "extra", "model.layers.3.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias", "lm_head.bias",
    "model.layers.0.mlp.gate.weight", "model.layers.0.self_attn.q_proj.scales", "x.inv_freq.weight"])
def test_an_extra_tensor_is_named(folder, name):
    assert refused(store(folder, {name: mx.zeros((64, 48))}), name.removesuffix("scales"))


@pytest.mark.parametrize("rename", [
    lambda name: f"_orig_mod.{name}", lambda name: f"base_model.{name}", lambda name: name.removeprefix("model.")],
    ids=["torch.compile", "PEFT", "a base model"])
def test_tensors_under_other_names_are_reported_under_the_names_that_the_file_has(folder, rename):
    weights = stored(folder)
    store(folder, {rename(name): w for name, w in weights.items()}, drop=weights)
    assert f" {rename(EMBEDDING)}" in refused(folder)


@pytest.mark.parametrize("name, wrong, right", [
    (Q_PROJ, (48, 64), (64, 48)), (Q_PROJ, (64 * 48,), (64, 48)), (Q_PROJ, (1, 64, 48), (64, 48)),
    (EMBEDDING, (271, 48), (272, 48)), ("model.layers.0.self_attn.k_norm.weight", (64,), (16,)),
    ("model.norm.weight", (48, 1), (48,)), ("model.norm.weight", (), (48,))])
def test_a_misshapen_tensor_is_named_with_both_shapes(folder, name, wrong, right):
    assert refused(store(folder, {name: mx.zeros(wrong)}), name, wrong, right)


@pytest.mark.parametrize("dtype", [mx.int8, mx.uint8, mx.uint32, mx.int64, mx.complex64, mx.bool_], ids=str)
def test_a_tensor_that_holds_no_floats_is_named_with_its_type(folder, dtype):
    """Such as the matrices of bitsandbytes: 8 bits are int8, and 4 bits uint8."""
    assert refused(store(folder, {Q_PROJ: mx.zeros((64, 48), dtype)}), Q_PROJ, dtype)


@pytest.mark.parametrize("dtype, size", [("F64", 8), ("F8_E4M3", 1), ("F8_E5M2", 1), ("F4", 1), ("float32", 4)])
def test_a_type_of_float_that_the_program_does_not_compute_in_is_refused(folder, dtype, size):
    header, data = fuzz.split((folder / WEIGHTS).read_bytes())
    header["model.norm.weight"] |= {"dtype": dtype, "data_offsets": [len(data), len(data) + 48 * size]}
    (folder / WEIGHTS).write_bytes(fuzz.join(header, data + bytes(48 * size)))
    assert refused(folder)


@pytest.mark.parametrize("kind", ["gptq", "awq", "fp8", "bitsandbytes"])
def test_other_quantised_matrices_are_refused_though_config_json_is_silent(folder, kind):
    """A matrix under the names, and in the types and shapes, that AutoGPTQ, AutoAWQ and transformers write."""
    layer = Q_PROJ.removesuffix(".weight")
    parts = {"gptq": {"qweight": mx.zeros((6, 64), mx.int32), "qzeros": mx.zeros((1, 8), mx.int32),
                      "scales": mx.ones((1, 64), mx.float16), "g_idx": mx.zeros(48, mx.int32)},
             "awq": {"qweight": mx.zeros((48, 8), mx.int32), "qzeros": mx.zeros((1, 8), mx.int32),
                     "scales": mx.ones((1, 64), mx.float16)},
             "fp8": {"weight": mx.zeros((64, 48), mx.uint8), "weight_scale_inv": mx.ones((1, 1))},
             "bitsandbytes": {"weight": mx.zeros((64 * 48 // 2, 1), mx.uint8), "weight.absmax": mx.ones(48)}}[kind]
    store(folder, {f"{layer}.{part}": array for part, array in parts.items()}, drop={Q_PROJ} - {f"{layer}.weight"
          for part in parts if part == "weight"})
    assert refused(folder, Q_PROJ)


def test_a_tensor_in_two_shards_is_refused(shards):
    first, second = sorted(shards.glob("model-0000*.safetensors"))[:2]
    name, tensor = next(iter(mx.load(str(second)).items()))
    mx.save_safetensors(str(first), dict(mx.load(str(first))) | {name: tensor * 0})
    assert refused(shards, second.name, name, "another")


def test_a_head_that_differs_from_tied_embeddings_is_refused(folder):
    store(folder, {"lm_head.weight": stored(folder)[EMBEDDING] + 1e-6})
    assert refused(folder, "lm_head.weight", "tied")


def test_a_head_that_is_its_own_and_missing_is_named(folder):
    assert refused(configure(folder, tie_word_embeddings=False), "lm_head.weight")


def test_a_qwen3_has_norms_of_queries_and_keys_and_a_llama_has_none(folder, folder_of, tmp_path):
    assert refused(configure(folder, model_type="llama"), "_norm.weight")
    llama = Path(shutil.copytree(folder_of("llama_head_dim"), tmp_path / "llama"))
    assert refused(configure(llama, model_type="qwen3"), "_norm.weight")


# ---- the tokenizer -------------------------------------------------------------------------------------------
def test_a_tokenizer_with_an_id_without_a_row_is_refused(folder):
    """In its vocabulary, or among the tokens that were added later; the largest id counts, not their number."""
    file = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocab, added = file["model"], file["added_tokens"]
    vocab["vocab"]["Hi"] = 272
    assert refused(configure(folder, "tokenizer.json", model=vocab), "tokenizer.json", 272)
    del vocab["vocab"]["Hi"]
    added += [added[0] | {"id": 259 + i, "content": f"<{i}>"} for i in range(14)]
    assert refused(configure(folder, "tokenizer.json", model=vocab, added_tokens=added), "tokenizer.json", 272)
    llm.load_model(configure(folder, "tokenizer.json", added_tokens=added[:-1]))
    Tokenizer(models.BPE(vocab={"a": 0, "b": 400}, merges=[])).save(str(folder / "tokenizer.json"))
    assert refused(folder, 400, 272)


@pytest.mark.parametrize("row", [272, 99_999, 2**32 - 1])
def test_a_tokenizer_that_adds_an_id_without_a_row_to_every_text_is_refused(folder, row):
    """The id is not in the vocabulary, but in the template that every text is put into."""
    configure(folder, "tokenizer.json", post_processor=fuzz.ROBERTA | {"sep": ["</s>", row]})
    assert refused(folder, "tokenizer.json", row)


def test_a_tokenizer_s_dropout_is_for_training(tiny, tmp_path):
    """With it "Paris" would be another row of tokens each time."""
    folder = Path(shutil.copytree(tiny, tmp_path / "copy"))
    model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    wanted = llm.encode("The capital of France is Paris.")
    llm.load_model(configure(folder, "tokenizer.json", model=model | {"dropout": 0.5}))
    assert all(llm.encode("The capital of France is Paris.") == wanted for _ in range(20))
