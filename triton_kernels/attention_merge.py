"""Adds partial attentions of one key head, over warps and over programs, and stores the result."""

import triton
import triton.language as tl

from realizar_torch.triton_kernels.primitives import cast
from realizar_torch.triton_kernels.quantize import store_int8


@triton.jit
def sum_of_warps(parts):
    """Σ over the first axis of ``[W, rows, lanes]``, one warp each, in a fixed tree.

    Halves of that axis move into the same thread, where ``tl.sum`` would take one barrier for every element
    of a thread with some versions of Triton.
    """
    W: tl.constexpr = parts.shape[0]
    rows: tl.constexpr = parts.shape[1]
    lanes: tl.constexpr = parts.shape[2]
    parts = tl.permute(parts, (1, 2, 0))
    # at most 32 warps
    for halving in tl.static_range(5):
        if W >> halving > 1:
            first, second = tl.split(tl.reshape(parts, [rows, lanes, W >> (halving + 1), 2]))
            parts = first + second
    return tl.reshape(parts, [rows, lanes])


@triton.jit
def merged_runs(partial, extremes, slot, runs, P: tl.constexpr, LANES: tl.constexpr, MERGE: tl.constexpr):
    """weight ``[Q]`` and total ``[Q, 4]``, Q = P·LANES/4, of ``runs`` partial attentions from ``slot`` on,
    MERGE at a time, in order, past the L1 cache.

    A thread has four lanes of all runs: nothing moves between threads.
    """
    Q: tl.constexpr = P * LANES // 4
    quad = tl.arange(0, Q)
    member = quad // (LANES // 4)
    top = tl.full([Q], -1e38, tl.float32)
    weight = tl.zeros([Q], tl.float32)
    total = tl.zeros([Q, 4], tl.float32)
    for first in range(0, runs, MERGE):
        run = first + tl.arange(0, MERGE)
        there = (run < runs)[:, None]
        at = extremes + ((slot + run)[:, None] * P + member[None, :]) * 2
        # quads as neighbours in a warp, not runs: see load_scalar of the primitives
        at = tl.multiple_of(tl.max_contiguous(at, [1, 2]), [1, 4])
        tops = tl.load(at, mask=there, other=float("-inf"), cache_modifier=".cg")
        beside = tl.multiple_of(tl.max_contiguous(at + 1, [1, 2]), [1, 4])
        shares = tl.load(beside, mask=there, other=0, cache_modifier=".cg")
        rows = ((slot + run)[:, None, None] * Q + quad[None, :, None]) * 4 + tl.arange(0, 4)[None, None, :]
        rows = tl.multiple_of(tl.max_contiguous(partial + rows, [1, 2, 4]), [1, 1, 16])
        rows = tl.load(rows, mask=there[:, :, None], other=0, cache_modifier=".cg")
        highest = tl.maximum(top, tl.max(tops, 0))
        shrink = tl.exp2(top - highest)
        shares_of = tl.exp2(tops - highest[None, :])
        weight = weight * shrink + tl.sum(shares_of * shares, 0)
        total = total * shrink[:, None] + tl.sum(shares_of[:, :, None] * rows, 0)
        top = highest
    return weight, total


@triton.jit
def finish(
    weight, total, out, out_q, out_scale, out_sums, kv_head, batch, width,
    GROUP: tl.constexpr, D: tl.constexpr, P: tl.constexpr, LANES: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    """Store total / weight (``[Q, 4]`` / ``[Q]``) of GROUP query heads, and its int8 form."""
    quad = tl.arange(0, P * LANES // 4)
    result = total / weight[:, None]
    member = quad * 4 // LANES
    lane = quad * 4 % LANES
    columns = (kv_head * GROUP + member) * D + lane
    held = (member < GROUP) & (lane < D)
    row = batch.to(tl.int64)
    inner = tl.arange(0, 4)[None, :]
    mask = held[:, None]
    if D % 4:
        # a quad can lie across the end of a head
        mask &= lane[:, None] + inner < D
    tl.store(out + row * width + columns[:, None] + inner, cast(result, out.dtype.element_ty), mask=mask)
    if INT8:
        BLOCKS: tl.constexpr = P * LANES // 32
        block = tl.arange(0, BLOCKS)
        member = block * 32 // LANES
        lane = block * 32 % LANES
        held = (member < GROUP) & (lane < D)
        start = tl.where(held, (kv_head * GROUP + member) * D + lane, width)
        columns = (
            start[:, None, None] + (16 * tl.arange(0, 2))[None, :, None] + tl.arange(0, 16)[None, None, :]
        )
        store_int8(
            tl.reshape(result, [BLOCKS, 2, 16]), start // 32, columns, row, width, out_q, out_scale, out_sums
        )
