"""Heads in float64: how they turn, what they attend to, how far a cache may be from them."""

import torch
from torch import Tensor

from realizar_torch.nn.cache_rows import LARGEST, dequantize_rows

# angles and norms in fp32, of heads up to 5
_ROTATION_ERROR = 1e-5
_LARGEST_HEAD = 5


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x ``[n, heads, D]`` by angles ``[n, rotary / 2]``: halves of the first elements are parts of complex
    numbers."""
    turn = torch.complex(cos.double(), sin.double())[:, None]
    rotary = 2 * cos.shape[1]
    first, second = x[..., :rotary].chunk(2, -1)
    z = torch.complex(first, second) * turn
    return torch.cat([z.real, z.imag, x[..., rotary:]], -1)


def attended(
    q: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float, softcap: float = 0.0
) -> Tensor:
    """softmax(q·Kᵀ·scale)·V of one sequence: q ``[n, heads, D]``, keys and values ``[kv_heads, capacity,
    D]``, seen bool ``[n, capacity]``; all in float64."""
    groups = q.unflatten(1, (len(keys), -1))
    scores = torch.einsum("nhgd,hcd->nhgc", groups, keys) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    shares = scores.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1)
    return torch.einsum("nhgc,hcd->nhgd", shares, values).flatten(1, 2)


def stored(cache: Tensor, scales: Tensor | None) -> Tensor:
    """What a reader of a cache sees, in float64."""
    return cache.double() if scales is None else dequantize_rows(cache, scales, torch.float64)


def storage_error(expected: Tensor, dtype: torch.dtype, turned_before: bool) -> Tensor:
    """How far rows ``[…, D]`` in a cache of ``dtype`` may be from those in float64 (see quantize_rows): rows
    that were turned before, or that floats hold as they are."""
    before = _ROTATION_ERROR if turned_before else 0.0
    if dtype not in LARGEST:
        rounding = _ROTATION_ERROR if dtype == torch.float32 else _LARGEST_HEAD * torch.finfo(dtype).eps / 2
        return torch.full_like(expected, rounding if turned_before else 0.0)
    scales = expected.abs().amax(-1, keepdim=True) / LARGEST[dtype]
    if dtype == torch.int8:
        return (0.501 * scales + before).expand_as(expected)
    return 1.001 * (2.0**-4 * expected.abs() + scales / 1024) + before
