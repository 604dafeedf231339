"""int8 matrix product for several activation vectors: weights are decoded once per tile of rows.

``prepare_columns`` computes what every row needs of the activations; ``matmul_rows`` then does any range of
rows, so that threads can share them. Each output is the sum over sub-blocks, in order, of exact integer sums
times fp32 scales: it does not depend on the range or on the other columns.
"""

from realizar_torch.cpu_kernels.int8_panel import PANEL_BYTES, PANEL_WEIGHTS, SCALE_BYTES, fill_panel
from realizar_torch.cpu_kernels.int8_tile import load_tile, multiply_add, store_tile, tile_shape, zero_tile
from realizar_torch.cpu_kernels.jit import jit
from realizar_torch.cpu_kernels.memory import load_f32, load_i8, stack_alloc, store_f32, store_i32
from realizar_torch.formats import Q2_K, Q3_K, Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0

_Q4_0, _Q5_0, _Q8_0, _Q3_K, _Q6_K = (f.ggml_type for f in (Q4_0, Q5_0, Q8_0, Q3_K, Q6_K))
_AFFINE_32 = tuple(f.ggml_type for f in (Q4_1, Q5_1, Q4_K, Q5_K))
_AFFINE_16 = Q2_K.ggml_type
_SUPER_BLOCKS = tuple(f.ggml_type for f in (Q2_K, Q3_K, Q4_K, Q5_K, Q6_K))
_SUPER_BLOCK = Q4_K.block_size

# tiles have at most two panels and four columns
_PANELS_BYTES, _SCALES_BYTES, _TILE_BYTES = 2 * PANEL_BYTES, 2 * SCALE_BYTES, 4 * 32 * 4


@jit(device=True)
def _sub_block(ggml_type):
    """Weights that share one scale."""
    return 16 if ggml_type in (_AFFINE_16, _Q3_K, _Q6_K) else 32


@jit(device=True)
def _offset(ggml_type):
    """What unsigned weights are too large by; 0 for affine formats."""
    if ggml_type == _Q8_0:
        return 128
    if ggml_type == _Q6_K:
        return 32
    if ggml_type == _Q5_0:
        return 16
    if ggml_type == _Q4_0:
        return 8
    if ggml_type == _Q3_K:
        return 4
    return 0


@jit(device=True)
def prepare_columns(ggml_type, width, first_column, last_column, q, sums, aux):
    """Fill ``aux``, 4 bytes for every sub-block of 16 or 32 weights of ``first_column`` to ``last_column``.

    Affine formats: minus the fp32 sum of the activations. Others: int32, minus the offset times the sum of q.
    ``q``, ``sums``: addresses of [columns, width] int8 and [columns, width / 16] fp32; ``aux`` has room for
    [columns, width / 16] words and is filled as [columns, width / sub-block].
    """
    sub, offset = _sub_block(ggml_type), _offset(ggml_type)
    count = width // sub
    for index in range(first_column * count, last_column * count):
        if offset:
            total = 0
            for i in range(sub):
                total += load_i8(q + index * sub, i)
            store_i32(aux, -offset * total, 4 * index)
        elif sub == 16:
            store_f32(aux, -load_f32(sums, 4 * index), 4 * index)
        else:
            store_f32(aux, -(load_f32(sums, 8 * index) + load_f32(sums, 8 * index + 4)), 4 * index)


def _tile_product(sub, affine, largest):
    """Add the product of the decoded panels with the columns of one tile, sub-block by sub-block."""
    step = multiply_add(sub, affine, largest)
    scale_bytes = 128 if affine else 64

    @jit(device=True)
    def multiply(target, tile, panel, scales, width, first, last_sub, q, scale, aux, column, last_column):
        # first: the number of the panel's first sub-block
        for s in range(first, last_sub):
            tile = step(
                target,
                tile,
                panel + 16 * sub * (s - first),
                PANEL_BYTES,
                scales + scale_bytes * (s - first),
                SCALE_BYTES,
                q + sub * s,
                width,
                scale + s * sub // 32 * 4,
                width // 32 * 4,
                aux + 4 * s,
                width // sub * 4,
                column,
                last_column,
            )
        return tile

    return multiply


