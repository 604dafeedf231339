"""Products with weights in the fused prompt pass: threads take tiles of rows, each for a panel's columns.

A panel is a tuple (address, offset of scales, offset of sums, columns) of what ``activation_panel.py`` or
``bf16_matmul.py`` describe; from any of its columns on it is a panel of fewer columns, as far apart.
"""

import numpy as np

from realizar_torch.cpu_kernels.activation_panel import quantize_into_panel
from realizar_torch.cpu_kernels.bf16_matmul import bf16_into_panel
from realizar_torch.cpu_kernels.int8_tile import TILE_ROWS
from realizar_torch.cpu_kernels.jit import jit
from realizar_torch.cpu_kernels.memory import fetch_add_i64
from realizar_torch.cpu_kernels.native import call_native
from realizar_torch.cpu_kernels.step_vectors import activate_row, add_rows, copy_row, fill_row, multiply_row

_BLOCK = 32
# Distance between columns of a panel, of either kind, and between their scales or sums.
_COLUMN, _SCALE = 64, 4


@jit(device=True)
def plain_panel(c, number):
    """Of all columns: 0 for what most linears read, 1 for what the last one of an MLP reads."""
    return c.panels + number * c.panel_bytes, c.scales, c.sums, c.columns


@jit(device=True)
def expert_panel(c, number):
    """The same of each choice of an expert."""
    place = c.expert_panels + number * c.expert_panel_bytes
    return place, c.expert_scales, c.expert_sums, c.expert_columns


@jit(device=True)
def store_activations(c, i, panel, x, first, last, column):
    """Put fp32 blocks ``first`` to ``last`` of a column, the first at ``x``, into a panel."""
    place, scales, sums, columns = panel
    if c.bf16:
        bf16_into_panel(x, first, last, column, columns, place)
    else:
        scales, sums = place + scales, place + sums
        quantize_into_panel(x, first, last, i.padded, column, columns, i.kinds, place, scales, sums)


@jit(device=True)
def multiply_tile(panel, start, used, kernel, weight, row_bytes, bias, width, first, height, tile):
    """fp32 tile [used][TILE_ROWS] = rows ``first`` and on of a weight · columns ``start`` and on + bias.

    It is written up to a multiple of COLUMNS.
    """
    place, scales, sums, columns = panel
    scales, sums = place + scales + _SCALE * start, place + sums + _SCALE * start
    shape = (row_bytes, height, width, used, columns)
    call_native(kernel, (weight + first * row_bytes, *shape, place + _COLUMN * start, scales, sums, tile))
    if bias:
        for column in range(used):
            add_rows(tile + 4 * TILE_ROWS * column, bias + 4 * first, height)


@jit(device=True)
def linear(c, i, arena, counter):
    """target = weight · activations + bias."""
    tile = arena + c.tile
    while True:
        first = fetch_add_i64(counter, TILE_ROWS)
        if first >= i.rows:
            return
        height = min(TILE_ROWS, i.rows - first)
        operands = (i.kernel, i.weight, i.row_bytes, i.bias, i.width)
        multiply_tile(plain_panel(c, i.panel), 0, c.used, *operands, first, height, tile)
        for column in range(c.used):
            target = i.target + column * i.target_stride + 4 * first
            copy_row(tile + 4 * TILE_ROWS * column, height, target)


@jit(device=True)
def gated(c, i, arena, counter):
    """Panel 1 = act(weight · activations + bias) * (second_weight · activations + second_bias)."""
    while True:
        first = fetch_add_i64(counter, TILE_ROWS)
        if first >= i.padded:
            return
        panels = (plain_panel(c, 0), plain_panel(c, 1))
        gated_tile(c, i, arena, panels, 0, c.used, i.weight, i.second_weight, first)


@jit(device=True)
def gated_tile(c, i, arena, panels, start, used, weight, second_weight, first):
    """A tile of rows of ``gated``: a block of the next matmul's activations, straight into its panel."""
    source, target = panels
    tile, up = arena + c.tile, arena + c.second_tile
    height = max(0, min(TILE_ROWS, i.rows - first))
    if height:
        operands = (i.kernel, weight, i.row_bytes, i.bias, i.width)
        multiply_tile(source, start, used, *operands, first, height, tile)
        if second_weight:
            operands = (i.second_kernel, second_weight, i.second_row_bytes, i.second_bias, i.width)
            multiply_tile(source, start, used, *operands, first, height, up)
    block = first // _BLOCK
    for column in range(used):
        here = tile + 4 * TILE_ROWS * column
        activate_row(i.activation, here, height)
        if second_weight:
            multiply_row(here, up + 4 * TILE_ROWS * column, height)
        fill_row(here + 4 * height, TILE_ROWS - height, np.float32(0))
        store_activations(c, i, target, here, block, block + 1, start + column)
