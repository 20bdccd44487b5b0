"""Quantised checkpoints: as mlx_lm.convert -q makes them, and --quantize. Judges: mlx-lm and transformers."""
import itertools
import json
from pathlib import Path

import llm_inference as llm
import mlx.core as mx
import pytest
from checkpoints import byte_tokenizer, make_checkpoint

HERE = Path(__file__).resolve().parent
WEIGHTS, METADATA = mx.load(str(HERE / "golden/quantized.safetensors"), return_metadata=True)
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


def write(folder, config=None, base=json.loads(METADATA["config.json"]), weights=WEIGHTS, **changes):
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
        if kernels != "fused":
            llm.W.clear()                                       # packed ones, maybe, that only "fused" can use
        llm.use_kernels(kernels)
        with monkeypatch.context() as patch:
            patch.setattr(mx, "default_device", lambda: mx.gpu)
            llm.load_model(*args, **options)

    before = llm.kernels
    yield load
    llm.W.clear()
    llm.use_kernels(before)


def logits():
    return llm.forward(IDS, [None] * llm.N_LAYERS, 0)


def differ_by(a, b):
    return mx.abs(a - b).max().item()


def greedy(n=24):
    ids, cache = list(IDS), [None] * llm.N_LAYERS
    row = llm.forward(ids, cache, 0)[-1]
    while len(ids) < len(IDS) + n:
        ids.append(mx.argmax(row).item())
        row = llm.forward(ids[-1:], cache, len(ids) - 1)[-1]
    return ids[len(IDS):]


@pytest.mark.parametrize("judge", ["mlx_lm.4", "transformers.4"])
def test_a_folder_that_mlx_lm_quantised_computes_as_its_judges_do(tmp_path, judge):
    llm.load_model(write(tmp_path / "q"))
    assert differ_by(logits(), GOLDEN[judge]) < 1e-4
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


def test_on_a_cpu_the_weights_are_written_out_in_float32(tmp_path):
    llm.load_model(write(tmp_path / "q"))
    assert {w.dtype for w in llm.W.values()} == {mx.float32}
    assert llm.W[f"{PROJECTION}.weight"].shape == (64, 128)
    assert not any(name.endswith(("scales", "biases")) for name in llm.W)


@pytest.mark.parametrize("how", ["stored", "at load"])
def test_packed_weights_compute_the_same_and_are_mlx_lm_s_bit_for_bit(tmp_path, source, packed, how):
    if how == "stored":
        packed(write(tmp_path / "q"), mx.float32)
    else:
        packed(source, mx.float32, quantize=4)
    for name in [name.removesuffix(".scales") for name in WEIGHTS if name.endswith(".scales")]:
        *parts, packing = llm.W[f"{name}.weight"]
        assert packing == {"group_size": 64, "bits": 4} or packing == {"group_size": 64, "bits": 4, "mode": "affine"}
        for found, part in zip(parts, ("weight", "scales", "biases"), strict=True):
            assert mx.array_equal(found, WEIGHTS[f"{name}.{part}"])
    assert llm.W["lm_head.weight"] is llm.W["model.embed_tokens.weight"]
    assert differ_by(logits(), GOLDEN["mlx_lm.4"]) < 1e-4
    assert greedy() == GOLDEN["greedy.4"].tolist()                  # one row at a time too


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """(config, tensors) of a checkpoint with a head of its own, whose rows make groups of 128."""
    folder = make_checkpoint(tmp_path_factory.mktemp("wide") / "source", "untied", hidden_size=128, head_dim=32,
                             intermediate_size=128, num_hidden_layers=1)
    return json.loads((folder / "config.json").read_text()), mx.load(str(folder / "model.safetensors"))


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_every_group_size_with_every_number_of_bits(tmp_path, packed, wide, group_size, bits):
    """Without a mode, as mlx-lm wrote config.json before there were modes."""
    config, weights = wide
    packing, matrices = {"group_size": group_size, "bits": bits}, [name for name in weights if weights[name].ndim == 2]
    small, plain = pack(weights, matrices, **packing)
    llm.load_model(write(tmp_path / "plain", base=config, weights=plain))
    wanted = logits()
    llm.load_model(write(tmp_path / "packed", {"quantization": packing}, config, small))
    assert differ_by(logits(), wanted) < 1e-5
    packed(tmp_path / "packed")
    assert all(isinstance(llm.W[name], tuple) for name in matrices)
    assert differ_by(logits(), wanted) < 1e-4
    assert llm.embed(IDS).shape == (len(IDS), 128)


