"""Tensor-core products of packed weights on one GPU, in CUDA graphs with weights rotated beyond the L2 cache.

    python bench/gpu_matmul.py [--sweep] [--formats Q4_K Q6_K] [--batches 1 4 8 16 32 64] [--out results.json]

Every case is compared with the float64 oracle before its time is taken; a wrong one is reported instead of a
speed. The last lines are all products of one step of an 8B model in Q4_K_M's mix of formats.
"""

import argparse
import functools
import itertools
import json
import multiprocessing
from pathlib import Path

import torch
from gpu_matvec import SHAPES, Case, graph_time, layout_of, random_weight, read_bandwidth
from on_gpu import require_gpu

from realizar_torch import packing
from realizar_torch.triton_kernels.configs import MatmulLaunch, choose_matmul
from realizar_torch.triton_kernels.grouped import Grouped, empty_grouped
from realizar_torch.triton_kernels.matmul import matmul
from realizar_torch.triton_kernels.matvec import matvec_int8
from realizar_torch.triton_kernels.quantize import quantize_activations

# format, in_features, batch, launch shape (None: the one of choose_matmul for these rows), rows
Job = tuple[str, int, int, MatmulLaunch | None, int]
# layers of 32 whose v and down projections are Q6_K in a Q4_K_M file
MORE_BITS = frozenset({0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31})
PROCESSES = 15
# (along rows, along K) that a sweep tries
WARPS = ((1, 4), (1, 8), (2, 4), (2, 2), (4, 1))


class MatmulCase(Case):
    """One shape and batch, run by the tensor-core product."""

    def __init__(self, fmt: str, rows: int, in_features: int, layout: str, batch: int = 1):
        super().__init__(fmt, rows, in_features, layout, batch)
        room = empty_grouped(batch, in_features, self.x.device)
        self.grouped: Grouped = quantize_activations(self.x, in_features, room)
        # activations and weights in fp16: half a unit in the last of eleven bits each, and their product
        self.expected["int8"] = self.expected["float"]
        self.bound["int8"] = self.bound["float"] * (1 + 2.1 * 2.0**-12 / 4e-6)

    def run(self, activations: str, weight: torch.Tensor, launch: MatmulLaunch | None = None) -> torch.Tensor:
        return matmul(
            *self.grouped, len(self.x), weight, self.fmt, self.in_features, layout=self.layout, launch=launch
        )


def _compile(job: Job) -> None:
    """Fill the kernel cache from a worker process: a small weight of the same divisibility."""
    fmt, in_features, batch, launch, rows = job
    shape = launch or choose_matmul(rows, in_features, batch)
    try:
        MatmulCase(fmt, 64, in_features, layout_of(fmt), batch).run(
            "int8", packing.pack(random_weight(fmt, 64, in_features), fmt, layout_of(fmt)), shape
        )
    except Exception as error:
        print("compile", job, error)


def compile_all(jobs: list[Job]) -> None:
    """In parallel, the slowest (many columns) first."""
    order = sorted(set(jobs), key=lambda job: (-job[2], job[0] != "Q6_K"))
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        pool.map(_compile, order, chunksize=1)


