"""Decode attention on one GPU in CUDA graphs, caches rotated beyond L2: µs and share of the read bandwidth.

python bench/gpu_attention.py [--sweep] [--batch 1 8 32] [--out results.json]

Every case is compared with float64 first; a wrong one is reported instead of a speed. "behind a matvec" is
what the launch adds to a chain of dependent matvecs, as in a decode step; "alone" is the kernel by itself.
"""

import argparse
import itertools
import json
import math
import multiprocessing
from collections.abc import Callable
from pathlib import Path

import torch
from gpu_matvec import graph_time, random_weight, read_bandwidth
from on_gpu import require_gpu

from realizar_torch.nn.cache_rows import LARGEST, dequantize_rows, quantize_rows, row_bytes
from realizar_torch.triton_kernels.attention import attention_scratch, decode_attention
from realizar_torch.triton_kernels.configs import AttentionLaunch, choose_attention, choose_splits
from realizar_torch.triton_kernels.matvec import matvec_int8
from realizar_torch.triton_kernels.quantize import quantize_activations

# Llama-3.1-8B
HEADS, KV_HEADS, DIM = 32, 8, 128
DEPTHS = (0, 128, 1024, 8192, 32768)
DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
ROTATION_BYTES = 200_000_000
LAUNCHES = 24
# a query and probabilities rounded to bf16: 2^-8 of |score| < 4 and |v| < 4, less by averaging
TOLERANCE = 2e-2


