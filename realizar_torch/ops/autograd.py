"""Derivatives of the ops, made of registered ops only, so that tracing and higher orders work.

The packed weight is frozen. Rows are decoded a slice at a time, in float32 (float64 for float64 inputs).
With ``activations="int8"`` the rounding of the activations is passed straight through; ops that give or take
rounded values themselves refuse.
"""

from typing import Any

import torch
from torch import Tensor

from realizar_torch.ops import derivatives
from realizar_torch.ops.arguments import NormLinear
from realizar_torch.ops.normalization import compute_dtype, normalize
from realizar_torch.ops.torch_kernels import row_slices

Gradients = tuple[Tensor | None, ...]


def _save_linear(
    ctx: Any,
    x: Tensor,
    weight: Tensor,
    fmt: str,
    in_features: int,
    bias: Tensor | None = None,
    *,
    layout: str = "ggml",
    **numerics: str,
) -> None:
    ctx.fmt, ctx.in_features, ctx.layout = fmt, in_features, layout
    ctx.x_dtype, ctx.bias_dtype = x.dtype, None if bias is None else bias.dtype
    ctx.save_for_backward(weight)
    ctx.save_for_forward(weight)


def _linear_backward(ctx: Any, grad_y: Tensor) -> Gradients:
    """``grad_x = grad_y @ W``, ``grad_bias = sum(grad_y)`` over all leading dimensions."""
    (weight,) = ctx.saved_tensors
    grad_y = grad_y.to(compute_dtype(grad_y.dtype))
    grad_x = grad_bias = None
    if ctx.needs_input_grad[0]:
        grad_x = times_weight(grad_y, weight, ctx.fmt, ctx.in_features, ctx.layout).to(ctx.x_dtype)
    if ctx.bias_dtype is not None and ctx.needs_input_grad[4]:
        grad_bias = grad_y.reshape(-1, weight.shape[0]).sum(0).to(ctx.bias_dtype)
    return grad_x, None, None, None, grad_bias


def _linear_jvp(
    ctx: Any, x_t: Tensor, _weight: None, _fmt: None, _in_features: None, bias_t: Tensor | None = None
) -> Tensor:
    """``y' = x' @ W.T + bias'``."""
    (weight,) = ctx.saved_tensors
    return torch.ops.realizar_torch.linear(x_t, weight, ctx.fmt, ctx.in_features, bias_t, layout=ctx.layout)


def _save_norm_linear(ctx: Any, *args: Any, **kwargs: Any) -> None:
    call = NormLinear(*args, **kwargs)
    ctx.fmt, ctx.in_features, ctx.layout = call.fmt, call.in_features, call.layout
    ctx.normalization, ctx.eps = call.normalization, call.eps
    saved = (call.x, call.norm_weight, call.norm_bias, call.weight, call.bias)
    ctx.save_for_backward(*saved)
    ctx.save_for_forward(*saved)


def _norm_linear_backward(ctx: Any, grad_y: Tensor) -> Gradients:
    """With ``n = normalize(x)`` (without weight and bias) and ``g = norm_weight * (grad_y @ W)``:

    ``grad_x = r * (g - mean(g) - n * mean(g n))``, r the reciprocal deviation; rmsnorm has no ``mean(g)``.
    """
    x, norm_weight, norm_bias, weight, bias = ctx.saved_tensors
    rows = x.reshape(-1, ctx.in_features).to(compute_dtype(x.dtype))
    grad_y = grad_y.reshape(-1, weight.shape[0]).to(rows.dtype)
    if ctx.fmt is None:
        grad_normed = grad_y @ weight.to(rows.dtype)
    else:
        grad_normed = times_weight(grad_y, weight, ctx.fmt, ctx.in_features, ctx.layout)

    unit, reciprocal = _unit(ctx, rows)
    grad_unit = grad_normed * norm_weight.to(rows.dtype)
    grad_x = _centre(ctx, grad_unit - unit * (grad_unit * unit).mean(-1, keepdim=True))

    needs = ctx.needs_input_grad
    grad_weight = None
    if needs[3]:
        normed = normalize(rows, norm_weight, norm_bias, ctx.normalization, ctx.eps)
        grad_weight = (grad_y.T @ normed).to(weight.dtype)
    return (
        (grad_x * reciprocal).to(x.dtype).reshape(x.shape) if needs[0] else None,
        (grad_normed * unit).sum(0).to(norm_weight.dtype) if needs[1] else None,
        grad_normed.sum(0).to(norm_bias.dtype) if needs[2] else None,
        grad_weight,
        None,
        None,
        grad_y.sum(0).to(bias.dtype) if bias is not None and needs[6] else None,
    )


