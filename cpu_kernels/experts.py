"""Packed matrices of chosen experts times a vector each: tiles of rows of all choices in one dispatch."""

from realizar_torch.cpu_kernels.int8_rows import rows_of_tile
from realizar_torch.cpu_kernels.jit import jit
from realizar_torch.cpu_kernels.memory import fetch_add_i64, load_i64
from realizar_torch.cpu_kernels.native import call_native


@jit
def expert_tiles(
    thread,
    n_threads,
    counter,
    kernel,
    weight,
    row_bytes,
    rows,
    width,
    experts,
    count,
    share,
    x,
    x_stride,
    scale,
    scale_stride,
    sums,
    sums_stride,
    out,
):
    """``out[i] = weight[experts[i]] · x[i // share]`` for ``count`` choices, by ``kernel`` (an address of
    row_kernels.py).

    Addresses: ``weight`` [E, rows, row_bytes], ``experts`` int64, ``out`` fp32 [count, rows], ``counter``
    a zero int64. Strides are bytes between vectors.
    """
    height = rows_of_tile(rows, row_bytes, n_threads)
    tiles = (rows + height - 1) // height
    while True:
        tile = fetch_add_i64(counter, 1)
        if tile >= count * tiles:
            return
        choice, first = tile // tiles, tile % tiles * height
        matrix = weight + load_i64(experts, 8 * choice) * rows * row_bytes
        row = choice // share
        vector = (x + x_stride * row, scale + scale_stride * row, sums + sums_stride * row)
        last = min(first + height, rows)
        call_native(kernel, (matrix, row_bytes, first, last, width, *vector, out + 4 * rows * choice))
