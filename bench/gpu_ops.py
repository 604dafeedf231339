"""Every public op on one GPU, in CUDA graphs, weights rotated beyond L2: µs, GB/s, share of the bandwidth.

    python bench/gpu_ops.py [--formats Q4_K Q6_K] [--out results.json]

Shapes are Llama-3.1-8B's. A case whose result is not the float64 oracle's is WRONG and gets no time. The last
table holds what is promised: shares of the matvecs, and norm_linear against its product alone.
"""

import argparse
import itertools
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from gpu_matvec import OVERLAPPING, SHAPES, Case, graph_time, layout_of, random_weight, read_bandwidth
from on_gpu import require_gpu
from torch import Tensor

from realizar_torch import ops, packing, reference
from realizar_torch.formats import supported_formats
from realizar_torch.triton_kernels.quantize import norm_quantize

EPS = 1e-5
# formats that are also timed for several rows; a kernel for eight float rows takes a minute to compile
BATCHED = {"Q4_K": (("int8", (2, 4, 8)), ("float", (2, 4, 8))), "Q6_K": (("int8", (4,)), ("float", ()))}
# smallest share of the read bandwidth of an overlapping matvec of Q4_K and Q6_K
SHARES = {(28672, 4096): 0.85, (128256, 4096): 0.85, (4096, 14336): 0.75, (4096, 4096): 0.55}
NORMED = (28672, 4096)
# largest time of norm_linear over that of its product alone
NORM_RATIO = 1.15
# rows from which a product may run on tensor cores, which round both sides to bf16 or fp16
ROUNDED_ROWS = 3


class Products(Case):
    """The ops that multiply by one weight, each a call of a rotated copy, beside what it should give."""

    def __init__(self, fmt: str, rows: int, in_features: int, batch: int = 1):
        super().__init__(fmt, rows, in_features, layout_of(fmt), batch)
        self.quantized = ops.QuantizedActivations(*self.q, in_features)
        self.gain = torch.rand(in_features, device="cuda") * 0.2 + 0.1
        self.shift = torch.randn(in_features, device="cuda") * 0.1

    def call(self, op: str, weight: Tensor) -> Tensor:
        """``op`` is "product" (of activations that are int8 already), "linear", "rmsnorm" or "layernorm", and
        the numerics; or OVERLAPPING, the kernel of a product launched as the decode graph does.
        """
        if op == OVERLAPPING:
            return self.run(op, weight)
        name, activations = op.split()
        common = (weight, self.fmt, self.in_features)
        if name == "product" and activations == "int8":
            return ops.linear(self.quantized, *common, layout=self.layout)
        if name in ("product", "linear"):
            return ops.linear(self.x, *common, activations=activations, layout=self.layout)
        shift = self.shift if name == "layernorm" else None
        options = {"normalization": name, "eps": EPS, "activations": activations, "layout": self.layout}
        return ops.norm_linear(self.x, self.gain, shift, *common, **options)

    def microseconds(self, op: str) -> float | None:
        """Per call, or None when the result is wrong."""
        if not self.right(op):
            return None
        rotation = itertools.islice(itertools.cycle(self.weights), max(20, len(self.weights)))
        calls = [lambda w=w: self.call(op, w) for w in rotation]
        return 1000 * graph_time(calls) / len(calls)

    def right(self, op: str) -> bool:
        canonical = packing.unpack(self.weights[0], self.fmt, self.layout)[self.sample]
        decoded = reference.dequantize(canonical, self.fmt, self.in_features, torch.float64)
        x = self._seen("product", "int8") if op == OVERLAPPING else self._seen(*op.split())
        size = x.abs() @ decoded.abs().T
        bound = size * (1e-5 if len(self.x) < ROUNDED_ROWS else 2**-7)
        found = self.call(op, self.weights[-1])[:, self.sample].double()
        return bool(((found - x @ decoded.T).abs() <= bound).all())

    def _seen(self, name: str, activations: str) -> Tensor:
        """float64 activations as the product sees them, int8 ones checked to be the nearest to exact ones."""
        x = self.x.double()
        normed = name not in ("product", "linear")
        if name == "layernorm":
            x = x - x.mean(-1, keepdim=True)
        if normed:
            x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * self.gain.double()
        if name == "layernorm":
            x = x + self.shift.double()
        if activations == "float":
            return x
        parts = self.q
        if normed:
            shift = self.shift if name == "layernorm" else None
            width = self.q[0].shape[1]
            parts = norm_quantize(self.x, self.gain, shift, width=width, normalization=name, eps=EPS)
        scale = parts[1].double().repeat_interleave(reference.ACTIVATION_BLOCK, -1)[:, : self.in_features]
        found = parts[0].double()[:, : self.in_features] * scale
        # half a step, and the fp32 norm
        return torch.where((found - x).abs() <= 0.501 * scale + 1e-5, found, torch.nan)


