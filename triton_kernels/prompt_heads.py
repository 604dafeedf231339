"""The heads of a prompt's tokens: q and k normed and rotated, keys and values written to their cache rows."""

import torch
import triton
import triton.language as tl

from realizar_torch.triton_kernels.cache_rows import packed_row
from realizar_torch.triton_kernels.launch import on_device
from realizar_torch.triton_kernels.primitives import cast
from realizar_torch.triton_kernels.rope import rotated_heads


@triton.jit
def _heads_kernel(
    qkv, places, cos, sin, q_norm, k_norm, eps, q, k_cache, v_cache, k_scales, v_scales,
    k_batch, k_head, k_position, v_batch, v_head, v_position, s_batch, s_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr, G: tl.constexpr,
    LANES: tl.constexpr, HAS_NORM: tl.constexpr, ZERO_CENTERED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Program (r, h): key head h of token r, its value, and the GROUP query heads that share it.

    Row r of qkv ``[N, GROUP * KV_HEADS + 2 * KV_HEADS, D]`` and of cos and sin; places[r] = (sequence, slot)
    says where in the caches k and v go, sequence -1 that they go nowhere; q goes to row r of ``q [N, GROUP *
    KV_HEADS, D]``. PACKED: rows of the caches have a scale each.
    """
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = tl.load(places + 2 * row).to(tl.int64)
    slot = tl.load(places + 2 * row + 1).to(tl.int64)
    member = tl.arange(0, G)
    lane = tl.arange(0, LANES)[None, :]
    heads = qkv + row.to(tl.int64) * ((GROUP + 2) * KV_HEADS * D)
    held = (member < GROUP)[:, None]
    query = rotated_heads(
        heads + (kv_head * GROUP + member)[:, None] * D, held, row, cos, sin, q_norm, eps,
        D, ROTARY, LANES, HAS_NORM, ZERO_CENTERED,
    )  # fmt: skip
    at = (row.to(tl.int64) * KV_HEADS + kv_head) * GROUP + member[:, None]
    tl.store(q + at * D + lane, cast(query, q.dtype.element_ty), mask=held & (lane < D))
    one = tl.zeros([1, 1], tl.int32)
    key_heads = heads + ((GROUP * KV_HEADS + kv_head) * D + one)
    key = rotated_heads(
        key_heads, one == 0, row, cos, sin, k_norm, eps, D, ROTARY, LANES, HAS_NORM, ZERO_CENTERED
    )
    value = tl.load(key_heads + KV_HEADS * D + lane, mask=lane < D, other=0).to(tl.float32)
    keys = k_cache + sequence * k_batch + kv_head.to(tl.int64) * k_head + slot * k_position
    values = v_cache + sequence * v_batch + kv_head.to(tl.int64) * v_head + slot * v_position
    stored = lane < tl.where(sequence >= 0, D, 0)
    key, k_scale, _ = packed_row(key, k_cache.dtype.element_ty)
    value, v_scale, _ = packed_row(value, v_cache.dtype.element_ty)
    tl.store(keys + lane, key, mask=stored)
    tl.store(values + lane, value, mask=stored)
    if PACKED:
        at = sequence * s_batch + kv_head.to(tl.int64) * s_head + slot + tl.arange(0, 1)
        known = tl.arange(0, 1) < tl.where(sequence >= 0, 1, 0)
        tl.store(k_scales + at, k_scale, mask=known)
        tl.store(v_scales + at, v_scale, mask=known)


def place_heads(
    qkv: torch.Tensor,
    places: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    zero_centered: bool = False,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
) -> None:
    """Fills ``q`` and the caches' rows ``places``; nothing is checked: GpuPrompt makes all of it.

    qkv ``[N, (q_heads + 2 kv_heads) * D]`` floats; places int32 ``[N, 2]``: sequence (or -1) and slot of each
    token;
    cos and sin fp32 ``[N, rotary / 2]`` of the tokens' angles: halves (i, i + rotary/2) turn. q_norm and
    k_norm ``[D]``: RMSNorm of every head before that. q ``[N, q_heads, D]``; caches ``[batch, kv_heads,
    capacity, D]``, views with consecutive D; those of int8 or float8_e4m3fn have k_scales and v_scales fp32
    ``[batch, kv_heads, capacity]`` of equal strides.
    """
    rows, q_heads, dim = q.shape
    kv_heads = k_cache.shape[1]
    group = q_heads // kv_heads
    with on_device(qkv.device):
        _heads_kernel[(rows, kv_heads)](
            qkv, places, cos, sin, q_norm, k_norm, eps, q, k_cache, v_cache, k_scales, v_scales,
            *k_cache.stride()[:3], *v_cache.stride()[:3],
            *(k_scales.stride()[:2] if k_scales is not None else (0, 0)),
            KV_HEADS=kv_heads, GROUP=group, D=dim, ROTARY=2 * cos.shape[1], G=triton.next_power_of_2(group),
            LANES=triton.next_power_of_2(dim), HAS_NORM=q_norm is not None, ZERO_CENTERED=zero_centered,
            PACKED=k_scales is not None,
            num_warps=2, enable_fp_fusion=True,
        )  # fmt: skip
