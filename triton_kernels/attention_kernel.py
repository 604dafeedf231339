"""The kernel of decode attention: a run of cached positions per program, merged by the last to finish."""

import triton
import triton.language as tl

from realizar_torch.triton_kernels.attention_merge import finish, merged_runs, sum_of_warps
from realizar_torch.triton_kernels.attention_packed import packed_sums, squash
from realizar_torch.triton_kernels.cache_rows import packed_row
from realizar_torch.triton_kernels.primitives import (
    INTERPRETED,
    cast,
    prefetch_l2,
    release_successor,
    rounded_product,
    wait_for_predecessor,
)
from realizar_torch.triton_kernels.rope import rotated_heads

# bytes that a load brings to the L2 cache at once
LINE = tl.constexpr(128)


@triton.jit
def _prefetch(rows, stride, begin, end, POSITIONS: tl.constexpr, D: tl.constexpr):
    """Bring up to POSITIONS rows of D elements, from ``begin`` on and before ``end``, to the L2 cache."""
    SIZE: tl.constexpr = rows.dtype.element_ty.primitive_bitwidth // 8
    LINES: tl.constexpr = triton.next_power_of_2(triton.cdiv(D * SIZE, LINE))
    item = tl.arange(0, POSITIONS * LINES)
    position = tl.minimum(begin + item // LINES, end - 1)
    prefetch_l2(rows + position.to(tl.int64) * stride + tl.minimum(item % LINES * (LINE // SIZE), D - 1))


# what changes with the capacity and the launch shape must not ask for another kernel
@triton.jit(do_not_specialize=["capacity", "window", "minimum", "splits"])
def attention_kernel(
    qkv, k_cache, v_cache, k_scales, v_scales, positions, starts, cos, sin, q_norm, k_norm, eps,
    partial, extremes, arrived, out, out_q, out_scale, out_sums,
    k_batch, k_head, k_position, v_batch, v_head, v_position, s_batch, s_head,
    capacity, scale, window, softcap, width, minimum, splits,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr, G: tl.constexpr,
    P: tl.constexpr, LANES: tl.constexpr, W: tl.constexpr, T: tl.constexpr, STAGES: tl.constexpr,
    AHEAD: tl.constexpr, MERGE: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_STARTS: tl.constexpr, HAS_NORM: tl.constexpr,
    ZERO_CENTERED: tl.constexpr, PACKED: tl.constexpr, INT8: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Program (b, kv head, split): GROUP query heads against a run of positions, each K and V row read once.

    Positions max(starts[b], p + 1 - window) … p - 1 of the cache, p = positions[b], in runs of whole steps,
    and p itself from row b of qkv ``[B, GROUP * KV_HEADS + 2 * KV_HEADS, D]``; the last run's program writes
    p to the cache. A step is T positions for each of W warps, which keep their own running maximum and sum
    until the end, all fp32: score = q·k * scale, or cap * tanh(score / cap); out = Σ e^score v / Σ e^score.
    ``scale`` and ``softcap`` come in powers of two. PACKED: rows of the cache have a scale each. The program
    that arrives last adds the partial sums in split order, so the result does not depend on which one it was.
    A position outside the cache is not written and gives NaN.
    """
    release_successor(DEPENDENT)
    batch = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    STEP: tl.constexpr = W * T
    # counted up long before the launch that this one overlaps with
    position = tl.load(positions + batch).to(tl.int32)
    origin = 0
    if HAS_STARTS:
        origin = tl.load(starts + batch).to(tl.int32)
    start = origin
    if HAS_WINDOW:
        start = tl.maximum(position + 1 - window, start)
    known = (position >= 0) & (position < capacity)
    past = tl.where(known, tl.maximum(position - start, 0), 0)
    run = tl.maximum(tl.cdiv(tl.cdiv(past, STEP), splits), minimum) * STEP
    runs = tl.maximum(tl.cdiv(past, run), 1)
    if split < runs:
        member = tl.arange(0, P)
        lane = tl.arange(0, LANES)
        present = lane < D
        pair = batch.to(tl.int64) * KV_HEADS + kv_head
        keys = k_cache + batch.to(tl.int64) * k_batch + kv_head.to(tl.int64) * k_head
        values = v_cache + batch.to(tl.int64) * v_batch + kv_head.to(tl.int64) * v_head
        scales = batch.to(tl.int64) * s_batch + kv_head.to(tl.int64) * s_head
        begin = start + split * run
        end = tl.minimum(begin + run, start + past)
        # written by earlier steps, as everything that lies behind us in the cache
        if AHEAD > 0:
            if begin < end:
                _prefetch(keys, k_position, begin, end, AHEAD * STEP, D)
                _prefetch(values, v_position, begin, end, AHEAD * STEP, D)
        wait_for_predecessor(DEPENDENT)
        heads = qkv + batch.to(tl.int64) * ((GROUP + 2) * KV_HEADS * D)
        turn = tl.minimum(tl.maximum(position - origin, 0), capacity - 1)
        query = rotated_heads(
            heads + (kv_head * GROUP + member)[:, None] * D, (member < GROUP)[:, None], turn, cos, sin,
            q_norm, eps, D, ROTARY, LANES, HAS_NORM, ZERO_CENTERED,
        )  # fmt: skip
        if PACKED:
            highest, weight, total, query = packed_sums(
                query, keys, values, k_scales + scales, v_scales + scales, k_position, v_position,
                begin, end, scale, softcap, G, W, T, D, STAGES, HAS_SOFTCAP,
                tl.int8 == k_cache.dtype.element_ty,
            )  # fmt: skip
        else:
            TYPE: tl.constexpr = k_cache.dtype.element_ty
            query = cast(query, TYPE)
            if INTERPRETED:
                # the interpreter multiplies the bit patterns of bf16
                query = query.to(tl.float32)
            # copies of the heads fill the rows of a product
            rows = tl.reshape(tl.broadcast_to(query[None, :, :], [G // P, P, LANES]), [G, LANES])
            rows = tl.broadcast_to(rows[None, :, :], [W, G, LANES])
            tile = tl.arange(0, W)[:, None] * T + tl.arange(0, T)[None, :]
            highest = tl.full([W, G], -1e38, tl.float32)
            weight = tl.zeros([W, G], tl.float32)
            total = tl.zeros([W, G, LANES], tl.float32)
            for first in tl.range(begin, end, STEP, num_stages=STAGES):
                column = first + tile
                live = column < end
                mask = live[:, :, None] & present[None, None, :]
                at = column.to(tl.int64)[:, :, None]
                k = tl.load(keys + at * k_position + lane[None, None, :], mask=mask, other=0.0)
                v = tl.load(values + at * v_position + lane[None, None, :], mask=mask, other=0.0)
                OPERAND: tl.constexpr = tl.float32 if INTERPRETED else TYPE
                k, v = k.to(OPERAND), v.to(OPERAND)
                score = tl.dot(rows, tl.permute(k, (0, 2, 1)), input_precision="ieee") * scale
                score = tl.where(live[:, None, :], squash(score, softcap, HAS_SOFTCAP), float("-inf"))
                top = tl.maximum(highest, tl.max(score, 2))
                share = tl.exp2(score - top[:, :, None])
                shrink = tl.exp2(highest - top)
                weight = weight * shrink + tl.sum(share, 2)
                total = tl.dot(cast(share, v.dtype), v, total * shrink[:, :, None], input_precision="ieee")
                highest = top
        # one of the copies, all warps
        top = tl.max(tl.reshape(highest, [W * (G // P), P]), 0)
        own = tl.full([P], 0.0, tl.float32)
        fresh = tl.zeros([1, LANES], tl.float32)
        if split == runs - 1:
            one = tl.zeros([1, 1], tl.int32)
            key_head = heads + ((GROUP * KV_HEADS + kv_head) * D + one)
            k = rotated_heads(
                key_head, one == 0, turn, cos, sin, k_norm, eps, D, ROTARY, LANES, HAS_NORM, ZERO_CENTERED
            )
            v = tl.load(key_head + KV_HEADS * D + lane[None, :], mask=present[None, :], other=0)
            k, k_scale, k_seen = packed_row(k, k_cache.dtype.element_ty)
            v, v_scale, fresh = packed_row(v.to(tl.float32), v_cache.dtype.element_ty)
            place = tl.where(known, position, 0).to(tl.int64)
            written = lane[None, :] < tl.where(known, D, 0)
            tl.store(keys + place * k_position + lane[None, :], k, mask=written)
            tl.store(values + place * v_position + lane[None, :], v, mask=written)
            if PACKED:
                at = scales + place + tl.arange(0, 1)
                tl.store(k_scales + at, k_scale, mask=at < tl.where(known, at + 1, 0))
                tl.store(v_scales + at, v_scale, mask=at < tl.where(known, at + 1, 0))
            score = tl.sum(rounded_product(query.to(tl.float32), k_seen), 1) * scale
            score = tl.where(known, squash(score, softcap, HAS_SOFTCAP), float("nan"))
            top = tl.maximum(top, score)
            own = tl.exp2(score - top)
        whole = tl.reshape(tl.broadcast_to(top[None, :], [G // P, P]), [G])
        # an exact power of two: every copy of a head adds its part
        shrink = tl.exp2(highest - whole[None, :]) * (P / G)
        weight = tl.sum(tl.reshape(weight * shrink, [W * (G // P), P]), 0) + own
        total = tl.sum(tl.reshape(total * shrink[:, :, None], [W, G // P, P, LANES]), 1)
        total = sum_of_warps(total) + own[:, None] * fresh
        total = tl.reshape(total, [P * LANES // 4, 4])
        weights = tl.reshape(tl.broadcast_to(weight[:, None], [P, LANES // 4]), [P * LANES // 4])
        done = True
        if runs > 1:
            slot = pair * splits
            quad = tl.arange(0, P * LANES // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
            tl.store(partial + (slot + split) * (P * LANES) + quad, total)
            tl.store(extremes + ((slot + split) * P + member) * 2, top)
            tl.store(extremes + ((slot + split) * P + member) * 2 + 1, weight)
            # every thread's stores come before the counter, and the counter before the merge's loads
            tl.debug_barrier()
            done = tl.atomic_add(arrived + pair, 1, sem="acq_rel") == runs - 1
            if done:
                weights, total = merged_runs(partial, extremes, slot, runs, P, LANES, MERGE)
                tl.store(arrived + pair, 0)
        if done:
            finish(
                weights, total, out, out_q, out_scale, out_sums, kv_head, batch, width,
                GROUP, D, P, LANES, INT8,
            )  # fmt: skip
