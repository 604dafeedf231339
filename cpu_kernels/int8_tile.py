"""A register tile of the int8 matmul: ``tile_vectors`` × 16 weight rows, ``tile_columns`` activation vectors.

A tile is a tuple of F32x16, one per column and row vector (column by column); a lane is a weight row. Weights
stand in panels of 16 rows, ``[step of 4 weights][row][4 bytes]``: one 64-byte vector times four broadcast
activation bytes adds four products to every row. Columns past the last one repeat it: they compute and store
the same numbers again.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from realizar_torch.cpu_kernels.memory import pointer_at
from realizar_torch.cpu_kernels.simd import I32, F32x16, I32x16, U8x64, call, splat
from realizar_torch.cpu_kernels.targets import add_products

_I64, _F32 = ir.IntType(64), ir.FloatType()
_LANES = F32x16.lanes
# bytes of one step of a panel: 4 weights of 16 rows
_STEP_BYTES = 64


def _tile_type(target):
    return types.UniTuple(F32x16, target.target.tile_vectors * target.target.tile_columns)


def _at(builder, base, offset):
    return builder.add(base, _I64(offset))


def _columns(builder, target, base, stride, first, last):
    """Addresses of the tile's columns, ``stride`` bytes apart in memory, clamped to column ``last``."""
    addresses = []
    for c in range(target.tile_columns):
        column = _at(builder, first, c)
        column = builder.select(builder.icmp_signed("<", column, last), column, last)
        addresses.append(builder.add(base, builder.mul(column, stride)))
    return addresses


def _load(builder, element, address):
    return builder.load(pointer_at(builder, element, address), align=1)


@intrinsic
def zero_tile(typing_context, target):
    """A tile of zeros."""
    tile = _tile_type(target)

    def generate(context, builder, signature, arguments):
        return context.make_tuple(builder, tile, [ir.Constant(F32x16.llvm, None)] * tile.count)

    return tile(target), generate


@intrinsic
def load_tile(typing_context, target, base, stride, first, last):
    """The tile whose column c is the fp32 vector at ``base + c * stride``, columns ``first`` and on."""
    tile = _tile_type(target)

    def generate(context, builder, signature, arguments):
        values = [
            _load(builder, F32x16.llvm, _at(builder, column, 4 * _LANES * v))
            for column in _columns(builder, target.target, *arguments[1:])
            for v in range(target.target.tile_vectors)
        ]
        return context.make_tuple(builder, tile, values)

    return tile(target, *[types.int64] * 4), generate


@intrinsic
def store_tile(typing_context, target, tile, base, stride, first, last):
    """Store a tile where ``load_tile`` finds it."""

    def generate(context, builder, signature, arguments):
        values = iter(cgutils.unpack_tuple(builder, arguments[1]))
        for column in _columns(builder, target.target, *arguments[2:]):
            for v in range(target.target.tile_vectors):
                pointer = pointer_at(builder, F32x16.llvm, _at(builder, column, 4 * _LANES * v))
                builder.store(next(values), pointer, align=1)

    return types.void(target, _tile_type(target), *[types.int64] * 4), generate


def multiply_add(width, affine, largest):
    """An intrinsic that adds one sub-block of ``width`` weights to a tile.

    ``step(target, tile, panel, panel_stride, scales, scales_stride, q, q_stride, x_scale, x_scale_stride,
    aux, aux_stride, first, last)``: addresses of the sub-block in the first panel, of its 16 row scales (and
    minima, if ``affine``), and of the sub-block in column 0 of q, of the activation scales and of ``aux``.
    ``tile += row scale * activation scale * (products + aux)``, int32 aux = - offset * sum of q; if affine
    ``tile += row scale * activation scale * products + minimum * aux``, fp32 aux = - sum of activations.
    ``largest`` bounds the unsigned weights.
    """

    def step(
        typing_context, target, tile, panel, panel_stride, scales, scales_stride, q, q_stride, x_scale,
        x_scale_stride, aux, aux_stride, first, last,
    ):  # fmt: skip
        vectors = target.target.tile_vectors

        def generate(context, builder, signature, arguments):
            _, tile, panel, panel_stride, scales, scales_stride, *rest = arguments
            q, q_stride, x_scale, x_scale_stride, aux, aux_stride, first, last = rest

            def each_column(base, stride, element):
                for column in _columns(builder, target.target, base, stride, first, last):
                    yield _load(builder, element, column)

            aux_values = list(each_column(aux, aux_stride, _F32 if affine else I32))
            initial = [
                ir.Constant(I32x16.llvm, None) if affine else splat(builder, value, I32x16.llvm)
                for value in aux_values
            ]
            q_columns = _columns(builder, target.target, q, q_stride, first, last)
            panels = [builder.add(panel, builder.mul(panel_stride, _I64(v))) for v in range(vectors)]

            def operands(index):
                weights = [_load(builder, U8x64.llvm, _at(builder, p, _STEP_BYTES * index)) for p in panels]
                words = [_load(builder, I32, _at(builder, column, 4 * index)) for column in q_columns]
                spread = [builder.bitcast(splat(builder, word, I32x16.llvm), U8x64.llvm) for word in words]
                return weights, spread

            sums = add_products(builder, target.target, width // 4, operands, initial, largest)
            values = cgutils.unpack_tuple(builder, tile)
            row_scales = [builder.add(scales, builder.mul(scales_stride, _I64(v))) for v in range(vectors)]
            for c, x_scale_value in enumerate(each_column(x_scale, x_scale_stride, _F32)):
                for v, row_scale in enumerate(row_scales):
                    factor = _load(builder, F32x16.llvm, row_scale)
                    factor = builder.fmul(factor, splat(builder, x_scale_value, F32x16.llvm))
                    at = c * vectors + v
                    product = builder.sitofp(sums[v][c], F32x16.llvm)
                    values[at] = call(
                        builder, "llvm.fmuladd.v16f32", F32x16.llvm, product, factor, values[at]
                    )
                    if affine:
                        minimum = _load(builder, F32x16.llvm, _at(builder, row_scale, 4 * _LANES))
                        aux_lanes = splat(builder, aux_values[c], F32x16.llvm)
                        values[at] = call(
                            builder, "llvm.fmuladd.v16f32", F32x16.llvm, minimum, aux_lanes, values[at]
                        )
            return context.make_tuple(builder, signature.return_type, values)

        return tile(target, tile, *[types.int64] * 12), generate

    return intrinsic(step)


@intrinsic
def tile_shape(typing_context, target):
    """(row vectors, columns) of the target's tile, known when compiled."""
    result = types.UniTuple(types.int64, 2)

    def generate(context, builder, signature, arguments):
        shape = (target.target.tile_vectors, target.target.tile_columns)
        return context.make_tuple(builder, result, [_I64(n) for n in shape])

    return result(target), generate
