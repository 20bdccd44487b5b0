"""The judge is judged: the pure-Python engine against the lesson, mathematics, MLX's reader and transformers."""
import ast
import functools
import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

import reference
from checkpoints import CHECKPOINTS, make_checkpoint

HERE = Path(__file__).resolve().parent
QWEN3 = json.loads((HERE.parent / "Qwen3-0.6B/config.json").read_text(encoding="utf-8"))
LESSON = {"model_type": "llama", "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "rms_norm_eps": 1e-5,
          "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24, "rope_theta": 10000.0}


loaded = functools.cache(reference.load)


def lesson_weights(config, seed=0):
    """{name: lists} for a config like the lesson's, its random numbers wide enough that the model has much to say."""
    rng = random.Random(seed)
    heads, kv_heads, head_dim = reference.head_sizes(config)
    d, ffn, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]

    def matrix(rows, columns):
        return [[rng.gauss(0, 0.5) for _ in range(columns)] for _ in range(rows)]

    weights = {"model.embed_tokens.weight": matrix(vocabulary, d), "lm_head.weight": matrix(vocabulary, d),
               "model.norm.weight": [1.0] * d}
    for i in range(config["num_hidden_layers"]):
        layer = {"input_layernorm": [1.0] * d, "self_attn.q_proj": matrix(heads * head_dim, d),
                 "self_attn.k_proj": matrix(kv_heads * head_dim, d),
                 "self_attn.v_proj": matrix(kv_heads * head_dim, d),
                 "self_attn.o_proj": matrix(d, heads * head_dim), "post_attention_layernorm": [1.0] * d,
                 "mlp.gate_proj": matrix(ffn, d), "mlp.up_proj": matrix(ffn, d), "mlp.down_proj": matrix(d, ffn)}
        weights |= {f"model.layers.{i}.{name}.weight": weight for name, weight in layer.items()}
    return weights


def lesson_model(**changes):
    return reference.Model(LESSON | changes, lesson_weights(LESSON | changes))


def logits_of(model, ids, start=0):
    """The logits after the last of ids, which sit at start, start + 1, ...; nothing of them is kept."""
    cache = reference.new_cache(model)
    return [reference.forward_token(model, token, start + i, cache) for i, token in enumerate(ids)][-1]


def difference(ours, theirs):
    """The largest difference of two equally long lists of numbers, in units of the largest number in theirs."""
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / max(map(abs, theirs))


# ---- What can be counted ----

def test_a_token_of_the_lesson_takes_64_bytes_of_cache_and_128_with_full_heads():
    assert reference.kv_bytes_per_token(LESSON) == 64
    assert reference.kv_bytes_per_token(LESSON | {"num_key_value_heads": 4}) == 128


def test_a_token_of_qwen3_takes_114688_bytes_of_cache_and_229376_with_full_heads():
    assert reference.kv_bytes_per_token(QWEN3) == 114_688
    assert reference.kv_bytes_per_token(QWEN3 | {"num_key_value_heads": 16}) == 229_376
    assert reference.kv_bytes_per_token(QWEN3, bytes_per_number=4) == 229_376


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_the_cache_grows_by_the_numbers_counted(kv_heads):
    model, cache = lesson_model(num_key_value_heads=kv_heads), [([], []), ([], [])]
    for pos in range(3):
        reference.forward_token(model, 7, pos, cache)
    numbers = sum(len(head) for keys, values in cache for heads in keys + values for head in heads)
    assert 2 * numbers == 3 * reference.kv_bytes_per_token(LESSON | {"num_key_value_heads": kv_heads})


def test_a_token_multiplies_by_every_matrix_once():
    matrices = [weight for name, weight in lesson_weights(LESSON).items()
                if isinstance(weight[0], list) and name != "model.embed_tokens.weight"]
    assert reference.multiply_adds_per_token(LESSON) == sum(len(m) * len(m[0]) for m in matrices) == 4_480


