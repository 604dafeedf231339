"""Packed matrices of chosen experts times a vector each: one launch, and no choice leaves the device."""

import torch
import triton
import triton.language as tl

from realizar_torch.errors import FormatError
from realizar_torch.triton_kernels.configs import choose
from realizar_torch.triton_kernels.float_sums import float_sums
from realizar_torch.triton_kernels.launch import (
    PackedRows,
    float_rows_of,
    on_device,
    packed_rows,
    same_device,
)
from realizar_torch.triton_kernels.matvec import check_int8
from realizar_torch.triton_kernels.primitives import cast
from realizar_torch.triton_kernels.row_sums import int8_sums, reduce_rows


@triton.jit
def _chosen_rows(
    weight, row_stride, expert, n_experts, first_row, n_rows, ALIGN: tl.constexpr, BN: tl.constexpr
):
    """BN rows of an expert's matrix: byte pointers ``[BN, 1]``; those of the first where there is no such."""
    matrix = tl.where((expert >= 0) & (expert < n_experts), expert, 0).to(tl.int64)
    row = tl.minimum(first_row + tl.arange(0, BN), n_rows - 1)[:, None]
    return weight + (matrix * n_rows + row) * tl.multiple_of(row_stride, ALIGN)


@triton.jit
def _store(sums, expert, n_experts, first_row, n_rows, out, BN: tl.constexpr):
    """out[rows] = sums, or NaN where there is no such expert."""
    rows = first_row + tl.arange(0, BN)
    value = tl.where((expert >= 0) & (expert < n_experts), sums, float("nan"))
    tl.store(out + rows, cast(value, out.dtype.element_ty), mask=rows < n_rows)


