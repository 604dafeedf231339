"""The least key that top-k and top-p keep: sums over the row from a few cuts on, then bisection of what is
between two of them.

A key is an int32 that orders like a scaled logit, (logit - highest) / temperature: 0 for the highest.
"""

import triton
import triton.language as tl

from realizar_torch.triton_kernels.highest import ordered, unordered
from realizar_torch.triton_kernels.sampling_values import LOWEST, weights

# Cuts divide the way from the highest logit to the mean and a quarter beyond; the last is below all tokens.
# They change the time of a search and never its result.
CUTS = tl.constexpr(16)
_CUTS_TO_MEAN = tl.constexpr(12)
# more than any sum
_NEVER = tl.constexpr(2**62)


@triton.jit
def sums_at_cuts(scaled, key, mean):
    """Falling cuts int32, and how many of up to 2^11 keys reach each and what they weigh, int64: ``[CUTS]``.

    mean: the scaled logit of the mean; where it is none, the cuts are not worth much.
    """
    number = tl.arange(0, CUTS)
    # a count of one above the bits that 2^11 weights may take
    counted = weights(scaled) + 2**52
    cuts = tl.zeros([CUTS], tl.int32)
    sums = tl.zeros([CUTS], tl.int64)
    for i in tl.static_range(CUTS):
        if i == CUTS - 1:
            cut = LOWEST
        else:
            # NaN orders above all
            cut = tl.minimum(ordered(mean * ((i + 1) / _CUTS_TO_MEAN)), 0)
        cuts = tl.where(number == i, cut, cuts)
        sums = tl.where(number == i, tl.sum(tl.where(key >= cut, counted, 0), 0), sums)
    return cuts, (sums >> 52) & 0xFFF, sums & (2**52 - 1)


@triton.jit
def needed_mass(top_p, mass):
    """The least sum of weights at which a nucleus of all that weighs ``mass`` ends."""
    needed = tl.ceil(top_p * mass.to(tl.float64)).to(tl.int64)
    return tl.minimum(tl.maximum(needed, 1), mass)


@triton.jit
def bounds(cuts, counts, masses, top_k, top_p):
    """low, high and the count and mass from high on: both thresholds are keys of low … high - 1.

    The k-th highest key lies between the last cut that fewer than k tokens reach and the next one; top-p acts
    on at least what the former holds. top_k 0 and top_p 1 are off, and one of them is on.
    """
    wanted = tl.where(top_k > 0, top_k, _NEVER)
    fewer = counts < wanted
    mass = tl.max(tl.where(fewer, masses, 0), 0)
    needed = tl.where(top_p < 1, needed_mass(top_p, mass), _NEVER)
    above = fewer & (masses < needed)
    reached = tl.where(top_k > 0, counts >= wanted, masses >= needed)
    low = tl.max(tl.where(reached, cuts, LOWEST), 0)
    # no key is above that of 0
    high = tl.min(tl.where(above, cuts, 1), 0)
    return low, high, tl.max(tl.where(above, counts, 0), 0), tl.max(tl.where(above, masses, 0), 0)


@triton.jit
def _held(keys, count, cut, BY_MASS: tl.constexpr, STEP: tl.constexpr):
    """How many of ``count`` keys reach ``cut``, above LOWEST, or what they weigh."""
    held = tl.zeros([STEP], tl.int64)
    for first in range(0, count, STEP):
        at = first + tl.arange(0, STEP)
        key = tl.load(keys + at, mask=at < count, other=LOWEST)
        held += tl.where(key >= cut, weights(unordered(key)) if BY_MASS else 1, 0)
    return tl.sum(held, 0)


@triton.jit
def _boundary(keys, count, low, high, at_low, above, needed, BY_MASS: tl.constexpr, STEP: tl.constexpr):
    """The key u of low … high - 1 with sum(u) >= needed > sum(u + 1), or one that parts the tokens in the
    same way.

    sum(u) counts or weighs (BY_MASS) the keys from u on: ``at_low`` is that of low, ``above`` that of high.
    """
    at_high = above
    # one token between low and high weighs what low weighs and hardly more: then there is nothing to part
    while (high - low > 1) & (2 * (at_low - at_high) >= 3 * (weights(unordered(low)) if BY_MASS else 1)):
        middle = low + (high - low) // 2
        held = above + _held(keys, count, middle, BY_MASS, STEP)
        low = tl.where(held >= needed, middle, low)
        at_low = tl.where(held >= needed, held, at_low)
        high = tl.where(held >= needed, high, middle)
        at_high = tl.where(held >= needed, at_high, held)
    return low


@triton.jit
def least_kept(
    keys, count, low, high, count_above, mass_above, mass, top_k, top_p, STEP: tl.constexpr
):  # fmt: skip
    """The least key kept by top-k and, of what it leaves, top-p.

    keys: those of low … high - 1, ``count`` of them, in any order. mass: what the whole row weighs.
    """
    if top_k > 0:
        low = _boundary(keys, count, low, high, count_above + count, count_above, top_k, False, STEP)
    if top_p < 1:
        at_low = mass_above + _held(keys, count, low, True, STEP)
        needed = needed_mass(top_p, tl.where(top_k > 0, at_low, mass))
        low = _boundary(keys, count, low, high, at_low, mass_above, needed, True, STEP)
    return low
