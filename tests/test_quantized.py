"""Quantised checkpoints: as mlx_lm.convert -q makes them, and --quantize. Judges: mlx-lm and transformers."""
import itertools
import json
from pathlib import Path

import llm_inference as llm
import mlx.core as mx
import numpy as np
import pytest
from checkpoints import byte_tokenizer, make_checkpoint
from damaged import refused, stored

HERE = Path(__file__).resolve().parent
WEIGHTS, METADATA = mx.load(str(HERE / "golden/quantized.safetensors"), return_metadata=True)
CONFIG = json.loads(METADATA["config.json"])
GOLDEN = mx.load(str(HERE / "golden/quantized_logits.safetensors"))
IDS = GOLDEN["ids"].tolist()
MIXED, MIXED_METADATA = mx.load(str(HERE / "golden/mixed.safetensors"), return_metadata=True)
MIXED_GOLDEN = mx.load(str(HERE / "golden/mixed_logits.safetensors"))
MIXED_CONFIG = json.loads(MIXED_METADATA["config.json"])
PROJECTION = "model.layers.0.mlp.down_proj"
AFFINE = {"bits": 4, "group_size": 64, "mode": "affine"}
# The checkpoint that mlx_lm.convert quantised: make_golden_quantized.py has the same sizes.
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The folder of the checkpoint before its quantisation, in bfloat16."""
    return make_checkpoint(tmp_path_factory.mktemp("quantized") / "source", "bfloat16", **SIZES)


def write(folder, config=None, base=CONFIG, weights=WEIGHTS, **changes):
    """A folder with mlx-lm's quantised checkpoint, with changes to config.json or to the tensors."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(base | (config or {})))
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    weights = {name: w for name, w in (weights | changes).items() if w is not None}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder


def pack(weights, names, **packing):
    """(packed, plain): tensors with the matrices of these names quantised, and with what dequantising these gives."""
    packed, plain = dict(weights), dict(weights)
    for name in names:
        parts = mx.quantize(weights[name], **packing)
        packed |= zip((name, name.replace("weight", "scales"), name.replace("weight", "biases")), parts)
        plain[name] = mx.dequantize(*[p if p.dtype == mx.uint32 else p.astype(mx.float32) for p in parts], **packing)
    return packed, plain


@pytest.fixture
def packed(monkeypatch):
    """Load as on a GPU with its functions, where the matrices stay packed; what then computes is still the CPU."""
    def load(*args, kernels="fused", **options):
        llm.W.clear()                                   # packed ones, maybe, that only the fused functions can use
        llm.use_kernels(kernels)
        with monkeypatch.context() as patch:
            patch.setattr(mx, "default_device", lambda: mx.gpu)
            llm.load_model(*args, **options)
    return load


@pytest.fixture(params=["CPU", "GPU"])
def where(request, packed):
    """A function that loads as on a CPU, where packed matrices are written out, or as on a GPU."""
    return llm.load_model if request.param == "CPU" else packed


def stay_packed(where):
    return where is not llm.load_model


def logits():
    return np.array(llm.forward(IDS, [None] * llm.N_LAYERS, 0).astype(llm.xp.float32))


def differ_by(a, b):
    return np.abs(np.array(a) - np.array(b)).max()


def greedy(n=24):
    ids, cache = list(IDS), [None] * llm.N_LAYERS
    row = llm.forward(ids, cache, 0)[-1]
    while len(ids) < len(IDS) + n:
        ids.append(int(llm.sample(row)))
        row = llm.forward(ids[-1:], cache, len(ids) - 1)[-1]
    return ids[len(IDS):]


def is_packed(name):
    return isinstance(llm.W[name], tuple)


# ---- 4 and 8 bits --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", llm.KERNELS)
def test_a_folder_that_mlx_lm_quantised_computes_as_its_judges_do(tmp_path, kind):
    llm.use_kernels(kind)
    llm.load_model(write(tmp_path / "q"))
    assert differ_by(logits(), GOLDEN["mlx_lm.4"]) < 1e-4
    assert differ_by(logits(), GOLDEN["transformers.4"]) < 1e-4
    assert greedy() == GOLDEN["greedy.4"].tolist()


