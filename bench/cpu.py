"""CPU decode and prefill against llama.cpp: same file and threads, interleaved rounds.

    python bench/cpu.py --model FILE.gguf --threads 2 [--llama-bench PATH] [--out bench/results/NAME.json]

Needs llama.cpp's ``llama-bench`` (on PATH or by --llama-bench) or the package llama-cpp-python for the
comparison; without either only our own numbers are printed. The file needs no vocabulary, so those of
``bench/synthetic.py`` will do. Refuses to print a speed when our logits are further from the exact ones than
those of the int8 modules, and to keep a run during which the read bandwidth moved by more than 10 %.
"""

import argparse
import json
import platform
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

import realizar_torch as rt
from realizar_torch.cpu_kernels import matrix_tiles
from realizar_torch.generation.causal_lm import CausalLM
from realizar_torch.generation.step import decode_step, new_state, prefill
from realizar_torch.generation.step_bytes import weight_bytes
from realizar_torch.models.loading import load_transformer
from realizar_torch.models.sources import open_source
from realizar_torch.models.transformer import Transformer
from realizar_torch.nn.experts import QuantizedExperts


def main() -> int:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    if args.no_tiles:
        matrix_tiles.available = lambda: False
    cpu, source = torch.device("cpu"), open_source(args.model)
    model = load_transformer(
        source, device=cpu, dtype=torch.float32, activations=args.activations, model_class=CausalLM
    )
    ids = torch.randint(1000, model.config.vocab_size, (1, max(args.prompt)), generator=seeded(0))
    check(model, ids[:, :128])

    bandwidth = [read_bandwidth()]
    ours: list[dict[str, float]] = []
    theirs: list[dict[str, float]] = []
    for _ in range(args.rounds):
        ours.append(our_speed(model, ids, args))
        if (speed := llama_speed(args)) is not None:
            theirs.append(speed)
    bandwidth.append(read_bandwidth())

    report = {
        "command": "python bench/cpu.py " + " ".join(sys.argv[1:]),
        "model": Path(args.model).name,
        "cpu": cpu_name(),
        "threads": args.threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": output_of("git", "rev-parse", "--short", "HEAD"),
        "read_GBps_before_after": [round(b, 2) for b in bandwidth],
        "weight_bytes_per_token": weight_bytes(model),
    }
    for name in ours[0]:
        mine = [speeds[name] for speeds in ours]
        report[name] = {"ours_tok_s": mine, "ours_median": statistics.median(mine)}
        if theirs:
            other = [speeds[name] for speeds in theirs]
            ratios = [a / b for a, b in zip(mine, other, strict=True)]
            report[name] |= {"llama_cpp_tok_s": other, "llama_cpp_median": statistics.median(other)}
            report[name] |= {
                "ratio_median": statistics.median(ratios),
                "ratio_range": [min(ratios), max(ratios)],
            }
    show(report, list(ours[0]))
    if max(bandwidth) > 1.1 * min(bandwidth):
        print("the read bandwidth moved by more than 10 %: the machine was busy, this run is not kept")
        return 1
    if args.out:
        Path(args.out).write_text(json.dumps(report, indent=1) + "\n")
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a GGUF file")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--prompt", type=int, nargs="+", default=[128, 512], help="tokens of the prompts")
    parser.add_argument("--new", type=int, default=64, help="tokens decoded")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--activations", choices=("int8", "float"), default="int8")
    parser.add_argument("--no-tiles", action="store_true", help="as on a CPU without AMX")
    parser.add_argument("--llama-bench", default=shutil.which("llama-bench"), help="llama.cpp's binary")
    parser.add_argument("--out", help="write the report as JSON")
    return parser.parse_args()


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@torch.inference_mode()
def check(model: Transformer, ids: torch.Tensor) -> None:
    """16 teacher-forced tokens of the fused kernels, the int8 modules and exact ones; warms everything up."""
    steps = 16
    modules = model(ids, logits_to_keep=steps).logits[0]
    state = new_state(model, 1, ids.shape[1])
    found = [prefill(model, ids[:, : 1 - steps], None, state).clone()]
    found += [decode_step(model, ids[:, s], state).clone() for s in range(1 - steps, 0)]
    linears = [m for m in model.modules() if isinstance(m, rt.QuantizedLinear | QuantizedExperts)]
    numerics = [linear.activations for linear in linears]
    for linear in linears:
        linear.activations = "float"
    exact = model(ids, logits_to_keep=steps).logits[0]
    for linear, activations in zip(linears, numerics, strict=True):
        linear.activations = activations
    error, accepted = (
        ((logits - exact) / exact.std()).square().mean().sqrt() for logits in (torch.cat(found), modules)
    )
    if not error <= 1.5 * accepted + 1e-4:
        raise SystemExit(
            f"wrong result: the fused kernels are {error:.3f} of the logits' spread away from exact ones, "
            f"the modules {accepted:.3f}"
        )


