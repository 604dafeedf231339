"""Tensor-core products of packed weights against the oracle: tiny under the interpreter, large on a GPU."""

import pytest
import torch
from cases import (
    PACKED,
    assert_within,
    probe_vector,
    random_activations,
    random_blocks,
    scaled_probe_rows,
)

from realizar_torch import packing, reference
from realizar_torch.errors import FormatError
from realizar_torch.formats import get_packed_format

pytest.importorskip("triton")

from realizar_torch.triton_kernels.blocks import GGML_ONLY
from realizar_torch.triton_kernels.configs import MatmulLaunch, choose_matmul
from realizar_torch.triton_kernels.grouped import empty_grouped, ungrouped
from realizar_torch.triton_kernels.matmul import matmul
from realizar_torch.triton_kernels.matmul_gate_up import matmul_gate_up
from realizar_torch.triton_kernels.matmul_qkv import matmul_qkv
from realizar_torch.triton_kernels.quantize import norm_quantize, quantize_activations

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYOUTS = [
    (fmt, layout)
    for fmt in PACKED
    for layout in ("ggml", "planar")
    if layout == "ggml" or fmt not in GGML_ONLY
]
Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def grouped(x: torch.Tensor, fmt: str) -> tuple[Parts, torch.Tensor]:
    """Grouped activations, and the float64 values they stand for."""
    spec, columns = get_packed_format(fmt), x.shape[-1]
    width = spec.blocks(columns) * spec.block_size
    parts = quantize_activations(x, width, empty_grouped(len(x), width, x.device))
    return parts, ungrouped(*parts[:2], len(x))[:, :columns]


def matmul_tolerance(seen: torch.Tensor, decoded: torch.Tensor, fmt: str) -> torch.Tensor:
    """Largest error of the kernel against the float64 product of its own inputs.

    Sums in fp32: ``1e-5 * sum|w x|``. Weights times their scales are exact in 11 bits but for scales of eight
    bits, and in blocks of 32: there they are rounded to 2^-12 of themselves, or to half of 2^-24 where the
    step's power of two is 2^-10, and so are scale and zero point before.
    """
    magnitudes = seen.double().abs() @ decoded.double().abs().T
    if get_packed_format(fmt).block_size == 32:
        largest = decoded.double().abs().amax(1)
        return (1e-5 + 2.0**-12) * magnitudes + 2.0**-14 * seen.double().abs().sum(1)[:, None] * largest
    return (1e-5 + (2.0**-12 if fmt == "Q6_K" else 0)) * magnitudes


def check_matmul(
    fmt: str, layout: str, rows: int, in_features: int, batch: int, launch: MatmulLaunch | None = None
) -> None:
    """Product of random blocks with bias and residual, against float64."""
    blocks = random_blocks(fmt, rows, in_features, seed=batch).to(DEVICE)
    decoded = reference.dequantize(blocks, fmt, in_features, torch.float64)
    weight = packing.pack(blocks, fmt, layout)
    parts, seen = grouped(random_activations(batch, in_features, seed=batch).to(DEVICE), fmt)
    bias, residual = torch.randn(rows, device=DEVICE), torch.randn(batch, rows, device=DEVICE)
    y = matmul(*parts, batch, weight, fmt, in_features, bias, residual=residual, layout=layout, launch=launch)
    slack = 1e-6 * (bias.abs() + residual.abs()).double()
    expected = seen @ decoded.T + bias.double() + residual.double()
    assert_within(y, expected, matmul_tolerance(seen, decoded, fmt) + slack)


@pytest.mark.parametrize(("fmt", "layout"), LAYOUTS)
def test_matmul_of_random_blocks(fmt: str, layout: str) -> None:
    # two steps for each of two warps, the last one past the end of the row
    check_matmul(fmt, layout, 11, 600, 3, MatmulLaunch(1, 1, 2))


@pytest.mark.parametrize("fmt", ["Q4_K", "Q6_K", "Q5_0"])
def test_several_tiles_and_columns_of_a_program(fmt: str) -> None:
    check_matmul(fmt, "ggml", 20, 256, 17, MatmulLaunch(2, 2, 1))


