"""int8 dot products of weight rows for Q2_K, Q3_K and Q6_K: super-blocks of sixteen sub-blocks of 16.

``dot_<fmt>(target, row, n_blocks, q, scale, sums) -> float32`` as in ``int8_legacy.py``; Q6_K takes four rows
at once, as in ``int8_affine_k.py``. A super-block is four chunks of 64 weights, one vector each. The factors
of all its sub-blocks, ``d * sub-scale * activation scale``, are computed in one F32x16 and spread over the
lanes of each chunk.
"""

from realizar_torch.cpu_kernels.int8_rows import FAR, NEAR, prefetch_block
from realizar_torch.cpu_kernels.jit import jit
from realizar_torch.cpu_kernels.memory import load_f16, load_i64, load_u32
from realizar_torch.cpu_kernels.simd import (
    as_i8x64,
    fma,
    i8x16_to_f32x16,
    load_f32x8,
    load_f32x16,
    load_u8x16,
    load_u8x32,
    load_u8x64,
    shuffle,
    splat_f32x16,
    splat_i32x16,
    splat_u8x64,
    sum_f32x16,
    to_f32x16,
    u8x16_to_f32x16,
)
from realizar_torch.cpu_kernels.simd_unpack import eights, shifted, twice, u8x16_of
from realizar_torch.cpu_kernels.targets import dot_two, dot_u8
from realizar_torch.formats import Q2_K, Q3_K, Q6_K

_Q2_BYTES, _Q2_QS, _Q2_D, _Q2_DMIN = (Q2_K.block_bytes, *(Q2_K.offset(f) for f in ("qs", "d", "dmin")))
_Q3_BYTES, _Q3_QS, _Q3_SCALES, _Q3_D = (Q3_K.block_bytes, *(Q3_K.offset(f) for f in ("qs", "scales", "d")))
_Q6_BYTES, _Q6_QH, _Q6_SCALES, _Q6_D = (Q6_K.block_bytes, *(Q6_K.offset(f) for f in ("qh", "scales", "d")))

# [v, v >> n]: 32 bytes become 64 whose upper half is shifted
then_shifted_1, then_shifted_2, then_shifted_4 = twice(1, 32), twice(2, 32), twice(4, 32)

