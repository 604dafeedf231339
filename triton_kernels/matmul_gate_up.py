"""act(x·Gateᵀ) * (x·Upᵀ) of many int8 activation vectors on tensor cores, in one launch."""

import torch
import triton
import triton.language as tl

from realizar_torch.triton_kernels.configs import MatmulLaunch, choose_matmul
from realizar_torch.triton_kernels.gate_up import activate, check_activation, gate_up_pair
from realizar_torch.triton_kernels.grouped import GROUP, check_grouped
from realizar_torch.triton_kernels.launch import on_device, same_device
from realizar_torch.triton_kernels.matmul import store_tile, whole_steps
from realizar_torch.triton_kernels.matvec import output_tensor
from realizar_torch.triton_kernels.primitives import release_successor
from realizar_torch.triton_kernels.tile_sums import over_warps, tile_rows, tile_sums


@triton.jit(do_not_specialize=["batch"])
def _matmul_gate_up_kernel(
    gate, gate_stride, up, up_stride, n_rows, blocks, xq, xscale, xsums, batch, out,
    FMT: tl.constexpr, PLANAR: tl.constexpr, ALIGN: tl.constexpr, N: tl.constexpr, WARPS: tl.constexpr,
    WHOLE: tl.constexpr, ACTIVATION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program: 16 rows of gate, the same of up × 8 N vectors; out[m, rows] = act(gate) * up."""
    first_row, first_group = tl.program_id(0) * 16, tl.program_id(1) * N
    rows = tile_rows(gate, gate_stride, first_row, n_rows, ALIGN, WARPS)
    rows = rows + tile_rows(up, up_stride, first_row, n_rows, ALIGN, WARPS)
    total = tile_sums(
        rows, blocks, xq, xscale, xsums, first_group, tl.cdiv(batch, 8),
        FMT, PLANAR, ALIGN, N, WARPS, WHOLE, DEPENDENT,
    )  # fmt: skip
    release_successor(DEPENDENT)
    for n in tl.static_range(N):
        gates, ups = tl.split(over_warps(total, n, 2, WARPS))
        store_tile(
            activate(gates, ACTIVATION) * ups, first_row, n_rows, 8 * (first_group + n), batch, out, n_rows,
            None, None, 1, False, False,
        )  # fmt: skip


def matmul_gate_up_int8(
    q: torch.Tensor,
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
    """``gate_up.gate_up_int8`` for ``batch`` grouped activation vectors; ``launch.tiles`` does not matter."""
    first, second, align = gate_up_pair(gate, up, fmt, in_features, layout)
    check_grouped(q, scale, sums, batch, first.blocks * first.fmt.block_size)
    device = same_device(q, scale, sums, gate, up, out)
    result = output_tensor(out, (batch, first.rows), out_dtype, device)
    check_activation(activation)
    if result.numel() == 0:
        return result
    shape = launch or choose_matmul(fmt, 2 * first.rows, in_features, batch)
    grid = (triton.cdiv(first.rows, 16), triton.cdiv(batch, GROUP * shape.columns))
    with on_device(device):
        _matmul_gate_up_kernel[grid](
            gate, first.stride, up, second.stride, first.rows, first.blocks, q, scale, sums, batch, result,
            FMT=fmt, PLANAR=first.planar, ALIGN=align, N=shape.columns, WARPS=shape.warps,
            WHOLE=whole_steps(first, shape.warps), ACTIVATION=activation,
            DEPENDENT=dependent, num_warps=shape.warps, enable_fp_fusion=True, launch_pdl=dependent,
        )  # fmt: skip
    return result