def product_jobs(formats: list[str]) -> Iterator[tuple[str, int, int, int, str]]:
    """(format, rows, in_features, batch, op) of every time that is taken."""
    for fmt, (rows, columns) in itertools.product(formats, SHAPES):
        for op in ("product int8", OVERLAPPING, "linear int8", "linear float"):
            yield fmt, rows, columns, 1, op
    for fmt in formats:
        for kind, batches in BATCHED.get(fmt, ()):
            for batch in batches:
                yield fmt, *NORMED, batch, f"linear {kind}"
    if "Q4_K" in formats:
        kinds = itertools.product(("int8", "float"), (1, 2, 4, 8), ("product", "rmsnorm", "layernorm"))
        for kind, batch, name in kinds:
            yield "Q4_K", *NORMED, batch, f"{name} {kind}"


def _compile(job: tuple[str, int, int, str]) -> None:
    """Fill the kernel cache from a worker process: fewer rows of the same divisibility."""
    fmt, columns, batch, op = job
    if op in PLAIN:
        PLAIN[op](fmt, 64, columns)
        return
    case = Products(fmt, 64, columns, batch)
    case.call(op, case.weights[0])


def compile_all(formats: list[str]) -> None:
    """The longest first, each in a process of its own."""
    jobs = {(fmt, columns, batch, op) for fmt, _, columns, batch, op in product_jobs(formats)}
    jobs |= {(fmt, 4096, 1, op) for fmt in formats for op in PLAIN}
    ordered = sorted(jobs, key=lambda job: (-job[2], "float" not in job[3], job))
    with multiprocessing.get_context("spawn").Pool(14) as pool:
        pool.map(_compile, ordered, chunksize=1)


# --- ops without a product: (µs, bytes read and written), or None where the result is wrong


def dequantize(fmt: str, rows: int, columns: int) -> tuple[float, int] | None:
    layout, dtype = layout_of(fmt), torch.bfloat16
    blocks = random_weight(fmt, rows, columns)
    weight = packing.pack(blocks, fmt, layout)
    found = ops.dequantize(weight, fmt, columns, dtype=dtype, layout=layout)
    if not found[-64:].equal(reference.dequantize(blocks[-64:], fmt, columns).to(dtype)):
        return None
    rotation = (weight, weight.clone()) * 4
    calls = [lambda w=w: ops.dequantize(w, fmt, columns, dtype=dtype, layout=layout) for w in rotation]
    return 1000 * graph_time(calls) / len(calls), weight.nbytes + found.nbytes


def embedding(fmt: str, rows: int, columns: int) -> tuple[float, int] | None:
    """512 tokens."""
    layout, dtype = layout_of(fmt), torch.bfloat16
    blocks = random_weight(fmt, rows, columns)
    weight = packing.pack(blocks, fmt, layout)
    draws = [torch.randint(rows, (512,), device="cuda") for _ in range(20)]
    calls = [
        lambda ids=ids: ops.embedding(ids, weight, fmt, columns, dtype=dtype, layout=layout) for ids in draws
    ]
    found = calls[0]()
    if not found.equal(reference.dequantize(blocks[draws[0]], fmt, columns).to(dtype)):
        return None
    return 1000 * graph_time(calls) / len(calls), found.nbytes + len(found) * weight.shape[1]


def quantize_activations(fmt: str, rows: int, columns: int) -> tuple[float, int] | None:
    """Eight rows."""
    x = torch.randn(8, columns, device="cuda")
    quantized = ops.quantize_activations(x, fmt)
    found = (quantized.q, quantized.scale, quantized.sums)
    # on the CPU: torch divides by a number on CUDA as a product with its reciprocal
    expected = reference.quantize_activations(x.cpu(), fmt)
    parts = (expected.q, expected.scale, expected.sums)
    if not all(part.cpu().equal(right) for part, right in zip(found, parts, strict=True)):
        return None
    calls: list[Callable[[], object]] = [lambda: ops.quantize_activations(x, fmt)] * 20
    return 1000 * graph_time(calls) / len(calls), x.nbytes + sum(part.nbytes for part in found)


PLAIN = {"dequantize": dequantize, "embedding": embedding, "quantize_activations": quantize_activations}
PLAIN_SHAPES = {
    "dequantize": (28672, 4096),
    "embedding": (128256, 4096),
    "quantize_activations": (8, 4096),
}


