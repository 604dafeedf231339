"""Products whose activations stay in registers, against the oracle: tiny interpreted ones, large on a GPU."""

import pytest
import torch
from cases import random_activations, random_blocks
from test_triton_matmul import DEVICE, LAYOUTS, check_matmul, quantized

from realizar_torch.errors import FormatError
from realizar_torch.formats import get_packed_format

pytest.importorskip("triton")

from realizar_torch.triton_kernels.configs import StationaryLaunch
from realizar_torch.triton_kernels.matmul import matmul_int8
from realizar_torch.triton_kernels.matmul_gate_up import matmul_gate_up_int8

SMALL = StationaryLaunch(1, 4, 2, 128, 2)


@pytest.mark.parametrize(("fmt", "layout"), LAYOUTS)
def test_products_of_random_blocks(fmt: str, layout: str) -> None:
    # three steps for four warps, the last one not whole; two tiles that overlap
    check_matmul(fmt, layout, 19, 600 if get_packed_format(fmt).block_size == 32 else 768, 3, SMALL)


def test_groups_of_columns_and_splits_of_a_row() -> None:
    check_matmul("Q4_K", "ggml", 33, 1280, 11, SMALL)
    check_matmul("Q4_K", "ggml", 17, 512, 11, StationaryLaunch(2, 8, 2, 128, 2))


def test_fewer_rows_than_a_tile_and_one_step() -> None:
    check_matmul("Q6_K", "ggml", 5, 256, 2, SMALL)


def test_a_residual_in_place_is_added_once() -> None:
    blocks = random_blocks("Q4_K", 19, 512).to(DEVICE)
    parts, _ = quantized(random_activations(2, 512).to(DEVICE), "Q4_K")
    residual = torch.randn(2, 19, device=DEVICE)
    expected = matmul_int8(*parts, 2, blocks, "Q4_K", 512, launch=SMALL) + residual
    matmul_int8(*parts, 2, blocks, "Q4_K", 512, residual=residual, out=residual, launch=SMALL)
    assert torch.equal(residual, expected)


def test_a_result_depends_on_no_neighbour_no_slot_and_no_number_of_programs() -> None:
    blocks = random_blocks("Q4_K", 33, 256).to(DEVICE)
    x = random_activations(9, 256).to(DEVICE)
    poisoned = x.clone()
    poisoned[4] = torch.nan
    order = torch.tensor([8, 0, 5, 3, 4, 1, 7, 2, 6], device=DEVICE)
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    first, second, moved = (
        matmul_int8(*quantized(vectors, "Q4_K")[0], 9, blocks, "Q4_K", 256, launch=launch)
        for vectors, launch in (
            (x, SMALL), (poisoned, SMALL), (x[order], StationaryLaunch(1, 4, 6, 128, 1))
        )
    )  # fmt: skip
    assert torch.equal(first[others], second[others])
    assert second[4].isnan().all()
    assert torch.equal(moved, first[order])


def test_gate_and_up_equal_two_products() -> None:
    gate, up = (random_blocks("Q4_K", 19, 512, seed=s).to(DEVICE) for s in (1, 2))
    parts, _ = quantized(random_activations(3, 512).to(DEVICE) / 30, "Q4_K")
    y = matmul_gate_up_int8(*parts, 3, gate, up, "Q4_K", 512, launch=SMALL)
    a, b = (matmul_int8(*parts, 3, w, "Q4_K", 512, launch=SMALL) for w in (gate, up))
    torch.testing.assert_close(y, torch.nn.functional.silu(a) * b, rtol=1e-5, atol=1e-6)


def test_gate_and_up_of_rows_that_need_more_warps_are_refused() -> None:
    parts, _ = quantized(random_activations(1, 1280).to(DEVICE), "Q4_K")
    blocks = random_blocks("Q4_K", 3, 1280).to(DEVICE)
    with pytest.raises(FormatError, match="1024 weights"):
        matmul_gate_up_int8(*parts, 1, blocks, blocks, "Q4_K", 1280, launch=SMALL)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("launch", "batch"),
    [
        (StationaryLaunch(1, 16, 132, 128, 4), 8), (StationaryLaunch(1, 8, 264, 128, 4), 17),
        (StationaryLaunch(2, 16, 132, 128, 4), 16), (StationaryLaunch(2, 8, 132, 255, 4), 33),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("fmt", "layout"), [("Q4_K", "ggml"), ("Q6_K", "planar")])
def test_large_weights(fmt: str, layout: str, launch: StationaryLaunch, batch: int) -> None:
    for rows, in_features in ((4097, 14336), (14336, 4096), (257, 256)):
        check_matmul(fmt, layout, rows, in_features, batch, launch)
