"""Ways through the rows of an int8 matvec, both from four places: one row at a time in turn, or four at once.

Four places let the hardware prefetch from four pages. Four rows at once also share what belongs to the
activations. A row's result does not depend on which of the four it was.
"""

from realizar_torch.cpu_kernels.jit import jit
from realizar_torch.cpu_kernels.memory import store_f32
from realizar_torch.cpu_kernels.simd import prefetch

# Bytes from what is read to what is asked for: rows in turn, and four rows at once.
FAR, NEAR = 3072, 1024

# The most rows that a thread takes at a time, and the bytes they should have: four long runs to stream, few
# enough to even out the threads.
MOST_ROWS, _TILE_BYTES = 256, 3 << 16


@jit(device=True)
def rows_of_tile(rows, row_bytes, n_threads):
    """How many of ``rows`` rows a thread takes at a time; at least four tiles for each of several threads."""
    tile = min(MOST_ROWS, _TILE_BYTES // row_bytes)
    if n_threads > 1:
        tile = min(tile, rows // (4 * n_threads))
    return max(4, tile // 4 * 4)


@jit(device=True)
def prefetch_block(address, size):
    for line in range(0, size, 64):
        prefetch(address + line)


def in_turn(dot):
    """Rows of ``dot(target, row, n_blocks, q, scale, sums)``, a float32."""

    @jit(device=True)
    def rows(target, weight, row_bytes, first_row, last_row, n_blocks, q, scale, sums, out):
        gap = (last_row - first_row) // 4
        for index in range(last_row - first_row):
            # rows that are left over come last
            row = first_row + (index // 4 + index % 4 * gap if index < 4 * gap else index)
            store_f32(out, dot(target, weight + row * row_bytes, n_blocks, q, scale, sums), 4 * row)

    return rows


def four_at_once(dots):
    """Rows of ``dots(target, row, stride, n_blocks, q, scale, sums)``, four float32: ``row + r * stride``."""

    @jit(device=True)
    def rows(target, weight, row_bytes, first_row, last_row, n_blocks, q, scale, sums, out):
        gap = (last_row - first_row) // 4
        for index in range((last_row - first_row) - 3 * gap):
            # behind the last four, rows that are left over stand for all four
            row, step = first_row + index, gap
            if index >= gap:
                row, step = row + 3 * gap, 0
            place = weight + row * row_bytes
            four = dots(target, place, step * row_bytes, n_blocks, q, scale, sums)
            for r in range(4):
                store_f32(out, four[r], 4 * (row + r * step))

    return rows
