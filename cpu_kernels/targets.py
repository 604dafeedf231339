"""CPU targets of the int8 kernels and the byte dot product, the one operation that differs between them.

A kernel takes a target as its first argument; its type picks the instructions when the kernel is compiled.
``host_target()`` inside a kernel is the best target of the CPU that Numba compiles for.
"""

from dataclasses import dataclass

from llvmlite import ir
from numba import types
from numba.core.imputils import lower_constant
from numba.extending import intrinsic, models, register_model, typeof_impl
from realizar_torch.cpu_kernels.jit import target_features
from realizar_torch.cpu_kernels.simd import I32, I8x64, I32x16, U8x64, call, select_lanes

_I8, _I16 = ir.IntType(8), ir.IntType(16)


@dataclass(frozen=True)
class Target:
    """``dot`` names the instruction family; ``dot_bytes`` is the widest vector that it takes."""

    name: str
    dot: str
    dot_bytes: int
    features: frozenset[str]


VNNI = Target("vnni", "vpdpbusd", 64, frozenset({"avx512vnni", "avx512vl", "avx512bw"}))
VNNI_256 = Target("vnni-256", "vpdpbusd", 32, frozenset({"avxvnni", "avx2"}))
AVX2 = Target("avx2", "pmaddubsw", 32, frozenset({"avx2", "fma"}))
GENERIC = Target("generic", "multiply", 64, frozenset())
TARGETS = (VNNI, VNNI_256, AVX2, GENERIC)


def best_target() -> Target:
    """The first target whose CPU features are all there."""
    present = target_features()
    return next(target for target in TARGETS if target.features <= present)


class TargetType(types.Dummy):
    """The Numba type of one target: every kernel is compiled once per target it is called with."""

    def __init__(self, target: Target):
        self.target = target
        super().__init__(name=f"target({target.name})")


register_model(TargetType)(models.OpaqueModel)


@typeof_impl.register(Target)
def _typeof_target(target, context):
    return TargetType(target)


@lower_constant(TargetType)
def _target_constant(context, builder, target, value):
    return context.get_dummy_value()


@intrinsic
def host_target(typing_context):
    """The target of this CPU, known when the kernel is compiled."""

    def generate(context, builder, signature, arguments):
        return context.get_dummy_value()

    return TargetType(best_target())(), generate


def _vpdpbusd(builder, unsigned, signed):
    lanes = unsigned.type.count // 4
    words = ir.VectorType(I32, lanes)
    name = f"llvm.x86.avx512.vpdpbusd.{32 * lanes}"
    operands = (builder.bitcast(value, words) for value in (unsigned, signed))
    return call(builder, name, words, ir.Constant(words, None), *operands)


def _pmaddubsw(builder, unsigned, signed):
    pairs, words = ir.VectorType(_I16, 16), ir.VectorType(I32, 8)
    sums = call(builder, "llvm.x86.avx2.pmadd.ub.sw", pairs, unsigned, signed)
    return call(builder, "llvm.x86.avx2.pmadd.wd", words, sums, ir.Constant(pairs, [1] * 16))


def _multiply(builder, unsigned, signed):
    words = ir.VectorType(I32, unsigned.type.count // 4)
    total = ir.Constant(words, None)
    for first in range(4):
        lanes = range(first, unsigned.type.count, 4)
        left = builder.zext(select_lanes(builder, unsigned, unsigned, lanes), words)
        right = builder.sext(select_lanes(builder, signed, signed, lanes), words)
        total = builder.add(total, builder.mul(left, right))
    return total


_DOTS = {"vpdpbusd": _vpdpbusd, "pmaddubsw": _pmaddubsw, "multiply": _multiply}


def _dot(builder, target, unsigned, signed):
    """I32x16 of U8x64 · I8x64 in pieces of the target's width."""
    one = _DOTS[target.dot]
    if target.dot_bytes == 64:
        return one(builder, unsigned, signed)
    pieces = []
    for half in (range(32), range(32, 64)):
        pieces.append(one(builder, *(select_lanes(builder, v, v, half) for v in (unsigned, signed))))
    return select_lanes(builder, *pieces, range(16))


@intrinsic
def dot_u8(typing_context, target, unsigned, signed):
    """Lane i of the I32x16 result: ``sum_j unsigned[4i+j] * signed[4i+j]``; exact for unsigned ≤ 128."""
    if not isinstance(target, TargetType):
        return None

    def generate(context, builder, signature, arguments):
        return _dot(builder, target.target, *arguments[1:])

    return I32x16(target, U8x64, I8x64), generate


@intrinsic
def dot_i8(typing_context, target, left, right):
    """The same for two signed vectors, exact for ``right`` > -128: |left| times right with left's sign."""
    if not isinstance(target, TargetType):
        return None

    def generate(context, builder, signature, arguments):
        _, left, right = arguments
        zero = ir.Constant(left.type, None)
        magnitude = call(builder, "llvm.abs.v64i8", left.type, left, ir.IntType(1)(0))
        negative = builder.icmp_signed("<", left, zero)
        signed = builder.select(negative, builder.sub(zero, right), right)
        return _dot(builder, target.target, magnitude, signed)

    return I32x16(target, I8x64, I8x64), generate
