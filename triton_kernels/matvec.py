"""Packed weight times up to eight activation vectors: y = x·Wᵀ (+ bias) (+ residual), float or int8
activations.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from realizar_torch.errors import FormatError
from realizar_torch.triton_kernels.configs import Launch, RingLaunch, choose, choose_ring
from realizar_torch.triton_kernels.float_sums import float_sums
from realizar_torch.triton_kernels.launch import (
    FLOAT_DTYPES,
    MAX_ROWS,
    PackedRows,
    float_rows_of,
    on_device,
    packed_rows,
    processors_with_rings,
    same_device,
    vector,
)
from realizar_torch.triton_kernels.primitives import cast, release_successor, wait_and_release
from realizar_torch.triton_kernels.ring import (
    fill_ring,
    load_row_vector,
    next_slot,
    next_sums,
    open_ring,
)
from realizar_torch.triton_kernels.row_sums import (
    int8_sums,
    reduce_rows,
    row_pointers,
)

# Float vectors of one program. More take as many instructions each, and compile for up to a minute.
FLOAT_VECTORS = 2


@triton.jit
def store_rows(
    sums, first_row, BN: tl.constexpr, n_rows, out, out_stride, bias, residual,
    M: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, first_vector=0,
):  # fmt: skip
    """out[m, rows] = sums[m] + bias[rows] + residual[m, rows] for m from ``first_vector``; out and residual
    share their row stride.
    """
    rows = first_row + tl.arange(0, BN)
    for m in tl.static_range(M):
        inside = rows < tl.where(m >= first_vector, n_rows, 0)
        value = sums[m]
        if HAS_BIAS:
            value = value + tl.load(bias + rows, mask=inside).to(tl.float32)
        at = m * out_stride + rows
        if HAS_RESIDUAL:
            value = value + tl.load(residual + at, mask=inside).to(tl.float32)
        tl.store(out + at, cast(value, out.dtype.element_ty), mask=inside)


@triton.jit
def _matvec_int8_kernel(
    weight, row_stride, n_rows, blocks, xq, xscale, xsums, out, out_stride, bias, residual,
    FMT: tl.constexpr, PLANAR: tl.constexpr, ALIGN: tl.constexpr, M: tl.constexpr, BN: tl.constexpr,
    CB: tl.constexpr,
    WHOLE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, AHEAD: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program: BN weight rows × M int8 vectors (bytes: see decode.py and row_sums.add_int8)."""
    first_row = tl.program_id(0) * BN
    rows = row_pointers(weight, row_stride, first_row, n_rows, ALIGN, BN)
    total = int8_sums(
        (rows,), blocks, xq, xscale, xsums, FMT, PLANAR, ALIGN, M, CB, WHOLE, DEPENDENT, AHEAD, "before"
    )
    sums = reduce_rows(total, 0, M)
    store_rows(sums, first_row, BN, n_rows, out, out_stride, bias, residual, M, HAS_BIAS, HAS_RESIDUAL)


