"""Residual add, RMSNorm or LayerNorm, and activations as int8 or grouped fp16: any subset in one launch."""

import torch
import triton
import triton.language as tl

from realizar_torch.errors import FormatError
from realizar_torch.triton_kernels.configs import choose_norm_warps
from realizar_torch.triton_kernels.gate_up import activate, check_activation
from realizar_torch.triton_kernels.grouped import STEP, Grouped, store_grouped
from realizar_torch.triton_kernels.launch import FLOAT_DTYPES, float_rows_of, on_device, same_device, vector
from realizar_torch.triton_kernels.primitives import (
    cast,
    release_successor,
    round_half_even,
    wait_for_predecessor,
)

NORMALIZATIONS = ("rmsnorm", "layernorm")
Int8Activations = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@triton.jit
def store_int8(values, block, columns, row, width, q, scale, sums):
    """Quantize ``values [B, 2, 16]`` fp32, B blocks of 32, and store q, scale and half-block sums of one row.

    scale = amax/127, q = round_half_even(x * (1/scale)), sums = scale * Σ16 q; a NaN or infinity makes scale
    NaN, and a block whose 1/scale overflows becomes zeros.
    """
    # Bit patterns of |x| order like the values, and NaN lies above infinity, so a maximum of bits keeps NaN.
    bits = tl.max(tl.max(tl.abs(values).to(tl.int32, bitcast=True), 2), 1)
    largest = bits.to(tl.float32, bitcast=True)
    step = tl.where(
        largest < float("inf"), tl.div_rn(largest, tl.full(largest.shape, 127.0, tl.float32)), float("nan")
    )
    inverse = tl.div_rn(tl.full(step.shape, 1.0, tl.float32), step)
    inverse = tl.where(inverse < float("inf"), inverse, 0.0)
    inverse = inverse[:, None, None]
    quants = tl.where(inverse > 0, round_half_even(tl.where(inverse > 0, values * inverse, 0.0)), 0)
    quants = tl.minimum(tl.maximum(quants, -127), 127)
    halves = tl.sum(quants, 2).to(tl.float32) * tl.expand_dims(step, 1)
    inside = block * 32 < width
    at = row * (width // 32) + block
    within = (16 * tl.arange(0, 2))[None, :, None] + tl.arange(0, 16)[None, None, :]
    tl.store(q + (at * 32)[:, None, None] + within, quants.to(tl.int8), mask=columns < width)
    tl.store(scale + at, step, mask=inside)
    half = 2 * tl.expand_dims(at, 1) + tl.expand_dims(tl.arange(0, 2), 0)
    tl.store(sums + half, halves, mask=tl.expand_dims(inside, 1))


@triton.jit
def _prepare_kernel(
    x, residual, total, factor, norm_weight, norm_bias, eps, in_features, width, normed, q, scale, sums,
    B: tl.constexpr, NORM: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_NORM_BIAS: tl.constexpr,
    ZERO_CENTERED: tl.constexpr, INT8: tl.constexpr, GROUPED: tl.constexpr, ACTIVATION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Row program_id(0), blocks of 32 from program_id(1)*B: s = x (or factor*x + residual, or act(x)); y =
    norm(s); y, or its int8 or grouped form.

    rmsnorm: y = s / sqrt(mean(s²) + eps) * w; layernorm: y = (s - mean) / sqrt(var + eps) * w + b. fp32
    statistics.
    """
    release_successor(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * B + tl.arange(0, B)
    columns = (
        (block * 32)[:, None, None] + (16 * tl.arange(0, 2))[None, :, None] + tl.arange(0, 16)[None, None, :]
    )
    inside = columns < in_features
    if NORM != "none":
        # no kernel of a step writes these
        gain = tl.load(norm_weight + columns, mask=inside, other=0).to(tl.float32)
        if HAS_NORM_BIAS:
            shift = tl.load(norm_bias + columns, mask=inside, other=0).to(tl.float32)
    wait_for_predecessor(DEPENDENT)
    at = row * in_features + columns
    values = tl.load(x + at, mask=inside, other=0).to(tl.float32)
    if HAS_RESIDUAL:
        values = factor * values + tl.load(residual + at, mask=inside, other=0).to(tl.float32)
        # the norm sees what the next layer will read back
        rounded = cast(values, total.dtype.element_ty)
        tl.store(total + at, rounded, mask=inside)
        values = rounded.to(tl.float32)
    if ACTIVATION is not None:
        values = activate(values, ACTIVATION)
    if NORM != "none":
        if NORM == "layernorm":
            mean = tl.sum(values) / in_features
            values = tl.where(inside, values - mean, 0.0)
        variance = tl.sum(values * values) / in_features
        if ZERO_CENTERED:
            gain = gain + 1.0
        values = values * (1.0 / tl.sqrt(variance + eps)) * gain
        if HAS_NORM_BIAS:
            values = values + shift
        values = tl.where(inside, values, 0.0)
    if GROUPED:
        step = tl.program_id(1) * (B // 8) + tl.arange(0, B // 8)
        store_grouped(tl.reshape(values, [B // 8, 16, 16]), step, width // 256, row, q, scale, sums)
    elif INT8:
        store_int8(values, block, columns, row, width, q, scale, sums)
    else:
        tl.store(normed + at, cast(values, normed.dtype.element_ty), mask=inside)


def empty_int8(rows: int, width: int, device: torch.device) -> Int8Activations:
    """Uninitialised q int8 ``[rows, width]``, scale fp32 ``[rows, width/32]`` and sums fp32 ``[rows,
    width/16]``.
    """
    return (
        torch.empty(rows, width, dtype=torch.int8, device=device),
        torch.empty(rows, width // 32, dtype=torch.float32, device=device),
        torch.empty(rows, width // 16, dtype=torch.float32, device=device),
    )


def quantize_activations(
    x: torch.Tensor,
    width: int,
    out: Int8Activations | Grouped | None = None,
    *,
    activation: str | None = None,
    dependent: bool = False,
    leading: bool = False,
) -> Int8Activations | Grouped:
    """x ``[..., K]`` floats → (q, scale, sums) of ``[M, width]``; columns past K are zeros.

    ``width`` is K in whole blocks of the weight's format. The numbers equal
    ``reference.quantize_activations``; with an ``activation`` of gate_up.py, that of its values. Into
    ``out`` of grouped.py go fp16 values instead. ``leading``: a dependent launch behind this one may begin
    while it runs, but this one begins when all before it have ended.
    """
    if activation is not None:
        check_activation(activation)
    in_features = x.shape[-1] if x.dim() else 0
    rows = float_rows_of(x, in_features, limit=None)
    _check_width(in_features, width)
    result = out or empty_int8(rows.shape[0], width, x.device)
    if rows.shape[0] == 0:
        return result
    width, grouped = _stored(width, result)
    with on_device(x.device):
        _prepare_kernel[(rows.shape[0], triton.cdiv(width, 1024))](
            rows, None, None, 1.0, None, None, 0.0, in_features, width, None, *result,
            B=32, NORM="none", HAS_RESIDUAL=False, HAS_NORM_BIAS=False, ZERO_CENTERED=False, INT8=True,
            GROUPED=grouped, ACTIVATION=activation, DEPENDENT=dependent or leading, num_warps=4,
            enable_fp_fusion=True, launch_pdl=dependent,
        )  # fmt: skip
    return result


def norm_quantize(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor | None = None,
    *,
    width: int,
    normalization: str,
    eps: float,
    zero_centered: bool = False,
    residual: torch.Tensor | None = None,
    total: torch.Tensor | None = None,
    factor: float = 1.0,
    out: Int8Activations | Grouped | None = None,
    dependent: bool = False,
    leading: bool = False,
) -> Int8Activations | Grouped:
    """norm(factor * x + residual) quantized to int8, x ``[..., K]`` → (q, scale, sums) of ``[M, width]``;
    in grouped fp16 where ``out`` is.

    With a residual, the sum is stored to ``total`` (same shape; may be ``residual`` itself), rounded to its
    dtype. ``factor`` counts with a residual only. ``leading`` as in ``quantize_activations``.
    """
    in_features = x.shape[-1] if x.dim() else 0
    _check_width(in_features, width)
    rows = float_rows_of(x, in_features, limit=None)
    result = out or empty_int8(rows.shape[0], width, x.device)
    _norm(
        rows,
        norm_weight,
        norm_bias,
        normalization,
        eps,
        zero_centered,
        residual,
        total,
        factor,
        width,
        None,
        result,
        dependent,
        leading,
    )
    return result


def normalize(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor | None = None,
    *,
    normalization: str,
    eps: float,
    zero_centered: bool = False,
    residual: torch.Tensor | None = None,
    total: torch.Tensor | None = None,
    factor: float = 1.0,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    dependent: bool = False,
) -> torch.Tensor:
    """norm(factor * x + residual), x ``[..., K]`` → the same shape in ``out_dtype``; ``factor`` and ``total``
    as in ``norm_quantize``.
    """
    in_features = x.shape[-1] if x.dim() else 0
    rows = float_rows_of(x, in_features, limit=None)
    result = (
        torch.empty(rows.shape, dtype=out_dtype, device=x.device) if out is None else out.view(rows.shape)
    )
    if result.dtype not in FLOAT_DTYPES:
        raise FormatError(f"out is {result.dtype}; expected float32, float16 or bfloat16")
    _norm(
        rows,
        norm_weight,
        norm_bias,
        normalization,
        eps,
        zero_centered,
        residual,
        total,
        factor,
        in_features,
        result,
        None,
        dependent,
    )
    return result.view(x.shape)


def _norm(
    rows: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor | None,
    normalization: str,
    eps: float,
    zero_centered: bool,
    residual: torch.Tensor | None,
    total: torch.Tensor | None,
    factor: float,
    width: int,
    normed: torch.Tensor | None,
    int8: Int8Activations | None,
    dependent: bool,
    leading: bool = False,
) -> None:
    in_features = rows.shape[1]
    if normalization not in NORMALIZATIONS:
        raise FormatError(f"unknown normalization {normalization!r}; known: {', '.join(NORMALIZATIONS)}")
    device = same_device(rows, norm_weight, norm_bias, residual, total, normed)
    norm_weight = vector(norm_weight, in_features, "norm_weight")
    norm_bias = vector(norm_bias, in_features, "norm_bias")
    if (residual is None) != (total is None):
        raise FormatError("residual and total go together: where x + residual is stored")
    for extra in (residual, total):
        if extra is not None and (
            extra.numel() != rows.numel() or extra.dtype not in FLOAT_DTYPES or not extra.is_contiguous()
        ):
            raise FormatError(
                f"residual or total is {extra.dtype} {tuple(extra.shape)}; expected {tuple(rows.shape)}"
            )
    if rows.shape[0] == 0:
        return
    width, grouped = (width, False) if int8 is None else _stored(width, int8)
    # grouped activations are stored in whole steps of eight blocks
    blocks = max(triton.next_power_of_2(triton.cdiv(width, 32)), 8 if grouped else 1)
    q, scale, sums = int8 or (None, None, None)
    with on_device(device):
        _prepare_kernel[(rows.shape[0], 1)](
            rows, residual, total, factor, norm_weight, norm_bias, eps, in_features, width, normed, q, scale,
            sums,
            B=blocks, NORM=normalization, HAS_RESIDUAL=residual is not None,
            HAS_NORM_BIAS=norm_bias is not None,
            ZERO_CENTERED=zero_centered, INT8=int8 is not None, GROUPED=grouped, ACTIVATION=None,
            DEPENDENT=dependent or leading, num_warps=choose_norm_warps(blocks), enable_fp_fusion=True,
            launch_pdl=dependent,
        )  # fmt: skip


def _stored(width: int, out: Int8Activations | Grouped) -> tuple[int, bool]:
    """How many activations of a row are stored in ``out``, and whether in groups."""
    grouped = out[0].dtype == torch.float16
    return -(-width // STEP) * STEP if grouped else width, grouped


def _check_width(in_features: int, width: int) -> None:
    if width % 32 or width < in_features or in_features < 1:
        raise FormatError(f"width {width} does not hold {in_features} activations in whole blocks of 32")
