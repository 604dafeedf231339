"""Attention of a prompt's tokens to the cache: causal, from the start of their text, in a window or not."""

import torch
import triton
import triton.language as tl

from realizar_torch.triton_kernels.cache_rows import half_rows, halves_of_bytes, power_of_two
from realizar_torch.triton_kernels.configs import choose_prompt_attention
from realizar_torch.triton_kernels.launch import on_device
from realizar_torch.triton_kernels.primitives import INTERPRETED, cast


@triton.jit
def _attend(
    query, slot, keys, values, k_scales, v_scales, k_position, v_position, begin, end, last, window, scale,
    total, weight, highest, reach,
    D: tl.constexpr, LANES: tl.constexpr, STEP: tl.constexpr, INT8: tl.constexpr, PACKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The running sums after keys begin … end - 1 in steps of STEP: Σ 2^(score - highest) v and its weight.

    score = q·k * scale. MASKED: a query sees keys up to its own slot (and no further back than the window),
    none lies behind ``last``; otherwise every query sees all of them. PACKED: elements are bytes, and
    ``total`` is over ``reach``, a power of two of the largest scale of a value so far.
    """
    lane = tl.arange(0, LANES)
    for first in tl.range(begin, end, STEP):
        column = first + tl.arange(0, STEP)
        at = column.to(tl.int64)
        k = keys + at[None, :] * k_position + lane[:, None]
        v = values + at[:, None] * v_position + lane[None, :]
        if MASKED:
            live = column <= last
            k = tl.load(k, mask=live[None, :] & (lane < D)[:, None], other=0)
            v = tl.load(v, mask=live[:, None] & (lane < D)[None, :], other=0)
        elif D == LANES:
            k, v = tl.load(k), tl.load(v)
        else:
            k = tl.load(k, mask=(lane < D)[:, None], other=0)
            v = tl.load(v, mask=(lane < D)[None, :], other=0)
        if PACKED:
            k, v = halves_of_bytes(k, INT8), halves_of_bytes(v, INT8)
            if MASKED:
                scale_of_k = tl.load(k_scales + column, mask=live, other=0)
                scale_of_v = tl.load(v_scales + column, mask=live, other=0)
            else:
                scale_of_k, scale_of_v = tl.load(k_scales + column), tl.load(v_scales + column)
        elif INTERPRETED:
            # the interpreter multiplies the bit patterns of bf16
            k, v = k.to(tl.float32), v.to(tl.float32)
        else:
            k, v = k.to(query.dtype), v.to(query.dtype)
        score = tl.dot(query, k, input_precision="ieee") * scale
        if PACKED:
            score *= scale_of_k[None, :]
        if MASKED:
            seen = column[None, :] <= slot[:, None]
            if HAS_WINDOW:
                seen = seen & (column[None, :] > slot[:, None] - window)
            score = tl.where(seen, score, float("-inf"))
        top = tl.maximum(highest, tl.max(score, 1))
        # a query that has seen nothing yet: no difference of infinities
        safe = tl.where(top == float("-inf"), 0.0, top) if MASKED and HAS_WINDOW else top
        share = tl.exp2(score - safe[:, None])
        shrink = tl.exp2(highest - safe)
        weight = weight * shrink + tl.sum(share, 1)
        if PACKED:
            further, inverse = power_of_two(tl.maximum(reach, tl.max(scale_of_v, 0)))
            share *= (scale_of_v * inverse)[None, :]
            shrink *= reach * inverse
            reach = further
        total = tl.dot(cast(share, v.dtype), v, total * shrink[:, None], input_precision="ieee")
        highest = top
    return total, weight, highest, reach


@triton.jit
def _prompt_attention_kernel(
    q, k_cache, v_cache, k_scales, v_scales, blocks, starts, out, scale, window,
    k_batch, k_head, k_position, v_batch, v_head, v_position, s_batch, s_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
    STEP: tl.constexpr, HAS_WINDOW: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Program (b, h): head h of a block of up to ROWS successive tokens of one sequence.

    blocks[b] = (first row, sequence, slot of the first, tokens, which may be none). Query row r at slot s
    sees keys max(starts, s + 1 - window) … s of its sequence: out = Σ e^score v / Σ e^score, score = q·k
    times ``scale / ln 2`` for powers of two. All sums fp32. PACKED: elements of 8 bits, exact in fp16, meet
    queries and probabilities of fp16 over powers of two; the rows' scales act on the products.
    """
    # the last blocks have the most keys: first
    block = blocks + 4 * (tl.num_programs(0) - 1 - tl.program_id(0))
    head = tl.program_id(1)
    first_row, sequence = tl.load(block).to(tl.int64), tl.load(block + 1).to(tl.int64)
    first_slot, count = tl.load(block + 2), tl.load(block + 3)
    kv_head = (head // GROUP).to(tl.int64)
    member = tl.arange(0, ROWS)
    lane = tl.arange(0, LANES)
    slot, last = first_slot + member, first_slot + count - 1
    keys = k_cache + sequence * k_batch + kv_head * k_head
    values = v_cache + sequence * v_batch + kv_head * v_head
    held = (member < count)[:, None] & (lane < D)[None, :]
    at = ((first_row + member)[:, None] * HEADS + head) * D + lane[None, :]
    query = tl.load(q + at, mask=held, other=0)
    INT8: tl.constexpr = tl.int8 == k_cache.dtype.element_ty
    reach = tl.full([], 2.0**-126, tl.float32)
    scales = sequence * s_batch + kv_head * s_head
    k_scales, v_scales = k_scales + scales if PACKED else k_scales, v_scales + scales if PACKED else v_scales
    if PACKED:
        query, size = half_rows(query.to(tl.float32))
        scale = (size * scale)[:, None]
        keys, values = keys.to(tl.pointer_type(tl.int8)), values.to(tl.pointer_type(tl.int8))
    elif INTERPRETED:
        query = query.to(tl.float32)
    begin = tl.load(starts + sequence).to(tl.int32)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, LANES], tl.float32)
    if HAS_WINDOW:
        begin = tl.maximum(begin, first_slot + 1 - window)
        # before this key some query's window has not begun
        edge = begin + tl.cdiv(tl.maximum(last + 1 - window - begin, 0), STEP) * STEP
        edge = tl.minimum(edge, begin + tl.cdiv(last + 1 - begin, STEP) * STEP)
        total, weight, highest, reach = _attend(
            query, slot, keys, values, k_scales, v_scales, k_position, v_position, begin, edge, last, window,
            scale, total, weight, highest, reach, D, LANES, STEP, INT8, PACKED, True, True,
        )  # fmt: skip
        begin = edge
    # keys that every query of the block sees
    whole = begin + tl.maximum(first_slot + 1 - begin, 0) // STEP * STEP
    total, weight, highest, reach = _attend(
        query, slot, keys, values, k_scales, v_scales, k_position, v_position, begin, whole, last, window,
        scale, total, weight, highest, reach, D, LANES, STEP, INT8, PACKED, HAS_WINDOW, False,
    )  # fmt: skip
    total, weight, highest, reach = _attend(
        query, slot, keys, values, k_scales, v_scales, k_position, v_position, whole, last + 1, last, window,
        scale, total, weight, highest, reach, D, LANES, STEP, INT8, PACKED, HAS_WINDOW, True,
    )  # fmt: skip
    if PACKED:
        total *= reach
    tl.store(out + at, cast(total / weight[:, None], out.dtype.element_ty), mask=held)


