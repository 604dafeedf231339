"""float32 arithmetic that rounds on every device as ggml's C code does on x86-64.

Torch's own reductions change the order of sums, ``number / tensor`` multiplies by a reciprocal (on CUDA so
does ``tensor / number``), and the CPU's float32 ``sqrt`` is not always correctly rounded.
"""

import torch
from torch import Tensor

# adding it puts a float's integer part, rounded half to even, into the low bits of its fraction
_ROUNDER = 12582912.0


def divide(dividend: Tensor | float, divisor: Tensor | float) -> Tensor:
    """``dividend / divisor`` rounded once; at least one is a tensor."""
    if not isinstance(dividend, Tensor):
        assert isinstance(divisor, Tensor)
        dividend = torch.full((), dividend, dtype=torch.float32, device=divisor.device)
    elif not isinstance(divisor, Tensor):
        divisor = torch.full((), divisor, dtype=torch.float32, device=dividend.device)
    return dividend / divisor


def sqrt(values: Tensor) -> Tensor:
    """Correctly rounded: float64 has more than twice the bits."""
    return values.to(torch.float64).sqrt().to(torch.float32)


def ordered_sum(terms: Tensor, start: Tensor | None = None) -> Tensor:
    """Sum over the first dimension, one term after the other from ``start`` (zero if None)."""
    total = torch.zeros_like(terms[0]) if start is None else start.clone()
    for term in terms:
        total += term
    return total


def nearest_int(values: Tensor) -> Tensor:
    """Round half to even → int32, with ggml's results for what exceeds 2^22 (low bits) and for NaN (0)."""
    numbers = values.nan_to_num(0, torch.inf, -torch.inf)
    return numbers.add_(_ROUNDER).view(torch.int32).bitwise_and_(0x7FFFFF).sub_(0x400000)


def truncate(values: Tensor) -> Tensor:
    """Round towards zero → int32; what no int32 holds becomes 0, the low byte of x86's answer."""
    return torch.where(values.abs() < 2**31, values, 0).to(torch.int32)


def round_away(values: Tensor) -> Tensor:
    """Round half away from zero, as C's ``roundf``."""
    whole = values.trunc()
    return whole + ((values - whole).abs() >= 0.5) * values.sign()


def first_smallest(values: Tensor) -> Tensor:
    """The smallest of the first dimension; of 0.0 and -0.0, whichever comes first."""
    return values.gather(0, values.argmin(0, keepdim=True)).squeeze(0)


def first_largest(values: Tensor) -> Tensor:
    """The largest of the first dimension; of 0.0 and -0.0, whichever comes first."""
    return values.gather(0, values.argmax(0, keepdim=True)).squeeze(0)


def furthest_from_zero(values: Tensor) -> Tensor:
    """The value with the largest magnitude, the first of equals; NaN does not count, and none gives 0.0."""
    values = values.nan_to_num(0, torch.inf, -torch.inf)
    furthest = values.gather(0, values.abs().argmax(0, keepdim=True)).squeeze(0)
    return torch.where(furthest != 0, furthest, 0)
