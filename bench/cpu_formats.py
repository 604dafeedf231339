"""CPU kernels per format: matvec GB/s of packed bytes, and GMAC/s of the products with many vectors.

    python bench/cpu_formats.py --threads 2 [--out bench/results/NAME.json]

"int8" is the product of modules, "bf16" that of prompts on a CPU with matrix tiles (AMX). Each result
is compared with the oracle before its speed is printed; a speed is the best of many short bursts.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from cpu import cpu_name, output_of, read_bandwidth, seeded

from realizar_torch import reference
from realizar_torch.cpu_kernels import launch, matrix_tiles, pool, row_kernels
from realizar_torch.cpu_kernels.activation_panel import COLUMNS
from realizar_torch.cpu_kernels.bf16_matmul import bf16_into_panel
from realizar_torch.cpu_kernels.int8_tile import TILE_ROWS
from realizar_torch.cpu_kernels.jit import jit
from realizar_torch.cpu_kernels.memory import fetch_add_i64
from realizar_torch.cpu_kernels.native import call_native
from realizar_torch.cpu_kernels.targets import best_target
from realizar_torch.formats import FORMATS

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from cases import random_blocks


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--columns", type=int, default=4096, help="weights of a row")
    parser.add_argument("--vectors", type=int, default=128)
    parser.add_argument("--out", help="write the table as JSON")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    bandwidth = read_bandwidth()
    print(f"{cpu_name()}  {args.threads} threads  {best_target().name}  read {bandwidth:.1f} GB/s")
    table = {}
    for fmt in (name for name, spec in FORMATS.items() if spec.packed):
        table[fmt] = row = measure(fmt, args)
        print(f"{fmt}: " + "  ".join(f"{name} {value:.1f}" for name, value in row.items()), flush=True)
    if args.out:
        command, commit = "python bench/cpu_formats.py", output_of("git", "rev-parse", "--short", "HEAD")
        report = {"command": " ".join([command, *sys.argv[1:]]), "cpu": cpu_name(), "commit": commit}
        report |= {"target": best_target().name, "read_GBps": bandwidth, "formats": table}
        Path(args.out).write_text(json.dumps(report, indent=1) + "\n")
    return 0


def measure(fmt: str, args: argparse.Namespace) -> dict[str, float]:
    weight = random_blocks(fmt, args.rows, args.columns)
    # a matvec's weights come from memory: more of them than caches hold
    large = weight.repeat(1 + (1 << 28) // weight.nbytes, 1)
    x = torch.randn(args.vectors, args.columns, generator=seeded(1))
    one, many = (launch.quantize_activations(v, fmt) for v in (x[:1].contiguous(), x))
    expected = reference.linear_int8(one, weight, fmt, args.columns)
    compare(launch.matmul_int8(one, large, fmt)[:, -args.rows :], expected, 1e-5)
    seconds = best_time(lambda: launch.matmul_int8(one, large, fmt), 10)
    result = {"matvec GB/s": large.nbytes / seconds / 1e9}
    products = args.vectors * args.rows * args.columns / 1e9
    compare(
        launch.matmul_int8(many, weight, fmt), reference.linear_int8(many, weight, fmt, args.columns), 1e-5
    )
    result["int8 GMAC/s"] = products / best_time(lambda: launch.matmul_int8(many, weight, fmt), 60)
    if matrix_tiles.available():
        run, out = bf16_product(fmt, weight, x)
        run()
        compare(out(), x.double() @ reference.dequantize(weight, fmt, dtype=torch.float64).T, 0.01)
        result["bf16 GMAC/s"] = products / best_time(run, 60)
    return result


def compare(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    error = float((found - expected).abs().mean() / expected.abs().mean())
    if not error <= tolerance:
        raise SystemExit(f"wrong result: mean error {error:.2g} of the mean, expected {tolerance:.2g}")


def best_time(run: Callable[[], object], bursts: int) -> float:
    best = float("inf")
    for _ in range(bursts):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


@jit
def _pack(thread, n_threads, x, width, count, columns, panel):
    for column in range(thread, count, n_threads):
        bf16_into_panel(x + 4 * width * column, 0, width // 32, column, columns, panel)


@jit
def _tiles(thread, n_threads, counter, kernel, weight, row_bytes, rows, width, columns, panel, out):
    while True:
        tile = fetch_add_i64(counter, 1)
        if tile * TILE_ROWS >= rows:
            return
        shape = (row_bytes, min(TILE_ROWS, rows - tile * TILE_ROWS), width, columns, columns)
        place = out + 4 * columns * TILE_ROWS * tile
        call_native(kernel, (weight + row_bytes * TILE_ROWS * tile, *shape, panel, 0, 0, place))


def bf16_product(
    fmt: str, weight: torch.Tensor, x: torch.Tensor
) -> tuple[Callable[[], None], Callable[[], torch.Tensor]]:
    """(the prompt pass's product, its result [vectors, rows])."""
    count, width = x.shape
    rows, columns = len(weight), -(-count // COLUMNS) * COLUMNS
    panel = torch.zeros(columns * width, dtype=torch.int16)
    out = torch.empty(-(-rows // TILE_ROWS), columns, TILE_ROWS)
    kernel, threads, counter = row_kernels.bf16_matmul(fmt), torch.get_num_threads(), torch.zeros(1).long()

    def run() -> None:
        counter.zero_()
        pool.run(_pack, threads, x.data_ptr(), width, count, columns, panel.data_ptr())
        shape = (weight.data_ptr(), weight.shape[1], rows, width, columns)
        pool.run(_tiles, threads, counter.data_ptr(), kernel, *shape, panel.data_ptr(), out.data_ptr())

    return run, lambda: out.permute(1, 0, 2).reshape(columns, -1)[:count, :rows]


if __name__ == "__main__":
    sys.exit(main())
