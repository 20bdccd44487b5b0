"""How fast llm_inference.py is, beside mlx-lm and Hugging Face on the same machine: one Markdown table.

    python tests/benchmark.py                       # this program alone
    python tests/benchmark.py --peers PYTHON        # and the peers; PYTHON has mlx-lm, torch and transformers
    python tests/benchmark.py --model tests/tiny-qwen3 --lengths 5,50 --repeats 1       # a try in seconds

A speed depends on the machine and on what else runs there; a ratio taken in one run does so far less. So
each engine loads the model in a process of its own, then they take turns at the same work, one at a time,
and a cell is the median of an engine's turns. Speed hardly depends on the weights' values, so without --model
they are random, in Qwen3-0.6B's shapes; for the same reason decode starts from random keys and values.
"""
import argparse
import ctypes
import importlib.metadata
import itertools
import json
import os
import platform
import random
import resource
import shlex
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent


def timed(function, *arguments):
    """What a function returns, and the seconds it took."""
    begin = time.perf_counter()
    value = function(*arguments)
    return value, time.perf_counter() - begin


# ==== The engines ===========================================================================================
# Each loads the model and returns facts, fill, tokens. fill(n) makes a cache of n positions. tokens(ids,
# cache, n, count, drawn) generates count tokens that follow the n cached ones and ids, as the engine's users
# do: the likeliest ones, or if drawn is true those that are drawn with these two:
TEMPERATURE, TOP_P = 0.8, 0.95


def describe(load, size, dtype, device, *packages):
    """An engine's facts: seconds to load, bytes of a weight, and what it uses, as text."""
    versions = [f"{name} {importlib.metadata.version(name)}" for name in packages]
    return {"load": load, "size": size, "uses": ", ".join([*versions, str(dtype), str(device)])}


def mlx_device(mx):
    return f"{mx.default_device().type.name} {mx.device_info()['device_name']}"


def openblas_kernel():
    """Which of its kernels NumPy's OpenBLAS chose for this processor, if threadpoolctl is there to tell."""
    try:
        from threadpoolctl import threadpool_info
        return ", ".join(f"OpenBLAS {lib['version']} {lib['architecture']}" for lib in threadpool_info()
                         if lib["internal_api"] == "openblas")
    except ImportError:
        return "its BLAS (threadpoolctl would tell which kernel)"


def ours(folder):
    """llm_inference.py through its own functions."""
    sys.path.insert(0, str(ROOT))
    import llm_inference as llm
    import mlx.core as mx
    import numpy as np
    _, load = timed(llm.load_model, folder)
    llm.EOS_IDS.clear()                             # no text may end early
    dtype = llm.W["model.norm.weight"].dtype

    def fill(n):
        cache = [None] * llm.N_LAYERS
        for layer_idx in range(llm.N_LAYERS if n else 0):
            k, v = (llm.xp.asarray(mx.random.normal((llm.N_KV, n, llm.D_HEAD)), dtype=dtype) for _ in "kv")
            mx.eval(llm.extend_cache(cache, layer_idx, k, v))
        return cache

    def tokens(ids, cache, n, count, drawn):
        options = (TEMPERATURE, TOP_P) if drawn else ()
        return itertools.islice(llm.next_tokens(ids, cache, n, *options), count)

    def products():
        """Passes a second that all matrices allow, each once as a NumPy product with a vector."""
        matrices = [np.asarray(w) for name, w in llm.W.items() if w.ndim == 2 and "embed" not in name]
        vectors = {w.shape[1]: np.ones(w.shape[1], dtype=np.float32) for w in matrices}
        return 3 / min(timed(lambda: [w @ vectors[w.shape[1]] for w in matrices * 3])[1] for _ in range(3))

    facts = describe(load, dtype.itemsize if llm.xp is np else dtype.size, dtype, mlx_device(mx), "mlx", "tokenizers")
    facts["uses"] += f", {llm.kernels} functions, NumPy {np.__version__} with {openblas_kernel()}"
    ours.products = products
    # A token reads all matrices, but of the embedding a row. (If tied, W holds that again, as the head.)
    facts["weights"] = sum(w.size for w in llm.W.values()) - llm.W["model.embed_tokens.weight"].size
    return facts, fill, tokens


