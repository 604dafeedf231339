"""Matvecs through a ring in shared memory against the oracle: rows that end in a tile, many tiles a program.

The interpreter has no shared memory: there the same kernels take their tiles from the weights themselves.
"""

import contextlib
import itertools

import pytest
import torch
from cases import (
    PACKED,
    assert_within,
    float_tolerance,
    int8_kernel_tolerance,
    random_activations,
    random_blocks,
)

from realizar_torch import packing, reference
from realizar_torch.formats import get_packed_format

pytest.importorskip("triton")

from kernel_tour import launches
from ring_shapes import launches_overlap, small_rings

from realizar_torch.triton_kernels import gate_up as gate_ups
from realizar_torch.triton_kernels import matvec as matvecs
from realizar_torch.triton_kernels import qkv as qkvs
from realizar_torch.triton_kernels.blocks import GGML_ONLY
from realizar_torch.triton_kernels.configs import Launch, choose_ring
from realizar_torch.triton_kernels.launch import packed_rows
from realizar_torch.triton_kernels.quantize import norm_quantize, quantize_activations

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# their scales and high bits are read as words that no 16 bytes divide
WITHOUT_RING = ("Q3_K", "Q5_0", "Q5_1")
RINGED = [fmt for fmt in PACKED if fmt not in WITHOUT_RING]
# three blocks, or as many as there is a whole number of 16-byte chunks of in every plane
COLUMNS = {fmt: 768 if fmt in GGML_ONLY else 256 for fmt in PACKED} | {"Q2_K": 1024, "Q6_K": 2048}
# three tiles of four rows, the last one of three
ROWS = 11

pytestmark = pytest.mark.skipif(not launches_overlap(), reason="launches cannot overlap here")


def layout_of(fmt: str) -> str:
    return "ggml" if fmt in GGML_ONLY else "planar"


class Case:
    """Random rows of one format and one quantized vector, on the device."""

    def __init__(self, fmt: str, rows: int = ROWS, columns: int = 0, seed: int = 0):
        self.fmt, self.layout, self.columns = fmt, layout_of(fmt), columns or COLUMNS[fmt]
        spec = get_packed_format(fmt)
        blocks = random_blocks(fmt, rows, self.columns, seed).to(DEVICE)
        self.weight = packing.pack(blocks, fmt, self.layout)
        self.decoded = reference.dequantize(blocks, fmt, self.columns, torch.float64)
        x = random_activations(1, self.columns, seed=seed).to(DEVICE) / 30
        self.q = quantize_activations(x, spec.blocks(self.columns) * spec.block_size)
        scale = self.q[1].double().repeat_interleave(32, -1)
        self.seen = (self.q[0].double() * scale)[:, : self.columns]

    @property
    def product(self) -> torch.Tensor:
        return self.seen @ self.decoded.T

    @property
    def tolerance(self) -> torch.Tensor:
        return int8_kernel_tolerance(self.seen, self.decoded)

    def has_ring(self) -> bool:
        packed = packed_rows(self.weight, self.fmt, self.columns, self.layout)
        return matvecs.ring_for([packed], 1) is not None


@pytest.fixture(params=[(1, 1), (2, 1), (3, 1), (2, 5)], ids=str)
def rings(request):
    """The rings that launches choose, of so many tiles, and programs that do all of them."""
    with small_rings(*request.param) as chosen:
        yield chosen


@pytest.mark.parametrize("fmt", RINGED)
def test_rows_with_bias_and_residual(fmt: str, rings) -> None:
    case = Case(fmt)
    bias, residual = torch.randn(ROWS, device=DEVICE), torch.randn(1, ROWS, device=DEVICE)
    memory = torch.full((ROWS + 64,), torch.nan, device=DEVICE)
    out = memory[:ROWS].view(1, ROWS)
    options = {"residual": residual, "out": out, "layout": case.layout}
    matvecs.matvec_int8(*case.q, case.weight, fmt, case.columns, bias, dependent=True, **options)
    assert len(rings) == 1 and rings[0].rows > 1
    slack = 1e-6 * (bias.abs() + residual.abs()).double()
    assert_within(out, case.product + bias + residual, case.tolerance + slack)
    # nothing behind the last row
    assert memory[ROWS:].isnan().all()


