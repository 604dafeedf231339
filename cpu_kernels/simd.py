"""SIMD vectors as Numba types: loads, arithmetic, shuffles, conversions; all become LLVM vector code.

A vector of 64 bytes is one AVX-512 register, two AVX registers or four NEON registers; LLVM splits it as the
CPU needs, so kernels are written once. Only the byte dot product differs by CPU (``targets.py``).
``a & b``, ``| ^ + - * >> <<`` work lane by lane; a scalar operand is repeated in every lane.
"""

import operator

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model
from realizar_torch.cpu_kernels.memory import HARDWARE_HALF, pointer_at

I32 = ir.IntType(32)
_LLVM = {"u8": ir.IntType(8), "i8": ir.IntType(8), "i32": I32, "f32": ir.FloatType()}


class Vector(types.Type):
    """``lanes`` values of ``element`` (u8, i8, i32 or f32) in vector registers."""

    def __init__(self, element: str, lanes: int):
        self.element = element
        self.lanes = lanes
        super().__init__(name=f"{element}x{lanes}")

    @property
    def llvm(self) -> ir.VectorType:
        return ir.VectorType(_LLVM[self.element], self.lanes)


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager, vector):
        super().__init__(manager, vector, vector.llvm)


U8x16, U8x32, U8x64, I8x64 = Vector("u8", 16), Vector("u8", 32), Vector("u8", 64), Vector("i8", 64)
I32x16, F32x4, F32x8, F32x16 = Vector("i32", 16), Vector("f32", 4), Vector("f32", 8), Vector("f32", 16)


def call(builder, name, result, *arguments):
    """Call the LLVM intrinsic ``name``."""
    function = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, function, name), arguments)


def select_lanes(builder, first, second, indices):
    """Lanes of two LLVM vectors by constant index; the second one's lanes follow the first one's."""
    order = ir.Constant(ir.VectorType(I32, len(indices)), list(indices))
    return builder.shuffle_vector(first, second, order)


def splat(builder, value, vector):
    """The LLVM scalar ``value`` in every lane of the LLVM type ``vector``."""
    undefined = ir.Constant(vector, ir.Undefined)
    return select_lanes(
        builder, builder.insert_element(undefined, value, I32(0)), undefined, [0] * vector.count
    )


def _scalar_lanes(context, builder, value, scalar, vector):
    """A Numba scalar converted to the element type of ``vector`` and repeated."""
    if vector.element == "f32":
        value = context.cast(builder, value, scalar, types.float32)
    else:
        value = context.cast(builder, value, scalar, types.int64)
        value = builder.trunc(value, vector.llvm.element)
    return splat(builder, value, vector.llvm)


def _define_operator(function, integer_op, float_op=None):
    """Type and lower ``function`` for vector with vector of the same type and for vector with scalar."""

    class Template(AbstractTemplate):
        key = function

        def generic(self, args, kws):
            if len(args) != 2 or not isinstance(args[0], Vector):
                return None
            left, right = args
            if right == left or isinstance(right, types.Number):
                return signature(left, left, right)
            return None

    def lower(context, builder, sig, args):
        left, right = args
        vector, other = sig.args
        if other != vector:
            right = _scalar_lanes(context, builder, right, other, vector)
        if vector.element == "f32":
            return getattr(builder, float_op)(left, right)
        # signed lanes shift arithmetically
        name = "ashr" if integer_op == "lshr" and vector.element.startswith("i") else integer_op
        return getattr(builder, name)(left, right)

    infer_global(function)(Template)
    lower_builtin(function, Vector, Vector)(lower)
    lower_builtin(function, Vector, types.Number)(lower)


