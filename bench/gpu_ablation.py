"""What each fusion of the decode step is worth: the 8B kernel chain with one launch taken apart at a time.

    python bench/gpu_ablation.py [--model 8b] [--depth 128] [--out results.json]

A replacement has the signature of the fused kernel and is made of the other kernels and torch ops. Its
logits must be those of the fused chain before its time is printed.
"""

import argparse
import json
import multiprocessing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import gpu_layers
import torch
from gpu_layers import MODELS, Chain, Shape
from gpu_matvec import graph_time, read_bandwidth
from on_gpu import require_gpu
from torch import Tensor
from torch.nn import functional

from realizar_torch.triton_kernels.attention import decode_attention
from realizar_torch.triton_kernels.matvec import matvec_int8
from realizar_torch.triton_kernels.quantize import Int8Activations, normalize, quantize_activations

# of the largest logit: another order of sums shifts int8 activations by a step
TOLERANCE = 1e-2


def norm_then_quantize(x: Tensor, weight: Tensor, *, width: int, **options: Any) -> Int8Activations:
    """Two launches for one."""
    normed = normalize(x, weight, **options)
    return quantize_activations(normed, width, dependent=options["dependent"])


def three_products(
    q: Tensor, scale: Tensor, sums: Tensor, weights: Sequence[Tensor], fmts: Sequence[str], in_features: int,
    *, layouts: Sequence[str], launches: object, dependent: bool,
) -> Tensor:  # fmt: skip
    """q, k and v one after the other, into one tensor."""
    out = torch.empty(len(q), sum(len(w) for w in weights), device=q.device)
    parts = out.split([len(w) for w in weights], 1)
    for weight, fmt, layout, part in zip(weights, fmts, layouts, parts, strict=True):
        matvec_int8(q, scale, sums, weight, fmt, in_features, out=part, layout=layout, dependent=dependent)
    return out


def gate_then_up(
    q: Tensor, scale: Tensor, sums: Tensor, gate: Tensor, up: Tensor, fmt: str, in_features: int,
    *, layout: str, launch: object, dependent: bool,
) -> Tensor:  # fmt: skip
    """Two products, and torch's SiLU and product."""
    options = {"layout": layout, "dependent": dependent}
    first = matvec_int8(q, scale, sums, gate, fmt, in_features, **options)
    second = matvec_int8(q, scale, sums, up, fmt, in_features, **options)
    return functional.silu(first).mul_(second)


def rotation_by_torch(
    qkv: Tensor, k_cache: Tensor, v_cache: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, **options: Any
) -> tuple[Tensor, Any]:
    """Queries and the key turned by torch ops first; what attention then does with them is no rotation."""
    kv_heads, dim = k_cache.shape[1], k_cache.shape[3]
    heads = qkv.view(-1, dim)
    turned = heads[: len(heads) - kv_heads]
    low, high = turned.chunk(2, -1)
    c, s = cos.index_select(0, positions.long()), sin.index_select(0, positions.long())
    rotated = torch.cat([low * c - high * s, high * c + low * s], -1)
    qkv = torch.cat([rotated, heads[len(turned) :]]).view(1, -1)
    still = torch.ones_like(cos), torch.zeros_like(sin)
    return decode_attention(qkv, k_cache, v_cache, positions, *still, **options)


def attention_then_quantize(
    *args: Any, quantize: bool, dependent: bool, **options: Any
) -> tuple[Tensor, Any]:
    """Attention's output in floats, quantized by a launch of its own."""
    out, _ = decode_attention(*args, dependent=dependent, **options)
    return out, quantize_activations(out, out.shape[1], dependent=dependent)


# which name of gpu_layers is replaced, and by what
ABLATIONS: dict[str, tuple[str, Callable[..., Any]]] = {
    "norm + quantize": ("norm_quantize", norm_then_quantize),
    "one launch for q, k, v": ("qkv_int8", three_products),
    "one launch for gate, up": ("gate_up_int8", gate_then_up),
    "rotation in attention": ("decode_attention", rotation_by_torch),
    "quantize in attention": ("decode_attention", attention_then_quantize),
}


def step(chain: Chain, without: str | None, dependent: bool = True) -> Tensor:
    if without is None:
        return chain.step(dependent)
    name, replacement = ABLATIONS[without]
    with mock.patch.object(gpu_layers, name, replacement):
        return chain.step(dependent)


def _compile(job: tuple[str, str | None, bool]) -> None:
    """Fill the kernel cache from a worker process: eight layers, which have both mixes of formats."""
    s = MODELS[job[0]]
    step(Chain(Shape(8, s.hidden, s.heads, s.kv_heads, s.dim, s.inner, 1024, s.head_fmt), 128), *job[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="8b", choices=MODELS)
    parser.add_argument("--depth", type=int, default=128)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    require_gpu()
    variants = [(None, True), *((name, True) for name in ABLATIONS), (None, False)]
    with multiprocessing.get_context("spawn").Pool(len(variants)) as pool:
        pool.map(_compile, [(options.model, *variant) for variant in variants], chunksize=1)
    limit = read_bandwidth()
    print(f"{torch.cuda.get_device_name()}: read {limit:.0f} GB/s", flush=True)
    chain = Chain(MODELS[options.model], options.depth)
    expected = step(chain, None)
    records: list[dict[str, Any]] = []
    for without, dependent in variants:
        name = without or ("(all fusions)" if dependent else "dependent launch")
        found = step(chain, without, dependent)
        right = bool(((found - expected).abs() <= TOLERANCE * expected.abs().max()).all())
        ms = graph_time([lambda w=without, d=dependent: step(chain, w, d)]) if right else None
        records.append({"without": name, "ms": ms, "share": ms and chain.nbytes / ms / 1e6 / limit})
        base = records[0]["ms"]
        cost = (
            ""
            if ms is None or base is None
            else f"{ms:.3f} ms, {1000 * (ms - base):+.0f} us, {ms / base:.3f}x"
        )
        print(f"{name:24} {cost or 'WRONG'}", flush=True)
    if options.out:
        report = {"device": torch.cuda.get_device_name(), "read_gbps": limit, "depth": options.depth}
        options.out.write_text(
            json.dumps(report | {"model": options.model, "runs": records}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
