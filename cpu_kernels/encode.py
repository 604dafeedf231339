"""Float rows to blocks, as ``realizar_torch.encode`` defines them: 16 rows at a time, one per SIMD lane."""

import ctypes
import functools

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from realizar_torch.cpu_kernels import pool
from realizar_torch.cpu_kernels.checks import check_tensor
from realizar_torch.cpu_kernels.encode_k import K_ENCODERS
from realizar_torch.cpu_kernels.encode_lanes import BYTE_COLUMN, COLUMN, LANES
from realizar_torch.cpu_kernels.encode_legacy import LEGACY_ENCODERS
from realizar_torch.cpu_kernels.jit import jit
from realizar_torch.cpu_kernels.memory import (
    fetch_add_i64,
    load_f32,
    load_u8,
    stack_alloc,
    store_f32,
    store_u8,
)
from realizar_torch.cpu_kernels.rooms import room
from realizar_torch.cpu_kernels.simd import load_f32x16
from realizar_torch.formats import get_packed_format

_ENCODERS = LEGACY_ENCODERS | K_ENCODERS
# fp32 columns and byte columns of the largest block
_VALUES, _BYTES = 256 * COLUMN, 256 * BYTE_COLUMN


def encode(weight: Tensor, fmt: str, importance: Tensor | None = None) -> Tensor:
    """Finite fp32 ``weight [rows, K]`` → uint8 ``[rows, row_bytes]``, K zero-padded to whole blocks.

    ``importance`` fp32 ``[K]``, non-negative.
    """
    check_tensor("weight", weight, torch.float32, (None, None))
    spec, (rows, columns) = get_packed_format(fmt), weight.shape
    if importance is not None:
        check_tensor("importance", importance, torch.float32, (columns,), contiguous=False)
        importance = pad(importance, (0, spec.blocks(columns) * spec.block_size - columns)).contiguous()
    out, counter = room(rows, spec.row_bytes(columns), dtype=torch.uint8), ctypes.c_int64()
    pool.run(
        _rows_encoder(fmt),
        min(torch.get_num_threads(), -(-rows // LANES)),
        ctypes.addressof(counter),
        weight.data_ptr(),
        rows,
        columns,
        0 if importance is None else importance.data_ptr(),
        out.data_ptr(),
    )
    return out


@functools.cache
def _rows_encoder(fmt: str):
    """The kernel of a format, compiled when first needed."""
    spec, encode_block = get_packed_format(fmt), _ENCODERS[fmt]
    block_size, block_bytes = spec.block_size, spec.block_bytes

    @jit
    def encode_rows(thread, n_threads, counter, weight, rows, width, importance, out):
        """fp32 weight [rows, width] → blocks; ``counter``: address of a zero int64."""
        values, bytes_ = stack_alloc(_VALUES, 64), stack_alloc(_BYTES, 64)
        blocks = (width + block_size - 1) // block_size
        means = stack_alloc(COLUMN, 64)
        while True:
            first = fetch_add_i64(counter, LANES)
            if first >= rows:
                return
            count = min(LANES, rows - first)
            for lane in range(LANES):
                row = weight + 4 * width * (first + min(lane, count - 1))
                store_f32(means, _mean_square(row, width, blocks * block_size) if importance else 0, 4 * lane)
            for block in range(blocks):
                for lane in range(LANES):
                    # lanes without a row repeat the last one
                    row = weight + 4 * width * (first + min(lane, count - 1))
                    _load_column(row, width, block * block_size, block_size, values + 4 * lane)
                weights = importance + 4 * block_size * block if importance else 0
                encode_block(values, weights, load_f32x16(means), bytes_)
                for lane in range(count):
                    target = out + block_bytes * (blocks * (first + lane) + block)
                    for i in range(block_bytes):
                        store_u8(target, load_u8(bytes_, BYTE_COLUMN * i + lane), i)

    return encode_rows


@jit(device=True)
def _load_column(row, width, start, count, target):
    """Values ``start`` … of a row, zeros beyond ``width``, into one lane of ``count`` columns."""
    present = min(count, width - start)
    for i in range(present):
        store_f32(target, load_f32(row, 4 * (start + i)), COLUMN * i)
    for i in range(present, count):
        store_f32(target, 0, COLUMN * i)


@jit(device=True)
def _mean_square(row, width, padded_width):
    """Mean square of a row that is zero-padded, summed in order."""
    total = np.float32(0)
    for i in range(width):
        value = load_f32(row, 4 * i)
        total += value * value
    return total / np.float32(padded_width)
