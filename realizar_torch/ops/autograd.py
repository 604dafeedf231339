"""Gradients of the ops, made of registered ops only, so that tracing and double backward work.

The packed weight is frozen. Rows are decoded a slice at a time, in float32 (float64 for float64 inputs).
With ``activations="int8"`` the rounding of the activations is passed straight through.
"""

from typing import Any

import torch

from realizar_torch.ops.library import LIBRARY
from realizar_torch.ops.normalization import compute_dtype, normalize
from realizar_torch.ops.torch_kernels import row_slices

Gradients = tuple[torch.Tensor | None, ...]


def _linear_context(ctx: Any, inputs: tuple, keyword_only_inputs: dict, output: torch.Tensor) -> None:
    x, weight, ctx.fmt, ctx.in_features, bias = inputs
    ctx.layout, ctx.x_dtype = keyword_only_inputs["layout"], x.dtype
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(weight)


def _linear_backward(ctx: Any, grad_y: torch.Tensor) -> Gradients:
    """``grad_x = grad_y @ W``, ``grad_bias = sum(grad_y)`` over all leading dimensions."""
    (weight,) = ctx.saved_tensors
    grad_y = grad_y.to(compute_dtype(grad_y.dtype))
    grad_x = grad_bias = None
    if ctx.needs_input_grad[0]:
        grad_x = _times_weight(grad_y, weight, ctx.fmt, ctx.in_features, ctx.layout).to(ctx.x_dtype)
    # an omitted bias has no entry in needs_input_grad
    if ctx.bias_dtype is not None and ctx.needs_input_grad[4]:
        grad_bias = grad_y.flatten(0, -2).sum(0) if grad_y.ndim > 1 else grad_y
        grad_bias = grad_bias.to(ctx.bias_dtype)
    return grad_x, None, None, None, grad_bias


def _norm_linear_context(ctx: Any, inputs: tuple, keyword_only_inputs: dict, output: torch.Tensor) -> None:
    x, norm_weight, norm_bias, weight, ctx.fmt, ctx.in_features, bias = inputs
    ctx.layout, ctx.eps = keyword_only_inputs["layout"], keyword_only_inputs["eps"]
    ctx.normalization = keyword_only_inputs["normalization"]
    ctx.save_for_backward(x, norm_weight, norm_bias, weight, bias)


def _norm_linear_backward(ctx: Any, grad_y: torch.Tensor) -> Gradients:
    """With ``n = normalize(x)`` (without weight and bias) and ``g = norm_weight * (grad_y @ W)``:

    ``grad_x = r * (g - mean(g) - n * mean(g n))``, r the reciprocal deviation; rmsnorm has no ``mean(g)``.
    """
    x, norm_weight, norm_bias, weight, bias = ctx.saved_tensors
    wide = compute_dtype(x.dtype)
    rows = x.reshape(-1, ctx.in_features).to(wide)
    grad_y = grad_y.reshape(-1, weight.shape[0]).to(wide)
    if ctx.fmt is None:
        grad_normed = grad_y @ weight.to(wide)
    else:
        grad_normed = _times_weight(grad_y, weight, ctx.fmt, ctx.in_features, ctx.layout)

    centred = rows - rows.mean(-1, keepdim=True) if ctx.normalization == "layernorm" else rows
    reciprocal = (centred.square().mean(-1, keepdim=True) + ctx.eps).rsqrt()
    unit = centred * reciprocal
    grad_unit = grad_normed * norm_weight.to(wide)
    grad_x = grad_unit - unit * (grad_unit * unit).mean(-1, keepdim=True)
    if ctx.normalization == "layernorm":
        grad_x = grad_x - grad_unit.mean(-1, keepdim=True)

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


def _times_weight(
    grad_y: torch.Tensor, weight: torch.Tensor, fmt: str, in_features: int, layout: str
) -> torch.Tensor:
    """``grad_y [..., N] @ decode(weight)`` without ever holding the whole decoded weight."""
    product = grad_y.new_zeros(*grad_y.shape[:-1], in_features)
    for rows in row_slices(weight.shape[0], in_features):
        decoded = torch.ops.realizar_torch.dequantize(
            weight[rows], fmt, in_features, dtype=grad_y.dtype, layout=layout
        )
        product = product + grad_y[..., rows] @ decoded
    return product


torch.library.register_autograd(
    "realizar_torch::linear", _linear_backward, setup_context=_linear_context, lib=LIBRARY
)
torch.library.register_autograd(
    "realizar_torch::norm_linear", _norm_linear_backward, setup_context=_norm_linear_context, lib=LIBRARY
)