@torch.inference_mode()
def our_speed(model: Transformer, ids: torch.Tensor, args: argparse.Namespace) -> dict[str, float]:
    """Tokens a second; decoding starts from an empty cache, as llama-bench does."""
    speeds = {}
    for count in args.prompt:
        state = new_state(model, 1, count)
        start = time.perf_counter()
        prefill(model, ids[:, :count], None, state)
        speeds[f"pp{count}"] = count / (time.perf_counter() - start)
    state = new_state(model, 1, args.new + 1)
    token = prefill(model, ids[:, :1], None, state).argmax(-1)
    start = time.perf_counter()
    for _ in range(args.new):
        token = decode_step(model, token, state).argmax(-1)
    return speeds | {f"tg{args.new}": args.new / (time.perf_counter() - start)}


def llama_speed(args: argparse.Namespace) -> dict[str, float] | None:
    """The same numbers from llama-bench, else from llama-cpp-python, else None."""
    names = [f"pp{count}" for count in args.prompt] + [f"tg{args.new}"]
    if args.llama_bench:
        command = [args.llama_bench, "-m", args.model, "-t", str(args.threads), "-r", "1", "-o", "json"]
        command += ["-p", ",".join(map(str, args.prompt)), "-n", str(args.new)]
        rows = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
        return {name: row["avg_ts"] for name, row in zip(names, rows, strict=True)}
    try:
        import llama_cpp
    except ImportError:
        return None
    context = max(args.prompt) + args.new
    llama = llama_cpp.Llama(args.model, n_ctx=context, n_threads=args.threads, verbose=False)
    speeds = []
    for count in args.prompt:
        llama.reset()
        start = time.perf_counter()
        llama.eval(list(range(1000, 1000 + count)))
        speeds.append(count / (time.perf_counter() - start))
    llama.reset()
    llama.eval([1000])
    start = time.perf_counter()
    for _ in range(args.new):
        llama.eval([llama.sample(temp=0)])
    return dict(zip(names, [*speeds, args.new / (time.perf_counter() - start)], strict=True))


def read_bandwidth() -> float:
    """GB/s of summing 1 GB of int64, best of five."""
    data = torch.ones(1 << 27, dtype=torch.int64)
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        data.sum()
        best = max(best, data.nbytes / (time.perf_counter() - start) / 1e9)
    return best


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if "model name" in line] if info.exists() else []
    return names[0].split(":")[1].strip() if names else platform.processor()


def output_of(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def show(report: dict, names: list[str]) -> None:
    before, after = report["read_GBps_before_after"]
    threads = report["threads"]
    print(f"{report['model']}  {report['cpu']}  {threads} threads  read {before:.1f} / {after:.1f} GB/s")
    for name in names:
        row = report[name]
        line = f"{name:>6}: ours {row['ours_median']:8.1f} tok/s"
        if "ratio_median" in row:
            low, high = row["ratio_range"]
            line += f"  llama.cpp {row['llama_cpp_median']:8.1f}"
            line += f"  ratio {row['ratio_median']:.2f} ({low:.2f}-{high:.2f})"
        print(line)
    speed = report["weight_bytes_per_token"] * report[names[-1]]["ours_median"] / 1e9
    print(f"decode reads its weights at {100 * speed / min(before, after):.0f} % of the read bandwidth")


if __name__ == "__main__":
    sys.exit(main())
