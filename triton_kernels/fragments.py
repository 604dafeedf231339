"""Packed rows as the left operand of tensor-core products, per format: one thread's share of a row.

A *step* is 256 consecutive weights of a row: one block, or eight blocks of 32. It has runs of ``run`` weights
(32 or 16) that share a scale; each run is one product. Lane 4 g + t of a warp holds row g, and of a run the
eight weights 8 t … 8 t + 7 (``paired``), 4 t … and 16 + 4 t …, or (runs of 16) 4 t …: any order will do that
the activations follow too. For a run with activations x̂ (int8 times xscale)

    Σ w x̂ = scale * xscale * Σ q xq - factor * Σ m Σ x̂

with small integers q and m (fp16 values where a format has those) and fp32 scale and factor. Bytes of the
formats: see decode.py.
"""

import triton
import triton.language as tl

from realizar_torch.triton_kernels.blocks import block_size, field, has_minimum
from realizar_torch.triton_kernels.tensor_core import byte_as_float, byte_times, load_half, load_vector

STEP = tl.constexpr(256)


@triton.constexpr_function
def step_blocks(fmt):
    """Blocks of a step."""
    return STEP.value // block_size(fmt)


@triton.constexpr_function
def run_size(fmt):
    """Weights that share a scale. The four-bit scales of Q2_K are multiplied into its two-bit weights."""
    return 16 if fmt in ("Q3_K", "Q6_K") else 32


@triton.constexpr_function
def paired(fmt):
    """Whether a thread's eight weights of a run are consecutive."""
    return fmt in ("Q4_K", "Q5_K", "Q8_0")


@triton.constexpr_function
def signed(fmt):
    """Whether the weights' words are int8 (their zero point in place) or uint8."""
    return fmt in ("Q4_0", "Q5_0", "Q8_0", "Q3_K", "Q6_K")


@triton.constexpr_function
def minimums(fmt):
    """How many values m a step of a row has."""
    return 16 if fmt == "Q2_K" else 8 if has_minimum(fmt) else 0


@triton.jit
def half_to_float(bits):
    """The lower 16 bits of a word as an fp16 value, in fp32."""
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def inner_block(first, i, blocks, FMT: tl.constexpr):
    """Block ``i`` (a number, or one per thread) of the step at block ``first``, or the row's last block."""
    if step_blocks(FMT) == 1:
        return first
    else:
        return tl.minimum(first + i, blocks - 1)


@triton.jit
def load_fragment(row, first, blocks, t, FMT: tl.constexpr, PLANAR: tl.constexpr, ALIGN: tl.constexpr):
    """A thread's bytes of the step at block ``first`` of its row: a tuple of words, nothing computed."""
    if step_blocks(FMT) == 8:
        raw = _load_legacy(row, first, blocks, t, FMT, PLANAR, ALIGN)
    elif FMT == "Q4_K" or FMT == "Q5_K":
        raw = load_vector(_address(row, first, blocks, FMT, "d", PLANAR), 4, ALIGN)
        quants = _address(row, first, blocks, FMT, "qs", PLANAR) + 8 * t
        for c in tl.static_range(4):
            raw = raw + load_vector(quants + 32 * c, 2, ALIGN)
        if FMT == "Q5_K":
            raw = raw + load_vector(_address(row, first, blocks, FMT, "qh", PLANAR) + 8 * t, 2, ALIGN)
    elif FMT == "Q6_K":
        raw = load_vector(_address(row, first, blocks, FMT, "scales", PLANAR), 4, ALIGN)
        raw = raw + (load_half(_address(row, first, blocks, FMT, "d", PLANAR)),)
        raw = raw + _load_words(_address(row, first, blocks, FMT, "ql", PLANAR) + 4 * t, 8, ALIGN)
        raw = raw + _load_words(_address(row, first, blocks, FMT, "qh", PLANAR) + 4 * t, 4, ALIGN)
    elif FMT == "Q2_K":
        raw = load_vector(_address(row, first, blocks, FMT, "scales", PLANAR), 4, ALIGN)
        raw = raw + (load_half(_address(row, first, blocks, FMT, "d", PLANAR)),)
        raw = raw + (load_half(_address(row, first, blocks, FMT, "dmin", PLANAR)),)
        raw = raw + _load_words(_address(row, first, blocks, FMT, "qs", PLANAR) + 4 * t, 4, ALIGN)
    else:
        tl.static_assert(FMT == "Q3_K")
        scales = _address(row, first, blocks, FMT, "scales", PLANAR)
        raw = load_vector(scales, 1, ALIGN) + load_vector(scales + 4, 1, ALIGN)
        raw = raw + load_vector(scales + 8, 1, ALIGN)
        raw = raw + (load_half(_address(row, first, blocks, FMT, "d", PLANAR)),)
        raw = raw + _load_words(_address(row, first, blocks, FMT, "hmask", PLANAR) + 4 * t, 2, ALIGN)
        raw = raw + _load_words(_address(row, first, blocks, FMT, "qs", PLANAR) + 4 * t, 4, ALIGN)
    return raw