def mlx_lm(folder):
    """mlx-lm as it is installed, in the dtype of the files."""
    import mlx.core as mx
    from mlx_lm import load as load_model
    from mlx_lm.generate import generate_step
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.sample_utils import make_sampler
    (model, _), load = timed(load_model, str(folder))
    dtype, c = model.layers[0].input_layernorm.weight.dtype, model.args

    def fill(n):
        cache, shape = make_prompt_cache(model), (1, c.num_key_value_heads, n, c.head_dim)
        for layer in cache if n else []:
            layer.update_and_fetch(*(mx.random.normal(shape, dtype=dtype) for _ in "kv"))
            mx.eval(layer.state)
        return cache

    def tokens(ids, cache, n, count, drawn):
        sampler = make_sampler(temp=TEMPERATURE, top_p=TOP_P) if drawn else None
        yield from generate_step(mx.array(ids), model, max_tokens=count, prompt_cache=cache, sampler=sampler)
        mx.eval([layer.state for layer in cache])   # it has begun a token more than asked: wait for that

    return describe(load, dtype.size, dtype, mlx_device(mx), "mlx", "mlx-lm"), fill, tokens


def hugging_face(folder, dtype):
    """Transformers on PyTorch, on the GPU if there is one."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache, TemperatureLogitsWarper, TopPLogitsWarper
    dtype, device = getattr(torch, dtype), torch.accelerator.current_accelerator() or "cpu"
    model, load = timed(lambda: AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval())
    c, warpers = model.config, [TemperatureLogitsWarper(TEMPERATURE), TopPLogitsWarper(TOP_P)]

    def fill(n):
        cache, shape = DynamicCache(), (1, c.num_key_value_heads, n, c.head_dim)
        for layer_idx in range(c.num_hidden_layers if n else 0):
            cache.update(*(torch.randn(shape, dtype=dtype, device=device) for _ in "kv"), layer_idx)
        return cache

    @torch.no_grad()
    def tokens(ids, cache, n, count, drawn):
        x = torch.tensor([ids], device=device)
        for _ in range(count):
            out = model(input_ids=x, past_key_values=cache, use_cache=True, logits_to_keep=1)
            scores = out.logits[:, -1].float()      # as generate takes them
            for warper in warpers if drawn else []:
                scores = warper(x, scores)
            x = torch.multinomial(scores.softmax(-1), 1) if drawn else scores.argmax(-1, keepdim=True)
            yield x.item()

    return describe(load, dtype.itemsize, dtype, device, "torch", "transformers"), fill, tokens


ENGINES = {"llm_inference.py": ours, "mlx-lm": mlx_lm, "HF float32": lambda f: hugging_face(f, "float32"),
           "HF bfloat16": lambda f: hugging_face(f, "bfloat16")}
OURS, *PEERS = ENGINES
PRODUCTS = "all matrices as NumPy products, passes/s"


# ==== What runs in a process of its own: --worker KIND DIR ==================================================
def peak_memory():
    """Bytes that this process has held at most; if it computes on a GPU, those held there."""
    mx, torch = sys.modules.get("mlx.core"), sys.modules.get("torch")
    if mx and mx.default_device() == mx.gpu:
        return mx.get_peak_memory()
    if torch and torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def serve(name, folder):
    """Load an engine, then answer commands on stdin with a line of JSON each on stdout.

    "prefill N 0": tokens/s, until one is chosen after N others. "decode N COUNT" and "draw N COUNT": tokens/s of
    COUNT tokens, after N in the cache and one that is not timed. "peak 0 0": peak_memory().
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)                                   # what a library prints is not an answer
    facts, fill, tokens = ENGINES[name](folder)
    print(json.dumps(facts), file=answers)
    for line in sys.stdin:
        (command, n, count), text = line.split(), iter(())
        n, count = int(n), int(count)
        if command == "prefill":
            text = tokens(random.Random(n).choices(range(200), k=n), fill(0), 0, 1, False)
            answer = n / timed(next, text)[1]
        elif command in ("decode", "draw"):
            text = tokens([0], fill(n), n, count + 1, command == "draw")
            next(text)
            answer = count / timed(lambda: [next(text) for _ in range(count)])[1]
        elif command == "products":
            answer = ours.products()
        else:
            answer = peak_memory()
        list(text)                                  # to the end: nothing may still run in another's turn
        print(json.dumps(answer), file=answers)


