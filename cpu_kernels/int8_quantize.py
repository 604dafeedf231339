"""Quantize fp32 activations to int8 blocks of 32, bit for bit as ``reference.quantize_activations`` does."""

import numpy as np

from realizar_torch.cpu_kernels.jit import jit
from realizar_torch.cpu_kernels.memory import f32_bits, f32_from_bits, load_f32, stack_alloc, store_f32
from realizar_torch.cpu_kernels.simd import (
    bits_of_f32x16,
    load_f32x16,
    low_bytes,
    max_i32x16,
    maximum,
    splat_f32x16,
    splat_i32x16,
    store,
    sum_i32x16,
)

_BLOCK = 32
_SIGN_OFF, _INFINITY = 0x7FFFFFFF, 0x7F800000
# 1.5 * 2**23: adding it rounds to the nearest even integer, which then stands in the low bits
_ROUNDER, _ROUNDER_BITS = 12582912.0, 0x4B400000


@jit(device=True)
def quantized(low, high):
    """The 32 values ``low``, ``high`` (F32x16 each) as (scale, 16 int32 quants, the other 16).

    scale = max|x| / 127; q = round_half_even(x * (1 / scale)). A block whose 1 / scale is not finite becomes
    zeros; NaN or infinity in a block makes its scale NaN.
    """
    # as integers, absolute values of floats keep their order and NaN comes last
    amax = max_i32x16(maximum(bits_of_f32x16(low) & _SIGN_OFF, bits_of_f32x16(high) & _SIGN_OFF))
    factor = f32_from_bits(amax) / np.float32(127)
    inverse = np.float32(1) / factor
    if f32_bits(inverse) & _SIGN_OFF >= _INFINITY or amax >= _INFINITY:
        if amax >= _INFINITY:
            factor = np.float32(np.nan)
        return factor, splat_i32x16(0), splat_i32x16(0)
    # |x| / scale is at most 127 and an error far below 1/2: no clamp is needed
    first = bits_of_f32x16(low * inverse + _ROUNDER) - _ROUNDER_BITS
    return factor, first, bits_of_f32x16(high * inverse + _ROUNDER) - _ROUNDER_BITS


@jit(device=True)
def _quantize_block(low, high, block, q, scale, sums):
    """Quantize ``low``, ``high`` as block ``block`` of a vector; sums = scale * sum of 16 q each."""
    factor, first, second = quantized(low, high)
    store(q, low_bytes(first), _BLOCK * block)
    store(q, low_bytes(second), _BLOCK * block + 16)
    store_f32(scale, factor, 4 * block)
    store_f32(sums, factor * np.float32(sum_i32x16(first)), 8 * block)
    store_f32(sums, factor * np.float32(sum_i32x16(second)), 8 * block + 4)


@jit(device=True)
def quantize_blocks(x, count, first_block, last_block, q, scale, sums):
    """Quantize blocks ``first_block`` to ``last_block`` of the ``count`` fp32 at ``x``, zeros beyond.

    q int8 [32 * blocks], scale fp32 [blocks], sums fp32 [2 * blocks]: addresses of block 0.
    """
    whole = min(last_block, count // _BLOCK)
    for block in range(first_block, whole):
        start = 4 * _BLOCK * block
        _quantize_block(load_f32x16(x, start), load_f32x16(x, start + 64), block, q, scale, sums)
    for block in range(max(first_block, whole), last_block):
        padded = stack_alloc(128, 64)
        store(padded, splat_f32x16(0))
        store(padded, splat_f32x16(0), 64)
        for i in range(_BLOCK * block, count):
            store_f32(padded, load_f32(x, 4 * i), 4 * (i - _BLOCK * block))
        _quantize_block(load_f32x16(padded), load_f32x16(padded, 64), block, q, scale, sums)
