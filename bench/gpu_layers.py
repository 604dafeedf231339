"""The kernel chain of one decoded token (8B or 1B Llama shapes, Q4_K_M mix) in one CUDA graph: ms, tok/s,
share of bandwidth.

    python bench/gpu_layers.py [--model 8b 1b] [--depth 128 8192] [--out results.json]

Embedding and sampling are left out; everything else of a step runs on random weights, norms far from 1. The
chain with dependent launches must give bit for bit what plain launches give before its time is printed.
"""

import argparse
import json
import math
import multiprocessing
from dataclasses import dataclass
from pathlib import Path

import torch
from gpu_matvec import graph_time, layout_of, random_weight, read_bandwidth
from on_gpu import require_gpu

from realizar_torch import packing
from realizar_torch.triton_kernels.attention import attention_scratch, decode_attention
from realizar_torch.triton_kernels.configs import Launch, choose
from realizar_torch.triton_kernels.gate_up import gate_up_int8
from realizar_torch.triton_kernels.matvec import matvec_int8
from realizar_torch.triton_kernels.qkv import qkv_int8
from realizar_torch.triton_kernels.quantize import norm_quantize, quantize_activations


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    dim: int
    inner: int
    vocab: int
    head_fmt: str

    def more_bits(self, layer: int) -> bool:
        """Whether llama-quant gives attn_v and ffn_down of this layer Q6_K in a Q4_K_M file."""
        eighth = self.layers // 8
        return layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2


MODELS = {
    "8b": Shape(32, 4096, 32, 8, 128, 14336, 128256, "Q6_K"),
    "1b": Shape(16, 2048, 32, 8, 64, 8192, 128256, "Q6_K"),
}