_affine_32, _affine_16 = _tile_product(32, True, 31), _tile_product(16, True, 3)
_offset_32, _offset_16 = _tile_product(32, False, 31), _tile_product(16, False, 63)
_bytes = _tile_product(32, False, 255)


@jit(device=True)
def matmul_rows(
    target,
    ggml_type,
    weight,
    row_bytes,
    first_row,
    last_row,
    n_blocks,
    columns,
    q,
    scale,
    aux,
    out,
    out_stride,
):
    """``out[column, row] = dot(weight row, column)`` for rows ``first_row`` to ``last_row``, in fp32.

    ``weight``: address of row 0. ``q``, ``scale``: addresses of int8 [columns, width] and fp32
    [columns, width / 32] without gaps, width = weights in ``n_blocks`` blocks; ``aux``: from prepare_columns.
    ``out``: address of column 0, row 0; columns are ``out_stride`` bytes apart. Ranges of a multiple of 32
    rows are the fastest.
    """
    vectors, tile_columns = tile_shape(target)
    tile_rows = 16 * vectors
    panel, scales = stack_alloc(_PANELS_BYTES, 64), stack_alloc(_SCALES_BYTES, 64)
    edge = stack_alloc(_TILE_BYTES, 64)
    block_size = _SUPER_BLOCK if ggml_type in _SUPER_BLOCKS else 32
    width, sub, panel_blocks = n_blocks * block_size, _sub_block(ggml_type), PANEL_WEIGHTS // block_size
    for row in range(first_row, last_row, tile_rows):
        rows = min(tile_rows, last_row - row)
        whole = rows == tile_rows
        for first_block in range(0, n_blocks, panel_blocks):
            last_block = min(first_block + panel_blocks, n_blocks)
            for v in range(vectors):
                start = min(row + 16 * v, last_row - 1)
                fill_panel(
                    ggml_type,
                    weight + start * row_bytes,
                    row_bytes,
                    min(last_row - start, 16),
                    first_block,
                    last_block,
                    panel + PANEL_BYTES * v,
                    scales + SCALE_BYTES * v,
                )
            first, last = first_block * block_size // sub, last_block * block_size // sub
            for column in range(0, columns, tile_columns):
                here = out + 4 * row
                present = min(tile_columns, columns - column)
                tile = zero_tile(target)
                if first_block and whole:
                    tile = load_tile(target, here, out_stride, column, columns - 1)
                elif first_block:
                    _copy(here + column * out_stride, out_stride, edge, 4 * tile_rows, present, rows)
                    tile = load_tile(target, edge, 4 * tile_rows, 0, tile_columns - 1)
                rest = (panel, scales, width, first, last, q, scale, aux, column, columns - 1)
                if ggml_type in _AFFINE_32:
                    tile = _affine_32(target, tile, *rest)
                elif ggml_type == _Q8_0:
                    tile = _bytes(target, tile, *rest)
                elif sub == 32:
                    tile = _offset_32(target, tile, *rest)
                elif ggml_type == _AFFINE_16:
                    tile = _affine_16(target, tile, *rest)
                else:
                    tile = _offset_16(target, tile, *rest)
                if whole:
                    store_tile(target, tile, here, out_stride, column, columns - 1)
                else:
                    store_tile(target, tile, edge, 4 * tile_rows, 0, tile_columns - 1)
                    _copy(edge, 4 * tile_rows, here + column * out_stride, out_stride, present, rows)


@jit(device=True)
def _copy(source, source_stride, target, target_stride, columns, rows):
    """Copy fp32 ``[columns, rows]`` between two strides in bytes."""
    for column in range(columns):
        for row in range(rows):
            value = load_f32(source + column * source_stride, 4 * row)
            store_f32(target + column * target_stride, value, 4 * row)
