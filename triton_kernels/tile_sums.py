"""Sums of tensor-core products of 16-row tiles with up to 8 N int8 activation vectors: the matmul's loop.

The warps of a program share out the steps of a row; every thread keeps its warp's partial sums in registers
(4 of each tile and eight columns), and one pass over the warps adds them at the end, always in one order.
"""

import triton
import triton.language as tl

from realizar_torch.triton_kernels.blocks import block_size
from realizar_torch.triton_kernels.fragments import (
    factor_of,
    inner_block,
    load_fragment,
    minimums,
    minimums_of,
    paired,
    run_size,
    scales_of,
    signed,
    step_blocks,
    words_of,
)
from realizar_torch.triton_kernels.primitives import wait_for_predecessor
from realizar_torch.triton_kernels.tensor_core import (
    MAGIC,
    hold_loads,
    load_vector,
    multiply_int8,
    multiply_tf32,
    scaled,
)


@triton.jit
def tile_rows(weight, row_stride, first_row, n_rows, ALIGN: tl.constexpr, WARPS: tl.constexpr):
    """Byte pointers ``[threads]`` of rows g and g + 8 of a tile. Rows past the end read the last one, and are
    not stored.
    """
    row = first_row + tl.arange(0, 32 * WARPS) % 32 // 4
    stride = tl.multiple_of(row_stride, ALIGN)
    upper = weight + tl.minimum(row, n_rows - 1).to(tl.int64) * stride
    return upper, weight + tl.minimum(row + 8, n_rows - 1).to(tl.int64) * stride


@triton.jit
def _words(pointer, COUNT: tl.constexpr):
    """COUNT fp32 words at each pointer, aligned to their size."""
    bits = load_vector(pointer, COUNT, 4 * COUNT)
    values = ()
    for i in tl.static_range(COUNT):
        values = values + (bits[i].to(tl.float32, bitcast=True),)
    return values


@triton.jit
def _block_of_step(first, i, blocks, FMT: tl.constexpr):
    """Which 32 activations of a row are number i (0 to 7) of the step at block ``first``."""
    if step_blocks(FMT) == 8:
        return inner_block(first, i, blocks, FMT)
    else:
        return first * 8 + i


