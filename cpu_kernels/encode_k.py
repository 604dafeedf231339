"""Super-blocks of 256, 16 rows at a time: Q2_K … Q6_K. The formulas stand in ``realizar_torch/encode``.

``x`` is the address of 256 fp32 columns, ``importance`` of 256 fp32 or 0, ``out`` the address of the block's
byte columns. Levels of values and of scales are kept as byte columns until they are packed.
"""

from realizar_torch.cpu_kernels.encode_blocks import k4_fields, pack_bits, pack_k4_scales
from realizar_torch.cpu_kernels.encode_lanes import (
    BYTE_COLUMN,
    COLUMN,
    absolute,
    choose,
    differs,
    furthest_from_zero,
    less,
    load_levels,
    nearest_int,
    nearest_level,
    square_root,
    store_half,
    store_levels,
    sum_of_columns,
    sum_of_squares,
)
from realizar_torch.cpu_kernels.encode_search import (
    positive_scale,
    scale_and_minimum,
    symmetric_scale,
    symmetric_scale_by_descent,
)
from realizar_torch.cpu_kernels.jit import jit
from realizar_torch.cpu_kernels.memory import load_f32, stack_alloc
from realizar_torch.cpu_kernels.simd import (
    load_f32x16,
    load_u8x16,
    maximum,
    minimum,
    splat_f32x16,
    splat_i32x16,
    store,
    to_f32x16,
    u8x16_to_f32x16,
)
from realizar_torch.formats import Q2_K, Q3_K, Q4_K, Q5_K, Q6_K

_BLOCK = Q4_K.block_size
_EPSILON = 1e-15
# byte columns of a block's levels; fp32 columns of a sub-block, at most 32
_LEVELS, _WEIGHTS = _BLOCK * BYTE_COLUMN, 32 * COLUMN
# fp32 columns and byte columns of at most 16 sub-blocks
_SCALES, _SCALE_LEVELS = 16 * COLUMN, 16 * BYTE_COLUMN

_Q2_D, _Q2_DMIN, _Q2_SCALES, _Q2_QS = (Q2_K.offset(name) for name in ("d", "dmin", "scales", "qs"))
_Q3_D, _Q3_HMASK, _Q3_SCALES, _Q3_QS = (Q3_K.offset(name) for name in ("d", "hmask", "scales", "qs"))
_Q6_D, _Q6_SCALES, _Q6_QL, _Q6_QH = (Q6_K.offset(name) for name in ("d", "scales", "ql", "qh"))


@jit(device=True)
def encode_q2_k(x, importance, mean, out):
    """16 sub-blocks of 16 with four-bit scales and minima."""
    q, weights = stack_alloc(_LEVELS, 64), stack_alloc(_WEIGHTS, 64)
    scales, minima, sums = stack_alloc(_SCALES, 64), stack_alloc(_SCALES, 64), stack_alloc(_SCALES, 64)
    ls, lm = stack_alloc(_SCALE_LEVELS, 64), stack_alloc(_SCALE_LEVELS, 64)
    square = sum_of_squares(x, _BLOCK) / splat_f32x16(_BLOCK)
    for j in range(16):
        values, levels = x + 16 * COLUMN * j, q + 16 * BYTE_COLUMN * j
        if importance:
            _weights(values, importance + 64 * j, 16, square, weights)
            scale, below = scale_and_minimum(values, weights, 16, 3, -0.9, 0.05, 36, False, levels)
            store(sums, sum_of_columns(weights, 16), COLUMN * j)
        else:
            for i in range(16):
                store(weights, absolute(load_f32x16(values, COLUMN * i)), COLUMN * i)
            scale, below = scale_and_minimum(values, weights, 16, 3, -0.5, 0.1, 15, True, levels)
        store(scales, scale, COLUMN * j)
        store(minima, below, COLUMN * j)
    if importance:
        d = positive_scale(scales, sums, 16, 15, ls)
        dmin = positive_scale(minima, sums, 16, 15, lm)
    else:
        d, dmin = _positive_levels(scales, 16, 15, ls), _positive_levels(minima, 16, 15, lm)
    d, dmin = store_half(out, _Q2_D, d), store_half(out, _Q2_DMIN, dmin)
    for j in range(16):
        stored = load_u8x16(ls, BYTE_COLUMN * j) | (load_u8x16(lm, BYTE_COLUMN * j) << 4)
        store(out, stored, BYTE_COLUMN * (_Q2_SCALES + j))
        scale, below = d * u8x16_to_f32x16(stored & 15), dmin * u8x16_to_f32x16(stored >> 4)
        _requantize(x + 16 * COLUMN * j, 16, scale, below, 3, q + 16 * BYTE_COLUMN * j)
    pack_bits(q, _BLOCK, 32, 2, 0, out + BYTE_COLUMN * _Q2_QS)