@pytest.mark.parametrize("fmt", PACKED)
def test_matmul_of_the_probe_is_exact(fmt: str) -> None:
    size = get_packed_format(fmt).block_size
    x = probe_vector(size)
    parts, seen = grouped(x.expand(2, -1).to(DEVICE), fmt)
    assert torch.equal(seen[0].cpu(), x.double())
    weight = scaled_probe_rows(fmt, 9).to(DEVICE)
    decoded = reference.dequantize(weight, fmt, size, torch.float64)
    expected = seen @ decoded.T
    y = matmul(*parts, 2, weight, fmt, size)
    # scales of eight bits times weights of six do not fit fp16
    rounding = 2.0**-12 * (seen.abs() @ decoded.abs().T) if fmt == "Q6_K" else torch.zeros_like(expected)
    assert_within(y, expected, 1e-6 * expected.abs().amax() + rounding)


# one launch shape and one width per test: every other one is another kernel to compile
@pytest.mark.gpu
@pytest.mark.parametrize(("fmt", "layout"), LAYOUTS)
def test_every_batch_up_to_seventy(fmt: str, layout: str) -> None:
    for batch in range(1, 71):
        check_matmul(fmt, layout, 257, 1280, batch, MatmulLaunch(2, 1, 4))


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [8, 16, 32])
@pytest.mark.parametrize(("fmt", "layout"), [("Q4_K", "ggml"), ("Q6_K", "planar")])
def test_large_weights_in_chosen_launch_shapes(fmt: str, layout: str, batch: int) -> None:
    for rows, in_features in ((4097, 14336), (14336, 4096)):
        check_matmul(fmt, layout, rows, in_features, batch)


def test_a_result_depends_on_no_neighbour_and_no_slot() -> None:
    blocks = random_blocks("Q4_K", 9, 256).to(DEVICE)
    x = random_activations(9, 256).to(DEVICE)
    poisoned = x.clone()
    poisoned[4] = torch.nan
    order = torch.tensor([8, 0, 5, 3, 4, 1, 7, 2, 6], device=DEVICE)
    first = matmul(*grouped(x, "Q4_K")[0], 9, blocks, "Q4_K", 256)
    second = matmul(*grouped(poisoned, "Q4_K")[0], 9, blocks, "Q4_K", 256)
    moved = matmul(*grouped(x[order], "Q4_K")[0], 9, blocks, "Q4_K", 256)
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(first[others], second[others])
    assert second[4].isnan().all()
    assert torch.equal(moved, first[order])


def test_a_nan_past_the_end_of_a_short_row_stays_outside() -> None:
    # three blocks for two warps: one warp has a step too many and reads the last block again
    blocks = random_blocks("Q4_K", 3, 768).to(DEVICE)
    x = random_activations(2, 768).to(DEVICE)
    x[1, 600] = torch.nan
    y = matmul(*grouped(x, "Q4_K")[0], 2, blocks, "Q4_K", 768, launch=MatmulLaunch(1, 1, 2))
    assert not y[0].isnan().any() and y[1].isnan().all()


def test_outputs_of_other_types_and_no_rows() -> None:
    blocks = random_blocks("Q8_0", 5, 64).to(DEVICE)
    parts, seen = grouped(random_activations(4, 64).to(DEVICE), "Q8_0")
    exact = seen @ reference.dequantize(blocks, "Q8_0", 64, torch.float64).T
    for dtype in (torch.float16, torch.bfloat16):
        y = matmul(*parts, 4, blocks, "Q8_0", 64, out_dtype=dtype)
        assert y.dtype == dtype
        assert_within(y, exact, torch.finfo(dtype).eps * exact.abs() + 1e-3)
    empty = matmul(*empty_grouped(0, 64, blocks.device), 0, blocks, "Q8_0", 64)
    assert empty.shape == (0, 5)


def test_activations_that_are_not_grouped_or_not_so_many_are_refused() -> None:
    weight, x = random_blocks("Q8_0", 2, 32).to(DEVICE), random_activations(9, 32).to(DEVICE)
    plain = quantize_activations(x, 32)
    for parts, batch in ((plain, 9), (grouped(x, "Q8_0")[0], 8)):
        with pytest.raises(FormatError, match="as empty_grouped\\(\\) makes them"):
            matmul(*parts, batch, weight, "Q8_0", 32)


