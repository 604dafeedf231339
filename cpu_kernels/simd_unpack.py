"""Vector operations that take blocks apart: bit planes, nibbles and scattered half-precision numbers."""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from realizar_torch.cpu_kernels.memory import HARDWARE_HALF, pointer_at
from realizar_torch.cpu_kernels.simd import (
    I32,
    F32x16,
    U8x16,
    U8x32,
    U8x64,
    Vector,
    converter,
    select_lanes,
    shuffle,
)


def half_bits_to_float(builder, half):
    """fp16 bits → fp32 in LLVM lanes by integer steps, as ``memory.half_bits_to_f32``."""
    words, floats = (ir.VectorType(element, half.type.count) for element in (I32, ir.FloatType()))

    def lanes(bits):
        return ir.Constant(words, [bits] * half.type.count)

    bits = builder.zext(half, words)
    magnitude = builder.shl(builder.and_(bits, lanes(0x7FFF)), lanes(13))
    scale = builder.bitcast(lanes((127 + 112) << 23), floats)
    finite = builder.bitcast(builder.fmul(builder.bitcast(magnitude, floats), scale), words)
    special = builder.icmp_unsigned(">=", magnitude, lanes(0x7C00 << 13))
    magnitude = builder.select(special, builder.or_(magnitude, lanes(0x7F800000)), finite)
    sign = builder.shl(builder.and_(bits, lanes(0x8000)), lanes(16))
    return builder.bitcast(builder.or_(magnitude, sign), floats)


def _strided_halves(name, together):
    """The intrinsic ``name(address, stride)``: ``together`` fp16 at each of four places, as fp32."""
    result = Vector("f32", 4 * together)
    item = ir.IntType(16 * together)

    def load(typing_context, address, stride):
        def generate(context, builder, signature, arguments):
            address, stride = arguments
            items = ir.Constant(ir.VectorType(item, 4), ir.Undefined)
            for place in range(4):
                value = builder.load(pointer_at(builder, item, address), align=1)
                items = builder.insert_element(items, value, I32(place))
                address = builder.add(address, stride)
            half = builder.bitcast(items, ir.VectorType(ir.IntType(16), result.lanes))
            if HARDWARE_HALF:
                return builder.fpext(
                    builder.bitcast(half, ir.VectorType(ir.HalfType(), result.lanes)), result.llvm
                )
            return half_bits_to_float(builder, half)

        return result(types.int64, types.int64), generate

    load.__name__ = load.__qualname__ = name
    return intrinsic(load)


load_halves, load_half_pairs = _strided_halves("load_halves", 1), _strided_halves("load_half_pairs", 2)


def _bit_lanes(builder, bits, result):
    """Bit i of an int64 as 0 or 255 in byte i."""
    mask = builder.bitcast(bits, ir.VectorType(ir.IntType(1), 64))
    return builder.sext(mask, result)


bytes_of_bits = converter("bytes_of_bits", types.int64, U8x64, _bit_lanes)


@intrinsic
def pair_f32x16(typing_context, first, second):
    """``first`` in the lower eight lanes, ``second`` in the upper eight."""

    def generate(context, builder, signature, arguments):
        two = ir.Constant(ir.VectorType(F32x16.llvm.element, 2), ir.Undefined)
        for lane, value in enumerate(arguments):
            two = builder.insert_element(two, value, I32(lane))
        return select_lanes(builder, two, two, [0] * 8 + [1] * 8)

    return F32x16(types.float32, types.float32), generate


@intrinsic
def u8x16_of(typing_context, low, high):
    """Sixteen bytes from two int64, low bytes first."""

    def generate(context, builder, signature, arguments):
        pair = ir.Constant(ir.VectorType(ir.IntType(64), 2), ir.Undefined)
        for lane, value in enumerate(arguments):
            pair = builder.insert_element(pair, value, I32(lane))
        return builder.bitcast(pair, U8x16.llvm)

    return U8x16(types.int64, types.int64), generate


def _shifted(builder, value, shifts):
    """Each 32-bit lane of a byte vector shifted right by its own constant; bits cross bytes inside a lane."""
    words = ir.VectorType(I32, len(shifts))
    shifted = builder.lshr(builder.bitcast(value, words), ir.Constant(words, list(shifts)))
    return builder.bitcast(shifted, value.type)


def twice(shift, run):
    """An intrinsic U8x32 → U8x64: every run of ``run`` bytes, then the same shifted right by ``shift`` bits.

    Bits cross byte borders: mask what you use.
    """
    indices = [i for start in range(0, 32, run) for _ in range(2) for i in range(start, start + run)]
    shifts = [shift * (byte // run % 2) for byte in range(0, 64, 4)]

    def repeat(typing_context, value):
        if value != U8x32:
            return None

        def generate(context, builder, signature, arguments):
            return _shifted(builder, select_lanes(builder, arguments[0], arguments[0], indices), shifts)

        return U8x64(U8x32), generate

    return intrinsic(repeat)


def _groups(size, indices):
    """An intrinsic that gathers groups of ``size`` lanes by their numbers."""
    return shuffle(*[size * index + lane for index in indices for lane in range(size)])


def runs(*indices):
    """Gather runs of 16 bytes by these numbers from one vector, or from two."""
    return _groups(16, indices)


def eights(*indices):
    """Gather runs of 8 bytes by these numbers from one vector, or from two."""
    return _groups(8, indices)


def words(*indices):
    """In every run of 16 bytes, gather its four words by these numbers."""
    return _groups(4, [4 * run + index for run in range(4) for index in indices])


def shifted(*shifts):
    """An intrinsic U8x64 → U8x64: its 32-bit words shifted right, in turn; bits cross bytes inside a word."""
    repeated = [*shifts] * (16 // len(shifts))
    return converter("shifted", U8x64, U8x64, lambda b, v, t: _shifted(b, v, repeated))


def pattern(*values):
    """An intrinsic without arguments: these bytes, repeated, as a U8x64."""
    repeated = [*values] * (64 // len(values))

    def constant(typing_context):
        def generate(context, builder, signature, arguments):
            return ir.Constant(U8x64.llvm, repeated)

        return U8x64(), generate

    return intrinsic(constant)
