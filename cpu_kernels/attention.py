"""Attention of one new query per sequence over cached keys and values, fp32.

Per head: ``s_t = scale * q · k_t``, softly capped ``cap * tanh(s_t / cap)`` where asked for, then
``y = sum_t softmax(s)_t v_t``. Query heads that share a key head go together, so that each cached row is read
once for all of them.
"""

import numpy as np

from realizar_torch.cpu_kernels.jit import jit
from realizar_torch.cpu_kernels.matmul_float import dot_products
from realizar_torch.cpu_kernels.memory import fetch_add_i64, load_f32, load_i64, store_f32
from realizar_torch.cpu_kernels.simd import fma, load_f32x16, splat_f32x16, sum_f32x16
from realizar_torch.cpu_kernels.small_matrices import multiply_rows
from realizar_torch.cpu_kernels.step_vectors import cap_row, exponentials, scale_row

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
def attend(queries, keys, values, outputs, scores, heads, head_dim, length, scale, softcap):
    """``heads`` query heads that share one key head, over ``length`` ≥ 1 cached rows.

    Addresses of fp32 queries and outputs [heads, head_dim], keys and values [length, head_dim], scratch
    scores [heads, length]. ``softcap`` 0 is none.
    """
    size, row_bytes = 4 * head_dim, 4 * length
    if head_dim % _LANES == 0:
        dot_products(keys, length, queries, heads, size, 0, scores, row_bytes)
    else:
        for h in range(heads):
            for t in range(length):
                product = dot(queries + h * size, keys + t * size, head_dim)
                store_f32(scores, product, 4 * (h * length + t))
    for h in range(heads):
        row = scores + h * row_bytes
        scale_row(row, length, scale)
        if softcap:
            cap_row(row, length, softcap)
        scale_row(row, length, np.float32(1) / exponentials(row, length))
    whole = head_dim // _LANES * _LANES
    multiply_rows(scores, row_bytes, heads, values, size, whole, length, outputs, size, 0)
    for h in range(heads):
        for index in range(whole, head_dim):
            total = np.float32(0)
            for t in range(length):
                total += load_f32(scores, h * row_bytes + 4 * t) * load_f32(values, t * size + 4 * index)
            store_f32(outputs, total, h * size + 4 * index)


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