def test_the_lesson_s_9088_multiply_adds_are_those_of_heads_of_16():
    """Its config has heads of 16 / 4 = 4; its sum has a q_proj of 64 x 16, and such a model's cache is not 64 bytes."""
    assert reference.multiply_adds_per_token(LESSON | {"head_dim": 16}) == 9_088
    assert reference.kv_bytes_per_token(LESSON | {"head_dim": 16}) == 256


def test_a_token_of_qwen3_takes_596_million_multiply_adds():
    assert reference.multiply_adds_per_token(QWEN3) == 595_984_384


# ---- The lesson's own check ----

@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_cached_greedy_equals_recomputed_greedy(kv_heads):
    model, prompt = lesson_model(num_key_value_heads=kv_heads), [3, 14, 15, 9, 2, 6]
    ids = list(prompt)
    for _ in range(10):
        logits = logits_of(model, ids)
        ids.append(max(range(len(logits)), key=lambda token: logits[token]))
    assert reference.generate(model, prompt, 10) == ids[len(prompt):]
    assert len(set(ids[len(prompt):])) > 3      # or the check would hold for a model that repeats itself


def test_generating_nothing_gives_nothing():
    assert reference.generate(lesson_model(), [3, 14], 0) == []


# ---- The formulas ----

def test_rope_keeps_length_and_leaves_position_0_alone():
    head = [random.Random(i).gauss(0, 1) for i in range(16)]
    assert reference.rope(head, 0, 10000.0) == head
    for pos in (1, 7, 5000):
        assert math.hypot(*reference.rope(head, pos, 10000.0)) == pytest.approx(math.hypot(*head), rel=1e-14)


def test_rope_turns_a_number_towards_the_one_half_a_head_away():
    turned = reference.rope([0.0, 1.0, 0.0, 0.0, 0.0, 0.0], 5, 1000.0)
    angle = 5 * 1000.0 ** (-2 / 6)
    assert turned == pytest.approx([0.0, math.cos(angle), 0.0, 0.0, math.sin(angle), 0.0], abs=1e-15)


def test_the_product_of_two_turned_heads_depends_on_their_distance_only():
    rng = random.Random(0)
    query, key = ([rng.gauss(0, 1) for _ in range(16)] for _ in range(2))
    products = [reference.dot(reference.rope(query, 9 + shift, 1e4), reference.rope(key, 2 + shift, 1e4))
                for shift in (0, 1, 100, 4000)]
    assert products == pytest.approx([products[0]] * 4, rel=1e-11)
    nearer = reference.dot(reference.rope(query, 3, 1e4), reference.rope(key, 2, 1e4))
    assert abs(nearer - products[0]) > 0.1


def test_a_text_moved_along_has_the_same_logits():
    model, ids = lesson_model(), [3, 14, 15, 9, 2, 6]
    assert difference(logits_of(model, ids, start=1000), logits_of(model, ids)) < 1e-11
    assert difference(logits_of(model, [14, 3, 15, 9, 2, 6]), logits_of(model, ids)) > 1e-3   # order does matter


@pytest.mark.parametrize("scores", [[0.0], [1.0, 2.0, 3.0], [1000.0, 999.0, -1000.0], [-1e308, 0.0]])
def test_softmax_sums_to_one_and_keeps_the_order(scores):
    shares = reference.softmax(scores)
    assert math.fsum(shares) == pytest.approx(1.0, abs=1e-15)
    assert sorted(scores) == [score for _, score in sorted(zip(shares, scores, strict=True))]


def test_softmax_multiplies_by_e_where_a_score_grows_by_one():
    shares = reference.softmax([0.5, 1.5, -0.5])
    assert [shares[1] / shares[0], shares[0] / shares[2]] == pytest.approx([math.e, math.e])


def test_silu_is_its_formula_and_survives_any_float():
    for z in (-30.0, -1.0, 0.0, 0.25, 30.0):
        assert reference.silu(z) == pytest.approx(z / (1 + math.exp(-z)), rel=1e-15)
    assert reference.silu(1e300) == 1e300 and abs(reference.silu(-1e300)) < 1e-3