@triton.jit
def _expert_int8_kernel(
    weight, row_stride, n_rows, blocks, experts, n_experts, share, xq, xscale, xsums, out,
    FMT: tl.constexpr, PLANAR: tl.constexpr, ALIGN: tl.constexpr, BN: tl.constexpr, CB: tl.constexpr,
    WHOLE: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """One program: BN rows of the matrix of one choice × its int8 vector (bytes: see decode.py and
    row_sums.add_int8), whose blocks have GROUPS groups of 16.

    weight ``[n_experts, n_rows, row_stride]`` bytes, experts int64 ``[choices]``, out ``[choices, n_rows]``;
    choice c takes vector ``c // share``.
    """
    choice, first_row = tl.program_id(1), tl.program_id(0) * BN
    expert, groups = tl.load(experts + choice), choice // share * blocks * GROUPS
    rows = _chosen_rows(weight, row_stride, expert, n_experts, first_row, n_rows, ALIGN, BN)
    x = xq + groups * 4
    total = int8_sums(
        (rows,), blocks, x, xscale + groups // 2, xsums + groups, FMT, PLANAR, ALIGN, 1, CB, WHOLE, False,
        False, "later",
    )  # fmt: skip
    _store(reduce_rows(total, 0, 1)[0], expert, n_experts, first_row, n_rows, out + choice * n_rows, BN)


@triton.jit
def _expert_float_kernel(
    weight, row_stride, n_rows, blocks, experts, n_experts, share, x, in_features, out,
    FMT: tl.constexpr, PLANAR: tl.constexpr, ALIGN: tl.constexpr, BN: tl.constexpr, CB: tl.constexpr,
    WHOLE: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """As the int8 kernel for float vectors ``x [vectors, in_features]``: exact weights, fp32 accumulation."""
    choice, first_row = tl.program_id(1), tl.program_id(0) * BN
    expert, x = tl.load(experts + choice), x + choice // share * in_features
    rows = _chosen_rows(weight, row_stride, expert, n_experts, first_row, n_rows, ALIGN, BN)
    total = float_sums((rows,), blocks, x, in_features, FMT, PLANAR, ALIGN, 1, CB, WHOLE, RAGGED, False)
    _store(reduce_rows(total, 0, 1)[0], expert, n_experts, first_row, n_rows, out + choice * n_rows, BN)


def expert_matvec(
    x: torch.Tensor,
    experts: torch.Tensor,
    weight: torch.Tensor,
    fmt: str,
    share: int,
    *,
    layout: str = "ggml",
) -> torch.Tensor:
    """Row ``c // share`` of x times the matrix ``experts[c]`` → ``[choices, rows]`` in x's dtype.

    x ``[vectors, in_features]`` fp32, fp16 or bf16, experts int64 ``[choices]``, weight uint8 ``[E, rows,
    row_bytes]`` contiguous. A number that no expert has gives NaN. FormatError on anything else.
    """
    flat = float_rows_of(x, x.shape[-1], limit=None)
    packed, matrices = _packed(weight, fmt, flat.shape[1], layout)
    device = _check_choices(experts, flat.shape[0], share, x, weight)
    out = torch.empty(len(experts), weight.shape[1], dtype=x.dtype, device=device)
    if out.numel() == 0:
        return out
    shape = choose(fmt, weight.shape[1], packed.in_features, 1, "float")
    with on_device(device):
        _expert_float_kernel[(triton.cdiv(weight.shape[1], shape.rows), len(experts))](
            packed.data, packed.stride, weight.shape[1], packed.blocks, experts, matrices, share, flat,
            packed.in_features, out,
            FMT=fmt, PLANAR=packed.planar, ALIGN=packed.align, BN=shape.rows, CB=shape.blocks,
            WHOLE=packed.blocks % shape.blocks == 0,
            RAGGED=packed.in_features % packed.fmt.block_size != 0,
            num_warps=shape.warps, enable_fp_fusion=True,
        )  # fmt: skip
    return out


def expert_matvec_int8(
    q: torch.Tensor,
    scale: torch.Tensor,
    sums: torch.Tensor,
    experts: torch.Tensor,
    weight: torch.Tensor,
    fmt: str,
    in_features: int,
    share: int,
    *,
    out_dtype: torch.dtype = torch.float32,
    layout: str = "ggml",
) -> torch.Tensor:
    """``expert_matvec`` of activations quantized by ``quantize.quantize_activations``, → ``out_dtype``."""
    packed, matrices = _packed(weight, fmt, in_features, layout)
    check_int8(q, scale, sums, packed.blocks * packed.fmt.block_size, limit=len(q))
    device = _check_choices(experts, q.shape[0], share, q, weight)
    out = torch.empty(len(experts), weight.shape[1], dtype=out_dtype, device=device)
    if out.numel() == 0:
        return out
    shape = choose(fmt, weight.shape[1], in_features, 1, "int8")
    with on_device(device):
        _expert_int8_kernel[(triton.cdiv(weight.shape[1], shape.rows), len(experts))](
            packed.data, packed.stride, weight.shape[1], packed.blocks, experts, matrices, share,
            q.view(torch.int32), scale, sums, out,
            FMT=fmt, PLANAR=packed.planar, ALIGN=packed.align, BN=shape.rows, CB=shape.blocks,
            WHOLE=packed.blocks % shape.blocks == 0, GROUPS=packed.fmt.block_size // 16,
            num_warps=shape.warps, enable_fp_fusion=True,
        )  # fmt: skip
    return out


def _packed(weight: torch.Tensor, fmt: str, in_features: int, layout: str) -> tuple[PackedRows, int]:
    """All rows of all experts, and how many experts there are."""
    if weight.dim() != 3 or not weight.is_contiguous():
        raise FormatError(
            f"weight has shape {tuple(weight.shape)} and strides {weight.stride()}; expected contiguous "
            "(experts, rows, row_bytes)"
        )
    return packed_rows(weight.flatten(0, 1), fmt, in_features, layout), weight.shape[0]


def _check_choices(experts: torch.Tensor, vectors: int, share: int, *others: torch.Tensor) -> torch.device:
    if experts.dtype != torch.int64 or experts.shape != (vectors * share,) or not experts.is_contiguous():
        raise FormatError(
            f"experts are {experts.dtype} {tuple(experts.shape)}; expected {vectors * share} consecutive "
            f"int64, {share} for each of {vectors} vectors"
        )
    return same_device(experts, *others)
