"""The fused decode step: every thread walks the program of ``program.py``; one ``pool.run`` is one token.

Results do not depend on the number of threads: whatever is split is split by rows, heads or sequences,
and each of those is computed by the same code in the same order.
"""

from realizar_torch.cpu_kernels import program
from realizar_torch.cpu_kernels.int8_quantize import quantize_blocks
from realizar_torch.cpu_kernels.jit import jit
from realizar_torch.cpu_kernels.memory import fetch_add_i64, load_i64, store_i64
from realizar_torch.cpu_kernels.native import call_native
from realizar_torch.cpu_kernels.norm import norm_vector
from realizar_torch.cpu_kernels.pool import barrier
from realizar_torch.cpu_kernels.step_attention import attend_heads, rotary_table, rotate_unit
from realizar_torch.cpu_kernels.step_experts import gated_experts, mix_experts, route
from realizar_torch.cpu_kernels.step_linears import gated, linear
from realizar_torch.cpu_kernels.step_vectors import add_rows, add_scaled, copy_row, scale_row

_BLOCK = 32


@jit
def run_step(thread, n_threads, instructions, context, batch):
    """One token of ``batch`` sequences, each at its own slot of the cache.

    instructions: INSTRUCTION rows. context: one CONTEXT row. Both hold addresses; nothing is allocated.
    """
    c = context[0]
    arena = c.arena + thread * c.arena_stride
    rotary_table(c, arena, batch)
    if thread == 0:
        for index in range(len(instructions)):
            store_i64(c.tiles, 0, program.COUNTER_BYTES * index)
    barrier(c.barrier, n_threads)
    for index in range(len(instructions)):
        i = instructions[index]
        counter = c.tiles + program.COUNTER_BYTES * index
        if i.opcode == program.LINEAR:
            linear(c, i, arena, counter, batch, n_threads)
        elif i.opcode == program.GATED:
            gated(c, i, arena, counter, batch, n_threads)
        elif i.opcode == program.ADD:
            _add(c, i, arena, batch)
        elif i.opcode == program.NORM:
            _norm(c, i, arena, batch)
        elif i.opcode == program.LOAD:
            _load(c, i, arena, batch)
        elif i.opcode == program.ATTEND:
            _attend(c, i, arena, counter, batch, n_threads)
        elif i.opcode == program.ROTATE:
            _rotate(c, i, arena, counter, batch)
        elif i.opcode == program.NORM_ROW:
            _norm_row(i, counter, batch)
        elif i.opcode == program.ROUTE:
            route(c, i, arena, batch)
        elif i.opcode == program.GATED_EXPERTS:
            gated_experts(c, i, arena, counter, batch, n_threads)
        elif i.opcode == program.MIX_EXPERTS:
            mix_experts(c, i, arena, counter, batch, n_threads)
        elif i.opcode == program.EMBED:
            _embed(c, i, arena, batch)
        if i.barrier:
            barrier(c.barrier, n_threads)


@jit(device=True)
def _embed(c, i, arena, batch):
    for b in range(batch):
        row = i.weight + load_i64(c.tokens, 8 * b) * i.row_bytes
        target = arena + c.residual + b * 4 * c.hidden
        call_native(i.kernel, (row, c.hidden, target))
        if i.second_weight:
            own, learned = load_i64(c.positions, 8 * b) - load_i64(c.starts, 8 * b), arena + c.row
            call_native(i.second_kernel, (i.second_weight + own * i.second_row_bytes, c.hidden, learned))
            add_rows(target, learned, c.hidden)
        scale_row(target, c.hidden, i.scale)


@jit(device=True)
def _add(c, i, arena, batch):
    for b in range(batch):
        source = i.source + b * i.source_stride
        if i.gamma:
            norm_vector(i.centre, source, i.width, i.gamma, i.bias, i.epsilon, arena + c.row)
            source = arena + c.row
        add_scaled(arena + c.residual + b * 4 * c.hidden, source, i.width, i.scale)


@jit(device=True)
def _norm(c, i, arena, batch):
    for b in range(batch):
        residual = arena + c.residual + b * 4 * c.hidden
        target = arena + c.activations + b * c.activations_stride
        if i.gamma:
            norm_vector(i.centre, residual, i.width, i.gamma, i.bias, i.epsilon, target)
        else:
            copy_row(residual, i.width, target)
        if i.int8:
            _quantize(c, i, arena, b, target)


@jit(device=True)
def _load(c, i, arena, batch):
    for vector in range(batch * max(1, i.used)):
        source = i.source + vector * i.source_stride
        if i.int8:
            _quantize(c, i, arena, vector, source)
        else:
            copy_row(source, i.width, arena + c.activations + vector * c.activations_stride)


@jit(device=True)
def _quantize(c, i, arena, vector, source):
    q = arena + c.q + vector * c.q_stride
    scales = arena + c.scales + vector * (c.q_stride >> 3)
    sums = arena + c.sums + vector * (c.q_stride >> 2)
    quantize_blocks(source, i.width, 0, i.padded // _BLOCK, q, scales, sums)


@jit(device=True)
def _norm_row(i, counter, batch):
    while True:
        b = fetch_add_i64(counter, 1)
        if b >= batch:
            return
        source = i.source + b * i.source_stride
        norm_vector(i.centre, source, i.width, i.gamma, i.bias, i.epsilon, source)


@jit(device=True)
def _rotate(c, i, arena, counter, batch):
    heads = c.heads + 2 * c.kv_heads
    while True:
        unit = fetch_add_i64(counter, 1)
        if unit >= batch * heads:
            return
        rotate_unit(c, i, arena, batch, unit // heads, unit % heads)


@jit(device=True)
def _attend(c, i, arena, counter, batch, n_threads):
    # query heads that share keys go together unless that would leave threads idle
    group = c.heads // c.kv_heads
    together = group if batch * c.kv_heads >= n_threads else max(1, group * batch * c.kv_heads // n_threads)
    parts = (group + together - 1) // together
    while True:
        unit = fetch_add_i64(counter, 1)
        if unit >= batch * c.kv_heads * parts:
            return
        b, rest = unit // (c.kv_heads * parts), unit % (c.kv_heads * parts)
        kv_head, part = rest // parts, rest % parts
        first = part * together
        attend_heads(c, i, arena, b, kv_head, first, min(first + together, group))
