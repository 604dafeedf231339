"""expert_linear on every back end against the oracle: each row times the matrix of each expert it chose."""

import sys

import pytest
import torch
from cases import (
    PACKED,
    assert_within,
    float_tolerance,
    int8_kernel_tolerance,
    int8_tolerance,
    random_activations,
    random_blocks,
)

from realizar_torch import ops, packing, reference
from realizar_torch.errors import FormatError
from realizar_torch.ops import cuda, torch_kernels
from realizar_torch.ops import experts as expert_ops
from realizar_torch.ops.grouping import by_expert

EXPERTS, ROWS, COLUMNS, USED = 5, 7, 300, 2
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def matrices(fmt: str, rows: int = ROWS, columns: int = COLUMNS) -> torch.Tensor:
    return torch.stack([random_blocks(fmt, rows, columns, seed) for seed in range(EXPERTS)])


def choices(*lead: int, seed: int = 0) -> torch.Tensor:
    """Different experts for each row, as a router gives them."""
    scores = torch.rand(*lead, EXPERTS, generator=torch.Generator().manual_seed(seed))
    return scores.topk(USED).indices


def check(y, x, ids, weight, fmt, tolerance_of, *, quantized: bool = False) -> None:
    """Row by row, choice by choice, against float64; quantized: of the int8 activations of ``x``."""
    x = x.expand(*ids.shape, COLUMNS)
    if quantized:
        q = reference.quantize_activations(x, fmt)
        x = (q.q.double().unflatten(-1, (-1, 32)) * q.scale.double()[..., None]).flatten(-2)[..., :COLUMNS]
    for place in torch.cartesian_prod(*(torch.arange(n) for n in ids.shape)).tolist():
        decoded = reference.dequantize(weight[ids[tuple(place)]], fmt, COLUMNS, torch.float64)
        row = x[tuple(place)]
        assert_within(y[tuple(place)], row.double() @ decoded.T, tolerance_of(row, decoded))


@pytest.mark.parametrize("fmt", PACKED)
@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("shared", [True, False])
def test_cpu_equals_the_oracle(fmt: str, rows: int, shared: bool) -> None:
    """One row takes the launch for few choices, six rows have twelve choices and are grouped."""
    weight, ids = matrices(fmt), choices(rows)
    x = random_activations(rows, 1 if shared else USED, COLUMNS)
    check(ops.expert_linear(x, ids, weight, fmt, COLUMNS), x, ids, weight, fmt, float_tolerance)
    y = ops.expert_linear(x, ids, weight, fmt, COLUMNS, activations="int8")
    check(y, x, ids, weight, fmt, int8_kernel_tolerance, quantized=True)


@pytest.mark.parametrize("activations", ["float", "int8"])
@pytest.mark.parametrize("rows", [1, 6])
def test_the_paths_agree_at_sizes_of_many_tiles(rows: int, activations: str) -> None:
    """Several tiles of rows and several threads."""
    weight, ids, x = matrices("Q4_K", 1030, 512), choices(rows), random_activations(rows, 1, 512)
    y = ops.expert_linear(x, ids, weight, "Q4_K", 512, activations=activations)
    one_by_one = [
        ops.linear(x[i, 0], weight[e], "Q4_K", 512, activations=activations)
        for i in range(rows)
        for e in ids[i]
    ]
    tolerance = int8_kernel_tolerance(
        x.abs().amax().expand(512), reference.dequantize(weight[0], "Q4_K", 512)
    )
    assert (y.flatten(0, 1) - torch.stack(one_by_one)).abs().max() <= tolerance.max()
    if rows == 1:
        assert torch.equal(y.flatten(0, 1), torch.stack(one_by_one))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 6])
def test_dtypes(dtype: torch.dtype, rows: int) -> None:
    weight, ids, x = matrices("Q5_0"), choices(rows), random_activations(rows, USED, COLUMNS, dtype=dtype)
    y = ops.expert_linear(x, ids.int(), weight, "Q5_0", COLUMNS)
    assert y.dtype == dtype
    check(y, x, ids, weight, "Q5_0", float_tolerance)