def _norm_linear_jvp(
    ctx: Any,
    x_t: Tensor,
    norm_weight_t: Tensor,
    norm_bias_t: Tensor | None,
    weight_t: Tensor,
    _fmt: None,
    _in_features: None,
    bias_t: Tensor | None = None,
) -> Tensor:
    """``n' = r * (c' - n * mean(n c'))``, ``c' = x' - mean(x')`` (rmsnorm: ``x'``), then the product rule."""
    x, norm_weight, norm_bias, weight, _ = ctx.saved_tensors
    x, x_t = (part.to(compute_dtype(x.dtype)) for part in (x, x_t))
    unit, reciprocal = _unit(ctx, x)
    centred_t = _centre(ctx, x_t)
    unit_t = reciprocal * (centred_t - unit * (unit * centred_t).mean(-1, keepdim=True))
    normed_t = unit_t * norm_weight + unit * norm_weight_t
    if norm_bias_t is not None:
        normed_t = normed_t + norm_bias_t
    if ctx.fmt is None:
        normed = normalize(x, norm_weight, norm_bias, ctx.normalization, ctx.eps)
        y_t = normed_t @ weight.to(x.dtype).T + normed @ weight_t.to(x.dtype).T
    else:
        y_t = torch.ops.realizar_torch.linear(normed_t, weight, ctx.fmt, ctx.in_features, layout=ctx.layout)
    return (y_t if bias_t is None else y_t + bias_t).to(ctx.saved_tensors[0].dtype)


def _centre(ctx: Any, rows: Tensor) -> Tensor:
    return rows - rows.mean(-1, keepdim=True) if ctx.normalization == "layernorm" else rows


def _unit(ctx: Any, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The normalised rows before weight and bias, and the reciprocal deviations."""
    centred = _centre(ctx, rows)
    reciprocal = (centred.square().mean(-1, keepdim=True) + ctx.eps).rsqrt()
    return centred * reciprocal, reciprocal


def times_weight(grad_y: Tensor, weight: Tensor, fmt: str, in_features: int, layout: str) -> Tensor:
    """``grad_y [..., N] @ decode(weight)`` without ever holding the whole decoded weight."""
    product = grad_y.new_zeros(*grad_y.shape[:-1], in_features)
    for rows in row_slices(weight.shape[0], in_features):
        decoded = torch.ops.realizar_torch.dequantize(
            weight[rows], fmt, in_features, dtype=grad_y.dtype, layout=layout
        )
        # not indexed: batches of gradients know no view of all rows, which that would be for one slice
        part = grad_y.narrow(-1, rows.start, rows.stop - rows.start)
        product = product + part @ decoded
    return product


derivatives.register("linear", _save_linear, _linear_backward, _linear_jvp)
derivatives.register("norm_linear", _save_norm_linear, _norm_linear_backward, _norm_linear_jvp)
derivatives.register_none("quantize", "pass detached tensors")
derivatives.register_none(
    "quantize_activations",
    "pass x.detach(), or use linear(x, ..., activations='int8'), whose gradient passes the rounding straight "
    "through",
)
derivatives.register_none(
    "linear_quantized", "pass x itself with activations='int8', or call it under torch.no_grad()"
)