@triton.jit
def _address(row, block, blocks, FMT: tl.constexpr, NAME: tl.constexpr, PLANAR: tl.constexpr):
    """Of a field, in 64 bits: constants added to it become part of the load instruction."""
    return row + field(block, blocks, FMT, NAME, PLANAR).to(tl.int64)


@triton.jit
def _load_words(address, COUNT: tl.constexpr, ALIGN: tl.constexpr):
    """COUNT words, 16 bytes apart."""
    raw = ()
    for i in tl.static_range(COUNT):
        raw = raw + load_vector(address + 16 * i, 1, ALIGN)
    return raw


@triton.jit
def _load_legacy(row, first, blocks, t, FMT: tl.constexpr, PLANAR: tl.constexpr, ALIGN: tl.constexpr):
    """Eight times (d, the words of qs [, qh]), then m of blocks t and t + 4."""
    raw = ()
    for i in tl.static_range(8):
        block = inner_block(first, i, blocks, FMT)
        raw = raw + (load_half(_address(row, block, blocks, FMT, "d", PLANAR)),)
        quants = _address(row, block, blocks, FMT, "qs", PLANAR)
        if FMT == "Q8_0":
            raw = raw + load_vector(quants + 8 * t, 2, ALIGN)
        else:
            raw = raw + load_vector(quants + 4 * t, 1, ALIGN)
        if FMT == "Q5_0" or FMT == "Q5_1":
            raw = raw + load_vector(_address(row, block, blocks, FMT, "qh", PLANAR), 1, ALIGN)
    if has_minimum(FMT):
        for j in tl.static_range(2):
            block = inner_block(first, t + 4 * j, blocks, FMT)
            raw = raw + (load_half(_address(row, block, blocks, FMT, "m", PLANAR)),)
    return raw