def test_places_are_sorted_by_expert() -> None:
    """Numbers that no expert has are left out."""
    order, spans = by_expert(torch.tensor([3, 0, 3, -1, 1, 0, EXPERTS, 3]), EXPERTS)
    assert {expert: order[span].tolist() for expert, span in spans} == {0: [1, 5], 1: [4], 3: [0, 2, 7]}


@pytest.mark.parametrize("activations", ["float", "int8"])
@pytest.mark.parametrize(
    ("fmt", "layout"), [("Q4_K", "ggml"), ("Q6_K", "planar"), ("Q8_0", "planar"), ("Q4_1", "ggml")]
)
def test_triton_equals_the_oracle(fmt: str, layout: str, activations: str) -> None:
    pytest.importorskip("triton")
    weight, ids = matrices(fmt), choices(2)
    x = random_activations(2, 1 if fmt == "Q4_K" else USED, COLUMNS)
    arguments = (x.to(DEVICE), ids.to(DEVICE), packing.pack(weight, fmt, layout).to(DEVICE), fmt, COLUMNS)
    y = expert_ops.on_cuda(*arguments, activations=activations, layout=layout).cpu()
    quantized = activations == "int8"
    check(
        y, x, ids, weight, fmt, int8_kernel_tolerance if quantized else float_tolerance, quantized=quantized
    )


@pytest.mark.parametrize("activations", ["float", "int8"])
def test_many_rows_are_sorted_by_expert_on_a_gpu(activations: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frequent experts have a product of their own, rare ones share a launch."""
    pytest.importorskip("triton")
    monkeypatch.setattr(expert_ops, "STEP_ROWS", 5)
    monkeypatch.setattr(expert_ops.cuda, "MATVEC_ROWS", 2)
    weight, x = matrices("Q8_0"), random_activations(6, 1, COLUMNS)
    ids = torch.tensor([[0, 1], [0, 2], [1, 0], [0, 3], [4, 0], [3, 0]])
    y = expert_ops.on_cuda(
        x.to(DEVICE), ids.to(DEVICE), weight.to(DEVICE), "Q8_0", COLUMNS, activations=activations
    )
    # products of many rows take the activations as they are
    check(y.cpu(), x, ids, weight, "Q8_0", float_tolerance if activations == "float" else int8_tolerance)


@pytest.mark.parametrize("rows", [2, 3])
def test_an_expert_that_there_is_not(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, and sorted."""
    pytest.importorskip("triton")
    monkeypatch.setattr(expert_ops, "STEP_ROWS", 2)
    weight, x = matrices("Q8_0").to(DEVICE), random_activations(rows, 1, COLUMNS).to(DEVICE)
    ids = choices(rows).to(DEVICE)
    ids[0, 1], ids[1, 0] = EXPERTS, -1
    y = expert_ops.on_cuda(x, ids, weight, "Q8_0", COLUMNS)
    wrong = torch.zeros(rows, USED, dtype=torch.bool)
    wrong[0, 1] = wrong[1, 0] = True
    assert torch.equal(y.isnan().all(-1).cpu(), wrong)
    assert torch.equal(y.isnan().any(-1).cpu(), wrong)
    with pytest.raises(FormatError, match=r"expert (-1|5) is none of the 5"):
        ops.expert_linear(x.cpu(), ids.cpu(), weight.cpu(), "Q8_0", COLUMNS)


def test_torch_ops_stand_in_for_kernels() -> None:
    """Devices without kernels: few choices and many."""
    for rows in (1, 6):
        weight, ids, x = matrices("Q4_0"), choices(rows), random_activations(rows, 1, COLUMNS)
        for activations in ("float", "int8"):
            y = expert_ops.expert_linear(
                torch_kernels, x, ids, weight, "Q4_0", COLUMNS, activations=activations
            )
            tolerance_of = float_tolerance if activations == "float" else int8_tolerance
            check(y, x, ids, weight, "Q4_0", tolerance_of)


class OnGpu(torch.Tensor):
    """Says in Python that it lies on one."""

    is_cuda = True


def test_the_transposed_product_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "problem", lambda: "no module named triton")
    monkeypatch.setitem(sys.modules, "realizar_torch.triton_kernels.launch", None)
    grad, ids, weight = random_activations(3, USED, ROWS), choices(3), matrices("Q8_0")
    expected = expert_ops.expert_linear_transposed(grad, ids, weight, "Q8_0", COLUMNS)
    y = expert_ops.expert_linear_transposed(grad.as_subclass(OnGpu), ids, weight, "Q8_0", COLUMNS)
    assert torch.equal(y, expected)