def read_bandwidth():
    """Bytes/s at which memory can be read, the best of 6: memchr in a thread a core, or mx.max on a GPU."""
    import mlx.core as mx
    size, threads = 1 << 28, os.cpu_count()
    if mx.default_device() == mx.gpu:
        threads, blocks = 1, [mx.zeros(size // 4)]
        read = lambda block: mx.eval(mx.max(block))                             # noqa: E731
    else:
        memchr = ctypes.CDLL(None).memchr           # finds nothing, so it reads all; ctypes lets threads run
        memchr.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
        blocks = [ctypes.create_string_buffer(b"x" * size, size) for _ in range(threads)]
        read = lambda block: memchr(ctypes.addressof(block), 0, size)           # noqa: E731
    with ThreadPoolExecutor(threads) as pool:
        return threads * size / min(timed(lambda: list(pool.map(read, blocks)))[1] for _ in range(6))


def make_checkpoint(folder):
    """Random bfloat16 weights of Qwen3-0.6B's shapes, standard deviation 0.02, norms of 1: 1.2 GB, once."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    import llm_inference as llm
    import mlx.core as mx
    from checkpoints import byte_tokenizer
    folder.mkdir(parents=True, exist_ok=True)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    for name in ("config.json", "tokenizer.json"):
        if (ROOT / "Qwen3-0.6B" / name).exists():
            shutil.copyfile(ROOT / "Qwen3-0.6B" / name, folder / name)
    if not (folder / "model.safetensors").exists():
        weights, (_, constants) = {}, llm.read_config(folder)
        for name, shape in llm.expected_tensors(constants, qk_norm=True, own_head=False):
            w = mx.ones(shape) if len(shape) == 1 else mx.random.normal(shape, scale=0.02)
            weights[name] = w.astype(mx.bfloat16)
            mx.eval(weights[name])
        mx.save_safetensors(str(folder / "part.safetensors"), weights, metadata={"format": "pt"})
        (folder / "part.safetensors").replace(folder / "model.safetensors")


# ==== The parent: starts the processes, gives them turns, prints the table ==================================
# It loads nothing and stays small: on Linux a process inherits the peak memory of the one that started it.
def worker_command(python, kind, folder):
    return [python, __file__, "--worker", kind, str(folder)]


def ask(worker, command=None):
    """A worker's answer to a command, or the facts that it gives once it is ready."""
    if command:
        print(command, file=worker.stdin, flush=True)
    if not (answer := worker.stdout.readline()):
        sys.exit(f"{worker.args[3]} has ended; the reason stands above")
    return json.loads(answer)


def first_token(python, name, folder):
    """Seconds from the start to the end of a process that adds one token to five."""
    byte_level = (folder / "tokenizer.json").stat().st_size < 100_000
    prompt = "Hello" if byte_level else "The capital of France is"
    program = ["-m", "mlx_lm", "generate", "--ignore-chat-template", "--prompt", prompt]
    if name == OURS:
        program = [str(ROOT / "llm_inference.py"), prompt]
    command = [python, *program, "--model", str(folder), "--max-tokens", "1"]
    return timed(lambda: subprocess.run(command, check=True, stdout=sys.stderr))[1]


def measure(args, folder):
    """Give all engines their turns. Returns {row: {engine: [a value a turn]}}, {engine: facts}, bytes/s."""
    rows, facts, workers, bandwidths = {}, {}, {}, []
    pythons = {OURS: sys.executable} | (dict.fromkeys(PEERS, args.peers) if args.peers else {})

    def take_turns(row, value, names, repeats=args.repeats):
        rows[row] = {name: [] for name in names}
        for name in list(names) * repeats:
            rows[row][name].append(value(name))
            print(f"{row}: {name} {rows[row][name][-1]:.4g}", file=sys.stderr)

    def load(name):
        if name in workers:
            workers[name].communicate()             # the end of its stdin ends it
        workers[name] = subprocess.Popen(worker_command(pythons[name], name, folder), text=True,
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        facts[name] = ask(workers[name])
        return facts[name]["load"]

    take_turns("load, s", load, pythons)
    patient = list(pythons)
    for n, longer in zip(args.lengths, args.lengths[1:] + [None]):
        row = f"prefill of {n}, tokens/s"
        take_turns(row, lambda name: ask(workers[name], f"prefill {n} 0"), patient)
        patient = [name for name in patient if longer and longer / median(rows[row][name]) < args.patience]
    take_turns("peak memory, GB", lambda name: ask(workers[name], "peak 0 0") / 1e9, pythons, 1)
    for i, n in enumerate(args.lengths):
        row = f"decode after {n}, tokens/s"
        take_turns(row, lambda name: ask(workers[name], f"decode {n} {args.tokens}"), pythons)
        bandwidths.append(float(subprocess.check_output(worker_command(sys.executable, "bandwidth", folder))))
        if i == 0:
            take_turns(PRODUCTS, lambda name: ask(workers[name], "products 0 0"), [OURS])
        if i == len(args.lengths) // 2:
            row = f"decode after {n} at temperature {TEMPERATURE}, tokens/s"
            take_turns(row, lambda name: ask(workers[name], f"draw {n} {args.tokens}"), pythons)
    for worker in workers.values():
        worker.communicate()
    programs = [name for name in pythons if name in (OURS, "mlx-lm")]
    take_turns("start to first token, s", lambda name: first_token(pythons[name], name, folder), programs)
    return rows, facts, max(bandwidths)


def print_table(args, rows, facts, bandwidth):
    """The Markdown table, what is needed to read it, the machine, and the command that made it."""
    cells = {row: {name: median(values) for name, values in turns.items()} for row, turns in rows.items()}
    shortest, weights = args.lengths[0], facts[OURS]["weights"]
    cells["share of the bandwidth, %"] = {
        name: 100 * speed * weights * facts[name]["size"] / bandwidth
        for name, speed in cells[f"decode after {shortest}, tokens/s"].items()}
    limit = cells[PRODUCTS][OURS]
    cells["share of what the products alone allow, %"] = {
        name: 100 * speed / limit for name, speed in cells[f"decode after {shortest}, tokens/s"].items()}
    peers = [name for name in facts if name != OURS]
    heads = ["", OURS] + [head for name in peers for head in (name, "ratio")]
    print("|", " | ".join(heads), "|\n|---" + "|---:" * (len(heads) - 1) + "|")
    for row, values in cells.items():
        texts = [f"{values[name]:.3g}" if name in values else "not run" for name in facts]
        ratios = [f"{values[OURS] / values[name]:.2f}" if name in values else "" for name in peers]
        texts[1:] = [text for pair in zip(texts[1:], ratios) for text in pair]
        print("|", " | ".join([row, *texts]), "|")
    print(f"""
A ratio is ours / theirs: more is better for tokens/s, less for s and GB. Medians of {args.repeats} turns.
Peak memory: loading and the prefills. Start to first token: a whole process that adds one token to five.
Decode takes the likeliest tokens, or draws from top-p {TOP_P}.
Not run: there is no such program, or going by the length before the prefill takes over {args.patience:.0f} s.
Share of the bandwidth: {weights / 1e6:.0f} million weights a token, at the speed after {shortest}, of the
{bandwidth / 1e9:.1f} GB/s at which memory can be read.
""")
    for name, engine in facts.items():
        print(f"- {name}: {engine['uses']}")
    system = f"{platform.system()} {platform.machine()}"
    print(f"- {os.cpu_count()} cores, {system}, Python {platform.python_version()}; load average "
          f"{args.busy:.1f} at the start (near 0, or other programs slowed this down)")
    print(f"- made by: python {shlex.join(sys.argv)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", metavar="DIR", type=Path, help="a checkpoint (default: random weights, made once)")
    add("--cache", metavar="DIR", type=Path, default=Path.home() / ".cache/llm_inference-benchmark",
        help="where the random weights are kept (default: %(default)s)")
    add("--peers", metavar="PYTHON", help="an interpreter that has mlx-lm, torch and transformers")
    add("--lengths", type=lambda text: sorted(map(int, text.split(","))), default=[5, 250, 2000],
        help="tokens of prompt or context (default: 5,250,2000)")
    add("--repeats", type=int, default=3, help="turns of each engine; a cell is their median (default: 3)")
    add("--tokens", type=int, default=8, help="tokens to decode in a turn (default: 8)")
    add("--patience", type=float, default=200, help="leave out prefills of more seconds (default: 200)")
    add("--worker", nargs=2, metavar=("KIND", "DIR"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.busy = os.getloadavg()[0]
    for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):      # they keep OpenBLAS from its best kernel
        os.environ.pop(name, None)
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "PYTHONWARNINGS": "ignore"}
    if not args.worker:
        if not args.model:
            print(f"random weights in {args.cache}", file=sys.stderr)
            subprocess.run(worker_command(sys.executable, "checkpoint", args.cache), check=True)
        print_table(args, *measure(args, args.model or args.cache))
    elif args.worker[0] in ENGINES:
        serve(args.worker[0], Path(args.worker[1]))
    elif args.worker[0] == "bandwidth":
        print(read_bandwidth())
    else:
        make_checkpoint(Path(args.worker[1]))


if __name__ == "__main__":
    main()
