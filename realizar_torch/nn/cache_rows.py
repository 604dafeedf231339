"""Rows of a quantized key/value cache: int8 or fp8 (e4m3) elements, one scale per position and head."""

import torch
from torch import Tensor

# the largest element of a row becomes this
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def row_bytes(head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one row of a cache, its scale included."""
    return head_dim * dtype.itemsize + (torch.float32.itemsize if dtype in LARGEST else 0)


def quantize_rows(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """rows [..., D] -> elements of ``dtype`` [..., D] and scales fp32 [...]: scale = amax / largest.

    Elements are x / scale, rounded to nearest even, so the error of one is at most scale / 2 (int8), or
    2^-4 of itself and scale / 1024 (fp8). A NaN or an infinity makes the scale of its row NaN.
    """
    x = rows.float()
    amax = x.abs().amax(-1)
    # a tensor: by a number torch multiplies with the reciprocal on some devices
    scales = amax / torch.full_like(amax, LARGEST[dtype])
    scales = torch.where(amax < torch.inf, scales, torch.nan)
    inverse = torch.where(scales > 0, 1.0 / scales, 0.0)
    inverse = torch.where(inverse < torch.inf, inverse, 0.0)
    scaled = torch.where(inverse[..., None] > 0, x * inverse[..., None], 0.0)
    if dtype == torch.int8:
        scaled = scaled.round().clamp(-127, 127)
    return scaled.to(dtype), scales


def dequantize_rows(elements: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """What ``quantize_rows`` made, as floats [..., D]."""
    return (elements.float() * scales[..., None]).to(dtype)
