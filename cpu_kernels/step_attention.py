"""Rotary embedding and attention of the fused decode step: one query per sequence over the cached rows.

The cache holds fp32 rows [batch, kv_heads, max_positions, head_dim] per layer. Head sizes are even.
"""

import math

import numpy as np

from realizar_torch.cpu_kernels.attention import attend
from realizar_torch.cpu_kernels.jit import jit
from realizar_torch.cpu_kernels.memory import load_f32, load_i64, store_f32
from realizar_torch.cpu_kernels.norm import norm_vector
from realizar_torch.cpu_kernels.simd import load_f32x16, store
from realizar_torch.cpu_kernels.step_vectors import copy_row, scale_row


@jit(device=True)
def rotary_table(c, arena, batch):
    """cos and sin of every frequency at each sequence's own position, which starts behind its padding."""
    for rope in range(c.ropes):
        for b in range(batch):
            own = load_i64(c.positions, 8 * b) - load_i64(c.starts, 8 * b)
            row = 2 * c.rotary * (rope * batch + b)
            rotary_row(c, rope, own, arena + c.cos + row, arena + c.sin + row)


@jit(device=True)
def rotary_row(c, rope, own, cos, sin):
    """cos and sin [rotary / 2] of the angles of one position, times the magnitude of their frequencies."""
    half, magnitude = c.rotary // 2, load_f32(c.magnitudes, 4 * rope)
    for pair in range(half):
        angle = np.float32(own) * load_f32(c.frequencies, 4 * (rope * half + pair))
        store_f32(cos, np.float32(math.cos(angle)) * magnitude, 4 * pair)
        store_f32(sin, np.float32(math.sin(angle)) * magnitude, 4 * pair)


@jit(device=True)
def rotate_unit(c, i, arena, batch, b, unit):
    """Head ``unit`` of [queries, keys, values] of sequence b: norm, rotation, cache write."""
    size, position = 4 * c.head_dim, load_i64(c.positions, 8 * b)
    head = i.source + b * i.source_stride + unit * size
    row = (b * c.kv_heads * c.max_positions + position) * size
    if unit >= c.heads + c.kv_heads:
        kv_head = unit - c.heads - c.kv_heads
        copy_row(head, c.head_dim, i.values + row + kv_head * c.max_positions * size)
        return
    table = 2 * c.rotary * ((i.rope - 1) * batch + b)
    turn_head(
        c, i, head, unit, position - load_i64(c.starts, 8 * b), arena + c.cos + table, arena + c.sin + table
    )
    if unit >= c.heads:
        copy_row(head, c.head_dim, i.keys + row + (unit - c.heads) * c.max_positions * size)


@jit(device=True)
def turn_head(c, i, head, unit, own, cos, sin):
    """Head ``unit`` of [queries, keys] at position ``own`` in place: norm, rotation, growth of queries."""
    is_query = unit < c.heads
    gamma = i.gamma if is_query else i.second_gamma
    if gamma:
        gamma += (unit if is_query else unit - c.heads) * i.gamma_stride
        norm_vector(i.centre, head, c.head_dim, gamma, 0, i.epsilon, head)
    if i.rope:
        rotate(head, cos, sin, c.rotary // 2)
    if is_query and c.temperature:
        turns = np.float32(own // c.period)
        scale_row(head, c.head_dim, np.float32(1) + c.temperature * np.float32(math.log1p(turns)))


@jit(device=True)
def rotate(head, cos, sin, half):
    """Rotate the pairs (i, i + half) of a head in place; 16 at a time, and the rest one by one."""
    for chunk in range(half // 16):
        place = 64 * chunk
        first, second = load_f32x16(head, place), load_f32x16(head + 4 * half, place)
        cosine, sine = load_f32x16(cos, place), load_f32x16(sin, place)
        store(head, first * cosine - second * sine, place)
        store(head + 4 * half, second * cosine + first * sine, place)
    for pair in range(half // 16 * 16, half):
        first, second = load_f32(head, 4 * pair), load_f32(head + 4 * half, 4 * pair)
        cosine, sine = load_f32(cos, 4 * pair), load_f32(sin, 4 * pair)
        store_f32(head, first * cosine - second * sine, 4 * pair)
        store_f32(head + 4 * half, second * cosine + first * sine, 4 * pair)


@jit(device=True)
def attend_heads(c, i, arena, b, kv_head, first, last):
    """Query heads ``first`` to ``last`` of one group over the rows that sequence b may see."""
    size = 4 * c.head_dim
    start, position = load_i64(c.starts, 8 * b), load_i64(c.positions, 8 * b)
    if i.window:
        start = max(start, position - i.window + 1)
    head = (kv_head * (c.heads // c.kv_heads) + first) * size
    cached = ((b * c.kv_heads + kv_head) * c.max_positions + start) * size
    attend(
        i.source + b * i.source_stride + head,
        i.keys + cached,
        i.values + cached,
        i.target + b * i.target_stride + head,
        arena + c.scores,
        last - first,
        c.head_dim,
        position + 1 - start,
        i.scale,
        i.softcap,
    )
