"""The bf16 product on matrix tiles: every format against exact sums of rounded factors."""

import pytest
import torch
from cases import PACKED, assert_within, random_activations, random_blocks

from realizar_torch import reference
from realizar_torch.formats import FORMATS

pytest.importorskip("numba")

from realizar_torch.cpu_kernels import matrix_tiles
from realizar_torch.cpu_kernels.bf16_matmul import bf16_into_panel, bf16_tile_of
from realizar_torch.cpu_kernels.jit import jit

pytestmark = pytest.mark.skipif(not matrix_tiles.available(), reason="this CPU has no matrix tiles")


@jit
def _pack(x, width, count, columns, panel):
    for column in range(count):
        bf16_into_panel(x + 4 * width * column, 0, width // 32, column, columns, panel)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """bf16 as the kernels round: to nearest, halves away from zero."""
    return ((x.float().contiguous().view(torch.int32) + 0x8000) & -0x10000).view(torch.float32)


# tails of the row tile (32, of two panels of 16), of the column tile (32) and of the panel (256 weights)
@pytest.mark.parametrize(("rows", "blocks", "count"), [(32, 8, 32), (7, 3, 1), (17, 9, 33), (31, 17, 70)])
@pytest.mark.parametrize("fmt", PACKED)
def test_equals_the_product_of_rounded_factors(fmt: str, rows: int, blocks: int, count: int) -> None:
    tile = bf16_tile_of(fmt)

    @jit
    def run(weight, row_bytes, rows, width, used, columns, x, out):
        tile(weight, row_bytes, rows, width, used, columns, x, out)

    width, columns = blocks * FORMATS[fmt].block_size, -(-count // 32) * 32
    weight, x = random_blocks(fmt, rows, width), random_activations(count, width)
    panel, out = torch.zeros(columns * width, dtype=torch.int16), torch.full((columns, 32), torch.nan)
    _pack(x.data_ptr(), width, count, columns, panel.data_ptr())
    shape = (weight.shape[1], rows, width, count, columns)
    run(weight.data_ptr(), *shape, panel.data_ptr(), out.data_ptr())
    decoded = reference.dequantize(weight, fmt)
    factors = rounded(x).double(), rounded(decoded).double()
    # fp32 sums; a weight one fp32 step beside the oracle's may round to the next bf16, 2^-8 away
    tolerance = 1e-5 * (factors[0].abs() @ factors[1].abs().T)
    largest = (rounded(x).double().abs()[:, None] * factors[1].abs()).amax(-1) / 128
    assert_within(out[:count, :rows].contiguous(), factors[0] @ factors[1].T, tolerance + largest)
    mean_error = (out[:count, :rows] - factors[0] @ factors[1].T).abs().mean()
    assert mean_error <= 1e-6 * (factors[0].abs() @ factors[1].abs().T).mean()
