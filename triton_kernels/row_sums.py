"""Dot products of BN packed rows with M activation vectors: the loops that every matvec kernel shares."""

import triton
import triton.language as tl

from realizar_torch.triton_kernels.decode import (
    block_size,
    decode_unit,
    group_of,
    has_minimum,
    has_sub_scales,
    lift,
    planes,
    signed_quants,
    units,
    word_weights,
    zero_point,
)
from realizar_torch.triton_kernels.primitives import dp4a, load_scalar, split_words, wait_for_predecessor


@triton.jit
def zeros(M: tl.constexpr, BN: tl.constexpr, CB: tl.constexpr, U: tl.constexpr):
    """A tuple of M accumulators, one per activation vector (in registers, never indexed at run time)."""
    total = ()
    for _ in tl.static_range(M):
        total = total + (tl.zeros([U, CB, BN], tl.float32),)  # noqa: RUF005
    return total


@triton.jit
def row_pointers(weight, row_stride, rows, n_rows, BN: tl.constexpr):
    """Byte pointers ``[1, 1, BN]`` of ``rows``; rows past the end read the last one, and are not stored."""
    rows = tl.minimum(rows, n_rows - 1).to(tl.int64)
    return (weight + rows * row_stride)[None, None, :]


@triton.jit
def replace(items, index: tl.constexpr, value, count: tl.constexpr):
    """The tuple ``items`` with one element exchanged."""
    result = ()
    for i in tl.static_range(count):
        if i == index:
            result = result + (value,)  # noqa: RUF005
        else:
            result = result + (items[i],)  # noqa: RUF005
    return result


@triton.jit
def load_activations(pointer, mask):
    """Four consecutive words of int8 activations: ``[units, blocks, 1, 4]``."""
    words = tl.expand_dims(pointer, -1) + tl.arange(0, 4)
    if mask is None:
        return tl.load(words)
    else:
        return tl.load(words, mask=tl.expand_dims(mask, -1), other=0)


@triton.jit
def tile(
    row, first, blocks, FMT: tl.constexpr, PLANAR: tl.constexpr, ALIGN: tl.constexpr, CB: tl.constexpr,
    WHOLE: tl.constexpr
):  # fmt: skip
    """CB blocks of every row from block ``first``, decoded: what ``decode_unit`` returns."""
    block = (first + tl.arange(0, CB))[None, :, None]
    unit = tl.arange(0, units(FMT))[:, None, None]
    if WHOLE:
        mask = None
    else:
        mask = block < blocks
    return decode_unit(row, block, unit, blocks, mask, FMT, PLANAR, ALIGN)