class Chain:
    """Weights and static buffers of every layer, and the step that runs them."""

    def __init__(self, shape: Shape, depth: int):
        self.shape = shape
        seeds = iter(range(10**6))

        def weight(fmt: str, rows: int, columns: int) -> tuple[torch.Tensor, str, str]:
            layout = layout_of(fmt)
            return packing.pack(random_weight(fmt, rows, columns, next(seeds)), fmt, layout), fmt, layout

        s = shape
        self.layers = []
        for i in range(s.layers):
            six = "Q6_K" if s.more_bits(i) else "Q4_K"
            self.layers.append(
                {
                    "q": weight("Q4_K", s.heads * s.dim, s.hidden),
                    "k": weight("Q4_K", s.kv_heads * s.dim, s.hidden),
                    "v": weight(six, s.kv_heads * s.dim, s.hidden),
                    "o": weight("Q4_K", s.hidden, s.heads * s.dim),
                    "gate": weight("Q4_K", s.inner, s.hidden),
                    "up": weight("Q4_K", s.inner, s.hidden),
                    "down": weight(six, s.hidden, s.inner),
                    "norm1": torch.rand(s.hidden, device="cuda") * 0.2 + 0.1,
                    "norm2": torch.rand(s.hidden, device="cuda") * 0.2 + 0.1,
                }
            )
        self.head = weight(s.head_fmt, s.vocab, s.hidden)
        self.norm = torch.rand(s.hidden, device="cuda") + 0.5
        self.nbytes = self.head[0].nbytes + sum(
            item[0].nbytes for layer in self.layers for item in layer.values() if isinstance(item, tuple)
        )
        capacity = -(-(depth + 1) // 64) * 64
        self.k_cache = torch.randn(s.layers, 1, s.kv_heads, capacity, s.dim, device="cuda").bfloat16()
        self.v_cache = torch.randn_like(self.k_cache)
        angles = torch.outer(
            torch.arange(capacity, device="cuda").float(),
            500000 ** (-torch.arange(0, s.dim, 2, device="cuda") / s.dim),
        )
        self.cos, self.sin = angles.cos(), angles.sin()
        self.positions = torch.full((1,), depth, dtype=torch.int32, device="cuda")
        self.scratch = attention_scratch(1, s.heads, s.kv_heads, s.dim, capacity, torch.device("cuda"))
        self.input = torch.randn(1, s.hidden, device="cuda")

    def step(self, dependent: bool, launches: dict[str, Launch] | None = None) -> torch.Tensor:
        s, shapes = self.shape, launches or {}
        options = {"normalization": "rmsnorm", "eps": 1e-5, "width": s.hidden, "dependent": dependent}
        hidden = self.input
        for i, layer in enumerate(self.layers):
            x = norm_quantize(hidden, layer["norm1"], **options)
            qkv_weights = [layer[name] for name in ("q", "k", "v")]
            qkv = qkv_int8(
                *x,
                [w for w, _, _ in qkv_weights],
                [f for _, f, _ in qkv_weights],
                s.hidden,
                layouts=[lay for _, _, lay in qkv_weights],
                launches=[
                    shapes.get(f"qkv {f}", choose(f, w.shape[0], s.hidden, several=True))
                    for w, f, _ in qkv_weights
                ],
                dependent=dependent,
            )
            _, x = decode_attention(
                qkv, self.k_cache[i], self.v_cache[i], self.positions, self.cos, self.sin,
                scale=1 / math.sqrt(s.dim), scratch=self.scratch, quantize=True, dependent=dependent,
            )  # fmt: skip
            w, fmt, layout = layer["o"]
            hidden = matvec_int8(
                *x,
                w,
                fmt,
                s.heads * s.dim,
                residual=hidden,
                layout=layout,
                launch=shapes.get("o"),
                dependent=dependent,
            )
            x = norm_quantize(hidden, layer["norm2"], **options)
            gate, fmt, layout = layer["gate"]
            y = gate_up_int8(
                *x,
                gate,
                layer["up"][0],
                fmt,
                s.hidden,
                layout=layout,
                launch=shapes.get("gate"),
                dependent=dependent,
            )
            x = quantize_activations(y, s.inner, dependent=dependent)
            w, fmt, layout = layer["down"]
            launch = shapes.get(f"down {fmt}")
            hidden = matvec_int8(
                *x, w, fmt, s.inner, residual=hidden, layout=layout, launch=launch, dependent=dependent
            )
        x = norm_quantize(hidden, self.norm, **options)
        w, fmt, layout = self.head
        return matvec_int8(
            *x, w, fmt, s.hidden, layout=layout, launch=shapes.get("head"), dependent=dependent
        )


def variants() -> list[dict[str, Launch]]:
    """One launch shape changed at a time."""
    found: list[dict[str, Launch]] = [{}]
    q4 = [(2, 4, 1), (4, 4, 1), (8, 4, 1), (4, 8, 2), (2, 8, 2), (8, 8, 2), (4, 16, 4), (2, 16, 4)]
    for shape in q4:
        found.append({"o": Launch(*shape)})
    for shape in q4:
        rows, _, warps = shape
        found.append(
            {"qkv Q4_K": Launch(*shape), "qkv Q6_K": Launch(min(rows, 2), min(16, 8 * warps), warps)}
        )
    for shape in [(1, 4, 1), (1, 8, 2), (2, 8, 2), (4, 4, 1), (2, 16, 4), (1, 16, 4), (4, 16, 4)]:
        found.append({"gate": Launch(*shape)})
    for shape in [(1, 4, 1), (2, 4, 1), (4, 4, 1), (2, 8, 2), (4, 16, 4), (2, 16, 4), (1, 8, 2)]:
        found.append({"down Q4_K": Launch(*shape)})
    for shape in [(1, 8, 1), (2, 8, 1), (4, 8, 1), (2, 32, 4), (1, 16, 2), (2, 64, 8), (4, 16, 2)]:
        found.append({"down Q6_K": Launch(*shape)})
    for shape in [(1, 8, 1), (4, 8, 1), (2, 16, 2), (1, 16, 2)]:
        found.append({"head": Launch(*shape)})
    return found


def _compile(job: tuple[bool, dict[str, Launch]]) -> None:
    base = MODELS["8b"]
    Chain(
        Shape(8, base.hidden, base.heads, base.kv_heads, base.dim, base.inner, 1024, base.head_fmt), 128
    ).step(*job)


def sweep(limit: float) -> list[dict[str, object]]:
    """ms of the 8B chain with each variant, next to the base's."""
    with multiprocessing.get_context("spawn").Pool(14) as pool:
        _compile((True, {}))
        pool.map(_compile, [(True, v) for v in variants()[1:]], chunksize=1)
    chain = Chain(MODELS["8b"], 128)
    expected = chain.step(False)
    slack = 1e-2 * float(expected.abs().max())
    records = []
    for launches in variants():
        right = torch.allclose(chain.step(True, launches), expected, rtol=1e-2, atol=slack)
        time = graph_time([lambda launches=launches: chain.step(True, launches)])
        share = chain.nbytes / time / 1e6 / limit
        shapes = {name: (x.rows, x.blocks, x.warps) for name, x in launches.items()}
        print(f"{time:.3f} ms {share:.0%}" if right else "WRONG", shapes, flush=True)
        records.append({"launches": shapes, "ms": time, "right": right})
    return records


def profile(chain: Chain, dependent: bool) -> None:
    """Mean time of every kernel of a graph replay and the time line of one layer."""
    chain.step(dependent)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain.step(dependent)
    graph.replay()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        graph.replay()
        torch.cuda.synchronize()
    events = sorted((e for e in found.events() if e.device_time), key=lambda e: e.time_range.start)
    middle = len(events) // 2
    zero = events[middle].time_range.start
    for event in events[middle : middle + 11]:
        start = event.time_range.start - zero
        print(f"    {start:8.2f} .. {start + event.device_time:8.2f} {event.name[:30]}", flush=True)
    times: dict[str, list[float]] = {}
    for event in events:
        times.setdefault(event.name, []).append(event.device_time)
    for name, values in sorted(times.items(), key=lambda item: -sum(item[1])):
        print(
            f"  {name[:40]:40} {len(values):4} x {sum(values) / len(values):7.2f} us = {sum(values):8.1f} us",
            flush=True,
        )


def measure(name: str, depth: int, limit: float, timeline: bool) -> list[dict[str, object]]:
    """Plain and dependent launches of one model at one depth; a speed only if both give the same logits."""
    chain = Chain(MODELS[name], depth)
    records, expected = [], None
    for dependent in (False, True):
        results: list[torch.Tensor] = []
        time = graph_time([lambda d=dependent, r=results: r.append(chain.step(d))])
        logits = results[-1].clone()
        expected = logits if expected is None else expected
        right = torch.equal(logits, expected) and bool(logits.isfinite().all())
        share = chain.nbytes / time / 1e6 / limit
        speed = f"{time:.3f} ms {1000 / time:.0f} tok/s {share:.0%}" if right else "WRONG"
        print(f"{name} depth {depth} dependent {dependent}: {speed} ({chain.nbytes} B)", flush=True)
        records.append({"model": name, "depth": depth, "dependent": dependent, "ms": time, "right": right})
        if timeline:
            profile(chain, dependent)
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", nargs="*", default=["8b", "1b"])
    parser.add_argument("--depth", nargs="*", type=int, default=[128, 8192])
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    require_gpu()
    limit = read_bandwidth()
    print(f"{torch.cuda.get_device_name()}: read {limit:.0f} GB/s", flush=True)
    if options.sweep:
        records = sweep(limit)
    else:
        with multiprocessing.get_context("spawn").Pool(2) as pool:
            pool.map(_compile, [(False, {}), (True, {})], chunksize=1)
        records = []
        for name in options.model:
            for depth in options.depth:
                records += measure(name, depth, limit, options.profile)
                torch.cuda.empty_cache()
    if options.out:
        report = {"device": torch.cuda.get_device_name(), "read_gbps": limit, "runs": records}
        options.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
