"""Seconds to encode a matrix in every format, beside ggml's own quantizer on the same cores.

    python bench/encode.py [--device cuda] [--threads 2] [--size 4096] [--out bench/results/NAME.json]

ggml is the package libgguf, rows shared among as many threads; without it only our own times are printed.
Refuses to print a time when a block differs: from ggml's, or without it from the torch definition on the CPU.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from cpu import cpu_name, output_of

import realizar_torch as rt
from realizar_torch.encode import encode
from realizar_torch.formats import get_format

try:
    import libgguf
except ImportError:
    libgguf = None

# rows compared with the reference before a time is printed
CHECKED_ROWS = 32
# the first has the time that is promised: 2 s on two cores, 150 ms on a GPU
FORMATS = sorted(rt.supported_formats(), key=lambda fmt: fmt != "Q4_K")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--size", type=int, default=4096, help="rows and columns")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    parser.add_argument("--out", help="write the report as JSON")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    generator = torch.Generator().manual_seed(0)
    weight = 0.02 * torch.randn(args.size, args.size, generator=generator)
    importance = torch.rand(args.size, generator=generator)
    report = {
        "command": "python bench/encode.py " + " ".join(sys.argv[1:]),
        "device": torch.cuda.get_device_name() if args.device.startswith("cuda") else cpu_name(),
        "threads": args.threads,
        "torch": torch.__version__,
        "commit": output_of("git", "rev-parse", "--short", "HEAD"),
        "seconds": {},
    }
    print(f"{args.size}x{args.size} on {args.device}, {args.threads} threads; seconds, best of {args.rounds}")
    print(f"{'':5} {'':10} {'ours':>8} {'ggml':>8} {'ratio':>6}")
    for fmt in args.formats:
        for name, weights_of_columns in (("", None), ("importance", importance)):
            ours, theirs = measure(weight, fmt, weights_of_columns, args)
            ratio = "" if theirs is None else f"{theirs / ours:6.1f}"
            print(
                f"{fmt:5} {name:10} {ours:8.3f} {'' if theirs is None else f'{theirs:8.3f}':>8} {ratio}",
                flush=True,
            )
            report["seconds"][f"{fmt} {name}".strip()] = {"ours": ours, "ggml": theirs}
    if args.out:
        Path(args.out).write_text(json.dumps(report, indent=1) + "\n")
    return 0


def measure(
    weight: torch.Tensor, fmt: str, importance: torch.Tensor | None, args: argparse.Namespace
) -> tuple[float, float | None]:
    """Best seconds of ours and of ggml (None without libgguf); the first, uncounted call compiles kernels."""
    on_device = weight.to(args.device)
    weights_of_columns = None if importance is None else importance.to(args.device)

    def ours() -> None:
        rt.quantize(on_device, fmt, importance=weights_of_columns)
        if on_device.is_cuda:
            torch.cuda.synchronize()

    blocks = rt.quantize(on_device, fmt, importance=weights_of_columns)[:CHECKED_ROWS].cpu()
    checked = weight[:CHECKED_ROWS]
    expected = encode(checked, fmt, importance) if libgguf is None else by_ggml(checked, fmt, importance, 1)
    if not blocks.equal(expected):
        raise SystemExit(f"wrong result: {fmt} blocks differ from {'ggml' if libgguf else 'the definition'}")
    if libgguf is None:
        return best(ours, args.rounds), None
    return best(ours, args.rounds), best(lambda: by_ggml(weight, fmt, importance, args.threads), args.rounds)


def by_ggml(weight: torch.Tensor, fmt: str, importance: torch.Tensor | None, threads: int) -> torch.Tensor:
    """The blocks of ggml's quantizer, rows shared among threads."""
    spec, matrix = get_format(fmt), None if importance is None else importance.numpy()

    def quantize(rows: torch.Tensor) -> torch.Tensor:
        raw = libgguf.quantize_rows_raw(spec.ggml_type, rows.numpy(), *rows.shape, matrix)
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(len(rows), -1)

    with ThreadPoolExecutor(threads) as pool:
        return torch.cat(list(pool.map(quantize, weight.chunk(threads))))


def best(call: Callable[[], object], rounds: int) -> float:
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


if __name__ == "__main__":
    raise SystemExit(main())