@triton.jit(do_not_specialize=["n_rows", "programs"])
def _matvec_ring_kernel(
    weight, n_rows, programs, x, scale, sums, out, bias, residual,
    FMT: tl.constexpr, PLANAR: tl.constexpr, BLOCKS: tl.constexpr, R: tl.constexpr, EVEN: tl.constexpr,
    STAGES: tl.constexpr, THREADS: tl.constexpr, BYTES: tl.constexpr, COLUMNS: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """As the int8 or the float kernel for one vector: every ``programs``-th tile of R rows, see ring.py."""
    rows_through_ring(
        open_ring(BYTES), weight, n_rows, tl.program_id(0), programs, x, scale, sums, out, bias, residual,
        FMT, PLANAR, BLOCKS, R, EVEN, STAGES, THREADS, HAS_BIAS, HAS_RESIDUAL, "before", COLUMNS,
    )  # fmt: skip


@triton.jit
def rows_through_ring(
    ring, weight, n_rows, program, programs, x, scale, sums, out, bias, residual,
    FMT: tl.constexpr, PLANAR: tl.constexpr, BLOCKS: tl.constexpr, R: tl.constexpr, EVEN: tl.constexpr,
    STAGES: tl.constexpr, THREADS: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, RELEASE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """What program ``program`` of ``programs`` does for one weight. Floats ``x`` have COLUMNS elements, and
    None for scale and sums.
    """
    weights = (weight,)
    fill_ring(ring, weights, program, programs, n_rows, FMT, BLOCKS, R, EVEN, THREADS, STAGES)
    wait_and_release(RELEASE, True)
    vector = load_row_vector(x, scale, sums, COLUMNS, FMT, BLOCKS, THREADS)
    slot = ring
    for tile in range(program, tl.cdiv(n_rows, R), programs):
        total = next_sums(
            slot, weights, tile, programs, n_rows, vector, FMT, PLANAR, BLOCKS, R, EVEN, THREADS, STAGES
        )
        slot = next_slot(slot, ring, 1, FMT, BLOCKS, R, STAGES)
        reduced = reduce_rows(total, 0, 1)
        store_rows(reduced, tile * R, R, n_rows, out, n_rows, bias, residual, 1, HAS_BIAS, HAS_RESIDUAL)


@triton.jit
def _matvec_float_kernel(
    weight, row_stride, n_rows, blocks, x, in_features, out, out_stride, bias, residual, vectors,
    FMT: tl.constexpr, PLANAR: tl.constexpr, ALIGN: tl.constexpr, M: tl.constexpr, BN: tl.constexpr,
    CB: tl.constexpr,
    WHOLE: tl.constexpr, RAGGED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    GROUPED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BN weight rows × M float vectors ``x [M, in_features]``: exact weights, fp32 accumulation.

    GROUPED: a program for every M of ``vectors``; the last one may compute a vector again, but stores it not.
    """
    program, first_vector = tl.program_id(0), 0
    if GROUPED:
        # programs of the same rows are neighbours: all but one find the weights in the cache
        groups = tl.cdiv(vectors, M)
        group = program % groups
        program = program // groups
        start = tl.minimum(group * M, vectors - M)
        first_vector = group * M - start
        x, out = x + start * in_features, out + start * out_stride
        if HAS_RESIDUAL:
            residual = residual + start * out_stride
    first_row = program * BN
    rows = row_pointers(weight, row_stride, first_row, n_rows, ALIGN, BN)
    total = float_sums((rows,), blocks, x, in_features, FMT, PLANAR, ALIGN, M, CB, WHOLE, RAGGED, DEPENDENT)
    sums = reduce_rows(total, 0, M)
    release_successor(DEPENDENT)
    store_rows(
        sums, first_row, BN, n_rows, out, out_stride, bias, residual, M, HAS_BIAS, HAS_RESIDUAL, first_vector
    )  # fmt: skip


def matvec(
    x: torch.Tensor,
    weight: torch.Tensor,
    fmt: str,
    in_features: int,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    layout: str = "ggml",
    launch: Launch | None = None,
    dependent: bool = False,
) -> torch.Tensor:
    """y = x·Wᵀ + bias + residual with exact weights and fp32 accumulation.

    x ``[..., in_features]`` fp32, fp16 or bf16 with at most eight rows; weight uint8 ``[rows, row_bytes]``;
    residual of the output's shape. Returns ``[..., rows]`` in x's dtype. FormatError on anything else.
    """
    packed = packed_rows(weight, fmt, in_features, layout)
    flat = float_rows_of(x, in_features)
    device = same_device(x, weight, bias, residual, out)
    result = output_tensor(out, (*x.shape[:-1], packed.rows), x.dtype, device)
    if result.numel() == 0:
        return result
    bias = vector(bias, packed.rows, "bias")
    residual = residual_of(residual, result)
    vectors, together = flat.shape[0], min(flat.shape[0], FLOAT_VECTORS)
    ring = ring_for([packed], vectors, activations="float") if launch is None else None
    if ring is not None:
        _through_ring(packed, ring, flat, None, None, result, bias, residual, dependent)
        return result
    shape = launch or choose(fmt, packed.rows, in_features, together, "float")
    grid = (triton.cdiv(packed.rows, shape.rows) * triton.cdiv(vectors, together),)
    with on_device(device):
        _matvec_float_kernel[grid](
            packed.data, packed.stride, packed.rows, packed.blocks, flat, in_features, result, packed.rows,
            bias, residual, vectors,
            FMT=fmt, PLANAR=packed.planar, ALIGN=packed.align, M=together, BN=shape.rows,
            CB=shape.blocks,
            WHOLE=packed.blocks % shape.blocks == 0, RAGGED=in_features % packed.fmt.block_size != 0,
            HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, GROUPED=vectors > together,
            DEPENDENT=dependent, num_warps=shape.warps, enable_fp_fusion=True, launch_pdl=dependent,
        )  # fmt: skip
    return result


def matvec_int8(
    q: torch.Tensor,
    scale: torch.Tensor,
    sums: torch.Tensor,
    weight: torch.Tensor,
    fmt: str,
    in_features: int,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    layout: str = "ggml",
    launch: Launch | None = None,
    dependent: bool = False,
) -> torch.Tensor:
    """y = x̂·Wᵀ + bias + residual where x̂ = q·scale are activations quantized by
    ``quantize.quantize_activations``.

    q int8 ``[M, K]`` (K: in_features in whole blocks of fmt), scale fp32 ``[M, K/32]``, sums fp32 ``[M,
    K/16]``, M ≤ 8. Returns ``[M, rows]`` in ``out_dtype`` (or ``out``'s, or the residual's dtype when one is
    given).
    """
    packed = packed_rows(weight, fmt, in_features, layout)
    check_int8(q, scale, sums, packed.blocks * packed.fmt.block_size)
    device = same_device(q, scale, sums, weight, bias, residual, out)
    dtype = residual.dtype if residual is not None else out_dtype
    result = output_tensor(out, (q.shape[0], packed.rows), dtype, device)
    if result.numel() == 0:
        return result
    bias = vector(bias, packed.rows, "bias")
    residual = residual_of(residual, result)
    ring = ring_for([packed], q.shape[0]) if dependent and launch is None else None
    if ring is not None:
        _through_ring(packed, ring, q.view(torch.int32), scale, sums, result, bias, residual, True)
        return result
    shape = launch or choose(fmt, packed.rows, in_features, q.shape[0], "int8")
    with on_device(device):
        _matvec_int8_kernel[(triton.cdiv(packed.rows, shape.rows),)](
            packed.data, packed.stride, packed.rows, packed.blocks, q.view(torch.int32), scale, sums,
            result, packed.rows,
            bias, residual,
            FMT=fmt, PLANAR=packed.planar, ALIGN=packed.align, M=q.shape[0], BN=shape.rows, CB=shape.blocks,
            WHOLE=packed.blocks % shape.blocks == 0, HAS_BIAS=bias is not None,
            HAS_RESIDUAL=residual is not None, AHEAD=shape.ahead,
            DEPENDENT=dependent, num_warps=shape.warps, enable_fp_fusion=True, launch_pdl=dependent,
        )  # fmt: skip
    return result


def _through_ring(
    packed: PackedRows,
    ring: RingLaunch,
    x: torch.Tensor,
    scale: torch.Tensor | None,
    sums: torch.Tensor | None,
    result: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    dependent: bool,
) -> None:
    programs = min(triton.cdiv(packed.rows, ring.rows), ring.programs)
    with on_device(x.device):
        _matvec_ring_kernel[(programs,)](
            packed.data, packed.rows, programs, x, scale, sums, result, bias, residual,
            **ring_constants(packed, ring), THREADS=32 * ring.warps, BYTES=ring.bytes,
            COLUMNS=packed.in_features, HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None,
            num_warps=ring.warps, maxnreg=ring.registers, enable_fp_fusion=True, launch_pdl=dependent,
        )  # fmt: skip


def ring_for(
    weights: Sequence[PackedRows],
    batch: int,
    *,
    activations: str = "int8",
    before_attention: bool = False,
    least_warps: int = 1,
) -> RingLaunch | None:
    """The launch shape of weights that are done together, through a ring; None where that cannot be."""
    first = weights[0]
    processors = processors_with_rings(first.data.device)
    if batch != 1 or not processors or any(item.align < 16 or not item.contiguous for item in weights):
        return None
    shape = (first.fmt.name, first.rows, first.in_features, len(weights))
    options = {"activations": activations, "before_attention": before_attention, "least_warps": least_warps}
    return choose_ring(*shape, **options, processors=processors)


def ring_constants(packed: PackedRows, ring: RingLaunch) -> dict[str, object]:
    """What a kernel with a ring is compiled for."""
    return {
        "FMT": packed.fmt.name,
        "PLANAR": packed.planar,
        "BLOCKS": packed.blocks,
        "R": ring.rows,
        "EVEN": packed.rows % ring.rows == 0,
        "STAGES": ring.stages,
    }


def check_int8(
    q: torch.Tensor, scale: torch.Tensor, sums: torch.Tensor, width: int, limit: int = MAX_ROWS
) -> None:
    """FormatError unless q is contiguous int8 ``[M ≤ limit, width]``, scale fp32 per 32 and sums per 16."""
    rows = q.shape[0] if q.dim() == 2 else -1
    right = (
        0 <= rows <= limit
        and (q.dtype, scale.dtype, sums.dtype) == (torch.int8, torch.float32, torch.float32)
        and (tuple(q.shape), tuple(scale.shape), tuple(sums.shape))
        == ((rows, width), (rows, width // 32), (rows, width // 16))
        and q.is_contiguous()
        and scale.is_contiguous()
        and sums.is_contiguous()
        and q.data_ptr() % 16 == 0
    )
    if not right:
        raise FormatError(
            f"int8 activations are {q.dtype} {tuple(q.shape)}, {scale.dtype} {tuple(scale.shape)}, "
            f"{sums.dtype} {tuple(sums.shape)}; expected contiguous int8 (M <= {limit}, {width}) with "
            "fp32 scales per 32 and sums per 16"
        )


def output_tensor(
    out: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """``out`` after a check of shape and dtype, or a new tensor."""
    if out is None:
        return torch.empty(shape, dtype=dtype, device=device)
    if out.shape != shape or out.dtype not in FLOAT_DTYPES or not out.is_contiguous():
        raise FormatError(f"out is {out.dtype} {tuple(out.shape)}; expected contiguous floats {shape}")
    return out


def residual_of(residual: torch.Tensor | None, result: torch.Tensor) -> torch.Tensor | None:
    """``residual`` after a check of its shape and dtype against the output's."""
    if residual is None:
        return None
    if residual.shape != result.shape or residual.dtype not in FLOAT_DTYPES:
        raise FormatError(
            f"residual is {residual.dtype} {tuple(residual.shape)}; expected floats {tuple(result.shape)}"
        )
    return residual.contiguous()
