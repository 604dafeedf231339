"""CPU targets of the int8 kernels and the byte dot product, the one operation that differs between them.

A kernel takes a target as its first argument; its type picks the instructions when the kernel is compiled.
"""

from dataclasses import dataclass
from itertools import product

from llvmlite import ir
from numba import types
from numba.core.imputils import lower_constant
from numba.extending import intrinsic, models, register_model, typeof_impl

from realizar_torch.cpu_kernels.jit import target_features
from realizar_torch.cpu_kernels.simd import I8x64, I32x16, U8x64, call, select_lanes

_I8, _I16 = ir.IntType(8), ir.IntType(16)


@dataclass(frozen=True)
class Target:
    """One way to multiply bytes, and the register tile of the matmul that suits it.

    ``dot`` names the instruction family and ``dot_bytes`` the widest vector that it takes. A tile has
    ``tile_vectors`` × 16 rows, 1 or 2 of them, and ``tile_columns``, which divide activation_panel.COLUMNS.
    """

    name: str
    dot: str
    dot_bytes: int
    tile_vectors: int
    tile_columns: int
    features: frozenset[str]


VNNI = Target("vnni", "vpdpbusd", 64, 2, 8, frozenset({"avx512vnni", "avx512vl", "avx512bw"}))
VNNI_256 = Target("vnni-256", "vpdpbusd", 32, 1, 4, frozenset({"avxvnni", "avx2"}))
AVX2 = Target("avx2", "pmaddubsw", 32, 1, 4, frozenset({"avx2", "fma"}))
NEON = Target("neon", "sdot", 16, 1, 2, frozenset({"neon", "dotprod"}))
GENERIC = Target("generic", "multiply", 64, 1, 2, frozenset())
TARGETS = (VNNI, VNNI_256, AVX2, NEON, GENERIC)


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


def _pieces(builder, target, vector):
    """An LLVM vector of 64 bytes in pieces of the target's width."""
    count = vector.type.count * target.dot_bytes // 64
    starts = range(0, vector.type.count, count)
    return [select_lanes(builder, vector, vector, range(start, start + count)) for start in starts]


def _vpdpbusd(builder, total, unsigned, signed):
    words = total.type
    operands = (builder.bitcast(value, words) for value in (unsigned, signed))
    return call(builder, f"llvm.x86.avx512.vpdpbusd.{32 * words.count}", words, total, *operands)


def _sdot(builder, total, unsigned, signed, largest):
    """Both factors are signed: weights above 127 go in two digits."""
    for weight, digit in _digits(builder, unsigned, largest):
        start = total if weight == 1 else ir.Constant(total.type, None)
        products = call(builder, "llvm.aarch64.neon.sdot.v4i32.v16i8", total.type, start, digit, signed)
        factor = ir.Constant(total.type, [weight] * total.type.count)
        total = products if weight == 1 else builder.add(total, builder.mul(products, factor))
    return total


def _pmaddubsw(builder, total, unsigned, signed):
    """``total`` is sums of pairs in 16 bits; None starts them."""
    pairs = ir.VectorType(_I16, 16)
    products = call(builder, "llvm.x86.avx2.pmadd.ub.sw", pairs, unsigned, signed)
    return products if total is None else builder.add(total, products)


def _widen_pairs(builder, total, pairs, weight):
    weights = ir.Constant(pairs.type, [weight] * 16)
    return builder.add(total, call(builder, "llvm.x86.avx2.pmadd.wd", total.type, pairs, weights))


def _digits(builder, unsigned, largest):
    """(weight, bytes ≤ 128) whose sum is ``unsigned``: two products by larger bytes overflow 16 bits."""
    if largest <= 128:
        return [(1, unsigned)]
    four, fifteen = (ir.Constant(unsigned.type, [value] * unsigned.type.count) for value in (4, 15))
    return [(1, builder.and_(unsigned, fifteen)), (16, builder.lshr(unsigned, four))]


def _multiply(builder, total, unsigned, signed):
    for first in range(4):
        lanes = range(first, unsigned.type.count, 4)
        left = builder.zext(select_lanes(builder, unsigned, unsigned, lanes), total.type)
        right = builder.sext(select_lanes(builder, signed, signed, lanes), total.type)
        total = builder.add(total, builder.mul(left, right))
    return total