def test_on_a_gpu_matrices_are_written_out_for_functions_that_can_t_use_packed_ones(tmp_path, packed):
    folder = write(tmp_path / "q")
    for kernels, dtype in (("explicit", mx.bfloat16), ("numpy", mx.float32)):
        packed(folder, kernels=kernels)
        assert {w.dtype for w in llm.W.values()} == {dtype} and llm.kernels == kernels
        assert differ_by(logits(), GOLDEN["mlx_lm.4"]) < {mx.bfloat16: 0.1, mx.float32: 1e-4}[dtype]


def test_packed_weights_are_refused_by_functions_that_can_t_use_them(tmp_path, packed):
    packed(write(tmp_path / "q"), mx.float32)
    functions = [getattr(llm, name) for name in llm.KERNELS]
    for kernels in ("explicit", "numpy"):
        with pytest.raises(ValueError, match="packed"):
            llm.use_kernels(kernels)
    assert [getattr(llm, name) for name in llm.KERNELS] == functions and llm.kernels == "fused"
    assert differ_by(logits(), GOLDEN["mlx_lm.4"]) < 1e-4


def test_on_a_gpu_the_type_is_the_stored_one(tmp_path, packed):
    packed(make_checkpoint(tmp_path / "m", "float16"))
    assert {w.dtype for w in llm.W.values()} == {mx.float16}


@pytest.mark.parametrize("part", [1, 2])
def test_packed_parts_that_are_not_numbers_are_named(tmp_path, packed, monkeypatch, part):
    packed(write(tmp_path / "q"))
    broken = list(llm.W[f"{PROJECTION}.weight"])
    broken[part] = broken[part] * mx.nan
    monkeypatch.setitem(llm.W, f"{PROJECTION}.weight", tuple(broken))
    with pytest.raises(ValueError, match=f"neither is {PROJECTION}"):
        llm.generate("abc", 2)


def test_quantization_config_alone_says_how_it_is_packed(tmp_path):
    llm.load_model(write(tmp_path / "q", {"quantization": None, "quantization_config": AFFINE}))
    assert differ_by(logits(), GOLDEN["mlx_lm.4"]) < 1e-4


def test_a_stored_head_that_differs_from_tied_embeddings_is_refused_whatever_rounding_makes_of_it(tmp_path):
    folder = make_checkpoint(tmp_path / "m", "tied", **SIZES)
    stored = mx.load(str(folder / "model.safetensors"))
    stored["lm_head.weight"] = mx.where(mx.arange(64) == 5, 1e-6, 0) + stored["model.embed_tokens.weight"]
    mx.save_safetensors(str(folder / "model.safetensors"), stored)
    with pytest.raises(ValueError, match="lm_head.weight is not the embedding's"):
        llm.load_model(folder, quantize=4)


@pytest.mark.parametrize("where", ["CPU", "GPU"])
def test_the_memory_that_is_asked_for_is_that_of_the_weights(tmp_path, source, packed, monkeypatch, where):
    """On a machine of so many pages of one byte, and of one more."""
    load = llm.load_model if where == "CPU" else packed
    load(source, mx.float32, quantize=4)
    arrays = {id(w): w for w in llm.W.values()}.values()
    needed = sum(part.nbytes for w in arrays for part in (w[:3] if isinstance(w, tuple) else (w,)))
    wanted = logits()
    for more, fits in ((0, True), (-1, False)):
        monkeypatch.setattr(llm.os, "sysconf", lambda name: 1 if name == "SC_PAGE_SIZE" else needed + more)
        if fits:
            load(source, mx.float32, quantize=4)
        else:
            with pytest.raises(ValueError, match="memory"):
                load(source, mx.float32, quantize=4)
    assert mx.array_equal(logits(), wanted)                     # the model before is still there


def test_packed_weights_keep_the_stream_in_the_stored_dtype(tmp_path, packed):
    packed(write(tmp_path / "q"))
    assert llm.embed(IDS).dtype == logits().dtype == mx.bfloat16


@pytest.mark.parametrize("where", ["CPU", "GPU"])
@pytest.mark.parametrize("said_of_it", [{}, {PROJECTION: False}], ids=["nothing", "false"])
def test_a_matrix_may_be_left_plain_among_quantised_ones(tmp_path, packed, where, said_of_it):
    """As mlx_lm.convert leaves it where a row makes no groups, and mlx_lm.awq says of what it leaves."""
    load = llm.load_model if where == "CPU" else packed
    load(write(tmp_path / "all"), mx.float32)
    found = logits()
    parts = [WEIGHTS[f"{PROJECTION}.{part}"] for part in ("weight", "scales", "biases")]
    plain = mx.dequantize(parts[0], *[part.astype(mx.float32) for part in parts[1:]], group_size=64, bits=4)
    changes = {f"{PROJECTION}.weight": plain, f"{PROJECTION}.scales": None, f"{PROJECTION}.biases": None}
    load(write(tmp_path / "some", {"quantization": AFFINE | said_of_it}, **changes), mx.float32)
    assert isinstance(llm.W[f"{PROJECTION}.weight"], mx.array)
    assert differ_by(found, logits()) < 1e-5


