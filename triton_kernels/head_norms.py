"""Norms of heads in place: parts of a row, all by one weight or each by its own."""

import torch
import triton
import triton.language as tl

from realizar_torch.errors import FormatError
from realizar_torch.triton_kernels.configs import choose_norm_warps
from realizar_torch.triton_kernels.launch import FLOAT_DTYPES, on_device, same_device
from realizar_torch.triton_kernels.primitives import (
    cast,
    release_successor,
    rounded_product,
    wait_for_predecessor,
)
from realizar_torch.triton_kernels.quantize import NORMALIZATIONS


@triton.jit
def _norm_heads_kernel(
    rows, stride, weight, eps, size,
    LANES: tl.constexpr, NORM: tl.constexpr, ZERO_CENTERED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Program (row, head): h = rows[row, head * size :][:size]; h = norm(h) * weight[head * size :][:size].

    rmsnorm: h / sqrt(mean(h²) + eps); layernorm: (h - mean) / sqrt(var + eps). fp32 statistics.
    """
    release_successor(DEPENDENT)
    wait_for_predecessor(DEPENDENT)
    lane = tl.arange(0, LANES)
    inside = lane < size
    column = tl.program_id(1) * size + lane
    place = rows + tl.program_id(0).to(tl.int64) * stride + column
    values = tl.load(place, mask=inside, other=0).to(tl.float32)
    if NORM == "layernorm":
        values = tl.where(inside, values - tl.sum(values) / size, 0.0)
    variance = tl.sum(rounded_product(values, values)) / size
    gain = tl.load(weight + column, mask=inside, other=0).to(tl.float32)
    if ZERO_CENTERED:
        gain = gain + 1.0
    values = values * (1.0 / tl.sqrt(variance + eps)) * gain
    tl.store(place, cast(values, rows.dtype.element_ty), mask=inside)


def norm_heads(
    rows: torch.Tensor,
    first: int,
    size: int,
    weight: torch.Tensor,
    *,
    normalization: str,
    eps: float,
    zero_centered: bool = False,
    dependent: bool = False,
) -> None:
    """Norms ``size`` columns at a time of rows ``[M, N]``, from column ``first`` on, in place.

    weight: floats, as many as columns are normed; rows: consecutive floats, any row stride.
    """
    count = weight.numel()
    if normalization not in NORMALIZATIONS:
        raise FormatError(f"unknown normalization {normalization!r}; known: {', '.join(NORMALIZATIONS)}")
    if rows.dim() != 2 or rows.stride(1) != 1 or rows.dtype not in FLOAT_DTYPES:
        raise FormatError(f"rows are {rows.dtype} {tuple(rows.shape)}, {rows.stride()}; expected float rows")
    if count % size or not 0 <= first <= rows.shape[1] - count or not weight.is_contiguous():
        raise FormatError(
            f"weight of {count} is not for heads of {size} from column {first} of {rows.shape[1]}"
        )
    lanes = triton.next_power_of_2(size)
    with on_device(same_device(rows, weight)):
        _norm_heads_kernel[(rows.shape[0], count // size)](
            rows[:, first:], rows.stride(0), weight, eps, size,
            LANES=lanes, NORM=normalization, ZERO_CENTERED=zero_centered, DEPENDENT=dependent,
            num_warps=choose_norm_warps(max(1, lanes // 32)), enable_fp_fusion=True, launch_pdl=dependent,
        )  # fmt: skip
