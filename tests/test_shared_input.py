"""Several weights for one input: the CUDA bodies, interpreted in CI, against ``linear``; errors; overlap."""

import pytest
import torch
from cases import assert_within, float_tolerance, random_activations, random_blocks

from realizar_torch import ops, packing, reference
from realizar_torch.errors import FormatError
from realizar_torch.ops import cuda, shared_input
from realizar_torch.ops.gates import GATES

pytest.importorskip("triton")

from realizar_torch.triton_kernels.configs import choose

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
K = 256
# formats, rows and layouts of each weight; 300 columns are padded to two widths, 256 are whole blocks
GROUPS = {
    "one launch": (256, ("Q4_K", "Q8_0", "Q6_K"), (5, 2, 3), ("ggml", "planar", "planar")),
    "two widths": (300, ("Q4_K", "Q8_0", "Q6_K"), (3, 2, 1), ("ggml", "ggml", "ggml")),
    "two weights": (256, ("Q5_0", "Q8_0"), (3, 2), ("ggml", "planar")),
}


def _group(name: str) -> tuple:
    columns, fmts, rows, layouts = GROUPS[name]
    blocks = [random_blocks(fmt, n, columns).to(DEVICE) for fmt, n in zip(fmts, rows, strict=True)]
    weights = [packing.pack(*each) for each in zip(blocks, fmts, layouts, strict=True)]
    dense = [reference.dequantize(b, f, columns, torch.float64) for b, f in zip(blocks, fmts, strict=True)]
    return columns, weights, fmts, layouts, dense


BATCHES = {"one launch": (2, 5, 65), "two widths": (2,), "two weights": (5, 65)}