@triton.jit
def _activations(xq, first, blocks, part: tl.constexpr, FMT: tl.constexpr):
    """Of half a step: a tuple with the right operand of each run, for column g of the group at ``xq``."""
    lane = tl.arange(0, first.shape[0]) % 32
    RUN: tl.constexpr = run_size(FMT)
    operands = ()
    for i in tl.static_range(4):
        block = xq + _block_of_step(first, 4 * part + i, blocks, FMT) * 256
        if paired(FMT):
            operands = operands + (load_vector(block + lane * 8, 2, 8),)
        else:
            at = block + (lane // 4 * 32 + lane % 4 * 4)
            words = load_vector(at, 1, 4) + load_vector(at + 16, 1, 4)
            if RUN == 16:
                operands = operands + ((words[0],), (words[1],))
            else:
                operands = operands + (words,)
    return operands


@triton.jit
def _scales_of_columns(xscale, first, blocks, part: tl.constexpr, FMT: tl.constexpr):
    """The activation scales of half a step, of columns 2 t and 2 t + 1: four pairs."""
    t = tl.arange(0, first.shape[0]) % 4
    pairs = ()
    for i in tl.static_range(4):
        block = _block_of_step(first, 4 * part + i, blocks, FMT)
        pairs = pairs + (_words(xscale + (block * 8 + 2 * t), 2),)
    return pairs


@triton.jit
def _sums_of_column(xsums, first, blocks, part: tl.constexpr, FMT: tl.constexpr):
    """Activation sums t and t + 4 of the eight that the minimums number ``part`` belong to, of column g, each
    in two words of tf32 precision: (upper t, upper t + 4), (the rest of both).
    """
    lane = tl.arange(0, first.shape[0]) % 32
    g, t = lane // 4, lane % 4
    if minimums(FMT) == 16:
        at = xsums + ((first * 8 + 4 * part + t // 2) * 16 + 2 * g + t % 2)
        low, high = _words(at, 1)[0], _words(at + 32, 1)[0]
    else:
        low, high = _pair_sum(xsums, first, t, g, blocks, FMT), _pair_sum(xsums, first, t + 4, g, blocks, FMT)
    upper = low.to(tl.int32, bitcast=True) & -0x2000, high.to(tl.int32, bitcast=True) & -0x2000
    rest_low = low - upper[0].to(tl.float32, bitcast=True)
    rest_high = high - upper[1].to(tl.float32, bitcast=True)
    return upper, (rest_low.to(tl.int32, bitcast=True), rest_high.to(tl.int32, bitcast=True))


@triton.jit
def _pair_sum(xsums, first, i, g, blocks, FMT: tl.constexpr):
    """The sum of 32 activations of column g: block i of the step's eight."""
    halves = _words(xsums + (_block_of_step(first, i, blocks, FMT) * 16 + 2 * g), 2)
    return halves[0] + halves[1]


@triton.jit
def _group(xq, xscale, xsums, n, groups, blocks, FMT: tl.constexpr):
    """Where the activations of a group of eight columns begin (grouped.py), or those of the last group."""
    STEP: tl.constexpr = block_size(FMT) // 32 * 8
    first = tl.minimum(n, groups - 1) * blocks
    return xq + first * (32 * STEP), xscale + first * STEP, xsums + first * (2 * STEP)


@triton.jit
def _bits(low, high):
    return low.to(tl.int32, bitcast=True), high.to(tl.int32, bitcast=True)


@triton.jit
def _add_products(
    total, start: tl.constexpr, upper, lower, upper_scales, lower_scales, operands, xscales,
    part: tl.constexpr, FMT: tl.constexpr,
):  # fmt: skip
    """Four registers of ``total`` plus the products of half a step of a tile (upper: row g, lower: g + 8)."""
    RUN: tl.constexpr = run_size(FMT)
    t = tl.arange(0, total[0].shape[0]) % 4
    c0, c1, c2, c3 = total[start], total[start + 1], total[start + 2], total[start + 3]
    for i in tl.static_range(128 // RUN):
        first = words_of(upper, part * (128 // RUN) + i, t, FMT)
        second = words_of(lower, part * (128 // RUN) + i, t, FMT)
        if RUN == 32:
            left = (first[0], second[0], first[1], second[1])
        else:
            left = (first[0], second[0])
        product = multiply_int8(left, operands[i], signed(FMT))
        s0, s1 = upper_scales[part * (128 // RUN) + i], lower_scales[part * (128 // RUN) + i]
        xe, xo = xscales[i * RUN // 32]
        c0 = tl.fma(scaled(product[0], s0, s0 * -MAGIC), xe, c0)
        c1 = tl.fma(scaled(product[1], s0, s0 * -MAGIC), xo, c1)
        c2 = tl.fma(scaled(product[2], s1, s1 * -MAGIC), xe, c2)
        c3 = tl.fma(scaled(product[3], s1, s1 * -MAGIC), xo, c3)
    return c0, c1, c2, c3


@triton.jit
def add_step(
    total, raw, first, blocks, xq, xscale, xsums, first_group, groups,
    FMT: tl.constexpr, TILES: tl.constexpr, N: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """``total`` (N x TILES x 4 registers) plus the step of ``raw`` (2 TILES rows)."""
    scales = ()
    for r in tl.static_range(2 * TILES):
        scales = scales + (scales_of(raw[r], first, blocks, WHOLE, FMT),)
    last = tl.minimum(first, blocks - 1)
    for part in tl.static_range(2):
        updated = ()
        for n in tl.static_range(N):
            group = _group(xq, xscale, xsums, first_group + n, groups, blocks, FMT)
            operands = _activations(group[0], last, blocks, part, FMT)
            xscales = _scales_of_columns(group[1], last, blocks, part, FMT)
            for tile in tl.static_range(TILES):
                updated = updated + _add_products(
                    total, 4 * (n * TILES + tile), raw[2 * tile], raw[2 * tile + 1], scales[2 * tile],
                    scales[2 * tile + 1], operands, xscales, part, FMT,
                )  # fmt: skip
        total = updated
    if minimums(FMT) > 0:
        updated = ()
        for n in tl.static_range(N):
            group = _group(xq, xscale, xsums, first_group + n, groups, blocks, FMT)
            sums = ()
            for part in tl.static_range(minimums(FMT) // 8):
                sums = sums + (_sums_of_column(group[2], last, blocks, part, FMT),)
            for tile in tl.static_range(TILES):
                updated = updated + _subtract_minimums(
                    total, 4 * (n * TILES + tile), raw[2 * tile], raw[2 * tile + 1], sums, first, blocks,
                    FMT, WHOLE,
                )  # fmt: skip
        total = updated
    return total


@triton.jit
def _subtract_minimums(
    total, start: tl.constexpr, upper, lower, sums, first, blocks, FMT: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """Four registers of ``total`` minus factor * (minimums x sums of activations), a product in tf32 of exact
    minimums and of sums in two parts.
    """
    t = tl.arange(0, total[0].shape[0]) % 4
    zero = tl.zeros(total[0].shape, tl.float32)
    product = (zero, zero, zero, zero)
    for part in tl.static_range(minimums(FMT) // 8):
        above = minimums_of(upper, first, blocks, part, t, WHOLE, FMT)
        below = minimums_of(lower, first, blocks, part, t, WHOLE, FMT)
        left = _bits(above[0], below[0]) + _bits(above[1], below[1])
        product = multiply_tf32(left, sums[part][0], multiply_tf32(left, sums[part][1], product))
    f0, f1 = -factor_of(upper, first, blocks, WHOLE, FMT), -factor_of(lower, first, blocks, WHOLE, FMT)
    return _scale_and_add(total, start, product, f0, f1)


@triton.jit
def _scale_and_add(total, start: tl.constexpr, product, upper, lower):
    """Four registers of ``total`` plus the product of factors of rows g and g + 8 with ``product``."""
    c0, c1 = tl.fma(upper, product[0], total[start]), tl.fma(upper, product[1], total[start + 1])
    c2, c3 = tl.fma(lower, product[2], total[start + 2]), tl.fma(lower, product[3], total[start + 3])
    return c0, c1, c2, c3


@triton.jit
def _load_step(
    rows, first, blocks, FMT: tl.constexpr, PLANAR: tl.constexpr, ALIGN: tl.constexpr
):  # fmt: skip
    t = tl.arange(0, rows[0].shape[0]) % 4
    raw = ()
    for r in tl.static_range(len(rows)):
        raw = raw + (load_fragment(rows[r], first, blocks, t, FMT, PLANAR, ALIGN),)
    return raw


@triton.jit
def tile_sums(
    rows, blocks, xq, xscale, xsums, first_group, groups,
    FMT: tl.constexpr, PLANAR: tl.constexpr, ALIGN: tl.constexpr, N: tl.constexpr, WARPS: tl.constexpr,
    WHOLE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """rows · dequantized int8 activations of N groups: N x tiles x 4 tensors ``[threads]``, not summed over
    warps.

    rows: two pointers per tile; activations as in grouped.py. The next step's bytes are on their way while
    one is computed, and the first before the activations' producer has finished (DEPENDENT).
    """
    TILES: tl.constexpr = len(rows) // 2
    BLOCKS: tl.constexpr = step_blocks(FMT)
    first = tl.arange(0, 32 * WARPS) // 32 * BLOCKS
    raw = _load_step(rows, tl.minimum(first, blocks - 1), blocks, FMT, PLANAR, ALIGN)
    wait_for_predecessor(DEPENDENT)
    total = ()
    for _ in tl.static_range(N * TILES * 4):
        total = total + (tl.zeros([32 * WARPS], tl.float32),)
    for start in range(0, blocks, BLOCKS * WARPS):
        following = tl.minimum(first + (start + BLOCKS * WARPS), blocks - 1)
        ahead = _load_step(rows, following, blocks, FMT, PLANAR, ALIGN)
        hold_loads(first)
        total = add_step(
            total, raw, first + start, blocks, xq, xscale, xsums, first_group, groups, FMT, TILES, N, WHOLE
        )
        raw = ahead
    return total


@triton.jit
def over_warps(total, n: tl.constexpr, TILES: tl.constexpr, WARPS: tl.constexpr):
    """The sums over warps of columns 8 n …: ``[32 lanes, 2, 2]`` for a tile, with a last axis for two.

    Element (4 g + t, i, c) is row g + 8 i, column 2 t + c.
    """
    START: tl.constexpr = 4 * n * TILES
    sums = _tile(total, START)
    if TILES == 2:
        sums = tl.reshape(tl.join(sums, _tile(total, START + 4)), [WARPS, 32, 2, 2, 2])
    else:
        sums = tl.reshape(sums, [WARPS, 32, 2, 2])
    return tl.sum(sums, 0)


@triton.jit
def _tile(total, START: tl.constexpr):
    return tl.join(tl.join(total[START], total[START + 2]), tl.join(total[START + 1], total[START + 3]))
