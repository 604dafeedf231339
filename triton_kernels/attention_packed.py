"""Sums of decode attention over 8-bit rows: bytes become fp16 in registers, scales act on the products."""

import triton
import triton.language as tl

from realizar_torch.triton_kernels.cache_rows import half_rows, halves_of_pairs, power_of_two
from realizar_torch.triton_kernels.primitives import cast


@triton.jit
def squash(score, softcap, HAS_SOFTCAP: tl.constexpr):
    """softcap * tanh(score * ln 2 / 2)."""
    if HAS_SOFTCAP:
        score = softcap * (1.0 - 2.0 / (tl.exp2(score) + 1.0))
    return score


@triton.jit
def packed_sums(
    query, keys, values, k_scales, v_scales, k_position, v_position, begin, end, scale, softcap,
    G: tl.constexpr, W: tl.constexpr, T: tl.constexpr, D: tl.constexpr, STAGES: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    """highest and weight ``[W, G]`` and total ``[W, G, LANES]`` of attention_kernel's loop, and the query as
    it was multiplied.

    query fp32 ``[P, LANES]``, rounded to fp16 over a power of two of each row. A row's two bytes at 2i and
    2i + 1 are one int16, so that a tile of 8-bit elements moves as one of 16 bits does; even and odd ones are
    two products. The values' scales go into the probabilities, over a running power of two of each warp.
    """
    P: tl.constexpr = query.shape[0]
    PAIRS: tl.constexpr = query.shape[1] // 2
    query, size = half_rows(query)
    seen = query.to(tl.float32) * size[:, None]
    # copies of the heads fill the rows of a product
    rows = tl.reshape(tl.broadcast_to(query[None, :, :], [G // P, P, 2 * PAIRS]), [G, PAIRS, 2])
    even, odd = tl.split(rows)
    even = tl.broadcast_to(even[None, :, :], [W, G, PAIRS])
    odd = tl.broadcast_to(odd[None, :, :], [W, G, PAIRS])
    factor = tl.reshape(tl.broadcast_to((size * scale)[None, :], [G // P, P]), [G])[None, :, None]
    keys, values = keys.to(tl.pointer_type(tl.int16)), values.to(tl.pointer_type(tl.int16))
    lane = tl.arange(0, PAIRS)
    tile = tl.arange(0, W)[:, None] * T + tl.arange(0, T)[None, :]
    highest = tl.full([W, G], -1e38, tl.float32)
    weight = tl.zeros([W, G], tl.float32)
    even_total = tl.zeros([W, G, PAIRS], tl.float32)
    odd_total = tl.zeros([W, G, PAIRS], tl.float32)
    reach = tl.full([W], 2.0**-126, tl.float32)
    for first in tl.range(begin, end, W * T, num_stages=STAGES):
        column = first + tile
        live = column < end
        mask = live[:, :, None] & (lane < D // 2)[None, None, :]
        at = column.to(tl.int64)[:, :, None]
        k = tl.load(keys + at * (k_position // 2) + lane[None, None, :], mask=mask, other=0)
        v = tl.load(values + at * (v_position // 2) + lane[None, None, :], mask=mask, other=0)
        k_scale = tl.load(k_scales + column, mask=live, other=0)
        v_scale = tl.load(v_scales + column, mask=live, other=0)
        k_even, k_odd = halves_of_pairs(k, INT8)
        v_even, v_odd = halves_of_pairs(v, INT8)
        score = tl.dot(even, tl.permute(k_even, (0, 2, 1)))
        score = tl.dot(odd, tl.permute(k_odd, (0, 2, 1)), score) * factor * k_scale[:, None, :]
        score = tl.where(live[:, None, :], squash(score, softcap, HAS_SOFTCAP), float("-inf"))
        top = tl.maximum(highest, tl.max(score, 2))
        share = tl.exp2(score - top[:, :, None])
        shrink = tl.exp2(highest - top)
        weight = weight * shrink + tl.sum(share, 2)
        further, inverse = power_of_two(tl.maximum(reach, tl.max(v_scale, 1)))
        share = cast(share * (v_scale * inverse[:, None])[:, None, :], tl.float16)
        shrink = (shrink * (reach * inverse)[:, None])[:, :, None]
        even_total = tl.dot(share, v_even, even_total * shrink)
        odd_total = tl.dot(share, v_odd, odd_total * shrink)
        highest, reach = top, further
    total = tl.reshape(tl.join(even_total, odd_total), [W, G, 2 * PAIRS]) * reach[:, None, None]
    return highest, weight, total, seen
