"""Rotary embedding and attention of the fused prompt pass: blocks of queries over the cached rows.

A block is up to QUERIES consecutive columns of one sequence. For a key head, all its query heads go together:
keys are transposed once for them, scores of the whole visible range are kept, values are read once a chunk.
"""

import numpy as np

from realizar_torch.cpu_kernels.attention import attend
from realizar_torch.cpu_kernels.int8_panel import transpose_16x16
from realizar_torch.cpu_kernels.jit import jit
from realizar_torch.cpu_kernels.memory import load_i64
from realizar_torch.cpu_kernels.small_matrices import multiply_rows
from realizar_torch.cpu_kernels.step_attention import rotary_row, turn_head
from realizar_torch.cpu_kernels.step_vectors import cap_row, copy_row, exponentials, fill_row, scale_row

QUERIES = 16
# Keys that are transposed at a time, and values that are read at a time.
KEYS, VALUES = 64, 128
_LANES = 16


@jit(device=True)
def own_position(c, column):
    """A column's position in its own text, which starts behind the padding."""
    return load_i64(c.slots, 8 * column) - load_i64(c.starts, 8 * load_i64(c.sequences, 8 * column))


@jit(device=True)
def rotary_rows(c, column):
    """cos and sin of every frequency at a column's own position."""
    for rope in range(c.ropes):
        row = 2 * c.rotary * (column * c.ropes + rope)
        rotary_row(c, rope, own_position(c, column), c.cos + row, c.sin + row)


@jit(device=True)
def rotate_column(c, i, column):
    """Norm and rotate the queries and keys of a column in place; its keys and values go into the cache."""
    size, own = 4 * c.head_dim, own_position(c, column)
    table = 2 * c.rotary * (column * c.ropes + i.rope - 1)
    first = load_i64(c.sequences, 8 * column) * c.kv_heads
    slot = load_i64(c.slots, 8 * column)
    for unit in range(c.heads + c.kv_heads):
        head = i.source + column * i.source_stride + unit * size
        turn_head(c, i, head, unit, own, c.cos + table, c.sin + table)
    for kv_head in range(c.kv_heads):
        head = i.source + column * i.source_stride + (c.heads + kv_head) * size
        row = ((first + kv_head) * c.max_positions + slot) * size
        copy_row(head, c.head_dim, i.keys + row)
        copy_row(head + c.kv_heads * size, c.head_dim, i.values + row)


@jit(device=True)
def attend_block(c, i, arena, block, kv_head):
    """All query heads of ``kv_head`` for one block of queries."""
    column, count = load_i64(c.blocks, 16 * block), load_i64(c.blocks, 16 * block + 8)
    size, group = 4 * c.head_dim, c.heads // c.kv_heads
    sequence = load_i64(c.sequences, 8 * column)
    start, slot = load_i64(c.starts, 8 * sequence), load_i64(c.slots, 8 * column)
    # the first query sees rows from ``first``, the last one up to ``end``
    first, end = _first_visible(i, start, slot), slot + count
    cached = ((sequence * c.kv_heads + kv_head) * c.max_positions + first) * size
    queries = i.source + column * i.source_stride + kv_head * group * size
    target = i.target + column * i.target_stride + kv_head * group * size
    if c.head_dim % _LANES:
        for query in range(count):
            skipped = _first_visible(i, start, slot + query) - first
            own, out = queries + query * i.source_stride, target + query * i.target_stride
            length = slot + query + 1 - first - skipped
            rows = cached + skipped * size
            shape = (group, c.head_dim, length, i.scale, i.softcap)
            attend(own, i.keys + rows, i.values + rows, out, arena + c.scores, *shape)
        return
    length = end - first
    stride = 4 * ((length + KEYS - 1) // KEYS * KEYS)
    _scores(c, arena, queries, i.source_stride, count, i.keys + cached, length, stride)
    for head in range(group):
        for query in range(count):
            row = arena + c.scores + (head * QUERIES + query) * stride
            skipped = _first_visible(i, start, slot + query) - first
            _softmax(row, skipped, slot + query + 1 - first, length, i.scale, i.softcap)
    for t in range(0, length, VALUES):
        steps, values = min(VALUES, length - t), i.values + cached + t * size
        for head in range(group):
            weights, out = arena + c.scores + head * QUERIES * stride + 4 * t, target + head * size
            multiply_rows(weights, stride, count, values, size, c.head_dim, steps, out, i.target_stride, t)


@jit(device=True)
def _first_visible(i, start, slot):
    return max(start, slot - i.window + 1) if i.window else start


@jit(device=True)
def _scores(c, arena, queries, query_stride, count, keys, length, stride):
    """scores [group * QUERIES][stride] = queries · keys, keys beyond ``length`` giving anything."""
    size, transposed, rows = 4 * c.head_dim, arena + c.transposed, arena + c.last_rows
    for t in range(0, length, KEYS):
        present = min(KEYS, length - t)
        wide = (present + _LANES - 1) // _LANES * _LANES
        for lane in range(0, wide, _LANES):
            source = keys + (t + lane) * size
            if lane + _LANES > present:
                for row in range(present - lane):
                    copy_row(source + row * size, c.head_dim, rows + row * size)
                source = rows
            for part in range(0, c.head_dim, _LANES):
                place = transposed + 4 * (part * KEYS + lane)
                transpose_16x16(source + 4 * part, size, place, 4 * KEYS)
        for head in range(c.heads // c.kv_heads):
            out = arena + c.scores + head * QUERIES * stride + 4 * t
            left = queries + head * size
            multiply_rows(left, query_stride, count, transposed, 4 * KEYS, wide, c.head_dim, out, stride, 0)


@jit(device=True)
def _softmax(row, first, last, length, scale, softcap):
    """row[first:last] = softmax(scale * row[first:last], softly capped), the rest of ``length`` zero."""
    visible, seen = row + 4 * first, last - first
    scale_row(visible, seen, scale)
    if softcap:
        cap_row(visible, seen, softcap)
    scale_row(visible, seen, np.float32(1) / exponentials(visible, seen))
    fill_row(row, first, np.float32(0))
    fill_row(row + 4 * last, length - last, np.float32(0))
