"""How far the blocks of each format reach: for values beyond, ggml stores infinite scales, or zeros."""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from realizar_torch.errors import FormatError
from realizar_torch.formats import BlockFormat

_LARGEST = torch.finfo(torch.float16).max
# what would be rounded to infinity
_TOO_LARGE = 65520.0
# the lowest and the highest level of a block, as multiples of the fp16 number that scales it
_LEVELS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "Q4_0": (-8, 8),
        "Q4_1": (-1, 1 + 15),
        "Q5_0": (-16, 16),
        "Q5_1": (-1, 1 + 31),
        "Q8_0": (-127, 127),
        "Q2_K": (-15, 15 * 3),
        "Q3_K": (-32 * 4, 32 * 4),
        "Q4_K": (-63, 63 * 15),
        "Q5_K": (-63, 63 * 31),
        "Q6_K": (-128 * 32, 128 * 32),
    }
)


def check_held(values: Tensor, extremes: Tensor, blocks: Tensor, spec: BlockFormat, first_row: int) -> None:
    """FormatError where the blocks of finite ``values [rows, K]`` cannot hold them.

    extremes: the smallest and the largest value. first_row: that of ``values`` in the whole weight.
    """
    low, high = (_TOO_LARGE * level for level in _LEVELS[spec.name])
    finite = _finite_scales(blocks, spec)
    if torch.stack([extremes[0] > low, extremes[1] < high, finite.all()]).all():
        return
    width, size = spec.blocks(values.shape[1]), spec.block_size
    padded = torch.nn.functional.pad(values, (0, width * size - values.shape[1]))
    smallest, largest = padded.view(-1, size).aminmax(dim=1)
    block = int((~finite | (smallest <= low) | (largest >= high)).nonzero()[0])
    row, start = block // width, block % width * size
    end = min(start + size, values.shape[1])
    held = values[row, start:end]
    lowest, highest = (_LARGEST * level for level in _LEVELS[spec.name])
    raise FormatError(
        f"weight[{first_row + row}, {start}:{end}] holds {held.min():.3g} to {held.max():.3g}, "
        f"which {spec.name} cannot hold: with fp16 scales it reaches from {lowest:.3g} to {highest:.3g} at "
        "most; make the values smaller, or keep the weight dense"
    )


def _finite_scales(blocks: Tensor, spec: BlockFormat) -> Tensor:
    """Whether every fp16 number of a block is finite, bool ``[blocks]``."""
    rows = blocks.view(-1, spec.block_bytes)
    finite = rows.new_ones(len(rows), dtype=torch.bool)
    for field in spec.fields:
        if field.kind == "f16":
            start = spec.offset(field.name)
            finite &= rows[:, start : start + field.nbytes].view(torch.float16).isfinite().all(1)
    return finite
