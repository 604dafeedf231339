"""Dot products of BN packed rows with M activation vectors: the loops that every matvec kernel shares."""

import triton
import triton.language as tl

from realizar_torch.triton_kernels.decode import (
    block_size,
    decode_unit,
    group_of,
    has_minimum,
    planes,
    signed_quants,
    units,
    word_weights,
    zero_point,
)
from realizar_torch.triton_kernels.primitives import dp4a, split_words


@triton.jit
def zeros(M: tl.constexpr, BN: tl.constexpr, CB: tl.constexpr, U: tl.constexpr):
    """A tuple of M accumulators, one per activation vector (in registers, never indexed at run time)."""
    total = ()
    for _ in tl.static_range(M):
        total = total + (tl.zeros([BN, CB, U], tl.float32),)
    return total


@triton.jit
def row_pointers(weight, row_stride, rows, n_rows, BN: tl.constexpr):
    """Byte pointers ``[BN, 1, 1]`` of ``rows``; rows past the end read the last one, and are not stored."""
    rows = tl.minimum(rows, n_rows - 1).to(tl.int64)
    return tl.reshape(weight + rows * row_stride, [BN, 1, 1])


@triton.jit
def block_mask(block, blocks, WHOLE: tl.constexpr):
    """None when every tile of blocks is full, else which blocks exist."""
    if WHOLE:
        return None
    else:
        return block < blocks


@triton.jit
def int8_step(
    total, row, block, blocks, mask, xq, xscale, xsums,
    FMT: tl.constexpr, PLANAR: tl.constexpr, ALIGN: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """``total`` plus CB blocks of every row times the int8 activations.

    One plane of 16 weights adds  scale * (xscale * Σ q·xq) - (scale * zero + minimum) * xsums[group].
    xq ``[M, blocks * block_size / 4]`` int32 words, xscale one per 32, xsums one per 16.
    """
    GROUPS: tl.constexpr = block_size(FMT) // 16
    unit = tl.reshape(tl.arange(0, units(FMT)), [1, 1, units(FMT)])
    words, scales, minimums = decode_unit(row, block, unit, blocks, mask, FMT, PLANAR, ALIGN)
    for p in tl.static_range(planes(FMT)):
        w0, w1, w2, w3 = split_words(words[p])
        group = block * GROUPS + group_of(unit, p, FMT)
        offset = scales[p] * zero_point(FMT)
        if has_minimum(FMT):
            offset = minimums[p]
        updated = ()
        for m in tl.static_range(M):
            at = m * (blocks * GROUPS) + group
            pointer = tl.expand_dims(xq + at * 4, -1) + tl.arange(0, 4)
            if mask is None:
                x0, x1, x2, x3 = split_words(tl.load(pointer))
                xs = tl.load(xscale + at // 2)
            else:
                x0, x1, x2, x3 = split_words(tl.load(pointer, mask=tl.expand_dims(mask, -1), other=0))
                xs = tl.load(xscale + at // 2, mask=mask, other=0)
            dot = dp4a(w0, x0, tl.zeros_like(w0), signed_quants(FMT))
            dot = dp4a(w1, x1, dot, signed_quants(FMT))
            dot = dp4a(w2, x2, dot, signed_quants(FMT))
            dot = dp4a(w3, x3, dot, signed_quants(FMT))
            term = total[m] + scales[p] * (dot.to(tl.float32) * xs)
            if has_minimum(FMT) or zero_point(FMT) != 0:
                if mask is None:
                    term = term - offset * tl.load(xsums + at)
                else:
                    term = term - offset * tl.load(xsums + at, mask=mask, other=0)
            updated = updated + (term,)
        total = updated
    return total


@triton.jit
def int8_rows(
    weight, row_stride, rows, n_rows, blocks, xq, xscale, xsums,
    FMT: tl.constexpr, PLANAR: tl.constexpr, ALIGN: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, CB: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """M tensors ``[BN]`` fp32: rows · dequantized int8 activations."""
    row = row_pointers(weight, tl.multiple_of(row_stride, ALIGN), rows, n_rows, BN)
    total = zeros(M, BN, CB, units(FMT))
    for first in range(0, blocks, CB):
        block = tl.reshape(first + tl.arange(0, CB), [1, CB, 1])
        mask = block_mask(block, blocks, WHOLE)
        total = int8_step(total, row, block, blocks, mask, xq, xscale, xsums, FMT, PLANAR, ALIGN, M)
    return reduce_rows(total, M, BN)


@triton.jit
def reduce_rows(total, M: tl.constexpr, BN: tl.constexpr):
    """Each ``[BN, blocks, units]`` accumulator → ``[BN]``, in an order fixed by the launch shape."""
    sums = ()
    for m in tl.static_range(M):
        part = total[m]
        sums = sums + (tl.sum(tl.reshape(part, [BN, part.shape[1] * part.shape[2]]), 1),)
    return sums


@triton.jit
def float_step(
    total, row, block, blocks, mask, x, in_features,
    FMT: tl.constexpr, PLANAR: tl.constexpr, ALIGN: tl.constexpr, M: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """``total`` plus CB blocks of every row, each weight decoded exactly to fp32, times float activations.

    RAGGED: in_features ends inside a block; activations past it count as 0.
    """
    unit = tl.reshape(tl.arange(0, units(FMT)), [1, 1, units(FMT)])
    words, scales, minimums = decode_unit(row, block, unit, blocks, mask, FMT, PLANAR, ALIGN)
    for p in tl.static_range(planes(FMT)):
        four = split_words(words[p])
        first = block * block_size(FMT) + 16 * group_of(unit, p, FMT)
        for i in tl.static_range(4):
            if has_minimum(FMT):
                weights = word_weights(four[i], scales[p], minimums[p], FMT)
            else:
                weights = word_weights(four[i], scales[p], scales[p], FMT)
            column = tl.expand_dims(first + 4 * i, -1) + tl.arange(0, 4)
            updated = ()
            for m in tl.static_range(M):
                pointer = x + (m * in_features + column)
                if RAGGED:
                    values = tl.load(pointer, mask=column < in_features, other=0)
                elif mask is None:
                    values = tl.load(pointer)
                else:
                    values = tl.load(pointer, mask=tl.expand_dims(mask, -1), other=0)
                updated = updated + (total[m] + tl.sum(weights * values.to(tl.float32), 3),)
            total = updated
    return total


@triton.jit
def float_rows(
    weight, row_stride, rows, n_rows, blocks, x, in_features,
    FMT: tl.constexpr, PLANAR: tl.constexpr, ALIGN: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, CB: tl.constexpr,
    WHOLE: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """M tensors ``[BN]`` fp32: rows · activations, exact weights, fp32 accumulation."""
    row = row_pointers(weight, tl.multiple_of(row_stride, ALIGN), rows, n_rows, BN)
    total = zeros(M, BN, CB, units(FMT))
    for first in range(0, blocks, CB):
        block = tl.reshape(first + tl.arange(0, CB), [1, CB, 1])
        mask = block_mask(block, blocks, WHOLE)
        total = float_step(total, row, block, blocks, mask, x, in_features, FMT, PLANAR, ALIGN, M, RAGGED)
    return reduce_rows(total, M, BN)
