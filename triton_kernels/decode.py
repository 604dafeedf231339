"""One block decoder per packed format: bytes → packed 8-bit quants with their scales.

Every decoder reads one *unit* of a block: 16-byte runs that one thread loads whole. A unit yields P *planes*;
a plane is 16 consecutive weights as four words of four bytes, and all 16 share one scale:

    w = d * s * (q / lift - zero) - dmin * m

with d and dmin fp32, s and m small integers (1 where a format has none).

Plane p of unit u holds group (u // H) * H * P + H * p + u % H of the block's groups of 16. All products are
exact in fp32, so fused and separate rounding agree with ggml bit for bit. A field of block b lies at ``row +
b * block_bytes + offset`` (layout "ggml") or ``row + blocks * offset + b * field_bytes`` ("planar").
"""

import math

import triton
import triton.language as tl

from realizar_torch.formats import PACKED_FORMATS, get_packed_format
from realizar_torch.triton_kernels.primitives import (
    load_half,
    load_word,
    load_words,
    split_words,
)

# Tables are constexpr so that Triton's caches key on their content. fmt: (units per block, planes per unit,
# units per 32-weight run, zero point, bits that plane p + 1 lies above p: masking quants in place, without
# shifting them down, saves an instruction per word)
_SHAPES = tl.constexpr(
    {
        "Q4_0": (1, 2, 1, 8, 4),
        "Q4_1": (1, 2, 1, 0, 4),
        "Q5_0": (1, 2, 1, 16, 0),
        "Q5_1": (1, 2, 1, 0, 0),
        "Q8_0": (2, 1, 2, 0, 0),
        "Q2_K": (4, 4, 2, 0, 2),
        "Q3_K": (4, 4, 2, 4, 0),
        "Q4_K": (8, 2, 2, 0, 4),
        "Q5_K": (8, 2, 2, 0, 0),
        "Q6_K": (4, 4, 2, 32, 0),
    }
)
_SIZES = tl.constexpr({fmt.name: (fmt.block_size, fmt.block_bytes) for fmt in PACKED_FORMATS})
_FIELDS = tl.constexpr(
    {(fmt.name, f.name): (fmt.offset(f.name), f.nbytes) for fmt in PACKED_FORMATS for f in fmt.fields}
)
# Their 16-byte header is read in one load, which needs it in one piece.
GGML_ONLY = ("Q4_K", "Q5_K")


@triton.constexpr_function
def units(fmt):
    return _SHAPES.value[fmt][0]


@triton.constexpr_function
def planes(fmt):
    return _SHAPES.value[fmt][1]


@triton.constexpr_function
def run_units(fmt):
    return _SHAPES.value[fmt][2]


@triton.constexpr_function
def zero_point(fmt):
    return _SHAPES.value[fmt][3]


@triton.constexpr_function
def lift(fmt, plane):
    return 1 << (plane * _SHAPES.value[fmt][4])


@triton.constexpr_function
def has_sub_scales(fmt):
    return fmt.endswith("_K")


@triton.constexpr_function
def has_minimum(fmt):
    return (fmt, "m") in _FIELDS.value or (fmt, "dmin") in _FIELDS.value


@triton.constexpr_function
def signed_quants(fmt):
    return fmt == "Q8_0"


@triton.constexpr_function
def block_size(fmt):
    return _SIZES.value[fmt][0]


@triton.constexpr_function
def block_bytes(fmt):
    return _SIZES.value[fmt][1]


@triton.constexpr_function
def offset(fmt, field):
    return _FIELDS.value[fmt, field][0]


@triton.constexpr_function
def field_bytes(fmt, field):
    return _FIELDS.value[fmt, field][1]


def alignment(fmt: str, layout: str, pointer: int, row_stride: int, blocks: int) -> int:
    """The largest power of two (2 to 16) dividing every address that the decoder reads as 32-bit words."""
    found = get_packed_format(fmt)
    wide = [field.name for field in found.fields if field.nbytes >= 4]
    if layout == "ggml":
        steps = [found.block_bytes, *(found.offset(name) for name in wide)]
    else:
        steps = [blocks * found.offset(name) for name in wide]
        steps += [field.nbytes for field in found.fields if field.nbytes >= 4]
    return math.gcd(16, pointer, row_stride, *steps)


