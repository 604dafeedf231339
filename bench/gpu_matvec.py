"""Packed matvecs on one GPU, in CUDA graphs with weights rotated beyond the L2 cache, as a share of the read
bandwidth.

    python bench/gpu_matvec.py [--sweep] [--formats Q4_K Q6_K] [--out results.json]

Every case is compared with the float64 oracle before its time is taken; a wrong one is reported instead of a
speed. "overlapping": a launch may begin at the end of the one before it, as in the decode graph.
"""

import argparse
import itertools
import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path

import torch
from on_gpu import require_gpu

from realizar_torch import packing, reference
from realizar_torch.formats import get_packed_format, supported_formats
from realizar_torch.triton_kernels.blocks import GGML_ONLY, units
from realizar_torch.triton_kernels.configs import Launch, choose
from realizar_torch.triton_kernels.matvec import matvec, matvec_int8
from realizar_torch.triton_kernels.quantize import quantize_activations

# Llama-3.1-8B: QKV, attention output, gate and up, down, head
SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096))
ROTATION_BYTES = 300_000_000
OVERLAPPING = "int8 overlapping"


def random_weight(fmt: str, rows: int, in_features: int, seed: int = 0) -> torch.Tensor:
    """Random packed rows on the GPU whose fp16 fields are finite and small."""
    spec = get_packed_format(fmt)
    generator = torch.Generator("cuda").manual_seed(seed)
    blocks = torch.randint(
        0,
        256,
        (rows, spec.blocks(in_features), spec.block_bytes),
        dtype=torch.uint8,
        device="cuda",
        generator=generator,
    )
    for field in spec.fields:
        if field.kind == "f16":
            start = spec.offset(field.name)
            values = torch.rand(*blocks.shape[:2], 1, device="cuda", generator=generator) * 0.01 + 0.001
            blocks[..., start : start + field.nbytes] = values.half().view(torch.uint8)
    return blocks.flatten(1)


def layout_of(fmt: str) -> str:
    return "ggml" if fmt in GGML_ONLY else "planar"


def graph_time(calls: list[Callable[[], object]], repeats: int = 7) -> float:
    """Median milliseconds of one replay of a CUDA graph made of ``calls``."""
    # the inputs are ready before the other stream reads them
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def read_bandwidth() -> float:
    """GB/s of ``torch.sum`` over 2 GB of int64: the limit that every share refers to."""
    data = torch.ones(2**28, dtype=torch.int64, device="cuda")
    best = min(graph_time([data.sum] * 4) / 4 for _ in range(3))
    return data.nbytes / best / 1e6


