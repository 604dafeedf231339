"""The searches for the scale (and minimum) of a sub-block that give the least weighted squared error.

Tensors are float32 ``[values, ...]``: the first dimension is the values of one sub-block, the others are
sub-blocks. Each function is one of ggml's ``make_*_quants`` (named in its docstring), with its order of
operations; candidates that fail there are masked here.
"""

import numpy as np
import torch
from torch import Tensor

from realizar_torch.encode.arithmetic import (
    divide,
    first_largest,
    first_smallest,
    furthest_from_zero,
    nearest_int,
    ordered_sum,
)

# a sub-block whose values are all smaller counts as zeros
EPSILON = float(np.float32(1e-15))
_REFINEMENTS = 5


def scale_and_minimum(
    x: Tensor, weights: Tensor, top: int, first: float, step: float, steps: int, *, absolute: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """``x ≈ scale * q - minimum``, q in 0 … top, minimum ≥ 0 → (scale, minimum, q); ``make_qkx2`` and ``3``.

    Tries ``steps + 1`` inverse scales ``(first + step * i + top) / (max - min)``, for each with the least-
    squares scale and minimum; a candidate that wins moves ``min`` for those after it. ``absolute``: the least
    sum of absolute errors decides, not of squares.
    """
    low, high = first_smallest(x), first_largest(x)
    weighted = weights * x
    sum_w, sum_x = ordered_sum(
        torch.stack([weights, weighted], 1)[1:], torch.stack([weights[0], weighted[0]])
    )
    low = torch.where(low > 0, 0, low)
    constant = high == low
    inverse = divide(top, high - low)
    scale = divide(1, inverse)
    q = _levels(x, inverse, low, top)
    error = _error(x, weights, scale, low, q, absolute)
    products = x.new_empty(len(x), 3, *x.shape[1:])
    # q follows from the inverse scale and the minimum it was tried with
    best_inverse, best_low = inverse, low
    for i in range(steps + 1):
        numerator = np.float32(first) + np.float32(step) * np.float32(i) + np.float32(top)
        inverse = divide(float(numerator), high - low)
        q = _levels(x, inverse, low, top)
        wq = torch.mul(weights, q, out=products[:, 0])
        torch.mul(wq, q, out=products[:, 1])
        torch.mul(wq, x, out=products[:, 2])
        sum_q, sum_q2, sum_xq = ordered_sum(products)
        determinant = sum_w * sum_q2 - sum_q * sum_q
        new_scale = (sum_w * sum_xq - sum_x * sum_q) / determinant
        new_low = (sum_q2 * sum_x - sum_q * sum_xq) / determinant
        above = new_low > 0
        new_low = torch.where(above, 0, new_low)
        new_scale = torch.where(above, sum_xq / sum_q2, new_scale)
        new_error = _error(x, weights, new_scale, new_low, q, absolute)
        better = ~constant & (determinant > 0) & (new_error < error)
        best_inverse, best_low = (
            torch.where(better, inverse, best_inverse),
            torch.where(better, low, best_low),
        )
        error = torch.where(better, new_error, error)
        scale = torch.where(better, new_scale, scale)
        low = torch.where(better, new_low, low)
    q = torch.where(constant, 0, _levels(x, best_inverse, best_low, top))
    return torch.where(constant, 0, scale), -low, q.to(torch.int32)


def _levels(x: Tensor, inverse: Tensor, low: Tensor, top: int) -> Tensor:
    return nearest_int((x - low).mul_(inverse)).clamp_(0, top).to(torch.float32)


def _error(x: Tensor, weights: Tensor, scale: Tensor, low: Tensor, q: Tensor, absolute: bool) -> Tensor:
    difference = (scale * q).add_(low).sub_(x)
    size = difference.abs_() if absolute else difference.mul_(difference)
    return ordered_sum(size.mul_(weights))


def symmetric_scale(x: Tensor, weights: Tensor | None, half: int) -> tuple[Tensor, Tensor]:
    """``x ≈ scale * (q - half)``, q in 0 … 2 half - 1 → (scale, q); ``make_qx_quants`` with ``rmse_type`` 1.

    Tries 19 scales around the one that maps the largest value to ``-half``. ``weights=None``: squares of x.
    """
    weights = x * x if weights is None else weights
    largest = furthest_from_zero(x)
    zero = largest.abs() < EPSILON
    weighted = weights * x
    best_inverse = divide(-half, largest)
    # the first candidate starts the search: only a sum of exactly zero refuses it
    _, sum_xq, sum_q2 = _signed_trial(x, weights, weighted, best_inverse, half)
    scale = torch.where(sum_q2 != 0, sum_xq / sum_q2, 0)
    best = scale * sum_xq
    for i in (*range(-9, 0), *range(1, 10)):
        numerator = -(np.float32(half) + np.float32(0.1) * np.float32(i))
        inverse = divide(float(numerator), largest)
        _, sum_xq, sum_q2 = _signed_trial(x, weights, weighted, inverse, half)
        better = (sum_q2 > 0) & (sum_xq * sum_xq > best * sum_q2)
        best_inverse = torch.where(better, inverse, best_inverse)
        scale = torch.where(better, sum_xq / sum_q2, scale)
        best = torch.where(better, scale * sum_xq, best)
    q = torch.where(zero, 0, _signed(best_inverse * x, half) + half)
    return torch.where(zero, 0, scale), q.to(torch.int32)


def symmetric_scale_by_descent(x: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """``symmetric_scale`` with the weights x², which improves one q at a time; ``make_q3_quants``."""
    largest = furthest_from_zero(x)
    zero = largest.abs() < EPSILON
    weights = x * x
    weighted = weights * x
    q, sum_xq, sum_q2 = _signed_trial(x, weights, weighted, divide(-half, largest), half)
    for _ in range(_REFINEMENTS):
        for i in range(len(x)):
            rest_xq = sum_xq - weighted[i] * q[i]
            rest_q2 = sum_q2 - weights[i] * q[i] * q[i]
            trial = _signed(x[i] * rest_q2 / rest_xq, half)
            new_xq = rest_xq + weighted[i] * trial
            new_q2 = rest_q2 + weights[i] * trial * trial
            gains = new_xq * new_xq * sum_q2 > sum_xq * sum_xq * new_q2
            better = (rest_xq > 0) & (trial != q[i]) & (new_q2 > 0) & gains
            q[i] = torch.where(better, trial, q[i])
            sum_xq = torch.where(better, new_xq, sum_xq)
            sum_q2 = torch.where(better, new_q2, sum_q2)
    scale = torch.where(~zero & (sum_q2 > 0), sum_xq / sum_q2, 0)
    return scale, torch.where(zero, 0, q + half).to(torch.int32)


def _signed_trial(
    x: Tensor, weights: Tensor, weighted: Tensor, inverse: Tensor, half: int
) -> tuple[Tensor, Tensor, Tensor]:
    """q for an inverse scale, and its sums of ``w x q`` and ``w q²``; ``weighted`` is ``w x``."""
    q = _signed(inverse * x, half)
    products = x.new_empty(len(x), 2, *x.shape[1:])
    torch.mul(weighted, q, out=products[:, 0])
    torch.mul(weights, q, out=products[:, 1]).mul_(q)
    sum_xq, sum_q2 = ordered_sum(products)
    return q, sum_xq, sum_q2


def _signed(values: Tensor, half: int) -> Tensor:
    """The nearest integers in -half … half - 1, as floats."""
    return nearest_int(values).clamp_(-half, half - 1).to(torch.float32)


def positive_scale(x: Tensor, weights: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """``x ≈ scale * q`` for non-negative x, q in 0 … top → (scale, q); ``make_qp_quants``.

    Chooses among nine inverse scales, then improves one q at a time. q is what a byte keeps of it: that of an
    x below zero exceeds ``top``.
    """
    largest = torch.where(x > 0, x, 0).amax(0)
    zero = largest < EPSILON
    inverse = divide(top, largest)
    q = _byte(nearest_int(inverse * x))
    best = _squares(x, weights, divide(1, inverse), q)
    for i in (*range(-4, 0), *range(1, 5)):
        trial_inverse = divide(float(np.float32(0.1) * np.float32(i) + np.float32(top)), largest)
        trial = nearest_int(trial_inverse * x).clamp(max=top).to(torch.float32)
        error = _squares(x, weights, divide(1, trial_inverse), trial)
        better = error < best
        best = torch.where(better, error, best)
        inverse = torch.where(better, trial_inverse, inverse)
    level = nearest_int(inverse * x).clamp(max=top)
    weighted, unwrapped = weights * x, level.to(torch.float32)
    sum_xq, sum_q2 = ordered_sum(torch.stack([weighted * unwrapped, weights * unwrapped * unwrapped], 1))
    q = _byte(level)
    for _ in range(_REFINEMENTS):
        for i in range(len(x)):
            rest_xq = sum_xq - weighted[i] * q[i]
            rest_q2 = sum_q2 - weights[i] * q[i] * q[i]
            level = nearest_int(x[i] * rest_q2 / rest_xq).clamp(max=top)
            trial = level.to(torch.float32)
            new_xq = rest_xq + weighted[i] * trial
            new_q2 = rest_q2 + weights[i] * trial * trial
            gains = new_xq * new_xq * sum_q2 > sum_xq * sum_xq * new_q2
            better = (rest_xq > 0) & (rest_q2 > 0) & (trial != q[i]) & gains
            q[i] = torch.where(better, _byte(level), q[i])
            sum_xq = torch.where(better, new_xq, sum_xq)
            sum_q2 = torch.where(better, new_q2, sum_q2)
    scale = torch.where(~zero & (sum_q2 > 0), sum_xq / sum_q2, 0)
    return scale, torch.where(zero, 0, q).to(torch.int32)


def _byte(level: Tensor) -> Tensor:
    return (level & 255).to(torch.float32)


def _squares(x: Tensor, weights: Tensor, scale: Tensor, q: Tensor) -> Tensor:
    difference = x - scale * q
    return ordered_sum(weights * difference * difference)
