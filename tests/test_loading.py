"""Checkpoints that look odd and are right, and a load that breaks off; judged by transformers' logits in golden/."""
import itertools
import json
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import fuzz
import llm_inference as llm
from checkpoints import make_checkpoint
from damaged import EMBEDDING, INDEX, OMIT, Q_PROJ, accepted, configure, logits, refused, store, stored, unchanged

GOLDEN = Path(__file__).resolve().parent / "golden"


@pytest.fixture
def folder(load, folder_of, tmp_path):
    """A copy of the checkpoint "tied", to be changed; "as_many_kv_heads", another one, is loaded."""
    load("as_many_kv_heads")
    return Path(shutil.copytree(folder_of("tied"), tmp_path / "checkpoint"))


def as_in_transformers(name):
    """The loaded model computes the logits that transformers computes for one of checkpoints.py's."""
    wanted = mx.load(str(GOLDEN / f"{name}.safetensors"))
    found = np.array(llm.forward(wanted["ids"].tolist(), [None] * llm.N_LAYERS, 0))
    return np.abs(found - np.array(wanted["logits"])).max() < 2e-5 * np.abs(found).max()


# ---- what changes nothing is taken ---------------------------------------------------------------------------
DEFAULT = {"rope_type": "default", "rope_theta": 1000000.0}
OLD_ROPE = {"rope_theta": OMIT, "rope_scaling": {"type": "default", "rope_theta": 1000000}}


@pytest.mark.parametrize("fields", [
    {"sliding_window": 4}, {"sliding_window": 4, "use_sliding_window": False, "max_window_layers": 28},
    {"sliding_window": None, "layer_types": ["full_attention"] * 3}, {"layer_types": None},
    {"num_experts": 0}, {"num_experts": None, "num_local_experts": 0},
    {"rope_scaling": {"type": "linear", "factor": 1.0}}, {"rope_scaling": {"rope_type": "linear", "factor": 1}},
    {"rope_theta": OMIT, "rope_parameters": DEFAULT | {"rope_type": "linear", "factor": 1.0}},
    {"rope_theta": OMIT, "rope_parameters": DEFAULT}, {"rope_theta": 5.0, "rope_parameters": DEFAULT}, OLD_ROPE,
    OLD_ROPE | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},      # transformers looks at one
    {"rope_theta": OMIT, "rope_parameters": DEFAULT | {"partial_rotary_factor": 1.0}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": None}},
    {"rope_scaling": None, "rope_parameters": None}, {"rope_scaling": {}}, {"rope_scaling": {"type": "default"}},
    {"partial_rotary_factor": 1.0}, {"rms_norm_eps": 1e-06, "attention_dropout": 0.0},
    {"tie_word_embeddings": OMIT}, {"tie_word_embeddings": None}, {"attention_bias": OMIT}, {"hidden_act": OMIT},
    {"torch_dtype": "float99", "architectures": ["Unknown"], "transformers_version": 4, "extra": {"a": [1]}},
], ids=lambda fields: ",".join(fields))
def test_a_config_that_asks_for_the_same_is_taken_and_right(folder, fields):
    llm.load_model(configure(folder, **fields))
    assert as_in_transformers("tied")


def test_of_two_rope_objects_the_one_that_transformers_takes_is_used(folder):
    """rope_scaling: without a rope_theta of its own the base is 10,000, whatever rope_parameters says."""
    configure(folder, rope_theta=OMIT, rope_scaling={"rope_type": "default"}, rope_parameters=DEFAULT)
    llm.load_model(folder)
    assert llm.THETA == 10000


def test_without_a_word_of_it_theta_is_10000(folder):
    llm.load_model(configure(folder, rope_theta=OMIT))
    assert llm.THETA == 10000


@pytest.mark.parametrize("value", [OMIT, None], ids=["omitted", "null"])
def test_a_qwen3_without_head_dim_has_heads_of_128(folder, tmp_path, value):
    """As in transformers' Qwen3Config: it is not 48 / 4."""
    wide = make_checkpoint(tmp_path / "wide", "tied", head_dim=128)
    assert accepted(configure(Path(shutil.copytree(wide, tmp_path / "copy")), head_dim=value), wide)
    assert llm.D_HEAD == 128
    assert refused(configure(folder, head_dim=value), "(64, 48)", "(512, 48)")      # what it holds is of 16