def launches(batch: int) -> list[MatmulLaunch]:
    """The launch shapes that a sweep tries."""
    columns = min(-(-batch // 8), 4)
    return [MatmulLaunch(columns, *warps, registers) for warps in WARPS for registers in (128, 168)]


def sweep(formats: list[str], batches: list[int], limit: float) -> list[dict[str, object]]:
    """Every launch shape at every shape: the best first."""
    columns = sorted({k for _, k in SHAPES})
    compile_all([(f, k, m, s, 64) for f in formats for k in columns for m in batches for s in launches(m)])
    records: list[dict[str, object]] = []
    for batch, fmt, (rows, in_features) in itertools.product(batches, formats, SHAPES):
        case = MatmulCase(fmt, rows, in_features, layout_of(fmt), batch)
        results = [(case.microseconds("int8", launch), launch) for launch in launches(batch)]
        right = sorted(((t, s) for t, s in results if t is not None), key=lambda item: item[0])
        best = "  ".join(
            f"{t:.1f}us {case.nbytes / t / 1e3 / limit:4.0%} {s.row_warps}r{s.k_warps}k {s.registers}"
            for t, s in right
        )
        wrong = len(results) - len(right)
        print(f"sweep M={batch} {fmt} {rows}x{in_features}: {best} wrong {wrong}", flush=True)
        shape = {"batch": batch, "fmt": fmt, "rows": rows, "in_features": in_features}
        records += [{**shape, "us": t, "launch": vars(s)} for t, s in results]
        del case
    return records


def table(formats: list[str], batches: list[int], limit: float) -> list[dict[str, object]]:
    """Every batch at the five shapes with the launch shape of ``choose_matmul``."""
    compile_all([(f, k, m, None, n) for f in formats for m in batches for n, k in SHAPES])
    records: list[dict[str, object]] = []
    for fmt, batch in itertools.product(formats, batches):
        line = f"{fmt:5} M={batch:<3}"
        for rows, in_features in SHAPES:
            case = MatmulCase(fmt, rows, in_features, layout_of(fmt), batch)
            time = case.microseconds("int8")
            speed = None if time is None else case.nbytes / time / 1e3
            line += "   WRONG" if speed is None else f"  {time:6.1f}us {speed:5.0f}GB/s {speed / limit:4.0%}"
            shape = {"batch": batch, "fmt": fmt, "rows": rows, "in_features": in_features}
            records.append({**shape, "us": time, "gbps": speed})
            del case
        print(line, flush=True)
    return records


def plan() -> list[tuple[str, int, int]]:
    """(format, rows, in_features) of the products of one step, QKV and gate+up in one launch each where their
    formats agree.
    """
    products = []
    for layer in range(32):
        six = layer in MORE_BITS
        products += [("Q4_K", 5120 if six else 6144, 4096)] + ([("Q6_K", 1024, 4096)] if six else [])
        products += [("Q4_K", 4096, 4096), ("Q4_K", 28672, 4096), ("Q6_K" if six else "Q4_K", 4096, 14336)]
    return [*products, ("Q6_K", 128256, 4096)]


def step(batches: list[int], limit: float) -> list[dict[str, object]]:
    """All products of one step of an 8B Q4_K_M model in one graph; up to eight vectors also by the matvec."""
    compile_all([(f, k, m, None, n) for m in batches for f, n, k in sorted(set(plan()))])
    weights = [packing.pack(random_weight(f, n, k, i), f, layout_of(f)) for i, (f, n, k) in enumerate(plan())]
    nbytes = sum(w.nbytes for w in weights)
    records: list[dict[str, object]] = []
    for batch, name in itertools.product(batches, ("matmul", "matvec")):
        if name == "matvec" and batch > 8:
            continue
        inputs, product = {}, matvec_int8
        for k in (4096, 14336):
            x = torch.randn(batch, k, device="cuda")
            if name == "matmul":
                product = functools.partial(_grouped_product, batch)
                inputs[k] = quantize_activations(x, k, empty_grouped(batch, k, x.device))
            else:
                inputs[k] = quantize_activations(x, k)
        calls = [
            lambda w=w, f=f, k=k, q=inputs[k], p=product: p(*q, w, f, k, layout=layout_of(f))
            for w, (f, _, k) in zip(weights, plan(), strict=True)
        ]
        time = graph_time(calls)
        print(
            f"step {name} M={batch}: {len(calls)} products, {nbytes} B, {time:.3f} ms, "
            f"{nbytes / time / 1e6 / limit:.0%}",
            flush=True,
        )
        records.append({"product": name, "batch": batch, "ms": time, "bytes": nbytes})
    return records


def _grouped_product(batch: int, q, scale, sums, *operands, **options):
    return matmul(q, scale, sums, batch, *operands, **options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--formats", nargs="*", default=["Q4_K", "Q6_K"])
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 4, 8, 16, 32, 64])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    require_gpu()
    limit = read_bandwidth()
    print(f"{torch.cuda.get_device_name()}: read {limit:.0f} GB/s, torch {torch.__version__}", flush=True)
    report: dict[str, object] = {"device": torch.cuda.get_device_name(), "read_gbps": limit}
    if options.sweep:
        report["sweep"] = sweep(options.formats, options.batches, limit)
    else:
        report["table"] = table(options.formats, options.batches, limit)
    report["step"] = step(options.batches, limit)
    if options.out:
        options.out.write_text(json.dumps(report, indent=1, default=str))


if __name__ == "__main__":
    main()
