"""Packed rows as the left operand of tensor-core products, per format: one thread's share of a row.

A *step* is 256 consecutive weights of a row: one block, or eight blocks of 32. Lane 4 g + t of a warp holds
unit t of row g: 64 weights in eight *pieces* of eight consecutive ones. Which pieces is free, as long as the
activations follow (``piece_of``). With activations x of a step

    Σ w x = unit * Σ a x - factor * Σ m Σ x

where a are fp16 (scales are multiplied in), m are fp16 minimums of 16 weights each, and unit and factor are
fp32, the same for a whole row and step. A small integer in the bits of an fp16 value stands for 2^-24 times
itself, so quants become numbers by masking; one rounding follows when the scale is multiplied in (and the
zero point is subtracted), and none where their product fits 11 bits. Blocks of 32 have scales of their own:
there unit holds the power of two below the largest of the step, and a are rounded.
Bytes of the formats: see decode.py.
"""

import triton
import triton.language as tl

from realizar_torch.triton_kernels.blocks import block_size, field, has_minimum, run_units
from realizar_torch.triton_kernels.tensor_core import (
    fma_pair,
    largest_of_four,
    load_half,
    load_once,
    load_vector,
    multiply_pair,
    odd_bytes,
    whole_number,
)


@triton.constexpr_function
def _power(exponent):
    """The pair of twice 2^exponent, -14 to 15."""
    return ((exponent + 15) << 10) * 0x10001


@triton.constexpr_function
def _minus_power(exponent):
    """The pair of twice -2^exponent, -14 to 15."""
    return (0x8000 | ((exponent + 15) << 10)) * 0x10001 - (1 << 32)


@triton.constexpr_function
def _minus_quant(value):
    """The pair of twice minus a quant, in the bits of fp16 as quants are."""
    return (0x8000 | value) * 0x10001 - (1 << 32)


@triton.constexpr_function
def zero_point(fmt):
    """What is subtracted from the unsigned quants: a power of two, or 0."""
    return {"Q4_0": 8, "Q5_0": 16, "Q8_0": 128, "Q3_K": 4, "Q6_K": 32}.get(fmt, 0)


@triton.constexpr_function
def _lift(fmt):
    """a are so many powers of two too small, as scales times 2^(24 - lift) fill fp16."""
    return 10 if step_blocks(fmt) == 8 else 16 if fmt == "Q6_K" else 14


@triton.constexpr_function
def step_blocks(fmt):
    """Blocks of a step."""
    return 256 // block_size(fmt)


@triton.jit
def piece_of(t, c: tl.constexpr, FMT: tl.constexpr):
    """Which eight weights of a step are piece ``c`` of unit ``t``: (u, i), the i-th of the 64 from 64 u."""
    if run_units(FMT) == 2:
        # plane c // 2 of a half of 128 weights: 32 weights, of which a unit has 16
        return t // 2 * 2 + c // 4, c // 2 % 2 * 4 + t % 2 * 2 + c % 2
    else:
        return t, c


@triton.jit
def half_to_float(bits):
    """The lower 16 bits of a word as an fp16 value, in fp32."""
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _twice(bits):
    """Sixteen bits as both halves of a pair."""
    return (bits & 0xFFFF) * 0x10001


@triton.jit
def _address(row, block, blocks, FMT: tl.constexpr, NAME: tl.constexpr, PLANAR: tl.constexpr):
    """Of a field, in 64 bits: constants added to it become part of the load instruction."""
    return row + field(block, blocks, FMT, NAME, PLANAR).to(tl.int64)


