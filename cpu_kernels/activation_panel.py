"""Quantized activations in the order in which the int8 matmul reads them: a panel of several vectors.

For vectors ("columns") of ``width`` values, a multiple of COLUMNS of them: int8 q ``[width / 64, rounded up]
[columns][64]``, fp32 scales ``[width / 32][columns]``, and the kinds of sums that the weights' formats need,
each ``[width / 32][columns]`` or ``[width / 16][columns]`` words of 32 bits.
"""

import numpy as np

from realizar_torch.cpu_kernels.int8_quantize import quantized
from realizar_torch.cpu_kernels.jit import jit
from realizar_torch.cpu_kernels.memory import load_f32, store_f32, store_i32
from realizar_torch.cpu_kernels.simd import (
    i8x16_to_i32x16,
    load_f32x16,
    load_u8x16,
    low_bytes,
    store,
    sum_i32x16,
)

# Kinds of sums: minus the fp32 sum of 32 or 16 activations (for minima of weights), the int32 sum of 32 or 16
# q (for offsets of weights). A set of kinds has bit 1 << kind; a panel keeps them behind each other.
MINUS_SUM_32, MINUS_SUM_16, COUNT_32, COUNT_16 = range(4)
KINDS = 4
# Panels have a multiple of this many columns.
COLUMNS = 32
_BLOCK = 32


@jit(device=True)
def sums_bytes(width, columns):
    """Distance between two kinds of sums."""
    return width // 16 * 4 * columns


@jit(device=True)
def _store_block(first, second, factor, block, width, column, columns, kinds, q, scale, sums):
    """Store block ``block`` of a column: 32 int32 quants in two vectors, and their scale."""
    target = q + (block // 2 * columns + column) * 64 + block % 2 * _BLOCK
    store(target, low_bytes(first))
    store(target, low_bytes(second), 16)
    whole, half, step = 4 * (block * columns + column), 8 * block * columns + 4 * column, 4 * columns
    store_f32(scale, factor, whole)
    low, high = sum_i32x16(first), sum_i32x16(second)
    distance = sums_bytes(width, columns)
    if kinds & 1 << MINUS_SUM_32:
        total = factor * np.float32(low) + factor * np.float32(high)
        store_f32(sums + MINUS_SUM_32 * distance, -total, whole)
    if kinds & 1 << MINUS_SUM_16:
        store_f32(sums + MINUS_SUM_16 * distance, -(factor * np.float32(low)), half)
        store_f32(sums + MINUS_SUM_16 * distance, -(factor * np.float32(high)), half + step)
    if kinds & 1 << COUNT_32:
        store_i32(sums + COUNT_32 * distance, low + high, whole)
    if kinds & 1 << COUNT_16:
        store_i32(sums + COUNT_16 * distance, low, half)
        store_i32(sums + COUNT_16 * distance, high, half + step)


@jit(device=True)
def quantize_into_panel(x, first_block, last_block, width, column, columns, kinds, q, scale, sums):
    """Quantize the fp32 values of some blocks, the first of which is at ``x``, into a column."""
    for block in range(first_block, last_block):
        start = 4 * _BLOCK * (block - first_block)
        factor, first, second = quantized(load_f32x16(x, start), load_f32x16(x, start + 64))
        _store_block(first, second, factor, block, width, column, columns, kinds, q, scale, sums)


@jit(device=True)
def copy_into_panel(x_q, x_scale, width, column, columns, kinds, q, scale, sums):
    """Copy a vector of ``reference.quantize_activations``, padded to ``width`` values, into a column."""
    for block in range(width // _BLOCK):
        first = i8x16_to_i32x16(load_u8x16(x_q, _BLOCK * block))
        second = i8x16_to_i32x16(load_u8x16(x_q, _BLOCK * block + 16))
        factor = load_f32(x_scale, 4 * block)
        _store_block(first, second, factor, block, width, column, columns, kinds, q, scale, sums)


def panel_places(width: int, columns: int, bf16: bool) -> tuple[int, int, int]:
    """Offsets of scales and sums in a panel of up to ``width`` values, and its size in bytes."""
    if bf16:
        return 0, 0, 2 * width * columns
    scales = -(-width // 64) * 64 * columns
    sums = scales + width // _BLOCK * 4 * columns
    return scales, sums, sums + KINDS * (width // 16 * 4 * columns)
