"""int8 dot products of one weight row for the K-quants Q2_K … Q6_K (super-blocks of 256 weights).

``dot_<fmt>(target, row, n_blocks, q, scale, sums) -> float32`` as in ``int8_legacy.py``. A super-block is
four chunks of 64 weights, one vector each. The factors of all its sub-blocks, ``d * sub-scale * activation
scale``, are computed in one F32x16 and spread over the lanes of each chunk.
"""

from realizar_torch.cpu_kernels.int8_legacy import PREFETCH_DISTANCE
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
    prefetch,
    shuffle,
    splat_f32x16,
    splat_u8x64,
    sum_f32x16,
    to_f32x16,
    u8x16_to_f32x16,
)
from realizar_torch.cpu_kernels.simd_unpack import pair_f32x16, twice, u8x16_of
from realizar_torch.cpu_kernels.targets import dot_u8
from realizar_torch.formats import Q2_K, Q3_K, Q4_K, Q5_K, Q6_K

_Q2_BYTES, _Q2_QS, _Q2_D, _Q2_DMIN = (Q2_K.block_bytes, *(Q2_K.offset(f) for f in ("qs", "d", "dmin")))
_Q3_BYTES, _Q3_QS, _Q3_SCALES, _Q3_D = (Q3_K.block_bytes, *(Q3_K.offset(f) for f in ("qs", "scales", "d")))
_Q6_BYTES, _Q6_QH, _Q6_SCALES, _Q6_D = (Q6_K.block_bytes, *(Q6_K.offset(f) for f in ("qh", "scales", "d")))

# [v, v >> n]: 32 bytes become 64 whose upper half is shifted
then_shifted_1, then_shifted_2, then_shifted_4 = twice(1, 32), twice(2, 32), twice(4, 32)