def test_a_llama_without_head_dim_cuts_its_dimensions_into_heads(folder_of, tmp_path):
    source = folder_of("llama_no_head_dim")
    assert accepted(configure(Path(shutil.copytree(source, tmp_path / "copy")), head_dim=8), source)    # 48 / 6
    llm.load_model(source)
    assert llm.D_HEAD == 8 and as_in_transformers("llama_no_head_dim")
    llm.load_model(make_checkpoint(tmp_path / "m", "llama_no_head_dim", hidden_size=50))    # 50 / 6, rounded down
    assert llm.D_HEAD == 8
    wide = make_checkpoint(tmp_path / "wide", "llama_head_dim", head_dim=128)               # not 48 / 4
    assert refused(configure(wide, head_dim=OMIT), "self_attn.q_proj.weight", "(512, 48)", "(48, 48)")


def test_without_a_word_of_it_every_query_head_has_its_own_key_head(folder_of, tmp_path):
    copy = Path(shutil.copytree(folder_of("as_many_kv_heads"), tmp_path / "copy"))
    llm.load_model(configure(copy, num_key_value_heads=OMIT))
    assert llm.N_KV == llm.N_HEADS == 4 and as_in_transformers("as_many_kv_heads")


def test_a_head_of_its_own_needs_no_word_in_config_json(folder_of, tmp_path):
    """transformers leaves out what is its default."""
    copy = Path(shutil.copytree(folder_of("untied"), tmp_path / "copy"))
    llm.load_model(configure(copy, tie_word_embeddings=OMIT))
    assert as_in_transformers("untied")


def test_a_tied_head_that_is_stored_all_the_same_is_taken(folder, folder_of):
    store(folder, {"lm_head.weight": stored(folder)[EMBEDDING]})
    assert accepted(folder, folder_of("tied"))
    assert accepted(configure(folder, tie_word_embeddings=OMIT), folder_of("tied"))


def test_an_old_llama_s_stored_frequencies_are_passed_over(folder, folder_of):
    store(folder, {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": mx.zeros((8,)) for i in range(3)})
    assert accepted(folder, folder_of("tied"))


def test_model_safetensors_comes_before_an_index(folder, folder_of):
    (folder / INDEX).write_text('{"weight_map": {"x": "not-there.safetensors"}}')
    assert accepted(folder, folder_of("tied"))


# ---- weights that are not numbers ----------------------------------------------------------------------------
@pytest.mark.parametrize("value", [mx.nan, mx.inf])
def test_weights_that_are_not_numbers_are_named_and_give_no_text(folder, value):
    llm.load_model(store(folder, {Q_PROJ: mx.full((64, 48), value)}))
    for kind in llm.KERNELS:
        llm.use_kernels(kind)
        with pytest.raises(ValueError, match=Q_PROJ.replace(".", r"\.")):
            llm.generate("Hi", max_tokens=4)


# ---- a load that fails changes nothing, wherever it fails ----------------------------------------------------
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


def test_a_number_of_bits_or_a_type_that_can_t_be_computed_with_is_refused(tiny):
    for options in ({"quantize": 7}, {"quantize": 0}, {"dtype": mx.int32}, {"dtype": mx.complex64}):
        assert refused(tiny, **options)


def test_loading_takes_little_more_memory_than_the_weights(tmp_path):
    """What was stored, in bfloat16, is not kept beside it: that would be half as much, or as much, again."""
    folder = make_checkpoint(tmp_path / "m", "bfloat16", hidden_size=64, intermediate_size=128, num_hidden_layers=24)
    llm.use_kernels("explicit")                         # whose arrays are MLX's, which counts them
    for dtype, quantize in itertools.product([mx.float32, mx.bfloat16], [None, 4]):
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
