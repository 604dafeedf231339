"""LayerNorm and RMSNorm with statistics in float32 (float64 for float64 input), whatever the dtype."""

import torch
from torch.nn import functional

NORMALIZATIONS = ("layernorm", "rmsnorm")


def normalize(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, normalization: str, eps: float
) -> torch.Tensor:
    """Normalise ``x [..., K]`` over its last dimension and apply ``weight [K]`` and ``bias [K]``.

    ``layernorm``: ``(x - mean) / sqrt(var + eps)``, biased variance;
    ``rmsnorm``: ``x / sqrt(mean(x²) + eps)``.
    The result stays in the computing dtype: float64 for float64 ``x``, else float32.
    """
    compute = compute_dtype(x.dtype)
    x, weight = x.to(compute), weight.to(compute)
    bias = None if bias is None else bias.to(compute)
    if normalization == "layernorm":
        return functional.layer_norm(x, weight.shape, weight, bias, eps)
    y = functional.rms_norm(x, weight.shape, weight, eps)
    return y if bias is None else y + bias


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that inputs of ``dtype`` are computed in: float64 stays, other floats become float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