@triton.jit
def field(row, block, blocks, FMT: tl.constexpr, NAME: tl.constexpr, PLANAR: tl.constexpr):
    """Byte address of a field of ``block`` in the row that starts at ``row``."""
    if PLANAR:
        return row + (blocks * offset(FMT, NAME) + block * field_bytes(FMT, NAME))
    else:
        return row + (block * block_bytes(FMT) + offset(FMT, NAME))


@triton.jit
def group_of(unit, plane, FMT: tl.constexpr):
    """Which 16 weights of the block a plane of a unit holds."""
    H: tl.constexpr = run_units(FMT)
    return (unit // H) * (H * planes(FMT)) + H * plane + unit % H


@triton.jit
def decode_unit(row, block, unit, blocks, mask, FMT: tl.constexpr, PLANAR: tl.constexpr, ALIGN: tl.constexpr):
    """One unit: (words, s, m, d, dmin); words, s and m are tuples of P tensors, s and m empty where all are
    1.

    ``row`` uint8 pointers, ``block`` and ``unit`` int32, broadcastable to ``[units, blocks, rows]``; words
    are ``[units, blocks, rows, 4]`` int32, s and m int32, d and dmin fp32 ``[units, blocks, rows]``. Without
    a minimum dmin is d. Masked lanes read zero bytes.
    """
    if FMT == "Q4_0" or FMT == "Q4_1" or FMT == "Q5_0" or FMT == "Q5_1":
        return _legacy(row, block, unit, blocks, mask, FMT, PLANAR, ALIGN)
    elif FMT == "Q8_0":
        return _q8_0(row, block, unit, blocks, mask, FMT, PLANAR, ALIGN)
    elif FMT == "Q2_K":
        return _q2_k(row, block, unit, blocks, mask, FMT, PLANAR, ALIGN)
    elif FMT == "Q3_K":
        return _q3_k(row, block, unit, blocks, mask, FMT, PLANAR, ALIGN)
    elif FMT == "Q6_K":
        return _q6_k(row, block, unit, blocks, mask, FMT, PLANAR, ALIGN)
    else:
        tl.static_assert(FMT == "Q4_K" or FMT == "Q5_K")
        return _q45_k(row, block, unit, blocks, mask, FMT, ALIGN)


@triton.jit
def _legacy(row, block, unit, blocks, mask, FMT: tl.constexpr, PLANAR: tl.constexpr, ALIGN: tl.constexpr):
    """w = d*(q-zero) or d*q + m. Bytes: d f16 [m f16] [qh 4] qs 16; qs[i] holds weights i (low) and 16+i
    (high nibble).

    Bit i of qh is the fifth bit of weight i.
    """
    block = block + unit // units(FMT)
    quants = load_words(field(row, block, blocks, FMT, "qs", PLANAR), mask, ALIGN)
    low = quants & 0x0F0F0F0F
    if FMT == "Q4_0" or FMT == "Q4_1":
        high = quants & -0x0F0F0F10
    else:
        high = (quants >> 4) & 0x0F0F0F0F
        bits = tl.expand_dims(load_word(field(row, block, blocks, FMT, "qh", PLANAR), mask, ALIGN), -1)
        nibble = 4 * tl.arange(0, 4)
        # The product spreads bits 0..3 to bit 0 of bytes 0..3.
        low |= ((((bits >> nibble) & 0xF) * 0x00204081) & 0x01010101) << 4
        high |= ((((bits >> (nibble + 16)) & 0xF) * 0x00204081) & 0x01010101) << 4
    d = load_half(field(row, block, blocks, FMT, "d", PLANAR), mask)
    if has_minimum(FMT):
        dmin = -load_half(field(row, block, blocks, FMT, "m", PLANAR), mask)
    else:
        dmin = d
    return (low, high), (), (), d, dmin


@triton.jit
def _q8_0(row, block, unit, blocks, mask, FMT: tl.constexpr, PLANAR: tl.constexpr, ALIGN: tl.constexpr):
    """w = d*q. Bytes: d f16, 32 int8; unit u holds weights 16u to 16u+15."""
    quants = load_words(field(row, block, blocks, FMT, "qs", PLANAR) + 16 * unit, mask, ALIGN)
    d = load_half(field(row, block + unit // units(FMT), blocks, FMT, "d", PLANAR), mask)
    return (quants,), (), (), d, d


@triton.jit
def _q2_k(row, block, unit, blocks, mask, FMT: tl.constexpr, PLANAR: tl.constexpr, ALIGN: tl.constexpr):
    """w = d*(s&15)*q - dmin*(s>>4), s = scales[group]. Bits 2p, 2p+1 of qs[32n+l] belong to weight 128n + 32p
    + l.
    """
    quants = load_words(field(row, block, blocks, FMT, "qs", PLANAR) + 16 * unit, mask, ALIGN)
    scales = field(row, block, blocks, FMT, "scales", PLANAR) + (unit // 2) * 8
    first = load_word(scales, mask, ALIGN) >> ((unit % 2) * 8)
    second = load_word(scales + 4, mask, ALIGN) >> ((unit % 2) * 8)
    d = load_half(field(row, block + unit // units(FMT), blocks, FMT, "d", PLANAR), mask)
    dmin = load_half(field(row, block + unit // units(FMT), blocks, FMT, "dmin", PLANAR), mask)
    words = (quants & 0x03030303, quants & 0x0C0C0C0C, quants & 0x30303030, quants & -0x3F3F3F40)
    scales = (first & 15, (first >> 16) & 15, second & 15, (second >> 16) & 15)
    minimums = ((first >> 4) & 15, (first >> 20) & 15, (second >> 4) & 15, (second >> 20) & 15)
    return words, scales, minimums, d, dmin


@triton.jit
def _q3_k(row, block, unit, blocks, mask, FMT: tl.constexpr, PLANAR: tl.constexpr, ALIGN: tl.constexpr):
    """w = d*(s-32)*(q-4). q = two bits as in Q2_K | bit 4n+p of hmask[l] << 2.

    The 6-bit s of group g: low four bits in nibble g//8 of scales[g%8], high two in bits 2*(g//4) of
    scales[8+g%4].
    """
    n = unit // 2
    h = unit % 2
    quants = load_words(field(row, block, blocks, FMT, "qs", PLANAR) + 16 * unit, mask, ALIGN)
    bits = load_words(field(row, block, blocks, FMT, "hmask", PLANAR) + 16 * h, mask, ALIGN)
    bits = bits >> tl.expand_dims(4 * n, -1)
    scales = field(row, block + unit // units(FMT), blocks, FMT, "scales", PLANAR)
    d = load_half(field(row, block + unit // units(FMT), blocks, FMT, "d", PLANAR), mask)
    # groups 8n+h, 8n+2+h from word 0 and 8n+4+h, 8n+6+h from word 1; all four share word 2.
    first = load_word(scales, mask, ALIGN) >> (8 * h + 4 * n)
    second = load_word(scales + 4, mask, ALIGN) >> (8 * h + 4 * n)
    third = load_word(scales + 8, mask, ALIGN) >> (8 * h + 4 * n)
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
    return words, scales, (), d, d


@triton.jit
def _q45_k(row, block, unit, blocks, mask, FMT: tl.constexpr, ALIGN: tl.constexpr):
    """w = d*sc[s]*q - dmin*m[s], 8 sub-blocks of 32. Bytes: d, dmin f16, 12 of 6-bit pairs, [qh 32], qs 128.

    qs[32c+l] holds weights 64c+l (low nibble) and 64c+32+l; bit s of qh[l] is the fifth bit of weight 32s+l.
    Sub-blocks s < 4: sc = a[s] & 63, m = b[s] & 63; above: sc = e[s-4] & 15 | a[s-4] >> 6 << 4, m = e[s-4] >>
    4 | b[s-4] >> 6 << 4, where a, b, e are the three words of the packed scales.
    """
    c = unit // 2
    header, a, b, e = split_words(
        load_words(field(row, block + unit // units(FMT), blocks, FMT, "d", False), mask, ALIGN)
    )
    quants = load_words(field(row, block, blocks, FMT, "qs", False) + 16 * unit, mask, ALIGN)
    low = quants & 0x0F0F0F0F
    if FMT == "Q5_K":
        bits = load_words(field(row, block, blocks, FMT, "qh", False) + 16 * (unit % 2), mask, ALIGN)
        bits = bits >> (2 * c)[:, :, :, None]
        low |= (bits & 0x01010101) << 4
        high = ((quants >> 4) & 0x0F0F0F0F) | ((bits & 0x02020202) << 3)
    else:
        high = quants & -0x0F0F0F10
    # Two neighbouring sub-blocks at once; where the upper half of the block has two parts, the lower has a
    # zero mask.
    upper = c >= 2
    shift = (c % 2) * 16
    mask_low = tl.where(upper, 0x0F0F, 0x3F3F)
    mask_top = tl.where(upper, 0x3030, 0)
    scales = (tl.where(upper, e, a) >> shift) & mask_low | ((a >> (shift + 2)) & mask_top)
    minimums = (tl.where(upper, e, b) >> tl.where(upper, shift + 4, shift)) & mask_low | (
        (b >> (shift + 2)) & mask_top
    )
    d = (header & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    dmin = (header >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return (low, high), (scales & 0xFF, scales >> 8), (minimums & 0xFF, minimums >> 8), d, dmin


@triton.jit
def _q6_k(row, block, unit, blocks, mask, FMT: tl.constexpr, PLANAR: tl.constexpr, ALIGN: tl.constexpr):
    """w = d*scales[group]*(q-32), scales int8. Half n of 128 weights: ql[64n+l], ql[64n+32+l], qh[32n+l], l <
    32.

    Weights 128n + l, +32, +64, +96 take nibbles ql[l]&15, ql[32+l]&15, ql[l]>>4, ql[32+l]>>4 and bits 0-1,
    2-3, 4-5, 6-7 of qh[l] above them.
    """
    n = unit // 2
    h = unit % 2
    ql = field(row, block, blocks, FMT, "ql", PLANAR) + (64 * n + 16 * h)
    a = load_words(ql, mask, ALIGN)
    b = load_words(ql + 32, mask, ALIGN)
    bits = load_words(field(row, block, blocks, FMT, "qh", PLANAR) + 16 * unit, mask, ALIGN)
    scales = field(row, block, blocks, FMT, "scales", PLANAR) + 8 * n
    # bytes h and 2+h of each word, sign-extended
    first = load_word(scales + unit // units(FMT), mask, ALIGN) << (8 - 8 * h)
    second = load_word(scales + unit // units(FMT) + 4, mask, ALIGN) << (8 - 8 * h)
    d = load_half(field(row, block + unit // units(FMT), blocks, FMT, "d", PLANAR), mask)
    words = (
        (a & 0x0F0F0F0F) | ((bits << 4) & 0x30303030),
        (b & 0x0F0F0F0F) | ((bits << 2) & 0x30303030),
        ((a >> 4) & 0x0F0F0F0F) | (bits & 0x30303030),
        ((b >> 4) & 0x0F0F0F0F) | ((bits >> 2) & 0x30303030),
    )
    return words, ((first << 16) >> 24, first >> 24, (second << 16) >> 24, second >> 24), (), d, d


@triton.jit
def word_weights(word, s, m, d, dmin, plane: tl.constexpr, FMT: tl.constexpr):
    """fp32 weights ``[..., 4]`` of one word of each lane; s and m as ``decode_unit`` gives them."""
    shift = 8 * tl.arange(0, 4)
    word = tl.expand_dims(word, -1)
    if signed_quants(FMT):
        quants = (word << (24 - shift)) >> 24
    else:
        quants = ((word >> shift) & 0xFF) - zero_point(FMT) * lift(FMT, plane)
    scale = d * (1.0 / lift(FMT, plane))
    minimum = dmin
    if has_sub_scales(FMT):
        scale = scale * s[plane].to(tl.float32)
        if has_minimum(FMT):
            minimum = minimum * m[plane].to(tl.float32)
    weights = tl.expand_dims(scale, -1) * quants.to(tl.float32)
    if has_minimum(FMT):
        weights = weights - tl.expand_dims(minimum, -1)
    return weights