for _function, _integer_op, _float_op in (
    (operator.add, "add", "fadd"),
    (operator.sub, "sub", "fsub"),
    (operator.mul, "mul", "fmul"),
    (operator.truediv, "sdiv", "fdiv"),
    (operator.and_, "and_", None),
    (operator.or_, "or_", None),
    (operator.xor, "xor", None),
    (operator.rshift, "lshr", None),
    (operator.lshift, "shl", None),
):
    _define_operator(_function, _integer_op, _float_op)


def _loader(vector):
    """The intrinsic ``load_<type>(address, offset=0)``: any alignment."""

    def load(typing_context, address, offset=0):
        def generate(context, builder, signature, arguments):
            return builder.load(pointer_at(builder, vector.llvm, *arguments), align=1)

        return vector(types.int64, types.int64), generate

    load.__name__ = load.__qualname__ = f"load_{vector.name}"
    return intrinsic(load)


load_u8x16, load_u8x32, load_u8x64, load_i8x64 = (_loader(v) for v in (U8x16, U8x32, U8x64, I8x64))
load_f32x4, load_f32x8, load_f32x16, load_i32x16 = (_loader(v) for v in (F32x4, F32x8, F32x16, I32x16))


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


@intrinsic
def store(typing_context, address, value, offset=0):
    """Store a vector at ``address + offset``, any alignment."""
    if not isinstance(value, Vector):
        return None

    def generate(context, builder, signature, arguments):
        address, value, offset = arguments
        builder.store(value, pointer_at(builder, value.type, address, offset), align=1)

    return types.void(types.int64, value, types.int64), generate


@intrinsic
def prefetch(typing_context, address):
    """Ask for the cache line at ``address`` in the second-level cache; any address is harmless."""

    def generate(context, builder, signature, arguments):
        pointer = pointer_at(builder, ir.IntType(8), arguments[0])
        signature = ir.FunctionType(ir.VoidType(), [pointer.type, I32, I32, I32])
        function = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], signature)
        read, second_level, data = I32(0), I32(2), I32(1)
        builder.call(function, [pointer, read, second_level, data])

    return types.void(types.int64), generate


def _splatter(vector):
    """The intrinsic ``splat_<type>(scalar)``."""

    def repeat(typing_context, value):
        def generate(context, builder, signature, arguments):
            return _scalar_lanes(context, builder, arguments[0], signature.args[0], vector)

        return vector(value), generate

    repeat.__name__ = repeat.__qualname__ = f"splat_{vector.name}"
    return intrinsic(repeat)


splat_u8x64, splat_i32x16, splat_f32x8, splat_f32x16 = (_splatter(v) for v in (U8x64, I32x16, F32x8, F32x16))


def shuffle(*indices):
    """An intrinsic that gathers lanes by these constant indices from one vector, or from two of one type."""

    def pick(typing_context, first, second=None):
        if not isinstance(first, Vector):
            return None
        result = Vector(first.element, len(indices))

        def generate(context, builder, signature, arguments):
            left = arguments[0]
            right = arguments[1] if isinstance(signature.args[1], Vector) else left
            return select_lanes(builder, left, right, indices)

        return result(first, types.none if second is None else second), generate

    return intrinsic(pick)


join_u8x16 = shuffle(*range(32))
join_u8x32 = shuffle(*range(64))
join_f32x8 = shuffle(*range(16))


def _converter(name, source, result, convert):
    """An intrinsic of one argument: ``convert(builder, value, result's LLVM type)``."""

    def conversion(typing_context, value):
        if source is not None and value != source:
            return None

        def generate(context, builder, signature, arguments):
            return convert(builder, arguments[0], getattr(result, "llvm", None))

        return result(value), generate

    conversion.__name__ = conversion.__qualname__ = name
    return intrinsic(conversion)


def _halving_sum(builder, value, _):
    """Sum of all lanes in a fixed order: upper half onto lower half until one lane is left."""
    lanes = value.type.count
    while lanes > 1:
        lanes //= 2
        upper = select_lanes(builder, value, value, range(lanes, 2 * lanes))
        lower = select_lanes(builder, value, value, range(lanes))
        value = builder.fadd(lower, upper)
    return builder.extract_element(value, I32(0))


