"""int8 matrix product for several activation vectors: weights are decoded once per tile of rows.

Each output is the sum over sub-blocks, in order, of exact integer sums times fp32 scales: it does not depend
on the other rows and columns, nor on the CPU target.
"""

from realizar_torch.cpu_kernels.activation_panel import (
    COUNT_16,
    COUNT_32,
    MINUS_SUM_16,
    MINUS_SUM_32,
    sums_bytes,
)
from realizar_torch.cpu_kernels.int8_panel import (
    FILLERS,
    OFFSETS,
    PANEL_BYTES,
    PANEL_WEIGHTS,
    SCALE_BYTES,
)
from realizar_torch.cpu_kernels.int8_tile import (
    TILE_ROWS,
    load_tile,
    multiply_add,
    store_tile,
    tile_shape,
    zero_tile,
)
from realizar_torch.cpu_kernels.jit import jit
from realizar_torch.cpu_kernels.memory import stack_alloc
from realizar_torch.formats import get_packed_format

# Formats whose scales belong to 16 weights, the others' to 32.
SUB_BLOCKS_OF_16 = ("Q2_K", "Q3_K", "Q6_K")
# Bounds of the unsigned weights.
_LARGEST = {"Q2_K": 3, "Q3_K": 7, "Q4_0": 15, "Q4_1": 15, "Q4_K": 15, "Q6_K": 63, "Q8_0": 255}
_PANELS_BYTES, _SCALES_BYTES = 2 * PANEL_BYTES, 2 * SCALE_BYTES


def kind_of_sums(fmt: str) -> int:
    """Which of the sums in ``activation_panel.py`` the matmul of a format reads."""
    if fmt in OFFSETS:
        return COUNT_16 if fmt in SUB_BLOCKS_OF_16 else COUNT_32
    return MINUS_SUM_16 if fmt in SUB_BLOCKS_OF_16 else MINUS_SUM_32


def matmul_tile_of(fmt: str) -> object:
    """The matmul of a format as a device function, whose first argument is the target.

    ``tile(target, weight, row_bytes, rows, width, used, columns, q, scale, sums, out)``: up to 32 rows, the
    first at ``weight``, times the first ``used`` of ``columns`` vectors of an activation panel. ``out``: fp32
    [columns][32], of which unused rows and columns may be written too.
    """
    spec, fill = get_packed_format(fmt), FILLERS[fmt]
    block_size, sub = spec.block_size, 16 if fmt in SUB_BLOCKS_OF_16 else 32
    affine, kind, panel_blocks = fmt not in OFFSETS, kind_of_sums(fmt), PANEL_WEIGHTS // spec.block_size
    scale_bytes = 128 if affine else 64
    # sub-blocks in 64 activations and in the 32 of one scale, as powers of two
    per_line, per_scale, within = (2, 1, 3) if sub == 16 else (1, 0, 1)
    step = multiply_add(sub, affine, _LARGEST.get(fmt, 31), OFFSETS.get(fmt, 0))

    @jit(device=True)
    def tile_of_format(target, weight, row_bytes, rows, width, used, columns, q, scale, sums, out):
        vectors, tile_columns = tile_shape(target)
        panel, scales = stack_alloc(_PANELS_BYTES, 64), stack_alloc(_SCALES_BYTES, 64)
        n_blocks = (width + block_size - 1) // block_size
        kept = sums + kind * sums_bytes(n_blocks * block_size, columns)
        for first_block in range(0, n_blocks, panel_blocks):
            last_block = min(first_block + panel_blocks, n_blocks)
            for half in range(2):
                start = min(16 * half, rows - 1)
                source = weight + start * row_bytes
                here, its_scales = panel + PANEL_BYTES * half, scales + SCALE_BYTES * half
                present = min(rows - start, 16)
                fill(source, row_bytes, present, first_block, last_block, here, its_scales)
            first, last = first_block * block_size // sub, last_block * block_size // sub
            for column in range(0, used, tile_columns):
                for v in range(0, 2, vectors):
                    place = out + 4 * TILE_ROWS * column + 64 * v
                    tile = load_tile(target, place) if first_block else zero_tile(target)
                    for s in range(first, last):
                        tile = step(
                            target,
                            tile,
                            panel + PANEL_BYTES * v + 16 * sub * (s - first),
                            scales + SCALE_BYTES * v + scale_bytes * (s - first),
                            q + ((s >> per_line) * columns + column) * 64 + (s & within) * sub,
                            scale + 4 * ((s >> per_scale) * columns + column),
                            kept + 4 * (s * columns + column),
                        )
                    store_tile(target, tile, place)

    return tile_of_format
