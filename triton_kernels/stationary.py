"""Tensor-core products whose activations stay in registers, while tiles of 16 weight rows stream past them.

A warp owns one step (256 weights) of every row and 8 N columns. It reads their int8 activations, scales and
sums once; what is left per tile is the tile's own bytes, the next ones on their way, and one exchange between
the warps. Rows of more steps than a program has warps are split over programs; their partial results are
added by a second kernel, always in one order.
"""

import torch
import triton
import triton.language as tl

from realizar_torch.triton_kernels.blocks import block_bytes
from realizar_torch.triton_kernels.configs import StationaryLaunch
from realizar_torch.triton_kernels.exchange import exchange_buffer, sum_over_warps
from realizar_torch.triton_kernels.fragments import step_blocks
from realizar_torch.triton_kernels.held_columns import hold_columns
from realizar_torch.triton_kernels.launch import PackedRows
from realizar_torch.triton_kernels.primitives import cast, release_successor, wait_for_predecessor
from realizar_torch.triton_kernels.stationary_tile import (
    first_row_of,
    load_tile,
    multiply_tile,
    prefetch_tile,
    result_places,
    scale_tile,
    shares_of,
)
from realizar_torch.triton_kernels.tile_sums import tile_rows


@triton.jit(do_not_specialize=["batch"])
def _stationary_kernel(
    weight, row_stride, n_rows, blocks, xq, xscale, xsums, batch, out, bias, residual,
    FMT: tl.constexpr, PLANAR: tl.constexpr, ALIGN: tl.constexpr, N: tl.constexpr, WARPS: tl.constexpr,
    DEPTH: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Program (c, s, p): columns 8 N c …, steps WARPS s …, the p-th share of the tiles → out[s, column, row].

    Formula and bytes: fragments.py. bias and residual only where one program has the whole row.
    """
    thread = tl.arange(0, 32 * WARPS)
    first = (tl.program_id(1) * WARPS + thread // 32) * step_blocks(FMT)
    tiles = (n_rows + 15) // 16
    begin = tl.program_id(2) * tiles // tl.num_programs(2)
    end = (tl.program_id(2) + 1) * tiles // tl.num_programs(2)
    stride = tl.multiple_of(row_stride, ALIGN).to(tl.int64)
    rows = tile_rows(weight, row_stride, 0, n_rows, ALIGN, WARPS)
    shares = shares_of(weight, stride, blocks * block_bytes(FMT), n_rows, WARPS)
    buffer = exchange_buffer(thread, N, WARPS)
    raw = load_tile(rows, first_row_of(begin, n_rows) * stride, first, blocks, FMT, PLANAR, ALIGN)
    for tile in range(begin + 1, tl.minimum(begin + DEPTH, end)):
        prefetch_tile(shares, first_row_of(tile, n_rows) * stride)
    wait_for_predecessor(DEPENDENT)
    held = hold_columns(
        xq, xscale, xsums, tl.program_id(0) * N, tl.cdiv(batch, 8), first, blocks, FMT, N, WARPS
    )

    own_row, at, own = result_places(batch, n_rows, N, WARPS)
    out += tl.program_id(1).to(tl.int64) * batch * n_rows
    for tile in range(begin, end):
        if tile + DEPTH < end:
            prefetch_tile(shares, first_row_of(tile + DEPTH, n_rows) * stride)
        step = multiply_tile(raw[0], raw[1], held, blocks, FMT, N, WARPS)
        # into the registers of the bytes that have just been used, while their products are scaled
        following = first_row_of(tl.minimum(tile + 1, end - 1), n_rows)
        raw = load_tile(rows, following * stride, first, blocks, FMT, PLANAR, ALIGN)
        sums = sum_over_warps(scale_tile(step, held, FMT, N, WARPS), buffer, tile, N, WARPS)
        first_row = first_row_of(tile, n_rows)
        row = first_row + own_row
        inside = own & (row >= 16 * tile) & (row < n_rows)
        if HAS_BIAS:
            sums = sums + tl.load(bias + row, mask=inside, other=0).to(tl.float32)
        if HAS_RESIDUAL:
            sums = sums + tl.load(residual + at + first_row, mask=inside, other=0).to(tl.float32)
        tl.store(out + at + first_row, cast(sums, out.dtype.element_ty), mask=inside)
    release_successor(DEPENDENT)


@triton.jit
def _add_splits_kernel(
    partial, n_rows, size, out, bias, residual,
    SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, DEPENDENT: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """out = Σ_s partial[s] + bias[row] + residual."""
    at = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    inside = at < size
    wait_for_predecessor(DEPENDENT)
    sums = tl.load(partial + at, mask=inside, other=0)
    for s in tl.static_range(1, SPLITS):
        sums += tl.load(partial + s * size + at, mask=inside, other=0)
    release_successor(DEPENDENT)
    if HAS_BIAS:
        sums += tl.load(bias + at % n_rows, mask=inside, other=0).to(tl.float32)
    if HAS_RESIDUAL:
        sums += tl.load(residual + at, mask=inside, other=0).to(tl.float32)
    tl.store(out + at, cast(sums, out.dtype.element_ty), mask=inside)


def grid_of(packed: PackedRows, batch: int, shape: StationaryLaunch) -> tuple[int, int, int]:
    """(groups of columns, splits of K, shares of the rows): what is resident at a time, no share empty."""
    steps = triton.cdiv(packed.blocks * packed.fmt.block_size, 256)
    splits, groups = triton.cdiv(steps, shape.warps), triton.cdiv(batch, 8 * shape.columns)
    return groups, splits, min(triton.cdiv(packed.rows, 16), max(1, shape.programs // (splits * groups)))


def launch_stationary(
    q: torch.Tensor,
    scale: torch.Tensor,
    sums: torch.Tensor,
    packed: PackedRows,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    result: torch.Tensor,
    shape: StationaryLaunch,
    dependent: bool,
) -> None:
    """``result [batch, rows]`` of checked arguments: see ``matmul.matmul_int8``."""
    batch, grid = result.shape[0], grid_of(packed, result.shape[0], shape)
    splits, whole = grid[1], grid[1] == 1
    out = result if whole else result.new_empty((splits, *result.shape), dtype=torch.float32)
    has_bias, has_residual = bias is not None, residual is not None
    _stationary_kernel[grid](
        packed.data, packed.stride, packed.rows, packed.blocks, q, scale, sums, batch, out,
        bias if whole else None, residual if whole else None,
        FMT=packed.fmt.name, PLANAR=packed.planar, ALIGN=packed.align, N=shape.columns,
        WARPS=shape.warps, DEPTH=shape.depth,
        HAS_BIAS=whole and has_bias, HAS_RESIDUAL=whole and has_residual, DEPENDENT=dependent,
        num_warps=shape.warps, maxnreg=shape.registers, enable_fp_fusion=True, launch_pdl=dependent,
    )  # fmt: skip
    if not whole:
        _add_splits_kernel[(triton.cdiv(result.numel(), 512),)](
            out, packed.rows, result.numel(), result, bias, residual,
            SPLITS=splits, HAS_BIAS=has_bias, HAS_RESIDUAL=has_residual, DEPENDENT=dependent, CHUNK=512,
            num_warps=4, enable_fp_fusion=True, launch_pdl=dependent,
        )  # fmt: skip