@pytest.mark.parametrize("fmt", ["Q4_K", "Q6_K", "Q8_0"])
def test_gate_and_up(fmt: str, rings) -> None:
    gate, up = Case(fmt), Case(fmt, seed=1)
    y = gate_ups.gate_up_int8(
        *gate.q, gate.weight, up.weight, fmt, gate.columns, layout=gate.layout, dependent=True
    )
    assert len(rings) == 1
    g, u = gate.product, gate.seen @ up.decoded.T
    active = torch.nn.functional.silu(g)
    bounds = gate.tolerance, int8_kernel_tolerance(gate.seen, up.decoded)
    # silu has slopes of at most 1.1; exp and the division cost a few ulp
    tolerance = 1.2 * bounds[0] * u.abs() + bounds[1] * active.abs() + 3e-6 * (active * u).abs() + 1e-9
    assert_within(y, active * u, tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fmt", RINGED)
def test_rows_times_floats(fmt: str, dtype: torch.dtype, rings) -> None:
    """In rows whose last block is not full, and behind which x has no more elements."""
    case = Case(fmt)
    columns = case.columns - 13
    x = torch.full((case.columns,), torch.nan, dtype=dtype, device=DEVICE)[:columns]
    x.copy_(random_activations(1, columns)[0])
    bias, residual = torch.randn(ROWS, device=DEVICE), torch.randn(1, ROWS, device=DEVICE).to(dtype)
    memory = torch.full((ROWS + 64,), torch.nan, dtype=dtype, device=DEVICE)
    out = memory[:ROWS].view(1, ROWS)
    options = {"residual": residual, "out": out, "layout": case.layout}
    matvecs.matvec(x[None], case.weight, fmt, columns, bias, dependent=True, **options)
    assert len(rings) == 1 and rings[0].rows > 1
    decoded = case.decoded[:, :columns]
    expected = x.double() @ decoded.T + bias + residual
    assert_within(out, expected, float_tolerance(x[None], decoded, dtype) + 1e-6 * expected.abs())
    assert memory[ROWS:].isnan().all()


@pytest.mark.parametrize("fmt", ["Q4_K", "Q6_K", "Q8_0"])
def test_gate_and_up_of_floats(fmt: str, rings) -> None:
    gate, up = Case(fmt), Case(fmt, seed=1)
    x = random_activations(1, gate.columns).to(DEVICE) / 30
    y = gate_ups.gate_up(x, gate.weight, up.weight, fmt, gate.columns, layout=gate.layout)
    assert len(rings) == 1
    g, u = x.double() @ gate.decoded.T, x.double() @ up.decoded.T
    active = torch.nn.functional.silu(g)
    bounds = float_tolerance(x, gate.decoded), float_tolerance(x, up.decoded)
    tolerance = 1.2 * bounds[0] * u.abs() + bounds[1] * active.abs() + 3e-6 * (active * u).abs() + 1e-9
    assert_within(y, active * u, tolerance)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("fmts", [("Q4_K", "Q4_K", "Q6_K"), ("Q8_0", "Q5_K", "Q4_1")])
def test_three_weights_of_different_formats(fmts: tuple[str, ...], biased: bool, rings) -> None:
    # in two rounds of at most five programs two, two and one
    heights = (ROWS, 9, 5)
    cases = [Case(fmt, rows, 2048, seed) for seed, (fmt, rows) in enumerate(zip(fmts, heights, strict=True))]
    bias = torch.randn(sum(heights), device=DEVICE) if biased else None
    weights, layouts = [case.weight for case in cases], [case.layout for case in cases]
    out = torch.full((1, sum(heights)), torch.nan, device=DEVICE)
    options = {"layouts": layouts, "out": out, "dependent": True}
    y = qkvs.qkv_int8(*cases[0].q, weights, fmts, 2048, bias, **options)
    # blocks of 32 take two warps where super-blocks alone take one
    assert [ring.warps for ring in rings] == ([2, 1, 2, 2, 2, 2] if "Q8_0" in fmts else [1, 1, 1])
    decoded = torch.cat([case.decoded for case in cases])
    expected, tolerance = cases[0].seen @ decoded.T, int8_kernel_tolerance(cases[0].seen, decoded)
    if bias is not None:
        expected, tolerance = expected + bias, tolerance + 1e-6 * bias.abs()
    assert_within(y, expected, tolerance)


@pytest.mark.parametrize(
    "fmts", [("Q4_K", "Q4_K", "Q6_K"), ("Q8_0", "Q5_K", "Q4_1"), ("Q4_K", "Q5_0", "Q3_K")]
)
def test_three_weights_times_floats(fmts: tuple[str, ...], rings) -> None:
    """In one launch, or where one format has no ring in three."""
    heights = (ROWS, 9, 5)
    cases = [Case(fmt, rows, 2048, seed) for seed, (fmt, rows) in enumerate(zip(fmts, heights, strict=True))]
    weights, layouts = [case.weight for case in cases], [case.layout for case in cases]
    # a bias of one row is as good as a vector
    x, bias = random_activations(1, 2035).to(DEVICE), torch.randn(1, sum(heights), device=DEVICE)
    out = torch.full((1, sum(heights)), torch.nan, device=DEVICE)
    for dependent in (False, True):
        options = {"layouts": layouts, "out": out.fill_(torch.nan), "dependent": dependent}
        with launches() as names:
            qkvs.qkv(x, weights, fmts, 2035, bias, **options)
        apart = {"_matvec_ring_kernel", "_matvec_float_kernel"}
        assert names == (apart if "Q3_K" in fmts else {"_qkv_ring_kernel"})
        decoded = torch.cat([case.decoded for case in cases])[:, :2035]
        expected = x.double() @ decoded.T + bias
        assert_within(out, expected, float_tolerance(x, decoded) + 1e-6 * bias.abs())


def test_an_empty_weight_among_three() -> None:
    case = Case("Q4_K", 5)
    weights = [case.weight, case.weight[:0], case.weight]
    y = qkvs.qkv_int8(*case.q, weights, ["Q4_K"] * 3, case.columns, layouts=["ggml"] * 3, dependent=True)
    assert_within(y, case.product.repeat(1, 2), case.tolerance.repeat(1, 2))


@pytest.mark.parametrize("fmt", PACKED)
def test_one_row_and_one_block(fmt: str) -> None:
    spec = get_packed_format(fmt)
    case = Case(fmt, 1, spec.block_size)
    options = {"layout": case.layout, "dependent": True}
    y = matvecs.matvec_int8(*case.q, case.weight, fmt, case.columns, **options)
    assert_within(y, case.product, case.tolerance)


def test_what_lies_apart_or_askew_takes_no_ring() -> None:
    case = Case("Q4_K", 9)
    width = case.weight.shape[1]
    apart = torch.zeros(9, width + 16, dtype=torch.uint8, device=DEVICE)[:, :width]
    askew = torch.zeros(9 * width + 8, dtype=torch.uint8, device=DEVICE)[8:].view(9, width)
    two = [part.expand(2, -1).contiguous() for part in case.q]
    with small_rings(2) as rings:
        for weight in (apart, askew):
            weight.copy_(case.weight)
            y = matvecs.matvec_int8(*case.q, weight, "Q4_K", case.columns, dependent=True)
            assert_within(y, case.product, case.tolerance)
        y = matvecs.matvec_int8(*two, case.weight, "Q4_K", case.columns, dependent=True)
        assert_within(y[1:], case.product, case.tolerance)
    assert rings == []
    for fmt in PACKED:
        assert Case(fmt, 1).has_ring() == (fmt not in WITHOUT_RING), fmt


@pytest.mark.parametrize("fmt", PACKED)
def test_rings_fit_into_a_multiprocessor(fmt: str) -> None:
    spec = get_packed_format(fmt)
    found = 0
    for rows, columns, weights in itertools.product(
        (1, 3, 4096, 128256), (256, 768, 2048, 4096, 14336, 28672, 65536), (1, 2)
    ):
        for before_attention, activations, warps in itertools.product(
            (False, True), ("int8", "float"), (1, 4)
        ):
            options = {"before_attention": before_attention, "activations": activations, "least_warps": warps}
            ring = choose_ring(fmt, rows, columns, weights, **options)
            if ring is None:
                continue
            found += 1
            # rows a thread has registers for
            assert ring.warps >= warps and ring.rows * weights <= (4 if ring.warps <= 2 else 2)
            # the activations of a thread and what it decodes
            assert ring.registers >= (128 if activations == "float" else 64)
            assert ring.bytes == ring.rows * ring.stages * weights * spec.row_bytes(columns) <= 48 << 10
            assert 1 <= ring.rows <= rows and 1 <= ring.stages <= 3 and ring.programs >= 1
            # allocated in units of 128 bytes; 1 KB is the system's, some bytes are Triton's
            at_once, taken = ring.programs // 132, -(-(ring.bytes + 128) // 128) * 128 + 1024
            assert at_once * taken <= 228 << 10 and ring.bytes + 128 <= 48 << 10
            assert at_once * ring.warps <= 32 and ring.registers <= 65536 // (32 * at_once * ring.warps)
    assert found > 20


@pytest.mark.gpu
@pytest.mark.parametrize(
    "fmts", [("Q4_K", "Q8_0", "Q8_0"), ("Q5_K", "Q4_K", "Q6_K"), ("Q6_K", "Q8_0", "Q4_0")]
)
def test_real_sizes_of_three(fmts: tuple[str, ...]) -> None:
    heights, columns = (4096, 1024, 1023), 4096
    cases = [Case(fmt, rows, columns) for fmt, rows in zip(fmts, heights, strict=True)]
    weights, decoded = [case.weight for case in cases], torch.cat([case.decoded for case in cases])
    out = torch.full((1, sum(heights)), torch.nan, device=DEVICE)
    options = {"out": out, "layouts": [case.layout for case in cases], "dependent": True}
    qkvs.qkv_int8(*cases[0].q, weights, fmts, columns, **options)
    assert_within(out, cases[0].seen @ decoded.T, int8_kernel_tolerance(cases[0].seen, decoded))
    x = random_activations(1, columns).to(DEVICE)
    qkvs.qkv(x, weights, fmts, columns, **options | {"out": out.fill_(torch.nan)})
    assert_within(out, x.double() @ decoded.T, float_tolerance(x, decoded))


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", ["Q4_K", "Q6_K", "Q8_0", "Q2_K"])
@pytest.mark.parametrize(("rows", "columns"), [(9001, 2048), (1061, 8192), (519, 14336), (28673, 4096)])
def test_real_sizes(fmt: str, rows: int, columns: int) -> None:
    case = Case(fmt, rows, columns)
    out = torch.full((1, rows), torch.nan, device=DEVICE)
    options = {"out": out, "layout": case.layout, "dependent": True}
    matvecs.matvec_int8(*case.q, case.weight, fmt, columns, **options)
    assert_within(out, case.product, case.tolerance)
    x = random_activations(1, columns).to(DEVICE)
    matvecs.matvec(x, case.weight, fmt, columns, **options)
    assert_within(out, x.double() @ case.decoded.T, float_tolerance(x, case.decoded))


@pytest.mark.gpu
@pytest.mark.parametrize("tiles", ["one tile", "many tiles"])
@pytest.mark.parametrize("fmt", ["Q4_K", "Q6_K"])
def test_overlapping_launches_give_the_bits_of_launches_apart(fmt: str, tiles: str) -> None:
    """A chain whose every product needs the one before, as in a step: a launch that reads too soon shows."""
    size, count = 2048, 12
    weights = [Case(fmt, size, size, seed).weight for seed in range(count)]
    x = torch.zeros(1, size, device=DEVICE)
    buffers = [torch.empty(1, size, device=DEVICE) for _ in range(2)]
    gain = torch.ones(size, device=DEVICE)
    norm = {"width": size, "normalization": "rmsnorm", "eps": 1e-6}
    layout = layout_of(fmt)

    def chain(finish) -> torch.Tensor:
        found = x
        for i, weight in enumerate(weights):
            q = norm_quantize(found, gain, dependent=i > 0, **norm)
            finish()
            found = buffers[i % 2]
            if i % 3 == 2:
                options = {"layout": layout, "dependent": True, "out": found}
                gate_ups.gate_up_int8(*q, weight, weights[i - 1], fmt, size, **options)
            else:
                matvecs.matvec_int8(*q, weight, fmt, size, out=found, layout=layout, dependent=True)
            finish()
        return found

    with contextlib.nullcontext() if tiles == "one tile" else small_rings(2, 96):
        chain(torch.cuda.synchronize)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            last = chain(lambda: None)
        for seed in range(50):
            x.copy_(random_activations(1, size, seed=seed))
            expected = chain(torch.cuda.synchronize).clone()
            for buffer in buffers:
                buffer.fill_(torch.nan)
            graph.replay()
            torch.cuda.synchronize()
            assert last.isfinite().all() and last.equal(expected), seed


@pytest.mark.gpu
def test_a_launch_shape_of_old_gives_what_the_ring_gives() -> None:
    case = Case("Q4_K", 4001, 4096)
    common = (*case.q, case.weight, "Q4_K", 4096)
    without = matvecs.matvec_int8(*common, launch=Launch(4, 16, 2), dependent=True)
    assert_within(matvecs.matvec_int8(*common, dependent=True), without.double(), 2 * case.tolerance)
