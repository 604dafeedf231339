"""int8 dot products of four weight rows at once for Q4_K and Q5_K: ``w = d * scale * u - dmin * minimum``.

``dot_<fmt>(target, row, stride, n_blocks, q, scale, sums) -> four float32``: row r of the four is at
``row + r * stride``. What depends on the activations is made once for four rows, and the 16-byte headers
(d, dmin, 12 bytes of scales) of four super-blocks fill one vector and are taken apart together.

Bytes of weights are put in order by runs of 16: one vector has the first halves of sub-blocks 0, 2, 4 and 6,
another the second halves, so that two products add up in the same lanes, four for each sub-block.
"""

from realizar_torch.cpu_kernels.int8_rows import NEAR, prefetch_block
from realizar_torch.cpu_kernels.jit import jit
from realizar_torch.cpu_kernels.simd import (
    as_i8x64,
    fma,
    join_u8x16,
    join_u8x32,
    load_f32x8,
    load_f32x16,
    load_u8x16,
    load_u8x64,
    shuffle,
    splat_f32x16,
    splat_i32x16,
    sum_f32x8,
    sum_f32x16,
    to_f32x16,
    u8x16_to_f32x16,
)
from realizar_torch.cpu_kernels.simd_unpack import load_half_pairs, pattern, runs, shifted, words
from realizar_torch.cpu_kernels.targets import dot_two
from realizar_torch.formats import Q4_K, Q5_K

# of two vectors, eight runs of 16 bytes: every other run, and runs two by two
_even_runs, _odd_runs = runs(0, 2, 4, 6), runs(1, 3, 5, 7)
_low_pairs, _high_pairs = runs(0, 1, 4, 5), runs(2, 3, 6, 7)

# words of a header: 0 d and dmin, 1 scales 0-3, 2 minima 0-3, 3 low bits of scales and minima 4-7
_low_bits, _top_bits = words(1, 3, 2, 3), words(1, 1, 2, 2)
_minima_down, _tops_down = shifted(0, 0, 0, 4), shifted(2, 2, 2, 2)
_low_mask, _top_mask = pattern(*[63] * 4, *[15] * 4), pattern(*[0] * 4, *[48] * 4)

