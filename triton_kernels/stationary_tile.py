"""What a warp does with tiles of 16 weight rows while it holds the activations of one step: load, ask ahead,
multiply.
"""

import triton
import triton.language as tl

from realizar_torch.triton_kernels.exchange import exchange_outputs
from realizar_torch.triton_kernels.fragments import (
    factor_of,
    load_fragment,
    minimums,
    minimums_of,
    run_size,
    scales_of,
    signed,
    words_of,
)
from realizar_torch.triton_kernels.primitives import prefetch_run
from realizar_torch.triton_kernels.tensor_core import MAGIC, multiply_int8, multiply_tf32, scaled


@triton.jit
def first_row_of(tile, n_rows):
    """The last tile overlaps the one before it where 16 does not divide the rows; it does not store those."""
    return tl.maximum(tl.minimum(16 * tile, n_rows - 16), 0)


@triton.jit
def load_tile(
    rows, offset, first, blocks, FMT: tl.constexpr, PLANAR: tl.constexpr, ALIGN: tl.constexpr
):  # fmt: skip
    """A thread's words of rows g and g + 8, ``offset`` bytes from those of the first tile."""
    last = tl.minimum(first, blocks - 1)
    t = tl.arange(0, first.shape[0]) % 4
    upper = load_fragment(rows[0] + offset, last, blocks, t, FMT, PLANAR, ALIGN)
    return upper, load_fragment(rows[1] + offset, last, blocks, t, FMT, PLANAR, ALIGN)


@triton.jit
def shares_of(weight, row_stride, row_bytes, n_rows, WARPS: tl.constexpr):
    """What this program asks for of the first tile: a run of each of the 16 rows, one for every first lane.

    The programs of all columns and steps together ask for all of it: (pointers, how many bytes, wanted).
    """
    shares = tl.num_programs(0) * tl.num_programs(1)
    size = tl.cdiv(row_bytes, shares * 16) * 16
    start = (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)) * size
    size = tl.minimum(size, row_bytes - start)
    thread = tl.arange(0, 32 * WARPS)
    runs = ()
    for i in tl.static_range(16 // WARPS):
        row = tl.minimum(WARPS * i + thread // 32, n_rows - 1)
        runs = runs + (weight + row.to(tl.int64) * row_stride + start,)  # noqa: RUF005
    return runs, size, (thread % 32 == 0) & (size > 0)


@triton.jit
def result_places(batch, n_rows, N: tl.constexpr, WARPS: tl.constexpr):
    """Of the results of ``exchange.sum_over_warps``: row in the tile, offset in ``[batch, n_rows]`` for the
    first tile, whether there is one.
    """
    index = tl.arange(0, exchange_outputs(N, WARPS))
    row = index % 128 // 16 + index % 4 // 2 * 8
    column = tl.program_id(0) * (8 * N) + index // 128 * 8 + index % 16 // 4 * 2 + index % 2
    return row, column.to(tl.int64) * n_rows + row, (index < 128 * N) & (column < batch)


@triton.jit
def prefetch_tile(shares, offset):
    for i in tl.static_range(len(shares[0])):
        prefetch_run(shares[0][i] + offset, shares[1], shares[2])


@triton.jit
def multiply_tile(upper, lower, held, blocks, FMT: tl.constexpr, N: tl.constexpr, WARPS: tl.constexpr):
    """All of a step that its bytes are needed for: (products of the runs, of the minimums, scales of rows g,
    of rows g + 8, their factors of the minimums).
    """
    t = tl.arange(0, 32 * WARPS) % 4
    RUN: tl.constexpr = run_size(FMT)
    products = ()
    for run in tl.static_range(256 // RUN):
        first, second = words_of(upper, run, t, FMT), words_of(lower, run, t, FMT)
        if RUN == 32:
            left = (first[0], second[0], first[1], second[1])
        else:
            left = (first[0], second[0])
        for n in tl.static_range(N):
            products = products + (multiply_int8(left, held[n][0][run], signed(FMT)),)  # noqa: RUF005
    least = ()
    factors = ()
    if minimums(FMT) > 0:
        least = _minimums(upper, lower, held, t, blocks, FMT, N)
        factors = factor_of(upper, 0, blocks, True, FMT), factor_of(lower, 0, blocks, True, FMT)
    upper_scales = scales_of(upper, 0, blocks, True, FMT)
    lower_scales = scales_of(lower, 0, blocks, True, FMT)
    return products, least, upper_scales, lower_scales, factors


@triton.jit
def _minimums(upper, lower, held, t, blocks, FMT: tl.constexpr, N: tl.constexpr):
    """Minimums x sums of activations, N times four registers, as ``tile_sums`` has them."""
    zero = tl.zeros(t.shape, tl.float32)
    least = ()
    for n in tl.static_range(N):
        product = (zero, zero, zero, zero)
        for part in tl.static_range(minimums(FMT) // 8):
            high = minimums_of(upper, 0, blocks, part, t, True, FMT)
            low = minimums_of(lower, 0, blocks, part, t, True, FMT)
            left = _bits(high[0], low[0]) + _bits(high[1], low[1])
            sums = held[n][3][part]
            product = multiply_tf32(left, sums[0], multiply_tf32(left, sums[1], product))
        least = least + (product,)  # noqa: RUF005
    return least


@triton.jit
def scale_tile(step, held, FMT: tl.constexpr, N: tl.constexpr, WARPS: tl.constexpr):
    """4 N sums (exchange.py) of a step: Σ scale * xscale * product - factor * minimums."""
    RUN: tl.constexpr = run_size(FMT)
    products, least, upper_scales, lower_scales, factors = step
    zero = tl.zeros([32 * WARPS], tl.float32)
    total = ()
    for n in tl.static_range(N):
        if minimums(FMT) > 0:
            f0, f1 = -factors[0], -factors[1]
            total = total + (f0 * least[n][0], f0 * least[n][1], f1 * least[n][2], f1 * least[n][3])  # noqa: RUF005
        else:
            total = total + (zero, zero, zero, zero)  # noqa: RUF005
    for run in tl.static_range(256 // RUN):
        s0, s1 = upper_scales[run], lower_scales[run]
        offset0, offset1 = s0 * -MAGIC, s1 * -MAGIC
        updated = ()
        for n in tl.static_range(N):
            product = products[N * run + n]
            even, odd = held[n][1][run * RUN // 32], held[n][2][run * RUN // 32]
            updated = updated + (  # noqa: RUF005
                tl.fma(scaled(product[0], s0, offset0), even, total[4 * n]),
                tl.fma(scaled(product[1], s0, offset0), odd, total[4 * n + 1]),
                tl.fma(scaled(product[2], s1, offset1), even, total[4 * n + 2]),
                tl.fma(scaled(product[3], s1, offset1), odd, total[4 * n + 3]),
            )
        total = updated
    return total


@triton.jit
def _bits(low, high):
    return low.to(tl.int32, bitcast=True), high.to(tl.int32, bitcast=True)
