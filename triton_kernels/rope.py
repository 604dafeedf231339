"""Heads of a new position: per-head RMSNorm and rotary embedding, in registers."""

import triton
import triton.language as tl


@triton.jit
def rotated_heads(
    heads, held, turn, cos, sin, gain, eps,
    D: tl.constexpr, ROTARY: tl.constexpr, LANES: tl.constexpr,
    HAS_NORM: tl.constexpr, ZERO_CENTERED: tl.constexpr,
):  # fmt: skip
    """fp32 ``[n, LANES]`` of the heads that pointers ``heads [n, 1]`` name; 0 where ``held [n, 1]`` is not.

    RMSNorm over D with ``gain`` (plus 1 if ZERO_CENTERED), then halves (i, i + ROTARY/2) turn by the angle of
    (position ``turn``, i): a' = a cos - b sin, b' = b cos + a sin. cos, sin: fp32 ``[positions, ROTARY/2]``.
    """
    lane = tl.arange(0, LANES)[None, :]
    HALF: tl.constexpr = ROTARY // 2
    partner = tl.where(lane < HALF, lane + HALF, lane - HALF)
    turns = lane < ROTARY
    value = tl.load(heads + lane, mask=held & (lane < D), other=0).to(tl.float32)
    other = tl.load(heads + partner, mask=held & turns, other=0).to(tl.float32)
    if HAS_NORM:
        scale = 1.0 / tl.sqrt(tl.sum(value * value, 1) / D + eps)
        own = tl.load(gain + lane, mask=lane < D, other=0).to(tl.float32)
        theirs = tl.load(gain + partner, mask=turns, other=0).to(tl.float32)
        if ZERO_CENTERED:
            own += 1.0
            theirs += 1.0
        value = value * scale[:, None] * own
        other = other * scale[:, None] * theirs
    angle = turn * HALF + lane % HALF
    c = tl.load(cos + angle, mask=turns, other=1)
    s = tl.load(sin + angle, mask=turns, other=0)
    return tl.where(turns, value * c + tl.where(lane < HALF, -other, other) * s, value)
