"""Products with weights in the fused decode step: threads take tiles of rows, each for all sequences."""

from realizar_torch.cpu_kernels.int8_rows import rows_of_tile
from realizar_torch.cpu_kernels.jit import jit
from realizar_torch.cpu_kernels.memory import fetch_add_i64
from realizar_torch.cpu_kernels.native import call_native
from realizar_torch.cpu_kernels.step_vectors import (
    activate_row,
    add_rows,
    cap_row,
    multiply_row,
    scale_row,
)


@jit(device=True)
def rows_of(c, arena, vector, kernel, int8, weight, row_bytes, width, first, last, target):
    """target[row] = weight[row] · activations number ``vector``, for rows first to last."""
    x = arena + c.q + vector * c.q_stride if int8 else arena + c.activations + vector * c.activations_stride
    scales = arena + c.scales + vector * (c.q_stride >> 3)
    sums = arena + c.sums + vector * (c.q_stride >> 2)
    call_native(kernel, (weight, row_bytes, first, last, width, x, scales, sums, target))


@jit(device=True)
def linear(c, i, arena, counter, batch, n_threads):
    """target = weight · activations + bias, scaled, capped."""
    rows = rows_of_tile(i.rows, i.row_bytes, n_threads)
    while True:
        first = fetch_add_i64(counter, rows)
        if first >= i.rows:
            return
        last = min(first + rows, i.rows)
        for b in range(batch):
            target = i.target + b * i.target_stride
            rows_of(c, arena, b, i.kernel, i.int8, i.weight, i.row_bytes, i.width, first, last, target)
            if i.bias:
                add_rows(target + 4 * first, i.bias + 4 * first, last - first)
            if i.scale:
                scale_row(target + 4 * first, last - first, i.scale)
            if i.softcap:
                cap_row(target + 4 * first, last - first, i.softcap)


@jit(device=True)
def gated(c, i, arena, counter, batch, n_threads):
    """target = act(weight · activations + bias) * (second_weight · activations + second_bias)."""
    rows = rows_of_tile(i.rows, i.row_bytes, n_threads)
    while True:
        first = fetch_add_i64(counter, rows)
        if first >= i.rows:
            return
        last = min(first + rows, i.rows)
        for b in range(batch):
            target = i.target + b * i.target_stride
            gated_rows(c, i, arena, b, i.weight, i.second_weight, first, last, target)


@jit(device=True)
def gated_rows(c, i, arena, b, weight, second_weight, first, last, target):
    """Rows first to last of ``gated`` for sequence b, by the matrices at these addresses."""
    # the tile of "up" stands in the thread's own memory; its row 0 is ``first`` rows before
    tile = arena + c.tile - 4 * first
    rows_of(c, arena, b, i.kernel, i.int8, weight, i.row_bytes, i.width, first, last, target)
    if i.bias:
        add_rows(target + 4 * first, i.bias + 4 * first, last - first)
    activate_row(i.activation, target + 4 * first, last - first)
    if second_weight:
        kernel, int8, stride = i.second_kernel, i.second_int8, i.second_row_bytes
        rows_of(c, arena, b, kernel, int8, second_weight, stride, i.width, first, last, tile)
        if i.second_bias:
            add_rows(tile + 4 * first, i.second_bias + 4 * first, last - first)
        multiply_row(target + 4 * first, tile + 4 * first, last - first)