@pytest.mark.parametrize(("group", "batch"), [(group, n) for group in GROUPS for n in BATCHES[group]])
def test_linears_of_int8_activations_are_those_of_linear(group: str, batch: int) -> None:
    columns, weights, fmts, layouts, dense = _group(group)
    biases = [torch.randn(len(w), device=DEVICE) if i != 1 else None for i, w in enumerate(weights)]
    x, kind = random_activations(1, batch, columns).to(DEVICE), {"activations": "int8"}
    y = shared_input.linears_on_cuda(x, weights, fmts, columns, biases, **kind, layouts=layouts)
    assert y.shape == (1, batch, sum(map(len, weights)))
    # a launch has as many warps for each of its weights, and a sum the order that they give
    pairs = list(zip(fmts, map(len, weights), strict=True))
    shapes = [choose(fmt, rows, columns, batch, several=True) for fmt, rows in pairs]
    steps = [(shapes[0].warps, shape.blocks * shapes[0].warps // shape.warps) for shape in shapes]
    single = [choose(fmt, rows, columns, batch) for fmt, rows in pairs]
    alike = batch <= cuda.INT8_MATVEC_ROWS and steps == [(shape.warps, shape.blocks) for shape in single]
    sums_alike = group != "one launch" or batch > 64 or alike
    parts = y.split([len(weight) for weight in weights], -1)
    for part, weight, fmt, layout, bias, values in zip(
        parts, weights, fmts, layouts, biases, dense, strict=True
    ):
        alone = cuda.linear(x, weight, fmt, columns, bias, **kind, layout=layout)
        if sums_alike:
            assert torch.equal(part, alone)
        assert_within(part[0], alone[0].double(), 2 * float_tolerance(x[0], values))


@pytest.mark.parametrize("batch", [1, 9])
def test_linears_of_exact_activations_have_the_bits_of_linear(batch: int) -> None:
    _, weights, fmts, layouts, _ = _group("one launch")
    x, none = random_activations(batch, K, dtype=torch.bfloat16).to(DEVICE), [None] * 3
    y = shared_input.linears_on_cuda(x, weights, fmts, K, none, layouts=layouts)
    alone = [cuda.linear(x, w, f, K, layout=lay) for w, f, lay in zip(weights, fmts, layouts, strict=True)]
    assert torch.equal(y, torch.cat(alone, -1))


GATED = {
    "float-1": "silu",
    "float-9": "gelu",
    "int8-2": "gelu_tanh",
    "int8-5": "silu",
    "int8-65": "gelu_tanh",
}


@pytest.mark.parametrize(("case", "activation"), GATED.items())
def test_a_gated_product_is_that_of_its_two_halves(case: str, activation: str) -> None:
    activations, batch = case.split("-")[0], int(case.split("-")[1])
    gate, up = (random_blocks("Q6_K", 5, K, seed).to(DEVICE) for seed in (0, 1))
    x = random_activations(1, batch, K).to(DEVICE)
    kind = {"activations": activations, "layout": "planar"}
    pair = [packing.pack(weight, "Q6_K", "planar") for weight in (gate, up)]
    found = shared_input.gated_linear_on_cuda(x, *pair, "Q6_K", K, activation=activation, **kind)
    gates, ups = (cuda.linear(x, weight, "Q6_K", K, **kind) for weight in pair)
    wrong_gates, wrong_ups = (
        2 * float_tolerance(x[0], reference.dequantize(w, "Q6_K", K, torch.float64)) for w in (gate, up)
    )
    expected = GATES[activation](gates.double()) * ups.double()
    # no activation here is steeper than 1.13, or larger than its argument
    slack = 1.13 * wrong_gates * ups[0].abs() + gates[0].abs() * wrong_ups + wrong_gates * wrong_ups
    assert_within(found[0], expected[0], slack + 1e-5 * expected[0].abs())


def test_float64_is_computed_in_float64() -> None:
    gate, up = (random_blocks("Q6_K", 5, K, seed).to(DEVICE) for seed in (0, 1))
    x = random_activations(3, K, dtype=torch.float64).to(DEVICE)
    found = shared_input.gated_linear_on_cuda(x, gate, up, "Q6_K", K, activation="silu")
    dense = [reference.dequantize(weight, "Q6_K", K, torch.float64) for weight in (gate, up)]
    torch.testing.assert_close(
        found, GATES["silu"](x @ dense[0].T) * (x @ dense[1].T), rtol=1e-11, atol=1e-11
    )


def test_what_does_not_go_together_is_refused() -> None:
    x, weight, other = torch.ones(2, K), random_blocks("Q4_K", 5, K), random_blocks("Q4_K", 4, K)
    with pytest.raises(
        FormatError, match=r"2 weights, 1 formats, 2 biases and 2 layouts; expected one of each"
    ):
        ops.linears(x, [weight, other], ["Q4_K"], K)
    with pytest.raises(FormatError, match="0 weights"):
        ops.linears(x, [], [], K)
    with pytest.raises(FormatError, match=r"bias is .* expected a float type and shape"):
        ops.linears(x, [weight, other], ["Q4_K"] * 2, K, [None, torch.ones(5)])
    with pytest.raises(FormatError, match=r"gate has shape .*; expected equal shapes"):
        ops.gated_linear(x, weight, other, "Q4_K", K, activation="silu")
    with pytest.raises(
        FormatError, match="activation is 'relu', expected one of 'silu', 'gelu', 'gelu_tanh'"
    ):
        ops.gated_linear(x, weight, weight, "Q4_K", K, activation="relu")


def test_only_few_rows_on_hopper_overlap() -> None:
    rows = torch.ones(cuda.INT8_MATVEC_ROWS + 1, K, device=DEVICE)
    hopper = DEVICE == "cuda" and torch.cuda.get_device_capability() >= (9, 0)
    assert cuda.overlaps(rows[1:]) == hopper and not cuda.overlaps(rows)


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True])
@torch.no_grad()
def test_a_product_that_overlaps_reads_weights_written_just_before(captured: bool) -> None:
    """Its first weights are on their way before its activations are: on a side stream, and in a graph."""
    fmts, rows = ("Q4_K", "Q4_K", "Q6_K"), (1024, 512, 512)
    sets = [
        [random_blocks(f, n, 4096, seed).cuda() for f, n in zip(fmts, rows, strict=True)] for seed in (0, 1)
    ]
    x = random_activations(1, 4096, dtype=torch.bfloat16).cuda()
    weights = [torch.empty_like(weight) for weight in sets[0]]

    def used(weights: list[torch.Tensor]) -> list[torch.Tensor]:
        scaled, kind = x * 2, {"activations": "int8"}
        return [
            ops.linears(scaled, weights, fmts, 4096, **kind),
            ops.linear(scaled, weights[0], fmts[0], 4096, **kind),
            ops.gated_linear(scaled, weights[1], weights[1], fmts[1], 4096, activation="silu", **kind),
        ]

    def written_and_used() -> list[torch.Tensor]:
        found = []
        for source in sets:
            for weight, new in zip(weights, source, strict=True):
                weight.copy_(new)
            found += used(weights)
        return found

    expected = [y for source in sets for y in used(source)]
    torch.cuda.synchronize()
    assert not torch.equal(expected[0], expected[3])
    stream = torch.cuda.Stream()
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = written_and_used()
        for _ in range(30):
            graph.replay()
            assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    else:
        with torch.cuda.stream(stream):
            for _ in range(30):
                assert all(torch.equal(*pair) for pair in zip(written_and_used(), expected, strict=True))