def measure(formats: list[str], limit: float) -> list[dict[str, object]]:
    """One record for each time; prints a line for each format, shape and batch."""
    records: list[dict[str, object]] = []

    def add(fmt: str, op: str, rows: int, columns: int, batch: int, us: float | None, nbytes: int) -> str:
        speed = None if us is None else nbytes / us / 1e3
        share = None if speed is None else speed / limit
        record = {"fmt": fmt, "op": op, "rows": rows, "in_features": columns, "batch": batch, "us": us}
        records.append(record | {"gbps": speed, "share": share})
        return f"  {op} " + ("WRONG" if us is None else f"{us:.1f} us {speed:.0f} GB/s {share:.0%}")

    jobs = sorted(product_jobs(formats), key=lambda job: (formats.index(job[0]), job[3], -job[1]))
    for key, group in itertools.groupby(jobs, key=lambda job: job[:4]):
        case = Products(*key)
        line = "".join(
            add(key[0], op, *key[1:], case.microseconds(op), case.nbytes)
            for op in dict.fromkeys(j[4] for j in group)
        )
        print(f"{key[0]:5} {key[1]}x{key[2]} M={key[3]}{line}", flush=True)
    for fmt, (op, shape) in itertools.product(formats, PLAIN_SHAPES.items()):
        us, nbytes = PLAIN[op](fmt, *shape) or (None, 0)
        print(f"{fmt:5} {shape[0]}x{shape[1]}{add(fmt, op, *shape, 1, us, nbytes)}", flush=True)
    return records


def criteria(records: list[dict[str, object]]) -> list[dict[str, object]]:
    """What is promised, what was found, and whether that holds."""
    by_case = {(r["fmt"], r["op"], r["rows"], r["in_features"], r["batch"]): r for r in records}
    found: list[dict[str, object]] = []
    for fmt, (shape, floor) in itertools.product(("Q4_K", "Q6_K"), SHARES.items()):
        record = by_case.get((fmt, OVERLAPPING, *shape, 1))
        if record is not None:
            share = record["share"] or 0.0
            name = f"{OVERLAPPING} matvec {fmt} {shape[0]}x{shape[1]}"
            found.append({"name": name, "at_least": floor, "found": share, "holds": share >= floor})
    for kind, batch, norm in itertools.product(("int8", "float"), (1, 2, 4, 8), ("rmsnorm", "layernorm")):
        alone, both = (by_case.get(("Q4_K", f"{op} {kind}", *NORMED, batch)) for op in ("product", norm))
        if alone is not None and both is not None:
            ratio = (both["us"] or float("inf")) / (alone["us"] or 1.0)
            name = f"norm_linear {norm} {kind} M={batch} over its product"
            found.append({"name": name, "at_most": NORM_RATIO, "found": ratio, "holds": ratio <= NORM_RATIO})
    for item in found:
        bound = f">= {item['at_least']}" if "at_least" in item else f"<= {item['at_most']}"
        print(
            f"{'ok  ' if item['holds'] else 'FAIL'} {item['name']}: {item['found']:.3f} ({bound})", flush=True
        )
    return found


def launches_of_norm_linear() -> dict[str, int]:
    """Kernels that one call launches, as the profiler counts them."""
    from torch.profiler import ProfilerActivity, profile

    case, counts = Products("Q4_K", 64, 4096), {}
    for op in ("rmsnorm int8", "layernorm int8", "rmsnorm float", "layernorm float"):
        case.call(op, case.weights[0])
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            case.call(op, case.weights[0])
            torch.cuda.synchronize()
        counts[op] = sum(event.device_type.name == "CUDA" for event in profiler.events())
    print("launches of norm_linear (at most 2):", counts, flush=True)
    return counts


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    order = sorted(supported_formats(), key=lambda fmt: fmt not in BATCHED)
    parser.add_argument("--formats", nargs="*", default=order, choices=supported_formats())
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    require_gpu()
    started = time.perf_counter()
    compile_all(options.formats)
    limit = read_bandwidth()
    device = torch.cuda.get_device_name()
    print(f"{device}: read {limit:.0f} GB/s, kernels after {time.perf_counter() - started:.0f} s", flush=True)
    records = measure(options.formats, limit)
    report = {
        "device": device,
        "torch": torch.__version__,
        "read_gbps": limit,
        "ops": records,
        "criteria": criteria(records),
        "launches": launches_of_norm_linear(),
    }
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
