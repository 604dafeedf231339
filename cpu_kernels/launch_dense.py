"""Launchers of what has no packed weight: norms and decode attention. Checks and threads as in launch.py."""

import ctypes

import torch
from torch import Tensor

from realizar_torch.cpu_kernels import pool
from realizar_torch.cpu_kernels.attention import attend_batch
from realizar_torch.cpu_kernels.checks import check_tensor
from realizar_torch.cpu_kernels.launch import threads_for
from realizar_torch.cpu_kernels.norm import norm_vectors
from realizar_torch.cpu_kernels.rooms import room
from realizar_torch.errors import FormatError


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """fp32 ``x [M, K] / sqrt(mean(x²) + eps) * weight [K]``."""
    return _norm(x, weight, None, eps, centre=False)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """fp32 ``(x [M, K] - mean) / sqrt(var + eps) * weight [K] + bias [K]``, biased variance."""
    return _norm(x, weight, bias, eps, centre=True)


def _norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, centre: bool) -> Tensor:
    check_tensor("x", x, torch.float32, (None, None), contiguous=False)
    x, (count, width) = x.contiguous(), x.shape
    check_tensor("weight", weight, torch.float32, (width,))
    if bias is not None:
        check_tensor("bias", bias, torch.float32, (width,))
    out = room(count, width)
    pool.run(
        norm_vectors,
        threads_for(count * width),
        int(centre),
        x.data_ptr(),
        count,
        width,
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        float(eps),
        out.data_ptr(),
    )
    return out


def decode_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: Tensor,
    ends: Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """One query per sequence over its cached rows: ``softmax(scale q kᵀ) v`` → fp32 [B, heads, head_dim].

    ``q`` fp32 [B, heads, head_dim]; ``keys`` and ``values`` fp32 [B, kv_heads, max_length, head_dim], heads a
    multiple of kv_heads. Sequence b sees rows ``starts[b] ≤ t < ends[b]`` (int64 [B]), with a ``window`` the
    last ``window`` of them. ``softcap`` bounds scores by ``softcap * tanh(score / softcap)``.
    """
    check_tensor("q", q, torch.float32, (None, None, None), contiguous=False)
    q, (batch, heads, head_dim) = q.contiguous(), q.shape
    check_tensor("keys", keys, torch.float32, (batch, None, None, head_dim))
    check_tensor("values", values, torch.float32, keys.shape)
    kv_heads, max_length = keys.shape[1:3]
    if kv_heads == 0 or heads % kv_heads:
        raise FormatError(f"q has {heads} heads, expected a multiple of the {kv_heads} of keys")
    for name, bound in (("starts", starts), ("ends", ends)):
        check_tensor(name, bound, torch.int64, (batch,))
    if window is not None:
        if window < 1:
            raise FormatError(f"window is {window}, expected at least 1")
        starts = torch.maximum(starts, ends - window)
    if not bool(((starts >= 0) & (starts < ends) & (ends <= max_length)).all()):
        found = f"starts {starts.tolist()}, ends {ends.tolist()}"
        raise FormatError(f"{found}: expected 0 <= start < end <= {max_length} for every sequence")
    threads = threads_for(2 * heads * head_dim * int((ends - starts).sum()))
    scratch = room(threads, heads // kv_heads, max_length)
    out, counter = room(batch, heads, head_dim), ctypes.c_int64()
    pool.run(
        attend_batch,
        threads,
        ctypes.addressof(counter),
        q.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        starts.data_ptr(),
        ends.data_ptr(),
        batch,
        heads,
        kv_heads,
        max_length,
        head_dim,
        float(scale),
        float(softcap or 0),
        scratch.data_ptr(),
        out.data_ptr(),
    )
    return out
