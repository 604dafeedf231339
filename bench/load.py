"""Seconds from a file to the first token, and the memory it takes: best of several fresh processes.

    python bench/load.py --model FILE.gguf [--runs 3]

Kernels are compiled by a first, uncounted process. "load" is model and tokenizer, "first" the first token.
"""

import argparse
import json
import subprocess
import sys

CHILD = """
import json, resource, sys, time
start = time.perf_counter()
import torch, numba
imported = time.perf_counter()
import realizar_torch as rt
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before = peak()
model, tokenizer = rt.load(sys.argv[1])
loaded, after = time.perf_counter(), peak()
next(iter(rt.stream(model, tokenizer, "The capital of France is", max_new_tokens=2)))
first = time.perf_counter()
print(json.dumps({"import": imported - start, "load": loaded - imported, "first": first - loaded,
                  "MiB": after - before}))
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a GGUF file")
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    runs = [measure(args.model) for _ in range(args.runs + 1)][1:]
    for name, unit in (("import", "s"), ("load", "s"), ("first", "s"), ("MiB", "MiB over the imports")):
        values = [run[name] for run in runs]
        print(f"{name.replace('MiB', 'peak'):>7}: best {min(values):7.2f}  worst {max(values):7.2f} {unit}")
    return 0


def measure(model: str) -> dict[str, float]:
    """One fresh process; kernels come from the disk cache."""
    done = subprocess.run([sys.executable, "-c", CHILD, model], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


if __name__ == "__main__":
    sys.exit(main())
