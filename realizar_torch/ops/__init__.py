"""The functional API; importing it registers the ops ``torch.ops.realizar_torch.*``.

Packed weights are ``uint8 [rows, row_bytes]`` and ``fmt`` names their format ("Q4_K"); rows are padded to
whole blocks. Float types only; float64 inputs are computed in float64, all others with float32 accumulation.
Complaints are FormatErrors. Gradients flow to inputs, biases and norm weights; packed weights are frozen.
"""

import torch
from torch import Tensor

# imported for their registrations
from realizar_torch.ops import autograd as autograd
from realizar_torch.ops import bodies, cpu, cuda, portable
from realizar_torch.reference import QuantizedActivations

__all__ = [
    "QuantizedActivations",
    "dequantize",
    "embedding",
    "linear",
    "norm_linear",
    "quantize_activations",
]


def linear(
    x: Tensor | QuantizedActivations,
    weight: Tensor,
    fmt: str,
    in_features: int,
    bias: Tensor | None = None,
    *,
    activations: str = "float",
    layout: str = "ggml",
) -> Tensor:
    """``x [..., in_features] @ decode(weight).T + bias`` → ``[..., rows]`` in the dtype of ``x``.

    ``activations="int8"`` quantizes ``x`` in blocks of 32 first (float32 result, then cast); its gradient
    passes the rounding straight through. ``QuantizedActivations`` in place of ``x`` give float32, no grad.
    """
    if isinstance(x, QuantizedActivations):
        if x.q.is_cuda:
            return cuda.linear_quantized(x, weight, fmt, in_features, bias, layout=layout)
        kernels = _kernels(x.q.device)
        return bodies.linear_quantized(kernels, x, weight, fmt, in_features, bias, layout=layout)
    return torch.ops.realizar_torch.linear(
        x, weight, fmt, in_features, bias, activations=activations, layout=layout
    )


def quantize_activations(x: Tensor, fmt: str) -> QuantizedActivations:
    """Quantize ``x [..., K]`` once for all weights of ``fmt`` (or of formats with the same padded K)."""
    if x.is_cuda:
        return cuda.quantize_activations(x, fmt)
    return bodies.quantize_activations(_kernels(x.device), x, fmt)


def embedding(
    ids: Tensor,
    weight: Tensor,
    fmt: str,
    embedding_dim: int,
    *,
    dtype: torch.dtype = torch.float32,
    layout: str = "ggml",
) -> Tensor:
    """Rows ``ids`` (int64 or int32, any shape) of the table, decoded → ``[*ids.shape, embedding_dim]``."""
    return torch.ops.realizar_torch.embedding(ids, weight, fmt, embedding_dim, dtype=dtype, layout=layout)


def dequantize(
    weight: Tensor, fmt: str, in_features: int, *, dtype: torch.dtype = torch.float32, layout: str = "ggml"
) -> Tensor:
    """Decode a packed weight → ``[rows, in_features]``; computed in float32, then cast to ``dtype``."""
    return torch.ops.realizar_torch.dequantize(weight, fmt, in_features, dtype=dtype, layout=layout)


def norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    weight: Tensor,
    fmt: str | None,
    in_features: int,
    bias: Tensor | None = None,
    *,
    normalization: str,
    eps: float,
    activations: str = "float",
    layout: str = "ggml",
) -> Tensor:
    """``linear(normalize(x))`` with each row normalised once, in float32, and not rounded before the product.

    ``normalization``: "layernorm" or "rmsnorm". ``fmt=None``: ``weight`` is dense, a float
    ``[rows, in_features]``, and the product runs in its dtype.
    """
    return torch.ops.realizar_torch.norm_linear(
        x,
        norm_weight,
        norm_bias,
        weight,
        fmt,
        in_features,
        bias,
        normalization=normalization,
        eps=eps,
        activations=activations,
        layout=layout,
    )


def _kernels(device: torch.device) -> bodies.Kernels:
    return cpu.kernels() if device.type == "cpu" else portable.kernels(device.type)
