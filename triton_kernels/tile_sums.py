"""Sums of tensor-core products of 16-row tiles with up to 8 N activation vectors: the matmul's loop.

The warps of a program share out its rows and the steps of a row; every thread keeps its warp's partial sums
in registers (4 of each tile and eight columns), and one pass over the warps of the same rows adds them at the
end, always in one order.
"""

import triton
import triton.language as tl

from realizar_torch.triton_kernels.blocks import has_minimum, run_units
from realizar_torch.triton_kernels.fragments import load_fragment, piece, piece_of, row_of, step_blocks
from realizar_torch.triton_kernels.primitives import wait_for_predecessor
from realizar_torch.triton_kernels.tensor_core import load_vector, multiply_halves


@triton.jit
def tile_rows(
    weight, row_stride, first_row, n_rows, ALIGN: tl.constexpr, ROW_WARPS: tl.constexpr, K_WARPS: tl.constexpr
):  # fmt: skip
    """Byte pointers ``[threads]`` of rows g and g + 8 of each warp's tile. Rows past the end read the last
    one, and are not stored.
    """
    lane = tl.arange(0, 32 * ROW_WARPS * K_WARPS) % (32 * ROW_WARPS)
    row = first_row + lane // 32 * 16 + lane % 32 // 4
    stride = tl.multiple_of(row_stride, ALIGN)
    upper = weight + tl.minimum(row, n_rows - 1).to(tl.int64) * stride
    return upper, weight + tl.minimum(row + 8, n_rows - 1).to(tl.int64) * stride


@triton.jit
def _floats(pointer):
    """Two fp32 at each pointer."""
    bits = load_vector(pointer, 2, 8)
    return bits[0].to(tl.float32, bitcast=True), bits[1].to(tl.float32, bitcast=True)


