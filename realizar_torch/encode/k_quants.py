"""Super-blocks of 256 whose sub-blocks have small integer scales: Q2_K … Q6_K.

First every sub-block finds its own scale, then the scales are quantized together, and then the values again
with the scales as stored. A sub-block whose stored scale is zero keeps the values of the first search.

The scale of a sub-block can be below zero (rounding, where one value has all the importance). ggml keeps its
level as a byte, -2 as 254, whose bits beyond those of the field go into another field of the block.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from realizar_torch.encode.arithmetic import divide, furthest_from_zero, nearest_int, ordered_sum, sqrt
from realizar_torch.encode.blocks import k4_fields, pack_bits, pack_k4_scales
from realizar_torch.encode.search import (
    EPSILON,
    positive_scale,
    scale_and_minimum,
    symmetric_scale,
    symmetric_scale_by_descent,
)


def _q2_k(x: Tensor, importance: Tensor | None, per_row: int) -> dict[str, Tensor]:
    sub = _sub_blocks(x, 16)
    if importance is None:
        scales, minima, q = scale_and_minimum(sub, sub.abs(), 3, -0.5, 0.1, 15, absolute=True)
        sums = None
    else:
        weights = _weights(x, sub, importance, 1)
        scales, minima, q = scale_and_minimum(sub, weights, 3, -0.9, 0.05, 36)
        sums = ordered_sum(weights)
    d, dmin, ls, lm = _levels_of_both(scales, minima, sums, 15)
    stored = (ls | (lm << 4)) & 255
    q = _requantized(sub, q, _half(d) * (stored & 15), _half(dmin) * (stored >> 4), 3)
    return {
        "d": d,
        "dmin": dmin,
        "scales": stored.T.to(torch.uint8),
        "qs": pack_bits(_flat(q), 32, 2),
    }


def _q3_k(x: Tensor, importance: Tensor | None, per_row: int) -> dict[str, Tensor]:
    sub = _sub_blocks(x, 16)
    if importance is None:
        scales, q = symmetric_scale_by_descent(sub, 4)
        largest = furthest_from_zero(scales)
        found = largest != 0
        inverse = divide(-32, largest)
        d = torch.where(found, divide(1, inverse), 0)
        ls = nearest_int(inverse * scales).to(torch.int8).clamp(-32, 31).to(torch.int32) + 32
        ls = torch.where(found, ls, 0)
    else:
        weights = _weights(x, sub, importance, 2)
        scales, q = symmetric_scale(sub, weights, 4)
        d, ls = symmetric_scale(scales, ordered_sum(weights), 32)
    q = _requantized_signed(sub, q, _half(d) * (ls - 32), 4)
    low, levels = _flat(q), ls.T
    return {
        "d": d,
        "hmask": pack_bits(low >> 2, 32, 1),
        "qs": pack_bits(low & 3, 32, 2),
        "scales": torch.cat([pack_bits(levels & 15, 8, 4), pack_bits(levels >> 4, 4, 2)], -1),
    }


def _k4(
    top: int, first: float, steps: int, x: Tensor, importance: Tensor | None, per_row: int
) -> dict[str, Tensor]:
    """Q4_K and Q5_K: eight sub-blocks of 32, six-bit scales and minima."""
    sub = _sub_blocks(x, 32)
    if importance is None:
        mean = divide(ordered_sum(sub * sub), 32)
        scales, minima, q = scale_and_minimum(sub, sqrt(mean) + sub.abs(), top, first, 0.1, steps)
        sums = None
    else:
        weights = _weights(x, sub, importance, 2)
        scales, minima, q = scale_and_minimum(sub, weights, top, -0.9, 0.05, 36)
        sums = ordered_sum(weights)
    d, dmin, ls, lm = _levels_of_both(scales, minima, sums, 63)
    # ggml limits the levels everywhere but in Q4_K with importance
    if importance is None or top > 15:
        ls, lm = ls.clamp(max=63), lm.clamp(max=63)
    else:
        ls, lm = k4_fields(ls), k4_fields(lm)
    values = _flat(_requantized(sub, q, _half(d) * ls, _half(dmin) * lm, top))
    return {
        "d": d,
        "dmin": dmin,
        "scales": pack_k4_scales(ls.T, lm.T),
        "qs": pack_bits(values & 15, 32, 4),
        "qh": pack_bits(values >> 4, 32, 1),
    }


def _q6_k(x: Tensor, importance: Tensor | None, per_row: int) -> dict[str, Tensor]:
    sub = _sub_blocks(x, 16)
    scales, q = symmetric_scale(sub, None if importance is None else _sub_blocks(importance, 16), 32)
    largest = furthest_from_zero(scales)
    found = largest.abs() >= EPSILON
    inverse = divide(-128, largest)
    d = torch.where(found, divide(1, inverse), 0)
    ls = torch.where(found, nearest_int(inverse * scales).clamp(max=127).to(torch.int8), 0)
    q = torch.where(found, _requantized_signed(sub, q, _half(d) * ls, 32), 0)
    values = _flat(q)
    return {
        "d": d,
        "scales": ls.T,
        "ql": pack_bits(values & 15, 64, 4),
        "qh": pack_bits(values >> 4, 32, 2),
    }


def _sub_blocks(x: Tensor, size: int) -> Tensor:
    """``[256, blocks]`` → ``[size, sub-blocks, blocks]``."""
    return x.unflatten(0, (-1, size)).transpose(0, 1).contiguous()


def _flat(q: Tensor) -> Tensor:
    """``[size, sub-blocks, blocks]`` → ``[blocks, 256]``, in the order of the values."""
    return q.permute(2, 1, 0).flatten(1)


def _weights(x: Tensor, sub: Tensor, importance: Tensor, factor: int) -> Tensor:
    """``importance * sqrt(factor * mean square of the block + x²)``, as sub-blocks."""
    mean = divide(factor * ordered_sum(x * x), len(x))
    return _sub_blocks(importance, len(sub)) * sqrt(mean + sub * sub)


def _levels_of_both(
    scales: Tensor, minima: Tensor, sums: Tensor | None, top: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scales and minima ``[sub-blocks, blocks]``, quantized as one tensor → (d, dmin, their levels).

    ``sums``: the weights of a search, alike; None: the largest decides.
    """
    both = torch.stack([scales, minima], 1)
    if sums is None:
        d, levels = _positive_levels(both, top)
    else:
        d, levels = positive_scale(both, sums.unsqueeze(1), top)
    (d, dmin), (ls, lm) = d.unbind(), levels.unbind(1)
    return d, dmin, ls, lm


def _positive_levels(scales: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """The largest of ``scales [sub-blocks, ...]`` becomes ``top`` → (scale of scales, levels as bytes)."""
    largest = torch.where(scales > 0, scales, 0).amax(0)
    inverse = torch.where(largest > 0, divide(top, largest), 0)
    return divide(largest, top), nearest_int(inverse * scales) & 255


def _half(d: Tensor) -> Tensor:
    """``d`` as the block stores it."""
    return d.to(torch.float16).to(torch.float32)


def _requantized(sub: Tensor, q: Tensor, d: Tensor, minimum: Tensor, top: int) -> Tensor:
    levels = nearest_int((sub + minimum) / d).clamp(0, top)
    return torch.where(d != 0, levels, q)


def _requantized_signed(sub: Tensor, q: Tensor, d: Tensor, half: int) -> Tensor:
    levels = nearest_int(sub / d).clamp(-half, half - 1) + half
    return torch.where(d != 0, levels, q)


K_ENCODERS: dict[str, Callable[[Tensor, Tensor | None, int], dict[str, Tensor]]] = {
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": partial(_k4, 15, -1.0, 20),
    "Q5_K": partial(_k4, 31, -0.5, 15),
    "Q6_K": _q6_k,
}
