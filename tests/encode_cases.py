"""Weights that try an encoder, and what ggml's own quantizer makes of them."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from realizar_torch.formats import get_format

ROWS, COLUMNS = 6, 768


def ggml_blocks(weight: torch.Tensor, fmt: str, importance: torch.Tensor | None = None) -> torch.Tensor:
    """uint8 ``[rows, row_bytes]`` by ggml's C code; rows are whole blocks. Skips the test without libgguf."""
    libgguf = pytest.importorskip("libgguf")
    spec, (rows, columns) = get_format(fmt), weight.shape
    matrix = None if importance is None else importance.numpy()
    raw = libgguf.quantize_rows_raw(spec.ggml_type, weight.contiguous().numpy(), rows, columns, matrix)
    return torch.from_numpy(np.frombuffer(raw, np.uint8).copy().reshape(rows, spec.row_bytes(columns)))


def _normal(scale: float, seed: int) -> torch.Tensor:
    return scale * torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed))


def _uneven(size: int) -> torch.Tensor:
    """Runs of ``size`` values that differ up to 2^20 times: stored sub-block scales reach zero."""
    exponents = torch.randint(
        -20, 1, (ROWS, COLUMNS // size, 1), generator=torch.Generator().manual_seed(size)
    )
    return (_normal(1, 9).unflatten(-1, (-1, size)) * torch.exp2(exponents.float())).flatten(1)


def _any_bits() -> torch.Tensor:
    """Every exponent alike, subnormal numbers too."""
    words = torch.randint(-(2**31), 2**31, (ROWS, COLUMNS), generator=torch.Generator().manual_seed(3))
    values = words.to(torch.int32).view(torch.float32)
    return torch.where(values.isfinite(), values, 1)


def weights() -> Iterator[tuple[str, torch.Tensor]]:
    """Named float32 weights ``[ROWS, COLUMNS]``."""
    normal, uniform = _normal(0.02, 0), torch.rand(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1))
    signs = torch.where(uniform < 0.5, 0.0, -0.0)
    yield "normal", normal
    yield "heavy-tailed", normal / uniform**2
    yield "positive", 1 + uniform
    yield "negative", -1 - uniform
    yield "mostly negative", 0.02 - uniform * uniform.flip(1)
    yield "integers", (8 * uniform).floor() - 4
    yield "constant", torch.full((ROWS, COLUMNS), 0.37)
    yield "negative constant", torch.full((ROWS, COLUMNS), -0.37)
    yield "zero", torch.zeros(ROWS, COLUMNS)
    yield "zeros of both signs", signs
    yield "sparse", torch.where(uniform > 0.97, normal, signs)
    yield "uneven runs of 16", _uneven(16)
    yield "uneven runs of 32", _uneven(32)
    yield "any finite bits", _any_bits()
    for power in (5, 20, 37):
        yield f"huge 1e{power}", _normal(10.0**power, power)
    for power in (-8, -14, -20, -40):
        yield f"tiny 1e{power}", _normal(10.0**power, -power)


def _mask(share: float, seed: int) -> torch.Tensor:
    """Ones in a share of the columns, zeros in the others: few sub-blocks have more than one weight."""
    return (torch.rand(COLUMNS, generator=torch.Generator().manual_seed(seed)) < share).float()


def importances() -> Iterator[tuple[str, torch.Tensor | None]]:
    """Named importance weights ``[COLUMNS]``, and none."""
    uniform = torch.rand(COLUMNS, generator=torch.Generator().manual_seed(2))
    yield "no importance", None
    yield "importance", uniform**4
    yield "some columns", torch.where(uniform < 0.5, 0.0, uniform)
    yield "no column", torch.zeros(COLUMNS)
    # seeds whose masks, with "mostly negative", wrap levels: test_masks_wrap_levels_below_zero
    yield "2 % of the columns", _mask(0.02, 4)
    yield "10 % of the columns", _mask(0.1, 39)
