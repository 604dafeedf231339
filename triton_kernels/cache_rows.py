"""Rows of a quantized key/value cache: one scale per position and head, int8 or fp8 (e4m3) elements."""

import triton
import triton.language as tl

from realizar_torch.triton_kernels.primitives import INTERPRETED, cast, round_half_even


@triton.jit
def _on_e4m3_grid(x):
    """An fp32 value of at most 448 rounded to nearest even in e4m3, which the interpreter truncates to."""
    if INTERPRETED:
        exponent = (x.to(tl.int32, bitcast=True) >> 23) & 0xFF
        # three bits behind the leading one, and none below 2^-9
        step = (tl.maximum(exponent - 3, 127 - 9) << 23).to(tl.float32, bitcast=True)
        x = round_half_even(x / step).to(tl.float32) * step
    return x


@triton.jit
def packed_row(row, TYPE: tl.constexpr):
    """An fp32 row ``[1, lanes]`` as a cache of TYPE stores it, its scale, and what a reader will see.

    8-bit types: scale = amax / largest (127, or 448 of e4m3), elements x / scale rounded to nearest even; a
    NaN or an infinity makes the scale NaN. Others: x rounded, scale 1.
    """
    if TYPE.primitive_bitwidth == 8:
        LARGEST: tl.constexpr = 127.0 if tl.int8 == TYPE else 448.0
        # bit patterns of |x| order like the values, with NaN above infinity
        bits = tl.max(tl.abs(row).to(tl.int32, bitcast=True), 1)
        amax = bits.to(tl.float32, bitcast=True)
        largest = tl.full(amax.shape, LARGEST, tl.float32)
        scale = tl.where(amax < float("inf"), tl.div_rn(amax, largest), float("nan"))
        inverse = tl.where(scale > 0, tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale), 0.0)
        inverse = tl.where(inverse < float("inf"), inverse, 0.0)[:, None]
        scaled = tl.where(inverse > 0, row * inverse, 0.0)
        if tl.int8 == TYPE:
            stored = tl.minimum(tl.maximum(round_half_even(scaled), -127), 127).to(TYPE)
        else:
            stored = _on_e4m3_grid(scaled).to(TYPE)
        seen = stored.to(tl.float32) * scale[:, None]
    else:
        stored = cast(row, TYPE)
        scale = tl.full([1], 1.0, tl.float32)
        seen = stored.to(tl.float32)
    return stored, scale, seen


@triton.jit
def power_of_two(x):
    """The power of two 2^e of fp32 x ≥ 0 with 2^e ≤ x < 2^(e+1), and its inverse, both exact; 2^-126 for
    less, 2^126 for more."""
    bits = x.to(tl.int32, bitcast=True) & 0x7F800000
    bits = tl.minimum(tl.maximum(bits, 0x00800000), 253 << 23)
    return bits.to(tl.float32, bitcast=True), ((254 << 23) - bits).to(tl.float32, bitcast=True)


@triton.jit
def half_rows(x):
    """fp32 ``[rows, lanes]`` divided by a power of two of each row, below 2, as fp16, and those powers: fp16
    holds 8-bit elements exactly, and takes them from bytes in fewer instructions than bf16."""
    size, inverse = power_of_two(tl.max(tl.abs(x), 1))
    return (x * inverse[:, None]).to(tl.float16), size


@triton.jit
def _byte_to_half(byte, INT8: tl.constexpr):
    """The interpreter's twin of what follows: the low byte of an integer."""
    byte = byte.to(tl.int32)
    if INT8:
        value = (((byte & 0xFF) ^ 0x80) - 128).to(tl.float32)
    else:
        exponent, fraction = (byte >> 3) & 15, byte & 7
        # below 2^-6 there is no leading one
        power = ((tl.maximum(exponent, 1) - 10 + 127) << 23).to(tl.float32, bitcast=True)
        value = (fraction + tl.where(exponent > 0, 8, 0)).to(tl.float32) * power
        value = tl.where((byte & 0x80) != 0, -value, value)
    return value.to(tl.float16)


@triton.jit
def halves_of_pairs(pairs, INT8: tl.constexpr):
    """The first and the second byte of every int16, int8 or e4m3 elements, as exact fp16.

    Two pairs in a register give two registers. An int8 byte becomes the low mantissa bits of 1024, which
    takes no conversion per element.
    """
    if INTERPRETED:
        first, second = _byte_to_half(pairs, INT8), _byte_to_half(pairs >> 8, INT8)
    elif INT8:
        first, second = tl.inline_asm_elementwise(
            """{
            .reg .b32 x, first, second, bias;
            xor.b32 x, $2, 0x80808080;
            mov.b32 bias, 0x64806480;
            prmt.b32 first, x, 0x64646464, 0x4240;
            prmt.b32 second, x, 0x64646464, 0x4341;
            sub.rn.f16x2 $0, first, bias;
            sub.rn.f16x2 $1, second, bias;
            }""", "=r,=r,r", [pairs], (tl.float16, tl.float16), True, 2,
        )  # fmt: skip
    else:
        first, second = tl.inline_asm_elementwise(
            """{
            .reg .b32 x;
            .reg .b16 first, second;
            prmt.b32 x, $2, 0, 0x3120;
            mov.b32 {first, second}, x;
            cvt.rn.f16x2.e4m3x2 $0, first;
            cvt.rn.f16x2.e4m3x2 $1, second;
            }""", "=r,=r,r", [pairs], (tl.float16, tl.float16), True, 2,
        )  # fmt: skip
    return first, second


@triton.jit
def halves_of_bytes(elements, INT8: tl.constexpr):
    """Bytes, int8 or e4m3 elements, as exact fp16."""
    if INTERPRETED:
        halves = _byte_to_half(elements, INT8)
    elif INT8:
        halves = tl.inline_asm_elementwise(
            """{
            .reg .b32 x, first, second, bias;
            xor.b32 x, $2, 0x80808080;
            mov.b32 bias, 0x64806480;
            prmt.b32 first, x, 0x64646464, 0x4140;
            prmt.b32 second, x, 0x64646464, 0x4342;
            sub.rn.f16x2 $0, first, bias;
            sub.rn.f16x2 $1, second, bias;
            }""", "=r,=r,r", [elements], tl.float16, True, 4,
        )  # fmt: skip
    else:
        halves = tl.inline_asm_elementwise(
            """{
            .reg .b16 first, second;
            mov.b32 {first, second}, $2;
            cvt.rn.f16x2.e4m3x2 $0, first;
            cvt.rn.f16x2.e4m3x2 $1, second;
            }""", "=r,=r,r", [elements], tl.float16, True, 4,
        )  # fmt: skip
    return halves
