"""act(x·Gateᵀ) * (x·Upᵀ) with the activations in registers: tiles of both weights stream past in turn."""

import torch
import triton
import triton.language as tl

from realizar_torch.errors import FormatError
from realizar_torch.triton_kernels.blocks import block_bytes
from realizar_torch.triton_kernels.configs import StationaryLaunch
from realizar_torch.triton_kernels.exchange import exchange_buffer, sum_over_warps
from realizar_torch.triton_kernels.fragments import step_blocks
from realizar_torch.triton_kernels.gate_up import activate
from realizar_torch.triton_kernels.held_columns import hold_columns
from realizar_torch.triton_kernels.launch import PackedRows
from realizar_torch.triton_kernels.primitives import cast, release_successor, wait_for_predecessor
from realizar_torch.triton_kernels.stationary import grid_of
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
def _stationary_gate_up_kernel(
    gate, gate_stride, up, up_stride, n_rows, blocks, xq, xscale, xsums, batch, out,
    FMT: tl.constexpr, PLANAR: tl.constexpr, ALIGN: tl.constexpr, N: tl.constexpr, WARPS: tl.constexpr,
    DEPTH: tl.constexpr, ACTIVATION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Program (c, 0, p): columns 8 N c …, the p-th share of the tiles; out[column, row] = act(gate) * up."""
    thread = tl.arange(0, 32 * WARPS)
    first = thread // 32 * step_blocks(FMT)
    tiles = (n_rows + 15) // 16
    begin = tl.program_id(2) * tiles // tl.num_programs(2)
    end = (tl.program_id(2) + 1) * tiles // tl.num_programs(2)
    gate_stride = tl.multiple_of(gate_stride, ALIGN).to(tl.int64)
    up_stride = tl.multiple_of(up_stride, ALIGN).to(tl.int64)
    gates = tile_rows(gate, gate_stride, 0, n_rows, ALIGN, WARPS)
    ups = tile_rows(up, up_stride, 0, n_rows, ALIGN, WARPS)
    gate_shares = shares_of(gate, gate_stride, blocks * block_bytes(FMT), n_rows, WARPS)
    up_shares = shares_of(up, up_stride, blocks * block_bytes(FMT), n_rows, WARPS)
    buffer = exchange_buffer(thread, N, WARPS)
    raw = load_tile(gates, first_row_of(begin, n_rows) * gate_stride, first, blocks, FMT, PLANAR, ALIGN)
    prefetch_tile(up_shares, first_row_of(begin, n_rows) * up_stride)
    for tile in range(begin + 1, tl.minimum(begin + DEPTH, end)):
        prefetch_tile(gate_shares, first_row_of(tile, n_rows) * gate_stride)
        prefetch_tile(up_shares, first_row_of(tile, n_rows) * up_stride)
    wait_for_predecessor(DEPENDENT)
    held = hold_columns(
        xq, xscale, xsums, tl.program_id(0) * N, tl.cdiv(batch, 8), first, blocks, FMT, N, WARPS
    )
    own_row, at, own = result_places(batch, n_rows, N, WARPS)
    for tile in range(begin, end):
        if tile + DEPTH < end:
            prefetch_tile(gate_shares, first_row_of(tile + DEPTH, n_rows) * gate_stride)
            prefetch_tile(up_shares, first_row_of(tile + DEPTH, n_rows) * up_stride)
        first_row = first_row_of(tile, n_rows)
        following = first_row_of(tl.minimum(tile + 1, end - 1), n_rows)
        step = multiply_tile(raw[0], raw[1], held, blocks, FMT, N, WARPS)
        raw = load_tile(ups, first_row * up_stride, first, blocks, FMT, PLANAR, ALIGN)
        gated = sum_over_warps(scale_tile(step, held, FMT, N, WARPS), buffer, 0, N, WARPS)
        step = multiply_tile(raw[0], raw[1], held, blocks, FMT, N, WARPS)
        raw = load_tile(gates, following * gate_stride, first, blocks, FMT, PLANAR, ALIGN)
        value = sum_over_warps(scale_tile(step, held, FMT, N, WARPS), buffer, 1, N, WARPS)
        value = activate(gated, ACTIVATION) * value
        row = first_row + own_row
        inside = own & (row >= 16 * tile) & (row < n_rows)
        tl.store(out + at + first_row, cast(value, out.dtype.element_ty), mask=inside)
    release_successor(DEPENDENT)


def launch_stationary_gate_up(
    q: torch.Tensor,
    scale: torch.Tensor,
    sums: torch.Tensor,
    gate: PackedRows,
    up: PackedRows,
    align: int,
    activation: str,
    result: torch.Tensor,
    shape: StationaryLaunch,
    dependent: bool,
) -> None:
    """``result [batch, rows]`` of checked arguments: see ``matmul_gate_up.matmul_gate_up_int8``."""
    grid = grid_of(gate, result.shape[0], shape)
    if grid[1] > 1:
        raise FormatError(
            f"{shape} does rows of {256 * shape.warps} weights at most; these have {gate.in_features}: use a "
            "MatmulLaunch"
        )
    _stationary_gate_up_kernel[grid](
        gate.data, gate.stride, up.data, up.stride, gate.rows, gate.blocks, q, scale, sums, result.shape[0],
        result,
        FMT=gate.fmt.name, PLANAR=gate.planar, ALIGN=align, N=shape.columns, WARPS=shape.warps,
        DEPTH=shape.depth, ACTIVATION=activation, DEPENDENT=dependent,
        num_warps=shape.warps, maxnreg=shape.registers, enable_fp_fusion=True, launch_pdl=dependent,
    )  # fmt: skip
