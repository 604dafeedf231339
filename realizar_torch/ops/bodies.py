"""What each op does, once for all devices: check, call kernel launchers, round to the output dtype."""

from typing import Any, Protocol

import torch
from torch.nn import functional

from realizar_torch.errors import FormatError
from realizar_torch.ops import checks, torch_kernels
from realizar_torch.ops.arguments import NormLinear
from realizar_torch.ops.normalization import compute_dtype, normalize
from realizar_torch.reference import QuantizedActivations

OPS = ("linear", "embedding", "dequantize", "norm_linear", "quantize_activations", "linear_quantized")


class Kernels(Protocol):
    """A set of launchers. Tensors are contiguous; weights are canonical bytes ``uint8 [N, row_bytes]``."""

    def matmul(self, x: torch.Tensor, weight: torch.Tensor, fmt: str, in_features: int) -> torch.Tensor:
        """float32 [M, K] → float32 [M, N]."""

    def matmul_int8(self, qx: QuantizedActivations, weight: torch.Tensor, fmt: str) -> torch.Tensor:
        """Quantized [M, Kp] → float32 [M, N]."""

    def quantize_activations(self, x: torch.Tensor, fmt: str) -> QuantizedActivations:
        """float32 [M, K] → quantized [M, Kp]."""

    def dequantize(self, weight: torch.Tensor, fmt: str, in_features: int) -> torch.Tensor:
        """→ float32 [N, in_features]."""

    def embedding(
        self, ids: torch.Tensor, weight: torch.Tensor, fmt: str, embedding_dim: int
    ) -> torch.Tensor:
        """int64 [n] → float32 [n, embedding_dim]."""

    def expert_matvec(
        self,
        x: torch.Tensor | QuantizedActivations,
        experts: torch.Tensor,
        weight: torch.Tensor,
        fmt: str,
        in_features: int,
        share: int,
    ) -> torch.Tensor:
        """Row ``i // share`` of ``x`` times matrix ``experts[i]`` of [E, N, row_bytes] → float32 [i, N]."""


def linear(
    kernels: Kernels,
    x: torch.Tensor,
    weight: torch.Tensor,
    fmt: str,
    in_features: int,
    bias: torch.Tensor | None = None,
    *,
    activations: str = "float",
    layout: str = "ggml",
) -> torch.Tensor:
    checks.check_linear(x, weight, fmt, in_features, bias, activations, layout)
    require_canonical(layout, x.device)
    y = product(kernels, x.reshape(-1, in_features), weight, fmt, bias, activations)
    return y.to(x.dtype).reshape(*x.shape[:-1], weight.shape[0])


def linear_quantized(
    kernels: Kernels,
    q: torch.Tensor,
    scale: torch.Tensor,
    sums: torch.Tensor,
    weight: torch.Tensor,
    fmt: str,
    in_features: int,
    bias: torch.Tensor | None = None,
    *,
    layout: str = "ggml",
) -> torch.Tensor:
    """``linear`` of activations that are quantized already, ``q [..., Kp]`` → float32 [..., N]."""
    checks.check_linear_quantized(q, scale, sums, weight, fmt, in_features, bias, layout)
    require_canonical(layout, weight.device)
    flat = QuantizedActivations(_matrix(q), _matrix(scale), _matrix(sums), in_features)
    y = add_bias(kernels.matmul_int8(flat, weight.contiguous(), fmt), bias)
    return y.reshape(*q.shape[:-1], weight.shape[0])


def quantize_activations(
    kernels: Kernels, x: torch.Tensor, fmt: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``x [..., K]`` → ``q [..., Kp]``, ``scale [..., Kp/32]``, ``sums [..., Kp/16]``."""
    spec = checks.check_features(x, fmt)
    flat = kernels.quantize_activations(_matrix(x).to(torch.float32), spec.name)
    q, scale, sums = (part.reshape(*x.shape[:-1], part.shape[-1]) for part in (flat.q, flat.scale, flat.sums))
    return q, scale, sums


def embedding(
    kernels: Kernels,
    ids: torch.Tensor,
    weight: torch.Tensor,
    fmt: str,
    embedding_dim: int,
    *,
    dtype: torch.dtype,
    layout: str = "ggml",
) -> torch.Tensor:
    checks.check_embedding(ids, weight, fmt, embedding_dim, dtype, layout)
    require_canonical(layout, weight.device)
    flat = ids.reshape(-1).to(torch.int64).contiguous()
    if flat.numel():
        low, high = (int(end) for end in flat.aminmax())
        if low < 0 or high >= weight.shape[0]:
            wrong = low if low < 0 else high
            raise FormatError(f"id {wrong} is outside the table of {weight.shape[0]} rows")
    rows = kernels.embedding(flat, weight.contiguous(), fmt, embedding_dim)
    return rows.to(dtype).reshape(*ids.shape, embedding_dim)


def dequantize(
    kernels: Kernels,
    weight: torch.Tensor,
    fmt: str,
    in_features: int,
    *,
    dtype: torch.dtype,
    layout: str = "ggml",
) -> torch.Tensor:
    checks.check_dequantize(weight, fmt, in_features, dtype, layout)
    require_canonical(layout, weight.device)
    values = weight.new_empty(weight.shape[0], in_features, dtype=dtype)
    for rows in torch_kernels.row_slices(weight.shape[0], in_features):
        values[rows] = kernels.dequantize(weight[rows].contiguous(), fmt, in_features)
    return values


def norm_linear(kernels: Kernels, *args: Any, **kwargs: Any) -> torch.Tensor:
    call = NormLinear(*args, **kwargs)
    checks.check_norm_linear(call)
    x, weight, bias = call.x, call.weight, call.bias
    rows = x.reshape(-1, call.in_features)
    normed = normalize(rows, call.norm_weight, call.norm_bias, call.normalization, call.eps)
    if call.fmt is None:
        y = functional.linear(
            normed.to(weight.dtype), weight, None if bias is None else bias.to(weight.dtype)
        )
    else:
        require_canonical(call.layout, x.device)
        y = product(kernels, normed, weight, call.fmt, bias, call.activations)
    return y.to(x.dtype).reshape(*x.shape[:-1], weight.shape[0])


def product(
    kernels: Kernels,
    x: torch.Tensor,
    weight: torch.Tensor,
    fmt: str,
    bias: torch.Tensor | None,
    activations: str,
) -> torch.Tensor:
    """``x [M, K]`` times a packed weight, plus bias: float32, or float64 for float64 ``x`` not quantized."""
    weight, in_features = weight.contiguous(), x.shape[-1]
    if activations == "int8":
        qx = kernels.quantize_activations(x.to(torch.float32).contiguous(), fmt)
        return add_bias(kernels.matmul_int8(qx, weight, fmt), bias)
    x = x.to(compute_dtype(x.dtype)).contiguous()
    # compiled kernels accumulate in float32, which would not honour a float64 input
    exact = torch_kernels if x.dtype == torch.float64 else kernels
    return add_bias(exact.matmul(x, weight, fmt, in_features), bias)


def add_bias(y: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """In place."""
    return y if bias is None else y.add_(bias.to(y.dtype))


def _matrix(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


def require_canonical(layout: str, device: torch.device) -> None:
    """FormatError for a layout that only GPUs have kernels for."""
    if layout != "ggml":
        raise FormatError(
            f"layout {layout!r} has no kernel on {device.type}, expected 'ggml'; "
            "rt.unpack(model) or packing.unpack gives the canonical bytes"
        )