# chunk c of 64 weights: lanes 0-7 belong to sub-block 2c, lanes 8-15 to 2c+1 (sub-blocks of 32) …
_halves_0, _halves_1, _halves_2, _halves_3 = (shuffle(*[a] * 8, *[a + 1] * 8) for a in (0, 2, 8, 10))
# … or four lanes each to sub-blocks 4c to 4c+3 (sub-blocks of 16)
_quarters_0, _quarters_1, _quarters_2, _quarters_3 = (
    shuffle(*[lane // 4 + 4 * chunk for lane in range(16)]) for chunk in range(4)
)
_each_twice = shuffle(*[lane // 2 for lane in range(16)])

# F32x16 in the order of six_bit_scales: [8 scales, 8 sums of 32] and the other halves of the sums
_scale_and_even_sums = shuffle(0, 1, 2, 3, 16, 18, 20, 22, 4, 5, 6, 7, 24, 26, 28, 30)
_zero_and_odd_sums = shuffle(0, 0, 0, 0, 17, 19, 21, 23, 0, 0, 0, 0, 25, 27, 29, 31)
_d_and_dmin = shuffle(*[0] * 4, *[15] * 4, *[0] * 4, *[15] * 4)
_only_minima = shuffle(16, 16, 16, 16, 4, 5, 6, 7, 16, 16, 16, 16, 12, 13, 14, 15)
_widened = shuffle(*range(8), *range(8))


@jit(device=True)
def _prefetch_block(block, size):
    for line in range(0, size, 64):
        prefetch(block + line + PREFETCH_DISTANCE)


@jit(device=True)
def six_bit_scales(scales):
    """The 12 bytes of Q4_K and Q5_K scales as bytes [scales 0-3, minima 0-3, scales 4-7, minima 4-7]."""
    first, rest = load_i64(scales), load_u32(scales, 8)
    low_nibbles = (rest | rest << 28) & 0x0F0F0F0F0F0F0F0F
    return u8x16_of(first & 0x3F3F3F3F3F3F3F3F, low_nibbles | (first >> 2) & 0x3030303030303030)


@jit(device=True)
def _scale_or_sum(scale, sums):
    """Activation scales beside the sums of 32 (for the minima), in the order of six_bit_scales."""
    by_half = load_f32x16(sums)
    return _scale_and_even_sums(_widened(load_f32x8(scale)), by_half) + _zero_and_odd_sums(
        splat_f32x16(0), by_half
    )


@jit(device=True)
def _chunk_of_32(target, total, w, q, factor):
    return fma(to_f32x16(dot_u8(target, w, as_i8x64(load_u8x64(q)))), factor, total)


@jit(device=True)
def _chunk_of_16(target, total, w, offset, q, factor):
    x = as_i8x64(load_u8x64(q))
    products = dot_u8(target, w, x) - dot_u8(target, splat_u8x64(offset), x)
    return fma(to_f32x16(products), factor, total)


def _affine_k(fmt, top_bits):
    """The row dot of Q4_K and Q5_K: ``w = d * scale * u - dmin * minimum`` in eight sub-blocks of 32.

    ``top_bits(block, lows, chunk)`` adds the fifth bits to the nibbles of a chunk.
    """
    size, scales_at, qs, dmin_at = fmt.block_bytes, fmt.offset("scales"), fmt.offset("qs"), fmt.offset("dmin")

    @jit(device=True)
    def dot(target, row, n_blocks, q, scale, sums):
        total, minima = splat_f32x16(0), splat_f32x16(0)
        for i in range(n_blocks):
            block, x = row + size * i, q + 256 * i
            _prefetch_block(block, size)
            d_dmin = _d_and_dmin(pair_f32x16(load_f16(block), load_f16(block, dmin_at)))
            weight_side = u8x16_to_f32x16(six_bit_scales(block + scales_at)) * d_dmin
            factors = weight_side * _scale_or_sum(scale + 32 * i, sums + 64 * i)
            minima = minima + factors
            w0 = then_shifted_4(load_u8x32(block, qs)) & 15
            w1 = then_shifted_4(load_u8x32(block, qs + 32)) & 15
            w2 = then_shifted_4(load_u8x32(block, qs + 64)) & 15
            w3 = then_shifted_4(load_u8x32(block, qs + 96)) & 15
            w0, w1, w2, w3 = top_bits(block, w0, w1, w2, w3)
            total = _chunk_of_32(target, total, w0, x, _halves_0(factors))
            total = _chunk_of_32(target, total, w1, x + 64, _halves_1(factors))
            total = _chunk_of_32(target, total, w2, x + 128, _halves_2(factors))
            total = _chunk_of_32(target, total, w3, x + 192, _halves_3(factors))
        return sum_f32x16(total) - sum_f32x16(_only_minima(minima, splat_f32x16(0)))

    return dot


@jit(device=True)
def _no_top_bits(block, w0, w1, w2, w3):
    return w0, w1, w2, w3


_Q5_QH = Q5_K.offset("qh")


@jit(device=True)
def _fifth_bits(block, w0, w1, w2, w3):
    """Bit s of qh[l] is bit 4 of weight l of sub-block s."""
    high = then_shifted_1(load_u8x32(block, _Q5_QH))
    return w0 | high << 4 & 16, w1 | high << 2 & 16, w2 | high & 16, w3 | high >> 2 & 16


dot_q4_k = _affine_k(Q4_K, _no_top_bits)
dot_q5_k = _affine_k(Q5_K, _fifth_bits)


@jit(device=True)
def dot_q6_k(target, row, n_blocks, q, scale, sums):
    """``w = d * scale * (u - 32)`` in sixteen sub-blocks of 16; a ``qh`` byte holds the top bits of four."""
    total = splat_f32x16(0)
    for i in range(n_blocks):
        block, x = row + _Q6_BYTES * i, q + 256 * i
        _prefetch_block(block, _Q6_BYTES)
        factors = i8x16_to_f32x16(load_u8x16(block, _Q6_SCALES)) * load_f16(block, _Q6_D)
        factors = factors * _each_twice(load_f32x8(scale, 32 * i))
        low, high = load_u8x64(block), then_shifted_2(load_u8x32(block, _Q6_QH))
        total = _chunk_of_16(target, total, low & 15 | high << 4 & 48, 32, x, _quarters_0(factors))
        total = _chunk_of_16(target, total, low >> 4 & 15 | high & 48, 32, x + 64, _quarters_1(factors))
        low, high = load_u8x64(block, 64), then_shifted_2(load_u8x32(block, _Q6_QH + 32))
        total = _chunk_of_16(target, total, low & 15 | high << 4 & 48, 32, x + 128, _quarters_2(factors))
        total = _chunk_of_16(target, total, low >> 4 & 15 | high & 48, 32, x + 192, _quarters_3(factors))
    return sum_f32x16(total)


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
        _prefetch_block(block, _Q3_BYTES)
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
        _prefetch_block(block, _Q2_BYTES)
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
