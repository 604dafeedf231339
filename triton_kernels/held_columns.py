"""One step's int8 activations of 8 N vectors, held in a warp's registers: right operands of its products."""

import triton
import triton.language as tl

from realizar_torch.triton_kernels.blocks import block_size
from realizar_torch.triton_kernels.fragments import minimums, paired, run_size
from realizar_torch.triton_kernels.tensor_core import load_vector


@triton.jit
def hold_columns(
    xq, xscale, xsums, first_group, groups, first, blocks,
    FMT: tl.constexpr, N: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Per group of eight vectors (bytes: grouped.py): the operand of each run for column g, eight scales of
    columns 2 t, eight of 2 t + 1, and sums of column g for the minimums.

    The step begins at block ``first``. Scales and sums past the end of a row are 0, so that a warp without a
    step adds nothing.
    """
    lane = tl.arange(0, 32 * WARPS) % 32
    g, t = lane // 4, lane % 4
    EACH: tl.constexpr = block_size(FMT) // 32
    step, end = first * EACH, blocks * EACH
    held = ()
    for n in tl.static_range(N):
        group = tl.minimum(first_group + n, groups - 1) * end
        operands = ()
        even = ()
        odd = ()
        for i in tl.static_range(8):
            at = (group + tl.minimum(step + i, end - 1)) * 8
            operands = operands + _operands(xq + (at + g) * 32, t, FMT)
            inside = step + i < end
            even = even + (tl.where(inside, tl.load(xscale + at + 2 * t), 0.0),)  # noqa: RUF005
            odd = odd + (tl.where(inside, tl.load(xscale + at + 2 * t + 1), 0.0),)  # noqa: RUF005
        sums = ()
        for part in tl.static_range(minimums(FMT) // 8):
            low = _sum(xsums, group, g, step, part, t, end, FMT)
            high = _sum(xsums, group, g, step, part, t + 4, end, FMT)
            sums = sums + (_two_parts(low, high),)  # noqa: RUF005
        held = held + ((operands, even, odd, sums),)  # noqa: RUF005
    return held


@triton.jit
def _operands(at, t, FMT: tl.constexpr):
    """A tuple of the right operands of 32 activations: one, or two of 16."""
    if paired(FMT):
        return (load_vector(at + 8 * t, 2, 8),)
    else:
        words = load_vector(at + 4 * t, 1, 4) + load_vector(at + 16 + 4 * t, 1, 4)
        if run_size(FMT) == 16:
            return (words[0],), (words[1],)
        else:
            return (words,)


@triton.jit
def _sum(xsums, group, g, step, part: tl.constexpr, i, end, FMT: tl.constexpr):
    """The sum that minimum ``8 part + i`` is multiplied by: of 16 activations, or of 32."""
    if minimums(FMT) == 16:
        block = step + (4 * part + i // 2)
        value = tl.load(xsums + ((group + tl.minimum(block, end - 1)) * 8 + g) * 2 + i % 2)
    else:
        block = step + i
        at = xsums + ((group + tl.minimum(block, end - 1)) * 8 + g) * 2
        value = tl.load(at) + tl.load(at + 1)
    return tl.where(block < end, value, 0.0)


@triton.jit
def _two_parts(low, high):
    """fp32 values as two of tf32 precision each: (upper low, upper high), (the rest of both)."""
    upper = low.to(tl.int32, bitcast=True) & -0x2000, high.to(tl.int32, bitcast=True) & -0x2000
    rest_low = low - upper[0].to(tl.float32, bitcast=True)
    rest_high = high - upper[1].to(tl.float32, bitcast=True)
    return upper, (rest_low.to(tl.int32, bitcast=True), rest_high.to(tl.int32, bitcast=True))