@triton.jit
def _sums_of_unit(sums, t, FMT: tl.constexpr):
    """The sums of the unit's four groups of 16, a pair each, of the column whose 16 begin at ``sums``."""
    if run_units(FMT) == 2:
        words = ()
        for plane in tl.static_range(4):
            words = words + load_vector(sums + 2 * (t // 2 * 8 + 2 * plane + t % 2), 1, 4)
        return words
    else:
        return load_vector(sums + 8 * t, 4, 16)


@triton.jit
def _registers(values, START: tl.constexpr):
    return values[START], values[START + 1], values[START + 2], values[START + 3]


@triton.jit
def _products(raw, rows, t, values, STEP_VALUES, N: tl.constexpr, FMT: tl.constexpr):
    """Σ a x of a step: 4 registers for each tile of each of N groups. ``values``: the step's of group 0, for
    column g; ``STEP_VALUES``: from one group to the next.
    """
    TILES: tl.constexpr = len(raw) // 2
    zero = tl.zeros(t.shape, tl.float32)
    total = ()
    for _ in tl.static_range(N * TILES * 4):
        total = total + (zero,)
    for c in tl.static_range(8):
        u, i = piece_of(t, c, FMT)
        at = values + (i * 32 + u) * 8
        right = ()
        for n in tl.static_range(N):
            right = right + (load_vector(at + STEP_VALUES[n], 4, 16),)
        left = ()
        for tile in tl.static_range(TILES):
            upper = piece(raw[2 * tile], rows[2 * tile][2], t, c, FMT)
            lower = piece(raw[2 * tile + 1], rows[2 * tile + 1][2], t, c, FMT)
            left = left + ((upper[0], lower[0], upper[1], lower[1], upper[2], lower[2], upper[3], lower[3]),)
        updated = ()
        for n in tl.static_range(N):
            for tile in tl.static_range(TILES):
                a, b = left[tile], right[n]
                sums = _registers(total, 4 * (n * TILES + tile))
                sums = multiply_halves((a[0], a[1], a[2], a[3]), (b[0], b[1]), sums)
                updated = updated + multiply_halves((a[4], a[5], a[6], a[7]), (b[2], b[3]), sums)
        total = updated
    return total


@triton.jit
def _minimums(upper, lower, sums):
    """Σ m Σ x of a step and tile: four registers."""
    zero = tl.zeros(upper[0].shape, tl.float32)
    total = (zero, zero, zero, zero)
    for half in tl.static_range(2):
        left = (upper[2 * half], lower[2 * half], upper[2 * half + 1], lower[2 * half + 1])
        total = multiply_halves(left, (sums[2 * half], sums[2 * half + 1]), total)
    return total


@triton.jit
def _add_step(
    total, raw, step, steps, values, scale, sums, groups, first_group,
    N: tl.constexpr, FMT: tl.constexpr,
):  # fmt: skip
    """``total`` (N x TILES x 4 registers) plus the step of ``raw`` (2 TILES rows), if it has one."""
    TILES: tl.constexpr = len(raw) // 2
    lane = tl.arange(0, step.shape[0]) % 32
    g, t = lane // 4, lane % 4
    rows = ()
    for r in tl.static_range(2 * TILES):
        rows = rows + (row_of(raw[r], t, FMT),)
    last = tl.minimum(step, steps - 1)
    offsets = ()
    for n in tl.static_range(N):
        # a group past the last one reads the last one, and is not stored
        offsets = offsets + ((tl.minimum(first_group + n, groups - 1) * steps + last),)
    starts = ()
    for n in tl.static_range(N):
        starts = starts + (offsets[n].to(tl.int64) * 2048,)
    products = _products(raw, rows, t, values + g * 32, starts, N, FMT)
    updated = ()
    for n in tl.static_range(N):
        xe, xo = _floats(scale + offsets[n] * 8 + 2 * t)
        xe, xo = tl.where(step < steps, xe, 0.0), tl.where(step < steps, xo, 0.0)
        if has_minimum(FMT):
            unit_sums = _sums_of_unit(sums + (offsets[n] * 8 + g) * 32, t, FMT)
        for tile in tl.static_range(TILES):
            above, below = rows[2 * tile], rows[2 * tile + 1]
            p0, p1, p2, p3 = _registers(products, 4 * (n * TILES + tile))
            p0, p1, p2, p3 = p0 * above[0], p1 * above[0], p2 * below[0], p3 * below[0]
            if has_minimum(FMT):
                low = _minimums(above[3], below[3], unit_sums)
                p0, p1 = p0 - low[0] * above[1], p1 - low[1] * above[1]
                p2, p3 = p2 - low[2] * below[1], p3 - low[3] * below[1]
            c0, c1, c2, c3 = _registers(total, 4 * (n * TILES + tile))
            updated = updated + (
                tl.fma(p0, xe, c0), tl.fma(p1, xo, c1), tl.fma(p2, xe, c2), tl.fma(p3, xo, c3)
            )  # fmt: skip
    return updated


@triton.jit
def _load_step(rows, step, blocks, t, FMT: tl.constexpr, PLANAR: tl.constexpr, ALIGN: tl.constexpr):
    raw = ()
    for r in tl.static_range(len(rows)):
        raw = raw + (load_fragment(rows[r], step, blocks, t, FMT, PLANAR, ALIGN),)
    return raw


@triton.jit
def tile_sums(
    rows, blocks, values, scale, sums, first_group, groups,
    FMT: tl.constexpr, PLANAR: tl.constexpr, ALIGN: tl.constexpr, N: tl.constexpr, ROW_WARPS: tl.constexpr,
    K_WARPS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """rows · activations of N groups (grouped.py): N x tiles x 4 tensors ``[threads]``, not summed over
    warps.

    rows: two pointers per tile. Nothing is loaded ahead: many warps hide more, and registers for a step are
    half of what they have.
    """
    TILES: tl.constexpr = len(rows) // 2
    steps = tl.cdiv(blocks, step_blocks(FMT))
    thread = tl.arange(0, 32 * ROW_WARPS * K_WARPS)
    first, t = thread // (32 * ROW_WARPS), thread % 4
    wait_for_predecessor(DEPENDENT)
    total = ()
    for _ in tl.static_range(N * TILES * 4):
        total = total + (tl.zeros([32 * ROW_WARPS * K_WARPS], tl.float32),)
    for start in range(0, steps, K_WARPS):
        raw = _load_step(rows, tl.minimum(first + start, steps - 1), blocks, t, FMT, PLANAR, ALIGN)
        total = _add_step(total, raw, first + start, steps, values, scale, sums, groups, first_group, N, FMT)
    return total


@triton.jit
def over_warps(total, n: tl.constexpr, TILES: tl.constexpr, ROW_WARPS: tl.constexpr, K_WARPS: tl.constexpr):
    """The sums over warps of columns 8 n …: ``[32 ROW_WARPS, 2, 2]`` for a tile, with a last axis for two.

    Element (32 w + 4 g + t, i, c) is row g + 8 i of warp w, column 2 t + c.
    """
    START: tl.constexpr = 4 * n * TILES
    sums = _tile(total, START)
    if TILES == 2:
        sums = tl.reshape(tl.join(sums, _tile(total, START + 4)), [K_WARPS, 32 * ROW_WARPS, 2, 2, 2])
    else:
        sums = tl.reshape(sums, [K_WARPS, 32 * ROW_WARPS, 2, 2])
    return tl.sum(sums, 0)


@triton.jit
def _tile(total, START: tl.constexpr):
    return tl.join(tl.join(total[START], total[START + 2]), tl.join(total[START + 1], total[START + 3]))
