"""What only large sizes, odd numbers or rare orders reach: each of these once let a wrong edit pass."""
import json
import shutil
import signal
import sys

import llm_inference as llm
import mlx.core as mx
import numpy as np
import pytest
import reference
from checkpoints import byte_tokenizer, make_checkpoint


KINDS = llm.KINDS


def fresh():
    return [None] * llm.N_LAYERS


def heads(monkeypatch, n_heads, n_kv, d_head):
    """Let the model have such heads."""
    for name, value in ("N_HEADS", n_heads), ("N_KV", n_kv), ("D_HEAD", d_head):
        monkeypatch.setattr(llm, name, value)


def normal(seed, *shape, dtype=mx.float32):
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def changed(folder, place, *left_out, **fields):
    """A copy of a checkpoint with some of config.json's fields left out or changed."""
    folder = shutil.copytree(folder, place / "copy")
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in left_out}))
    return folder


def off(a, b):
    a, b = mx.array(a).astype(mx.float32), mx.array(b).astype(mx.float32)
    return (mx.max(mx.abs(a - b)) / mx.max(mx.abs(b))).item()


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_the_norm_is_rounded_before_its_weight_multiplies(monkeypatch, dtype):
    llm.use_kernels("explicit")
    monkeypatch.setattr(llm, "EPS", 1e-6)
    x, w = normal(1, 50, 64, dtype=dtype), normal(2, 64, dtype=dtype)
    assert mx.array_equal(llm.rms_norm(x, w), llm.rms_norm(x, mx.ones_like(w)) * w)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_rope_at_far_positions_in_16_bits_rounds_only_its_result(tiny, dtype):
    llm.use_kernels("explicit")
    q = normal(1, 4, 9, llm.D_HEAD, dtype=dtype)
    positions = list(range(3001, 3010))
    wanted = llm.apply_rope(q.astype(mx.float32), q, positions)[0].astype(dtype)
    assert mx.array_equal(llm.apply_rope(q, q, positions)[0], wanted)


@pytest.mark.parametrize("n_heads, n_kv, n, total", [
    (6, 3, 40, 1100), (4, 1, 1, 2100), (4, 1, 40, 2100), (2, 2, 3, 1100), (21, 7, 1, 1100), (6, 2, 5, 5)])
