"""Launch shapes: a pure function of format, shape and row count. Nothing is timed at run time."""

from dataclasses import dataclass

from realizar_torch.formats import get_packed_format
from realizar_torch.triton_kernels.decode import units


@dataclass(frozen=True)
class Launch:
    """``rows`` weight rows per program, ``blocks`` blocks of each per loop step, ``warps`` warps."""

    rows: int
    blocks: int
    warps: int


def _power_of_two_at_least(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()


def choose(
    fmt: str, rows: int, in_features: int, batch: int = 1, activations: str = "int8", pair: bool = False
) -> Launch:
    """The launch shape of a matvec with ``rows`` × ``in_features`` packed weights and ``batch`` activation vectors.

    A thread owns one unit of a block, so a loop step of ``blocks`` blocks occupies blocks × units lanes; more lanes
    than the row has units would idle. ``pair``: each program does the same rows of two weights.
    """
    per_block = units(fmt)
    blocks = get_packed_format(fmt).blocks(in_features)
    warps = 2 if in_features > 8192 and activations == "int8" else 1
    if blocks * per_block < 64:
        warps = 1
    step = min(max(1, 32 * warps // per_block), _power_of_two_at_least(blocks))
    per_program = 4 if warps == 2 and fmt != "Q6_K" else 2
    if pair or batch > 2:
        per_program = 2
    if batch > 4 or (activations == "float" and batch > 2):
        per_program = 1
    return Launch(min(per_program, _power_of_two_at_least(rows)), step, warps)
