"""Rows of a quantized key/value cache: one scale per position and head, int8 or fp8 (e4m3) elements."""

import triton
import triton.language as tl

from realizar_torch.triton_kernels.primitives import INTERPRETED, cast, round_half_even


@triton.jit
def _on_e4m3_grid(x):
    """An fp32 value of at most 448 rounded to nearest even in e4m3, which the interpreter truncates to."""
    if INTERPRETED:
        exponent = (x.to(tl.int32, bitcast=True) >> 23) & 0xFF
        # three bits behind the leading one, and none below 2^-9
        step = (tl.maximum(exponent - 3, 127 - 9) << 23).to(tl.float32, bitcast=True)
        x = round_half_even(x / step).to(tl.float32) * step
    return x


@triton.jit
def packed_row(row, TYPE: tl.constexpr):
    """An fp32 row ``[1, lanes]`` as a cache of TYPE stores it, its scale, and what a reader will see.

    8-bit types: scale = amax / largest (127, or 448 of e4m3), elements x / scale rounded to nearest even; a
    NaN or an infinity makes the scale NaN. Others: x rounded, scale 1.
    """
    if TYPE.primitive_bitwidth == 8:
        LARGEST: tl.constexpr = 127.0 if tl.int8 == TYPE else 448.0
        # bit patterns of |x| order like the values, with NaN above infinity
        bits = tl.max(tl.abs(row).to(tl.int32, bitcast=True), 1)
        amax = bits.to(tl.float32, bitcast=True)
        largest = tl.full(amax.shape, LARGEST, tl.float32)
        scale = tl.where(amax < float("inf"), tl.div_rn(amax, largest), float("nan"))
        inverse = tl.where(scale > 0, tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale), 0.0)
        inverse = tl.where(inverse < float("inf"), inverse, 0.0)[:, None]
        scaled = tl.where(inverse > 0, row * inverse, 0.0)
        if tl.int8 == TYPE:
            stored = tl.minimum(tl.maximum(round_half_even(scaled), -127), 127).to(TYPE)
        else:
            stored = _on_e4m3_grid(scaled).to(TYPE)
        seen = stored.to(tl.float32) * scale[:, None]
    else:
        stored = cast(row, TYPE)
        scale = tl.full([1], 1.0, tl.float32)
        seen = stored.to(tl.float32)
    return stored, scale, seen
