"""Products of one input with several weights: it is quantized once, and one launch serves them where it can.

A derivative is that of the same numbers made by ``linear``, weight by weight.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from realizar_torch.ops import bodies, checks, cpu, cuda, derivatives, torch_kernels
from realizar_torch.ops.gates import GATES
from realizar_torch.ops.library import LIBRARY
from realizar_torch.ops.recording import recorded
from realizar_torch.reference import QuantizedActivations, padded_features

OPS = torch.ops.realizar_torch


def linears(
    kernels: bodies.Kernels,
    x: Tensor,
    weights: Sequence[Tensor],
    fmts: Sequence[str],
    in_features: int,
    biases: Sequence[Tensor | None],
    *,
    activations: str = "float",
    layouts: Sequence[str],
) -> Tensor:
    checks.check_linears(x, weights, fmts, in_features, biases, activations, layouts)
    for layout in layouts:
        bodies.require_canonical(layout, x.device)
    y = torch.cat(_products(kernels, x, weights, fmts, in_features, biases, activations), -1)
    return y.view(*x.shape[:-1], y.shape[-1])


def gated_linear(
    kernels: bodies.Kernels,
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    fmt: str,
    in_features: int,
    *,
    activation: str,
    activations: str = "float",
    layout: str = "ggml",
) -> Tensor:
    checks.check_gated_linear(x, gate, up, fmt, in_features, activation, activations, layout)
    bodies.require_canonical(layout, x.device)
    both = [gate, up], [fmt, fmt], in_features, [None, None]
    gates, ups = _products(kernels, x, *both, activations)
    return (GATES[activation](gates) * ups).view(*x.shape[:-1], gate.shape[0])


def _products(
    kernels: bodies.Kernels,
    x: Tensor,
    weights: Sequence[Tensor],
    fmts: Sequence[str],
    in_features: int,
    biases: Sequence[Tensor | None],
    activations: str,
) -> list[Tensor]:
    """[M, rows] of each weight in the dtype of ``x``: the bits of ``linear``."""
    rows = x.reshape(-1, in_features)
    quantized: dict[int, QuantizedActivations] = {}
    products = []
    for weight, fmt, bias in zip(weights, fmts, biases, strict=True):
        if activations == "float":
            y = bodies.product(kernels, rows, weight, fmt, bias, activations)
        else:
            width = padded_features(in_features, fmt)
            if width not in quantized:
                quantized[width] = kernels.quantize_activations(rows.to(torch.float32).contiguous(), fmt)
            y = bodies.add_bias(kernels.matmul_int8(quantized[width], weight.contiguous(), fmt), bias)
        products.append(y.to(x.dtype))
    return products


def linears_on_cuda(
    x: Tensor,
    weights: Sequence[Tensor],
    fmts: Sequence[str],
    in_features: int,
    biases: Sequence[Tensor | None],
    *,
    activations: str = "float",
    layouts: Sequence[str],
) -> Tensor:
    """Three weights that take activations of one width are one launch, for up to 64 rows of int8 activations.

    That one may sum in another order than ``linear``; everything else has its bits.
    """
    checks.check_linears(x, weights, fmts, in_features, biases, activations, layouts)
    rows = x.reshape(-1, in_features)
    operands = list(zip(map(cuda.addressable, weights), fmts, biases, layouts, strict=True))
    widths = [padded_features(in_features, fmt) for fmt in fmts]
    if activations == "float" or not cuda.few(rows):
        y = torch.cat(
            [
                cuda.linear(rows, weight, fmt, in_features, bias, activations=activations, layout=layout)
                for weight, fmt, bias, layout in operands
            ],
            -1,
        )
    elif len(weights) == 3 and len(set(widths)) == 1:
        y = _one_launch(rows, widths[0], operands, in_features)
    else:
        quantized = {width: cuda.quantized(rows, width) for width in widths}
        y = torch.cat(
            [
                cuda.few_product(quantized[width], len(rows), weight, fmt, in_features, bias, layout, x.dtype)
                for width, (weight, fmt, bias, layout) in zip(widths, operands, strict=True)
            ],
            -1,
        )
    return y.view(*x.shape[:-1], y.shape[-1])


def _one_launch(rows: Tensor, width: int, operands: Sequence[tuple], in_features: int) -> Tensor:
    from realizar_torch.triton_kernels.matmul_qkv import matmul_qkv
    from realizar_torch.triton_kernels.qkv import qkv_int8

    weights, fmts, biases, layouts = zip(*operands, strict=True)
    joined = None
    if any(bias is not None for bias in biases):
        parts = [rows.new_zeros(len(w)) if b is None else b for w, b in zip(weights, biases, strict=True)]
        joined = cuda.kernel_float(torch.cat(parts))
    q = cuda.quantized(rows, width)
    kind = {"layouts": layouts, "out_dtype": rows.dtype}
    if len(rows) <= cuda.INT8_MATVEC_ROWS:
        return qkv_int8(*q, weights, fmts, in_features, joined, **kind, dependent=cuda.overlaps(rows))
    return matmul_qkv(*q, len(rows), weights, fmts, in_features, joined, **kind)


def gated_linear_on_cuda(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    fmt: str,
    in_features: int,
    *,
    activation: str,
    activations: str = "float",
    layout: str = "ggml",
) -> Tensor:
    """One launch for up to eight rows, or 64 of int8 activations."""
    checks.check_gated_linear(x, gate, up, fmt, in_features, activation, activations, layout)
    rows, gate, up = x.reshape(-1, in_features), cuda.addressable(gate), cuda.addressable(up)
    pair, kind = (gate, up, fmt, in_features), {"activation": activation, "layout": layout}
    if activations == "int8" and cuda.few(rows):
        from realizar_torch.triton_kernels.gate_up import gate_up_int8
        from realizar_torch.triton_kernels.matmul_gate_up import matmul_gate_up

        q = cuda.quantized(rows, padded_features(in_features, fmt))
        if len(rows) <= cuda.INT8_MATVEC_ROWS:
            y = gate_up_int8(*q, *pair, **kind, out_dtype=x.dtype, dependent=cuda.overlaps(rows))
        else:
            y = matmul_gate_up(*q, len(rows), *pair, **kind, out_dtype=x.dtype)
    elif cuda.matvec_takes(rows):
        from realizar_torch.triton_kernels.gate_up import gate_up

        y = gate_up(rows, *pair, **kind)
    elif x.dtype == torch.float64:
        gates, ups = (cuda.linear(rows, weight, fmt, in_features, layout=layout) for weight in (gate, up))
        y = GATES[activation](gates) * ups
    else:
        from realizar_torch.triton_kernels.decoded import decoded_matmul
        from realizar_torch.triton_kernels.gated import gated
        from realizar_torch.triton_kernels.launch import packed_rows

        both = [packed_rows(weight, fmt, in_features, layout) for weight in (gate, up)]
        products = decoded_matmul(rows, both, rows.new_empty(len(rows), 2 * len(gate)))
        y = gated(products, rows.new_empty(len(rows), len(gate)), activation=activation)
    return y.view(*x.shape[:-1], gate.shape[0])


def _linears_one_by_one(
    x: Tensor,
    weights: Sequence[Tensor],
    fmts: Sequence[str],
    in_features: int,
    biases: Sequence[Tensor | None],
    *,
    activations: str = "float",
    layouts: Sequence[str],
) -> Tensor:
    products = [
        OPS.linear(x, weight, fmt, in_features, bias, activations=activations, layout=layout)
        for weight, fmt, bias, layout in zip(weights, fmts, biases, layouts, strict=True)
    ]
    return torch.cat(products, -1)


def _gated_one_by_one(
    x: Tensor, gate: Tensor, up: Tensor, fmt: str, in_features: int, *, activation: str, **options: str
) -> Tensor:
    gates, ups = (OPS.linear(x, weight, fmt, in_features, **options) for weight in (gate, up))
    return GATES[activation](gates) * ups


def _register(
    name: str, body: Callable[..., Tensor], on_cuda: Callable[..., Tensor], one_by_one: Callable[..., Tensor]
) -> None:
    def on_cpu(*args: Any, **kwargs: Any) -> Tensor:
        return body(cpu.kernels(), *args, **kwargs)

    LIBRARY.impl(name, recorded(name, on_cpu), "CPU")
    LIBRARY.impl(name, recorded(name, cuda.with_kernels(on_cuda, body)), "CUDA")
    LIBRARY.impl(name, partial(body, torch_kernels), "CompositeExplicitAutograd")
    derivatives.register_composed(name, one_by_one)


_register("linears", linears, linears_on_cuda, _linears_one_by_one)
_register("gated_linear", gated_linear, gated_linear_on_cuda, _gated_one_by_one)
