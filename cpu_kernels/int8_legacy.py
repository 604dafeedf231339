"""int8 dot products of one weight row for Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0 (blocks of 32 weights).

``dot_<fmt>(target, row, n_blocks, q, scale, sums) -> float32``: addresses of a row of blocks and of one
quantized vector (int8 q; fp32 scale per 32; fp32 sums = scale * sum of 16 q). Two blocks share one vector.
Products and offsets are exact integers; rounding starts with the fp32 product by ``d * scale``.
"""

from realizar_torch.cpu_kernels.int8_rows import FAR
from realizar_torch.cpu_kernels.jit import jit
from realizar_torch.cpu_kernels.memory import load_f16, load_f32, load_u32
from realizar_torch.cpu_kernels.simd import (
    as_i8x64,
    fma,
    join_u8x16,
    join_u8x32,
    load_f32x4,
    load_f32x8,
    load_u8x16,
    load_u8x32,
    load_u8x64,
    prefetch,
    shuffle,
    splat_f32x8,
    splat_f32x16,
    splat_u8x64,
    sum_f32x8,
    sum_f32x16,
    to_f32x16,
)
from realizar_torch.cpu_kernels.simd_unpack import (
    bytes_of_bits,
    load_half_pairs,
    load_halves,
    pair_f32x16,
    twice,
)
from realizar_torch.cpu_kernels.targets import dot_i8, dot_u8
from realizar_torch.formats import Q4_0, Q4_1, Q5_0, Q5_1, Q8_0

# the low nibbles of a 16-byte block are its first 16 weights, the high nibbles the others
_low_then_high = twice(4, 16)

# lane k of four block factors for the vector of blocks 0 and 1, and for that of blocks 2 and 3
_first_two, _last_two = shuffle(*[0] * 8, *[1] * 8), shuffle(*[2] * 8, *[3] * 8)
# the d and m of four blocks stand as d0 m0 d1 m1 …; there are two sums for each m
_each_d, _each_m_twice = shuffle(0, 2, 4, 6), shuffle(1, 1, 3, 3, 5, 5, 7, 7)


def _nibbles(fmt):
    """Unpack two blocks of four-bit weights."""
    qs = fmt.offset("qs")

    @jit(device=True)
    def unpack(first, second):
        return _low_then_high(join_u8x16(load_u8x16(first, qs), load_u8x16(second, qs))) & 15

    return unpack


def _five_bits(fmt):
    """Unpack two blocks of five-bit weights: bit i of the word ``qh`` is bit 4 of weight i."""
    nibbles, qh = _nibbles(fmt), fmt.offset("qh")

    @jit(device=True)
    def unpack(first, second):
        high = bytes_of_bits(load_u32(first, qh) | load_u32(second, qh) << 32)
        return nibbles(first, second) | high & 16

    return unpack


def _products(unpack, offset):
    """Exact I32x16 products of two blocks with ``x`` for weights ``d * (unpack(…) - offset)``."""

    @jit(device=True)
    def products(target, first, second, x):
        result = dot_u8(target, unpack(first, second), x)
        if offset:
            result = result - dot_u8(target, splat_u8x64(offset), x)
        return result

    return products


def _signed_products(fmt):
    """Exact I32x16 products of two blocks of signed bytes with ``x``."""
    qs = fmt.offset("qs")

    @jit(device=True)
    def products(target, first, second, x):
        return dot_i8(target, as_i8x64(join_u8x32(load_u8x32(first, qs), load_u8x32(second, qs))), x)

    return products


def _row_dot(fmt, products):
    """The dot product of a row: four blocks at a time, then the rest one by one.

    ``w = d * q`` with the exact integers of ``products``, plus ``m`` where the format has one.
    """
    size = fmt.block_bytes
    affine = any(field.name == "m" for field in fmt.fields)
    m = fmt.offset("m") if affine else 0

    @jit(device=True)
    def dot(target, row, n_blocks, q, scale, sums):
        total, other, minima = splat_f32x16(0), splat_f32x16(0), splat_f32x8(0)
        for group in range(n_blocks // 4):
            block, x = row + 4 * size * group, q + 128 * group
            for line in range(0, 4 * size, 64):
                prefetch(block + line + FAR)
            if affine:
                d_m = load_half_pairs(block, size)
                minima = fma(_each_m_twice(d_m), load_f32x8(sums, 32 * group), minima)
                factors = _each_d(d_m) * load_f32x4(scale, 16 * group)
            else:
                factors = load_halves(block, size) * load_f32x4(scale, 16 * group)
            two = products(target, block, block + size, as_i8x64(load_u8x64(x)))
            total = fma(to_f32x16(two), _first_two(factors), total)
            two = products(target, block + 2 * size, block + 3 * size, as_i8x64(load_u8x64(x, 64)))
            other = fma(to_f32x16(two), _last_two(factors), other)
        minimum = sum_f32x8(minima)
        for i in range(n_blocks - n_blocks % 4, n_blocks):
            block, x = row + size * i, load_u8x32(q, 32 * i)
            if affine:
                minimum += load_f16(block, m) * (load_f32(sums, 8 * i) + load_f32(sums, 8 * i + 4))
            # the block is its own partner, with a factor of zero
            factor = pair_f32x16(load_f16(block) * load_f32(scale, 4 * i), 0)
            total = fma(to_f32x16(products(target, block, block, as_i8x64(join_u8x32(x, x)))), factor, total)
        return sum_f32x16(total + other) + minimum

    return dot


# two blocks of a row as the 64 unsigned weights of one vector
pair_q4_0, pair_q4_1 = _nibbles(Q4_0), _nibbles(Q4_1)
pair_q5_0, pair_q5_1 = _five_bits(Q5_0), _five_bits(Q5_1)

dot_q4_0 = _row_dot(Q4_0, _products(pair_q4_0, 8))
dot_q4_1 = _row_dot(Q4_1, _products(pair_q4_1, 0))
dot_q5_0 = _row_dot(Q5_0, _products(pair_q5_0, 16))
dot_q5_1 = _row_dot(Q5_1, _products(pair_q5_1, 0))
dot_q8_0 = _row_dot(Q8_0, _signed_products(Q8_0))
