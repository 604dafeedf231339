"""Raw memory for kernels: typed loads and stores at an int64 address, atomics, pauses, scratch.

``load_x(address, offset=0)`` and ``store_x(address, value, offset=0)`` work at ``address + offset`` bytes,
aligned or not. Give a loop's base and its moving offset apart: LLVM then sees one pointer and can vectorise.
Integers are int64 in kernels whatever their width in memory; half precision is fp32 in kernels.
"""

import platform

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from realizar_torch.cpu_kernels.jit import jit, target_features

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_F16, _F32, _F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()

_MACHINE = platform.machine().lower()

# x86 converts half precision in hardware only with F16C; LLVM would otherwise call a library function
HARDWARE_HALF = "f16c" in target_features() or _MACHINE in ("aarch64", "arm64")


def pointer_at(builder, element, base, offset=None):
    """An ``element*`` at the i64 ``base`` (+ ``offset`` bytes): for code generators of intrinsics."""
    pointer = builder.inttoptr(base, _I8.as_pointer())
    if offset is not None:
        pointer = builder.gep(pointer, [offset])
    return builder.bitcast(pointer, element.as_pointer())


def _loader(name, element, result, widen=None):
    """The intrinsic ``name(address, offset=0)`` that loads ``element`` as the Numba type ``result``."""

    def load(typing_context, address, offset=0):
        def generate(context, builder, signature, arguments):
            value = builder.load(pointer_at(builder, element, *arguments), align=1)
            return value if widen is None else widen(builder, value)

        return result(types.int64, types.int64), generate

    load.__name__ = load.__qualname__ = name
    return intrinsic(load)


def _storer(name, element, value_type, narrow=None):
    """The intrinsic ``name(address, value, offset=0)`` that stores a ``value_type`` as ``element``."""

    def store(typing_context, address, value, offset=0):
        def generate(context, builder, signature, arguments):
            base, value, offset = arguments
            stored = value if narrow is None else narrow(builder, value)
            builder.store(stored, pointer_at(builder, element, base, offset), align=1)

        return types.void(types.int64, value_type, types.int64), generate

    store.__name__ = store.__qualname__ = name
    return intrinsic(store)


def _bf16_bits(builder, value):
    """fp32 → bf16 bits, round to nearest even; NaN keeps its top bits and is made quiet."""
    bits = builder.bitcast(value, _I32)
    odd = builder.and_(builder.lshr(bits, _I32(16)), _I32(1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, _I32(0x7FFF))), _I32(16))
    quiet = builder.or_(builder.lshr(bits, _I32(16)), _I32(0x40))
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.trunc(builder.select(is_nan, quiet, rounded), _I16)


load_u8 = _loader("load_u8", _I8, types.int64, lambda b, v: b.zext(v, _I64))
load_i8 = _loader("load_i8", _I8, types.int64, lambda b, v: b.sext(v, _I64))
load_u16 = _loader("load_u16", _I16, types.int64, lambda b, v: b.zext(v, _I64))
load_u32 = _loader("load_u32", _I32, types.int64, lambda b, v: b.zext(v, _I64))
load_i32 = _loader("load_i32", _I32, types.int64, lambda b, v: b.sext(v, _I64))
load_i64 = _loader("load_i64", _I64, types.int64)
load_f32 = _loader("load_f32", _F32, types.float32)
load_f64 = _loader("load_f64", _F64, types.float64)
load_bf16 = _loader(
    "load_bf16", _I16, types.float32, lambda b, v: b.bitcast(b.shl(b.zext(v, _I32), _I32(16)), _F32)
)

store_u8 = _storer("store_u8", _I8, types.int64, lambda b, v: b.trunc(v, _I8))
store_i8 = _storer("store_i8", _I8, types.int64, lambda b, v: b.trunc(v, _I8))
store_u16 = _storer("store_u16", _I16, types.int64, lambda b, v: b.trunc(v, _I16))
store_i32 = _storer("store_i32", _I32, types.int64, lambda b, v: b.trunc(v, _I32))
store_i64 = _storer("store_i64", _I64, types.int64)
store_f32 = _storer("store_f32", _F32, types.float32)
store_f64 = _storer("store_f64", _F64, types.float64)
store_bf16 = _storer("store_bf16", _I16, types.float32, _bf16_bits)


@intrinsic
def f32_bits(typing_context, value):
    """The bits of an fp32 value as a non-negative int64."""

    def generate(context, builder, signature, arguments):
        return builder.zext(builder.bitcast(arguments[0], _I32), _I64)

    return types.int64(types.float32), generate


