"""CPU decode and prefill against llama.cpp: same file and threads, interleaved rounds.

    python bench/cpu.py --model FILE.gguf --threads 2 [--llama-bench PATH] [--out bench/results/NAME.json]

Needs llama.cpp's ``llama-bench`` (on PATH or by --llama-bench) or the package llama-cpp-python for the
comparison; without either only our own numbers are printed. Refuses to print a speed when our greedy
tokens differ from those of the unfused modules beyond what rounding explains.
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
from realizar_torch.generation.step import decode_step, new_state, prefill


def main() -> int:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    model, _ = rt.load(args.model, activations=args.activations)
    ids = torch.randint(
        1000, model.config.vocab_size, (1, args.prompt), generator=torch.Generator().manual_seed(0)
    )
    check(model, ids)

    bandwidth = [read_bandwidth(args.threads)]
    ours, theirs = [], []
    for _ in range(args.rounds):
        ours.append(our_speed(model, ids, args.new))
        if (speed := llama_speed(args)) is not None:
            theirs.append(speed)
    bandwidth.append(read_bandwidth(args.threads))

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
    for index, name in enumerate((f"pp{args.prompt}", f"tg{args.new}")):
        mine = [round_[index] for round_ in ours]
        report[name] = {"ours_tok_s": mine, "ours_median": statistics.median(mine)}
        if theirs:
            other = [round_[index] for round_ in theirs]
            ratios = [a / b for a, b in zip(mine, other, strict=True)]
            report[name] |= {"llama_cpp_tok_s": other, "llama_cpp_median": statistics.median(other)}
            report[name] |= {
                "ratio_median": statistics.median(ratios),
                "ratio_range": [min(ratios), max(ratios)],
            }
    show(report, args)
    if args.out:
        Path(args.out).write_text(json.dumps(report, indent=1) + "\n")
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a GGUF file")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens decoded")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--activations", choices=("int8", "float"), default="int8")
    parser.add_argument("--llama-bench", default=shutil.which("llama-bench"), help="llama.cpp's binary")
    parser.add_argument("--out", help="write the report as JSON")
    return parser.parse_args()


def check(model: rt.CausalLM, ids: torch.Tensor) -> None:
    """The fused step and the modules agree on 16 teacher-forced tokens; it also warms everything up."""
    steps = 16
    with torch.inference_mode():
        expected = model(ids, logits_to_keep=steps).logits[0]
        state = new_state(model, 1, ids.shape[1])
        prefill(model, ids[:, :-steps], None, state)
        found = torch.cat([decode_step(model, ids[:, -steps + s], state).clone() for s in range(steps)])
    rms = (found - expected).square().mean().sqrt() / expected.std()
    if not rms < 0.05:
        raise SystemExit(
            f"wrong result: the fused step is {rms:.3f} of the logits' spread away from the modules"
        )


def our_speed(model: rt.CausalLM, ids: torch.Tensor, new: int) -> tuple[float, float]:
    """(prompt tok/s, decoded tok/s); decoding starts from an empty cache, as llama-bench does."""
    with torch.inference_mode():
        state = new_state(model, 1, ids.shape[1])
        start = time.perf_counter()
        prefill(model, ids, None, state)
        prompt_seconds = time.perf_counter() - start

        state = new_state(model, 1, new + 1)
        token = prefill(model, ids[:, :1], None, state).argmax(-1)
        start = time.perf_counter()
        for _ in range(new):
            token = decode_step(model, token, state).argmax(-1)
        return ids.shape[1] / prompt_seconds, new / (time.perf_counter() - start)


def llama_speed(args: argparse.Namespace) -> tuple[float, float] | None:
    """The same two numbers from llama-bench, else from llama-cpp-python, else None."""
    if args.llama_bench:
        sizes = ["-p", str(args.prompt), "-n", str(args.new)]
        command = [
            args.llama_bench,
            "-m",
            args.model,
            "-t",
            str(args.threads),
            *sizes,
            "-r",
            "1",
            "-o",
            "json",
        ]
        rows = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
        return rows[0]["avg_ts"], rows[1]["avg_ts"]
    try:
        import llama_cpp
    except ImportError:
        return None
    llama = llama_cpp.Llama(args.model, n_ctx=args.prompt + args.new, n_threads=args.threads, verbose=False)
    tokens = list(range(1000, 1000 + args.prompt))
    start = time.perf_counter()
    llama.eval(tokens)
    prompt_seconds = time.perf_counter() - start
    llama.reset()
    llama.eval(tokens[:1])
    start = time.perf_counter()
    for _ in range(args.new):
        llama.eval([llama.sample(temp=0)])
    return args.prompt / prompt_seconds, args.new / (time.perf_counter() - start)


def read_bandwidth(threads: int) -> float:
    """GB/s of summing 1 GB of int64, best of three."""
    data = torch.ones(1 << 27, dtype=torch.int64)
    best = 0.0
    for _ in range(3):
        start = time.perf_counter()
        data.sum()
        best = max(best, data.nbytes / (time.perf_counter() - start) / 1e9)
    return best


def weight_bytes(model: rt.CausalLM) -> int:
    """Bytes of weights that a token reads: every linear and the head, of the embedding one row."""
    return sum(m.weight.nbytes for m in model.modules() if isinstance(m, rt.QuantizedLinear))


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if "model name" in line] if info.exists() else []
    return names[0].split(":")[1].strip() if names else platform.processor()


def output_of(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def show(report: dict, args: argparse.Namespace) -> None:
    before, after = report["read_GBps_before_after"]
    print(f"{report['model']}  {report['cpu']}  {args.threads} threads  read {before:.1f} / {after:.1f} GB/s")
    for name in (f"pp{args.prompt}", f"tg{args.new}"):
        row = report[name]
        line = f"{name:>6}: ours {row['ours_median']:8.1f} tok/s"
        if "ratio_median" in row:
            low, high = row["ratio_range"]
            line += f"  llama.cpp {row['llama_cpp_median']:8.1f}"
            line += f"  ratio {row['ratio_median']:.2f} ({low:.2f}-{high:.2f})"
        print(line)
    share = (
        report["weight_bytes_per_token"] * report[f"tg{args.new}"]["ours_median"] / 1e9 / min(before, after)
    )
    print(f"decode reads its weights at {100 * share:.0f} % of the read bandwidth")


if __name__ == "__main__":
    sys.exit(main())
