"""One kernel against float64: the record of a comparison, its random weights, how large an error may be."""

from dataclasses import dataclass

import torch
from torch import Tensor

from realizar_torch import reference
from realizar_torch.formats import get_packed_format

# of sum|w x|: what every kernel promises against the float64 product of its own inputs
TOLERANCE = 1e-5
# a check takes this many rows of a matrix, all of its columns
MOST_ROWS = 1024
# one decoded sample tells the size of a format's weights
_SAMPLE_BLOCKS = 256


@dataclass(frozen=True)
class Parity:
    """A kernel's largest error on ``batch`` vectors, as a share of what is allowed; NaN counts as infinite.

    fmt: the weights' format, or several joined by "+". shape: of the real weight, of which MOST_ROWS rows
    were computed, or what else the kernel was given.
    """

    device: str
    kernel: str
    fmt: str
    shape: str
    batch: int
    error: float

    @property
    def ok(self) -> bool:
        return self.error <= 1


@dataclass(frozen=True)
class Matrix:
    """A packed weight: its format and its real size."""

    fmt: str
    rows: int
    in_features: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.in_features}"

    @property
    def width(self) -> int:
        """in_features in whole blocks."""
        return reference.padded_features(self.in_features, self.fmt)

    def sample(self, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Random blocks, uint8 ``[rows, row_bytes]``, and their float64 weights, on ``device``.

        At most MOST_ROWS rows: as many of them over a multiple of 16 as there really are.
        """
        rows = min(self.rows, MOST_ROWS - -self.rows % 16)
        blocks = random_blocks(self.fmt, rows, self.in_features, seed).to(device)
        return blocks, reference.dequantize(blocks, self.fmt, self.in_features, torch.float64)


def random_blocks(fmt: str, rows: int, in_features: int, seed: int = 0) -> Tensor:
    """Random bytes, uint8 ``[rows, row_bytes]``, scaled so that the weights have a mean square of
    1 / in_features."""
    spec = get_packed_format(fmt)
    generator = torch.Generator().manual_seed(seed)
    count = rows * spec.blocks(in_features)
    blocks = torch.randint(0, 256, (count, spec.block_bytes), dtype=torch.uint8, generator=generator)
    scales = {}
    for field in spec.fields:
        if field.kind == "f16":
            signs = 2 * torch.randint(0, 2, (count, field.count), generator=generator) - 1
            exponents = 2 * torch.rand(count, field.count, generator=generator, dtype=torch.float32)
            scales[field.name] = signs * torch.exp2(exponents)
    for factor in (1.0, None):
        if factor is None:
            sample = reference.dequantize(blocks[:_SAMPLE_BLOCKS], spec, None, torch.float64)
            factor = float(1 / (in_features * sample.square().mean()).sqrt())
        for name, values in scales.items():
            start = spec.offset(name)
            raw = (values * factor).half().view(torch.uint8)
            blocks[:, start : start + raw.shape[1]] = raw
    return blocks.view(rows, spec.row_bytes(in_features))


def random_vectors(device: torch.device, *shape: int, seed: int = 0) -> Tensor:
    """Normal numbers, fp32, with one channel that is 26 times larger, as real activations have."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    x[..., shape[-1] // 3] *= 26
    return x.to(device)


def int8_values(q: Tensor, scale: Tensor, in_features: int) -> Tensor:
    """What quantized activations stand for, float64 ``[..., in_features]``."""
    blocks = q.double().unflatten(-1, (-1, reference.ACTIVATION_BLOCK))
    return (blocks * scale.double()[..., None]).flatten(-2)[..., :in_features]


def share(found: Tensor, expected: Tensor, allowed: Tensor | float) -> float:
    """The largest |found - expected| over what is allowed there (0: bits must be equal)."""
    error = (found.double() - expected.double()).abs()
    bound = torch.as_tensor(allowed, dtype=torch.float64, device=error.device).clamp_min(1e-300)
    return float((error / bound).nan_to_num(torch.inf).max())


def product_share(
    found: Tensor,
    x: Tensor,
    decoded: Tensor,
    extra: Tensor | float = 0.0,
    *,
    rounding: Tensor | float = 0.0,
) -> float:
    """``share`` of a product of float64 ``x [M, K]`` with ``decoded [N, K]``, to which ``extra`` is added.

    rounding: by how much more a result may be off than sums in fp32 make it.
    """
    extra = torch.as_tensor(extra, dtype=torch.float64, device=x.device)
    allowed = TOLERANCE * (x.abs() @ decoded.abs().T + extra.abs()) + rounding
    return share(found, x @ decoded.T + extra, allowed)