@intrinsic
def f32_from_bits(typing_context, bits):
    """The fp32 value whose bits are the low 32 bits of an int64."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(builder.trunc(arguments[0], _I32), _F32)

    return types.float32(types.int64), generate


@jit(device=True)
def half_bits_to_f32(half):
    """fp16 bits → fp32 by integer steps, exact for every value (for CPUs without F16C)."""
    magnitude = half & 0x7FFF
    sign = (half & 0x8000) << 16
    if magnitude >= 0x7C00:
        return f32_from_bits(sign | 0x7F800000 | (magnitude & 0x3FF) << 13)
    # exponent and fraction in fp32 position are 2^-112 times too small; the product is exact
    scaled = f32_from_bits(magnitude << 13) * f32_from_bits((127 + 112) << 23)
    return f32_from_bits(f32_bits(scaled) | sign)


@jit(device=True)
def f32_to_half_bits(value):
    """fp32 → fp16 bits by integer steps, round to nearest even (for CPUs without F16C)."""
    bits = f32_bits(value)
    sign = (bits >> 16) & 0x8000
    magnitude = bits & 0x7FFFFFFF
    if magnitude > 0x7F800000:
        return sign | 0x7E00
    if magnitude >= 0x47800000:
        return sign | 0x7C00
    if magnitude < 0x38800000:
        # subnormal half: adding 0.5 rounds at 2^-24, the last bit of a subnormal half
        aligned = f32_from_bits(magnitude) + f32_from_bits(126 << 23)
        return sign | (f32_bits(aligned) - (126 << 23))
    rounded = magnitude + 0xFFF + ((magnitude >> 13) & 1)
    return sign | ((rounded - (112 << 23)) >> 13)


if HARDWARE_HALF:
    load_f16 = _loader("load_f16", _F16, types.float32, lambda b, v: b.fpext(v, _F32))
    store_f16 = _storer("store_f16", _F16, types.float32, lambda b, v: b.fptrunc(v, _F16))
else:

    @jit(device=True)
    def load_f16(address, offset=0):
        return half_bits_to_f32(load_u16(address, offset))

    @jit(device=True)
    def store_f16(address, value, offset=0):
        store_u16(address, f32_to_half_bits(value), offset)


@intrinsic
def fetch_add_i64(typing_context, address, amount):
    """Atomically add to the int64 at ``address`` (8-byte aligned) and return its former value."""

    def generate(context, builder, signature, arguments):
        return builder.atomic_rmw("add", pointer_at(builder, _I64, arguments[0]), arguments[1], "acq_rel")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def exchange_i64(typing_context, address, value):
    """Atomically put ``value`` into the int64 at ``address`` (8-byte aligned) and return what was there."""

    def generate(context, builder, signature, arguments):
        return builder.atomic_rmw("xchg", pointer_at(builder, _I64, arguments[0]), arguments[1], "acq_rel")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def load_acquire_i64(typing_context, address):
    """Atomic load: what the writer did before its ``store_release_i64`` is visible afterwards."""

    def generate(context, builder, signature, arguments):
        return builder.load_atomic(pointer_at(builder, _I64, arguments[0]), "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def store_release_i64(typing_context, address, value):
    """Atomic store that publishes everything this thread wrote before it."""

    def generate(context, builder, signature, arguments):
        builder.store_atomic(arguments[1], pointer_at(builder, _I64, arguments[0]), "release", 8)

    return types.void(types.int64, types.int64), generate


@intrinsic
def cpu_pause(typing_context):
    """A hint that this thread spins: ``pause`` on x86, ``yield`` on ARM, nothing elsewhere."""
    if _MACHINE in ("x86_64", "amd64"):
        name, operands = "llvm.x86.sse2.pause", []
    elif _MACHINE in ("aarch64", "arm64"):
        name, operands = "llvm.aarch64.hint", [_I32(1)]
    else:
        name, operands = "llvm.donothing", []

    def generate(context, builder, signature, arguments):
        hint = ir.FunctionType(ir.VoidType(), [operand.type for operand in operands])
        builder.call(cgutils.get_or_insert_function(builder.module, hint, name), operands)

    return types.void(), generate


@intrinsic
def sched_yield(typing_context):
    """Give the processor to another runnable thread (POSIX ``sched_yield``; nothing on Windows)."""
    posix = platform.system() != "Windows"

    def generate(context, builder, signature, arguments):
        if posix:
            function = ir.FunctionType(_I32, ())
            builder.call(cgutils.get_or_insert_function(builder.module, function, "sched_yield"), ())

    return types.void(), generate


@intrinsic(prefer_literal=True)
def stack_alloc(typing_context, nbytes, alignment):
    """Address of ``nbytes`` of uninitialised scratch that lives until the kernel returns; constants only."""
    if not (isinstance(nbytes, types.IntegerLiteral) and isinstance(alignment, types.IntegerLiteral)):
        return None
    size, align = nbytes.literal_value, alignment.literal_value

    def generate(context, builder, signature, arguments):
        with builder.goto_entry_block():
            scratch = builder.alloca(ir.ArrayType(_I8, size))
            scratch.align = align
        return builder.ptrtoint(scratch, _I64)

    return types.int64(nbytes, alignment), generate
