"""Decode attention: rotates the new position, writes it to the cache and attends to it and all before it.

One launch: the cache is split over programs, and the last one to finish merges them.
"""

import torch
import triton
import triton.language as tl

from realizar_torch.errors import FormatError
from realizar_torch.triton_kernels.configs import AttentionLaunch, choose_attention, choose_splits
from realizar_torch.triton_kernels.launch import FLOAT_DTYPES, on_device, same_device, vector
from realizar_torch.triton_kernels.primitives import (
    INTERPRETED,
    cast,
    release_successor,
    wait_for_predecessor,
)
from realizar_torch.triton_kernels.quantize import Int8Activations, empty_int8, store_int8
from realizar_torch.triton_kernels.rope import rotated_heads

# tl.dot takes at least 16 rows
QUERY_ROWS = 16


@triton.jit
def _finish(
    total, weight, out, out_q, out_scale, out_sums, pair, kv_head, batch, width,
    ROWS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, LANES: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    """Store total / weight ``[ROWS, LANES]`` of GROUP query heads, and its int8 form."""
    member = tl.arange(0, ROWS)
    lane = tl.arange(0, LANES)
    heads = pair * GROUP + member
    held = (member < GROUP)[:, None] & (lane < D)[None, :]
    result = tl.where((weight > 0)[:, None], total / weight[:, None], 0.0)
    # a NaN weight compares false, and must not become a zero
    result = tl.where((weight == weight)[:, None], result, float("nan"))
    tl.store(out + heads[:, None] * D + lane[None, :], cast(result, out.dtype.element_ty), mask=held)
    if INT8:
        BLOCKS: tl.constexpr = ROWS * LANES // 32
        block = tl.arange(0, BLOCKS)
        inner = (16 * tl.arange(0, 2))[None, :, None] + tl.arange(0, 16)[None, None, :]
        own = block * 32 < GROUP * D
        columns = kv_head * (GROUP * D) + (block * 32)[:, None, None] + inner
        if LANES == D:
            exact = tl.reshape(result, [BLOCKS, 2, 16])
        else:
            # read back by other threads of this program, after the barrier
            tl.debug_barrier()
            exact = tl.load(out + batch.to(tl.int64) * width + columns, mask=own[:, None, None], other=0).to(
                tl.float32
            )
        columns = tl.where(own[:, None, None], columns, width)
        block = tl.where(own, kv_head * (GROUP * D // 32) + block, width // 32)
        store_int8(exact, block, columns, batch.to(tl.int64), width, out_q, out_scale, out_sums)


@triton.jit
def _merge(
    partial, extremes, out, out_q, out_scale, out_sums, pair, runs, kv_head, batch, width,
    GROUP: tl.constexpr, D: tl.constexpr, P: tl.constexpr, LANES: tl.constexpr, SPLITS: tl.constexpr,
    ALL: tl.constexpr, MERGE: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    """Add the partial sums of all runs of one K/V head, MERGE at a time, past the L1 cache; store out and its
    int8 form.
    """
    member = tl.arange(0, P)
    lane = tl.arange(0, LANES)
    every = tl.arange(0, ALL)[:, None]
    slot = (pair * SPLITS + every) * P + member[None, :]
    exists = (every < runs) & (member >= 0)[None, :]
    tops = tl.load(extremes + slot * 2, mask=exists, other=float("-inf"), cache_modifier=".cg")
    top = tl.max(tops, 0)
    weight = tl.zeros([P], tl.float32)
    total = tl.zeros([P, LANES], tl.float32)
    for first in range(0, runs, MERGE):
        one = (first + tl.arange(0, MERGE))[:, None]
        some = (pair * SPLITS + one) * P + member[None, :]
        there = (one < runs) & (member >= 0)[None, :]
        part = tl.load(extremes + some * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
        share = tl.load(extremes + some * 2 + 1, mask=there, other=0, cache_modifier=".cg")
        rows = partial + some[:, :, None] * LANES + lane[None, None, :]
        rows = tl.load(rows, mask=there[:, :, None], other=0, cache_modifier=".cg")
        shrink = tl.where(part > float("-inf"), tl.exp(part - top[None, :]), 0.0)
        shrink = tl.where(part == part, shrink, part)
        weight += tl.sum(shrink * share, 0)
        total += tl.sum(shrink[:, :, None] * rows, 0)
    _finish(
        total, weight, out, out_q, out_scale, out_sums, pair, kv_head, batch, width, P, GROUP, D, LANES, INT8
    )


@triton.jit
def _squash(score, softcap, HAS_SOFTCAP: tl.constexpr):
    """cap * tanh(score / cap)."""
    if HAS_SOFTCAP:
        score = softcap * (1.0 - 2.0 / (tl.exp(2.0 * score / softcap) + 1.0))
    return score


@triton.jit
def _attention_kernel(
    qkv, k_cache, v_cache, positions, starts, cos, sin, q_norm, k_norm, eps,
    partial, extremes, arrived, out, out_q, out_scale, out_sums,
    k_batch, k_head, k_position, v_batch, v_head, v_position, capacity, scale, window, softcap, width,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr, G: tl.constexpr,
    P: tl.constexpr, LANES: tl.constexpr,
    STEP: tl.constexpr, MINIMUM: tl.constexpr, SPLITS: tl.constexpr, ALL: tl.constexpr, MERGE: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_STARTS: tl.constexpr, HAS_NORM: tl.constexpr,
    ZERO_CENTERED: tl.constexpr, INT8: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Program (b, kv head, split): GROUP query heads against a run of positions, each K and V row read once.

    Positions max(starts[b], p + 1 - window) … p - 1 of the cache, p = positions[b], in runs of whole STEPs,
    and p itself from row b of qkv ``[B, GROUP * KV_HEADS + 2 * KV_HEADS, D]``; the last run's program writes
    p to the cache. Running maximum and sum, all fp32: score = q·k * scale, or cap * tanh(score / cap);
    out = Σ e^score v / Σ e^score. The program that arrives last adds the partial sums in split order, so the
    result does not depend on which one it was. A position outside the cache is not written and gives NaN.
    """
    release_successor(DEPENDENT)
    batch = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
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
    run = tl.maximum(tl.cdiv(tl.cdiv(past, STEP), SPLITS), MINIMUM) * STEP
    runs = tl.maximum(tl.cdiv(past, run), 1)
    if split < runs:
        member = tl.arange(0, G)
        lane = tl.arange(0, LANES)
        present = lane < D
        keys = k_cache + batch.to(tl.int64) * k_batch + kv_head.to(tl.int64) * k_head
        values = v_cache + batch.to(tl.int64) * v_batch + kv_head.to(tl.int64) * v_head
        begin = start + split * run
        end = tl.minimum(begin + run, start + past)
        wait_for_predecessor(DEPENDENT)
        heads = qkv + batch.to(tl.int64) * ((GROUP + 2) * KV_HEADS * D)
        turn = tl.minimum(tl.maximum(position - origin, 0), capacity - 1)
        query = rotated_heads(
            heads + (kv_head * GROUP + member)[:, None] * D, (member < GROUP)[:, None], turn, cos, sin,
            q_norm, eps, D, ROTARY, LANES, HAS_NORM, ZERO_CENTERED,
        )  # fmt: skip
        query = cast(query, k_cache.dtype.element_ty)
        if INTERPRETED:
            query = query.to(tl.float32)
        highest = tl.full([G], float("-inf"), tl.float32)
        weight = tl.zeros([G], tl.float32)
        total = tl.zeros([G, LANES], tl.float32)
        for first in range(begin, end, STEP):
            column = first + tl.arange(0, STEP)
            live = column < end
            mask = live[:, None] & present[None, :]
            at = column.to(tl.int64)[:, None]
            k = tl.load(keys + at * k_position + lane[None, :], mask=mask, other=0)
            v = tl.load(values + at * v_position + lane[None, :], mask=mask, other=0)
            if INTERPRETED:
                # the interpreter multiplies the bit patterns of bf16
                k, v = k.to(tl.float32), v.to(tl.float32)
            score = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
            score = tl.where(live[None, :], _squash(score, softcap, HAS_SOFTCAP), float("-inf"))
            top = tl.maximum(highest, tl.max(score, 1))
            share = tl.exp(score - top[:, None])
            shrink = tl.exp(highest - top)
            weight = weight * shrink + tl.sum(share, 1)
            total = total * shrink[:, None]
            total += tl.dot(cast(share, v.dtype), v, input_precision="ieee")
            highest = top
        if split == runs - 1:
            one = tl.zeros([1, 1], tl.int32)
            key_heads = heads + ((GROUP * KV_HEADS + kv_head) * D + one)
            k = rotated_heads(
                key_heads, one == 0, turn, cos, sin, k_norm, eps, D, ROTARY, LANES, HAS_NORM, ZERO_CENTERED
            )
            v = tl.load(key_heads + KV_HEADS * D + lane[None, :], mask=present[None, :], other=0)
            v = v.to(tl.float32)
            k, v = cast(k, k_cache.dtype.element_ty), cast(v, v_cache.dtype.element_ty)
            place = tl.where(known, position, 0).to(tl.int64)
            written = lane[None, :] < tl.where(known, D, 0)
            tl.store(keys + place * k_position + lane[None, :], k, mask=written)
            tl.store(values + place * v_position + lane[None, :], v, mask=written)
            # what a reader of the cache will see
            score = tl.sum(query.to(tl.float32) * k.to(tl.float32), 1) * scale
            score = _squash(score, softcap, HAS_SOFTCAP)
            score = tl.where(known, score, float("nan"))
            top = tl.maximum(highest, score)
            share = tl.exp(score - top)
            shrink = tl.exp(highest - top)
            weight = weight * shrink + share
            total = total * shrink[:, None] + share[:, None] * v.to(tl.float32)
            highest = top
        if runs == 1:
            _finish(
                total, weight, out, out_q, out_scale, out_sums, batch.to(tl.int64) * KV_HEADS + kv_head,
                kv_head, batch, width, G, GROUP, D, LANES, INT8,
            )  # fmt: skip
        else:
            pair = batch.to(tl.int64) * KV_HEADS + kv_head
            slot = (pair * SPLITS + split) * P
            own = member < P
            tl.store(partial + (slot + member)[:, None] * LANES + lane[None, :], total, mask=own[:, None])
            tl.store(extremes + (slot + member) * 2, highest, mask=own)
            tl.store(extremes + (slot + member) * 2 + 1, weight, mask=own)
            # every thread's stores come before the counter, and the counter before the merge's loads
            tl.debug_barrier()
            if tl.atomic_add(arrived + pair, 1, sem="acq_rel") == runs - 1:
                _merge(
                    partial, extremes, out, out_q, out_scale, out_sums, pair, runs, kv_head, batch, width,
                    GROUP, D, P, LANES, SPLITS, ALL, MERGE, INT8,
                )  # fmt: skip
                tl.store(arrived + pair, 0)


def attention_scratch(
    batch: int, q_heads: int, kv_heads: int, dim: int, capacity: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Partial sums, their maxima and weights, and the arrival counters (zero, and left at zero) of
    ``decode_attention``.
    """
    splits = choose_splits(batch, kv_heads, capacity)
    rows = batch * kv_heads * splits * triton.next_power_of_2(q_heads // kv_heads)
    return (
        torch.empty(rows, triton.next_power_of_2(max(dim, 16)), dtype=torch.float32, device=device),
        torch.empty(rows, 2, dtype=torch.float32, device=device),
        torch.zeros(batch * kv_heads, dtype=torch.int32, device=device),
    )


def decode_attention(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    scale: float,
    starts: torch.Tensor | None = None,
    window: int = 0,
    softcap: float = 0.0,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    zero_centered: bool = False,
    scratch: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    out: torch.Tensor | None = None,
    int8: Int8Activations | None = None,
    quantize: bool = False,
    launch: AttentionLaunch | None = None,
    dependent: bool = False,
) -> tuple[torch.Tensor, Int8Activations | None]:
    """softmax(q·Kᵀ·scale)·V of every sequence's new position, which is rotated and written to the caches.

    qkv ``[batch, (q_heads + 2 kv_heads) * D]`` floats; caches ``[batch, kv_heads, capacity, D]``, strided
    views with consecutive D; positions ``[batch]`` int32 or int64 on the device: where the new one goes, and
    it sees the cache from ``starts`` (None: 0) on, or the last ``window`` positions with itself. cos and sin
    fp32 ``[≥ capacity, rotary / 2]``: halves (i, i + rotary/2) turn, the angle counts from starts. q_norm and
    k_norm ``[D]``: RMSNorm of every head before that. Returns fp32 ``[batch, q_heads * D]`` and, with
    ``quantize`` (or ``int8`` tensors to fill), its int8 form for the output projection. Deterministic.
    """
    batch, kv_heads, capacity, dim = k_cache.shape
    heads = qkv.shape[1] // dim if qkv.dim() == 2 else 0
    q_heads = heads - 2 * kv_heads
    if q_heads < 1 or q_heads % kv_heads or qkv.shape != (batch, heads * dim) or not qkv.is_contiguous():
        raise FormatError(
            f"qkv is {tuple(qkv.shape)}; expected contiguous ({batch}, (n + 2) * {kv_heads} * {dim})"
        )
    if v_cache.shape != k_cache.shape or v_cache.dtype != k_cache.dtype or k_cache.dtype not in FLOAT_DTYPES:
        raise FormatError(
            f"caches are {k_cache.dtype} {tuple(k_cache.shape)} and {v_cache.dtype} {tuple(v_cache.shape)}"
        )
    if k_cache.stride(-1) != 1 or v_cache.stride(-1) != 1:
        raise FormatError("the last dimension of both caches must be consecutive in memory")
    for name, value in (("positions", positions), ("starts", starts)):
        if value is not None and (value.shape != (batch,) or value.dtype not in (torch.int32, torch.int64)):
            raise FormatError(
                f"{name} are {value.dtype} {tuple(value.shape)}; expected int32 or int64 ({batch},)"
            )
    rotary = 2 * cos.shape[-1]
    if cos.shape != sin.shape or cos.dtype != torch.float32 or sin.dtype != torch.float32 or rotary > dim:
        raise FormatError(
            f"cos and sin are {tuple(cos.shape)} and {tuple(sin.shape)}; expected fp32 (n, <= {dim}/2)"
        )
    if cos.shape[0] < capacity or not (cos.is_contiguous() and sin.is_contiguous()):
        raise FormatError(f"cos has {cos.shape[0]} positions; the cache has {capacity}")
    if (q_norm is None) != (k_norm is None):
        raise FormatError("q_norm and k_norm go together")
    group, width = q_heads // kv_heads, q_heads * dim
    quantize = quantize or int8 is not None
    if quantize and group * dim % 32:
        raise FormatError(
            f"{group} heads of {dim} are not whole blocks of 32; quantize the result separately"
        )
    device = same_device(qkv, k_cache, v_cache, positions, starts, cos, sin, q_norm, k_norm, out)
    result = out if out is not None else torch.empty(batch, width, dtype=torch.float32, device=device)
    if quantize and int8 is None:
        int8 = empty_int8(batch, width, device)
    partial, extremes, arrived = scratch or attention_scratch(batch, q_heads, kv_heads, dim, capacity, device)
    lanes, splits = triton.next_power_of_2(max(dim, 16)), choose_splits(batch, kv_heads, capacity)
    shape = launch or choose_attention(lanes, k_cache.element_size())
    with on_device(device):
        _attention_kernel[(batch, kv_heads, splits)](
            qkv, k_cache, v_cache, positions, starts, cos, sin, vector(q_norm, dim, "q_norm"),
            vector(k_norm, dim, "k_norm"), eps, partial, extremes, arrived, result,
            *(int8 or (None, None, None)),
            *k_cache.stride()[:3], *v_cache.stride()[:3], capacity, scale, window, softcap, width,
            KV_HEADS=kv_heads, GROUP=group, D=dim, ROTARY=rotary,
            G=max(QUERY_ROWS, triton.next_power_of_2(group)),
            P=triton.next_power_of_2(group), LANES=lanes, STEP=shape.step, MINIMUM=shape.minimum,
            SPLITS=splits, ALL=triton.next_power_of_2(splits), MERGE=shape.merge,
            HAS_WINDOW=window > 0, HAS_SOFTCAP=softcap > 0, HAS_STARTS=starts is not None,
            HAS_NORM=q_norm is not None, ZERO_CENTERED=zero_centered, INT8=quantize, DEPENDENT=dependent,
            num_warps=shape.warps, num_stages=shape.stages, enable_fp_fusion=True, launch_pdl=dependent,
        )  # fmt: skip
    return result, int8
