"""A register tile of the int8 matmul: ``tile_vectors`` × 16 weight rows, ``tile_columns`` activation vectors.

A tile is a tuple of F32x16, one per column and row vector (column by column); a lane is a weight row. Weights
stand in panels of 16 rows, ``[step of 4 weights][row][4 bytes]``: one 64-byte vector times four broadcast
activation bytes adds four products to every row. Activations stand as ``activation_panel.py`` says.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from realizar_torch.cpu_kernels.int8_panel import PANEL_BYTES, SCALE_BYTES
from realizar_torch.cpu_kernels.memory import pointer_at
from realizar_torch.cpu_kernels.simd import I32, F32x16, I32x16, U8x64, call, splat
from realizar_torch.cpu_kernels.targets import add_products

_I64, _F32 = ir.IntType(64), ir.FloatType()
# bytes of one step of a panel: 4 weights of 16 rows; of one column of q; of 16 fp32 rows
_STEP, _COLUMN, _VECTOR = 64, 64, 64
# Rows of a finished tile in memory, fp32 each, for every column.
TILE_ROWS = 32


def _tile_type(target):
    return types.UniTuple(F32x16, target.target.tile_vectors * target.target.tile_columns)


def _places(builder, target, base):
    """Addresses of the tile's vectors in fp32 [columns][TILE_ROWS]."""
    for c in range(target.tile_columns):
        for v in range(target.tile_vectors):
            yield pointer_at(builder, F32x16.llvm, base, _I64(4 * TILE_ROWS * c + _VECTOR * v))


@intrinsic
def zero_tile(typing_context, target):
    """A tile of zeros."""
    tile = _tile_type(target)

    def generate(context, builder, signature, arguments):
        return context.make_tuple(builder, tile, [ir.Constant(F32x16.llvm, None)] * tile.count)

    return tile(target), generate


@intrinsic
def load_tile(typing_context, target, address):
    """The tile that ``store_tile`` has stored at ``address``."""
    tile = _tile_type(target)

    def generate(context, builder, signature, arguments):
        places = _places(builder, target.target, arguments[1])
        return context.make_tuple(builder, tile, [builder.load(place, align=4) for place in places])

    return tile(target, types.int64), generate


@intrinsic
def store_tile(typing_context, target, tile, address):
    """Store a tile's columns TILE_ROWS fp32 apart."""

    def generate(context, builder, signature, arguments):
        values = cgutils.unpack_tuple(builder, arguments[1])
        for value, place in zip(values, _places(builder, target.target, arguments[2]), strict=True):
            builder.store(value, place, align=4)

    return types.void(target, _tile_type(target), types.int64), generate


def multiply_add(width, affine, largest, offset):
    """An intrinsic that adds one sub-block of ``width`` weights to a tile.

    ``step(target, tile, panel, scales, q, x_scale, sums)``: addresses of the sub-block in the first panel, of
    its 16 row scales (and minima, if ``affine``), and of the sub-block of the tile's first column.
    ``tile += row scale * activation scale * (products - offset * sum of q)``; if affine
    ``tile += row scale * activation scale * products + minimum * sum``, where the sum is negative.
    ``largest`` bounds the unsigned weights.
    """

    def step(typing_context, target, tile, panel, scales, q, x_scale, sums):
        cpu = target.target
        columns, vectors = range(cpu.tile_columns), range(cpu.tile_vectors)

        def generate(context, builder, signature, arguments):
            _, tile, panel, scales, q, x_scale, sums = arguments

            def load(element, base, offset):
                return builder.load(pointer_at(builder, element, base, _I64(offset)), align=1)

            def initial(c):
                if affine:
                    return ir.Constant(I32x16.llvm, None)
                return splat(builder, builder.mul(load(I32, sums, 4 * c), I32(-offset)), I32x16.llvm)

            def operands(index):
                weights = [load(U8x64.llvm, panel, PANEL_BYTES * v + _STEP * index) for v in vectors]
                words = [load(I32, q, _COLUMN * c + 4 * index) for c in columns]
                return weights, [
                    builder.bitcast(splat(builder, word, I32x16.llvm), U8x64.llvm) for word in words
                ]

            start = [initial(c) for c in columns]
            products = add_products(builder, cpu, width // 4, operands, start, largest)
            values = cgutils.unpack_tuple(builder, tile)

            def add(at, left, right):
                values[at] = call(builder, "llvm.fmuladd.v16f32", F32x16.llvm, left, right, values[at])

            for c in columns:
                x_factor = splat(builder, load(_F32, x_scale, 4 * c), F32x16.llvm)
                for v in vectors:
                    factor = builder.fmul(load(F32x16.llvm, scales, SCALE_BYTES * v), x_factor)
                    at = c * cpu.tile_vectors + v
                    add(at, builder.sitofp(products[v][c], F32x16.llvm), factor)
                    if affine:
                        minimum = load(F32x16.llvm, scales, SCALE_BYTES * v + _VECTOR)
                        add(at, minimum, splat(builder, load(_F32, sums, 4 * c), F32x16.llvm))
            return context.make_tuple(builder, signature.return_type, values)

        return tile(target, tile, *[types.int64] * 5), generate

    return intrinsic(step)


@intrinsic
def tile_shape(typing_context, target):
    """(row vectors, columns) of the target's tile, known when compiled."""
    result = types.UniTuple(types.int64, 2)

    def generate(context, builder, signature, arguments):
        shape = (target.target.tile_vectors, target.target.tile_columns)
        return context.make_tuple(builder, result, [_I64(n) for n in shape])

    return result(target), generate