# ------------------------------------------------------------------------------------------------------------
# Mixed bits: each matrix has a packing of its own
# ------------------------------------------------------------------------------------------------------------
FOUR = {"bits": 4, "group_size": 64}
SIX = dict.fromkeys(["lm_head", "model.layers.1.mlp.down_proj", "model.layers.1.self_attn.v_proj"],
                    {"bits": 6, "group_size": 64})
EACH = {name.removesuffix(".scales"): FOUR for name in MIXED if name.endswith(".scales")} | SIX
NO_MATRICES = dict.fromkeys(["model.norm", "model.layers.0.input_layernorm", "model.layers.0.self_attn.rope"], False)
# Who says it so: what is said of the mixed checkpoint
SAID = {
    "mlx_lm.convert": MIXED_CONFIG["quantization"],             # where null stands for a group size of 64
    "mlx_lm.convert --q-group-size 64": AFFINE | {name: AFFINE | own for name, own in EACH.items()},
    "mlx_lm.dynamic_quant": AFFINE | SIX,
    "mlx_lm.gptq": {"bits": 6, "group_size": 64} | {name: own for name, own in EACH.items() if name not in SIX},
    "mlx_lm.awq": FOUR | EACH | NO_MATRICES,
    "true, for those that are packed as usual": FOUR | SIX | {name: True for name in EACH if name not in SIX},
}


def test_the_mixed_checkpoint_is_what_mlx_lm_convert_writes_with_mixed_4_6():
    said = MIXED_CONFIG["quantization"]
    assert {name for name in said if isinstance(said[name], dict)} == set(EACH)
    assert {name for name in EACH if said[name] == {"bits": 6, "group_size": None, "mode": "affine"}} == set(SIX)
    assert MIXED_CONFIG["quantization_config"] == said


@pytest.mark.parametrize("where", ["CPU", "GPU"])
@pytest.mark.parametrize("who", SAID)
def test_mixed_bits_compute_as_both_judges_do(tmp_path, packed, where, who):
    load = llm.load_model if where == "CPU" else packed
    load(write(tmp_path / "q", {"quantization": SAID[who]}, MIXED_CONFIG, MIXED), mx.float32)
    assert all(isinstance(llm.W[f"{name}.weight"], tuple) == (where == "GPU") for name in EACH)
    assert differ_by(logits(), MIXED_GOLDEN["mlx_lm"]) < 1e-4
    assert differ_by(logits(), MIXED_GOLDEN["transformers"]) < 1e-4
    assert greedy() == MIXED_GOLDEN["greedy"].tolist()


@pytest.mark.parametrize("where", ["CPU", "GPU"])
def test_group_sizes_may_be_mixed_too(tmp_path, packed, where):
    """In one checkpoint all numbers of bits, in groups of 32, 64 and 128, where two of the matrices are plain."""
    load = llm.load_model if where == "CPU" else packed
    source = make_checkpoint(tmp_path / "source", "untied", hidden_size=128, head_dim=32, intermediate_size=128,
                             num_hidden_layers=3)
    config, weights = json.loads((source / "config.json").read_text()), mx.load(str(source / "model.safetensors"))
    matrices = sorted(name for name in weights if weights[name].ndim == 2)[1:-1]
    packed_ones, plain_ones, each = dict(weights), dict(weights), {}
    packings = itertools.cycle(itertools.product((32, 64, 128), (2, 3, 4, 5, 6, 8)))
    for name, (group_size, bits) in zip(matrices, packings):
        each[name.removesuffix(".weight")] = own = {"group_size": group_size, "bits": bits}
        packed_one, plain_one = pack({name: weights[name]}, [name], **own)
        packed_ones, plain_ones = packed_ones | packed_one, plain_ones | plain_one
    load(write(tmp_path / "plain", base=config, weights=plain_ones))
    wanted = logits()
    load(write(tmp_path / "packed", {"quantization": AFFINE | each}, config, packed_ones))
    assert sum(isinstance(w, tuple) for w in llm.W.values()) == (len(matrices) if where == "GPU" else 0)
    assert differ_by(logits(), wanted) < 1e-4


