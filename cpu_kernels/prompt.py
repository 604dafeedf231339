"""The fused prompt pass: many tokens through all layers in one ``pool.run``, as ``program.py`` instructs.

Its unit is a column: one token of one sequence, at its slot of the cache. Norms and rotation are shared among
threads by columns, weights by rows, attention by heads and blocks of queries, always by the same code in the
same order: results do not depend on the number of threads, nor on how a prompt is cut into passes.
"""

import numpy as np

from realizar_torch.cpu_kernels import program
from realizar_torch.cpu_kernels.activation_panel import quantize_into_panel
from realizar_torch.cpu_kernels.bf16_matmul import bf16_into_panel
from realizar_torch.cpu_kernels.int8_tile import TILE_ROWS
from realizar_torch.cpu_kernels.jit import jit
from realizar_torch.cpu_kernels.memory import fetch_add_i64, load_i64, store_i64
from realizar_torch.cpu_kernels.native import call_native
from realizar_torch.cpu_kernels.norm import norm_vector
from realizar_torch.cpu_kernels.pool import barrier
from realizar_torch.cpu_kernels.prompt_attention import (
    attend_block,
    own_position,
    rotary_rows,
    rotate_column,
)
from realizar_torch.cpu_kernels.step_vectors import (
    activate_row,
    add_rows,
    add_scaled,
    copy_row,
    fill_row,
    multiply_row,
    scale_row,
)

_BLOCK = 32
# Columns that a thread takes at a time.
_SHARE = 4


@jit
def run_prompt(thread, n_threads, instructions, context):
    """All columns of ``context``, one PROMPT_CONTEXT row, through INSTRUCTION rows; nothing is allocated."""
    c = context[0]
    arena = c.arena + thread * c.arena_stride
    if thread == 0:
        for index in range(len(instructions) + 1):
            store_i64(c.counters, 0, program.COUNTER_BYTES * index)
    barrier(c.barrier, n_threads)
    _each_column(c, instructions[0], arena, c.counters + program.COUNTER_BYTES * len(instructions), -1)
    for index in range(len(instructions)):
        i = instructions[index]
        counter = c.counters + program.COUNTER_BYTES * index
        if i.opcode == program.LINEAR:
            _linear(c, i, arena, counter)
        elif i.opcode == program.GATED:
            _gated(c, i, arena, counter)
        elif i.opcode == program.ATTEND:
            _attend(c, i, arena, counter)
        else:
            _each_column(c, i, arena, counter, i.opcode)
        if i.barrier:
            barrier(c.barrier, n_threads)


@jit(device=True)
def _each_column(c, i, arena, counter, opcode):
    while True:
        first = fetch_add_i64(counter, _SHARE)
        if first >= c.used:
            return
        for column in range(first, min(first + _SHARE, c.used)):
            source = i.source + column * i.source_stride
            if opcode == program.ADD:
                _add(c, i, arena, source, column)
            elif opcode == program.NORM:
                _norm(c, i, arena, column)
            elif opcode == program.LOAD:
                copy_row(source, i.width, arena + c.row)
                _store_row(c, i, arena, column)
            elif opcode == program.NORM_ROW:
                norm_vector(i.centre, source, i.width, i.gamma, i.bias, i.epsilon, source)
            elif opcode == program.ROTATE:
                rotate_column(c, i, column)
            elif opcode == program.EMBED:
                _embed(c, i, arena, column)
            else:
                rotary_rows(c, column)


@jit(device=True)
def _embed(c, i, arena, column):
    target = c.residual + column * 4 * c.hidden
    row = i.weight + load_i64(c.tokens, 8 * column) * i.row_bytes
    call_native(i.kernel, (row, c.hidden, target))
    if i.second_weight:
        row = i.second_weight + own_position(c, column) * i.second_row_bytes
        call_native(i.second_kernel, (row, c.hidden, arena + c.row))
        add_rows(target, arena + c.row, c.hidden)
    scale_row(target, c.hidden, i.scale)


