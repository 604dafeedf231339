"""bf16 product of packed weights with several vectors, on CPUs with matrix tiles (``matrix_tiles.py``).

Weights are decoded once per tile of 32 rows and rounded to bf16, as the activations are; sums are fp32, added
pair by pair along the row, so that a result depends on nothing but its row and its vector.
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from realizar_torch.cpu_kernels.int8_matmul import SUB_BLOCKS_OF_16
from realizar_torch.cpu_kernels.int8_panel import (
    FILLERS,
    OFFSETS,
    PANEL_BYTES,
    SCALE_BYTES,
)
from realizar_torch.cpu_kernels.int8_tile import TILE_ROWS
from realizar_torch.cpu_kernels.jit import jit
from realizar_torch.cpu_kernels.matrix_tiles import (
    add_product,
    load_tile,
    release_tiles,
    shape_tiles,
    store_tile,
    zero_tile,
)
from realizar_torch.cpu_kernels.memory import pointer_at, stack_alloc
from realizar_torch.cpu_kernels.simd import (
    F32x16,
    I32x16,
    bits_of_f32x16,
    call,
    load_f32x16,
    low_halves,
    splat_f32x16,
    store,
)
from realizar_torch.formats import get_packed_format

# Values of a row in one tile, of 64 bytes.
STEP = 32
# Panels of 16 rows as bf16 ``[weights / 2][16 rows][2]``.
_BF16_BYTES = 2 * PANEL_BYTES
_PANELS_BYTES = 2 * _BF16_BYTES
# Half of the last place that bf16 keeps: rounds to nearest, halves away from zero.
_HALF = 0x8000


@jit(device=True)
def bf16_into_panel(x, first_block, last_block, column, columns, panel):
    """Round blocks of 32 fp32 values, the first of which is at ``x``, into a column of a bf16 panel
    ``[width / 32][columns][32]``."""
    for block in range(first_block, last_block):
        source, target = x + 4 * STEP * (block - first_block), panel + (block * columns + column) * 2 * STEP
        for half in range(2):
            bits = bits_of_f32x16(load_f32x16(source, 64 * half))
            store(target, low_halves((bits + _HALF) >> 16), 32 * half)


@intrinsic(prefer_literal=True)
def _widen(typing_context, panel, scale, minimum, target):
    """Four weights of 16 rows at ``panel`` as bf16 pairs: ``scale * u + minimum``, both F32x16."""

    def generate(context, builder, signature, arguments):
        panel, scale, minimum, target = arguments
        words = builder.load(pointer_at(builder, I32x16.llvm, panel), align=64)

        def lanes(number):
            return ir.Constant(I32x16.llvm, [number] * I32x16.lanes)

        def rounded(index):
            byte = builder.lshr(words, lanes(8 * index)) if index else words
            byte = byte if index == 3 else builder.and_(byte, lanes(255))
            value = builder.uitofp(byte, F32x16.llvm)
            value = call(builder, "llvm.fmuladd.v16f32", F32x16.llvm, value, scale, minimum)
            return builder.add(builder.bitcast(value, I32x16.llvm), lanes(_HALF))

        for pair in range(2):
            low = builder.lshr(rounded(2 * pair), lanes(16))
            high = builder.and_(rounded(2 * pair + 1), lanes(0xFFFF0000))
            place = pointer_at(builder, I32x16.llvm, target, ir.IntType(64)(64 * pair))
            builder.store(builder.or_(low, high), place, align=64)

    return types.void(types.int64, F32x16, F32x16, types.int64), generate


def _widener(fmt):
    """``widen(panel, scales, weights, target)``: a panel of ``int8_panel.py`` as bf16."""
    sub, offset = 16 if fmt in SUB_BLOCKS_OF_16 else 32, OFFSETS.get(fmt)
    scale_bytes = 64 if offset else 128

    @jit(device=True)
    def widen(panel, scales, weights, target):
        for s in range(weights // sub):
            scale = load_f32x16(scales, scale_bytes * s)
            if offset:
                minimum = scale * -offset
            else:
                minimum = splat_f32x16(0) - load_f32x16(scales, scale_bytes * s + 64)
            for step in range(sub // 4):
                place = 16 * sub * s + 64 * step
                _widen(panel + place, scale, minimum, target + 2 * place)

    return widen


@jit(device=True)
def _multiply(x, x_stride, panels, steps, out, first):
    """fp32 out [32 columns][32 rows], or its sum with what is there unless ``first``, of two by two tiles."""
    row = 4 * TILE_ROWS
    below = out + 16 * row
    if first:
        zero_tile(0)
        zero_tile(1)
        zero_tile(2)
        zero_tile(3)
    else:
        load_tile(0, out, row)
        load_tile(1, out + 64, row)
        load_tile(2, below, row)
        load_tile(3, below + 64, row)
    for step in range(steps):
        load_tile(4, x + x_stride * step, 64)
        load_tile(5, x + x_stride * step + 1024, 64)
        load_tile(6, panels + 1024 * step, 64)
        load_tile(7, panels + _BF16_BYTES + 1024 * step, 64)
        add_product(0, 4, 6)
        add_product(1, 4, 7)
        add_product(2, 5, 6)
        add_product(3, 5, 7)
    store_tile(0, out, row)
    store_tile(1, out + 64, row)
    store_tile(2, below, row)
    store_tile(3, below + 64, row)


def bf16_tile_of(fmt: str) -> object:
    """The matmul of a format as a device function.

    ``tile(weight, row_bytes, rows, width, used, columns, x, out)``: up to 32 rows of ``width`` weights, the
    first at ``weight``, times the first ``used`` of the bf16 panel's ``columns``, a multiple of 32. ``out``:
    fp32 [columns][32], of which unused rows and columns may be written too.
    """
    fill, widen, block_size = FILLERS[fmt], _widener(fmt), get_packed_format(fmt).block_size
    panel_blocks = 256 // block_size

    @jit(device=True)
    def tile_of_format(weight, row_bytes, rows, width, used, columns, x, out):
        panel, scales = stack_alloc(PANEL_BYTES, 64), stack_alloc(SCALE_BYTES, 64)
        panels = stack_alloc(_PANELS_BYTES, 64)
        shape_tiles()
        for first_block in range(0, width // block_size, panel_blocks):
            last_block = min(first_block + panel_blocks, width // block_size)
            weights = (last_block - first_block) * block_size
            for half in range(2):
                start = min(16 * half, rows - 1)
                source, present = weight + start * row_bytes, min(rows - start, 16)
                fill(source, row_bytes, present, first_block, last_block, panel, scales)
                widen(panel, scales, weights, panels + _BF16_BYTES * half)
            here = x + first_block * block_size // STEP * columns * 64
            for column in range(0, used, 32):
                place = out + 4 * TILE_ROWS * column
                _multiply(here + 64 * column, 64 * columns, panels, weights // STEP, place, first_block == 0)
        release_tiles()

    return tile_of_format