def test_attention_on_many_tokens_is_attention(monkeypatch, n_heads, n_kv, n, total):
    """Head by head, with every key repeated for the heads that share it."""
    heads(monkeypatch, n_heads, n_kv, 64)
    q, k, v = normal(1, n_heads, n, 64), normal(2, n_kv, total, 64), normal(3, n_kv, total, 64)
    keys, values = (mx.repeat(x, n_heads // n_kv, axis=0) for x in (k, v))
    hidden = mx.arange(total) > mx.arange(total - n, total)[:, None]
    wanted = mx.softmax(mx.where(hidden, -mx.inf, q @ keys.swapaxes(1, 2) / 8), axis=-1) @ values
    for attend in llm.KERNELS["attend"]:
        assert off(attend(q, k, v), wanted) < 1e-5, attend.__name__


@pytest.mark.parametrize("kind", KINDS)
def test_attention_with_scores_that_exp_cannot_hold(monkeypatch, kind):
    """Rows with scores about 500 and about -500: each is brought to 0 by its own largest."""
    heads(monkeypatch, 1, 1, 16)
    k, v = normal(2, 1, 6, 16), normal(3, 1, 6, 16)
    q = mx.concatenate([k[:, :1] * 600, -k[:, :1] * 600, k[:, 3:4] * 0.1], axis=1) + mx.zeros((1, 3, 16))
    found = llm.KERNELS["attend"][KINDS.index(kind)](q, k, v)
    scores = mx.where(mx.arange(6) > mx.arange(3, 6)[:, None], -mx.inf, (q @ k.swapaxes(1, 2)) / 4)
    assert off(found, mx.softmax(scores, axis=-1) @ v) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_a_future_token_is_hidden_however_well_it_fits(monkeypatch, kind):
    heads(monkeypatch, 1, 1, 4)
    q = mx.ones((1, 2, 4)) * 100
    k = mx.array([[-1000.0], [1000.0]])[None] * mx.ones(4)
    v = mx.array([[1.0], [2.0]])[None] * mx.ones(4)
    assert llm.KERNELS["attend"][KINDS.index(kind)](q, k, v)[0, 0, 0].item() == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_gate_far_from_zero_stays_finite(tiny, kind):
    llm.use_kernels(kind)
    x = normal(1, 3, llm.D_MODEL) * 1e4
    g = x @ llm.W["model.layers.0.mlp.gate_proj.weight"].T
    assert mx.abs(g).max() > 100
    up, down = (llm.W[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("up", "down"))
    wanted = ((mx.sigmoid(g) * g) * (x @ up.T)) @ down.T
    assert off(llm.ffn(x, 0), wanted) < 1e-5


def test_every_draw_of_a_text_has_the_options(tiny, monkeypatch):
    seen = []
    monkeypatch.setattr(llm, "sample", lambda logits, *o: seen.append(o) or mx.argmax(logits))
    llm.generate("The", 4, temperature=0.3, top_p=0.6)
    assert seen == [(0.3, 0.6)] * 4


def test_the_cache_s_room_is_a_multiple_of_256(tiny):
    llm.use_kernels("fused")
    cache = fresh()
    for n in (1, 254, 1, 1, 300):
        k = mx.ones((2, n, 64))
        keys, values = llm.extend_cache(cache, 0, k, k)
        total = cache[0][2]
        assert cache[0][0].shape[1] == cache[0][1].shape[1] == -(-total // 256) * 256
        assert keys.shape[1] == total


@pytest.mark.parametrize("rows, columns", [(1031, 128), (2432, 128), (96, 2048), (2176, 64)])
def test_a_product_of_few_or_many_rows_is_the_product(monkeypatch, rows, columns):
    monkeypatch.setitem(llm.W, "some.weight", normal(1, rows, columns))
    for n in (1, 2, 32, 33):
        x = normal(2, n, columns)
        wanted = x @ llm.W["some.weight"].T
        for linear in llm.KERNELS["linear"]:
            assert off(linear(x, "some.weight"), wanted) < 1e-5, (linear.__name__, n)


@pytest.mark.parametrize("rows, columns", [(1, 384), (5, 3072), (198, 3072), (1, 17408), (16500, 3)])
def test_silu_of_any_size_is_silu(rows, columns):
    """NumPy's version goes on in parts: whatever their size is, all columns come out, in rows and in columns."""
    gate = normal(3, rows, columns)
    wanted = llm.KERNELS["silu"][0](gate)
    for order in "CF":
        assert off(llm.numpy_silu(np.array(gate, order=order)), wanted) < 1e-6, order


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_logits_that_are_not_finite_are_refused(tiny, monkeypatch, value):
    """In the first pass or a later one, with the likeliest token or one that is drawn."""
    for kind in KINDS:
        for temperature in (0.0, 0.8):
            for bad in (1, 3):
                passes = iter(range(1, 9))
                monkeypatch.setattr(llm, "forward", lambda *a, **k: mx.array(
                    [[0.0, value if next(passes) == bad else 1.0, 1.0, 0.5]]))
                llm.use_kernels(kind)
                seen = []
                with pytest.raises(ValueError, match="not finite"):
                    seen.extend(llm.stream([1], fresh(), 0, 5, temperature))
                monkeypatch.undo()
                with pytest.raises(ValueError, match="not finite"):
                    monkeypatch.setattr(llm, "prefill", lambda *a: mx.array([[0.0, value]]))
                    llm.trace("The")
                monkeypatch.undo()


def test_a_space_that_begins_the_new_text_is_kept(monkeypatch):
    """Decoders of SentencePiece's kind drop the space before a text's first token: the prompt comes first."""
    from tokenizers import Tokenizer, decoders, models
    tok = Tokenizer(models.WordLevel({"\u2581a": 0, "\u2581b": 1}, unk_token="\u2581a"))
    tok.decoder = decoders.Metaspace()
    monkeypatch.setattr(llm, "tok", tok, raising=False)
    monkeypatch.setattr(llm, "EOS_IDS", set(), raising=False)
    monkeypatch.setattr(llm, "prefill", lambda *a: mx.array([[0.0, 1.0]]))
    assert list(llm.stream([0], [], 0, 1)) == [" b"]


@pytest.mark.parametrize("kind", KINDS)
def test_two_tokens_at_once(tiny, kind):
    llm.use_kernels(kind)
    cache, ids = fresh(), [10, 11, 12, 13]
    rows = mx.concatenate([llm.forward(ids[:2], cache, 0), llm.forward(ids[2:], cache, 2)])
    assert off(rows, mx.concatenate([llm.forward(ids[:i], fresh(), 0)[-1:] for i in (1, 2, 3, 4)])) < 1e-5


def test_a_head_of_its_own_needs_no_word_in_config_json(tmp_path, folder_of):
    folder = changed(folder_of("untied"), tmp_path, "tie_word_embeddings")     # transformers leaves out its default
    llm.load_model(folder)
    stored = mx.load(str(folder / "model.safetensors"))
    assert mx.array_equal(llm.W["lm_head.weight"], stored["lm_head.weight"])


def test_rows_of_96_are_refused_by_name(tmp_path, tiny):
    before = dict(llm.W)
    folder = make_checkpoint(tmp_path / "m", "tied", hidden_size=96, intermediate_size=64)
    with pytest.raises(ValueError, match=r"embed_tokens\.weight: .*64"):
        llm.load_model(folder, quantize=4)
    assert llm.W == before


def test_a_head_of_its_own_is_quantised_too(tmp_path):
    folder = make_checkpoint(tmp_path / "m", "untied", hidden_size=64, intermediate_size=64)
    stored = mx.load(str(folder / "model.safetensors"))
    llm.load_model(folder, quantize=4)
    for name, w in stored.items():
        wanted = mx.dequantize(*mx.quantize(w, 64, 4), 64, 4) if w.ndim == 2 else w
        assert mx.array_equal(llm.W[name], wanted), name


@pytest.mark.parametrize("equal", [True, False])
def test_a_quantised_head_stored_beside_a_tied_embedding_must_be_the_same(tmp_path, equal):
    """Whatever the order of its three parts in the file."""
    folder = make_checkpoint(tmp_path / "m", "tied", hidden_size=64, intermediate_size=64)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization": {"group_size": 64, "bits": 4}}))
    stored, packed = mx.load(str(folder / "model.safetensors")), {}
    for name, w in stored.items():
        parts = [name.replace(".weight", part) for part in (".weight", ".scales", ".biases")]
        packed |= dict(zip(parts, mx.quantize(w, 64, 4))) if w.ndim == 2 else {name: w}
    for part in ("biases", "scales", "weight"):
        changed = 0 if equal or part != "scales" else 1
        packed[f"lm_head.{part}"] = packed[f"model.embed_tokens.{part}"] + changed
    mx.save_safetensors(str(folder / "model.safetensors"), packed)
    if equal:
        llm.load_model(folder)
        assert set(llm.W) == {*stored, "lm_head.weight"}
    else:
        with pytest.raises(ValueError, match=r"lm_head\.scales"):
            llm.load_model(folder)


@pytest.mark.parametrize("temperature", [1e-38, 1e-46, 5e-324])
def test_a_temperature_that_float32_cannot_hold_is_argmax(temperature):
    logits = mx.array([1000.0, 3000.0, -20.0])
    assert [llm.sample(logits, temperature, p).item() for p in (0.5, 1.0)] == [1, 1]


def test_a_bad_number_of_bits_or_type_leaves_the_old_model_whole(tiny):
    before = dict(llm.W)
    for options in ({"quantize": 7}, {"quantize": "4"}, {"quantize": True}, {"dtype": mx.int32}):
        with pytest.raises(ValueError):
            llm.load_model(tiny, **options)
        assert llm.W == before


def test_it_runs_in_another_thread(tiny):
    import threading
    said = []
    thread = threading.Thread(target=lambda: said.append(llm.generate("The capital of France is", 2)))
    thread.start(), thread.join()
    assert said == ["The capital of France is Paris."]


def test_the_command_line_s_temperature_and_top_p_reach_every_draw(tiny, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(llm, "sample", lambda logits, *o: seen.append(o) or mx.argmax(logits))
    monkeypatch.setattr(sys.stdout, "reconfigure", lambda **k: None, raising=False)
    for extra in ([], ["--chat"]):
        seen.clear()
        monkeypatch.setattr(sys, "argv", ["x", "--model", str(tiny), "hi", "--max-tokens", "3", *extra,
                                          "--temperature", "0.3", "--top-p", "0.6"])
        llm.main()
        assert seen == [(0.3, 0.6)] * 3


def test_without_options_the_defaults_are_those_said(tiny, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(llm, "stream", lambda *args: iter(seen.append(args) or []))
    monkeypatch.setattr(sys.stdout, "reconfigure", lambda **k: None, raising=False)
    asked = len(llm.turn_ids("user", "hi"))             # a chat's question is in the cache before the answer begins
    for extra, start_pos, max_tokens in ([], 0, 100), (["--chat"], asked, llm.MAX_POSITIONS // 4):
        monkeypatch.setattr(sys, "argv", ["x", "--model", str(tiny), "hi", *extra])
        llm.main()
        assert seen[-1][2:] == (start_pos, max_tokens, 0.0, 0.95)


def test_prefill_and_decode_are_timed_apart(tiny, monkeypatch, capsys):
    """By a clock that shows 0, 2, 7, 12, ... s: prefill takes 2 s, each of the later tokens 5 s."""
    looks = iter([0, *range(2, 1000, 5)])
    monkeypatch.setattr(llm.time, "perf_counter", lambda: next(looks))
    monkeypatch.setattr(sys.stdout, "reconfigure", lambda **k: None, raising=False)
    monkeypatch.setattr(sys, "argv", ["x", "--model", str(tiny), "The capital of France is" * 4, "--max-tokens", "11"])
    llm.main()
    assert capsys.readouterr().out.splitlines()[-1] == (
        "Time:   52.00s  (prefill 20 tokens: 10 tokens/s, decode 10 tokens: 0 tokens/s)")


@pytest.mark.parametrize("temperature", [1e-4, 0.3])
def test_a_low_temperature_is_not_greedy(temperature):
    """Logits so close that even then each of the tokens is drawn."""
    mx.random.seed(3)
    logits = mx.array([1.0, 2.0, 3.0]) * temperature / 2
    drawn = [llm.sample(logits, temperature, 1.0).item() for _ in range(300)]
    assert [drawn.count(i) / 300 for i in range(3)] == pytest.approx([0.186, 0.307, 0.506], abs=0.09)


def test_a_row_of_an_embedding_that_is_not_finite_is_refused_though_no_prompt_uses_it(tmp_path, folder_of):
    folder = shutil.copytree(folder_of("untied"), tmp_path / "copy")
    stored = mx.load(str(folder / "model.safetensors"))
    stored["model.embed_tokens.weight"][200, 3] = mx.inf
    mx.save_safetensors(str(folder / "model.safetensors"), stored)
    with pytest.raises(ValueError, match="model.embed_tokens.weight is not finite"):
        llm.load_model(folder)


def test_without_a_word_of_it_every_query_head_has_its_own_key_head(tmp_path, folder_of):
    llm.load_model(changed(folder_of("as_many_kv_heads"), tmp_path, "num_key_value_heads"))
    assert llm.N_KV == llm.N_HEADS == 4


@pytest.mark.parametrize("position", [2049, 4097, 40959])
def test_rope_is_right_far_from_the_start(tiny, position):
    """Against the reference in float64; float32 angles are off by 2e-3 radians at worst there."""
    q = normal(5, 4, 1, llm.D_HEAD)
    for kernel in llm.KERNELS["apply_rope"]:
        turned = mx.array(kernel(q, q, mx.array([position]))[0])
        wanted = [reference.rope(head, position, llm.THETA) for head in q[:, 0].tolist()]
        assert mx.max(mx.abs(turned[:, 0] - mx.array(wanted))).item() < 0.01


def test_all_three_sets_turn_by_the_same_angles(tiny):
    """Attention would not tell: it depends on the distance alone."""
    q = normal(5, 4, 3, llm.D_HEAD)
    explicit, fused, numpy = (kernel(q, q, mx.arange(7, 10))[0] for kernel in llm.KERNELS["apply_rope"])
    assert off(fused, explicit) < 1e-5 and off(numpy, explicit) < 1e-5


def test_a_small_top_p_keeps_as_many_as_it_takes():
    order, probs = llm.nucleus(mx.zeros(100_000), 1.0, 5e-4)
    assert mx.sum(probs > 0).item() in (50, 51)


def test_a_character_that_began_in_the_prompt_is_not_shown_again(tiny, monkeypatch):
    monkeypatch.setattr(llm, "tok", byte_tokenizer())
    sampled = iter(llm.tok.encode("ab").ids)
    monkeypatch.setattr(llm, "sample", lambda *rest: mx.array(next(sampled)))
    ids = llm.tok.encode("日").ids
    assert "".join(llm.stream(ids, fresh(), 0, 2)) == "ab"


def test_a_chat_gets_no_token_but_those_of_its_template(tiny, monkeypatch):
    from tokenizers import processors
    other = byte_tokenizer()
    other.post_processor = processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 256)])
    monkeypatch.setattr(llm, "tok", other)
    assert llm.turn_ids("user", "x") == [257, *llm.ids_of("user\nx"), 258, *llm.ids_of("\n")]
    assert 256 not in llm.turn_ids("user", "x")


def test_typed_lines_are_taken_as_they_are(monkeypatch):
    import io
    monkeypatch.setattr(sys, "stdin", io.StringIO("  x \n\n \ny\n"))
    assert list(llm.typed_lines()) == ["  x ", "", " ", "y"]


def test_trace_needs_room_for_the_token_that_it_adds(tiny, monkeypatch):
    ids = llm.encode("The")
    monkeypatch.setattr(llm, "MAX_POSITIONS", len(ids) + 1)
    with pytest.raises(ValueError, match="context"):
        llm.trace("The")


def test_the_model_beside_the_file_comes_before_that_in_the_current_folder(tmp_path, monkeypatch):
    for place in ("file", "here"):
        (tmp_path / place / "Qwen3-0.6B").mkdir(parents=True)
        (tmp_path / place / "Qwen3-0.6B/model.safetensors").touch()
    monkeypatch.setattr(llm, "__file__", str(tmp_path / "file/llm_inference.py"))
    monkeypatch.chdir(tmp_path / "here")
    assert llm.find_model() == tmp_path / "file/Qwen3-0.6B"
    (tmp_path / "file/Qwen3-0.6B/model.safetensors").unlink()
    assert llm.find_model().resolve() == tmp_path / "here/Qwen3-0.6B"


def test_shards_are_a_model_that_is_there(tmp_path, monkeypatch):
    (tmp_path / "Qwen3-0.6B").mkdir()
    (tmp_path / "Qwen3-0.6B/model-00001-of-00002.safetensors").touch()
    monkeypatch.setattr(llm, "__file__", str(tmp_path / "llm_inference.py"))
    assert llm.find_model() == tmp_path / "Qwen3-0.6B"


def test_another_model_that_does_not_come_is_never_replaced(tmp_path, monkeypatch):
    """A whole Qwen3-0.6B beside the file is used only where that is asked for; a path is no OWNER/NAME."""
    (tmp_path / "Qwen3-0.6B").mkdir()
    (tmp_path / "Qwen3-0.6B/model.safetensors").touch()
    monkeypatch.setattr(llm, "__file__", str(tmp_path / "llm_inference.py"))
    monkeypatch.setattr(llm, "download", lambda repo: 1 / 0)
    with pytest.raises(ValueError, match="^someone/something is no folder and did not download"):
        llm.find_model("someone/something")
    assert str(llm.find_model("no/such/folder")) == "no/such/folder"


def test_only_the_pinned_revision_in_the_hub_s_cache_is_used(tmp_path, monkeypatch):
    import huggingface_hub
    places = {llm.REVISION: str(tmp_path / "pinned/config.json"), None: str(tmp_path / "main/config.json")}
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda repo, name, revision=None: places[revision])
    assert llm.download_qwen(tmp_path / "Qwen3-0.6B") == tmp_path / "pinned"


def test_a_prompt_that_is_refused_prints_nothing_else(tiny, monkeypatch, capsys):
    for prompt in ("", "word " * 3000):
        with pytest.raises(ValueError):
            llm.complete(tiny, prompt, 5, 0.0, 0.95)
        assert capsys.readouterr().out == ""


def test_a_model_on_the_hub_comes_with_all_that_loading_reads(tmp_path, monkeypatch):
    import huggingface_hub
    from fnmatch import fnmatch
    asked = []
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *args, **options: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, **options: asked.append(options) or tmp_path)
    assert llm.find_model("someone/something") == tmp_path
    assert asked[0]["token"] is False
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
                 "model.safetensors", "model.safetensors.index.json", "model-00001-of-00002.safetensors"):
        assert any(fnmatch(name, pattern) for pattern in asked[0]["allow_patterns"]), name
    assert not any(fnmatch("pytorch_model.bin", pattern) for pattern in asked[0]["allow_patterns"])


def test_a_bad_question_leaves_special_tokens_as_they_are(tiny):
    ids = llm.encode("<|im_start|>x")
    assert not llm.chat(["\udc80"], max_tokens=5) and llm.encode("<|im_start|>x") == ids


def test_the_largest_seed_an_empty_chat_and_a_folder_named_by_a_dot(tiny, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "reconfigure", lambda **k: None, raising=False)
    monkeypatch.chdir(tiny)
    monkeypatch.setattr(sys, "argv", ["x", "--model", ".", "--max-tokens", "1", "--seed", str(2**64 - 1)])
    llm.main()
    assert capsys.readouterr().out.startswith("Model:  tiny-qwen3 ")
    monkeypatch.setattr(sys, "argv", ["x", "--model", ".", "--chat", " "])
    with pytest.raises(SystemExit) as end:
        llm.main()
    assert end.value.code == 1
    assert capsys.readouterr().err.startswith("llm_inference.py: the question is empty")


def test_a_head_that_is_not_given_is_rounded_down(tmp_path):
    folder = make_checkpoint(tmp_path / "m", "llama_no_head_dim", hidden_size=50)
    llm.load_model(folder)
    assert llm.D_HEAD == 8


@pytest.mark.parametrize("fields, theta", [
    ({"rope_theta": 1e6, "rope_parameters": {"rope_type": "default", "rope_theta": None}}, 1e6),
    ({"rope_scaling": {"rope_type": "default", "rope_theta": 500.0},
      "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 500.0)])
def test_of_two_thetas_it_is_the_one_that_transformers_takes(tmp_path, folder_of, fields, theta):
    llm.load_model(changed(folder_of("tied"), tmp_path, **fields))
    assert llm.THETA == theta


def test_model_safetensors_comes_before_an_index(tmp_path, folder_of):
    folder = shutil.copytree(folder_of("tied"), tmp_path / "copy")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"x": "not-there.safetensors"}}')
    llm.load_model(folder)


def test_without_a_word_of_it_theta_is_10000(tmp_path, folder_of):
    llm.load_model(changed(folder_of("tied"), tmp_path, "rope_theta"))
    assert llm.THETA == 10000


def test_what_stands_after_the_last_thought_is_kept(tiny, monkeypatch, capsys):
    runs, prefill = [], llm.prefill
    monkeypatch.setattr(llm, "prefill", lambda ids, *rest: runs.append(ids) or prefill(ids, *rest))
    monkeypatch.setattr(llm, "stream", lambda *rest: iter(["a</think>b</think>\n\nc"]))
    llm.chat(["x", "y"], max_tokens=5)
    assert runs == [llm.turn_ids("user", "x"), llm.turn_ids("assistant", "c") + llm.turn_ids("user", "y")]


def test_a_conversation_that_just_fits_goes_on(tiny, monkeypatch, capsys):
    monkeypatch.setattr(llm, "stream", lambda *a: iter(["c"]))
    opening = llm.ids_of("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    said = len(2 * llm.turn_ids("user", "x") + llm.turn_ids("assistant", "c") + opening)
    for room, new in ((llm.MAX_POSITIONS - said, False), (llm.MAX_POSITIONS - said + 1, True)):
        llm.chat(["x", "x"], max_tokens=room)
        assert ("new chat" in capsys.readouterr().err) == new


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="there is no timer here that sends signals")
def test_no_ctrl_c_is_lost_where_the_logits_leave_numpy(tiny, monkeypatch):
    """MLX forgets one that comes while it turns a NumPy array into its own, but not with a memoryview of it."""
    llm.use_kernels("numpy")
    monkeypatch.setitem(llm.W, "lm_head.weight", mx.zeros((200_000, 2)))
    x, fired, caught = mx.ones((1, 2)), [], 0

    def ctrl_c(*_):
        fired.append(1)
        raise KeyboardInterrupt

    def compute_until(wanted):                          # in Python 3.13 a loop's end may not belong to its try
        signal.setitimer(signal.ITIMER_REAL, 0.002 + wanted * 1e-5)
        while len(fired) < wanted:
            llm.linear(x, "lm_head.weight")

    before = signal.signal(signal.SIGALRM, ctrl_c)
    try:
        for wanted in range(1, 31):
            try:
                compute_until(wanted)
            except KeyboardInterrupt:
                caught += 1
    finally:
        signal.signal(signal.SIGALRM, before)
    assert caught == 30
