"""Running error bounds: float64 values with how far their fp32 twins may be off, for whole formulas."""

from typing import Self

import torch
from cases import float_tolerance
from torch import Tensor

# a few ulp: elementary functions are not rounded correctly
_ROUNDING = 2**-21


class Bounded:
    """A float64 matrix, and per element how far the fp32 matrix computed in its place may be off.

    Every operation carries the errors of its inputs on, to first order and as independent ones (the root of
    the sum of their squares), and adds that of its own roundings, for sums the bound of `float_tolerance`.
    """

    def __init__(self, value: Tensor, error: Tensor | None = None):
        self.value = value.detach().double()
        self.error = torch.zeros_like(self.value) if error is None else error

    @property
    def T(self) -> Self:
        return type(self)(self.value.T, self.error.T)

    def __add__(self, other: Self) -> Self:
        return self._rounded(self.value + other.value, (self.error**2 + other.error**2).sqrt())

    def __matmul__(self, other: Self) -> Self:
        """``[M, K] @ [K, N]``: ``sqrt(sum a² eb² + sum ea² b²)`` and the roundings of ``sum a b``."""
        carried = self.value**2 @ other.error**2 + self.error**2 @ other.value**2
        rounding = float_tolerance(self.value, other.value.T, torch.float32)
        return type(self)(self.value @ other.value, carried.sqrt() + rounding)

    def __mul__(self, other: Self | float) -> Self:
        """Element by element."""
        if isinstance(other, float):
            other = type(self)(torch.tensor(other))
        carried = self.value**2 * other.error**2 + self.error**2 * other.value**2
        return self._rounded(self.value * other.value, carried.sqrt())

    def tanh(self) -> Self:
        """Its slope is at most 1."""
        return self._rounded(self.value.tanh(), self.error)

    def tanh_slope(self) -> Self:
        """``1 - t²`` of a ``t`` that is a tanh: it keeps the absolute error ``2 |t| et`` of the square."""
        square = 2 * self.value.abs() * self.error + _ROUNDING
        return type(self)(1 - self.value**2, square)

    def _rounded(self, value: Tensor, error: Tensor) -> Self:
        return type(self)(value, error + _ROUNDING * value.abs())