def _bit_lanes(builder, bits, result):
    """Bit i of an int64 as 0 or 255 in byte i."""
    mask = builder.bitcast(bits, ir.VectorType(ir.IntType(1), 64))
    return builder.sext(mask, result)


def _halving(name, operation):
    """Reduce all lanes by an LLVM vector reduction of integers."""

    def reduce(builder, value, _):
        word = call(builder, f"llvm.vector.reduce.{operation}.v16i32", I32, value)
        return builder.sext(word, ir.IntType(64))

    return _converter(name, I32x16, types.int64, reduce)


sum_i32x16, max_i32x16 = _halving("sum_i32x16", "add"), _halving("max_i32x16", "smax")
bits_of_f32x16 = _converter("bits_of_f32x16", F32x16, I32x16, lambda b, v, t: b.bitcast(v, t))
f32x16_of_bits = _converter("f32x16_of_bits", I32x16, F32x16, lambda b, v, t: b.bitcast(v, t))
low_bytes = _converter("low_bytes", I32x16, U8x16, lambda b, v, t: b.trunc(v, t))
to_f32x16 = _converter("to_f32x16", I32x16, F32x16, lambda b, v, t: b.sitofp(v, t))
as_i8x64 = _converter("as_i8x64", U8x64, I8x64, lambda b, v, t: v)
sum_f32x8 = _converter("sum_f32x8", F32x8, types.float32, _halving_sum)
sum_f32x16 = _converter("sum_f32x16", F32x16, types.float32, _halving_sum)
bytes_of_bits = _converter("bytes_of_bits", types.int64, U8x64, _bit_lanes)
u8x16_to_f32x16 = _converter("u8x16_to_f32x16", U8x16, F32x16, lambda b, v, t: b.uitofp(v, t))
i8x16_to_f32x16 = _converter("i8x16_to_f32x16", U8x16, F32x16, lambda b, v, t: b.sitofp(v, t))


def _picker(name, comparison):
    """The intrinsic ``name(a, b)``: in each lane ``a if a <comparison> b else b``; NaN in b stays."""

    def pick(typing_context, a, b):
        if not (isinstance(a, Vector) and a == b):
            return None

        def generate(context, builder, signature, arguments):
            first, second = arguments
            compare = builder.fcmp_ordered if a.element == "f32" else builder.icmp_signed
            return builder.select(compare(comparison, first, second), first, second)

        return a(a, b), generate

    pick.__name__ = pick.__qualname__ = name
    return intrinsic(pick)


minimum, maximum = _picker("minimum", "<"), _picker("maximum", ">")


@intrinsic
def fma(typing_context, a, b, c):
    """``a * b + c``, one rounding where the CPU has it, two elsewhere."""
    if not (isinstance(a, Vector) and a == b == c):
        return None

    def generate(context, builder, signature, arguments):
        element, lanes = signature.return_type.element, signature.return_type.lanes
        return call(builder, f"llvm.fmuladd.v{lanes}{element}", a.llvm, *arguments)

    return a(a, b, c), generate


def _pair(vector):
    """The intrinsic ``pair_<type>(a, b)``: ``a`` in the lower half of the lanes, ``b`` in the upper half."""

    def fill(typing_context, first, second):
        def generate(context, builder, signature, arguments):
            two = ir.Constant(ir.VectorType(vector.llvm.element, 2), ir.Undefined)
            for lane, value in enumerate(arguments):
                two = builder.insert_element(two, value, I32(lane))
            half = vector.lanes // 2
            return select_lanes(builder, two, two, [0] * half + [1] * half)

        return vector(types.float32, types.float32), generate

    fill.__name__ = fill.__qualname__ = f"pair_{vector.name}"
    return intrinsic(fill)


pair_f32x16 = _pair(F32x16)


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