def test_rms_norm_brings_the_mean_square_to_one_then_weighs():
    x, ones = [3.0, -4.0, 12.0], [1.0, 1.0, 1.0]
    normed = reference.rms_norm(x, ones, 0.0)
    assert reference.dot(normed, normed) / 3 == pytest.approx(1.0)
    assert reference.rms_norm(x, [2.0, 0.0, -1.0], 0.0) == pytest.approx([2 * normed[0], 0.0, -normed[2]])
    assert reference.rms_norm([0.0, 0.0], [1.0, 1.0], 1e-6) == [0.0, 0.0]


# ---- Reading a checkpoint ----

@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=["float32", "float16", "bfloat16"])
def test_the_reader_reads_what_mlx_reads(dtype, tmp_path):
    """All 65,536 numbers of 16 bits (as float32: spread over its range), those that are no number left out."""
    bits = mx.arange(65536, dtype=mx.uint16)
    every = (mx.arange(65536, dtype=mx.uint32) * 65521).view(mx.float32) if dtype == mx.float32 else bits.view(dtype)
    every = mx.where(mx.isnan(every), mx.array(0, dtype), every)
    path = tmp_path / "some.safetensors"
    mx.save_safetensors(str(path), metadata={"format": "pt"}, arrays={
        "matrix": every.reshape(256, 256), "vector": every[5:12], "row": every[7:9].reshape(1, 2),
        "column": every[3:6].reshape(3, 1), "three dimensions": every[:24].reshape(2, 3, 4)})
    theirs = {name: array.tolist() for name, array in mx.load(str(path)).items()}
    assert reference.read_safetensors(path) == theirs


def test_shards_are_read_through_their_index(folder_of):
    folder = folder_of("sharded")
    model, shards = loaded(folder), sorted(folder.glob("*.safetensors"))
    weights = {name: array for shard in shards for name, array in mx.load(str(shard)).items()}
    assert len(shards) == 3 and len(model.layers) == 4
    assert model.head == weights["lm_head.weight"].tolist()
    for i, layer in enumerate(model.layers):
        found = {name: array.tolist() for name, array in weights.items() if name.startswith(f"model.layers.{i}.")}
        assert layer == {name.split(".")[-2]: weight for name, weight in found.items()}


def test_end_tokens_come_from_either_file(folder_of):
    settings = json.loads((folder_of("tiny-qwen3") / "generation_config.json").read_text(encoding="utf-8"))
    assert loaded(folder_of("tied")).end_ids == {258}               # config.json alone, with one number
    assert loaded(folder_of("tiny-qwen3")).end_ids == set(settings["eos_token_id"])     # a list of two


def test_a_tied_model_s_second_copy_of_the_matrix_is_not_used():
    tied = LESSON | {"tie_word_embeddings": True}
    model = reference.Model(tied, lesson_weights(tied))     # lm_head.weight is there, and another one
    assert model.head is model.embedding is not lesson_model().head


