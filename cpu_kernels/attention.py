"""Attention of one new query per sequence over cached keys and values, fp32.

Per head: ``s_t = scale * q · k_t``, softly capped ``cap * tanh(s_t / cap)`` where asked for, then
``y = sum_t softmax(s)_t v_t``. Query heads that share a key head go together, so that each cached row is read
once for all of them.
"""

import math

import numpy as np

from realizar_torch.cpu_kernels.jit import jit
from realizar_torch.cpu_kernels.memory import fetch_add_i64, load_f32, load_i64, store_f32
from realizar_torch.cpu_kernels.simd import fma, load_f32x16, splat_f32x16, store, sum_f32x16
from realizar_torch.cpu_kernels.step_vectors import exponentials, scale_row

_LANES = 16


@jit(device=True)
def dot(a, b, count):
    """The product of two fp32 vectors."""
    total = splat_f32x16(0)
    for chunk in range(count // _LANES):
        total = fma(load_f32x16(a, 64 * chunk), load_f32x16(b, 64 * chunk), total)
    result = sum_f32x16(total)
    for index in range(count // _LANES * _LANES, count):
        result += load_f32(a, 4 * index) * load_f32(b, 4 * index)
    return result


@jit(device=True)
def add_scaled(target, source, factor, count):
    """target += factor * source."""
    factors = splat_f32x16(factor)
    for chunk in range(count // _LANES):
        total = fma(load_f32x16(source, 64 * chunk), factors, load_f32x16(target, 64 * chunk))
        store(target, total, 64 * chunk)
    for index in range(count // _LANES * _LANES, count):
        store_f32(target, load_f32(target, 4 * index) + factor * load_f32(source, 4 * index), 4 * index)


@jit(device=True)
def attend(queries, keys, values, outputs, scores, heads, head_dim, length, scale, softcap):
    """``heads`` query heads that share one key head, over ``length`` ≥ 1 cached rows.

    Addresses of fp32 queries and outputs [heads, head_dim], keys and values [length, head_dim], scratch
    scores [heads, length]. ``softcap`` 0 is none.
    """
    size = 4 * head_dim
    for t in range(length):
        for h in range(heads):
            score = scale * dot(queries + h * size, keys + t * size, head_dim)
            if softcap != 0:
                score = softcap * np.float32(math.tanh(score / softcap))
            store_f32(scores, score, 4 * (h * length + t))
    for h in range(heads):
        row = scores + 4 * h * length
        scale_row(row, length, np.float32(1) / exponentials(row, length))
        for index in range(head_dim):
            store_f32(outputs + h * size, np.float32(0), 4 * index)
    for t in range(length):
        for h in range(heads):
            weight = load_f32(scores, 4 * (h * length + t))
            add_scaled(outputs + h * size, values + t * size, weight, head_dim)


@jit
def attend_batch(
    thread,
    n_threads,
    counter,
    queries,
    keys,
    values,
    starts,
    ends,
    batch,
    heads,
    kv_heads,
    max_length,
    head_dim,
    scale,
    softcap,
    scratch,
    outputs,
):
    """``attend`` for every sequence and key head, handed out by ``counter`` (address of a zero int64).

    queries, outputs: fp32 [batch, heads, head_dim]. keys, values: fp32 [batch, kv_heads, max_length,
    head_dim], of which sequence b sees rows starts[b] to ends[b] (int64 [batch]). ``scratch``: 4 * heads /
    kv_heads * max_length bytes for each thread.
    """
    group, size = heads // kv_heads, 4 * head_dim
    scores = scratch + 4 * group * max_length * thread
    scale, softcap = np.float32(scale), np.float32(softcap)
    while True:
        unit = fetch_add_i64(counter, 1)
        if unit >= batch * kv_heads:
            return
        start = load_i64(starts, 8 * (unit // kv_heads))
        length = load_i64(ends, 8 * (unit // kv_heads)) - start
        cached, head = size * (unit * max_length + start), size * group * unit
        attend(
            queries + head,
            keys + cached,
            values + cached,
            outputs + head,
            scores,
            group,
            head_dim,
            length,
            scale,
            softcap,
        )
