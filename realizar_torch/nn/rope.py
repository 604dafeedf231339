"""Rotary position embedding, half-split style: pairs are (i, i + rotary_dim/2); what lies behind stays."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


class RotaryEmbedding(nn.Module):
    """Angles position·theta^(-2i/rotary_dim), with per-frequency divisors.

    ``divisors`` (rotary_dim/2 numbers) divide the frequencies, as the tensor ``rope_freqs.weight`` of Llama 3
    files does; equal ones are linear scaling. ``magnitude`` multiplies cos and sin (YaRN, LongRoPE).
    Frequencies and angles are rounded to float32, as in transformers, where models were trained: an exact
    angle at position 1000 is another one. They stay in float32 whatever the model is cast to: bfloat16 would
    move distant positions by radians.
    """

    inv_freq: Tensor

    def __init__(
        self,
        rotary_dim: int,
        theta: float,
        *,
        divisors: Sequence[float] | None = None,
        magnitude: float = 1.0,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        self.rotary_dim, self.theta, self.magnitude = rotary_dim, theta, magnitude
        self.divisors = None if divisors is None else tuple(divisors)
        self.register_buffer("inv_freq", self._frequencies(device), persistent=False)

    def _frequencies(self, device: torch.device | str | None) -> Tensor:
        exponent = torch.arange(0, self.rotary_dim, 2, dtype=torch.float32, device=device) / self.rotary_dim
        frequencies = 1.0 / self.theta**exponent
        if self.divisors is not None:
            frequencies = frequencies / torch.tensor(self.divisors, dtype=torch.float32, device=device)
        return frequencies

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RotaryEmbedding":
        super()._apply(fn, recurse)
        self.inv_freq = self._frequencies(self.inv_freq.device)
        return self

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions int [B, T] -> cos and sin, fp32 [B, 1, T, rotary_dim/2]."""
        angle = positions.to(torch.float32)[:, None, :, None] * self.inv_freq
        cos, sin = angle.cos(), angle.sin()
        return (cos, sin) if self.magnitude == 1.0 else (cos * self.magnitude, sin * self.magnitude)

    own_forward = forward

    def extra_repr(self) -> str:
        magnitude = f", magnitude={self.magnitude}" if self.magnitude != 1.0 else ""
        return f"{self.rotary_dim}, theta={self.theta}{', divisors' if self.divisors else ''}{magnitude}"


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, heads, T, head_dim] rotated in fp32 by cos and sin [B, 1, T, rotary_dim/2]; its dtype is kept."""
    half = cos.shape[-1]
    first, second, rest = x.float().split((half, half, x.shape[-1] - 2 * half), dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1).to(x.dtype)