@pytest.mark.parametrize("batch", [3, 9])
def test_activations_are_grouped_with_eleven_bits_and_their_sums(batch: int) -> None:
    # 600 activations: three steps, the last one not full
    x = random_activations(batch, 600).to(DEVICE) * torch.logspace(-10, 10, batch, device=DEVICE)[:, None]
    x[1, :256], x[2, 7] = 0, 1e4 * x[2, 7]
    gain = torch.rand(600, device=DEVICE) + 0.5
    normed = torch.nn.functional.rms_norm(x.double(), (600,), gain.double(), 1e-5)
    kind = {"width": 608, "normalization": "rmsnorm", "eps": 1e-5}
    room = [empty_grouped(batch, 608, x.device) for _ in range(2)]
    for values in (values for parts in room for values in parts):
        values.fill_(torch.nan)
    for (values, scale, sums), expected in (
        (quantize_activations(x, 608, room[0]), x.double()),
        (norm_quantize(x, gain, out=room[1], **kind), normed),
    ):
        seen = ungrouped(values, scale, batch)
        padded = torch.nn.functional.pad(expected, (0, 768 - 600))
        steps = padded.unflatten(1, (3, 256))
        largest = steps.abs().amax(2, keepdim=True).expand(-1, -1, 256).flatten(1)
        # half a unit in the last of 11 bits, or of the smallest fp16, 2^-24 where the largest is 512 or more
        assert_within(seen, padded, 2.0**-11 * padded.abs() + 2.0**-34 * largest + 2e-7 * padded.abs())
        found = sums.double().sum(-1) * scale.double().unsqueeze(-1)
        found = found.transpose(1, 2).reshape(-1, 3, 16)[:batch]
        exact = seen.unflatten(1, (3, 16, 16)).sum(-1)
        assert_within(found, exact, 2.0**-21 * seen.abs().unflatten(1, (3, 16, 16)).sum(-1) + 1e-300)


def test_an_infinite_activation_makes_its_vector_nan() -> None:
    x = random_activations(3, 256).to(DEVICE)
    x[1, 40] = torch.inf
    y = matmul(*grouped(x, "Q4_K")[0], 3, random_blocks("Q4_K", 5, 256).to(DEVICE), "Q4_K", 256)
    assert y[1].isnan().all() and y[[0, 2]].isfinite().all()


@pytest.mark.parametrize(
    ("fmt", "layout", "activation"), [("Q4_K", "ggml", "silu"), ("Q6_K", "planar", "gelu_tanh")]
)
def test_gate_and_up_equal_two_products(fmt: str, layout: str, activation: str) -> None:
    blocks = [random_blocks(fmt, 9, 256, seed).to(DEVICE) for seed in (1, 2)]
    gate, up = (packing.pack(item, fmt, layout) for item in blocks)
    parts, _ = grouped(random_activations(9, 256).to(DEVICE) / 30, fmt)
    launch = MatmulLaunch(2, 2, 1)
    y = matmul_gate_up(*parts, 9, gate, up, fmt, 256, activation=activation, layout=layout, launch=launch)
    g, u = (matmul(*parts, 9, item, fmt, 256, layout=layout, launch=launch).double() for item in (gate, up))
    if activation == "silu":
        active = torch.nn.functional.silu(g)
    else:
        active = torch.nn.functional.gelu(g, approximate="tanh")
    # exp and the division cost a few ulp
    assert_within(y, active * u, 3e-6 * (active * u).abs() + 1e-9)


def test_three_weights_of_different_formats_equal_three_products() -> None:
    fmts, layouts, rows = ("Q4_K", "Q5_K", "Q6_K"), ("ggml", "ggml", "planar"), (17, 3, 5)
    weights = [
        packing.pack(random_blocks(f, n, 256, n).to(DEVICE), f, lay)
        for f, n, lay in zip(fmts, rows, layouts, strict=True)
    ]
    parts, _ = grouped(random_activations(9, 256).to(DEVICE), "Q4_K")
    launch, bias = MatmulLaunch(2, 1, 1), torch.randn(sum(rows), device=DEVICE)
    y = matmul_qkv(*parts, 9, weights, fmts, 256, bias, layouts=layouts, launch=launch)
    singles = [
        matmul(*parts, 9, w, f, 256, b, layout=lay, launch=launch)
        for w, f, lay, b in zip(weights, fmts, layouts, bias.split(rows), strict=True)
    ]
    assert torch.equal(y, torch.cat(singles, 1))


def test_launch_shapes_fit_rows_and_columns() -> None:
    for rows, in_features, batch in [(1, 32, 1), (4096, 4096, 8), (128256, 4096, 33), (4096, 14336, 70)]:
        for pair in (False, True):
            shape = choose_matmul(rows, in_features, batch, pair)
            assert shape.columns * 8 >= min(batch, 32)
            assert shape.k_warps <= max(1, -(-in_features // 256))
            # a multiprocessor has 65,536 registers, and takes them 8 a thread at a time
            assert shape.registers % 8 == 0 or shape.registers == 255
            assert 32 * shape.warps * shape.registers <= 65536