# chunk c of 64 weights: four lanes each belong to sub-blocks 4c to 4c+3
_quarters_0, _quarters_1, _quarters_2, _quarters_3 = (
    shuffle(*[lane // 4 + 4 * chunk for lane in range(16)]) for chunk in range(4)
)
_each_twice = shuffle(*[lane // 2 for lane in range(16)])

# Q6_K: of two vectors, every other eight bytes in turn …
_even_eights, _odd_eights = eights(0, 8, 2, 10, 4, 12, 6, 14), eights(1, 9, 3, 11, 5, 13, 7, 15)
# … of the high bits of both halves, the same, and once more for the weights of bits 2 and 6
_high_even_eights, _high_odd_eights = eights(*[0, 4, 2, 6] * 2), eights(*[1, 5, 3, 7] * 2)
_then_down_2 = shifted(*[0] * 8, *[2] * 8)
# two lanes for each sub-block: of the first half, of the second half …
_low_nibbles, _high_nibbles = (
    shuffle(*[lane // 4 + lane // 2 % 2 * 8 + top for lane in range(16)]) for top in (0, 4)
)


@jit(device=True)
def _chunk_of_32(target, total, w, q, factor):
    return fma(to_f32x16(dot_u8(target, w, as_i8x64(load_u8x64(q)))), factor, total)


@jit(device=True)
def _chunk_of_16(target, total, w, offset, q, factor):
    x = as_i8x64(load_u8x64(q))
    products = dot_u8(target, w, x) - dot_u8(target, splat_u8x64(offset), x)
    return fma(to_f32x16(products), factor, total)


@jit(device=True)
def _add_block_q6_k(target, total, block, x, offsets, x_scales):
    """Vectors of weights: eight of a sub-block of the first half, eight of one of the second, and so on."""
    prefetch_block(block + NEAR, _Q6_BYTES)
    factors = i8x16_to_f32x16(load_u8x16(block, _Q6_SCALES)) * load_f16(block, _Q6_D) * x_scales
    a, b, high = load_u8x64(block), load_u8x64(block, 64), load_u8x64(block, _Q6_QH)
    even, odd = _even_eights(a, b), _odd_eights(a, b)
    even_high, odd_high = _then_down_2(_high_even_eights(high)), _then_down_2(_high_odd_eights(high))
    low = dot_two(
        target, even & 15 | even_high << 4 & 48, x[0], odd & 15 | odd_high << 4 & 48, x[1], offsets[0]
    )
    total = fma(to_f32x16(low), _low_nibbles(factors), total)
    top = dot_two(target, even >> 4 | even_high & 48, x[2], odd >> 4 | odd_high & 48, x[3], offsets[1])
    return fma(to_f32x16(top), _high_nibbles(factors), total)


@jit(device=True)
def dot_q6_k(target, row, stride, n_blocks, q, scale, sums):
    """``w = d * scale * (u - 32)`` in sixteen sub-blocks of 16; a ``qh`` byte holds the top bits of four.

    Of four rows at once (``int8_rows.py``).
    """
    total_0 = total_1 = total_2 = total_3 = splat_f32x16(0)
    for i in range(n_blocks):
        block, at = row + _Q6_BYTES * i, q + 256 * i
        a, b, c, d = load_u8x64(at), load_u8x64(at, 64), load_u8x64(at, 128), load_u8x64(at, 192)
        x = (
            as_i8x64(_even_eights(a, c)),
            as_i8x64(_odd_eights(a, c)),
            as_i8x64(_even_eights(b, d)),
            as_i8x64(_odd_eights(b, d)),
        )
        zero, offset = splat_i32x16(0), splat_u8x64(32)
        offsets = (
            zero - dot_two(target, offset, x[0], offset, x[1], zero),
            zero - dot_two(target, offset, x[2], offset, x[3], zero),
        )
        x_scales = _each_twice(load_f32x8(scale, 32 * i))
        total_0 = _add_block_q6_k(target, total_0, block, x, offsets, x_scales)
        total_1 = _add_block_q6_k(target, total_1, block + stride, x, offsets, x_scales)
        total_2 = _add_block_q6_k(target, total_2, block + 2 * stride, x, offsets, x_scales)
        total_3 = _add_block_q6_k(target, total_3, block + 3 * stride, x, offsets, x_scales)
    return sum_f32x16(total_0), sum_f32x16(total_1), sum_f32x16(total_2), sum_f32x16(total_3)


@jit(device=True)
def q3_scales(scales):
    """Sixteen six-bit scales: low four bits in the nibbles of bytes 0-7, top two bits in bytes 8-11."""
    low, high = load_i64(scales), load_u32(scales, 8)
    even = high | high << 30
    first = low & 0x0F0F0F0F0F0F0F0F | (even << 4) & 0x3030303030303030
    second = (low >> 4) & 0x0F0F0F0F0F0F0F0F | even & 0x3030303030303030
    return u8x16_of(first, second)


@jit(device=True)
def dot_q3_k(target, row, n_blocks, q, scale, sums):
    """``w = d * (scale - 32) * (u - 4)`` in sixteen sub-blocks of 16; ``hmask`` holds bit 2 of ``u``."""
    total = splat_f32x16(0)
    for i in range(n_blocks):
        block, x = row + _Q3_BYTES * i, q + 256 * i
        prefetch_block(block + FAR, _Q3_BYTES)
        factors = (u8x16_to_f32x16(q3_scales(block + _Q3_SCALES)) - 32) * load_f16(block, _Q3_D)
        factors = factors * _each_twice(load_f32x8(scale, 32 * i))
        high = then_shifted_1(load_u8x32(block))
        low = then_shifted_2(load_u8x32(block, _Q3_QS))
        total = _chunk_of_16(target, total, low & 3 | high << 2 & 4, 4, x, _quarters_0(factors))
        total = _chunk_of_16(target, total, low >> 4 & 3 | high & 4, 4, x + 64, _quarters_1(factors))
        low = then_shifted_2(load_u8x32(block, _Q3_QS + 32))
        total = _chunk_of_16(target, total, low & 3 | high >> 2 & 4, 4, x + 128, _quarters_2(factors))
        total = _chunk_of_16(target, total, low >> 4 & 3 | high >> 4 & 4, 4, x + 192, _quarters_3(factors))
    return sum_f32x16(total)


@jit(device=True)
def dot_q2_k(target, row, n_blocks, q, scale, sums):
    """``w = d * (s & 15) * u - dmin * (s >> 4)`` in sixteen sub-blocks of 16 with one scale byte s each."""
    total, minima = splat_f32x16(0), splat_f32x16(0)
    for i in range(n_blocks):
        block, x = row + _Q2_BYTES * i, q + 256 * i
        prefetch_block(block + FAR, _Q2_BYTES)
        packed = load_u8x16(block)
        factors = u8x16_to_f32x16(packed & 15) * load_f16(block, _Q2_D)
        factors = factors * _each_twice(load_f32x8(scale, 32 * i))
        minimum = u8x16_to_f32x16(packed >> 4) * load_f16(block, _Q2_DMIN)
        minima = fma(minimum, load_f32x16(sums, 64 * i), minima)
        low = then_shifted_2(load_u8x32(block, _Q2_QS))
        total = _chunk_of_32(target, total, low & 3, x, _quarters_0(factors))
        total = _chunk_of_32(target, total, low >> 4 & 3, x + 64, _quarters_1(factors))
        low = then_shifted_2(load_u8x32(block, _Q2_QS + 32))
        total = _chunk_of_32(target, total, low & 3, x + 128, _quarters_2(factors))
        total = _chunk_of_32(target, total, low >> 4 & 3, x + 192, _quarters_3(factors))
    return sum_f32x16(total) - sum_f32x16(minima)
