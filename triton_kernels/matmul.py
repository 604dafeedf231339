"""Packed weight times many activation vectors on tensor cores: y = x̂·Wᵀ (+ bias) (+ residual), fp16 x̂."""

import torch
import triton
import triton.language as tl

from realizar_torch.triton_kernels.configs import MatmulLaunch, choose_matmul
from realizar_torch.triton_kernels.grouped import GROUP, check_grouped
from realizar_torch.triton_kernels.launch import on_device, packed_rows, same_device, vector
from realizar_torch.triton_kernels.matvec import output_tensor, residual_of
from realizar_torch.triton_kernels.primitives import cast, release_successor
from realizar_torch.triton_kernels.tile_sums import over_warps, tile_rows, tile_sums


@triton.jit
def store_tile(
    sums, first_row, n_rows, first_column, columns, out, out_stride, bias, residual,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """out[column, row] = sums + bias[row] + residual[column, row]; sums as ``over_warps`` gives them."""
    thread = tl.arange(0, sums.shape[0])[:, None, None]
    row = first_row + thread // 32 * 16 + thread % 32 // 4 + 8 * tl.arange(0, 2)[None, :, None]
    column = first_column + 2 * (thread % 4) + tl.arange(0, 2)[None, None, :]
    inside = (row < n_rows) & (column < columns)
    at = column.to(tl.int64) * out_stride + row
    if HAS_BIAS:
        sums = sums + tl.load(bias + row, mask=row < n_rows, other=0).to(tl.float32)
    if HAS_RESIDUAL:
        sums = sums + tl.load(residual + at, mask=inside, other=0).to(tl.float32)
    tl.store(out + at, cast(sums, out.dtype.element_ty), mask=inside)


@triton.jit
def rows_of_one(
    weight, row_stride, first_row, n_rows, blocks, values, scale, sums, first_group, batch, out, out_stride,
    bias, residual,
    FMT: tl.constexpr, PLANAR: tl.constexpr, ALIGN: tl.constexpr, N: tl.constexpr, ROW_WARPS: tl.constexpr,
    K_WARPS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """16 ROW_WARPS rows of one weight times 8 N columns, stored."""
    rows = tile_rows(weight, row_stride, first_row, n_rows, ALIGN, ROW_WARPS, K_WARPS)
    total = tile_sums(
        rows, blocks, values, scale, sums, first_group, tl.cdiv(batch, 8),
        FMT, PLANAR, ALIGN, N, ROW_WARPS, K_WARPS, DEPENDENT,
    )  # fmt: skip
    release_successor(DEPENDENT)
    for n in tl.static_range(N):
        store_tile(
            over_warps(total, n, 1, ROW_WARPS, K_WARPS), first_row, n_rows, 8 * (first_group + n), batch,
            out, out_stride, bias, residual, HAS_BIAS, HAS_RESIDUAL,
        )  # fmt: skip


@triton.jit(do_not_specialize=["batch"])
def _matmul_kernel(
    weight, row_stride, n_rows, blocks, values, scale, sums, batch, out, out_stride, bias, residual,
    FMT: tl.constexpr, PLANAR: tl.constexpr, ALIGN: tl.constexpr, N: tl.constexpr, ROW_WARPS: tl.constexpr,
    K_WARPS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program: 16 ROW_WARPS weight rows × 8 N vectors (bytes: see fragments.py)."""
    rows_of_one(
        weight, row_stride, tl.program_id(0) * (16 * ROW_WARPS), n_rows, blocks, values, scale, sums,
        tl.program_id(1) * N, batch, out, out_stride, bias, residual,
        FMT, PLANAR, ALIGN, N, ROW_WARPS, K_WARPS, HAS_BIAS, HAS_RESIDUAL, DEPENDENT,
    )  # fmt: skip


def matmul(
    values: torch.Tensor,
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
    """``matvec.matvec_int8`` for ``batch`` grouped activation vectors of fp16 (grouped.py)."""
    packed = packed_rows(weight, fmt, in_features, layout)
    check_grouped(values, scale, sums, batch, packed.blocks * packed.fmt.block_size)
    device = same_device(values, scale, sums, weight, bias, residual, out)
    dtype = residual.dtype if residual is not None else out_dtype
    result = output_tensor(out, (batch, packed.rows), dtype, device)
    if result.numel() == 0:
        return result
    bias = vector(bias, packed.rows, "bias")
    residual = residual_of(residual, result)
    shape = launch or choose_matmul(packed.rows, in_features, batch)
    grid = (
        triton.cdiv(packed.rows, 16 * shape.row_warps),
        triton.cdiv(batch, GROUP * shape.columns),
    )
    with on_device(device):
        _matmul_kernel[grid](
            packed.data, packed.stride, packed.rows, packed.blocks, values, scale, sums, batch, result,
            packed.rows, bias, residual,
            FMT=fmt, PLANAR=packed.planar, ALIGN=packed.align, N=shape.columns,
            ROW_WARPS=shape.row_warps, K_WARPS=shape.k_warps,
            HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None,
            DEPENDENT=dependent, num_warps=shape.warps, maxnreg=shape.registers, enable_fp_fusion=True,
            launch_pdl=dependent,
        )  # fmt: skip
    return result
