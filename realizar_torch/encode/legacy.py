"""Blocks of 32 with one scale: Q8_0, Q4_0, Q5_0, and with a minimum Q4_1, Q5_1.

Without importance the scale comes from the extremes of the block; with it, from a search.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from realizar_torch.encode.arithmetic import (
    divide,
    first_largest,
    first_smallest,
    furthest_from_zero,
    ordered_sum,
    round_away,
    sqrt,
    truncate,
)
from realizar_torch.encode.blocks import pack_bits
from realizar_torch.encode.search import scale_and_minimum, symmetric_scale


def _q8_0(x: Tensor, importance: Tensor | None, per_row: int) -> dict[str, Tensor]:
    """d = max|x| / 127; importance does not matter."""
    d = divide(x.abs().amax(0), 127)
    q = truncate(round_away(x * _inverse(d)))
    return {"d": d, "qs": q.T.to(torch.int8)}


def _symmetric(half: int, x: Tensor, importance: Tensor | None, per_row: int) -> dict[str, Tensor]:
    """The value furthest from zero becomes ``-half``."""
    if importance is None:
        d = divide(furthest_from_zero(x), -half)
        q = truncate(x * _inverse(d) + (half + 0.5)).clamp(max=2 * half - 1)
    else:
        d, q = symmetric_scale(x, _weights(x, importance, per_row), half)
    return {"d": d} | _bits(q)


def _with_minimum(top: int, x: Tensor, importance: Tensor | None, per_row: int) -> dict[str, Tensor]:
    """The smallest value becomes 0, the largest ``top``."""
    if importance is None:
        low = first_smallest(x)
        d = divide(first_largest(x) - low, top)
        q = truncate((x - low) * _inverse(d) + 0.5).clamp(max=top)
        return {"d": d, "m": low} | _bits(q)
    d, minimum, q = scale_and_minimum(x, _weights(x, importance, per_row), top, -0.9, 0.05, 36)
    return {"d": d, "m": -minimum} | _bits(q)


def _inverse(d: Tensor) -> Tensor:
    return torch.where(d != 0, divide(1, d), 0)


def _weights(x: Tensor, importance: Tensor, per_row: int) -> Tensor:
    """``importance * sqrt(mean square of the row + x²)``."""
    rows = (x * x).T.reshape(-1, per_row * len(x)).T.contiguous()
    mean = divide(ordered_sum(rows), rows.shape[0])
    return importance * sqrt(mean.repeat_interleave(per_row) + x * x)


def _bits(q: Tensor) -> dict[str, Tensor]:
    """The low four bits, and the fifth where a format stores one."""
    values = q.T & 31
    return {"qs": pack_bits(values & 15, 16, 4), "qh": pack_bits(values >> 4, 1, 1)}


LEGACY_ENCODERS: dict[str, Callable[[Tensor, Tensor | None, int], dict[str, Tensor]]] = {
    "Q8_0": _q8_0,
    "Q4_0": partial(_symmetric, 8),
    "Q5_0": partial(_symmetric, 16),
    "Q4_1": partial(_with_minimum, 15),
    "Q5_1": partial(_with_minimum, 31),
}
