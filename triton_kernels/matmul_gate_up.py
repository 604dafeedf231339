"""act(x·Gateᵀ) * (x·Upᵀ) of many activation vectors on tensor cores, in one launch."""

import torch
import triton
import triton.language as tl

from realizar_torch.triton_kernels.configs import MatmulLaunch, choose_matmul
from realizar_torch.triton_kernels.gate_up import activate, check_activation, gate_up_pair
from realizar_torch.triton_kernels.grouped import GROUP, check_grouped
from realizar_torch.triton_kernels.launch import on_device, same_device
from realizar_torch.triton_kernels.matmul import store_tile
from realizar_torch.triton_kernels.matvec import output_tensor
from realizar_torch.triton_kernels.primitives import release_successor
from realizar_torch.triton_kernels.tile_sums import over_warps, tile_rows, tile_sums


@triton.jit(do_not_specialize=["batch"])
def _matmul_gate_up_kernel(
    gate, gate_stride, up, up_stride, n_rows, blocks, values, scale, sums, batch, out,
    FMT: tl.constexpr, PLANAR: tl.constexpr, ALIGN: tl.constexpr, N: tl.constexpr,
    ROW_WARPS: tl.constexpr, K_WARPS: tl.constexpr, ACTIVATION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program: 16 ROW_WARPS rows of gate, the same of up × 8 N vectors; out[m, rows] = act(gate) * up."""
    first_row, first_group = tl.program_id(0) * (16 * ROW_WARPS), tl.program_id(1) * N
    rows = tile_rows(gate, gate_stride, first_row, n_rows, ALIGN, ROW_WARPS, K_WARPS)
    rows = rows + tile_rows(up, up_stride, first_row, n_rows, ALIGN, ROW_WARPS, K_WARPS)
    total = tile_sums(
        rows, blocks, values, scale, sums, first_group, tl.cdiv(batch, 8),
        FMT, PLANAR, ALIGN, N, ROW_WARPS, K_WARPS, DEPENDENT,
    )  # fmt: skip
    release_successor(DEPENDENT)
    for n in tl.static_range(N):
        gates, ups = tl.split(over_warps(total, n, 2, ROW_WARPS, K_WARPS))
        store_tile(
            activate(gates, ACTIVATION) * ups, first_row, n_rows, 8 * (first_group + n), batch, out, n_rows,
            None, None, False, False,
        )  # fmt: skip


def matmul_gate_up(
    values: torch.Tensor,
    scale: torch.Tensor,
    sums: torch.Tensor,
    batch: int,
    gate: torch.Tensor,
    up: torch.Tensor,
    fmt: str,
    in_features: int,
    *,
    activation: str = "silu",
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    layout: str = "ggml",
    launch: MatmulLaunch | None = None,
    dependent: bool = False,
) -> torch.Tensor:
    """``gate_up.gate_up_int8`` for ``batch`` grouped activation vectors."""
    first, second, align = gate_up_pair(gate, up, fmt, in_features, layout)
    check_grouped(values, scale, sums, batch, first.blocks * first.fmt.block_size)
    device = same_device(values, scale, sums, gate, up, out)
    result = output_tensor(out, (batch, first.rows), out_dtype, device)
    check_activation(activation)
    if result.numel() == 0:
        return result
    shape = launch or choose_matmul(first.rows, in_features, batch, pair=True)
    grid = (triton.cdiv(first.rows, 16 * shape.row_warps), triton.cdiv(batch, GROUP * shape.columns))
    with on_device(device):
        _matmul_gate_up_kernel[grid](
            gate, first.stride, up, second.stride, first.rows, first.blocks, values, scale, sums,
            batch, result,
            FMT=fmt, PLANAR=first.planar, ALIGN=align, N=shape.columns, ROW_WARPS=shape.row_warps,
            K_WARPS=shape.k_warps, ACTIVATION=activation,
            DEPENDENT=dependent, num_warps=shape.warps, maxnreg=shape.registers, enable_fp_fusion=True,
            launch_pdl=dependent,
        )  # fmt: skip
    return result
