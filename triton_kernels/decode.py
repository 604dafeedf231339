"""One block decoder per packed format: the raw loads of a unit, and their quants with the scales.

A decoder is two functions. ``load_unit`` reads a unit's bytes and computes nothing with them, so that they
can be on their way while something else is waited for; ``decode_unit`` gives P planes of 16 consecutive
weights, four words of four bytes each, which share one scale:

    w = d * s * (q / lift - zero) - dmin * m

with d and dmin fp32, s and m small integers (1 where a format has none). All products are exact in fp32, so
fused and separate rounding agree with ggml bit for bit. Units, planes and addresses: see blocks.py.
"""

import triton
import triton.language as tl

from realizar_torch.triton_kernels.blocks import (
    field,
    has_minimum,
    has_sub_scales,
    lift,
    planes_per_scale,
    signed_quants,
    units,
    zero_point,
)
from realizar_torch.triton_kernels.primitives import (
    byte_to_float,
    load_half,
    load_word,
    load_words,
    split_words,
)


@triton.jit
def load_unit(row, block, unit, blocks, mask, FMT: tl.constexpr, PLANAR: tl.constexpr, ALIGN: tl.constexpr):
    """The bytes of one unit, as ``decode_unit`` takes them: a tuple of words and fp16 values.

    ``row`` are byte pointers ``[rows, 1]``, ``block`` and ``unit`` int32 ``[1, lanes]``. Masked lanes read
    zero bytes.
    """
    # scalars of a block are needed by all its units
    each = block + unit // units(FMT)
    if FMT == "Q4_K" or FMT == "Q5_K":
        header = load_words(row, field(each, blocks, FMT, "d", False), mask, ALIGN)
        qs = field(block, blocks, FMT, "qs", False) + 32 * unit
        first, second = load_words(row, qs, mask, ALIGN), load_words(row, qs + 16, mask, ALIGN)
        if FMT == "Q4_K":
            return first, second, header
        else:
            qh = field(each, blocks, FMT, "qh", False)
            bits = load_words(row, qh, mask, ALIGN)
            return first, second, header, bits, load_words(row, qh + 16, mask, ALIGN)
    else:
        d = load_half(row, field(each, blocks, FMT, "d", PLANAR), mask)
        if FMT == "Q6_K":
            ql = field(block, blocks, FMT, "ql", PLANAR) + (64 * (unit // 2) + 16 * (unit % 2))
            low, high = load_words(row, ql, mask, ALIGN), load_words(row, ql + 32, mask, ALIGN)
            bits = load_words(row, field(block, blocks, FMT, "qh", PLANAR) + 16 * unit, mask, ALIGN)
            scales = field(each, blocks, FMT, "scales", PLANAR) + 8 * (unit // 2)
            return (
                low,
                d,
                high,
                bits,
                load_word(row, scales, mask, ALIGN),
                load_word(row, scales + 4, mask, ALIGN),
            )
        else:
            quants = load_words(row, field(block, blocks, FMT, "qs", PLANAR) + 16 * unit, mask, ALIGN)
            if FMT == "Q2_K":
                scales = field(block, blocks, FMT, "scales", PLANAR) + 8 * (unit // 2)
                first, second = load_word(row, scales, mask, ALIGN), load_word(row, scales + 4, mask, ALIGN)
                dmin = load_half(row, field(each, blocks, FMT, "dmin", PLANAR), mask)
                return quants, d, first, second, dmin
            elif FMT == "Q3_K":
                hmask = field(block, blocks, FMT, "hmask", PLANAR) + 16 * (unit % 2)
                bits = load_words(row, hmask, mask, ALIGN)
                scales = field(each, blocks, FMT, "scales", PLANAR)
                first, second = load_word(row, scales, mask, ALIGN), load_word(row, scales + 4, mask, ALIGN)
                return quants, d, bits, first, second, load_word(row, scales + 8, mask, ALIGN)
            elif FMT == "Q4_1":
                return quants, d, load_half(row, field(each, blocks, FMT, "m", PLANAR), mask)
            elif FMT == "Q5_0":
                return quants, d, load_word(row, field(each, blocks, FMT, "qh", PLANAR), mask, ALIGN)
            elif FMT == "Q5_1":
                bits = load_word(row, field(each, blocks, FMT, "qh", PLANAR), mask, ALIGN)
                return quants, d, bits, load_half(row, field(each, blocks, FMT, "m", PLANAR), mask)
            elif FMT == "Q8_0":
                qs = field(block, blocks, FMT, "qs", PLANAR) + 16
                return quants, d, load_words(row, qs, mask, ALIGN)
            else:
                tl.static_assert(FMT == "Q4_0")
                return quants, d


@triton.jit
def decode_unit(raw, unit, FMT: tl.constexpr):
    """(words, s, m, d, dmin) of what ``load_unit`` read; s and m are empty where all are 1.

    words is a tuple of P int32 tensors ``[rows, lanes, 4]``, s and m of an int32 ``[rows, lanes]`` per scale;
    d and dmin are fp32 ``[rows, lanes]``. Without a minimum dmin is d.
    """
    if FMT == "Q4_0" or FMT == "Q4_1" or FMT == "Q5_0" or FMT == "Q5_1":
        return _legacy(raw, FMT)
    elif FMT == "Q8_0":
        # w = d*q. Bytes: d f16, 32 int8
        d = raw[1].to(tl.float32)
        return (raw[0], raw[2]), (), (), d, d
    elif FMT == "Q2_K":
        return _q2_k(raw, unit)
    elif FMT == "Q3_K":
        return _q3_k(raw, unit)
    elif FMT == "Q6_K":
        return _q6_k(raw, unit)
    else:
        return _q45_k(raw, unit, FMT)


@triton.jit
def _legacy(raw, FMT: tl.constexpr):
    """w = d*(q-zero) or d*q + m. Bytes: d f16 [m f16] [qh 4] qs 16; qs[i] holds weights i (low) and 16+i
    (high nibble).

    Bit i of qh is the fifth bit of weight i.
    """
    quants = raw[0]
    low = quants & 0x0F0F0F0F
    if FMT == "Q4_0" or FMT == "Q4_1":
        high = quants & -0x0F0F0F10
    else:
        high = (quants >> 4) & 0x0F0F0F0F
        bits = tl.expand_dims(raw[2], -1)
        nibble = 4 * tl.arange(0, 4)
        # The product spreads bits 0..3 to bit 0 of bytes 0..3.
        low |= ((((bits >> nibble) & 0xF) * 0x00204081) & 0x01010101) << 4
        high |= ((((bits >> (nibble + 16)) & 0xF) * 0x00204081) & 0x01010101) << 4
    d = raw[1].to(tl.float32)
    if has_minimum(FMT):
        dmin = -raw[len(raw) - 1].to(tl.float32)
    else:
        dmin = d
    return (low, high), (), (), d, dmin


@triton.jit
def _q2_k(raw, unit):
    """w = d*(s&15)*q - dmin*(s>>4), s = scales[group]. Bits 2p, 2p+1 of qs[32n+l] belong to weight 128n + 32p
    + l.
    """
    quants, d, first, second, dmin = raw
    first = first >> ((unit % 2) * 8)
    second = second >> ((unit % 2) * 8)
    words = (quants & 0x03030303, quants & 0x0C0C0C0C, quants & 0x30303030, quants & -0x3F3F3F40)
    scales = (first & 15, (first >> 16) & 15, second & 15, (second >> 16) & 15)
    minimums = ((first >> 4) & 15, (first >> 20) & 15, (second >> 4) & 15, (second >> 20) & 15)
    return words, scales, minimums, d.to(tl.float32), dmin.to(tl.float32)


@triton.jit
def _q3_k(raw, unit):
    """w = d*(s-32)*(q-4). q = two bits as in Q2_K | bit 4n+p of hmask[l] << 2.

    The 6-bit s of group g: low four bits in nibble g//8 of scales[g%8], high two in bits 2*(g//4) of
    scales[8+g%4].
    """
    quants, d, bits, first, second, third = raw
    n = unit // 2
    h = unit % 2
    bits = bits >> tl.expand_dims(4 * n, -1)
    # groups 8n+h, 8n+2+h from word 0 and 8n+4+h, 8n+6+h from word 1; all four share word 2.
    first = first >> (8 * h + 4 * n)
    second = second >> (8 * h + 4 * n)
    third = third >> (8 * h + 4 * n)
    words = (
        (quants & 0x03030303) | ((bits & 0x01010101) << 2),
        ((quants >> 2) & 0x03030303) | ((bits & 0x02020202) << 1),
        ((quants >> 4) & 0x03030303) | (bits & 0x04040404),
        ((quants >> 6) & 0x03030303) | ((bits >> 1) & 0x04040404),
    )
    scales = (
        ((first & 15) | ((third & 3) << 4)) - 32,
        (((first >> 16) & 15) | (((third >> 16) & 3) << 4)) - 32,
        ((second & 15) | (((third >> 2) & 3) << 4)) - 32,
        (((second >> 16) & 15) | (((third >> 18) & 3) << 4)) - 32,
    )
    d = d.to(tl.float32)
    return words, scales, (), d, d


@triton.jit
def _q45_k(raw, unit, FMT: tl.constexpr):
    """w = d*sc[s]*q - dmin*m[s], 8 sub-blocks of 32. Bytes: d, dmin f16, 12 of 6-bit pairs, [qh 32], qs 128.

    qs[32c+l] holds weights 64c+l (low nibble) and 64c+32+l; bit s of qh[l] is the fifth bit of weight 32s+l.
    Sub-blocks s < 4: sc = a[s] & 63, m = b[s] & 63; above: sc = e[s-4] & 15 | a[s-4] >> 6 << 4, m = e[s-4] >>
    4 | b[s-4] >> 6 << 4, where a, b, e are the three words of the packed scales.
    """
    header, a, b, e = split_words(raw[2])
    low, high = (), ()
    for half in tl.static_range(2):
        quants = raw[half]
        if FMT == "Q5_K":
            bits = raw[3 + half] >> tl.expand_dims(2 * unit, -1)
            low = low + ((quants & 0x0F0F0F0F) | ((bits & 0x01010101) << 4),)
            high = high + (((quants >> 4) & 0x0F0F0F0F) | ((bits & 0x02020202) << 3),)
        else:
            low = low + (quants & 0x0F0F0F0F,)
            high = high + (quants & -0x0F0F0F10,)
    # Two neighbouring sub-blocks at once; where the upper half of the block has two parts, the lower has a
    # zero mask.
    upper = unit >= 2
    shift = (unit % 2) * 16
    mask_low = tl.where(upper, 0x0F0F, 0x3F3F)
    mask_top = tl.where(upper, 0x3030, 0)
    scales = (tl.where(upper, e, a) >> shift) & mask_low | ((a >> (shift + 2)) & mask_top)
    minimums = (tl.where(upper, e, b) >> tl.where(upper, shift + 4, shift)) & mask_low | (
        (b >> (shift + 2)) & mask_top
    )
    d = (header & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    dmin = (header >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return low + high, (scales & 0xFF, scales >> 8), (minimums & 0xFF, minimums >> 8), d, dmin


@triton.jit
def _q6_k(raw, unit):
    """w = d*scales[group]*(q-32), scales int8. Half n of 128 weights: ql[64n+l], ql[64n+32+l], qh[32n+l], l <
    32.

    Weights 128n + l, +32, +64, +96 take nibbles ql[l]&15, ql[32+l]&15, ql[l]>>4, ql[32+l]>>4 and bits 0-1,
    2-3, 4-5, 6-7 of qh[l] above them.
    """
    a, d, b, bits, first, second = raw
    # bytes h and 2+h of each word, sign-extended
    first = first << (8 - 8 * (unit % 2))
    second = second << (8 - 8 * (unit % 2))
    d = d.to(tl.float32)
    words = (
        (a & 0x0F0F0F0F) | ((bits << 4) & 0x30303030),
        (b & 0x0F0F0F0F) | ((bits << 2) & 0x30303030),
        ((a >> 4) & 0x0F0F0F0F) | (bits & 0x30303030),
        ((b >> 4) & 0x0F0F0F0F) | ((bits >> 2) & 0x30303030),
    )
    return words, ((first << 16) >> 24, first >> 24, (second << 16) >> 24, second >> 24), (), d, d


@triton.jit
def word_quants(word, plane: tl.constexpr, FMT: tl.constexpr):
    """The four quants of one word of each lane, ``lift * (q - zero)``: exact fp32 ``[rows, lanes, 4]``."""
    word = tl.expand_dims(word, -1)
    if signed_quants(FMT):
        # the same numbers, 128 higher and unsigned
        return byte_to_float(word ^ -0x7F7F7F80, tl.arange(0, 4), 128)
    else:
        return byte_to_float(word, tl.arange(0, 4), zero_point(FMT) * lift(FMT, plane))


@triton.jit
def scale_of(s, d, plane: tl.constexpr, FMT: tl.constexpr):
    """What the quants of a plane are multiplied by: d * s / lift, fp32 ``[rows, lanes]``."""
    scale = d * (1.0 / lift(FMT, plane))
    if has_sub_scales(FMT):
        scale = scale * s[plane // planes_per_scale(FMT)].to(tl.float32)
    return scale


@triton.jit
def minimum_of(m, dmin, plane: tl.constexpr, FMT: tl.constexpr):
    """What is subtracted from every weight of a plane: dmin * m, fp32 ``[rows, lanes]``."""
    minimum = dmin
    if has_sub_scales(FMT):
        minimum = minimum * m[plane // planes_per_scale(FMT)].to(tl.float32)
    return minimum


@triton.jit
def word_weights(word, s, m, d, dmin, plane: tl.constexpr, FMT: tl.constexpr):
    """fp32 weights ``[rows, lanes, 4]`` of one word of each lane; s and m as ``decode_unit`` gives them."""
    weights = tl.expand_dims(scale_of(s, d, plane, FMT), -1) * word_quants(word, plane, FMT)
    if has_minimum(FMT):
        weights = weights - tl.expand_dims(minimum_of(m, dmin, plane, FMT), -1)
    return weights