@jit(device=True)
def encode_q3_k(x, importance, mean, out):
    """16 sub-blocks of 16 with signed six-bit scales, stored plus 32."""
    q, weights = stack_alloc(_LEVELS, 64), stack_alloc(_WEIGHTS, 64)
    scales, sums = stack_alloc(_SCALES, 64), stack_alloc(_SCALES, 64)
    ls = stack_alloc(_SCALE_LEVELS, 64)
    square = splat_f32x16(2) * sum_of_squares(x, _BLOCK) / splat_f32x16(_BLOCK)
    for j in range(16):
        values, levels = x + 16 * COLUMN * j, q + 16 * BYTE_COLUMN * j
        if importance:
            _weights(values, importance + 64 * j, 16, square, weights)
            scale = symmetric_scale(values, weights, 16, 4, levels)
            store(sums, sum_of_columns(weights, 16), COLUMN * j)
        else:
            _squares(values, 16, weights)
            scale = symmetric_scale_by_descent(values, weights, 16, 4, levels)
        store(scales, scale, COLUMN * j)
    if importance:
        d = symmetric_scale(scales, sums, 16, 32, ls)
    else:
        d = _signed_levels(scales, ls)
    d = store_half(out, _Q3_D, d)
    for j in range(16):
        scale = d * (load_levels(ls, j) - splat_f32x16(32))
        _requantize_signed(x + 16 * COLUMN * j, scale, 4, q + 16 * BYTE_COLUMN * j)
    pack_bits(q, _BLOCK, 32, 1, 2, out + BYTE_COLUMN * _Q3_HMASK)
    pack_bits(q, _BLOCK, 32, 2, 0, out + BYTE_COLUMN * _Q3_QS)
    pack_bits(ls, 16, 8, 4, 0, out + BYTE_COLUMN * _Q3_SCALES)
    pack_bits(ls, 16, 4, 2, 4, out + BYTE_COLUMN * (_Q3_SCALES + 8))


def k4_encoder(spec, top, first, steps):
    """The encoder of Q4_K or Q5_K: eight sub-blocks of 32 with six-bit scales and minima."""
    d_offset, dmin_offset = spec.offset("d"), spec.offset("dmin")
    scales_offset, qs = spec.offset("scales"), spec.offset("qs")
    qh = spec.offset("qh") if top > 15 else -1

    @jit(device=True)
    def encode_k4(x, importance, mean, out):
        q, weights = stack_alloc(_LEVELS, 64), stack_alloc(_WEIGHTS, 64)
        scales, minima, sums = stack_alloc(_SCALES, 64), stack_alloc(_SCALES, 64), stack_alloc(_SCALES, 64)
        ls, lm = stack_alloc(_SCALE_LEVELS, 64), stack_alloc(_SCALE_LEVELS, 64)
        square = splat_f32x16(2) * sum_of_squares(x, _BLOCK) / splat_f32x16(_BLOCK)
        for j in range(8):
            values, levels = x + 32 * COLUMN * j, q + 32 * BYTE_COLUMN * j
            if importance:
                _weights(values, importance + 128 * j, 32, square, weights)
                scale, below = scale_and_minimum(values, weights, 32, top, -0.9, 0.05, 36, False, levels)
                store(sums, sum_of_columns(weights, 32), COLUMN * j)
            else:
                mean_magnitude = square_root(sum_of_squares(values, 32) / splat_f32x16(32))
                for i in range(32):
                    weight = mean_magnitude + absolute(load_f32x16(values, COLUMN * i))
                    store(weights, weight, COLUMN * i)
                scale, below = scale_and_minimum(values, weights, 32, top, first, 0.1, steps, False, levels)
            store(scales, scale, COLUMN * j)
            store(minima, below, COLUMN * j)
        if importance:
            d, dmin = positive_scale(scales, sums, 8, 63, ls), positive_scale(minima, sums, 8, 63, lm)
        else:
            d, dmin = _positive_levels(scales, 8, 63, ls), _positive_levels(minima, 8, 63, lm)
        # ggml limits the levels everywhere but in Q4_K with importance
        if not importance or top > 15:
            _limit(ls, 63)
            _limit(lm, 63)
        else:
            k4_fields(ls)
            k4_fields(lm)
        d, dmin = store_half(out, d_offset, d), store_half(out, dmin_offset, dmin)
        for j in range(8):
            scale, below = d * load_levels(ls, j), dmin * load_levels(lm, j)
            _requantize(x + 32 * COLUMN * j, 32, scale, below, top, q + 32 * BYTE_COLUMN * j)
        pack_k4_scales(ls, lm, out + BYTE_COLUMN * scales_offset)
        pack_bits(q, _BLOCK, 32, 4, 0, out + BYTE_COLUMN * qs)
        if qh >= 0:
            pack_bits(q, _BLOCK, 32, 1, 4, out + BYTE_COLUMN * qh)

    return encode_k4


