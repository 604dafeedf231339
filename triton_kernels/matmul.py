"""Packed weight times many activation vectors on tensor cores: y = x̂·Wᵀ (+ bias) (+ residual), int8 x̂."""

import torch
import triton
import triton.language as tl

from realizar_torch.triton_kernels.configs import MatmulLaunch, choose_matmul
from realizar_torch.triton_kernels.fragments import step_blocks
from realizar_torch.triton_kernels.grouped import GROUP, check_grouped
from realizar_torch.triton_kernels.launch import PackedRows, on_device, packed_rows, same_device, vector
from realizar_torch.triton_kernels.matvec import output_tensor, residual_of
from realizar_torch.triton_kernels.primitives import cast, release_successor
from realizar_torch.triton_kernels.tile_sums import over_warps, tile_rows, tile_sums


@triton.jit
def store_tile(
    sums, first_row, n_rows, first_column, columns, out, out_stride, bias, residual,
    TILES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """out[column, row] = sums + bias[row] + residual[column, row]; sums as ``over_warps`` gives them."""
    lane = tl.arange(0, 32)[:, None, None]
    row = first_row + lane // 4 + 8 * tl.arange(0, 2)[None, :, None]
    column = first_column + 2 * (lane % 4) + tl.arange(0, 2)[None, None, :]
    if TILES == 2:
        row = tl.expand_dims(row, 3) + 16 * tl.arange(0, 2)[None, None, None, :]
        column = tl.expand_dims(column, 3)
    inside = (row < n_rows) & (column < columns)
    at = column.to(tl.int64) * out_stride + row
    if HAS_BIAS:
        sums = sums + tl.load(bias + row, mask=row < n_rows, other=0).to(tl.float32)
    if HAS_RESIDUAL:
        sums = sums + tl.load(residual + at, mask=inside, other=0).to(tl.float32)
    tl.store(out + at, cast(sums, out.dtype.element_ty), mask=inside)


@triton.jit
def rows_of_one(
    weight, row_stride, first_row, n_rows, blocks, xq, xscale, xsums, first_group, batch, out, out_stride,
    bias, residual,
    FMT: tl.constexpr, PLANAR: tl.constexpr, ALIGN: tl.constexpr, N: tl.constexpr, TILES: tl.constexpr,
    WARPS: tl.constexpr, WHOLE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """16 TILES rows of one weight times 8 N columns, stored."""
    rows = ()
    for tile in tl.static_range(TILES):
        rows = rows + tile_rows(weight, row_stride, first_row + 16 * tile, n_rows, ALIGN, WARPS)
    total = tile_sums(
        rows, blocks, xq, xscale, xsums, first_group, tl.cdiv(batch, 8),
        FMT, PLANAR, ALIGN, N, WARPS, WHOLE, DEPENDENT,
    )  # fmt: skip
    release_successor(DEPENDENT)
    for n in tl.static_range(N):
        store_tile(
            over_warps(total, n, TILES, WARPS), first_row, n_rows, 8 * (first_group + n), batch,
            out, out_stride, bias, residual, TILES, HAS_BIAS, HAS_RESIDUAL,
        )  # fmt: skip


@triton.jit(do_not_specialize=["batch"])
def _matmul_int8_kernel(
    weight, row_stride, n_rows, blocks, xq, xscale, xsums, batch, out, out_stride, bias, residual,
    FMT: tl.constexpr, PLANAR: tl.constexpr, ALIGN: tl.constexpr, N: tl.constexpr, TILES: tl.constexpr,
    WARPS: tl.constexpr, WHOLE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program: 16 TILES weight rows × 8 N int8 vectors (bytes: see fragments.py)."""
    rows_of_one(
        weight, row_stride, tl.program_id(0) * (16 * TILES), n_rows, blocks, xq, xscale, xsums,
        tl.program_id(1) * N, batch, out, out_stride, bias, residual,
        FMT, PLANAR, ALIGN, N, TILES, WARPS, WHOLE, HAS_BIAS, HAS_RESIDUAL, DEPENDENT,
    )  # fmt: skip


def matmul_int8(
    q: torch.Tensor,
    scale: torch.Tensor,
    sums: torch.Tensor,
    batch: int,
    weight: torch.Tensor,
    fmt: str,
    in_features: int,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    layout: str = "ggml",
    launch: MatmulLaunch | None = None,
    dependent: bool = False,
) -> torch.Tensor:
    """``matvec.matvec_int8`` for ``batch`` grouped activation vectors (grouped.py)."""
    packed = packed_rows(weight, fmt, in_features, layout)
    check_grouped(q, scale, sums, batch, packed.blocks * packed.fmt.block_size)
    device = same_device(q, scale, sums, weight, bias, residual, out)
    dtype = residual.dtype if residual is not None else out_dtype
    result = output_tensor(out, (batch, packed.rows), dtype, device)
    if result.numel() == 0:
        return result
    bias = vector(bias, packed.rows, "bias")
    residual = residual_of(residual, result)
    shape = launch or choose_matmul(fmt, packed.rows, in_features, batch)
    grid = (triton.cdiv(packed.rows, 16 * shape.tiles), triton.cdiv(batch, GROUP * shape.columns))
    with on_device(device):
        _matmul_int8_kernel[grid](
            packed.data, packed.stride, packed.rows, packed.blocks, q, scale, sums, batch, result,
            packed.rows, bias, residual,
            FMT=fmt, PLANAR=packed.planar, ALIGN=packed.align, N=shape.columns, TILES=shape.tiles,
            WARPS=shape.warps, WHOLE=whole_steps(packed, shape.warps),
            HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None,
            DEPENDENT=dependent, num_warps=shape.warps, enable_fp_fusion=True, launch_pdl=dependent,
        )  # fmt: skip
    return result


def whole_steps(packed: PackedRows, warps: int) -> bool:
    """Whether a row gives every warp the same number of steps, none of them past its end."""
    return packed.blocks % (step_blocks(packed.fmt.name) * warps) == 0