@triton.jit
def add_int8(
    total, decoded, first, blocks, xq, xscale, xsums,
    FMT: tl.constexpr, M: tl.constexpr, CB: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """``total`` plus a decoded tile times the int8 activations.

    One plane of 16 weights adds  d * s * (xscale / lift * Σ q·xq - zero * xsums) - dmin * m * xsums. xq ``[M,
    blocks * block_size / 4]`` int32 words, xscale one per 32, xsums one per 16.
    """
    GROUPS: tl.constexpr = block_size(FMT) // 16
    words, s, minimum, d, dmin = decoded
    block = (first + tl.arange(0, CB))[None, :, None]
    unit = tl.arange(0, units(FMT))[:, None, None]
    if WHOLE:
        mask = None
    else:
        mask = block < blocks
    for m in tl.static_range(M):
        scaled = tl.zeros_like(d)
        shifted = tl.zeros_like(d)
        for p in tl.static_range(planes(FMT)):
            at = block * GROUPS + group_of(unit, p, FMT) + m * (blocks * GROUPS)
            w0, w1, w2, w3 = split_words(words[p])
            x0, x1, x2, x3 = split_words(load_activations(xq + at * 4, mask))
            dot = dp4a(w0, x0, tl.zeros_like(w0), signed_quants(FMT))
            dot = dp4a(w1, x1, dot, signed_quants(FMT))
            dot = dp4a(w2, x2, dot, signed_quants(FMT))
            dot = dp4a(w3, x3, dot, signed_quants(FMT))
            xs = load_scalar(xscale + at // 2, mask) * (1.0 / lift(FMT, p))
            if zero_point(FMT) != 0:
                term = dot.to(tl.float32) * xs - load_scalar(xsums + at, mask) * zero_point(FMT)
                if has_sub_scales(FMT):
                    term = s[p].to(tl.float32) * term
                scaled += term
            elif has_sub_scales(FMT):
                # below 2^24 in magnitude, so exact in fp32
                scaled += (dot * s[p]).to(tl.float32) * xs
            else:
                scaled += dot.to(tl.float32) * xs
            if has_minimum(FMT):
                if has_sub_scales(FMT):
                    shifted += minimum[p].to(tl.float32) * load_scalar(xsums + at, mask)
                else:
                    shifted += load_scalar(xsums + at, mask)
        updated = total[m] + d * scaled
        if has_minimum(FMT):
            updated -= dmin * shifted
        total = replace(total, m, updated, M)
    return total


@triton.jit
def int8_rows(
    weight, row_stride, rows, n_rows, blocks, xq, xscale, xsums,
    FMT: tl.constexpr, PLANAR: tl.constexpr, ALIGN: tl.constexpr, M: tl.constexpr, BN: tl.constexpr,
    CB: tl.constexpr,
    WHOLE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """M tensors ``[BN]`` fp32: rows · dequantized int8 activations.

    The first tile of weights is on its way before the activations' producer has finished (DEPENDENT).
    """
    row = row_pointers(weight, tl.multiple_of(row_stride, ALIGN), rows, n_rows, BN)
    decoded = tile(row, 0, blocks, FMT, PLANAR, ALIGN, CB, WHOLE)
    wait_for_predecessor(DEPENDENT)
    total = zeros(M, BN, CB, units(FMT))
    total = add_int8(total, decoded, 0, blocks, xq, xscale, xsums, FMT, M, CB, WHOLE)
    for first in range(CB, blocks, CB):
        decoded = tile(row, first, blocks, FMT, PLANAR, ALIGN, CB, WHOLE)
        total = add_int8(total, decoded, first, blocks, xq, xscale, xsums, FMT, M, CB, WHOLE)
    return reduce_rows(total, M, BN)


@triton.jit
def int8_row_pairs(
    first_weight, first_stride, second_weight, second_stride, rows, n_rows, blocks, xq, xscale, xsums,
    FMT: tl.constexpr, PLANAR: tl.constexpr, ALIGN: tl.constexpr, M: tl.constexpr, BN: tl.constexpr,
    CB: tl.constexpr,
    WHOLE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """``int8_rows`` of the same rows of two weights in one loop: both streams are in flight together."""
    row1 = row_pointers(first_weight, tl.multiple_of(first_stride, ALIGN), rows, n_rows, BN)
    row2 = row_pointers(second_weight, tl.multiple_of(second_stride, ALIGN), rows, n_rows, BN)
    decoded1 = tile(row1, 0, blocks, FMT, PLANAR, ALIGN, CB, WHOLE)
    decoded2 = tile(row2, 0, blocks, FMT, PLANAR, ALIGN, CB, WHOLE)
    wait_for_predecessor(DEPENDENT)
    total1 = add_int8(zeros(M, BN, CB, units(FMT)), decoded1, 0, blocks, xq, xscale, xsums, FMT, M, CB, WHOLE)
    total2 = add_int8(zeros(M, BN, CB, units(FMT)), decoded2, 0, blocks, xq, xscale, xsums, FMT, M, CB, WHOLE)
    for first in range(CB, blocks, CB):
        decoded1 = tile(row1, first, blocks, FMT, PLANAR, ALIGN, CB, WHOLE)
        decoded2 = tile(row2, first, blocks, FMT, PLANAR, ALIGN, CB, WHOLE)
        total1 = add_int8(total1, decoded1, first, blocks, xq, xscale, xsums, FMT, M, CB, WHOLE)
        total2 = add_int8(total2, decoded2, first, blocks, xq, xscale, xsums, FMT, M, CB, WHOLE)
    return reduce_rows(total1, M, BN), reduce_rows(total2, M, BN)


@triton.jit
def reduce_rows(total, M: tl.constexpr, BN: tl.constexpr):
    """Each ``[units, blocks, BN]`` accumulator → ``[BN]``, in an order fixed by the launch shape."""
    sums = ()
    for m in tl.static_range(M):
        part = total[m]
        sums = sums + (tl.sum(tl.reshape(part, [part.shape[0] * part.shape[1], BN]), 0),)  # noqa: RUF005
    return sums


@triton.jit
def add_float(
    total, decoded, first, blocks, x, in_features,
    FMT: tl.constexpr, M: tl.constexpr, CB: tl.constexpr, WHOLE: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """``total`` plus a decoded tile, each weight exact in fp32, times float activations ``x [M,
    in_features]``.

    RAGGED: in_features ends inside a block; activations past it count as 0.
    """
    words, s, minimum, d, dmin = decoded
    block = (first + tl.arange(0, CB))[None, :, None]
    unit = tl.arange(0, units(FMT))[:, None, None]
    for p in tl.static_range(planes(FMT)):
        four = split_words(words[p])
        start = block * block_size(FMT) + 16 * group_of(unit, p, FMT)
        for i in tl.static_range(4):
            weights = word_weights(four[i], s, minimum, d, dmin, p, FMT)
            column = tl.expand_dims(start + 4 * i, -1) + tl.arange(0, 4)
            updated = ()
            for m in tl.static_range(M):
                pointer = x + (m * in_features + column)
                if RAGGED:
                    values = tl.load(pointer, mask=column < in_features, other=0)
                elif WHOLE:
                    values = tl.load(pointer)
                else:
                    values = tl.load(pointer, mask=tl.expand_dims(block < blocks, -1), other=0)
                updated = updated + (total[m] + tl.sum(weights * values.to(tl.float32), 3),)  # noqa: RUF005
            total = updated
    return total


@triton.jit
def float_rows(
    weight, row_stride, rows, n_rows, blocks, x, in_features,
    FMT: tl.constexpr, PLANAR: tl.constexpr, ALIGN: tl.constexpr, M: tl.constexpr, BN: tl.constexpr,
    CB: tl.constexpr,
    WHOLE: tl.constexpr, RAGGED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """M tensors ``[BN]`` fp32: rows · activations, exact weights, fp32 accumulation."""
    row = row_pointers(weight, tl.multiple_of(row_stride, ALIGN), rows, n_rows, BN)
    wait_for_predecessor(DEPENDENT)
    total = zeros(M, BN, CB, units(FMT))
    for first in range(0, blocks, CB):
        decoded = tile(row, first, blocks, FMT, PLANAR, ALIGN, CB, WHOLE)
        total = add_float(total, decoded, first, blocks, x, in_features, FMT, M, CB, WHOLE, RAGGED)
    return reduce_rows(total, M, BN)
