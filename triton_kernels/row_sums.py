"""Dot products of BN packed rows with M int8 vectors, and what they share with those of float ones.

A tile is CB blocks of a group of BN rows. Its tensors are ``[rows, lanes]``, one lane per unit of CB blocks
and as many as there are threads: a thread has its unit of every row, and nothing moves between threads inside
a loop. Groups and activation vectors are elements of tuples.
"""

import triton
import triton.language as tl

from realizar_torch.triton_kernels.blocks import (
    block_size,
    group_of,
    groups_ahead,
    has_minimum,
    has_sub_scales,
    lift,
    planes,
    planes_per_scale,
    signed_quants,
    units,
    zero_point,
)
from realizar_torch.triton_kernels.decode import decode_unit, load_unit
from realizar_torch.triton_kernels.primitives import (
    dp4a,
    keep_loads_ahead,
    load_scalar,
    split_words,
    wait_and_release,
)


@triton.jit
def zeros(COUNT: tl.constexpr, BN: tl.constexpr, LANES: tl.constexpr):
    """A tuple of COUNT accumulators (in registers, never indexed at run time)."""
    total = ()
    for _ in tl.static_range(COUNT):
        total = total + (tl.zeros([BN, LANES], tl.float32),)
    return total


@triton.jit
def row_pointers(weight, row_stride, first_row, n_rows, ALIGN: tl.constexpr, BN: tl.constexpr):
    """A group of BN rows: byte pointers ``[BN, 1]``. Rows past the end read the last one, and are not
    stored.
    """
    row = tl.minimum(first_row + tl.arange(0, BN), n_rows - 1).to(tl.int64)[:, None]
    return weight + row * tl.multiple_of(row_stride, ALIGN)


@triton.jit
def lane_position(first, FMT: tl.constexpr, CB: tl.constexpr):
    """(block, unit) ``[1, lanes]`` of the tile that starts at block ``first``."""
    lane = tl.arange(0, CB * units(FMT))[None, :]
    return first + lane // units(FMT), lane % units(FMT)


@triton.jit
def load_tile(
    groups, first, blocks, FMT: tl.constexpr, PLANAR: tl.constexpr, ALIGN: tl.constexpr, CB: tl.constexpr,
    WHOLE: tl.constexpr
):  # fmt: skip
    """The bytes of CB blocks of every row, from block ``first``: what ``load_unit`` returns, per group."""
    block, unit = lane_position(first, FMT, CB)
    if WHOLE:
        mask = None
    else:
        mask = block < blocks
    raw = ()
    for g in tl.static_range(len(groups)):
        raw = raw + (load_unit(groups[g], block, unit, blocks, mask, FMT, PLANAR, ALIGN),)
    return raw


@triton.jit
def load_activations(pointer, mask, OFFSET: tl.constexpr):
    """Four consecutive words of int8 activations, OFFSET words ahead: ``[1, lanes, 4]``."""
    words = tl.expand_dims(pointer, -1) + tl.arange(0, 4) + OFFSET
    if mask is None:
        return tl.load(words)
    else:
        return tl.load(words, mask=tl.expand_dims(mask, -1), other=0)


@triton.jit
def replace(items, index: tl.constexpr, value):
    """The tuple ``items`` with one element exchanged."""
    result = ()
    for i in tl.static_range(len(items)):
        if i == index:
            result = result + (value,)
        else:
            result = result + (items[i],)
    return result


@triton.jit
def decode_tile(raw, first, FMT: tl.constexpr, CB: tl.constexpr):
    """What ``decode_unit`` makes of a tile, per group."""
    _, unit = lane_position(first, FMT, CB)
    decoded = ()
    for g in tl.static_range(len(raw)):
        decoded = decoded + (decode_unit(raw[g], unit, FMT),)
    return decoded