@jit(device=True)
def _add(c, i, arena, source, column):
    if i.gamma:
        norm_vector(i.centre, source, i.width, i.gamma, i.bias, i.epsilon, arena + c.row)
        source = arena + c.row
    add_scaled(c.residual + column * 4 * c.hidden, source, i.width, i.scale)


@jit(device=True)
def _norm(c, i, arena, column):
    residual, row = c.residual + column * 4 * c.hidden, arena + c.row
    if i.gamma:
        norm_vector(i.centre, residual, i.width, i.gamma, i.bias, i.epsilon, row)
    else:
        copy_row(residual, i.width, row)
    _store_row(c, i, arena, column)


@jit(device=True)
def _store_row(c, i, arena, column):
    """Put the ``width`` values of the thread's row into panel 0, zeros behind them."""
    fill_row(arena + c.row + 4 * i.width, i.padded - i.width, np.float32(0))
    _store_activations(c, i, 0, arena + c.row, 0, i.padded // _BLOCK, column)


@jit(device=True)
def _store_activations(c, i, number, x, first, last, column):
    """Put fp32 blocks ``first`` to ``last`` of a column, the first at ``x``, into panel ``number``."""
    panel = c.panels + number * c.panel_bytes
    if c.bf16:
        bf16_into_panel(x, first, last, column, c.columns, panel)
    else:
        scale, sums = panel + c.scales, panel + c.sums
        quantize_into_panel(x, first, last, i.padded, column, c.columns, i.kinds, panel, scale, sums)


@jit(device=True)
def _tile(c, kernel, weight, row_bytes, bias, width, number, first, height, tile):
    """fp32 tile [columns][TILE_ROWS] = rows ``first`` and on of a weight · panel ``number`` + bias."""
    panel, source = c.panels + number * c.panel_bytes, weight + first * row_bytes
    shape = (row_bytes, height, width, c.used, c.columns)
    call_native(kernel, (source, *shape, panel, panel + c.scales, panel + c.sums, tile))
    if bias:
        for column in range(c.used):
            add_rows(tile + 4 * TILE_ROWS * column, bias + 4 * first, height)


@jit(device=True)
def _linear(c, i, arena, counter):
    tile = arena + c.tile
    while True:
        first = fetch_add_i64(counter, TILE_ROWS)
        if first >= i.rows:
            return
        height = min(TILE_ROWS, i.rows - first)
        _tile(c, i.kernel, i.weight, i.row_bytes, i.bias, i.width, i.panel, first, height, tile)
        for column in range(c.used):
            target = i.target + column * i.target_stride + 4 * first
            copy_row(tile + 4 * TILE_ROWS * column, height, target)


@jit(device=True)
def _gated(c, i, arena, counter):
    """A tile of rows is one block of the next matmul's activations: it goes straight into panel 1."""
    tile, up = arena + c.tile, arena + c.second_tile
    while True:
        first = fetch_add_i64(counter, TILE_ROWS)
        if first >= i.padded:
            return
        height = max(0, min(TILE_ROWS, i.rows - first))
        if height:
            _tile(c, i.kernel, i.weight, i.row_bytes, i.bias, i.width, 0, first, height, tile)
            if i.second_weight:
                second = (i.second_weight, i.second_row_bytes, i.second_bias)
                _tile(c, i.second_kernel, *second, i.width, 0, first, height, up)
        block = first // _BLOCK
        for column in range(c.used):
            here = tile + 4 * TILE_ROWS * column
            activate_row(i.activation, here, height)
            if i.second_weight:
                multiply_row(here, up + 4 * TILE_ROWS * column, height)
            fill_row(here + 4 * height, TILE_ROWS - height, np.float32(0))
            _store_activations(c, i, 1, here, block, block + 1, column)


@jit(device=True)
def _attend(c, i, arena, counter):
    """Later blocks see more: they go first, so that the threads end together."""
    while True:
        unit = fetch_add_i64(counter, 1)
        if unit >= c.n_blocks * c.kv_heads:
            return
        attend_block(c, i, arena, c.n_blocks - 1 - unit // c.kv_heads, unit % c.kv_heads)
