"""Packed weights times several int8 vectors: activations put in order once, then rows shared by threads."""

from realizar_torch.cpu_kernels.activation_panel import copy_into_panel
from realizar_torch.cpu_kernels.int8_tile import TILE_ROWS
from realizar_torch.cpu_kernels.jit import jit
from realizar_torch.cpu_kernels.memory import fetch_add_i64
from realizar_torch.cpu_kernels.native import call_native
from realizar_torch.cpu_kernels.pool import BARRIER_BYTES, barrier
from realizar_torch.cpu_kernels.step_vectors import add_rows, copy_row

# A barrier and the counter of tiles.
STATE_BYTES = BARRIER_BYTES + 8


@jit
def matmul_int8_tiles(
    thread,
    n_threads,
    state,
    kernel,
    kinds,
    weight,
    row_bytes,
    rows,
    width,
    count,
    columns,
    x_q,
    x_scale,
    q,
    scale,
    sums,
    tiles,
    bias,
    out,
):
    """fp32 ``out [count, rows] = vectors · decoded weight + bias``.

    ``state``: STATE_BYTES zero bytes. ``kernel``: address of ``row_kernels.int8_matmul`` of the format, which
    reads ``kinds`` of sums. ``x_q``, ``x_scale``: int8 [count, width] and fp32 [count, width / 32]. ``q``,
    ``scale``, ``sums``: room for an activation panel of ``columns``. ``tiles``: fp32 [columns][TILE_ROWS] for
    each thread. A ``bias`` of 0 is none.
    """
    share = (count + n_threads - 1) // n_threads
    for column in range(share * thread, min(share * (thread + 1), count)):
        vector = (x_q + width * column, x_scale + width // 8 * column)
        copy_into_panel(*vector, width, column, columns, kinds, q, scale, sums)
    barrier(state, n_threads)
    tile = tiles + 4 * TILE_ROWS * columns * thread
    while True:
        first = fetch_add_i64(state + BARRIER_BYTES, TILE_ROWS)
        if first >= rows:
            return
        height = min(TILE_ROWS, rows - first)
        source = weight + row_bytes * first
        call_native(kernel, (source, row_bytes, height, width, count, columns, q, scale, sums, tile))
        for column in range(count):
            target = out + 4 * (rows * column + first)
            copy_row(tile + 4 * TILE_ROWS * column, height, target)
            if bias:
                add_rows(target, bias + 4 * first, height)