def test_a_layout_without_kernels_is_refused_where_no_row_chose_an_expert() -> None:
    pytest.importorskip("triton")
    nothing = (torch.empty(0, USED, ROWS).as_subclass(OnGpu), choices(0), matrices("Q4_K"), "Q4_K", COLUMNS)
    with pytest.raises(FormatError, match="Q4_K has no layout 'planar' on CUDA"):
        expert_ops.expert_linear_transposed(*nothing, layout="planar")


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("shared", [True, False])
def test_derivatives(rows: int, shared: bool) -> None:
    """First and second order, both modes, in float64."""
    weight, ids = matrices("Q8_0", 2, 5), choices(rows)
    x = torch.randn(rows, 1 if shared else USED, 5, dtype=torch.float64, requires_grad=True)

    def product(x: torch.Tensor) -> torch.Tensor:
        return ops.expert_linear(x, ids, weight, "Q8_0", 5)

    assert torch.autograd.gradcheck(product, (x,), check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(product, (x,))


def test_vmap_and_autocast() -> None:
    weight, ids, x = matrices("Q6_K"), choices(3, 2), random_activations(3, 2, 1, COLUMNS)
    expected = ops.expert_linear(x, ids, weight, "Q6_K", COLUMNS)
    both = torch.vmap(lambda x, ids: ops.expert_linear(x, ids, weight, "Q6_K", COLUMNS))(x, ids)
    assert torch.equal(both, expected)
    one = torch.vmap(lambda x: ops.expert_linear(x, ids[0], weight, "Q6_K", COLUMNS))(x)
    check(one, x, ids[:1].expand_as(ids), weight, "Q6_K", float_tolerance)
    with torch.autocast("cpu", torch.bfloat16):
        y = ops.expert_linear(x, ids, weight, "Q6_K", COLUMNS)
    assert y.dtype == torch.bfloat16
    check(y, x.bfloat16(), ids, weight, "Q6_K", float_tolerance)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"x": torch.zeros(4, 3, COLUMNS)},
            "input has shape .4, 3, 300., experts have .4, 2.; expected the same",
        ),
        ({"x": torch.zeros(3, 1, COLUMNS)}, "expected the same leading dimensions"),
        ({"x": torch.zeros(4, 1, COLUMNS + 1)}, "expected last dimension 300"),
        ({"experts": torch.zeros(4, 2)}, "experts are torch.float32"),
        ({"weight": random_blocks("Q4_K", ROWS, COLUMNS)}, r"expected \[experts, rows, row_bytes\]"),
        ({"weight": matrices("Q8_0")}, "weight has shape .7, 340., expected .rows, 288."),
        ({"activations": "int4"}, "activations is 'int4'"),
        ({"layout": "planar"}, "layout 'planar' has no kernel on cpu"),
    ],
)
def test_wrong_arguments_are_named(changes: dict, sentence: str) -> None:
    right = {"x": torch.zeros(4, 1, COLUMNS), "experts": choices(4), "weight": matrices("Q4_K")}
    with pytest.raises(FormatError, match=sentence):
        ops.expert_linear(**right | {"fmt": "Q4_K", "in_features": COLUMNS} | changes)
