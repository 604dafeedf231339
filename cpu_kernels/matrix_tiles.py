"""Matrix tiles of CPUs with AMX: fp32 [16][16] += bf16 [16][32] · bf16 [32][16] in one instruction.

Eight tile registers of 16 rows of 64 bytes. The right operand stands in pairs: ``[16 pairs][16 columns][2]``.
Linux gives a process the registers only if it asks. ``shape_tiles`` comes before the others in a kernel,
``release_tiles`` at its end.
"""

import ctypes
import functools
import platform
import sys

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from realizar_torch.cpu_kernels.jit import target_features
from realizar_torch.cpu_kernels.memory import pointer_at
from realizar_torch.cpu_kernels.simd import call

_I8, _I64 = ir.IntType(8), ir.IntType(64)
_REGISTERS, _ROWS, _ROW_BYTES = 8, 16, 64
# arch_prctl(ARCH_REQ_XCOMP_PERM, tile data)
_SYS_ARCH_PRCTL, _REQUEST, _TILE_DATA = 158, 0x1023, 18


@functools.cache
def available() -> bool:
    """Whether this process may use tiles; asks for them, for all threads and children."""
    if not {"amx-bf16", "avx512f"} <= target_features() or sys.platform != "linux":
        return False
    if platform.machine() != "x86_64":
        return False
    return ctypes.CDLL(None).syscall(_SYS_ARCH_PRCTL, _REQUEST, _TILE_DATA) == 0


def _tile_call(builder, name, *arguments):
    call(builder, f"llvm.x86.{name}", ir.VoidType(), *arguments)


@intrinsic
def shape_tiles(typing_context):
    """Give every tile register of this thread 16 rows of 64 bytes."""

    def generate(context, builder, signature, arguments):
        # palette 1, then 16-bit bytes per row at 16 and 8-bit rows at 48
        content = bytearray(64)
        content[0] = 1
        for tile in range(_REGISTERS):
            content[16 + 2 * tile], content[48 + tile] = _ROW_BYTES, _ROWS
        place = cgutils.global_constant(builder, "tile_shapes", cgutils.create_constant_array(_I8, content))
        _tile_call(builder, "ldtilecfg", builder.bitcast(place, _I8.as_pointer()))

    return types.void(), generate


@intrinsic
def release_tiles(typing_context):
    """Give the registers back: a thread that holds them is dearer to switch."""

    def generate(context, builder, signature, arguments):
        _tile_call(builder, "tilerelease")

    return types.void(), generate


@intrinsic(prefer_literal=True)
def zero_tile(typing_context, tile):
    """tile = 0; ``tile`` is the constant number of a register, here and below."""
    number = _I8(tile.literal_value)

    def generate(context, builder, signature, arguments):
        _tile_call(builder, "tilezero", number)

    return types.void(tile), generate


def _mover(name):
    @intrinsic(prefer_literal=True)
    def move(typing_context, tile, address, stride):
        number = _I8(tile.literal_value)

        def generate(context, builder, signature, arguments):
            _, address, stride = arguments
            stride = context.cast(builder, stride, signature.args[2], types.int64)
            _tile_call(builder, name, number, pointer_at(builder, _I8, address), stride)

        return types.void(tile, types.int64, types.int64), generate

    return move


# ``load_tile(tile, address, stride)`` and ``store_tile``: rows ``stride`` bytes apart
load_tile, store_tile = _mover("tileloadd64"), _mover("tilestored64")


@intrinsic(prefer_literal=True)
def add_product(typing_context, sums, left, right):
    """sums += left · right, with denormals as zeros."""
    numbers = [_I8(tile.literal_value) for tile in (sums, left, right)]

    def generate(context, builder, signature, arguments):
        _tile_call(builder, "tdpbf16ps", *numbers)

    return types.void(sums, left, right), generate
