"""Three packed weights of different formats times many activation vectors, in one launch."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from realizar_torch.triton_kernels.configs import MatmulLaunch, choose_matmul
from realizar_torch.triton_kernels.grouped import GROUP, check_grouped
from realizar_torch.triton_kernels.launch import on_device, same_device, three_packed_rows, vector
from realizar_torch.triton_kernels.matmul import rows_of_one
from realizar_torch.triton_kernels.matvec import output_tensor


@triton.jit(do_not_specialize=["batch"])
def _matmul_qkv_kernel(
    w0, stride0, rows0, blocks0, w1, stride1, rows1, blocks1, w2, stride2, rows2, blocks2,
    values, scale, sums, batch, out, out_stride, bias,
    FMT0: tl.constexpr, PLANAR0: tl.constexpr, ALIGN0: tl.constexpr,
    FMT1: tl.constexpr, PLANAR1: tl.constexpr, ALIGN1: tl.constexpr,
    FMT2: tl.constexpr, PLANAR2: tl.constexpr, ALIGN2: tl.constexpr,
    N: tl.constexpr, ROW_WARPS: tl.constexpr, K_WARPS: tl.constexpr,
    HAS_BIAS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Programs 0 … do 16 ROW_WARPS rows of w0 each, the next ones of w1, the last ones of w2.

    Outputs (and the bias) of the three lie one after the other in every row of ``out``.
    """
    ROWS: tl.constexpr = 16 * ROW_WARPS
    pid, first_group = tl.program_id(0), tl.program_id(1) * N
    programs0 = tl.cdiv(rows0, ROWS)
    programs1 = tl.cdiv(rows1, ROWS)
    if pid < programs0:
        rows_of_one(
            w0, stride0, pid * ROWS, rows0, blocks0, values, scale, sums, first_group, batch, out, out_stride,
            bias, None,
            FMT0, PLANAR0, ALIGN0, N, ROW_WARPS, K_WARPS, HAS_BIAS, False, DEPENDENT,
        )  # fmt: skip
    elif pid < programs0 + programs1:
        rows_of_one(
            w1, stride1, (pid - programs0) * ROWS, rows1, blocks1, values, scale, sums, first_group, batch,
            out + rows0, out_stride, bias + rows0 if HAS_BIAS else bias, None,
            FMT1, PLANAR1, ALIGN1, N, ROW_WARPS, K_WARPS, HAS_BIAS, False, DEPENDENT,
        )  # fmt: skip
    else:
        rows_of_one(
            w2, stride2, (pid - programs0 - programs1) * ROWS, rows2, blocks2, values, scale, sums,
            first_group, batch, out + rows0 + rows1, out_stride, bias + rows0 + rows1 if HAS_BIAS else bias,
            None,
            FMT2, PLANAR2, ALIGN2, N, ROW_WARPS, K_WARPS, HAS_BIAS, False, DEPENDENT,
        )  # fmt: skip


def matmul_qkv(
    values: torch.Tensor,
    scale: torch.Tensor,
    sums: torch.Tensor,
    batch: int,
    weights: Sequence[torch.Tensor],
    fmts: Sequence[str],
    in_features: int,
    bias: torch.Tensor | None = None,
    *,
    layouts: Sequence[str],
    launch: MatmulLaunch | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    dependent: bool = False,
) -> torch.Tensor:
    """``qkv.qkv_int8`` for ``batch`` grouped activation vectors, all tiles of one launch shape."""
    packed = three_packed_rows(weights, fmts, in_features, layouts)
    for item in packed:
        check_grouped(values, scale, sums, batch, item.blocks * item.fmt.block_size)
    device = same_device(values, scale, sums, *weights, bias, out)
    total = sum(item.rows for item in packed)
    result = output_tensor(out, (batch, total), out_dtype, device)
    if result.numel() == 0:
        return result
    bias = vector(bias, total, "bias")
    shape = launch or choose_matmul(total, in_features, batch)
    arguments: list[object] = []
    constants: dict[str, object] = {}
    for i, item in enumerate(packed):
        arguments += [item.data, item.stride, item.rows, item.blocks]
        constants |= {f"FMT{i}": item.fmt.name, f"PLANAR{i}": item.planar, f"ALIGN{i}": item.align}
    grid = (
        sum(triton.cdiv(item.rows, 16 * shape.row_warps) for item in packed),
        triton.cdiv(batch, GROUP * shape.columns),
    )
    with on_device(device):
        _matmul_qkv_kernel[grid](
            *arguments, values, scale, sums, batch, result, total, bias,
            **constants, N=shape.columns, ROW_WARPS=shape.row_warps,
            K_WARPS=shape.k_warps, HAS_BIAS=bias is not None, DEPENDENT=dependent,
            num_warps=shape.warps, maxnreg=shape.registers, enable_fp_fusion=True,
            launch_pdl=dependent,
        )  # fmt: skip
    return result
