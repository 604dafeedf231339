"""Heads of a new position: per-head RMSNorm and rotary embedding, in registers."""

import triton
import triton.language as tl

from realizar_torch.triton_kernels.primitives import rounded_product


@triton.jit
def rotated_heads(
    heads, held, turn, cos, sin, gain, eps,
    D: tl.constexpr, ROTARY: tl.constexpr, LANES: tl.constexpr,
    HAS_NORM: tl.constexpr, ZERO_CENTERED: tl.constexpr,
):  # fmt: skip
    """fp32 ``[n, LANES]`` of the heads that pointers ``heads [n, 1]`` name; 0 where ``held [n, 1]`` is not.

    RMSNorm over D with ``gain`` (plus 1 if ZERO_CENTERED), then halves (i, i + ROTARY/2) turn by the angle of
    (position ``turn``, i): a' = a cos - b sin, b' = b cos + a sin. cos, sin: fp32 ``[positions, ROTARY/2]``;
    ROTARY 0: nothing turns.
    """
    lane = tl.arange(0, LANES)[None, :]
    value = tl.load(heads + lane, mask=held & (lane < D), other=0).to(tl.float32)
    # all loads come before the first sum, which waits for its own
    if ROTARY > 0:
        HALF: tl.constexpr = ROTARY // 2
        turns = lane < ROTARY
        # how many lanes have neighbours as partners, which the compiler cannot see
        NEAR: tl.constexpr = 4 if HALF % 4 == 0 else 1
        partner = tl.max_contiguous(tl.where(lane < HALF, lane + HALF, lane - HALF), [1, NEAR])
        partner = tl.multiple_of(partner, [1, NEAR])
        other = tl.load(heads + partner, mask=held & turns, other=0).to(tl.float32)
        angle = tl.multiple_of(tl.max_contiguous(turn * HALF + lane % HALF, [1, NEAR]), [1, NEAR])
        c = tl.load(cos + angle, mask=turns, other=1)
        s = tl.load(sin + angle, mask=turns, other=0)
        other *= tl.where(lane < HALF, -s, s)
    if HAS_NORM:
        own = tl.load(gain + lane, mask=lane < D, other=0).to(tl.float32)
        if ROTARY > 0:
            theirs = tl.load(gain + partner, mask=turns, other=0).to(tl.float32)
            other *= theirs + 1.0 if ZERO_CENTERED else theirs
        scale = 1.0 / tl.sqrt(tl.sum(rounded_product(value, value), 1) / D + eps)[:, None]
        value *= scale * (own + 1.0 if ZERO_CENTERED else own)
        if ROTARY > 0:
            other *= scale
    if ROTARY > 0:
        value = value * c + other
    return value
