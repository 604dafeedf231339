"""int8 dot products of one weight row for Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0 (blocks of 32 weights).

``dot_<fmt>(target, row, n_blocks, q, scale, sums) -> float32``: addresses of a row of blocks and of one
quantized vector (int8 q; fp32 scale per 32; fp32 sums = scale * sum of 16 q). Two blocks share one vector.
Products and offsets are exact integers; rounding starts with the fp32 product by ``d * scale``.
"""

from realizar_torch.cpu_kernels.jit import jit
from realizar_torch.cpu_kernels.memory import load_f16, load_f32, load_u32
from realizar_torch.cpu_kernels.simd import (
    as_i8x64,
    bytes_of_bits,
    fma,
    join_u8x16,
    join_u8x32,
    load_f32x4,
    load_u8x16,
    load_u8x32,
    load_u8x64,
    pair_f32x4,
    pair_f32x16,
    splat_f32x4,
    splat_f32x16,
    splat_u8x64,
    sum_f32x4,
    sum_f32x16,
    to_f32x16,
    twice,
)
from realizar_torch.cpu_kernels.targets import dot_i8, dot_u8

from realizar_torch.formats import Q4_0, Q4_1, Q5_0, Q5_1, Q8_0

# the low nibbles of a 16-byte block are its first 16 weights, the high nibbles the others
_low_then_high = twice(4, 16)


def _nibbles(qs):
    """Unpack four-bit blocks whose nibbles start at byte ``qs``."""

    @jit(device=True)
    def unpack(first, second):
        return _low_then_high(join_u8x16(load_u8x16(first, qs), load_u8x16(second, qs))) & 15

    return unpack


def _five_bits(qs, qh):
    """Unpack five-bit blocks: nibbles at byte ``qs``; bit i of the word at ``qh`` is bit 4 of weight i."""
    nibbles = _nibbles(qs)

    @jit(device=True)
    def unpack(first, second):
        high = bytes_of_bits(load_u32(first, qh) | load_u32(second, qh) << 32)
        return nibbles(first, second) | high & 16

    return unpack


def _symmetric(fmt, unpack, offset):
    """The row dot for ``w = d * (u - offset)`` with unsigned ``u = unpack(first block, second block)``."""
    size = fmt.block_bytes

    @jit(device=True)
    def block_pair(target, total, first, second, x, first_scale, second_scale):
        products = dot_u8(target, unpack(first, second), x) - dot_u8(target, splat_u8x64(offset), x)
        factor = pair_f32x16(load_f16(first) * first_scale, load_f16(second) * second_scale)
        return fma(to_f32x16(products), factor, total)

    return _over_pairs(size, block_pair)


def _over_pairs(size, block_pair):
    """The row dot that adds ``block_pair`` over the blocks of a row; an odd last block is its own partner."""

    @jit(device=True)
    def dot(target, row, n_blocks, q, scale, sums):
        total = splat_f32x16(0)
        for pair in range(n_blocks // 2):
            first = row + 2 * size * pair
            x = as_i8x64(load_u8x64(q, 64 * pair))
            first_scale, second_scale = load_f32(scale, 8 * pair), load_f32(scale, 8 * pair + 4)
            total = block_pair(target, total, first, first + size, x, first_scale, second_scale)
        if n_blocks % 2:
            last = n_blocks - 1
            half = load_u8x32(q, 32 * last)
            block, x = row + size * last, as_i8x64(join_u8x32(half, half))
            total = block_pair(target, total, block, block, x, load_f32(scale, 4 * last), 0)
        return sum_f32x16(total)

    return dot


def _affine(fmt, unpack):
    """The row dot for ``w = d * u + m``."""
    size, m = fmt.block_bytes, fmt.offset("m")
    unpack_and_scale = _unsigned_pair(unpack)

    @jit(device=True)
    def dot(target, row, n_blocks, q, scale, sums):
        total, minima = splat_f32x16(0), splat_f32x4(0)
        for pair in range(n_blocks // 2):
            first = row + 2 * size * pair
            second = first + size
            x = as_i8x64(load_u8x64(q, 64 * pair))
            first_scale, second_scale = load_f32(scale, 8 * pair), load_f32(scale, 8 * pair + 4)
            total = unpack_and_scale(target, total, first, second, x, first_scale, second_scale)
            minimum = pair_f32x4(load_f16(first, m), load_f16(second, m))
            minima = fma(minimum, load_f32x4(sums, 16 * pair), minima)
        result = sum_f32x4(minima)
        if n_blocks % 2:
            last = n_blocks - 1
            half = load_u8x32(q, 32 * last)
            block, x = row + size * last, as_i8x64(join_u8x32(half, half))
            total = unpack_and_scale(target, total, block, block, x, load_f32(scale, 4 * last), 0)
            result += load_f16(block, m) * (load_f32(sums, 8 * last) + load_f32(sums, 8 * last + 4))
        return sum_f32x16(total) + result

    return dot


def _unsigned_pair(unpack):
    @jit(device=True)
    def block_pair(target, total, first, second, x, first_scale, second_scale):
        factor = pair_f32x16(load_f16(first) * first_scale, load_f16(second) * second_scale)
        return fma(to_f32x16(dot_u8(target, unpack(first, second), x)), factor, total)

    return block_pair


def _signed_pair(qs):
    @jit(device=True)
    def block_pair(target, total, first, second, x, first_scale, second_scale):
        w = as_i8x64(join_u8x32(load_u8x32(first, qs), load_u8x32(second, qs)))
        factor = pair_f32x16(load_f16(first) * first_scale, load_f16(second) * second_scale)
        return fma(to_f32x16(dot_i8(target, w, x)), factor, total)

    return block_pair


dot_q4_0 = _symmetric(Q4_0, _nibbles(Q4_0.offset("qs")), 8)
dot_q4_1 = _affine(Q4_1, _nibbles(Q4_1.offset("qs")))
dot_q5_0 = _symmetric(Q5_0, _five_bits(Q5_0.offset("qs"), Q5_0.offset("qh")), 16)
dot_q5_1 = _affine(Q5_1, _five_bits(Q5_1.offset("qs"), Q5_1.offset("qh")))
dot_q8_0 = _over_pairs(Q8_0.block_bytes, _signed_pair(Q8_0.offset("qs")))
