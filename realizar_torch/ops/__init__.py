"""The functional API; importing it registers the ops ``torch.ops.realizar_torch.*``.

Packed weights are ``uint8 [rows, row_bytes]`` and ``fmt`` names their format ("Q4_K"); rows are padded to
whole blocks. Dense tensors of float types only; float64 inputs are computed in float64, all others with
float32 accumulation. Complaints are FormatErrors. Packed weights are frozen; derivatives flow to inputs,
biases and norm weights, in reverse and forward mode and under ``torch.func``. Under ``torch.autocast``
products cast as ``nn.Linear`` does, and norms stay in float32.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

# imported for their registrations
from realizar_torch.errors import FormatError
from realizar_torch.ops import autocast as autocast
from realizar_torch.ops import autograd as autograd
from realizar_torch.ops import batching as batching
from realizar_torch.ops import checks
from realizar_torch.ops import cpu as cpu
from realizar_torch.ops import cuda as cuda
from realizar_torch.ops import encoding as encoding
from realizar_torch.ops import experts as experts
from realizar_torch.ops import portable as portable
from realizar_torch.ops import shared_input as shared_input
from realizar_torch.ops.experts import STEP_ROWS as STEP_ROWS
from realizar_torch.reference import QuantizedActivations

__all__ = [
    "QuantizedActivations",
    "dequantize",
    "embedding",
    "expert_linear",
    "gated_linear",
    "linear",
    "linears",
    "norm_linear",
    "quantize",
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
    passes the rounding straight through. ``QuantizedActivations`` in place of ``x`` give float32 (under
    autocast too) and no derivative: a bias that requires one is refused.
    """
    checks.check_dense(weight=weight, bias=bias)
    if isinstance(x, QuantizedActivations):
        if x.in_features != in_features:
            raise FormatError(f"activations have {x.in_features} features, the weight has {in_features}")
        checks.check_dense(q=x.q, scale=x.scale, sums=x.sums)
        return torch.ops.realizar_torch.linear_quantized(
            x.q, x.scale, x.sums, weight, fmt, in_features, bias, layout=layout
        )
    checks.check_dense(x=x)
    return torch.ops.realizar_torch.linear(
        x, weight, fmt, in_features, bias, activations=activations, layout=layout
    )


def linears(
    x: Tensor,
    weights: Sequence[Tensor],
    fmts: Sequence[str],
    in_features: int,
    biases: Sequence[Tensor | None] | None = None,
    *,
    activations: str = "float",
    layouts: Sequence[str] | None = None,
) -> Tensor:
    """``linear`` of ``x`` with each of several weights, side by side → ``[..., sum of rows]``.

    ``fmts`` has a format for every weight; ``biases`` None: none has one; ``layouts`` None: all "ggml". int8
    activations are quantized once for all formats of one padded width. The bits are those of ``linear``,
    except that a GPU multiplies three weights of one padded width in one launch, for up to 64 rows of int8
    activations, whose sums may be in another order. FormatError unless there is one of each per weight.
    """
    biases = [None] * len(weights) if biases is None else list(biases)
    checks.check_dense(x=x)
    for weight, bias in zip(weights, biases, strict=False):
        checks.check_dense(weight=weight, bias=bias)
    layouts = ["ggml"] * len(weights) if layouts is None else list(layouts)
    return torch.ops.realizar_torch.linears(
        x, list(weights), list(fmts), in_features, biases, activations=activations, layouts=layouts
    )


def gated_linear(
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
    """``activation(linear(x, gate)) * linear(x, up)`` → ``[..., rows]``; the weights are of one format, shape
    and layout.

    ``activation``: "silu", "gelu" (exact) or "gelu_tanh". For few rows a GPU rounds the result alone to the
    dtype of ``x``; elsewhere, and where a derivative is taken, the products are rounded, too.
    """
    checks.check_dense(x=x, gate=gate, up=up)
    return torch.ops.realizar_torch.gated_linear(
        x, gate, up, fmt, in_features, activation=activation, activations=activations, layout=layout
    )


def expert_linear(
    x: Tensor,
    experts: Tensor,
    weight: Tensor,
    fmt: str,
    in_features: int,
    *,
    activations: str = "float",
    layout: str = "ggml",
) -> Tensor:
    """Each row of ``x`` times the matrices of the experts chosen for it → ``[..., used, rows]``.

    ``experts`` int64 or int32 ``[..., used]``: numbers below E. ``weight`` uint8 ``[E, rows, row_bytes]``, of
    which only chosen experts are read. ``x [..., 1, in_features]`` gives them all the same row, ``[..., used,
    in_features]`` each its own. Everything else as in ``linear``. On a GPU up to 32 rows are one launch; more
    are sorted by expert, and the host waits for the sizes; a number that no expert has gives NaN.
    """
    checks.check_dense(x=x, experts=experts, weight=weight)
    return torch.ops.realizar_torch.expert_linear(
        x, experts, weight, fmt, in_features, activations=activations, layout=layout
    )


def quantize(weight: Tensor, fmt: str, *, importance: Tensor | None = None) -> Tensor:
    """Encode a float ``weight [rows, K]`` → uint8 ``[rows, row_bytes]``, K zero-padded to whole blocks.

    The blocks are those of ggml's reference quantizer on x86-64, byte for byte, on every device; ``fmt`` is
    one of ``supported_formats()``. ``importance [K]``, non-negative: how much the squared error of each
    column matters (llama.cpp's imatrix). Computed in float32; the result has no derivative. FormatError:
    unknown format, wrong shape or type, NaN, infinity, and values whose scale fp16 cannot hold, for which
    ggml stores infinity.
    """
    checks.check_dense_arguments(fmt, weight=weight, importance=importance)
    return torch.ops.realizar_torch.quantize(
        weight.detach(), fmt, None if importance is None else importance.detach()
    )


def quantize_activations(x: Tensor, fmt: str) -> QuantizedActivations:
    """Quantize ``x [..., K]`` once for all weights of ``fmt`` (or of formats with the same padded K).

    There is no derivative: ``x`` that requires one is refused.
    """
    checks.check_dense(x=x)
    q, scale, sums = torch.ops.realizar_torch.quantize_activations(x, fmt)
    return QuantizedActivations(q, scale, sums, x.shape[-1])


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
    checks.check_dense(ids=ids, weight=weight)
    return torch.ops.realizar_torch.embedding(ids, weight, fmt, embedding_dim, dtype=dtype, layout=layout)


def dequantize(
    weight: Tensor, fmt: str, in_features: int, *, dtype: torch.dtype = torch.float32, layout: str = "ggml"
) -> Tensor:
    """Decode a packed weight → ``[rows, in_features]``; computed in float32, then cast to ``dtype``."""
    checks.check_dense(weight=weight)
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
    checks.check_dense(x=x, norm_weight=norm_weight, norm_bias=norm_bias, weight=weight, bias=bias)
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
