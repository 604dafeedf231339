"""Rotary embedding and attention of the fused decode step: one query per sequence over the cached rows.

The cache holds fp32 rows [batch, kv_heads, max_positions, head_dim] per layer. Head sizes are even; vectors
of 16 lanes take what they can, the rest goes value by value.
"""

import math

import numpy as np

from realizar_torch.cpu_kernels.jit import jit
from realizar_torch.cpu_kernels.memory import load_f32, load_i64, store_f32
from realizar_torch.cpu_kernels.norm import rms_norm_vector
from realizar_torch.cpu_kernels.simd import fma, load_f32x16, splat_f32x16, store, sum_f32x16
from realizar_torch.cpu_kernels.step_vectors import copy_row, exponentials, scale_row


@jit(device=True)
def rotary_table(c, arena, batch, position):
    """cos and sin of every frequency at each sequence's own position, which starts behind its padding."""
    half = c.head_dim // 2
    for rope in range(c.ropes):
        for b in range(batch):
            own = np.float32(position - load_i64(c.starts, 8 * b))
            row = 4 * half * (rope * batch + b)
            for pair in range(half):
                angle = own * load_f32(c.frequencies, 4 * (rope * half + pair))
                store_f32(arena + c.cos, math.cos(angle), row + 4 * pair)
                store_f32(arena + c.sin, math.sin(angle), row + 4 * pair)


@jit(device=True)
def rotate_unit(c, i, arena, batch, b, unit, position):
    """Head ``unit`` of [queries, keys, values] of sequence b: norm, rotation, cache write."""
    size = 4 * c.head_dim
    head = i.source + b * i.source_stride + unit * size
    row = (b * c.kv_heads * c.max_positions + position) * size
    if unit >= c.heads + c.kv_heads:
        kv_head = unit - c.heads - c.kv_heads
        copy_row(head, c.head_dim, i.values + row + kv_head * c.max_positions * size)
        return
    is_query = unit < c.heads
    gamma = i.gamma if is_query else i.second_gamma
    if gamma:
        rms_norm_vector(head, c.head_dim, gamma, i.epsilon, head)
    half = c.head_dim // 2
    table = 4 * half * (i.rope * batch + b)
    _rotate(head, arena + c.cos + table, arena + c.sin + table, half)
    if not is_query:
        copy_row(head, c.head_dim, i.keys + row + (unit - c.heads) * c.max_positions * size)


@jit(device=True)
def _rotate(head, cos, sin, half):
    for pair in range(half):
        first, second = load_f32(head, 4 * pair), load_f32(head + 4 * half, 4 * pair)
        cosine, sine = load_f32(cos, 4 * pair), load_f32(sin, 4 * pair)
        store_f32(head, first * cosine - second * sine, 4 * pair)
        store_f32(head + 4 * half, second * cosine + first * sine, 4 * pair)


@jit(device=True)
def attend_heads(c, i, arena, b, kv_head, first, last, position):
    """softmax(scale·q·kᵀ)·v for heads ``first`` to ``last`` of one group; a cached row is read once."""
    group = c.heads // c.kv_heads
    size = 4 * c.head_dim
    cached = (b * c.kv_heads + kv_head) * c.max_positions * size
    start = load_i64(c.starts, 8 * b)
    if i.window:
        start = max(start, position - i.window + 1)
    length = position + 1 - start
    queries = i.source + b * i.source_stride + (kv_head * group) * size
    outputs = i.target + b * i.target_stride + (kv_head * group) * size
    scores = arena + c.scores
    score_row = 4 * c.max_positions

    keys = i.keys + cached + start * size
    for t in range(length):
        for h in range(first, last):
            product = _dot(queries + h * size, keys + t * size, c.head_dim)
            store_f32(scores + h * score_row, i.scale * product, 4 * t)
    for h in range(first, last):
        row = scores + h * score_row
        total = exponentials(row, length)
        scale_row(row, length, np.float32(1) / total)
    values = i.values + cached + start * size
    for h in range(first, last):
        _zero(outputs + h * size, c.head_dim)
    for t in range(length):
        for h in range(first, last):
            _add_scaled(
                outputs + h * size, values + t * size, load_f32(scores + h * score_row, 4 * t), c.head_dim
            )


@jit(device=True)
def _dot(a, b, n):
    total = splat_f32x16(0)
    for chunk in range(n // 16):
        total = fma(load_f32x16(a, 64 * chunk), load_f32x16(b, 64 * chunk), total)
    result = sum_f32x16(total)
    for rest in range(n // 16 * 16, n):
        result += load_f32(a, 4 * rest) * load_f32(b, 4 * rest)
    return result


@jit(device=True)
def _add_scaled(target, source, factor, n):
    weight = splat_f32x16(factor)
    for chunk in range(n // 16):
        store(
            target, fma(load_f32x16(source, 64 * chunk), weight, load_f32x16(target, 64 * chunk)), 64 * chunk
        )
    for rest in range(n // 16 * 16, n):
        store_f32(target, load_f32(target, 4 * rest) + factor * load_f32(source, 4 * rest), 4 * rest)


@jit(device=True)
def _zero(target, n):
    for index in range(n):
        store_f32(target, np.float32(0), 4 * index)