class Case:
    """Caches of one depth, several of them, and the heads of new positions."""

    def __init__(self, depth: int, batch: int, kind: str, copies: int | None = None):
        self.depth, self.batch = depth, batch
        capacity = -(-(depth + 1) // 64) * 64
        shape = (batch, KV_HEADS, capacity, DIM)
        dtype = DTYPES[kind]
        self.nbytes = 2 * batch * KV_HEADS * depth * row_bytes(DIM, dtype)
        copies = copies or max(2, min(LAUNCHES, ROTATION_BYTES // (self.nbytes + 1) + 1))
        self.caches = [self._cache(shape, dtype) for _ in range(copies)]
        self.qkv = torch.randn(batch, (HEADS + 2 * KV_HEADS) * DIM, device="cuda")
        self.positions = torch.full((batch,), depth, dtype=torch.int32, device="cuda")
        # no rotation, which keeps the check short
        self.cos = torch.ones(capacity, DIM // 2, device="cuda")
        self.sin = torch.zeros(capacity, DIM // 2, device="cuda")
        self.capacity = capacity
        self.scratches: dict[int | None, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def _cache(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor | None, ...]:
        parts = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        if dtype not in LARGEST:
            return *parts, None, None
        (k, k_scales), (v, v_scales) = (quantize_rows(part, dtype) for part in parts)
        return k, v, k_scales, v_scales

    def run(self, index: int, launch: AttentionLaunch | None, splits: int | None, dependent: bool = False):
        if splits not in self.scratches:
            self.scratches[splits] = attention_scratch(
                self.batch, HEADS, KV_HEADS, DIM, self.capacity, torch.device("cuda"), splits
            )
        k, v, k_scales, v_scales = self.caches[index % len(self.caches)]
        return decode_attention(
            self.qkv, k, v, self.positions, self.cos, self.sin, scale=1 / math.sqrt(DIM), k_scales=k_scales,
            v_scales=v_scales, scratch=self.scratches[splits], quantize=True, launch=launch,
            dependent=dependent,
        )[0]  # fmt: skip

    def _rows(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one sequence, float64 ``[kv_heads, depth + 1, DIM]``."""
        k, v, *scales = (None if part is None else part[row, :, : self.depth + 1] for part in self.caches[0])
        if scales[0] is None:
            return k.double(), v.double()
        return dequantize_rows(k, scales[0], torch.double), dequantize_rows(v, scales[1], torch.double)

    def right(self, launch: AttentionLaunch | None, splits: int | None) -> bool:
        found = self.run(0, launch, splits)
        for row in {0, self.batch - 1}:
            k, v = self._rows(row)
            q = self.qkv[row, : HEADS * DIM].view(KV_HEADS, -1, DIM).double()
            scores = torch.einsum("hgd,hsd->hgs", q, k)
            expected = (scores / math.sqrt(DIM)).softmax(-1) @ v
            if not (found[row].view_as(expected) - expected).abs().max() < TOLERANCE:
                return False
        return True

    def microseconds(self, launch: AttentionLaunch | None = None, splits: int | None = None) -> float | None:
        """Alone, or None when the result is wrong."""
        if not self.right(launch, splits):
            return None
        return (
            1000 * graph_time([lambda i=i: self.run(i, launch, splits) for i in range(LAUNCHES)]) / LAUNCHES
        )

    def behind(self, chain: list[Callable[[], object]], launch=None, splits: int | None = None) -> float:
        """Microseconds that the launch adds to a chain of dependent matvecs."""
        mixed = [
            call
            for i, matvec in enumerate(chain)
            for call in (matvec, lambda i=i: self.run(i, launch, splits, dependent=True))
        ]
        return 1000 * (graph_time(mixed) - graph_time(chain)) / len(chain)


def matvecs(batch: int) -> list[Callable[[], object]]:
    """Dependent matvecs like the QKV product that attention follows."""
    weights = [random_weight("Q4_K", 6144, 4096, i) for i in range(LAUNCHES)]
    x = quantize_activations(torch.randn(min(batch, 8), 4096, device="cuda"), 4096)
    out = torch.empty(min(batch, 8), 6144, device="cuda")
    return [lambda w=w: matvec_int8(*x, w, "Q4_K", 4096, out=out, dependent=True) for w in weights]


def launches() -> list[AttentionLaunch]:
    """What a sweep compiles; runs and splits are no part of a kernel."""
    shapes = ((4, 16, 3), (4, 16, 4), (4, 32, 3), (8, 16, 3), (8, 16, 2), (2, 32, 4))
    return [
        AttentionLaunch(w, t, s, ahead, 1, 16) for (w, t, s), ahead in itertools.product(shapes, (0, 1, 4))
    ]


def _compile(job: tuple[str, AttentionLaunch | None, bool]) -> None:
    kind, launch, dependent = job
    try:
        Case(63, 1, kind, 1).run(0, launch, None, dependent)
    except Exception as error:
        print("compile", job, error)


def compile_all(jobs: list[tuple[str, AttentionLaunch | None, bool]]) -> None:
    with multiprocessing.get_context("spawn").Pool(14) as pool:
        pool.map(_compile, jobs, chunksize=1)


def sweep(limit: float) -> list[dict[str, object]]:
    """Batch 1, bf16: every launch shape, shortest run and number of splits behind a matvec."""
    compile_all([("bf16", shape, dependent) for shape in launches() for dependent in (False, True)])
    chain, records = matvecs(1), []
    for depth in (128, 1024, 8192):
        case, results = Case(depth, 1, "bf16"), []
        runs = (128, 256, 512, 1024) if depth < 8192 else (256,)
        for shape, run, splits in itertools.product(launches(), runs, (16, 33)):
            step = shape.warps * shape.tile
            chosen = AttentionLaunch(
                shape.warps, shape.tile, shape.stages, shape.ahead, max(1, run // step), 16
            )
            if depth < 8192 and splits == 33:
                continue
            if not case.right(chosen, splits):
                print("WRONG", depth, chosen, splits)
                continue
            results.append((case.behind(chain, chosen, splits), splits, chosen))
        results.sort(key=lambda item: item[0])
        for time, splits, shape in results[:6] + results[-1:]:
            print(f"depth {depth}: {time:6.2f} us splits {splits} {shape}", flush=True)
        records += [{"depth": depth, "us": t, "splits": n, "launch": vars(shape)} for t, n, shape in results]
    return records


def table(batches: list[int], limit: float) -> list[dict[str, object]]:
    compile_all([(kind, None, dependent) for kind in DTYPES for dependent in (False, True)])
    records = []
    for batch in batches:
        chain = matvecs(batch)
        for kind, depth in itertools.product(DTYPES, DEPTHS):
            case = Case(depth, batch, kind)
            alone = case.microseconds()
            if alone is None:
                print(f"batch {batch} {kind} depth {depth}: WRONG", flush=True)
                continue
            behind = case.behind(chain)
            speed = case.nbytes / behind / 1e3
            line = f"batch {batch:2} {kind:4} depth {depth:5}: alone {alone:7.2f} us"
            print(
                f"{line}, behind a matvec {behind:7.2f} us {speed:5.0f} GB/s {speed / limit:4.0%}", flush=True
            )
            records.append(
                {"batch": batch, "kv": kind, "depth": depth, "alone_us": alone, "behind_us": behind}
                | {"nbytes": case.nbytes}
            )
            del case
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    require_gpu()
    limit = read_bandwidth()
    print(f"{torch.cuda.get_device_name()}: read {limit:.0f} GB/s", flush=True)
    report: dict[str, object] = {"device": torch.cuda.get_device_name(), "read_gbps": limit}
    if options.sweep:
        report["sweep"] = sweep(limit)
    else:
        report["table"] = table(options.batch, limit)
        report["choose"] = vars(choose_attention(DIM, 2)) | {"splits": choose_splits(1, KV_HEADS, 32832)}
    if options.out:
        options.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