@triton.jit
def load_vector(
    first, m: tl.constexpr, blocks, xq, xscale, xsums,
    FMT: tl.constexpr, CB: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """What a tile at block ``first`` is multiplied with: (words, scales, sums), ``[1, lanes]`` each.

    Four words a plane; per scale of the weights a scale (over the plane's lift) and the sum of its
    activations (none where no format fact needs it). xq ``[M, blocks * block_size / 4]`` int32 words, xscale
    one per 32, xsums one per 16.
    """
    GROUPS: tl.constexpr = block_size(FMT) // 16
    SHARED: tl.constexpr = planes_per_scale(FMT)
    block, unit = lane_position(first, FMT, CB)
    if WHOLE:
        mask = None
    else:
        mask = block < blocks
    at = block * GROUPS + group_of(unit, 0, FMT) + m * (blocks * GROUPS)
    words, scales, sums = (), (), ()
    for i in tl.static_range(planes(FMT) // SHARED):
        for p in tl.static_range(SHARED):
            plane = load_activations(xq + at * 4, mask, 4 * groups_ahead(FMT, i * SHARED + p))
            words = words + split_words(plane)
        ahead = groups_ahead(FMT, i * SHARED)
        scale = load_scalar(xscale, at // 2 + ahead // 2, mask) * (1.0 / lift(FMT, i * SHARED))
        scales = scales + (scale,)
        if zero_point(FMT) != 0 or has_minimum(FMT):
            total = load_scalar(xsums, at + ahead, mask)
            if SHARED == 2:
                total += load_scalar(xsums, at + ahead + 1, mask)
            sums = sums + (total,)
    return words, scales, sums


@triton.jit
def add_int8(total, decoded, x, m: tl.constexpr, M: tl.constexpr, FMT: tl.constexpr):
    """``total`` (groups × M) plus a decoded tile times vector m of the int8 activations.

    The weights of one scale add  d * s * (xscale / lift * Σ q·xq - zero * xsums) - dmin * m * xsums.
    """
    SHARED: tl.constexpr = planes_per_scale(FMT)
    vector, scales, sums = x
    for g in tl.static_range(len(decoded)):
        words, s, minimum, d, dmin = decoded[g]
        scaled = tl.zeros_like(d)
        shifted = scaled
        for i in tl.static_range(planes(FMT) // SHARED):
            dot = tl.zeros_like(d).to(tl.int32)
            for p in tl.static_range(SHARED):
                w = split_words(words[i * SHARED + p])
                for j in tl.static_range(4):
                    dot = dp4a(w[j], vector[4 * (i * SHARED + p) + j], dot, signed_quants(FMT))
            if zero_point(FMT) != 0:
                term = dot.to(tl.float32) * scales[i] - sums[i] * zero_point(FMT)
                if has_sub_scales(FMT):
                    term = s[i].to(tl.float32) * term
            elif has_sub_scales(FMT):
                # below 2^24 times the lift, and a multiple of it: exact in fp32
                term = (dot * s[i]).to(tl.float32) * scales[i]
            else:
                term = dot.to(tl.float32) * scales[i]
            scaled += term
            if has_minimum(FMT):
                if has_sub_scales(FMT):
                    shifted += minimum[i].to(tl.float32) * sums[i]
                else:
                    shifted += sums[i]
        updated = total[g * M + m] + d * scaled
        if has_minimum(FMT):
            updated -= dmin * shifted
        total = replace(total, g * M + m, updated)
    return total


@triton.jit
def add_tile(
    total, raw, first, blocks, xq, xscale, xsums,
    M: tl.constexpr, FMT: tl.constexpr, CB: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """``total`` (groups × M) plus the tile ``raw`` at block ``first`` times all vectors."""
    decoded = decode_tile(raw, first, FMT, CB)
    for m in tl.static_range(M):
        x = load_vector(first, m, blocks, xq, xscale, xsums, FMT, CB, WHOLE)
        total = add_int8(total, decoded, x, m, M, FMT)
    return total


@triton.jit
def int8_sums(
    groups, blocks, xq, xscale, xsums,
    FMT: tl.constexpr, PLANAR: tl.constexpr, ALIGN: tl.constexpr, M: tl.constexpr, CB: tl.constexpr,
    WHOLE: tl.constexpr, DEPENDENT: tl.constexpr, AHEAD: tl.constexpr, RELEASE: tl.constexpr,
):  # fmt: skip
    """rows · dequantized int8 activations, not summed over lanes: groups × M tensors ``[BN, lanes]`` fp32.

    The first tile of weights is on its way before the activations' producer has finished (DEPENDENT). AHEAD:
    so is the next tile before one is multiplied. RELEASE: see ``wait_and_release``.
    """
    raw = load_tile(groups, 0, blocks, FMT, PLANAR, ALIGN, CB, WHOLE)
    wait_and_release(RELEASE, DEPENDENT)
    if not DEPENDENT:
        # waiting is a barrier of its own
        keep_loads_ahead()
    total = zeros(len(groups) * M, groups[0].shape[0], CB * units(FMT))
    if AHEAD:
        last = 0
        for first in range(CB, blocks, CB):
            following = load_tile(groups, first, blocks, FMT, PLANAR, ALIGN, CB, WHOLE)
            keep_loads_ahead()
            total = add_tile(total, raw, first - CB, blocks, xq, xscale, xsums, M, FMT, CB, WHOLE)
            raw = following
            last = first
        total = add_tile(total, raw, last, blocks, xq, xscale, xsums, M, FMT, CB, WHOLE)
    else:
        total = add_tile(total, raw, 0, blocks, xq, xscale, xsums, M, FMT, CB, WHOLE)
        for first in range(CB, blocks, CB):
            raw = load_tile(groups, first, blocks, FMT, PLANAR, ALIGN, CB, WHOLE)
            total = add_tile(total, raw, first, blocks, xq, xscale, xsums, M, FMT, CB, WHOLE)
    return total


@triton.jit
def reduce_rows(total, group: tl.constexpr, M: tl.constexpr):
    """The accumulators of one group → M tensors ``[BN]``, in an order fixed by the launch shape."""
    sums = ()
    for m in tl.static_range(M):
        sums = sums + (tl.sum(total[group * M + m], 1),)
    return sums
