"""Decode attention: rotates the new position, writes it to the cache and attends to it and all before it."""

import math

import torch
import triton

from realizar_torch.errors import FormatError
from realizar_torch.triton_kernels.attention_kernel import attention_kernel
from realizar_torch.triton_kernels.configs import AttentionLaunch, choose_attention, choose_splits
from realizar_torch.triton_kernels.launch import FLOAT_DTYPES, on_device, same_device, vector
from realizar_torch.triton_kernels.quantize import Int8Activations, empty_int8

# rows of the smallest tensor-core product
QUERY_ROWS = 16
PACKED_DTYPES = (torch.int8, torch.float8_e4m3fn)
LOG2_E = math.log2(math.e)


def attention_scratch(
    batch: int,
    q_heads: int,
    kv_heads: int,
    dim: int,
    capacity: int,
    device: torch.device,
    splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Partial sums, their maxima and weights, and the arrival counters (zero, and left at zero) of
    ``decode_attention``, for ``splits`` programs per sequence and key head.
    """
    splits = splits or choose_splits(batch, kv_heads, capacity)
    rows = triton.next_power_of_2(q_heads // kv_heads)
    # half of them are the least that a product adds over
    lanes = triton.next_power_of_2(max(dim, 32))
    return (
        torch.empty(batch * kv_heads, splits, rows, lanes, dtype=torch.float32, device=device),
        torch.empty(batch * kv_heads, splits, rows, 2, dtype=torch.float32, device=device),
        torch.zeros(batch * kv_heads, dtype=torch.int32, device=device),
    )


def decode_attention(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    *,
    scale: float,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
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
    fp32 ``[≥ capacity, rotary / 2]``: halves (i, i + rotary/2) turn, the angle counts from starts; None:
    nothing turns. q_norm and k_norm ``[D]``: RMSNorm of every head before that. ``softcap`` c > 0: scores are
    c·tanh(score / c). Caches of int8 or float8_e4m3fn have ``k_scales`` and ``v_scales``, fp32 ``[batch,
    kv_heads, capacity]``, one per row. Returns fp32 ``[batch, q_heads * D]`` and, with
    ``quantize`` (or ``int8`` tensors to fill), its int8 form for the output projection. Deterministic.
    """
    batch, kv_heads, capacity, dim = k_cache.shape
    heads = qkv.shape[1] // dim if qkv.dim() == 2 else 0
    q_heads = heads - 2 * kv_heads
    if q_heads < 1 or q_heads % kv_heads or qkv.shape != (batch, heads * dim) or not qkv.is_contiguous():
        raise FormatError(
            f"qkv is {tuple(qkv.shape)}; expected contiguous ({batch}, (n + 2) * {kv_heads} * {dim})"
        )
    _check_caches(k_cache, v_cache, k_scales, v_scales)
    for name, value in (("positions", positions), ("starts", starts)):
        if value is not None and (value.shape != (batch,) or value.dtype not in (torch.int32, torch.int64)):
            raise FormatError(
                f"{name} are {value.dtype} {tuple(value.shape)}; expected int32 or int64 ({batch},)"
            )
    rotary = _rotary_dim(cos, sin, capacity, dim)
    if (q_norm is None) != (k_norm is None):
        raise FormatError("q_norm and k_norm go together")
    group, width = q_heads // kv_heads, q_heads * dim
    quantize = quantize or int8 is not None
    if quantize and dim % 32:
        raise FormatError(f"heads of {dim} are not whole blocks of 32; quantize the result separately")
    device = same_device(
        qkv, k_cache, v_cache, k_scales, v_scales, positions, starts, cos, sin, q_norm, k_norm, out
    )
    result = out if out is not None else torch.empty(batch, width, dtype=torch.float32, device=device)
    if quantize and int8 is None:
        int8 = empty_int8(batch, width, device)
    partial, extremes, arrived = scratch or attention_scratch(batch, q_heads, kv_heads, dim, capacity, device)
    lanes, splits = partial.shape[3], partial.shape[1]
    # fp32 products run on no matrix unit and need no rows to fill it
    least = 1 if k_cache.dtype == torch.float32 else QUERY_ROWS
    rows = max(least, triton.next_power_of_2(group))
    shape = launch or choose_attention(lanes, k_cache.element_size(), rows)
    # powers of two instead of e
    factor = 2 * LOG2_E * scale / softcap if softcap > 0 else LOG2_E * scale
    with on_device(device):
        attention_kernel[(batch, kv_heads, splits)](
            qkv, k_cache, v_cache, k_scales, v_scales, positions, starts, cos, sin,
            vector(q_norm, dim, "q_norm"), vector(k_norm, dim, "k_norm"), eps, partial, extremes, arrived,
            result, *(int8 or (None, None, None)), *k_cache.stride()[:3], *v_cache.stride()[:3],
            *(k_scales.stride()[:2] if k_scales is not None else (0, 0)), capacity, factor, window,
            LOG2_E * softcap, width, shape.minimum, splits,
            KV_HEADS=kv_heads, GROUP=group, D=dim, ROTARY=rotary, G=rows,
            P=triton.next_power_of_2(group), LANES=lanes, W=shape.warps, T=shape.tile, STAGES=shape.stages,
            AHEAD=shape.ahead, MERGE=shape.merge,
            HAS_WINDOW=window > 0, HAS_SOFTCAP=softcap > 0, HAS_STARTS=starts is not None,
            HAS_NORM=q_norm is not None, ZERO_CENTERED=zero_centered, PACKED=k_scales is not None,
            INT8=quantize, DEPENDENT=dependent,
            num_warps=shape.warps, enable_fp_fusion=True, launch_pdl=dependent,
        )  # fmt: skip
    return result, int8


def _check_caches(
    k_cache: torch.Tensor, v_cache: torch.Tensor, k_scales: torch.Tensor | None, v_scales: torch.Tensor | None
) -> None:
    known = FLOAT_DTYPES + PACKED_DTYPES
    if v_cache.shape != k_cache.shape or v_cache.dtype != k_cache.dtype or k_cache.dtype not in known:
        raise FormatError(
            f"caches are {k_cache.dtype} {tuple(k_cache.shape)} and {v_cache.dtype} {tuple(v_cache.shape)}"
        )
    if k_cache.stride(-1) != 1 or v_cache.stride(-1) != 1:
        raise FormatError("the last dimension of both caches must be consecutive in memory")
    packed = k_cache.dtype in PACKED_DTYPES
    if packed and k_cache.shape[-1] % 2:
        raise FormatError(f"heads of {k_cache.shape[-1]} elements; those of 8 bits are read in pairs")
    for cache in (k_cache, v_cache) if packed else ():
        if cache.data_ptr() % 2 or any(stride % 2 for stride in cache.stride()[:3]):
            raise FormatError(
                f"a cache of 8 bits has strides {cache.stride()} and address % 2 = {cache.data_ptr() % 2}; "
                "its rows must begin at even addresses"
            )
    for name, scales in (("k_scales", k_scales), ("v_scales", v_scales)):
        if (scales is not None) != packed:
            raise FormatError(f"a {k_cache.dtype} cache {'needs' if packed else 'takes no'} {name}")
        if scales is not None and (scales.shape != k_cache.shape[:3] or scales.dtype != torch.float32):
            raise FormatError(
                f"{name} are {scales.dtype} {tuple(scales.shape)}; expected fp32 {tuple(k_cache.shape[:3])}"
            )
    if (
        k_scales is not None
        and v_scales is not None
        and (k_scales.stride() != v_scales.stride() or k_scales.stride(-1) != 1)
    ):
        raise FormatError("k_scales and v_scales must have the same strides, and consecutive positions")


def _rotary_dim(cos: torch.Tensor | None, sin: torch.Tensor | None, capacity: int, dim: int) -> int:
    """How many elements of a head turn; 0 without angles."""
    if cos is None or sin is None:
        return 0
    rotary = 2 * cos.shape[-1]
    if cos.shape != sin.shape or cos.dtype != torch.float32 or sin.dtype != torch.float32 or rotary > dim:
        raise FormatError(
            f"cos and sin are {tuple(cos.shape)} and {tuple(sin.shape)}; expected fp32 (n, <= {dim}/2)"
        )
    if cos.shape[0] < capacity or not (cos.is_contiguous() and sin.is_contiguous()):
        raise FormatError(f"cos has {cos.shape[0]} positions; the cache has {capacity}")
    return rotary
