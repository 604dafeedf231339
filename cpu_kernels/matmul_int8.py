"""Packed weights times several int8 vectors: activations prepared once, rows shared by threads."""

from realizar_torch.cpu_kernels.int8_matmul import prepare_columns
from realizar_torch.cpu_kernels.jit import jit
from realizar_torch.cpu_kernels.memory import fetch_add_i64, load_f32, store_f32
from realizar_torch.cpu_kernels.native import call_native
from realizar_torch.cpu_kernels.pool import BARRIER_BYTES, barrier

# Rows a thread takes at a time; a multiple of the 32 that ``int8_matmul.py`` wants.
TILE_ROWS = 64
# A barrier and the counter of tiles.
STATE_BYTES = BARRIER_BYTES + 8


@jit
def matmul_int8_tiles(
    thread,
    n_threads,
    state,
    ggml_type,
    kernel,
    weight,
    row_bytes,
    rows,
    width,
    padded_width,
    count,
    q,
    scale,
    sums,
    aux,
    bias,
    out,
):
    """fp32 ``out [count, rows] = vectors · decoded weight + bias``.

    ``state``: STATE_BYTES zero bytes. ``kernel``: address of ``row_kernels.int8_matmul`` of the format.
    ``aux``: scratch of 4 bytes for every 16 activations. A ``bias`` of 0 is none.
    """
    share = (count + n_threads - 1) // n_threads
    first_column, last_column = min(share * thread, count), min(share * (thread + 1), count)
    prepare_columns(ggml_type, padded_width, first_column, last_column, q, sums, aux)
    barrier(state, n_threads)
    while True:
        first = fetch_add_i64(state + BARRIER_BYTES, TILE_ROWS)
        if first >= rows:
            return
        last = min(first + TILE_ROWS, rows)
        call_native(kernel, (weight, row_bytes, first, last, width, count, q, scale, aux, out, 4 * rows))
        if bias:
            for column in range(count):
                target = out + 4 * rows * column
                for row in range(first, last):
                    store_f32(target, load_f32(target, 4 * row) + load_f32(bias, 4 * row), 4 * row)