def prompt_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    blocks: torch.Tensor,
    starts: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(q·Kᵀ·scale)·V of successive tokens over the cache, which has their keys and values already.

    q and out ``[N, q_heads, D]``; caches ``[batch, kv_heads, capacity, D]``, views with consecutive D; blocks
    int32 ``[n, 4]``: first row, sequence, slot of that row, rows, at most ``prompt_block_rows`` of
    them; starts int64 ``[batch]``: the first slot of each sequence. window 0: none. Caches of int8 or
    float8_e4m3fn have k_scales and v_scales fp32 ``[batch, kv_heads, capacity]`` of equal strides. Nothing is
    checked: GpuPrompt makes all of it. A row's result depends on nothing but its own block.
    """
    _, heads, dim = q.shape
    lanes = triton.next_power_of_2(max(dim, 16))
    shape = choose_prompt_attention(lanes, q.element_size())
    with on_device(q.device):
        _prompt_attention_kernel[(len(blocks), heads)](
            q, k_cache, v_cache, k_scales, v_scales, blocks, starts, out, scale * 1.4426950408889634, window,
            *k_cache.stride()[:3], *v_cache.stride()[:3],
            *(k_scales.stride()[:2] if k_scales is not None else (0, 0)),
            HEADS=heads, GROUP=heads // k_cache.shape[1], D=dim, LANES=lanes, ROWS=shape.rows,
            STEP=shape.step, HAS_WINDOW=window > 0, PACKED=k_scales is not None,
            num_warps=shape.warps, num_stages=shape.stages, enable_fp_fusion=True,
        )  # fmt: skip
    return out


def prompt_block_rows(dim: int, itemsize: int) -> int:
    """The most tokens of one block, for heads of ``dim`` elements."""
    return choose_prompt_attention(triton.next_power_of_2(max(dim, 16)), itemsize).rows
