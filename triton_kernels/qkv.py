"""Three packed weights of different formats times int8 vectors, or one of floats, in one launch over their
row blocks.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from realizar_torch.triton_kernels.configs import Launch, RingLaunch, choose
from realizar_torch.triton_kernels.launch import (
    PackedRows,
    float_rows_of,
    on_device,
    same_device,
    three_packed_rows,
    vector,
)
from realizar_torch.triton_kernels.matvec import (
    check_int8,
    matvec,
    output_tensor,
    ring_constants,
    ring_for,
    rows_through_ring,
    store_rows,
)
from realizar_torch.triton_kernels.ring import open_ring
from realizar_torch.triton_kernels.row_sums import int8_sums, reduce_rows, row_pointers


@triton.jit
def _rows_of_one(
    weight, row_stride, first_row, n_rows, blocks, xq, xscale, xsums, out, out_stride, bias,
    FMT: tl.constexpr, PLANAR: tl.constexpr, ALIGN: tl.constexpr, M: tl.constexpr, BN: tl.constexpr,
    CB: tl.constexpr,
    HAS_BIAS: tl.constexpr, DEPENDENT: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    rows = row_pointers(weight, row_stride, first_row, n_rows, ALIGN, BN)
    total = int8_sums(
        (rows,), blocks, xq, xscale, xsums, FMT, PLANAR, ALIGN, M, CB, EVEN, DEPENDENT, False, "after"
    )
    sums = reduce_rows(total, 0, M)
    store_rows(sums, first_row, BN, n_rows, out, out_stride, bias, bias, M, HAS_BIAS, False)


@triton.jit
def _qkv_int8_kernel(
    w0, stride0, rows0, blocks0, w1, stride1, rows1, blocks1, w2, stride2, rows2, blocks2, xq, xscale, xsums,
    out, out_stride, bias,
    FMT0: tl.constexpr, PLANAR0: tl.constexpr, ALIGN0: tl.constexpr, BN0: tl.constexpr, CB0: tl.constexpr,
    EVEN0: tl.constexpr,
    FMT1: tl.constexpr, PLANAR1: tl.constexpr, ALIGN1: tl.constexpr, BN1: tl.constexpr, CB1: tl.constexpr,
    EVEN1: tl.constexpr,
    FMT2: tl.constexpr, PLANAR2: tl.constexpr, ALIGN2: tl.constexpr, BN2: tl.constexpr, CB2: tl.constexpr,
    EVEN2: tl.constexpr,
    M: tl.constexpr, HAS_BIAS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Programs 0 … do BN0 rows of w0 each, the next BN1 rows of w1, the last BN2 rows of w2 (bytes: see
    decode.py).

    Outputs (and the bias) of the three lie one after the other in every row of ``out``.
    """
    pid = tl.program_id(0)
    programs0 = tl.cdiv(rows0, BN0)
    programs1 = tl.cdiv(rows1, BN1)
    if pid < programs0:
        _rows_of_one(
            w0, stride0, pid * BN0, rows0, blocks0, xq, xscale, xsums, out, out_stride, bias,
            FMT0, PLANAR0, ALIGN0, M, BN0, CB0, HAS_BIAS, DEPENDENT, EVEN0,
        )  # fmt: skip
    elif pid < programs0 + programs1:
        _rows_of_one(
            w1, stride1, (pid - programs0) * BN1, rows1, blocks1, xq, xscale, xsums, out + rows0, out_stride,
            bias + rows0 if HAS_BIAS else bias,
            FMT1, PLANAR1, ALIGN1, M, BN1, CB1, HAS_BIAS, DEPENDENT, EVEN1,
        )  # fmt: skip
    else:
        _rows_of_one(
            w2, stride2, (pid - programs0 - programs1) * BN2, rows2, blocks2, xq, xscale, xsums,
            out + rows0 + rows1,
            out_stride, bias + rows0 + rows1 if HAS_BIAS else bias,
            FMT2, PLANAR2, ALIGN2, M, BN2, CB2, HAS_BIAS, DEPENDENT, EVEN2,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows0", "programs0", "rows1", "programs1", "rows2", "programs2"])
def _qkv_ring_kernel(
    w0, rows0, programs0, w1, rows1, programs1, w2, rows2, programs2, x, scale, sums, out, bias,
    FMT0: tl.constexpr, PLANAR0: tl.constexpr, BLOCKS0: tl.constexpr, R0: tl.constexpr, EVEN0: tl.constexpr,
    STAGES0: tl.constexpr,
    FMT1: tl.constexpr, PLANAR1: tl.constexpr, BLOCKS1: tl.constexpr, R1: tl.constexpr, EVEN1: tl.constexpr,
    STAGES1: tl.constexpr,
    FMT2: tl.constexpr, PLANAR2: tl.constexpr, BLOCKS2: tl.constexpr, R2: tl.constexpr, EVEN2: tl.constexpr,
    STAGES2: tl.constexpr,
    THREADS: tl.constexpr, BYTES: tl.constexpr, COLUMNS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """As the int8 kernel for one vector, int8 or floats: ``programs0`` programs share the rows of w0, and so
    on.

    Attention may look at what earlier launches have written before it waits for this one.
    """
    pid = tl.program_id(0)
    ring = open_ring(BYTES)
    if pid < programs0:
        rows_through_ring(
            ring, w0, rows0, pid, programs0, x, scale, sums, out, bias, bias,
            FMT0, PLANAR0, BLOCKS0, R0, EVEN0, STAGES0, THREADS, HAS_BIAS, False, "after", COLUMNS,
        )  # fmt: skip
    elif pid < programs0 + programs1:
        rows_through_ring(
            ring, w1, rows1, pid - programs0, programs1, x, scale, sums, out + rows0,
            bias + rows0 if HAS_BIAS else bias, bias,
            FMT1, PLANAR1, BLOCKS1, R1, EVEN1, STAGES1, THREADS, HAS_BIAS, False, "after", COLUMNS,
        )  # fmt: skip
    else:
        rows_through_ring(
            ring, w2, rows2, pid - programs0 - programs1, programs2, x, scale, sums, out + rows0 + rows1,
            bias + rows0 + rows1 if HAS_BIAS else bias, bias,
            FMT2, PLANAR2, BLOCKS2, R2, EVEN2, STAGES2, THREADS, HAS_BIAS, False, "after", COLUMNS,
        )  # fmt: skip


def qkv_int8(
    q: torch.Tensor,
    scale: torch.Tensor,
    sums: torch.Tensor,
    weights: Sequence[torch.Tensor],
    fmts: Sequence[str],
    in_features: int,
    bias: torch.Tensor | None = None,
    *,
    layouts: Sequence[str],
    launches: Sequence[Launch] | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    dependent: bool = False,
) -> torch.Tensor:
    """x̂·[W0; W1; W2]ᵀ + bias → ``[M, rows0 + rows1 + rows2]`` for int8 activations as ``matvec_int8`` takes
    them.

    Each weight has its own format and layout; bias is for all rows together. The activations' width must suit
    every format: in_features is a multiple of the largest block, or all blocks are of one size.
    """
    packed = three_packed_rows(weights, fmts, in_features, layouts)
    for item in packed:
        check_int8(q, scale, sums, item.blocks * item.fmt.block_size)
    device = same_device(q, scale, sums, *weights, bias, out)
    total = sum(item.rows for item in packed)
    result = output_tensor(out, (q.shape[0], total), out_dtype, device)
    if result.numel() == 0:
        return result
    bias = vector(bias, total, "bias")
    if dependent and launches is None:
        if rings := _rings_for(packed, q.shape[0], "int8"):
            with on_device(device):
                _through_rings(packed, rings, q.view(torch.int32), scale, sums, result, bias, True)
            return result
    shapes = launches or [
        choose(item.fmt.name, item.rows, in_features, q.shape[0], "int8", several=True) for item in packed
    ]
    warps = shapes[0].warps
    arguments: list[object] = []
    constants: dict[str, object] = {}
    for i, (item, shape) in enumerate(zip(packed, shapes, strict=True)):
        arguments += [item.data, item.stride, item.rows, item.blocks]
        constants |= _constants(i, item, shape, warps)
    grid = sum(triton.cdiv(item.rows, constants[f"BN{i}"]) for i, item in enumerate(packed))
    with on_device(device):
        _qkv_int8_kernel[(grid,)](
            *arguments, q.view(torch.int32), scale, sums, result, total, bias,
            **constants, M=q.shape[0], HAS_BIAS=bias is not None, DEPENDENT=dependent,
            num_warps=warps, enable_fp_fusion=True, launch_pdl=dependent,
        )  # fmt: skip
    return result


def qkv(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    fmts: Sequence[str],
    in_features: int,
    bias: torch.Tensor | None = None,
    *,
    layouts: Sequence[str],
    out: torch.Tensor | None = None,
    dependent: bool = False,
) -> torch.Tensor:
    """x·[W0; W1; W2]ᵀ + bias of one vector ``x [1, in_features]`` → ``[1, rows0 + rows1 + rows2]`` in x's
    dtype, exact weights: one launch where the rows of all fit into rings, otherwise one for each.
    """
    packed = three_packed_rows(weights, fmts, in_features, layouts)
    row = float_rows_of(x, in_features, 1)
    device = same_device(x, *weights, bias, out)
    total = sum(item.rows for item in packed)
    result = output_tensor(out, (row.shape[0], total), x.dtype, device)
    if result.numel() == 0:
        return result
    bias = vector(bias, total, "bias")
    if rings := _rings_for(packed, 1, "float"):
        with on_device(device):
            _through_rings(packed, rings, row, None, None, result, bias, dependent)
        return result
    # The last may let attention begin before it has waited itself. The positions that attention looks at were
    # written before the step's first launch, which overlaps with none.
    first = 0
    for item in packed:
        rows = slice(first, first + item.rows)
        matvec(
            row, item.data, item.fmt.name, in_features, None if bias is None else bias[rows],
            out=result[:, rows], layout=item.layout, dependent=dependent,
        )  # fmt: skip
        first += item.rows
    return result


def _rings_for(packed: Sequence[PackedRows], batch: int, activations: str) -> list[RingLaunch] | None:
    """A ring for each weight, all of as many warps as the longest row takes; None where one has none."""

    def rings(least_warps: int) -> list[RingLaunch | None]:
        options = {"activations": activations, "before_attention": True, "least_warps": least_warps}
        return [ring_for([item], batch, **options) for item in packed]

    found = rings(1)
    if None in found:
        return None
    widest = max(ring.warps for ring in found)
    return found if all(ring.warps == widest for ring in found) else rings(widest)


def _through_rings(
    packed: Sequence[PackedRows],
    rings: Sequence[RingLaunch],
    x: torch.Tensor,
    scale: torch.Tensor | None,
    sums: torch.Tensor | None,
    result: torch.Tensor,
    bias: torch.Tensor | None,
    dependent: bool,
) -> None:
    """All weights in one launch, whose programs have as many tiles each."""
    tiles = [triton.cdiv(item.rows, ring.rows) for item, ring in zip(packed, rings, strict=True)]
    room = max(3, min(ring.programs for ring in rings))
    rounds = triton.cdiv(sum(tiles), room)
    while sum(triton.cdiv(count, rounds) for count in tiles) > room:
        rounds += 1
    programs = [triton.cdiv(count, rounds) for count in tiles]
    arguments: list[object] = []
    constants: dict[str, object] = {}
    for i, (item, ring, count) in enumerate(zip(packed, rings, programs, strict=True)):
        arguments += [item.data, item.rows, count]
        constants |= {f"{name}{i}": value for name, value in ring_constants(item, ring).items()}
    warps = rings[0].warps
    _qkv_ring_kernel[(sum(programs),)](
        *arguments, x, scale, sums, result, bias,
        **constants, THREADS=32 * warps, BYTES=max(ring.bytes for ring in rings),
        COLUMNS=packed[0].in_features, HAS_BIAS=bias is not None, num_warps=warps,
        maxnreg=min(ring.registers for ring in rings), enable_fp_fusion=True, launch_pdl=dependent,
    )  # fmt: skip


def _constants(index: int, item: PackedRows, shape: Launch, warps: int) -> dict[str, object]:
    """The launch shape of one weight, with as many lanes per step as the shared number of warps gives."""
    blocks = max(1, shape.blocks * warps // shape.warps)
    values = {
        "FMT": item.fmt.name,
        "PLANAR": item.planar,
        "ALIGN": item.align,
        "BN": shape.rows,
        "CB": blocks,
        "EVEN": item.blocks % blocks == 0,
    }
    return {f"{name}{index}": value for name, value in values.items()}