class Case:
    """One shape: rotating weights, activations, and the check against the oracle."""

    def __init__(self, fmt: str, rows: int, in_features: int, layout: str, batch: int = 1):
        self.fmt, self.rows, self.in_features, self.layout = fmt, rows, in_features, layout
        spec = get_packed_format(fmt)
        copies = max(2, min(40, ROTATION_BYTES // (rows * spec.row_bytes(in_features)) + 1))
        first = random_weight(fmt, rows, in_features)
        packed = packing.pack(first, fmt, layout)
        self.weights = [packed] + [packed.clone() for _ in range(copies - 1)]
        self.nbytes = packed.nbytes
        self.x = torch.randn(batch, in_features, device="cuda")
        self.q = quantize_activations(self.x, spec.blocks(in_features) * spec.block_size)
        self.sample = torch.randperm(rows, device="cuda")[:256]
        decoded = reference.dequantize(first[self.sample], fmt, in_features, torch.float64)
        quantized = (self.q[0].double().unflatten(1, (-1, 32)) * self.q[1].double().unsqueeze(-1)).flatten(1)
        quantized = quantized[:, :in_features]
        self.expected = {"int8": quantized @ decoded.T, "float": self.x.double() @ decoded.T}
        self.bound = {"int8": 1e-5 * (quantized.abs() @ decoded.abs().T)}
        self.bound["float"] = 4e-6 * (self.x.double().abs() @ decoded.abs().T)
        self.expected[OVERLAPPING], self.bound[OVERLAPPING] = self.expected["int8"], self.bound["int8"]

    def run(self, activations: str, weight: torch.Tensor, launch: Launch | None = None) -> torch.Tensor:
        if activations != "float":
            overlap = {"launch": launch, "dependent": activations == OVERLAPPING}
            return matvec_int8(*self.q, weight, self.fmt, self.in_features, layout=self.layout, **overlap)
        return matvec(self.x, weight, self.fmt, self.in_features, layout=self.layout, launch=launch)

    def microseconds(self, activations: str, launch: Launch | None = None) -> float | None:
        """Per call, or None when the result is wrong."""
        result = self.run(activations, self.weights[-1], launch)[:, self.sample].double()
        if not ((result - self.expected[activations]).abs() <= self.bound[activations]).all():
            return None
        calls = [
            lambda w=w: self.run(activations, w, launch)
            for w in itertools.islice(itertools.cycle(self.weights), max(20, len(self.weights)))
        ]
        return 1000 * graph_time(calls) / len(calls)


def launches(fmt: str) -> list[Launch]:
    """The launch shapes that a sweep tries."""
    per_block = units(fmt)
    found = []
    for warps, rows, per_lane in itertools.product((1, 2, 4, 8), (1, 2, 4, 8), (1, 2)):
        blocks = per_lane * 32 * warps // per_block
        if per_lane * rows <= 8 and blocks >= 1:
            found.append(Launch(rows, blocks, warps))
    return found


def _compile(job: tuple[str, int, str, Launch | None, str]) -> None:
    """Fill the kernel cache from a worker process: a small weight of the same divisibility."""
    fmt, in_features, layout, launch, activations = job
    try:
        Case(fmt, 64, in_features, layout).run(activations, random_weight(fmt, 64, in_features), launch)
    except Exception as error:
        print("compile", job, error)


def compile_all(jobs: list[tuple[str, int, str, Launch | None, str]]) -> None:
    with multiprocessing.get_context("spawn").Pool(14) as pool:
        pool.map(_compile, jobs, chunksize=1)


def sweep(
    formats: list[str], shapes: list[tuple[int, int]], limit: float, activations: str
) -> list[dict[str, object]]:
    columns = sorted({k for _, k in shapes})
    compile_all(
        [(f, k, layout_of(f), shape, activations) for f in formats for k in columns for shape in launches(f)]
    )
    records = []
    for fmt, (rows, in_features) in itertools.product(formats, shapes):
        case = Case(fmt, rows, in_features, layout_of(fmt))
        results = []
        for launch in launches(fmt):
            time = case.microseconds(activations, launch)
            results.append((time if time is not None else 1e9, launch))
        results.sort(key=lambda item: item[0])
        best = "  ".join(
            f"{case.nbytes / t / 1e3 / limit:4.0%} {launch.rows}r{launch.blocks}b{launch.warps}w"
            for t, launch in results[:6]
        )
        wrong = sum(t == 1e9 for t, _ in results)
        print(
            f"sweep {activations} {fmt} {rows}x{in_features}: {results[0][0]:.1f} us {best} wrong {wrong}",
            flush=True,
        )
        records += [
            {
                "fmt": fmt,
                "rows": rows,
                "in_features": in_features,
                "activations": activations,
                "us": t,
                "launch": vars(launch),
            }
            for t, launch in results
        ]
    return records


def table(formats: list[str], limit: float) -> list[dict[str, object]]:
    """Every format at the five shapes with the launch shape of ``choose``: µs, GB/s, share of the read
    bandwidth.
    """
    layouts = {f: ["ggml"] if layout_of(f) == "ggml" else ["ggml", "planar"] for f in formats}
    kinds = ("int8", OVERLAPPING, "float")
    compile_all(
        [
            (f, k, lay, None, kind)
            for f in formats
            for k in (4096, 14336)
            for lay in layouts[f]
            for kind in kinds
        ]
    )
    records = []
    for fmt in formats:
        for layout, kind in itertools.product(layouts[fmt], kinds):
            line = f"{fmt:5} {layout:6} {kind:16}"
            for rows, in_features in SHAPES:
                case = Case(fmt, rows, in_features, layout)
                time = case.microseconds(kind)
                speed = None if time is None else case.nbytes / time / 1e3
                line += "   WRONG" if speed is None else f"  {time:6.1f}us {speed / limit:4.0%}"
                records.append(
                    {
                        "fmt": fmt,
                        "layout": layout,
                        "activations": kind,
                        "rows": rows,
                        "in_features": in_features,
                        "us": time,
                    }
                )
            print(line, flush=True)
    return records


def chain(mixed: bool, limit: float) -> dict[str, object]:
    """The 129 matvecs of one token of an 8B model, one graph: all Q4_K, or Q4_K_M's mix (Q6_K in half of v
    and down).
    """
    more_bits = {0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31}
    plan = []
    for layer in range(32):
        six = mixed and layer in more_bits
        plan += [("Q4_K", 5120 if six else 6144, 4096)] + ([("Q6_K", 1024, 4096)] if six else [])
        plan += [("Q4_K", 4096, 4096), ("Q4_K", 28672, 4096), ("Q6_K" if six else "Q4_K", 4096, 14336)]
    plan.append(("Q6_K" if mixed else "Q4_K", 128256, 4096))
    activations = {k: quantize_activations(torch.randn(1, k, device="cuda"), k) for k in (4096, 14336)}
    weights = [packing.pack(random_weight(f, n, k, i), f, layout_of(f)) for i, (f, n, k) in enumerate(plan)]
    calls = [
        lambda w=w, f=f, k=k: matvec_int8(*activations[k], w, f, k, layout=layout_of(f))
        for w, (f, _, k) in zip(weights, plan, strict=True)
    ]
    time = graph_time(calls)
    nbytes = sum(w.nbytes for w in weights)
    share = nbytes / time / 1e6 / limit
    print(
        f"chain {'Q4_K_M' if mixed else 'Q4_K'}: {len(plan)} matvecs, {nbytes} B, {time:.3f} ms, {share:.0%}",
        flush=True,
    )
    return {"mixed": mixed, "ms": time, "bytes": nbytes, "share": share}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--formats", nargs="*", default=list(supported_formats()))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    require_gpu()
    limit = read_bandwidth()
    print(f"{torch.cuda.get_device_name()}: read {limit:.0f} GB/s, torch {torch.__version__}", flush=True)
    report: dict[str, object] = {"device": torch.cuda.get_device_name(), "read_gbps": limit}
    if options.sweep:
        report["sweep"] = sweep(options.formats, list(SHAPES), limit, "int8")
    else:
        report["table"] = table(options.formats, limit)
        report["choose"] = {f: vars(choose(f, 4096, 4096)) for f in options.formats}
    report["chains"] = [chain(mixed, limit) for mixed in (False, True)]
    if options.out:
        options.out.write_text(json.dumps(report, indent=1, default=str))


if __name__ == "__main__":
    main()
