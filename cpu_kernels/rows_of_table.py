"""Rows of a packed table as fp32: those a list of ids names (embedding), or all of them (dequantize)."""

from realizar_torch.cpu_kernels.jit import jit
from realizar_torch.cpu_kernels.memory import fetch_add_i64, load_i64
from realizar_torch.cpu_kernels.native import call_native

TILE_ROWS = 16


@jit
def decode_table_rows(thread, n_threads, counter, decode, table, row_bytes, ids, count, width, out):
    """``out[i] = decoded row ids[i]`` for ``i < count``; ``ids`` is int64 [count], or 0 for rows 0, 1, 2 …

    ``decode``: address of a row decoder (row_kernels.py). ``counter``: address of a zero int64. ``out``: fp32
    [count, width].
    """
    while True:
        first = fetch_add_i64(counter, TILE_ROWS)
        if first >= count:
            return
        for index in range(first, min(first + TILE_ROWS, count)):
            row = load_i64(ids, 8 * index) if ids else index
            call_native(decode, (table + row_bytes * row, width, out + 4 * width * index))
