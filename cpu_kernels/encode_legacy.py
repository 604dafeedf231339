"""Blocks of 32 with one scale, 16 rows at a time: Q8_0, Q4_0, Q5_0, and with a minimum Q4_1, Q5_1.

``x`` is the address of 32 fp32 columns, ``importance`` of 32 fp32 or 0, ``mean`` the mean squares of the
whole rows, ``out`` the address of the block's byte columns. The formulas stand in the definition.
"""

from realizar_torch.cpu_kernels.encode_lanes import (
    BYTE_COLUMN,
    COLUMN,
    absolute,
    choose,
    differs,
    furthest_from_zero,
    less,
    negative,
    round_away,
    square_root,
    store_half,
    store_levels,
    truncate,
)
from realizar_torch.cpu_kernels.encode_search import scale_and_minimum, symmetric_scale
from realizar_torch.cpu_kernels.jit import jit
from realizar_torch.cpu_kernels.memory import load_f32, stack_alloc
from realizar_torch.cpu_kernels.simd import (
    load_f32x16,
    load_u8x16,
    minimum,
    splat_f32x16,
    splat_i32x16,
    store,
)
from realizar_torch.formats import Q4_0, Q4_1, Q5_0, Q5_1, Q8_0

_BLOCK = 32
# byte columns of a block's levels, fp32 columns of its weights
_LEVELS, _WEIGHTS = _BLOCK * BYTE_COLUMN, _BLOCK * COLUMN
_Q8_0_D, _Q8_0_QS = Q8_0.offset("d"), Q8_0.offset("qs")


@jit(device=True)
def encode_q8_0(x, importance, mean, out):
    """``d = max|x| / 127``; importance does not matter."""
    d = absolute(furthest_from_zero(x, _BLOCK)) / splat_f32x16(127)
    inverse = _inverse(d)
    store_half(out, _Q8_0_D, d)
    for i in range(_BLOCK):
        store_levels(out, _Q8_0_QS + i, round_away(load_f32x16(x, COLUMN * i) * inverse))


def symmetric_encoder(spec, half):
    """The encoder of a format whose value furthest from zero becomes ``-half``."""
    d_offset, write_levels = spec.offset("d"), _level_writer(spec)

    @jit(device=True)
    def encode_symmetric(x, importance, mean, out):
        q = stack_alloc(_LEVELS, 64)
        if importance:
            weights = stack_alloc(_WEIGHTS, 64)
            _weights(x, importance, mean, weights)
            d = symmetric_scale(x, weights, _BLOCK, half, q)
        else:
            d = furthest_from_zero(x, _BLOCK) / splat_f32x16(-half)
            inverse = _inverse(d)
            for i in range(_BLOCK):
                level = truncate(load_f32x16(x, COLUMN * i) * inverse + (half + 0.5))
                store_levels(q, i, minimum(level, splat_i32x16(2 * half - 1)))
        store_half(out, d_offset, d)
        write_levels(q, out)

    return encode_symmetric


def encoder_with_minimum(spec, top):
    """The encoder of a format whose smallest value becomes 0, the largest ``top``."""
    d_offset, m_offset, write_levels = spec.offset("d"), spec.offset("m"), _level_writer(spec)

    @jit(device=True)
    def encode_with_minimum(x, importance, mean, out):
        q = stack_alloc(_LEVELS, 64)
        if importance:
            weights = stack_alloc(_WEIGHTS, 64)
            _weights(x, importance, mean, weights)
            d, below = scale_and_minimum(x, weights, _BLOCK, top, -0.9, 0.05, 36, False, q)
            low = negative(below)
        else:
            low = high = load_f32x16(x)
            for i in range(1, _BLOCK):
                value = load_f32x16(x, COLUMN * i)
                low = choose(less(value, low), value, low)
                high = choose(less(high, value), value, high)
            d = (high - low) / splat_f32x16(top)
            inverse = _inverse(d)
            for i in range(_BLOCK):
                level = truncate((load_f32x16(x, COLUMN * i) - low) * inverse + 0.5)
                store_levels(q, i, minimum(level, splat_i32x16(top)))
        store_half(out, d_offset, d)
        store_half(out, m_offset, low)
        write_levels(q, out)

    return encode_with_minimum


@jit(device=True)
def _inverse(d):
    zero = splat_f32x16(0)
    return choose(differs(d, zero), splat_f32x16(1) / d, zero)


@jit(device=True)
def _weights(x, importance, mean, weights):
    """``importance * sqrt(mean + x²)``."""
    for i in range(_BLOCK):
        value = load_f32x16(x, COLUMN * i)
        root = square_root(mean + value * value)
        store(weights, splat_f32x16(load_f32(importance, 4 * i)) * root, COLUMN * i)


def _level_writer(spec):
    """Writes levels: low four bits to ``qs``, the fifth to the word ``qh`` where the format has one."""
    fields = {field.name for field in spec.fields}
    qs, qh = spec.offset("qs"), spec.offset("qh") if "qh" in fields else -1

    @jit(device=True)
    def write_levels(q, out):
        for i in range(16):
            low, high = load_u8x16(q, BYTE_COLUMN * i), load_u8x16(q, BYTE_COLUMN * (16 + i))
            store(out, (low & 15) | ((high & 15) << 4), BYTE_COLUMN * (qs + i))
        if qh >= 0:
            for i in range(4):
                bits = load_u8x16(q, BYTE_COLUMN * 8 * i) >> 4
                for j in range(1, 8):
                    bits = bits | ((load_u8x16(q, BYTE_COLUMN * (8 * i + j)) >> 4) << j)
                store(out, bits, BYTE_COLUMN * (qh + i))

    return write_levels


LEGACY_ENCODERS = {
    "Q8_0": encode_q8_0,
    "Q4_0": symmetric_encoder(Q4_0, 8),
    "Q5_0": symmetric_encoder(Q5_0, 16),
    "Q4_1": encoder_with_minimum(Q4_1, 15),
    "Q5_1": encoder_with_minimum(Q5_1, 31),
}
