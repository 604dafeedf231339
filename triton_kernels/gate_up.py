"""act(x·Gateᵀ) * (x·Upᵀ) in one launch: two packed weights, int8 or float activations, SiLU or GELU."""

import torch
import triton
import triton.language as tl

from realizar_torch.errors import FormatError
from realizar_torch.triton_kernels.configs import Launch, RingLaunch, choose
from realizar_torch.triton_kernels.float_sums import float_sums
from realizar_torch.triton_kernels.launch import (
    MAX_ROWS,
    PackedRows,
    float_rows_of,
    on_device,
    packed_rows,
    same_device,
)
from realizar_torch.triton_kernels.matvec import (
    FLOAT_VECTORS,
    check_int8,
    output_tensor,
    ring_constants,
    ring_for,
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

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


@triton.jit
def activate(gate, ACTIVATION: tl.constexpr):
    """silu: g / (1 + e^-g); gelu: g/2 (1 + erf(g/√2)); gelu_tanh: g/2 (1 + tanh(√(2/π) (g + 0.044715 g³))),
    as g / (1 + e^-2z). fp32.
    """
    if ACTIVATION == "gelu":
        result = 0.5 * gate * (1.0 + tl.erf(0.7071067811865476 * gate))
    else:
        z = gate
        if ACTIVATION == "gelu_tanh":
            z = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        result = gate / (1.0 + tl.exp(-z))
    return result


@triton.jit
def pair_pointers(gate, gate_stride, up, up_stride, first_row, n_rows, ALIGN: tl.constexpr, BN: tl.constexpr):
    """BN rows of ``gate`` and the same rows of ``up``: one loop reads both and loads x once."""
    gates = row_pointers(gate, gate_stride, first_row, n_rows, ALIGN, BN)
    return gates, row_pointers(up, up_stride, first_row, n_rows, ALIGN, BN)


@triton.jit
def store_products(
    total, first_row, n_rows, out, M: tl.constexpr, BN: tl.constexpr, ACTIVATION: tl.constexpr
):
    """out[m, rows] = act(gate) * up."""
    gates, ups = reduce_rows(total, 0, M), reduce_rows(total, 1, M)
    rows = first_row + tl.arange(0, BN)
    for m in tl.static_range(M):
        value = cast(activate(gates[m], ACTIVATION) * ups[m], out.dtype.element_ty)
        tl.store(out + m * n_rows + rows, value, mask=rows < n_rows)


@triton.jit
def _gate_up_int8_kernel(
    gate, gate_stride, up, up_stride, n_rows, blocks, xq, xscale, xsums, out,
    FMT: tl.constexpr, PLANAR: tl.constexpr, ALIGN: tl.constexpr, M: tl.constexpr, BN: tl.constexpr,
    CB: tl.constexpr,
    WHOLE: tl.constexpr, ACTIVATION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program: BN rows of both weights (bytes: see decode.py), out[m, rows] = act(gate) * up."""
    first_row = tl.program_id(0) * BN
    groups = pair_pointers(gate, gate_stride, up, up_stride, first_row, n_rows, ALIGN, BN)
    total = int8_sums(
        groups, blocks, xq, xscale, xsums, FMT, PLANAR, ALIGN, M, CB, WHOLE, DEPENDENT, False, "later"
    )
    release_successor(DEPENDENT)
    store_products(total, first_row, n_rows, out, M, BN, ACTIVATION)


@triton.jit(do_not_specialize=["n_rows", "programs"])
def _gate_up_ring_kernel(
    gate, up, n_rows, programs, x, scale, sums, out,
    FMT: tl.constexpr, PLANAR: tl.constexpr, BLOCKS: tl.constexpr, R: tl.constexpr, EVEN: tl.constexpr,
    STAGES: tl.constexpr, THREADS: tl.constexpr, BYTES: tl.constexpr, COLUMNS: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """As the int8 or float kernel for one vector: every ``programs``-th tile of R rows of both (ring.py)."""
    program = tl.program_id(0)
    weights, ring = (gate, up), open_ring(BYTES)
    fill_ring(ring, weights, program, programs, n_rows, FMT, BLOCKS, R, EVEN, THREADS, STAGES)
    wait_and_release("before", True)
    vector = load_row_vector(x, scale, sums, COLUMNS, FMT, BLOCKS, THREADS)
    slot = ring
    for tile in range(program, tl.cdiv(n_rows, R), programs):
        total = next_sums(
            slot, weights, tile, programs, n_rows, vector, FMT, PLANAR, BLOCKS, R, EVEN, THREADS, STAGES
        )
        slot = next_slot(slot, ring, 2, FMT, BLOCKS, R, STAGES)
        store_products(total, tile * R, n_rows, out, 1, R, ACTIVATION)


@triton.jit
def _gate_up_float_kernel(
    gate, gate_stride, up, up_stride, n_rows, blocks, x, in_features, out, vectors,
    FMT: tl.constexpr, PLANAR: tl.constexpr, ALIGN: tl.constexpr, M: tl.constexpr, BN: tl.constexpr,
    CB: tl.constexpr,
    WHOLE: tl.constexpr, RAGGED: tl.constexpr, ACTIVATION: tl.constexpr, GROUPED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """As the int8 kernel, with float activations ``x [M, in_features]``.

    GROUPED: a program for every M of ``vectors``, as in matvec.py.
    """
    program = tl.program_id(0)
    if GROUPED:
        parts = tl.cdiv(vectors, M)
        # the last one may store a vector again: the same bits
        start = tl.minimum(program % parts * M, vectors - M)
        program = program // parts
        x, out = x + start * in_features, out + start * n_rows
    first_row = program * BN
    groups = pair_pointers(gate, gate_stride, up, up_stride, first_row, n_rows, ALIGN, BN)
    total = float_sums(groups, blocks, x, in_features, FMT, PLANAR, ALIGN, M, CB, WHOLE, RAGGED, DEPENDENT)
    release_successor(DEPENDENT)
    store_products(total, first_row, n_rows, out, M, BN, ACTIVATION)


def gate_up_int8(
    q: torch.Tensor,
    scale: torch.Tensor,
    sums: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    fmt: str,
    in_features: int,
    *,
    activation: str = "silu",
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    layout: str = "ggml",
    launch: Launch | None = None,
    dependent: bool = False,
) -> torch.Tensor:
    """act(x̂·gateᵀ) * (x̂·upᵀ) for int8 activations as ``matvec_int8`` takes them → ``[M, rows]`` in
    ``out_dtype``.

    gate and up: uint8 ``[rows, row_bytes]`` of one format and layout.
    """
    first, second, align = gate_up_pair(gate, up, fmt, in_features, layout)
    check_int8(q, scale, sums, first.blocks * first.fmt.block_size)
    device = same_device(q, scale, sums, gate, up, out)
    result = output_tensor(out, (q.shape[0], first.rows), out_dtype, device)
    check_activation(activation)
    if result.numel() == 0:
        return result
    ring = ring_for([first, second], q.shape[0]) if dependent and launch is None else None
    if ring is not None:
        _through_ring(first, second, ring, q.view(torch.int32), scale, sums, result, activation, True)
        return result
    shape = launch or choose(fmt, first.rows, in_features, q.shape[0], "int8", pair=True)
    with on_device(device):
        _gate_up_int8_kernel[(triton.cdiv(first.rows, shape.rows),)](
            gate, first.stride, up, second.stride, first.rows, first.blocks, q.view(torch.int32), scale,
            sums, result,
            FMT=fmt, PLANAR=first.planar, ALIGN=align, M=q.shape[0], BN=shape.rows, CB=shape.blocks,
            WHOLE=first.blocks % shape.blocks == 0, ACTIVATION=activation, DEPENDENT=dependent,
            num_warps=shape.warps, enable_fp_fusion=True, launch_pdl=dependent,
        )  # fmt: skip
    return result


def gate_up(
    x: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    fmt: str,
    in_features: int,
    *,
    activation: str = "silu",
    out: torch.Tensor | None = None,
    layout: str = "ggml",
    launch: Launch | None = None,
    dependent: bool = False,
) -> torch.Tensor:
    """act(x·gateᵀ) * (x·upᵀ), exact weights: x ``[..., in_features]`` → ``[..., rows]`` in x's dtype."""
    first, second, align = gate_up_pair(gate, up, fmt, in_features, layout)
    flat = float_rows_of(x, in_features, MAX_ROWS)
    device = same_device(x, gate, up, out)
    result = output_tensor(out, (*x.shape[:-1], first.rows), x.dtype, device)
    check_activation(activation)
    if result.numel() == 0:
        return result
    vectors, together = flat.shape[0], min(flat.shape[0], FLOAT_VECTORS)
    ring = ring_for([first, second], vectors, activations="float") if launch is None else None
    if ring is not None:
        _through_ring(first, second, ring, flat, None, None, result, activation, dependent)
        return result
    shape = launch or choose(fmt, first.rows, in_features, together, "float")
    grid = (triton.cdiv(first.rows, shape.rows) * triton.cdiv(vectors, together),)
    with on_device(device):
        _gate_up_float_kernel[grid](
            gate, first.stride, up, second.stride, first.rows, first.blocks, flat, in_features, result,
            vectors,
            FMT=fmt, PLANAR=first.planar, ALIGN=align, M=together, BN=shape.rows, CB=shape.blocks,
            WHOLE=first.blocks % shape.blocks == 0, RAGGED=in_features % first.fmt.block_size != 0,
            ACTIVATION=activation, GROUPED=vectors > together, DEPENDENT=dependent,
            num_warps=shape.warps, enable_fp_fusion=True, launch_pdl=dependent,
        )  # fmt: skip
    return result


def _through_ring(
    gate: PackedRows,
    up: PackedRows,
    ring: RingLaunch,
    x: torch.Tensor,
    scale: torch.Tensor | None,
    sums: torch.Tensor | None,
    result: torch.Tensor,
    activation: str,
    dependent: bool,
) -> None:
    programs = min(triton.cdiv(gate.rows, ring.rows), ring.programs)
    with on_device(x.device):
        _gate_up_ring_kernel[(programs,)](
            gate.data, up.data, gate.rows, programs, x, scale, sums, result,
            **ring_constants(gate, ring), THREADS=32 * ring.warps, BYTES=ring.bytes,
            COLUMNS=gate.in_features, ACTIVATION=activation,
            num_warps=ring.warps, maxnreg=ring.registers, enable_fp_fusion=True, launch_pdl=dependent,
        )  # fmt: skip


def gate_up_pair(
    gate: torch.Tensor, up: torch.Tensor, fmt: str, in_features: int, layout: str
) -> tuple[PackedRows, PackedRows, int]:
    first, second = packed_rows(gate, fmt, in_features, layout), packed_rows(up, fmt, in_features, layout)
    if first.rows != second.rows:
        raise FormatError(f"gate has {first.rows} rows and up {second.rows}; they must be equal")
    return first, second, min(first.align, second.align)


def check_activation(activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise FormatError(f"unknown activation {activation!r}; known: {', '.join(ACTIVATIONS)}")
