"""The fused prompt pass: many tokens through all layers in one ``pool.run``, as ``program.py`` instructs.

Its unit is a column: one token of one sequence, at its slot of the cache. Norms and rotation are shared among
threads by columns, weights by rows, attention by heads and blocks of queries, always by the same code in the
same order: results do not depend on the number of threads, nor on how a prompt is cut into passes.
"""

import numpy as np

from realizar_torch.cpu_kernels import program
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
from realizar_torch.cpu_kernels.prompt_experts import gated_experts, group, mix_experts, score
from realizar_torch.cpu_kernels.prompt_linears import (
    expert_panel,
    gated,
    linear,
    plain_panel,
    store_activations,
)
from realizar_torch.cpu_kernels.step_experts import choose
from realizar_torch.cpu_kernels.step_vectors import add_rows, add_scaled, copy_row, fill_row, scale_row

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
            linear(c, i, arena, counter)
        elif i.opcode == program.GATED:
            gated(c, i, arena, counter)
        elif i.opcode == program.ATTEND:
            _attend(c, i, arena, counter)
        elif i.opcode == program.SCORE:
            score(c, i, counter)
        elif i.opcode == program.GROUP:
            group(c, i, arena)
        elif i.opcode == program.GATED_EXPERTS:
            gated_experts(c, i, arena, counter)
        elif i.opcode == program.MIX_EXPERTS:
            mix_experts(c, i, arena, counter)
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
            elif opcode == program.ROUTE:
                chosen, shares = c.chosen + 8 * i.used * column, c.shares + 4 * (i.used + 1) * column
                choose(i, source, arena + c.probabilities, chosen, shares)
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
    if i.target:
        copy_row(row, i.width, i.target + column * i.target_stride)
    if i.padded:
        _store_row(c, i, arena, column)


@jit(device=True)
def _store_row(c, i, arena, column):
    """Put the ``width`` values of the thread's row into panel 0, zeros behind them, or for chosen experts."""
    fill_row(arena + c.row + 4 * i.width, i.padded - i.width, np.float32(0))
    if i.used:
        for place in range(i.used):
            choice = load_i64(arena + c.places, 8 * (column * i.used + place))
            store_activations(c, i, expert_panel(c, 0), arena + c.row, 0, i.padded // _BLOCK, choice)
    else:
        store_activations(c, i, plain_panel(c, 0), arena + c.row, 0, i.padded // _BLOCK, column)


@jit(device=True)
def _attend(c, i, arena, counter):
    """Later blocks see more: they go first, so that the threads end together."""
    while True:
        unit = fetch_add_i64(counter, 1)
        if unit >= c.n_blocks * c.kv_heads:
            return
        attend_block(c, i, arena, c.n_blocks - 1 - unit // c.kv_heads, unit % c.kv_heads)