@pytest.mark.parametrize("bits", [4, 8])
def test_quantize_at_load_gives_what_mlx_lm_converts_to(source, bits):
    llm.load_model(source)
    before = logits()
    llm.load_model(source, quantize=bits)
    assert differ_by(logits(), GOLDEN[f"mlx_lm.{bits}"]) < 1e-4
    assert differ_by(logits(), GOLDEN[f"transformers.{bits}"]) < 1e-4
    assert greedy() == GOLDEN[f"greedy.{bits}"].tolist()
    assert differ_by(logits(), before) > {4: 0.1, 8: 0.01}[bits]    # it was quantised: the answers are others


def test_on_a_cpu_the_weights_are_written_out_in_float32_for_every_set(tmp_path):
    folder = write(tmp_path / "q")
    for kind in llm.KERNELS:
        llm.use_kernels(kind)
        llm.load_model(folder)
        assert {type(w) for w in llm.W.values()} == {np.ndarray if kind == "numpy" else mx.array}
        assert {str(w.dtype).removeprefix("mlx.core.") for w in llm.W.values()} == {"float32"}
        assert llm.W[f"{PROJECTION}.weight"].shape == (64, 128)
        assert not any(name.endswith(("scales", "biases")) for name in llm.W)


@pytest.mark.parametrize("how", ["stored", "at load"])
def test_packed_weights_compute_the_same_and_are_mlx_lm_s_bit_for_bit(tmp_path, source, packed, how):
    if how == "stored":
        packed(write(tmp_path / "q"), mx.float32)
    else:
        packed(source, mx.float32, quantize=4)
    for name in [name.removesuffix(".scales") for name in WEIGHTS if name.endswith(".scales")]:
        for found, part in zip(llm.W[f"{name}.weight"], ("weight", "scales", "biases"), strict=True):
            assert mx.array_equal(found, WEIGHTS[f"{name}.{part}"])
    assert llm.W["lm_head.weight"] is llm.W["model.embed_tokens.weight"]
    assert differ_by(logits(), GOLDEN["mlx_lm.4"]) < 1e-4
    assert greedy() == GOLDEN["greedy.4"].tolist()                  # one row at a time too


def test_on_a_gpu_matrices_are_written_out_for_functions_that_can_t_use_packed_ones(tmp_path, packed):
    folder = write(tmp_path / "q")
    for kernels, dtype, near in (("explicit", mx.bfloat16, 0.1), ("numpy", np.dtype("float32"), 1e-4)):
        packed(folder, kernels=kernels)
        assert {w.dtype for w in llm.W.values()} == {dtype} and llm.kernels == kernels
        assert differ_by(logits(), GOLDEN["mlx_lm.4"]) < near


def test_packed_weights_are_refused_by_functions_that_can_t_use_them(tmp_path, packed):
    packed(write(tmp_path / "q"), mx.float32)
    for kernels in ("explicit", "numpy"):
        with pytest.raises(ValueError, match="packed"):
            llm.use_kernels(kernels)
        assert llm.kernels == "fused" and differ_by(logits(), GOLDEN["mlx_lm.4"]) < 1e-4


def test_on_a_gpu_the_type_is_the_stored_one_and_the_stream_keeps_it(tmp_path, packed):
    packed(make_checkpoint(tmp_path / "m", "float16"))
    assert {w.dtype for w in llm.W.values()} == {mx.float16}
    packed(write(tmp_path / "q"))                       # in bfloat16
    assert llm.embed(IDS).dtype == llm.forward(IDS, [None] * llm.N_LAYERS, 0).dtype == mx.bfloat16


@pytest.mark.parametrize("part", [1, 2])
def test_packed_parts_that_are_not_numbers_are_named(tmp_path, packed, monkeypatch, part):
    packed(write(tmp_path / "q"))
    broken = list(llm.W[f"{PROJECTION}.weight"])
    broken[part] = broken[part] * mx.nan
    monkeypatch.setitem(llm.W, f"{PROJECTION}.weight", tuple(broken))
    with pytest.raises(ValueError, match=f"neither is {PROJECTION}"):
        llm.generate("abc", 2)


@pytest.mark.parametrize("bits", [4, 8])
def test_the_bundled_model_still_knows_its_capitals(bits, tiny):
    llm.load_model(tiny, quantize=bits)
    assert llm.generate("The capital of France is", 8).startswith("The capital of France is Paris.")


