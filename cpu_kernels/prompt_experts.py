"""Mixtures of experts in the fused prompt pass: columns stand by expert, and each expert multiplies its own.

Products are added in the order of the shares, so that a column's result does not depend on its neighbours.
"""

import numpy as np

from realizar_torch.cpu_kernels.attention import dot
from realizar_torch.cpu_kernels.int8_tile import TILE_ROWS
from realizar_torch.cpu_kernels.jit import jit
from realizar_torch.cpu_kernels.matmul_float import LANES, dot_products
from realizar_torch.cpu_kernels.memory import fetch_add_i64, load_f32, load_i64, store_f32, store_i64
from realizar_torch.cpu_kernels.prompt_linears import expert_panel, gated_tile, multiply_tile
from realizar_torch.cpu_kernels.step_vectors import add_scaled, fill_row, scale_row

# Columns that read a router together.
_TOGETHER = 4


@jit(device=True)
def score(c, i, counter):
    """target = weight · source for each column, fp32 rows ``width`` long."""
    while True:
        first = fetch_add_i64(counter, _TOGETHER)
        if first >= c.used:
            return
        count, size = min(_TOGETHER, c.used - first), 4 * i.width
        source, target = i.source + first * i.source_stride, i.target + first * i.target_stride
        if i.width % LANES == 0:
            dot_products(i.weight, i.rows, source, count, size, 0, target, i.target_stride)
        else:
            for column in range(count):
                for row in range(i.rows):
                    product = dot(i.weight + row * size, source + column * size, i.width)
                    store_f32(target + column * i.target_stride, product, 4 * row)


@jit(device=True)
def group(c, i, arena):
    """Where each choice stands when all are in the order of their experts, and where each expert's end."""
    ends, places, count = arena + c.ends, arena + c.places, c.used * i.used
    for expert in range(i.experts):
        store_i64(ends, 0, 8 * expert)
    for choice in range(count):
        place = 8 * load_i64(c.chosen, 8 * choice)
        store_i64(ends, load_i64(ends, place) + 1, place)
    start = 0
    for expert in range(i.experts):
        start += load_i64(ends, 8 * expert)
        store_i64(ends, start - load_i64(ends, 8 * expert), 8 * expert)
    # from where an expert's choices start, each is behind the last one
    for choice in range(count):
        place = 8 * load_i64(c.chosen, 8 * choice)
        store_i64(places, load_i64(ends, place), 8 * choice)
        store_i64(ends, load_i64(ends, place) + 1, place)


@jit(device=True)
def _columns_of(c, arena, expert):
    """An expert's first column and how many it has."""
    start = load_i64(arena + c.ends, 8 * (expert - 1)) if expert else 0
    return start, load_i64(arena + c.ends, 8 * expert) - start


@jit(device=True)
def gated_experts(c, i, arena, counter):
    """``gated`` of each choice, from expert panel 0 to expert panel 1."""
    tiles = i.padded // TILE_ROWS
    while True:
        unit = fetch_add_i64(counter, 1)
        if unit >= i.experts * tiles:
            return
        expert, first = unit // tiles, unit % tiles * TILE_ROWS
        start, used = _columns_of(c, arena, expert)
        if used:
            weight = i.weight + expert * i.rows * i.row_bytes
            second = i.second_weight + expert * i.rows * i.second_row_bytes
            panels = (expert_panel(c, 0), expert_panel(c, 1))
            gated_tile(c, i, arena, panels, start, used, weight, second, first)


@jit(device=True)
def mix_experts(c, i, arena, counter):
    """target = Σ share · (the expert's weight · its activations), plus a shared expert's share of target."""
    while True:
        first = fetch_add_i64(counter, TILE_ROWS)
        if first >= i.rows:
            return
        height = min(TILE_ROWS, i.rows - first)
        for expert in range(i.experts):
            start, used = _columns_of(c, arena, expert)
            if used:
                # what it writes behind its columns belongs to those that follow
                weight, tile = (
                    i.weight + expert * i.rows * i.row_bytes,
                    arena + c.products + 4 * TILE_ROWS * start,
                )
                operands = (i.kernel, weight, i.row_bytes, 0, i.width)
                multiply_tile(expert_panel(c, 1), start, used, *operands, first, height, tile)
        for column in range(c.used):
            target, shares = (
                i.target + column * i.target_stride + 4 * first,
                c.shares + 4 * (i.used + 1) * column,
            )
            if i.shared:
                scale_row(target, height, load_f32(shares, 4 * i.used))
            else:
                fill_row(target, height, np.float32(0))
            for place in range(i.used):
                choice = load_i64(arena + c.places, 8 * (column * i.used + place))
                product = arena + c.products + 4 * TILE_ROWS * choice
                add_scaled(target, product, height, load_f32(shares, 4 * place))