@pytest.mark.parametrize("changes", [
    {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, {"rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, {"hidden_act": "gelu"},
    {"use_sliding_window": True}], ids=str)
def test_a_setting_that_the_formulas_lack_is_refused(changes):
    with pytest.raises(ValueError, match=r"^config\.json: .* is .*, not "):
        reference.Model(LESSON | changes, lesson_weights(LESSON))


def test_biases_are_refused():
    with pytest.raises(ValueError, match="biases"):
        reference.Model(LESSON, lesson_weights(LESSON) | {"model.layers.1.self_attn.q_proj.bias": [0.0] * 16})


@pytest.mark.parametrize("name", ["self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj", "input_layernorm"])
def test_a_weight_of_a_wrong_length_stops_the_engine(name):
    weights = lesson_weights(LESSON)
    weight = weights[f"model.layers.1.{name}.weight"]
    (weight if name == "input_layernorm" else weight[0]).append(0.0)
    with pytest.raises(ValueError, match="lengths|zip"):
        logits_of(reference.Model(LESSON, weights), [3])


# ---- Hugging Face transformers ----

@pytest.mark.parametrize("name", [*CHECKPOINTS, "tiny-qwen3"])
def test_logits_and_every_layer_are_those_of_transformers(name, folder_of):
    """Its numbers are float32, so that the last digits are its own: in float64 the two agree to 3e-15."""
    golden = mx.load(str(HERE / "golden" / f"{name}.safetensors"))
    model = loaded(folder_of(name))
    cache, logits, hidden = reference.new_cache(model), [], []
    for pos, token in enumerate(golden["ids"].tolist()[:8]):
        hidden.append([])
        logits.append(reference.forward_token(model, token, pos, cache, hidden[-1]))
    for pos in range(len(logits)):
        assert difference(logits[pos], golden["logits"][pos].tolist()) < 5e-6
        for i in range(len(model.layers)):
            assert difference(hidden[pos][i], golden[f"hidden.{i + 1}"][pos].tolist()) < 5e-6


@pytest.mark.parametrize("name", ["tied", "three_queries_a_kv_head", "llama_no_head_dim"])
def test_greedy_ids_are_those_of_transformers(name, folder_of):
    golden = mx.load(str(HERE / "golden" / f"{name}.safetensors"))
    ids = reference.generate(loaded(folder_of(name)), golden["ids"].tolist(), 12)
    assert ids == golden["greedy"].tolist()[:12]


# ---- The program ----

def test_the_capital_of_france():
    """In a process of its own."""
    done = subprocess.run([sys.executable, str(HERE / "reference.py"), "The capital of France is", "--max-tokens", "3"],
                          capture_output=True, timeout=120, encoding="utf-8",
                          env=os.environ | {"PYTHONIOENCODING": "utf-8"})
    assert done.stdout.startswith("The capital of France is Paris.") and done.returncode == 0


@pytest.fixture
def run(monkeypatch, capsys):
    """A function that runs the program in this process: arguments to (status, stdout, stderr)."""
    def main(*arguments):
        monkeypatch.setattr(sys, "argv", ["reference.py", *arguments])
        try:
            reference.main()
        except SystemExit as left:                      # a text as the status: Python shows it, and the status is 1
            assert isinstance(left.code, str)
            out, err = capsys.readouterr()
            return 1, out, f"{err}{left.code}\n"
        return 0, *capsys.readouterr()
    return main


def test_an_end_token_ends_the_text_and_is_not_printed(tmp_path, run):
    folder = make_checkpoint(tmp_path / "all_ids_end", eos_token_id=list(range(272)))
    assert run("Hello", "--model", str(folder)) == (0, "Hello\n", "")


def ends_in_one_line(result):
    status, out, err = result
    assert status == 1 and out == "" and err.startswith("cannot run ") and err.count("\n") == 1, result
    return True


@pytest.mark.parametrize("arguments", [
    ("Hello", "--model", "no-such-folder"), ("", "--max-tokens", "1"), ("Hello", "--model", str(HERE / "golden"))])
def test_bad_input_ends_in_one_line(arguments, run, monkeypatch):
    monkeypatch.setattr(reference, "load", loaded)
    assert ends_in_one_line(run(*arguments))


def test_a_file_cut_short_ends_in_one_line(folder_of, tmp_path, run):
    for file in folder_of("tied").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    whole = (tmp_path / "model.safetensors").read_bytes()
    for length in (0, 5, 100, len(whole) // 2, len(whole) - 1):
        (tmp_path / "model.safetensors").write_bytes(whole[:length])
        with pytest.raises((ValueError, reference.struct.error)):
            reference.load(tmp_path)
    assert ends_in_one_line(run("Hello", "--model", str(tmp_path)))


def test_it_stays_small_and_stands_on_the_standard_library_alone():
    """Under 150 lines of code, no line past 110 columns, and nothing imported where the arithmetic is."""
    source = (HERE / "reference.py").read_text(encoding="utf-8")
    tree = ast.parse(source)
    text = set()        # the line numbers of docstrings
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            text |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = source.splitlines()
    code = [line for number, line in enumerate(lines, 1)
            if number not in text and line.strip() and not line.strip().startswith("#")]
    assert len(code) < 150 and max(map(len, lines)) <= 110
    imported = {name.name for node in tree.body if isinstance(node, ast.Import) for name in node.names}
    imported |= {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
    assert imported <= sys.stdlib_module_names