def test_quantize_on_the_command_line(program):
    status, out, err = program("--model", HERE / "tiny-qwen3", "--quantize", "4", "The capital of France is")
    assert status == 0 and err == "" and "Output: The capital of France is Paris." in out


# ---- every packing, one for each matrix if need be -----------------------------------------------------------
@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """(config, tensors) of a checkpoint with a head of its own, whose rows make groups of 128."""
    folder = make_checkpoint(tmp_path_factory.mktemp("wide") / "source", "untied", hidden_size=128, head_dim=32,
                             intermediate_size=128, num_hidden_layers=3)
    return json.loads((folder / "config.json").read_text()), stored(folder)


def test_every_group_size_with_every_number_of_bits(tmp_path, where, wide):
    """In one checkpoint, where two of the matrices are plain; config.json says nothing of it."""
    config, weights = wide
    matrices = sorted(name for name in weights if weights[name].ndim == 2)[1:-1]
    packed_ones, plain_ones = dict(weights), dict(weights)
    packings = itertools.cycle(itertools.product((32, 64, 128), (2, 3, 4, 5, 6, 8)))
    for name, (group_size, bits) in zip(matrices, packings):
        packed_one, plain_one = pack({name: weights[name]}, [name], group_size=group_size, bits=bits)
        packed_ones, plain_ones = packed_ones | packed_one, plain_ones | plain_one
    llm.load_model(write(tmp_path / "plain", base=config, weights=plain_ones))
    wanted = logits()
    where(write(tmp_path / "packed", base=config, weights=packed_ones))
    assert len(matrices) >= 18 and sum(map(is_packed, llm.W)) == len(matrices) * stay_packed(where)
    assert differ_by(logits(), wanted) < 1e-4
    assert llm.embed(IDS).shape == (len(IDS), 128)


def test_a_matrix_may_be_left_plain_among_quantised_ones(tmp_path, where):
    """As mlx_lm.convert leaves it where a row makes no groups, and mlx_lm.awq says of what it leaves."""
    where(write(tmp_path / "all"), mx.float32)
    found = logits()
    parts = [WEIGHTS[f"{PROJECTION}.{part}"] for part in ("weight", "scales", "biases")]
    plain = mx.dequantize(parts[0], *[part.astype(mx.float32) for part in parts[1:]], group_size=64, bits=4)
    changes = {f"{PROJECTION}.weight": plain, f"{PROJECTION}.scales": None, f"{PROJECTION}.biases": None}
    where(write(tmp_path / "some", {"quantization": AFFINE | {PROJECTION: False}}, **changes), mx.float32)
    assert not is_packed(f"{PROJECTION}.weight")
    assert differ_by(found, logits()) < 1e-5


@pytest.mark.parametrize("said", ["mlx_lm.convert --quant-predicate mixed_4_6", "4 bits, but for three", "nothing"])
def test_mixed_bits_compute_as_both_judges_do(tmp_path, where, said):
    """Whatever config.json says of single matrices, as mlx-lm's tools say it in different ways, or leaves out."""
    six = dict.fromkeys(["lm_head", "model.layers.1.mlp.down_proj", "model.layers.1.self_attn.v_proj"],
                        {"bits": 6, "group_size": 64})
    each = {name for name, own in MIXED_CONFIG["quantization"].items() if isinstance(own, dict)}
    assert {name for name in each if MIXED_CONFIG["quantization"][name]["bits"] == 6} == {*six}
    config = {"4 bits, but for three": {"quantization": AFFINE | six, "quantization_config": AFFINE | six},
              "nothing": {"quantization": None, "quantization_config": None}}.get(said)
    where(write(tmp_path / "q", config, MIXED_CONFIG, MIXED), mx.float32)
    assert {name for name in llm.W if is_packed(name)} == {f"{name}.weight" for name in each if stay_packed(where)}
    assert differ_by(logits(), MIXED_GOLDEN["mlx_lm"]) < 1e-4
    assert differ_by(logits(), MIXED_GOLDEN["transformers"]) < 1e-4
    assert greedy() == MIXED_GOLDEN["greedy"].tolist()


