"""fp16 activations in groups of eight vectors, the order in which tensor-core products read them.

A step is 256 activations of a vector. Activations 64 t + 8 c … + 7 of step s of vector 8 n + v lie in
``values[n, s, c, v, t]``, in the order of ``ORDER``: what the lanes of a warp load at a time lies together.
They are divided by the vector's power of two for the step, ``scale[n, s, v]``, which puts the largest of them
between 512 and 1024 (lower where it is less than 2^-117). ``sums[n, s, v, i]`` is the sum of values 16 i …
16 i + 15 as two fp16 values, of which the second is the rest of the first. What stands for vectors past the
last one has no meaning; activations past a row's end are zeros.
"""

import torch
import triton
import triton.language as tl

from realizar_torch.errors import FormatError

GROUP = 8
STEP = 256
# bytes 0 and 2 of a word, and 1 and 3, become pairs of halves in one instruction each
ORDER = (0, 2, 1, 3, 4, 6, 5, 7)
Grouped = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def grouped_shapes(batch: int, width: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Shapes of values, scale and sums of ``batch`` vectors of ``width`` activations."""
    groups, steps = -(-batch // GROUP), -(-width // STEP)
    return (groups, steps, 8, GROUP, 4, 8), (groups, steps, GROUP), (groups, steps, GROUP, 16, 2)


def empty_grouped(batch: int, width: int, device: torch.device) -> Grouped:
    """Uninitialised values fp16, scale fp32 and sums fp16 for ``batch`` vectors."""
    values, scale, sums = grouped_shapes(batch, width)
    return (
        torch.empty(values, dtype=torch.float16, device=device),
        torch.empty(scale, dtype=torch.float32, device=device),
        torch.empty(sums, dtype=torch.float16, device=device),
    )


def ungrouped(values: torch.Tensor, scale: torch.Tensor, batch: int) -> torch.Tensor:
    """What they stand for: float64 ``[batch, width]``, width in whole steps."""
    # ORDER is its own inverse
    ordered = values[..., list(ORDER)].double() * scale.double()[:, :, None, :, None, None]
    # [n, s, c, v, t, 8] -> [n, v, s, t, c, 8]
    return ordered.permute(0, 3, 1, 4, 2, 5).reshape(len(values) * GROUP, -1)[:batch]


def check_grouped(
    values: torch.Tensor, scale: torch.Tensor, sums: torch.Tensor, batch: int, width: int
) -> None:
    """FormatError unless they are ``batch`` vectors of ``width`` activations, grouped and aligned."""
    parts = (values, scale, sums)
    right = (
        tuple(tuple(part.shape) for part in parts) == grouped_shapes(batch, width)
        and tuple(part.dtype for part in parts) == (torch.float16, torch.float32, torch.float16)
        # loads of sixteen bytes
        and all(part.is_contiguous() and part.data_ptr() % 16 == 0 for part in parts)
    )
    if not right:
        found = ", ".join(f"{part.dtype} {tuple(part.shape)}" for part in parts)
        raise FormatError(
            f"grouped activations are {found}; expected contiguous float16, float32 and float16 "
            f"{grouped_shapes(batch, width)} at multiples of 16 bytes, as empty_grouped() makes them"
        )


@triton.jit
def store_grouped(rows, step, steps, row, values, scale, sums):
    """Store ``rows [S, 16, 16]`` fp32, S steps of vector ``row``, as above; a NaN or infinity makes the
    scale NaN. Single halves would be eight partial writes to a sector of the L2 cache.
    """
    # bit patterns of |x| order like the values, and NaN lies above infinity
    bits = tl.max(tl.max(tl.abs(rows).to(tl.int32, bitcast=True), 2), 1)
    # the power of two below the largest, and 2^-117 at least, which has a reciprocal
    power = tl.maximum(bits & 0x7F800000, 10 << 23)
    unit = power - (9 << 23)
    inverse = ((254 << 23) - unit).to(tl.float32, bitcast=True)
    exact = tl.where(bits < 0x7F800000, unit.to(tl.float32, bitcast=True), float("nan"))
    small = (rows * inverse[:, None, None]).to(tl.float16)
    inside = step < steps
    at = row // 8 * steps + step
    tl.store(scale + at * 8 + row % 8, exact, mask=inside)
    # ORDER: the last two bits of an activation's number change places
    eighths = tl.permute(tl.reshape(small, [step.shape[0] * 32, 2, 2, 2]), (0, 1, 3, 2))
    eighth = tl.arange(0, 32)[None, :, None]
    place = ((at[:, None, None] * 8 + eighth % 8) * 32 + row % 8 * 4 + eighth // 8) * 8
    place += tl.arange(0, 8)[None, None, :]
    tl.store(values + place, tl.reshape(eighths, [step.shape[0], 32, 8]), mask=inside[:, None, None])
    total = tl.sum(small.to(tl.float32), 2)
    high = total.to(tl.float16)
    both = tl.join(high, (total - high.to(tl.float32)).to(tl.float16))
    place = (((at * 8 + row % 8) * 16)[:, None] + tl.arange(0, 16)[None, :])[:, :, None] * 2
    tl.store(sums + place + tl.arange(0, 2)[None, None, :], both, mask=inside[:, None, None])
