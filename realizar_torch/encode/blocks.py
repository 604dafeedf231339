"""Bit fields of blocks: small integers into bytes, and fields into the bytes of a block."""

from collections.abc import Mapping

import torch
from torch import Tensor

from realizar_torch.formats import BlockFormat

# 0xFE00
_NAN = -0x200


def pack_bits(values: Tensor, lanes: int, width: int) -> Tensor:
    """Integers below ``2^width``, ``[blocks, n]`` → uint8 ``[blocks, n * width / 8]``.

    A run of ``lanes`` bytes takes 8/width consecutive runs of ``lanes`` values, lowest bits first.
    """
    runs = values.to(torch.uint8).reshape(len(values), -1, 8 // width, lanes)
    packed = runs[:, :, 0]
    for place in range(1, 8 // width):
        packed = packed | (runs[:, :, place] << (place * width))
    return packed.reshape(len(values), -1)


def k4_fields(levels: Tensor) -> Tensor:
    """Bytes ``[8, ...]`` → the six bits of each that Q4_K gives back once ggml has stored them.

    The upper two bits of the first four are stored over those of the last four.
    """
    low, high = levels.split(4)
    return torch.cat([low & 63, (high & 63) | ((low >> 6) << 4)])


def pack_k4_scales(scales: Tensor, minima: Tensor) -> Tensor:
    """Eight scales and eight minima below 64, ``[blocks, 8]`` each → the 12 bytes of Q4_K and Q5_K."""
    low_scales, high_scales = scales.to(torch.uint8).split(4, -1)
    low_minima, high_minima = minima.to(torch.uint8).split(4, -1)
    return torch.cat(
        [
            low_scales | ((high_scales >> 4) << 6),
            low_minima | ((high_minima >> 4) << 6),
            (high_scales & 15) | ((high_minima & 15) << 4),
        ],
        -1,
    )


def join_fields(fields: Mapping[str, Tensor], spec: BlockFormat) -> Tensor:
    """Fields ``[blocks, count]`` → uint8 ``[blocks, block_bytes]``; floats become fp16."""
    parts = []
    for field in spec.fields:
        part = fields[field.name]
        if field.kind == "f16":
            part = _half_bits(part).reshape(-1, field.count)
        parts.append(part.contiguous().view(torch.uint8))
    return torch.cat(parts, -1)


def _half_bits(values: Tensor) -> Tensor:
    """fp16 as int16; NaN, which devices write in different ways, as x86-64 does."""
    return torch.where(values.isnan(), _NAN, values.to(torch.float16).view(torch.int16))
