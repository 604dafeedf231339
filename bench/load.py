"""Seconds from a file to the first token, and the memory it takes, in fresh processes.

    python bench/load.py --model FILE.gguf [--runs 3]
    python bench/load.py --model FILE.gguf --device cuda [--out results.json]

On the CPU: best of several processes; kernels are compiled by a first, uncounted one. "load" is model and
tokenizer, "first" the first token. On a GPU: one process with an empty kernel cache, one that finds what the
first has compiled, the time split into read, copy, compile and capture; files without a vocabulary too
(``bench/synthetic.py 8b``).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

CPU_CHILD = """
import json, resource, sys, time
start = time.perf_counter()
import torch, numba
imported = time.perf_counter()
import realizar_torch as rt
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before = peak()
model, tokenizer = rt.load(sys.argv[1], device="cpu")
loaded, after = time.perf_counter(), peak()
next(iter(rt.stream(model, tokenizer, "The capital of France is", max_new_tokens=2)))
first = time.perf_counter()
print(json.dumps({"import": imported - start, "load": loaded - imported, "first": first - loaded,
                  "MiB": after - before}))
"""
# the same path as rt.load behind the tokenizer; "again" is the same request with kernels and graph at hand
GPU_CHILD = """
import json, sys, time
start = time.perf_counter()
import torch
import realizar_torch as rt
from realizar_torch.generation.causal_lm import CausalLM
from realizar_torch.models.loading import load_transformer
from realizar_torch.models.sources import open_source

PROMPT = 32

class Clock:
    def __init__(self): self.times = []
    def put(self, tokens): self.times.append(time.perf_counter())
    def end(self): pass

def request():
    clock, begun = Clock(), time.perf_counter()
    ids = torch.arange(1, PROMPT + 1, device="cuda")[None]
    tokens = model.generate(ids, max_new_tokens=11, eos_token_id=[], streamer=clock)
    # the streamer gets the prompt first
    return clock.times[1] - begun, time.perf_counter() - begun, tokens[0, PROMPT:].tolist()

torch.empty(0, device="cuda")
imported = time.perf_counter()
with open(sys.argv[1], "rb", buffering=0) as file:
    buffer = bytearray(1 << 24)
    while file.readinto(buffer): pass
read = time.perf_counter()
device = torch.device("cuda")
options = {"dtype": torch.bfloat16, "activations": "int8", "model_class": CausalLM}
model = load_transformer(open_source(sys.argv[1]), device=device, **options)
rt.prepack(model)
torch.cuda.synchronize()
copied = time.perf_counter()
state = model.gpu_states.take(model, 1, 1)
state.prepare(model)
# what ``generate`` does first: of a prompt's pass and of the steps, all kernels at once
state.compile(model, PROMPT)
torch.cuda.synchronize()
state.close()
compiled = time.perf_counter()
first, ten, tokens = request()
again_first, again_ten, again = request()
allocated, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
state = model.gpu_states.take(model, 1, 1)
print(json.dumps({"import": imported - start, "read": read - imported, "copy": copied - read,
                  "compile": compiled - copied, "first token": first, "ten steps": ten, "again": again_ten,
                  "again first": again_first,
                  "same tokens": tokens == again, "graph": vars(state._decoders[1].stats),
                  "bytes": {"KV cache": state.cache.memory_bytes, "workspace": state.workspace.stats.nbytes,
                            "allocated": allocated, "peak": peak}}))
"""
# seconds to the first token with an empty kernel cache, and with a warm one
BARS = {"empty": 20.0, "warm": 6.0}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a GGUF file")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write the report as JSON (on a GPU)")
    args = parser.parse_args()
    if args.device == "cuda":
        return on_gpu(args.model, args.out)
    runs = [measure(CPU_CHILD, args.model) for _ in range(args.runs + 1)][1:]
    for name, unit in (("import", "s"), ("load", "s"), ("first", "s"), ("MiB", "MiB over the imports")):
        values = [run[name] for run in runs]
        print(f"{name.replace('MiB', 'peak'):>7}: best {min(values):7.2f}  worst {max(values):7.2f} {unit}")
    return 0


def on_gpu(model: str, out: Path | None) -> int:
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"TRITON_CACHE_DIR": cache}
        runs = {name: measure(GPU_CHILD, model, environment) for name in BARS}
    for name, run in runs.items():
        run["file"] = Path(model).stat().st_size
        # what a request takes beyond the same request again: kernels' first launches, and the graph
        run["capture"] = run["ten steps"] - run["again"]
        run["total"] = sum(run[part] for part in ("read", "copy", "compile", "first token"))
        print(f"{name} kernel cache: {run['total']:.2f} s to the first token (at most {BARS[name]:.0f})")
        print(
            f"  imports {run['import']:.2f} (not counted), read {run['read']:.2f}, copy {run['copy']:.2f}, "
            f"compile {run['compile']:.2f}, first token {run['first token']:.2f}"
        )
        print(
            f"  11 tokens {run['ten steps']:.2f}, of that capture {run['capture']:.2f}; the rest "
            f"{run['again']:.3f} with its first token after {run['again first']:.3f}"
        )
        print(f"  the same tokens again: {run['same tokens']}; {run['graph']}")
        sizes = run["bytes"]
        limit = run["file"] + sizes["KV cache"] + sizes["workspace"]
        print(
            f"  memory after ten steps {sizes['allocated']:,} B, {sizes['allocated'] - limit:+,} against "
            f"file {run['file']:,} + KV cache {sizes['KV cache']:,} + workspace {sizes['workspace']:,}; peak "
            f"{sizes['peak']:,}",
            flush=True,
        )
    if out:
        out.write_text(json.dumps(runs, indent=1) + "\n")
    return 0


def measure(child: str, model: str, environment: dict[str, str] | None = None) -> dict:
    """One fresh process; what it prints last."""
    command = [sys.executable, "-P", "-c", child, model]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"loading {model} failed: {done.stderr.strip().splitlines()[-1]}")
    # warnings of a run that went well
    sys.stderr.write(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    sys.exit(main())
