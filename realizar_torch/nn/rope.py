"""Rotary position embedding, half-split style: pairs are (i, i + head_dim/2)."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


class RotaryEmbedding(nn.Module):
    """Angles position·theta^(-2i/head_dim), with linear scaling and per-frequency divisors.

    ``factor`` divides every position (linear scaling). ``divisors`` (head_dim/2 numbers) divide the
    frequencies, as the tensor ``rope_freqs.weight`` of Llama 3 files does. Frequencies and angles are rounded
    to float32, as in transformers, where models were trained: an exact angle at position 1000 is another
    one. They stay in float32 whatever the model is cast to: bfloat16 would move distant positions by radians.
    """

    inv_freq: Tensor

    def __init__(
        self,
        head_dim: int,
        theta: float,
        *,
        factor: float = 1.0,
        divisors: Sequence[float] | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        self.head_dim, self.theta, self.factor = head_dim, theta, factor
        self.divisors = None if divisors is None else tuple(divisors)
        self.register_buffer("inv_freq", self._frequencies(device), persistent=False)

    def _frequencies(self, device: torch.device | str | None) -> Tensor:
        exponent = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=device) / self.head_dim
        frequencies = 1.0 / self.theta**exponent / self.factor
        if self.divisors is not None:
            frequencies = frequencies / torch.tensor(self.divisors, dtype=torch.float32, device=device)
        return frequencies

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RotaryEmbedding":
        super()._apply(fn, recurse)
        self.inv_freq = self._frequencies(self.inv_freq.device)
        return self

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions int [B, T] -> cos and sin, fp32 [B, 1, T, head_dim/2]."""
        angle = positions.to(torch.float32)[:, None, :, None] * self.inv_freq
        return angle.cos(), angle.sin()

    def extra_repr(self) -> str:
        scaling = f", factor={self.factor}" if self.factor != 1.0 else ""
        return f"{self.head_dim}, theta={self.theta}{scaling}{', divisors' if self.divisors else ''}"


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, heads, T, head_dim] rotated in fp32 by cos and sin [B, 1, T, head_dim/2]; dtype of x is kept."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
