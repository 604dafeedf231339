"""fp32 in 16 lanes, one row each, rounded as ggml's C code does on x86-64: the arithmetic of the encoders.

A mask is an I32x16 of zeros and minus ones. A column is one value of each lane; columns of fp32 are 64 bytes
apart, columns of bytes 16. Comparisons with NaN are false, as in C.
"""

from llvmlite import ir
from numba.extending import intrinsic

from realizar_torch.cpu_kernels.jit import jit
from realizar_torch.cpu_kernels.memory import (
    load_f16,
    load_f32,
    load_u8,
    stack_alloc,
    store_f16,
    store_f32,
    store_u8,
)
from realizar_torch.cpu_kernels.simd import (
    F32x16,
    I32x16,
    Vector,
    bits_of_f32x16,
    call,
    converter,
    f32x16_of_bits,
    load_f32x16,
    load_u8x16,
    low_bytes,
    maximum,
    minimum,
    splat_f32x16,
    splat_i32x16,
    store,
    to_f32x16,
    u8x16_to_f32x16,
)

LANES = 16
COLUMN, BYTE_COLUMN = 4 * LANES, LANES
_ROUNDER = 12582912.0
_NAN = 0xFFC00000


def _comparison(name, sign):
    """The intrinsic ``name(a, b)``: the mask of the lanes where ``a <sign> b``."""

    def compare(typing_context, a, b):
        if a != F32x16 or b != F32x16:
            return None

        def generate(context, builder, signature, arguments):
            compared = builder.fcmp_ordered if sign != "!=" else builder.fcmp_unordered
            return builder.sext(compared(sign, *arguments), I32x16.llvm)

        return I32x16(a, b), generate

    compare.__name__ = compare.__qualname__ = name
    return intrinsic(compare)


less, equal, differs = _comparison("less", "<"), _comparison("equal", "=="), _comparison("differs", "!=")


@intrinsic
def choose(typing_context, mask, a, b):
    """``a`` where the mask is set, ``b`` elsewhere."""
    if mask != I32x16 or not isinstance(a, Vector) or a != b:
        return None

    def generate(context, builder, signature, arguments):
        condition = builder.icmp_signed("!=", arguments[0], ir.Constant(I32x16.llvm, [0] * LANES))
        return builder.select(condition, arguments[1], arguments[2])

    return a(mask, a, b), generate


absolute = converter("absolute", F32x16, F32x16, lambda b, v, t: call(b, "llvm.fabs.v16f32", t, v))
square_root = converter("square_root", F32x16, F32x16, lambda b, v, t: call(b, "llvm.sqrt.v16f32", t, v))
_to_int = converter("_to_int", F32x16, I32x16, lambda b, v, t: b.fptosi(v, t))


@jit(device=True)
def negative(value):
    return f32x16_of_bits(bits_of_f32x16(value) ^ -0x80000000)


@jit(device=True)
def nearest_int(value):
    """Round half to even; low bits of what exceeds 2^22, and 0 for the NaN that arithmetic makes."""
    return (bits_of_f32x16(value + _ROUNDER) & 0x7FFFFF) - 0x400000


@jit(device=True)
def nearest_level(value, low, high):
    """The nearest integer in low … high."""
    return maximum(minimum(nearest_int(value), splat_i32x16(high)), splat_i32x16(low))


@jit(device=True)
def truncate(value):
    """Round towards zero; what no int32 holds becomes 0."""
    return _to_int(_int32_or_zero(value))


@jit(device=True)
def round_away(value):
    """Round half away from zero; what no int32 holds becomes 0."""
    value = _int32_or_zero(value)
    whole = _to_int(value)
    fraction = value - to_f32x16(whole)
    up, down = less(fraction, splat_f32x16(0.5)) ^ -1, less(splat_f32x16(-0.5), fraction) ^ -1
    return whole - up + down


@jit(device=True)
def _int32_or_zero(value):
    return choose(less(absolute(value), splat_f32x16(2147483648.0)), value, splat_f32x16(0))


@jit(device=True)
def load_levels(levels, column):
    """A column of bytes as fp32."""
    return u8x16_to_f32x16(load_u8x16(levels, BYTE_COLUMN * column))


@jit(device=True)
def store_levels(levels, column, value):
    """The low bytes of I32x16 as a column."""
    store(levels, low_bytes(value), BYTE_COLUMN * column)


@jit(device=True)
def store_half(out, offset, value):
    """fp16 of every lane into two byte columns from ``offset``, NaN as on x86-64; returns what was stored."""
    lanes, half = stack_alloc(64, 64), stack_alloc(64, 64)
    store(lanes, choose(differs(value, value), f32x16_of_bits(splat_i32x16(_NAN)), value))
    for lane in range(LANES):
        store_f16(half, load_f32(lanes, 4 * lane))
        store_u8(out, load_u8(half), BYTE_COLUMN * offset + lane)
        store_u8(out, load_u8(half, 1), BYTE_COLUMN * (offset + 1) + lane)
        store_f32(lanes, load_f16(half), 4 * lane)
    return load_f32x16(lanes)


@jit(device=True)
def furthest_from_zero(x, count):
    """The value with the largest magnitude of ``count`` columns, the first of equals; 0.0 if all are NaN."""
    furthest = largest = splat_f32x16(0)
    for i in range(count):
        value = load_f32x16(x, COLUMN * i)
        magnitude = absolute(value)
        larger = less(largest, magnitude)
        largest = choose(larger, magnitude, largest)
        furthest = choose(larger, value, furthest)
    return furthest


@jit(device=True)
def sum_of_columns(x, count):
    """Sum over ``count`` columns, in order."""
    total = splat_f32x16(0)
    for i in range(count):
        total = total + load_f32x16(x, COLUMN * i)
    return total


@jit(device=True)
def sum_of_squares(x, count):
    """Sum of squares over ``count`` columns, in order."""
    total = splat_f32x16(0)
    for i in range(count):
        value = load_f32x16(x, COLUMN * i)
        total = total + value * value
    return total
