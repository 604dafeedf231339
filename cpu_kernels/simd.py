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

from realizar_torch.cpu_kernels.memory import pointer_at

I32 = ir.IntType(32)
_LLVM = {"u8": ir.IntType(8), "i8": ir.IntType(8), "u16": ir.IntType(16), "i32": I32, "f32": ir.FloatType()}


class Vector(types.Type):
    """``lanes`` values of ``element`` (u8, i8, u16, i32 or f32) in vector registers."""

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
U16x16 = Vector("u16", 16)
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


load_u8x16, load_u8x32, load_u8x64 = (_loader(vector) for vector in (U8x16, U8x32, U8x64))
load_f32x4, load_f32x8, load_f32x16 = (_loader(vector) for vector in (F32x4, F32x8, F32x16))


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


def converter(name, source, result, convert):
    """An intrinsic of one argument: ``convert(builder, value, result's LLVM type)``."""

    def conversion(typing_context, value):
        if source is not None and value != source:
            return None

        def generate(context, builder, signature, arguments):
            return convert(builder, arguments[0], getattr(result, "llvm", None))

        return result(value), generate

    conversion.__name__ = conversion.__qualname__ = name
    return intrinsic(conversion)


def _folding(combine):
    """All lanes in a fixed order: upper half onto lower half until one lane is left."""

    def fold(builder, value, _):
        lanes = value.type.count
        while lanes > 1:
            lanes //= 2
            upper = select_lanes(builder, value, value, range(lanes, 2 * lanes))
            lower = select_lanes(builder, value, value, range(lanes))
            value = combine(builder, lower, upper)
        return builder.extract_element(value, I32(0))

    return fold


def _larger(builder, a, b):
    """In each lane ``a if a > b else b``."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


_sum = _folding(lambda builder, a, b: builder.fadd(a, b))


def _halving(name, operation):
    """Reduce all lanes by an LLVM vector reduction of integers."""

    def reduce(builder, value, _):
        word = call(builder, f"llvm.vector.reduce.{operation}.v16i32", I32, value)
        return builder.sext(word, ir.IntType(64))

    return converter(name, I32x16, types.int64, reduce)


sum_i32x16, max_i32x16 = _halving("sum_i32x16", "add"), _halving("max_i32x16", "smax")
bits_of_f32x16 = converter("bits_of_f32x16", F32x16, I32x16, lambda b, v, t: b.bitcast(v, t))
f32x16_of_bits = converter("f32x16_of_bits", I32x16, F32x16, lambda b, v, t: b.bitcast(v, t))
low_bytes = converter("low_bytes", I32x16, U8x16, lambda b, v, t: b.trunc(v, t))
low_halves = converter("low_halves", I32x16, U16x16, lambda b, v, t: b.trunc(v, t))
to_f32x16 = converter("to_f32x16", I32x16, F32x16, lambda b, v, t: b.sitofp(v, t))
as_i8x64 = converter("as_i8x64", U8x64, I8x64, lambda b, v, t: v)
sum_f32x8 = converter("sum_f32x8", F32x8, types.float32, _sum)
sum_f32x16 = converter("sum_f32x16", F32x16, types.float32, _sum)
max_f32x16 = converter("max_f32x16", F32x16, types.float32, _folding(_larger))
u8x16_to_f32x16 = converter("u8x16_to_f32x16", U8x16, F32x16, lambda b, v, t: b.uitofp(v, t))
i8x16_to_i32x16 = converter("i8x16_to_i32x16", U8x16, I32x16, lambda b, v, t: b.sext(v, t))
i8x16_to_f32x16 = converter("i8x16_to_f32x16", U8x16, F32x16, lambda b, v, t: b.sitofp(v, t))


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
