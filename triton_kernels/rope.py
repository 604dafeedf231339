"""Per-head norm of Q and K, rotary embedding and the KV-cache write of new positions, in one launch."""

import torch
import triton
import triton.language as tl

from realizar_torch.errors import FormatError
from realizar_torch.triton_kernels.launch import FLOAT_DTYPES, on_device, same_device, vector
from realizar_torch.triton_kernels.primitives import cast, release_successor, wait_for_predecessor

STYLES = ("interleaved", "halves")


@triton.jit
def _rope_kernel(
    qkv, positions, starts, cos, sin, q_norm, k_norm, eps, q_out, k_cache, v_cache,
    k_batch, k_head, k_position, v_batch, v_head, v_position, capacity, tokens,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr,
    HALVES: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_STARTS: tl.constexpr, ZERO_CENTERED: tl.constexpr, LANES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Program (m, h): head h of row m of qkv ``[M, Q_HEADS + 2 KV_HEADS, D]``; batch m // tokens, position
    positions[m].

    Pairs (2i, 2i+1) or halves (i, i + ROTARY/2) turn by the angle of (position, i): a' = a cos - b sin, b' =
    b cos + a sin. Angles count from starts[batch]. A position outside the cache is not written.
    """
    release_successor(DEPENDENT)
    wait_for_predecessor(DEPENDENT)
    m = tl.program_id(0)
    head = tl.program_id(1)
    lane = tl.arange(0, LANES)
    inside = lane < D
    source = qkv + (m.to(tl.int64) * (Q_HEADS + 2 * KV_HEADS) + head) * D
    position = tl.load(positions + m).to(tl.int64)
    value = tl.load(source + lane, mask=inside, other=0).to(tl.float32)
    # no angle and no place in the cache outside 0 … capacity-1
    position = tl.where(position < 0, capacity, position)
    reached = tl.where(position < capacity, lane, LANES)
    if head < Q_HEADS + KV_HEADS:
        if HALVES:
            partner = tl.where(lane < ROTARY // 2, lane + ROTARY // 2, lane - ROTARY // 2)
            angle = lane % (ROTARY // 2)
            first = lane < ROTARY // 2
        else:
            partner = lane ^ 1
            angle = lane // 2
            first = lane % 2 == 0
        turns = lane < ROTARY
        turn = position
        if HAS_STARTS:
            turn = tl.maximum(position - tl.load(starts + m // tokens), 0)
        other = tl.load(source + partner, mask=turns, other=0).to(tl.float32)
        if HAS_NORM:
            gain = q_norm
            if head >= Q_HEADS:
                gain = k_norm
            scale = 1.0 / tl.sqrt(tl.sum(value * value) / D + eps)
            own = tl.load(gain + lane, mask=inside, other=0).to(tl.float32)
            theirs = tl.load(gain + partner, mask=turns, other=0).to(tl.float32)
            if ZERO_CENTERED:
                own += 1.0
                theirs += 1.0
            value = value * scale * own
            other = other * scale * theirs
        c = tl.load(cos + turn * (ROTARY // 2) + angle, mask=reached < ROTARY, other=0)
        s = tl.load(sin + turn * (ROTARY // 2) + angle, mask=reached < ROTARY, other=0)
        turned = value * c + tl.where(first, -other, other) * s
        value = tl.where(turns, turned, value)
    stored = reached < D
    batch = (m // tokens).to(tl.int64)
    if head < Q_HEADS:
        query = q_out + (m.to(tl.int64) * Q_HEADS + head) * D
        tl.store(query + lane, cast(value, q_out.dtype.element_ty), mask=inside)
    elif head < Q_HEADS + KV_HEADS:
        key = k_cache + batch * k_batch + (head - Q_HEADS).to(tl.int64) * k_head + position * k_position
        tl.store(key + lane, cast(value, k_cache.dtype.element_ty), mask=stored)
    else:
        value_at = (
            v_cache
            + batch * v_batch
            + (head - Q_HEADS - KV_HEADS).to(tl.int64) * v_head
            + position * v_position
        )
        tl.store(value_at + lane, cast(value, v_cache.dtype.element_ty), mask=stored)


def rope_and_store(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    q_heads: int,
    style: str,
    starts: torch.Tensor | None = None,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    zero_centered: bool = False,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    dependent: bool = False,
) -> torch.Tensor:
    """Rotated queries ``[M, q_heads, D]``; keys (rotated) and values go into the caches at ``positions``.

    qkv ``[M, (q_heads + 2 kv_heads) * D]`` floats, M = batch * tokens with the tokens of a sequence together;
    positions ``[M]`` int32 or int64 on the device; cos and sin fp32 ``[max_position, rotary / 2]``; caches
    ``[batch, kv_heads, capacity, D]``, strided views with consecutive D. style: "interleaved" (pairs 2i,
    2i+1) or "halves" (i, i + rotary/2). starts ``[batch]``: first position of each sequence, where its angle
    is 0. q_norm and k_norm ``[D]``: RMSNorm of every head before the rotation.
    """
    if style not in STYLES:
        raise FormatError(f"unknown rotary style {style!r}; known: {', '.join(STYLES)}")
    batch, kv_heads, capacity, dim = k_cache.shape
    heads = q_heads + 2 * kv_heads
    rows = qkv.shape[0]
    if qkv.dim() != 2 or qkv.shape[1] != heads * dim or rows % batch or not qkv.is_contiguous():
        raise FormatError(
            f"qkv is {tuple(qkv.shape)}; expected contiguous (n * {batch}, {heads * dim}) for {q_heads} + "
            f"2*{kv_heads} heads of {dim}"
        )
    if v_cache.shape != k_cache.shape or k_cache.stride(-1) != 1 or v_cache.stride(-1) != 1:
        raise FormatError(
            f"caches are {tuple(k_cache.shape)} and {tuple(v_cache.shape)}; expected equal, D consecutive"
        )
    if positions.shape != (rows,) or positions.dtype not in (torch.int32, torch.int64):
        raise FormatError(
            f"positions are {positions.dtype} {tuple(positions.shape)}; expected int32 or int64 ({rows},)"
        )
    if starts is not None and (starts.shape != (batch,) or starts.dtype not in (torch.int32, torch.int64)):
        raise FormatError(
            f"starts are {starts.dtype} {tuple(starts.shape)}; expected int32 or int64 ({batch},)"
        )
    rotary = 2 * cos.shape[-1]
    if cos.shape != sin.shape or cos.dtype != torch.float32 or sin.dtype != torch.float32 or rotary > dim:
        raise FormatError(
            f"cos and sin are {tuple(cos.shape)} and {tuple(sin.shape)}; expected fp32 (n, <= {dim}/2)"
        )
    if cos.shape[0] < capacity or not (cos.is_contiguous() and sin.is_contiguous()):
        raise FormatError(f"cos has {cos.shape[0]} positions; the cache has {capacity}")
    if (q_norm is None) != (k_norm is None) or (q_norm is not None and q_norm.dtype != k_norm.dtype):
        raise FormatError("q_norm and k_norm go together, in one dtype")
    device = same_device(qkv, positions, starts, cos, sin, k_cache, v_cache, q_norm, k_norm, out)
    result = out if out is not None else torch.empty(rows, q_heads, dim, dtype=out_dtype, device=device)
    if result.shape != (rows, q_heads, dim) or result.dtype not in FLOAT_DTYPES or not result.is_contiguous():
        raise FormatError(
            f"out is {result.dtype} {tuple(result.shape)}; expected contiguous ({rows}, {q_heads}, {dim})"
        )
    if rows == 0:
        return result
    with on_device(device):
        _rope_kernel[(rows, heads)](
            qkv, positions, starts, cos, sin, vector(q_norm, dim, "q_norm"), vector(k_norm, dim, "k_norm"),
            eps, result,
            k_cache, v_cache, *k_cache.stride()[:3], *v_cache.stride()[:3], capacity, rows // batch,
            Q_HEADS=q_heads, KV_HEADS=kv_heads, D=dim, ROTARY=rotary, HALVES=style == "halves",
            HAS_NORM=q_norm is not None, HAS_STARTS=starts is not None, ZERO_CENTERED=zero_centered,
            LANES=triton.next_power_of_2(dim),
            DEPENDENT=dependent, num_warps=1, enable_fp_fusion=True, launch_pdl=dependent,
        )  # fmt: skip
    return result