# of a vector with 16 bytes for each of four rows, eight scales and then eight minima, those of two rows
_scales_0_1, _scales_2_3 = (shuffle(*range(a, a + 8), *range(a + 16, a + 24)) for a in (0, 32))
_minima_0_1, _minima_2_3 = (shuffle(*range(a, a + 8), *range(a + 16, a + 24)) for a in (8, 40))
# of d and dmin of four rows in turn, those of two rows
_d_0_1, _d_2_3, _dmin_0_1, _dmin_2_3 = (shuffle(*[a] * 8, *[a + 2] * 8) for a in (0, 4, 1, 5))
# four lanes for every other sub-block of the first and of the second row of two
_evens_of_first, _odds_of_first, _evens_of_second, _odds_of_second = (
    shuffle(*[lane // 4 * 2 + a for lane in range(16)]) for a in (0, 1, 8, 9)
)
_first, _second = shuffle(*range(8)), shuffle(*range(8, 16))
_both = shuffle(*range(8), *range(8))
_even_sums, _odd_sums = (shuffle(*[lane % 8 * 2 + a for lane in range(16)]) for a in (0, 1))


@jit(device=True)
def _six_bits_of_four(headers):
    """Headers of four super-blocks → for each 16 bytes: scales 0-7, minima 0-7."""
    low = _minima_down(_low_bits(headers)) & _low_mask()
    return low | _tops_down(_top_bits(headers)) & _top_mask()


def _affine_k(fmt, unpack):
    """The four-row dot of a format with eight sub-blocks of 32.

    ``unpack(block)``: the first and second halves of even sub-blocks, then those of odd ones, a vector each.
    """
    size, header, dmin_after_d = fmt.block_bytes, fmt.offset("d"), fmt.offset("dmin") - fmt.offset("d")
    assert (header, dmin_after_d, fmt.offset("scales")) == (0, 2, 4)

    @jit(device=True)
    def add_block(target, total, block, even_factors, odd_factors, x):
        prefetch_block(block + NEAR, size)
        first, second, odd_first, odd_second = unpack(block)
        zero = splat_i32x16(0)
        total = fma(to_f32x16(dot_two(target, first, x[0], second, x[1], zero)), even_factors, total)
        return fma(to_f32x16(dot_two(target, odd_first, x[2], odd_second, x[3], zero)), odd_factors, total)

    @jit(device=True)
    def dots(target, row, stride, n_blocks, q, scale, sums):
        total_0 = total_1 = total_2 = total_3 = splat_f32x16(0)
        minima_0_1 = minima_2_3 = splat_f32x16(0)
        row_1, row_2, row_3 = row + stride, row + 2 * stride, row + 3 * stride
        for i in range(n_blocks):
            at = size * i
            headers = join_u8x32(
                join_u8x16(load_u8x16(row, at), load_u8x16(row_1, at)),
                join_u8x16(load_u8x16(row_2, at), load_u8x16(row_3, at)),
            )
            d, six_bits = load_half_pairs(row + at, stride), _six_bits_of_four(headers)
            x_scale, halves = _both(load_f32x8(scale, 32 * i)), load_f32x16(sums, 64 * i)
            x_sum = _even_sums(halves) + _odd_sums(halves)
            factors_0_1 = u8x16_to_f32x16(_scales_0_1(six_bits)) * _d_0_1(d) * x_scale
            factors_2_3 = u8x16_to_f32x16(_scales_2_3(six_bits)) * _d_2_3(d) * x_scale
            minima_0_1 = fma(u8x16_to_f32x16(_minima_0_1(six_bits)) * _dmin_0_1(d), x_sum, minima_0_1)
            minima_2_3 = fma(u8x16_to_f32x16(_minima_2_3(six_bits)) * _dmin_2_3(d), x_sum, minima_2_3)
            x = _by_sub_block(q + 256 * i)
            even, odd = _evens_of_first(factors_0_1), _odds_of_first(factors_0_1)
            total_0 = add_block(target, total_0, row + at, even, odd, x)
            even, odd = _evens_of_second(factors_0_1), _odds_of_second(factors_0_1)
            total_1 = add_block(target, total_1, row_1 + at, even, odd, x)
            even, odd = _evens_of_first(factors_2_3), _odds_of_first(factors_2_3)
            total_2 = add_block(target, total_2, row_2 + at, even, odd, x)
            even, odd = _evens_of_second(factors_2_3), _odds_of_second(factors_2_3)
            total_3 = add_block(target, total_3, row_3 + at, even, odd, x)
        return (
            sum_f32x16(total_0) - sum_f32x8(_first(minima_0_1)),
            sum_f32x16(total_1) - sum_f32x8(_second(minima_0_1)),
            sum_f32x16(total_2) - sum_f32x8(_first(minima_2_3)),
            sum_f32x16(total_3) - sum_f32x8(_second(minima_2_3)),
        )

    return dots


@jit(device=True)
def _by_sub_block(q):
    """256 activations in the order of ``unpack``."""
    a, b, c, d = load_u8x64(q), load_u8x64(q, 64), load_u8x64(q, 128), load_u8x64(q, 192)
    evens = _low_pairs(a, b), _low_pairs(c, d)
    odds = _high_pairs(a, b), _high_pairs(c, d)
    return (
        as_i8x64(_even_runs(evens[0], evens[1])),
        as_i8x64(_odd_runs(evens[0], evens[1])),
        as_i8x64(_even_runs(odds[0], odds[1])),
        as_i8x64(_odd_runs(odds[0], odds[1])),
    )


def _nibbles(fmt):
    qs = fmt.offset("qs")

    @jit(device=True)
    def unpack(block):
        a, b = load_u8x64(block, qs), load_u8x64(block, qs + 64)
        first, second = _even_runs(a, b), _odd_runs(a, b)
        return first & 15, second & 15, first >> 4, second >> 4

    return unpack


_nibbles_of_q5_k, _QH = _nibbles(Q5_K), Q5_K.offset("qh")
# bit s of qh[l] is bit 4 of weight l of sub-block s: it goes to bit 0 for even sub-blocks, bit 1 for odd ones
_copies = runs(0, 0, 0, 0)
_by_even_sub_block = shifted(*[0] * 4, *[2] * 4, *[4] * 4, *[6] * 4)


@jit(device=True)
def _five_bits(block):
    first, second, odd_first, odd_second = _nibbles_of_q5_k(block)
    high = _by_even_sub_block(_copies(load_u8x16(block, _QH)))
    other = _by_even_sub_block(_copies(load_u8x16(block, _QH + 16)))
    first, second = first | high << 4 & 16, second | other << 4 & 16
    return first, second, odd_first | high << 3 & 16, odd_second | other << 3 & 16


dot_q4_k = _affine_k(Q4_K, _nibbles(Q4_K))
dot_q5_k = _affine_k(Q5_K, _five_bits)