def add_products(builder, target, steps, operands, initial, largest):
    """Integer sums of an outer product: ``sums[v][c] = initial[c] + sum_s dot(left_s[v], right_s[c])``.

    ``operands(s)`` loads the unsigned 64-byte vectors and the signed ones of step ``s``; ``largest`` bounds
    the unsigned bytes: it tells over how many steps pair sums fit 16 bits. Signed bytes are above -128.
    """
    pieces = 64 // target.dot_bytes
    sums = None
    # at most 127 * digit twice in every step
    pairs_held, capacity = 0, 32767 // (2 * 127 * (largest if largest <= 128 else 15))
    held = {}
    for step in range(steps):
        left, right = operands(step)
        if sums is None:
            sums = [[_pieces(builder, target, start) for start in initial] for _ in left]
        left, right = ([_pieces(builder, target, v) for v in side] for side in (left, right))
        flush = pairs_held + 1 == capacity or step == steps - 1
        for v, c, piece in product(range(len(left)), range(len(right)), range(pieces)):
            unsigned, signed, total = left[v][piece], right[c][piece], sums[v][c][piece]
            if target.dot == "vpdpbusd":
                total = _vpdpbusd(builder, total, unsigned, signed)
            elif target.dot == "sdot":
                total = _sdot(builder, total, unsigned, signed, largest)
            elif target.dot == "multiply":
                total = _multiply(builder, total, unsigned, signed)
            else:
                for weight, digit in _digits(builder, unsigned, largest):
                    key = v, c, piece, weight
                    held[key] = _pmaddubsw(builder, held.get(key), digit, signed)
                    if flush:
                        total = _widen_pairs(builder, total, held.pop(key), weight)
            sums[v][c][piece] = total
        pairs_held = 0 if flush else pairs_held + 1
    return [[_joined(builder, pieces) for pieces in row] for row in sums]


def _joined(builder, pieces):
    """The pieces of an LLVM vector, whose number is a power of two, as one."""
    while len(pieces) > 1:
        lanes = range(2 * pieces[0].type.count)
        pairs = zip(pieces[::2], pieces[1::2], strict=True)
        pieces = [select_lanes(builder, first, second, lanes) for first, second in pairs]
    return pieces[0]


def _dot(builder, target, unsigned, signed):
    """I32x16 of U8x64 · I8x64."""
    zero = ir.Constant(I32x16.llvm, None)
    return add_products(builder, target, 1, lambda _: ([unsigned], [signed]), [zero], 128)[0][0]


@intrinsic
def dot_u8(typing_context, target, unsigned, signed):
    """Lane i of the I32x16 result: ``sum_j unsigned[4i+j] * signed[4i+j]``; exact for unsigned < 128."""
    if not isinstance(target, TargetType):
        return None

    def generate(context, builder, signature, arguments):
        return _dot(builder, target.target, *arguments[1:])

    return I32x16(target, U8x64, I8x64), generate


@intrinsic
def dot_two(typing_context, target, first, x, second, other_x, initial):
    """``initial + dot_u8(first, x) + dot_u8(second, other_x)``; exact for unsigned < 64."""
    if not isinstance(target, TargetType):
        return None

    def generate(context, builder, signature, arguments):
        _, first, x, second, other_x, initial = arguments
        operands = (([first], [x]), ([second], [other_x]))
        return add_products(builder, target.target, 2, operands.__getitem__, [initial], 63)[0][0]

    return I32x16(target, U8x64, I8x64, U8x64, I8x64, I32x16), generate


@intrinsic
def dot_i8(typing_context, target, left, right):
    """The same for two signed vectors, exact for ``right`` > -128: |left| times right with left's sign."""
    if not isinstance(target, TargetType):
        return None

    def generate(context, builder, signature, arguments):
        _, left, right = arguments
        if target.target.dot == "sdot":
            return _dot(builder, target.target, left, right)
        zero = ir.Constant(left.type, None)
        magnitude = call(builder, "llvm.abs.v64i8", left.type, left, ir.IntType(1)(0))
        negative = builder.icmp_signed("<", left, zero)
        signed = builder.select(negative, builder.sub(zero, right), right)
        return _dot(builder, target.target, magnitude, signed)

    return I32x16(target, I8x64, I8x64), generate
