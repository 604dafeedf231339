"""fp32 products of small matrices in rows: ``c [rows, columns] (+)= a [rows, steps] · b [steps, columns]``.

Each output is one chain of additions in the order of ``steps``: it depends on nothing but its row and column.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from realizar_torch.cpu_kernels.jit import jit, target_features
from realizar_torch.cpu_kernels.memory import pointer_at
from realizar_torch.cpu_kernels.simd import F32x16, call, splat

# Rows and vectors of 16 columns held in registers: 16 vectors of 64 bytes, or 4 of them as pairs of 32.
_ROWS, _VECTORS = (8, 2) if "avx512f" in target_features() else (4, 1)
# Steps after which the next rows are taken, so that ``b`` comes from the first-level cache.
_STEPS = 128
_I64 = ir.IntType(64)


def _tile(rows, vectors):
    """An intrinsic ``tile(a, a_stride, b, b_stride, steps, c, c_stride, add)``; strides in bytes."""

    def multiply(typing_context, a, a_stride, b, b_stride, steps, c, c_stride, add):
        def generate(context, builder, signature, arguments):
            a, a_stride, b, b_stride, steps, c, c_stride, add = arguments
            vector = F32x16.llvm

            def place(base, stride, row, v=0, element=vector):
                row_base = builder.add(base, builder.mul(stride, _I64(row)))
                return pointer_at(builder, element, row_base, _I64(64 * v))

            cells = [(row, v) for row in range(rows) for v in range(vectors)]
            again = builder.icmp_signed("!=", add, add.type(0))
            totals = {cell: cgutils.alloca_once_value(builder, ir.Constant(vector, None)) for cell in cells}
            with builder.if_then(again):
                for row, v in cells:
                    builder.store(builder.load(place(c, c_stride, row, v), align=4), totals[row, v])
            with cgutils.for_range(builder, steps) as loop:
                index = loop.index
                line = builder.add(b, builder.mul(index, b_stride))
                rights = [
                    builder.load(pointer_at(builder, vector, line, _I64(64 * v)), align=4)
                    for v in range(vectors)
                ]
                step = builder.add(a, builder.mul(index, _I64(4)))
                for row in range(rows):
                    left = builder.load(place(step, a_stride, row, 0, ir.FloatType()), align=4)
                    left = splat(builder, left, vector)
                    for v in range(vectors):
                        total = builder.load(totals[row, v])
                        total = call(builder, "llvm.fmuladd.v16f32", vector, left, rights[v], total)
                        builder.store(total, totals[row, v])
            for row, v in cells:
                builder.store(builder.load(totals[row, v]), place(c, c_stride, row, v), align=4)

        return types.void(*[types.int64] * 8), generate

    return intrinsic(multiply)


_square, _one_row, _one_column, _one = (
    _tile(rows, vectors) for rows, vectors in ((_ROWS, _VECTORS), (1, _VECTORS), (_ROWS, 1), (1, 1))
)


@jit(device=True)
def multiply_rows(a, a_stride, rows, b, b_stride, columns, steps, c, c_stride, add):
    """``columns`` is a multiple of 16; ``add`` 0 overwrites ``c``; strides are bytes between rows."""
    for first in range(0, steps, _STEPS):
        count = min(_STEPS, steps - first)
        more, left, right = add or first, a + 4 * first, b + b_stride * first
        column = 0
        while column < columns:
            wide = column + 16 * _VECTORS <= columns
            row = 0
            while row < rows:
                high = row + _ROWS <= rows
                rest = (left + a_stride * row, a_stride, right + 4 * column, b_stride, count)
                place = (c + c_stride * row + 4 * column, c_stride, more)
                if high and wide:
                    _square(*rest, *place)
                elif wide:
                    _one_row(*rest, *place)
                elif high:
                    _one_column(*rest, *place)
                else:
                    _one(*rest, *place)
                row += _ROWS if high else 1
            column += 16 * _VECTORS if wide else 16
