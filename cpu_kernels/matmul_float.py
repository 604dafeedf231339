"""Packed weights times many fp32 vectors: a tile of weights is decoded once and used for all of them.

Every output is one accumulator of 16 lanes over the row, summed at the end: the same additions in the same
order as ``float_rows.py``, so that a vector's result does not depend on how many others there are.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from realizar_torch.cpu_kernels.jit import jit, target_features
from realizar_torch.cpu_kernels.memory import (
    fetch_add_i64,
    load_f32,
    pointer_at,
    stack_alloc,
    store_f32,
)
from realizar_torch.cpu_kernels.native import call_native
from realizar_torch.cpu_kernels.simd import F32x16, call, select_lanes

LANES = 16
# Rows a thread decodes at a time into its scratch.
TILE_ROWS = 32
# Rows and vectors multiplied at once in registers: 16 accumulators of 64 bytes fit 32 such registers.
_SIDE = 4 if "avx512f" in target_features() else 2
_SUMS_BYTES = 64
# Activations used before the next rows are: half of a usual second-level cache.
_ACTIVATION_BYTES = 1 << 19


def _lane_sums(builder, vectors):
    """Lane i: the sum of all lanes of vector i (of up to 16), halves onto halves as in ``sum_f32x16``."""
    vectors = [*vectors, *[ir.Constant(F32x16.llvm, None)] * (LANES - len(vectors))]
    group = LANES
    while group > 1:
        group //= 2
        # two vectors of groups become one vector of half groups, the first one's first
        lower = [lane for lane in range(2 * LANES) if lane // group % 2 == 0]
        upper = [lane + group for lane in lower]
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [
            builder.fadd(select_lanes(builder, a, b, lower), select_lanes(builder, a, b, upper))
            for a, b in pairs
        ]
    return vectors[0]


def _products(rows, columns):
    """An intrinsic that multiplies ``rows`` weight rows by ``columns`` vectors, ``chunks`` * 16 values each.

    The product of row r and vector c is number ``columns * r + c`` of fp32 ``sums``. Strides are in bytes.
    """

    def multiply(typing_context, weights, weight_stride, x, x_stride, chunks, sums):
        def generate(context, builder, signature, arguments):
            weights, weight_stride, x, x_stride, chunks, sums = arguments
            vector = F32x16.llvm

            def steps(base, stride, count):
                return [builder.add(base, builder.mul(stride, stride.type(step))) for step in range(count)]

            def lanes(base, offset):
                return builder.load(pointer_at(builder, vector, base, offset), align=4)

            row_bases, column_bases = steps(weights, weight_stride, rows), steps(x, x_stride, columns)
            zero = ir.Constant(vector, None)
            totals = [[cgutils.alloca_once_value(builder, zero) for _ in range(columns)] for _ in range(rows)]
            with cgutils.for_range(builder, chunks) as loop:
                offset = builder.mul(loop.index, loop.index.type(4 * LANES))
                row_lanes = [lanes(base, offset) for base in row_bases]
                for column, base in enumerate(column_bases):
                    column_lanes = lanes(base, offset)
                    for row in range(rows):
                        place = totals[row][column]
                        operands = (row_lanes[row], column_lanes, builder.load(place))
                        builder.store(call(builder, "llvm.fmuladd.v16f32", vector, *operands), place)
            vectors = [builder.load(total) for row in totals for total in row]
            builder.store(_lane_sums(builder, vectors), pointer_at(builder, vector, sums), align=64)

        return types.void(*[types.int64] * 6), generate

    return intrinsic(multiply)


_square, _one_row, _one_column, _one = (
    _products(rows, columns) for rows, columns in ((_SIDE, _SIDE), (1, _SIDE), (_SIDE, 1), (1, 1))
)


@jit(device=True)
def _store_sums(sums, rows, columns, bias, out, out_stride):
    """Distribute ``rows`` × ``columns`` sums over ``out``, the address of row 0 of vector 0."""
    for column in range(columns):
        for row in range(rows):
            y = load_f32(sums, 4 * (columns * row + column))
            if bias:
                y += load_f32(bias, 4 * row)
            store_f32(out + out_stride * column, y, 4 * row)


@jit(device=True)
def dot_products(weights, rows, x, columns, stride, bias, out, out_stride):
    """``out[c, r] = weights[r] · x[c] + bias[r]``; rows and vectors are ``stride`` bytes, whole chunks."""
    sums = stack_alloc(_SUMS_BYTES, 64)
    chunks = stride // (4 * LANES)
    row = 0
    while row < rows:
        height = _SIDE if row + _SIDE <= rows else 1
        w = weights + stride * row
        column = 0
        while column < columns:
            width = _SIDE if column + _SIDE <= columns else 1
            values = x + stride * column
            if height == _SIDE and width == _SIDE:
                _square(w, stride, values, stride, chunks, sums)
            elif height == _SIDE:
                _one_column(w, stride, values, stride, chunks, sums)
            elif width == _SIDE:
                _one_row(w, stride, values, stride, chunks, sums)
            else:
                _one(w, stride, values, stride, chunks, sums)
            target = out + out_stride * column + 4 * row
            _store_sums(sums, height, width, bias + 4 * row if bias else 0, target, out_stride)
            column += width
        row += height


@jit
def matmul_tiles(
    thread,
    n_threads,
    counter,
    decode,
    weight,
    row_bytes,
    rows,
    width,
    stride,
    count,
    x,
    scratch,
    bias,
    out,
):
    """fp32 ``out [count, rows] = x · decoded weight + bias``, tiles of rows handed out by ``counter``.

    ``decode``: address of a row decoder. ``x``: fp32 [count, stride / 4], zero past ``width``. ``stride``:
    bytes, a multiple of 64. ``scratch``: TILE_ROWS * ``stride`` bytes a thread. A ``bias`` of 0 is none.
    """
    weights = scratch + TILE_ROWS * stride * thread
    step = max(_SIDE, _ACTIVATION_BYTES // stride // _SIDE * _SIDE)
    while True:
        first = fetch_add_i64(counter, TILE_ROWS)
        if first >= rows:
            return
        height = min(TILE_ROWS, rows - first)
        for row in range(height):
            target = weights + stride * row
            call_native(decode, (weight + row_bytes * (first + row), width, target))
            for index in range(width, stride // 4):
                store_f32(target, 0.0, 4 * index)
        for column in range(0, count, step):
            columns = min(step, count - column)
            start = out + 4 * (rows * column + first)
            own_bias = bias + 4 * first if bias else 0
            dot_products(weights, height, x + stride * column, columns, stride, own_bias, start, 4 * rows)