@triton.jit
def load_fragment(row, step, blocks, t, FMT: tl.constexpr, PLANAR: tl.constexpr, ALIGN: tl.constexpr):
    """The bytes of unit ``t`` of a row's step, as the functions below take them; nothing computed."""
    if step_blocks(FMT) == 8:
        return _load_blocks(row, step, blocks, t, FMT, PLANAR, ALIGN)
    elif FMT == "Q4_K" or FMT == "Q5_K":
        quants = _address(row, step, blocks, FMT, "qs", PLANAR) + 32 * t
        raw = load_once(quants, ALIGN) + load_once(quants + 16, ALIGN)
        raw = raw + load_once(_address(row, step, blocks, FMT, "d", PLANAR), ALIGN)
        if FMT == "Q5_K":
            bits = _address(row, step, blocks, FMT, "qh", PLANAR)
            raw = raw + load_once(bits, ALIGN) + load_once(bits + 16, ALIGN)
        return raw
    elif FMT == "Q6_K":
        low = _address(row, step, blocks, FMT, "ql", PLANAR) + (t // 2 * 64 + t % 2 * 16)
        raw = load_once(low, ALIGN) + load_once(low + 32, ALIGN)
        raw = raw + load_once(_address(row, step, blocks, FMT, "qh", PLANAR) + 16 * t, ALIGN)
        raw = raw + load_vector(_address(row, step, blocks, FMT, "scales", PLANAR) + t // 2 * 8, 2, ALIGN)
        return raw + (load_half(_address(row, step, blocks, FMT, "d", PLANAR)),)
    else:
        tl.static_assert(FMT == "Q2_K" or FMT == "Q3_K")
        raw = load_once(_address(row, step, blocks, FMT, "qs", PLANAR) + 16 * t, ALIGN)
        raw = raw + (load_half(_address(row, step, blocks, FMT, "d", PLANAR)),)
        scales = _address(row, step, blocks, FMT, "scales", PLANAR)
        if FMT == "Q2_K":
            raw = raw + load_vector(scales + t // 2 * 8, 2, ALIGN)
            return raw + (load_half(_address(row, step, blocks, FMT, "dmin", PLANAR)),)
        else:
            raw = raw + load_vector(scales, 1, ALIGN) + load_vector(scales + 4, 1, ALIGN)
            raw = raw + load_vector(scales + 8, 1, ALIGN)
            high = _address(row, step, blocks, FMT, "hmask", PLANAR) + t % 2 * 16
            return raw + load_once(high, ALIGN)


@triton.jit
def _load_blocks(row, step, blocks, t, FMT: tl.constexpr, PLANAR: tl.constexpr, ALIGN: tl.constexpr):
    """Blocks 2 t and 2 t + 1 of a step, or the row's last one: of each qs, d [, qh] [, m]."""
    raw = ()
    for i in tl.static_range(2):
        block = tl.minimum(step * 8 + 2 * t + i, blocks - 1)
        quants = _address(row, block, blocks, FMT, "qs", PLANAR)
        raw = raw + load_once(quants, ALIGN)
        if FMT == "Q8_0":
            raw = raw + load_once(quants + 16, ALIGN)
        raw = raw + (load_half(_address(row, block, blocks, FMT, "d", PLANAR)),)
        if FMT == "Q5_0" or FMT == "Q5_1":
            raw = raw + load_vector(_address(row, block, blocks, FMT, "qh", PLANAR), 1, ALIGN)
        if has_minimum(FMT):
            raw = raw + (load_half(_address(row, block, blocks, FMT, "m", PLANAR)),)
    return raw


@triton.jit
def row_of(raw, t, FMT: tl.constexpr):
    """(unit, factor, scales, minimums) of a row and step: two fp32 numbers, the scale (and offset) pairs that
    ``piece`` takes, and m of the unit's four groups of 16 as pairs of twice the same.
    """
    if step_blocks(FMT) == 8:
        return _row_of_blocks(raw, FMT)
    else:
        return _row_of_super_block(raw, t, FMT)


@triton.jit
def _row_of_super_block(raw, t, FMT: tl.constexpr):
    pairs, minimums = (), ()
    UNIT: tl.constexpr = 2.0 ** _lift(FMT)
    if FMT == "Q4_K" or FMT == "Q5_K":
        scales, all_minimums = _two_scales(raw, t)
        for half in tl.static_range(2):
            scale = whole_number((scales >> (8 * half)) & 0xFF)
            # the upper nibble is used where it lies: sixteen times its value
            pairs = pairs + (multiply_pair(scale, _power(10 - 4 * half)),)
            m = whole_number((all_minimums >> (8 * half)) & 0xFF)
            minimums = minimums + (m, m)
        return half_to_float(raw[8]) * UNIT, half_to_float(raw[8] >> 16), pairs, minimums
    elif FMT == "Q6_K":
        for plane in tl.static_range(4):
            # byte h or 2 + h of a word, 128 higher
            word = (raw[12 + plane // 2] ^ -0x7F7F7F80) >> (t % 2 * 8)
            scale = whole_number((word >> (plane % 2 * 16)) & 0xFF)
            down = fma_pair(scale, _power(8), _minus_power(15))
            pairs = pairs + (down, multiply_pair(down, _minus_quant(zero_point(FMT))))
        return half_to_float(raw[14]) * UNIT, raw[14], pairs, minimums
    elif FMT == "Q2_K":
        for plane in tl.static_range(4):
            both = (raw[5 + plane // 2] >> (t % 2 * 8 + plane % 2 * 16)) & 0xFF
            # weights are used where they lie: 4^plane times their value
            pairs = pairs + (multiply_pair(whole_number(both & 15), _power(10 - 2 * plane)),)
            minimums = minimums + (whole_number(both >> 4),)
        return half_to_float(raw[4]) * UNIT, half_to_float(raw[7]), pairs, minimums
    else:
        shift = t % 2 * 8 + t // 2 * 4
        for plane in tl.static_range(4):
            low = (raw[5 + plane // 2] >> (shift + plane % 2 * 16)) & 15
            # six bits: the upper two of group g are bits 2 (g // 4) of byte g % 4
            high = (raw[7] >> (shift + plane % 2 * 16 + plane // 2 * 2)) & 3
            down = fma_pair(whole_number(low | (high << 4)), _power(10), _minus_power(15))
            pairs = pairs + (down, multiply_pair(down, _minus_quant(zero_point(FMT))))
        return half_to_float(raw[4]) * UNIT, raw[4], pairs, minimums


@triton.jit
def _two_scales(raw, t):
    """Scales and minimums of sub-blocks 2 t and 2 t + 1 in the lower bytes of a word each: see decode.py."""
    a, b, e = raw[9], raw[10], raw[11]
    upper, shift = t >= 2, t % 2 * 16
    mask_low, mask_top = tl.where(upper, 0x0F0F, 0x3F3F), tl.where(upper, 0x3030, 0)
    scales = ((tl.where(upper, e, a) >> shift) & mask_low) | ((a >> (shift + 2)) & mask_top)
    at = tl.where(upper, shift + 4, shift)
    return scales, ((tl.where(upper, e, b) >> at) & mask_low) | ((b >> (shift + 2)) & mask_top)


@triton.constexpr_function
def _words_of_block(fmt):
    """How many words of ``_load_blocks`` belong to one block."""
    return {"Q4_0": 5, "Q4_1": 6, "Q5_0": 6, "Q5_1": 7, "Q8_0": 9}[fmt]


@triton.jit
def _row_of_blocks(raw, FMT: tl.constexpr):
    WORDS: tl.constexpr = _words_of_block(FMT)
    D: tl.constexpr = 8 if FMT == "Q8_0" else 4
    d0, d1 = raw[D], raw[WORDS + D]
    largest = half_to_float(largest_of_four(tl.maximum(d0 & 0x7FFF, d1 & 0x7FFF)))
    # the power of two below it; what is smaller than any fp16 has no scale anyway
    power = tl.maximum(largest.to(tl.int32, bitcast=True) & 0x7F800000, 100 << 23)
    inverse = ((254 << 23) - power).to(tl.float32, bitcast=True)
    pairs, minimums = (), ()
    for i in tl.static_range(2):
        ratio = half_to_float(raw[i * WORDS + D]) * inverse * 16384.0
        scale = _twice(ratio.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32))
        pairs = pairs + (scale,)
        if zero_point(FMT) > 0:
            pairs = pairs + (multiply_pair(scale, _minus_quant(zero_point(FMT))),)
        if has_minimum(FMT):
            m = _twice(raw[i * WORDS + WORDS - 1])
            minimums = minimums + (m, m)
    unit = power.to(tl.float32, bitcast=True) * 2.0 ** _lift(FMT)
    return unit, tl.full(power.shape, -1.0, tl.float32), pairs, minimums


@triton.jit
def piece(raw, scales, t, c: tl.constexpr, FMT: tl.constexpr):
    """Piece ``c`` of a unit, multiplied by its scales: four pairs, weights 0 2, 1 3, 4 6 and 5 7."""
    pairs = ()
    for i in tl.static_range(2):
        even, odd = _quants(raw, t, c, i, FMT)
        if zero_point(FMT) > 0:
            # four scales of 16 weights, or two of 32
            scale, offset = _scale_of_piece(scales, c, 2, FMT)
            pairs = pairs + (fma_pair(even, scale, offset), fma_pair(odd, scale, offset))
        else:
            scale = _scale_of_piece(scales, c, 1, FMT)[0]
            pairs = pairs + (multiply_pair(even, scale), multiply_pair(odd, scale))
    return pairs


@triton.jit
def _scale_of_piece(scales, c: tl.constexpr, COUNT: tl.constexpr, FMT: tl.constexpr):
    """The COUNT pairs of a piece: a scale for every 16 weights, or 32 of them."""
    if run_units(FMT) == 2:
        return scales[c // 2 * COUNT], scales[c // 2 * COUNT + COUNT - 1]
    else:
        return scales[c // 4 * COUNT], scales[c // 4 * COUNT + COUNT - 1]


@triton.jit
def _quants(raw, t, c: tl.constexpr, i: tl.constexpr, FMT: tl.constexpr):
    """Quants 0 2 and 1 3 of half ``i`` of a piece, as the bits of pairs; some where they lie, higher up."""
    if FMT == "Q4_K" or FMT == "Q5_K":
        word = raw[2 * (c % 4) + i]
        even, odd = _masked(word, 0x000F000F << (c // 4 * 4))
        if FMT == "Q5_K":
            bits = raw[12 + 2 * (c % 4) + i] >> (2 * t)
            MASK: tl.constexpr = 0x00100010 << (c // 4 * 4)
            even |= (bits << (4 + c // 4 * 3)) & MASK
            odd |= (bits >> 8 << (4 + c // 4 * 3)) & MASK
        return even, odd
    elif FMT == "Q2_K":
        return _masked(raw[c % 2 * 2 + i], 0x00030003 << (c // 2 * 2))
    elif FMT == "Q6_K" or FMT == "Q3_K":
        return _masked(_k_word(raw, c // 2, c % 2 * 2 + i, t, FMT), 0x00FF00FF)
    elif FMT == "Q8_0":
        return _masked(raw[c // 4 * _words_of_block(FMT) + c % 4 * 2 + i] ^ -0x7F7F7F80, 0x00FF00FF)
    else:
        # weights 0 to 15 are lower nibbles, 16 to 31 upper ones
        word = raw[c // 4 * _words_of_block(FMT) + c % 2 * 2 + i] >> (c % 4 // 2 * 4)
        if FMT == "Q5_0" or FMT == "Q5_1":
            bits = (raw[c // 4 * _words_of_block(FMT) + 5] >> (c % 4 // 2 * 16 + c % 2 * 8 + 4 * i)) & 15
            # the product spreads bits 0 to 3 to bit 0 of bytes 0 to 3
            word = (word & 0x0F0F0F0F) | (((bits * 0x00204081) & 0x01010101) << 4)
            return _masked(word, 0x00FF00FF)
        else:
            return _masked(word, 0x000F000F)


@triton.jit
def _masked(word, MASK: tl.constexpr):
    """Even and odd bytes of a word, what MASK leaves of them."""
    if MASK == 0x00FF00FF:
        return word & MASK, odd_bytes(word)
    else:
        return word & MASK, (word >> 8) & MASK


@triton.jit
def _k_word(raw, plane: tl.constexpr, i: tl.constexpr, t, FMT: tl.constexpr):
    """Word ``i`` of a plane: four quants, with their zero point."""
    if FMT == "Q6_K":
        low, bits = raw[plane % 2 * 4 + i] >> (plane // 2 * 4), raw[8 + i]
        if plane == 3:
            high = (bits >> 2) & 0x30303030
        else:
            high = (bits << (4 - 2 * plane)) & 0x30303030
        return (low & 0x0F0F0F0F) | high
    else:
        bits = (raw[8 + i] >> (t // 2 * 4 + plane)) & 0x01010101
        return ((raw[i] >> (2 * plane)) & 0x03030303) | (bits << 2)
