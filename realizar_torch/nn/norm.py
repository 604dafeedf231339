"""Dense RMSNorm and LayerNorm with float32 statistics: fp16 rows whose squares overflow come out right."""

import torch
from torch import nn

from realizar_torch.errors import FormatError
from realizar_torch.ops.normalization import compute_dtype, normalize


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x²) + eps) * weight`` over the last dimension; the output has the input's dtype.

    ``zero_centered``: the stored weight is the scale minus one (Gemma checkpoints in safetensors; GGUF files
    already hold the scale). Key: ``weight [features]``.
    """

    normalization = "rmsnorm"
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        features: int,
        eps: float = 1e-6,
        *,
        zero_centered: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if features < 1:
            raise FormatError(f"a norm of {features} features; expected at least 1")
        self.features = features
        self.eps = eps
        self.zero_centered = zero_centered
        start = torch.zeros if zero_centered else torch.ones
        self.weight = nn.Parameter(start(features, device=device, dtype=dtype))
        self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x [..., features]`` → the same shape and dtype."""
        if x.ndim == 0 or x.shape[-1] != self.features:
            raise FormatError(f"input of shape {tuple(x.shape)}, expected last dimension {self.features}")
        # the one is added in the computing dtype: bf16 would round a small weight away
        weight = self.weight.to(compute_dtype(x.dtype)) + 1 if self.zero_centered else self.weight
        return normalize(x, weight, self.bias, self.normalization, self.eps).to(x.dtype)

    own_forward = forward

    def extra_repr(self) -> str:
        return f"{self.features}, eps={self.eps}" + (", zero_centered=True" if self.zero_centered else "")


class PerHeadNorm(nn.Module):
    """Norms each head of ``x [B, heads, T, head_dim]`` by itself, with a weight of its own and no bias.

    ``normalization``: "rmsnorm" or "layernorm". Key: ``weight [heads, head_dim]``.
    """

    def __init__(
        self,
        heads: int,
        head_dim: int,
        eps: float,
        *,
        normalization: str,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.features, self.eps, self.normalization = head_dim, eps, normalization
        self.weight = nn.Parameter(torch.ones(heads, head_dim, device=device, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x [B, heads, T, head_dim]`` → the same shape and dtype."""
        weight = self.weight.to(compute_dtype(x.dtype))
        plain = normalize(x, torch.ones_like(weight[0]), None, self.normalization, self.eps)
        return (plain * weight[:, None]).to(x.dtype)

    own_forward = forward

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, {self.normalization}, eps={self.eps}"


class LayerNorm(RMSNorm):
    """``(x - mean) / sqrt(var + eps) * weight + bias`` over the last dimension; as RMSNorm otherwise.

    Keys: ``weight [features]`` and, unless ``bias=False``, ``bias [features]``.
    """

    normalization = "layernorm"

    def __init__(
        self,
        features: int,
        eps: float = 1e-5,
        bias: bool = True,
        *,
        zero_centered: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(features, eps, zero_centered=zero_centered, device=device, dtype=dtype)
        if bias:
            self.bias = nn.Parameter(torch.zeros(features, device=device, dtype=dtype))