@jit(device=True)
def encode_q6_k(x, importance, mean, out):
    """16 sub-blocks of 16 with signed byte scales."""
    q, weights = stack_alloc(_LEVELS, 64), stack_alloc(_WEIGHTS, 64)
    scales = stack_alloc(_SCALES, 64)
    for j in range(16):
        values = x + 16 * COLUMN * j
        if importance:
            for i in range(16):
                store(weights, splat_f32x16(load_f32(importance, 64 * j + 4 * i)), COLUMN * i)
        else:
            _squares(values, 16, weights)
        scale = symmetric_scale(values, weights, 16, 32, q + 16 * BYTE_COLUMN * j)
        store(scales, scale, COLUMN * j)
    largest = furthest_from_zero(scales, 16)
    found = less(absolute(largest), splat_f32x16(_EPSILON)) ^ -1
    inverse, zero = splat_f32x16(-128) / largest, splat_f32x16(0)
    d = store_half(out, _Q6_D, choose(found, splat_f32x16(1) / inverse, zero))
    for j in range(16):
        level = minimum(nearest_int(inverse * load_f32x16(scales, COLUMN * j)), splat_i32x16(127)) & found
        level = (level << 24) >> 24
        store_levels(out, _Q6_SCALES + j, level)
        levels = q + 16 * BYTE_COLUMN * j
        _requantize_signed(x + 16 * COLUMN * j, d * to_f32x16(level), 32, levels)
        for i in range(16):
            store_levels(levels, i, nearest_int(load_levels(levels, i)) & found)
    pack_bits(q, _BLOCK, 64, 4, 0, out + BYTE_COLUMN * _Q6_QL)
    pack_bits(q, _BLOCK, 32, 2, 4, out + BYTE_COLUMN * _Q6_QH)


@jit(device=True)
def _weights(x, importance, count, square, weights):
    """``importance * sqrt(square + x²)``."""
    for i in range(count):
        value = load_f32x16(x, COLUMN * i)
        root = square_root(square + value * value)
        store(weights, splat_f32x16(load_f32(importance, 4 * i)) * root, COLUMN * i)


@jit(device=True)
def _squares(x, count, weights):
    for i in range(count):
        value = load_f32x16(x, COLUMN * i)
        store(weights, value * value, COLUMN * i)


@jit(device=True)
def _positive_levels(scales, count, top, levels):
    """The largest becomes ``top`` → the scale of the scales; levels as bytes."""
    zero = largest = splat_f32x16(0)
    for j in range(count):
        scale = load_f32x16(scales, COLUMN * j)
        largest = choose(less(largest, scale), scale, largest)
    inverse = choose(less(zero, largest), splat_f32x16(top) / largest, zero)
    for j in range(count):
        store_levels(levels, j, nearest_int(inverse * load_f32x16(scales, COLUMN * j)))
    return largest / splat_f32x16(top)


@jit(device=True)
def _signed_levels(scales, levels):
    """The scale furthest from zero becomes -32, stored as 0 → the scale of the scales."""
    largest, zero = furthest_from_zero(scales, 16), splat_f32x16(0)
    found, inverse = differs(largest, zero), splat_f32x16(-32) / largest
    for j in range(16):
        level = (nearest_int(inverse * load_f32x16(scales, COLUMN * j)) << 24) >> 24
        level = maximum(minimum(level, splat_i32x16(31)), splat_i32x16(-32)) + 32
        store_levels(levels, j, level & found)
    return choose(found, splat_f32x16(1) / inverse, zero)


@jit(device=True)
def _requantize(x, count, d, below, top, levels):
    """Levels of ``x + below`` in steps of ``d``; kept as they are where ``d`` is zero."""
    keep = differs(d, splat_f32x16(0)) ^ -1
    for i in range(count):
        level = nearest_level((load_f32x16(x, COLUMN * i) + below) / d, 0, top)
        store_levels(levels, i, choose(keep, nearest_int(load_levels(levels, i)), level))


@jit(device=True)
def _requantize_signed(x, d, half, levels):
    """Levels of 16 values in steps of ``d``, plus ``half``; kept as they are where ``d`` is zero."""
    keep = differs(d, splat_f32x16(0)) ^ -1
    for i in range(16):
        level = nearest_level(load_f32x16(x, COLUMN * i) / d, -half, half - 1) + half
        store_levels(levels, i, choose(keep, nearest_int(load_levels(levels, i)), level))


@jit(device=True)
def _limit(levels, top):
    """Eight levels become at most ``top``."""
    for j in range(8):
        store_levels(levels, j, minimum(nearest_int(load_levels(levels, j)), splat_i32x16(top)))


K_ENCODERS = {
    "Q2_K": encode_q2_k,
    "Q3_K": encode_q3_k,
    "Q4_K": k4_encoder(Q4_K, 15, -1.0, 20),
    "Q5_K": k4_encoder(Q5_K, 31, -0.5, 15),
    "Q6_K": encode_q6_k,
}