@pytest.mark.parametrize("config, tensors, said", [
    ({"quantization": AFFINE | {"mode": "mxfp4"}}, {}, "mxfp4"),
    ({"quantization": AFFINE | {"mode": "nvfp4", "group_size": 16}}, {}, "nvfp4"),
    ({"quantization": AFFINE | {PROJECTION: {"bits": 8, "group_size": 64}}}, {}, PROJECTION),
    ({"quantization": AFFINE | {PROJECTION: False}}, {}, PROJECTION),
    ({"quantization": AFFINE | {PROJECTION: {"bits": 4, "group_size": 0.5}}}, {}, PROJECTION),
    ({"quantization": AFFINE | {PROJECTION: {"group_size": 64}}}, {}, PROJECTION),
    ({"quantization": AFFINE | {PROJECTION: {}}}, {}, PROJECTION),
    ({"quantization": AFFINE | {PROJECTION: [4, 64]}}, {}, PROJECTION),
    ({"quantization": AFFINE | {"model.layers.9.mlp.down_proj": {"bits": 7, "group_size": 64}}}, {}, "layers.9"),
    ({"quantization": AFFINE | {PROJECTION: AFFINE | {"bits": 7}}}, {}, PROJECTION),
    ({"quantization": AFFINE | {PROJECTION: AFFINE | {"mode": "mxfp4"}}}, {}, "mxfp4"),
    ({"quantization_config": {"quant_method": "awq", "bits": 4}}, {}, "awq"),
    ({"quantization": None, "quantization_config": {"quant_method": "gptq"}}, {}, "gptq"),
    ({"quantization": None, "quantization_config": None}, {}, "model.embed_tokens"),
    ({"quantization": "fp8"}, {}, "fp8"),
    ({"quantization": AFFINE | {"bits": "4"}, "quantization_config": None}, {}, "bits"),
    ({"quantization": AFFINE | {"bits": 8}, "quantization_config": None}, {}, ".weight"),
    ({"quantization": AFFINE | {"bits": 7}, "quantization_config": None}, {}, "bits"),
    ({"quantization": AFFINE | {"group_size": 2**40}, "quantization_config": None}, {}, "group_size"),
    ({"quantization": AFFINE | {"group_size": 32}, "quantization_config": None}, {}, "model.embed_tokens"),
    ({}, {f"{PROJECTION}.biases": None}, PROJECTION),
    ({}, {f"{PROJECTION}.scales": None}, PROJECTION),
    ({}, {f"{PROJECTION}.scales": mx.zeros((64, 1))}, PROJECTION),
    ({}, {f"{PROJECTION}.biases": mx.zeros((64, 1))}, PROJECTION),          # MLX would repeat them
    ({}, {f"{PROJECTION}.biases": mx.zeros((64, 2), dtype=mx.int32)}, PROJECTION),
    ({}, {f"{PROJECTION}.scales": mx.zeros((64, 2), dtype=mx.complex64)}, PROJECTION),
    ({}, {f"{PROJECTION}.weight": mx.zeros((64, 16))}, f"{PROJECTION}.weight"),
    ({"intermediate_size": 256}, {}, "mlp"),
])
def test_what_it_would_get_wrong_is_refused_by_name_and_the_old_model_stays(tmp_path, tiny, config, tensors, said):
    before, wanted = dict(llm.W), logits()
    with pytest.raises(ValueError) as error:
        llm.load_model(write(tmp_path / "q", config, **tensors))
    assert said in str(error.value) and "\n" not in str(error.value)
    assert llm.W == before and llm.D_MODEL == 128 and mx.array_equal(logits(), wanted)


def test_rows_that_make_no_groups_of_64_are_refused_by_name(folder_of, tiny):
    before = dict(llm.W)
    with pytest.raises(ValueError, match=r"model\.[a-z_.0-9]+\.weight") as error:
        llm.load_model(folder_of("tied"), quantize=4)
    assert "\n" not in str(error.value) and llm.W == before


def test_a_number_of_bits_may_be_written_with_a_point(tmp_path):
    llm.load_model(write(tmp_path / "q", {"quantization": AFFINE | {"bits": 4.0}}))
    assert differ_by(logits(), GOLDEN["mlx_lm.4"]) < 1e-4


def test_what_is_quantised_is_not_quantised_again(tmp_path):
    with pytest.raises(ValueError, match="already"):
        llm.load_model(write(tmp_path / "q"), quantize=8)


@pytest.mark.parametrize("bits", [4, 8])
def test_the_bundled_model_still_knows_its_capitals(bits, tiny):
    llm.load_model(tiny, quantize=bits)
    assert llm.generate("The capital of France is", 8).startswith("The capital of France is Paris.")


def test_quantize_on_the_command_line(program):
    status, out, err = program("--model", HERE / "tiny-qwen3", "--quantize", "4", "The capital of France is")
    assert status == 0 and err == "" and "Output: The capital of France is Paris." in out
    status, out, err = program("--model", HERE / "tiny-qwen3", "--quantize", "5")
    assert status == 2 and err.count("\n") == 1 and "--quantize" in err