@triton.jit
def words_of(raw, run: tl.constexpr, t, FMT: tl.constexpr):
    """A thread's weights of one run: two words, or one where runs have 16."""
    if FMT == "Q4_K":
        # upper nibbles stay where they are: the scale makes up for the factor 16
        mask: tl.constexpr = -0x0F0F0F10 if run % 2 else 0x0F0F0F0F
        return raw[4 + run // 2 * 2] & mask, raw[5 + run // 2 * 2] & mask
    elif FMT == "Q5_K":
        first = ((raw[4 + run // 2 * 2] >> (run % 2 * 4)) & 0x0F0F0F0F) | (_bit(raw[12], run) << 4)
        second = ((raw[5 + run // 2 * 2] >> (run % 2 * 4)) & 0x0F0F0F0F) | (_bit(raw[13], run) << 4)
        return first, second
    elif FMT == "Q6_K":
        # the six bits at a byte's top, so that -32 is one exclusive or; run 8 n + 2 p + h
        n: tl.constexpr = run // 8
        p: tl.constexpr = run % 8 // 2
        h: tl.constexpr = run % 2
        low = raw[5 + 4 * n + p % 2 * 2 + h]
        low = (low >> 2 if p // 2 else low << 2) & 0x3C3C3C3C ^ -0x7F7F7F80
        return (low ^ ((raw[13 + 2 * n + h] << (6 - 2 * p)) & -0x3F3F3F40),)
    elif FMT == "Q3_K":
        n: tl.constexpr = run // 8
        p: tl.constexpr = run % 8 // 2
        h: tl.constexpr = run % 2
        quants = (raw[6 + 2 * n + h] >> (2 * p)) & 0x03030303
        return (((quants << 5) | (_bit(raw[4 + h], 4 * n + p) << 7)) ^ -0x7F7F7F80,)
    elif FMT == "Q2_K":
        # bytes of at most 3 * 15: no carry
        n: tl.constexpr = run // 4
        p: tl.constexpr = run % 4
        first = ((raw[6 + 2 * n] >> (2 * p)) & 0x03030303) * _byte(raw[run // 2], 2 * run % 4, 15)
        second = ((raw[7 + 2 * n] >> (2 * p)) & 0x03030303) * _byte(raw[run // 2], 2 * run % 4 + 1, 15)
        return first, second
    elif FMT == "Q8_0":
        return raw[3 * run + 1], raw[3 * run + 2]
    elif FMT == "Q4_0":
        low, high = (raw[2 * run + 1] << 4) & -0x0F0F0F10, raw[2 * run + 1] & -0x0F0F0F10
        return low ^ -0x7F7F7F80, high ^ -0x7F7F7F80
    elif FMT == "Q4_1":
        return (raw[2 * run + 1] << 4) & -0x0F0F0F10, raw[2 * run + 1] & -0x0F0F0F10
    else:
        tl.static_assert(FMT == "Q5_0" or FMT == "Q5_1")
        # five bits at a byte's top
        quants, bits = raw[3 * run + 1], raw[3 * run + 2] >> (4 * t)
        first = ((quants << 3) & 0x78787878) | (_spread(bits) << 7)
        second = ((quants >> 1) & 0x78787878) | (_spread(bits >> 16) << 7)
        if FMT == "Q5_0":
            return first ^ -0x7F7F7F80, second ^ -0x7F7F7F80
        else:
            return first, second


@triton.jit
def _bit(word, index: tl.constexpr):
    """Bit ``index`` of every byte, at the byte's bottom."""
    return (word >> index) & 0x01010101


@triton.jit
def _byte(word, index: tl.constexpr, mask: tl.constexpr):
    return (word >> (8 * index)) & mask


@triton.jit
def _spread(bits):
    """Bits 0 to 3 at the bottoms of bytes 0 to 3."""
    return ((bits & 0xF) * 0x00204081) & 0x01010101


@triton.jit
def scales_of(raw, first, blocks, WHOLE: tl.constexpr, FMT: tl.constexpr):
    """fp32 scales of a step's runs, 22 bits of mantissa at most; 0 past the row's end."""
    scales = ()
    if step_blocks(FMT) == 8:
        WORDS: tl.constexpr = 2 if FMT == "Q4_0" or FMT == "Q4_1" else 3
        LIFT: tl.constexpr = 1 if FMT == "Q8_0" else 16 if WORDS == 2 else 8
        for run in tl.static_range(8):
            scale = half_to_float(raw[WORDS * run]) * (1.0 / LIFT)
            scales = scales + (scale if WHOLE else tl.where(first + run < blocks, scale, 0.0),)
    elif FMT == "Q4_K" or FMT == "Q5_K":
        d = half_to_float(raw[0])
        if not WHOLE:
            d = tl.where(first < blocks, d, 0.0)
        low, high = _scales_k4(raw[1], raw[3])
        for run in tl.static_range(8):
            unit = d * 0.0625 if FMT == "Q4_K" and run % 2 else d
            word = high if run // 4 else low
            scales = scales + (byte_times(word, run % 4, unit),)
    else:
        d = half_to_float(raw[3] if FMT == "Q3_K" else raw[4])
        if not WHOLE:
            d = tl.where(first < blocks, d, 0.0)
        if FMT == "Q6_K":
            for run in tl.static_range(16):
                word = raw[run // 4] ^ -0x7F7F7F80
                scales = scales + ((byte_as_float(word, run % 4) - 8388736.0) * (d * 0.25),)
        elif FMT == "Q3_K":
            for run in tl.static_range(16):
                low = (raw[run % 8 // 4] >> (run // 8 * 4)) & 0x0F0F0F0F
                word = low | (((raw[2] >> (run // 4 * 2)) & 0x03030303) << 4)
                scales = scales + ((byte_as_float(word, run % 4) - 8388640.0) * (d * 0.03125),)
        else:
            for _ in tl.static_range(8):
                scales = scales + (d,)
    return scales


@triton.jit
def _scales_k4(low, top):
    """Eight six-bit values of Q4_K or Q5_K in the bytes of two words: see decode.py."""
    return low & 0x3F3F3F3F, (top & 0x0F0F0F0F) | ((low >> 2) & 0x30303030)


@triton.jit
def minimums_of(raw, first, blocks, part: tl.constexpr, t, WHOLE: tl.constexpr, FMT: tl.constexpr):
    """m number 8 part + t and 8 part + t + 4 of a step, as fp32 with 10 bits of mantissa."""
    if step_blocks(FMT) == 8:
        lower, upper = half_to_float(raw[len(raw) - 2]), half_to_float(raw[len(raw) - 1])
        if not WHOLE:
            lower = tl.where(first + t < blocks, lower, 0.0)
            upper = tl.where(first + t + 4 < blocks, upper, 0.0)
        return lower, upper
    elif FMT == "Q2_K":
        lower, upper = (raw[2 * part] >> 4) & 0x0F0F0F0F, (raw[2 * part + 1] >> 4) & 0x0F0F0F0F
    else:
        lower, upper = _scales_k4(raw[2], raw[3] >> 4)
    return byte_as_float(lower, t) - 8388608.0, byte_as_float(upper, t) - 8388608.0


@triton.jit
def factor_of(raw, first, blocks, WHOLE: tl.constexpr, FMT: tl.constexpr):
    """What a step's sum of minimums is multiplied by before it is subtracted."""
    if step_blocks(FMT) == 8:
        return tl.full(raw[0].shape, -1.0, tl.float32)
    else:
        factor = half_to_float(raw[5] if FMT == "Q2_K" else raw[0] >> 16)
        return factor if WHOLE else tl.where(first < blocks, factor, 0.0)