# ---- a head beside a tied embedding, and a head of its own ---------------------------------------------------
@pytest.mark.parametrize("equal", [True, False])
def test_a_quantised_head_stored_beside_a_tied_embedding_must_be_the_same(tmp_path, where, tiny, equal):
    head = {f"lm_head.{part}": WEIGHTS[f"model.embed_tokens.{part}"] for part in ("weight", "scales", "biases")}
    if equal:
        where(write(tmp_path / "q", **head), mx.float32)
        assert llm.W["lm_head.weight"] is llm.W["model.embed_tokens.weight"]
        assert differ_by(logits(), GOLDEN["mlx_lm.4"]) < 1e-4
    else:
        head["lm_head.scales"] = head["lm_head.scales"] + 1
        assert refused(write(tmp_path / "q", **head), "lm_head.")


def test_a_head_of_its_own_is_quantised_too(tmp_path, where):
    folder = make_checkpoint(tmp_path / "m", "untied", hidden_size=64, intermediate_size=64)
    where(folder, mx.float32, quantize=4)
    for name, w in stored(folder).items():
        parts = mx.quantize(w, group_size=64, bits=4) if w.ndim == 2 else (w,)
        if not stay_packed(where) and w.ndim == 2:
            parts = mx.dequantize(*parts, group_size=64, bits=4),
        found = llm.W[name] if is_packed(name) else (llm.W[name],)
        assert all(np.array_equal(*pair) for pair in zip(found, parts, strict=True)), name


# ---- what is refused by name ---------------------------------------------------------------------------------
@pytest.mark.parametrize("mode, group_size", [("mxfp4", 32), ("mxfp8", 32), ("nvfp4", 16)])
def test_mlx_s_other_forms_are_refused(tmp_path, tiny, mode, group_size):
    """Whether config.json says so or not: they have no biases, and their scales are no floats."""
    plain = mx.ones((64, 128))
    packed, scales = mx.quantize(plain, group_size=group_size, mode=mode, bits=8 if mode == "mxfp8" else 4)
    tensors = {f"{PROJECTION}.weight": packed, f"{PROJECTION}.scales": scales, f"{PROJECTION}.biases": None}
    for number, said in enumerate(({"quantization": AFFINE | {"mode": mode, "group_size": group_size}}, {})):
        message = refused(write(tmp_path / f"{number}", said, **tensors))
        assert PROJECTION in message or mode in message


@pytest.mark.parametrize("shapes_and_types", [
    {"biases": None}, {"scales": None}, {"scales": mx.zeros((64, 1))}, {"biases": mx.zeros((64, 1))},
    {"scales": mx.zeros((64, 0)), "biases": mx.zeros((64, 0))}, {"scales": mx.zeros(()), "biases": mx.zeros(())},
    {"scales": mx.zeros((64, 3)), "biases": mx.zeros((64, 3))}, {"scales": mx.zeros(2), "biases": mx.zeros(2)},
    {"biases": mx.zeros((64, 2), dtype=mx.int32)}, {"scales": mx.zeros((64, 2), dtype=mx.complex64)},
    {"weight": mx.zeros((64, 16))}, {"weight": mx.zeros((64, 15), dtype=mx.uint32)},
    {"weight": mx.zeros((63, 16), dtype=mx.uint32)},
    {"weight": mx.zeros((64 * 16,), dtype=mx.uint32)}, {"weight": mx.zeros((), dtype=mx.uint32)},
], ids=lambda parts: ", ".join(f"{name} {w is not None and (*w.shape, w.dtype)}" for name, w in parts.items()))
def test_parts_that_do_not_fit_together_are_refused_by_name(tmp_path, tiny, shapes_and_types):
    """Such as biases of one column, which MLX would repeat."""
    parts = {f"{PROJECTION}.{part}": w for part, w in shapes_and_types.items()}
    assert refused(write(tmp_path / "q", **parts), PROJECTION)


def test_packed_matrices_of_another_size_than_config_json_s_are_refused_by_name(tmp_path, tiny):
    assert refused(write(tmp_path / "q", {"intermediate_size": 256}), "mlp.", "128", "256")


def test_rows_that_make_no_groups_of_64_are_refused_by_name(folder_of, tmp_path, tiny):
    assert refused(folder_of("tied"), "model.embed_tokens.weight", "64", quantize=4)
    folder = make_checkpoint(tmp_path / "m", "tied", hidden_size=96, intermediate_size=64)
    assert refused(folder, "model.embed_tokens.weight", "64", quantize=4)


def test_what_is_quantised_is_not_quantised_again(tmp_path, tiny):
    assert refused(write(tmp_path / "q"), "model.embed_tokens", "already", quantize=8)
