"""What the sampling kernels make of a logit: penalty, distance from the highest, an integer weight; and the
random number of a row.
"""

import triton
import triton.language as tl

from realizar_torch.triton_kernels.highest import ordered

# the key of minus infinity: no token is below it
LOWEST = tl.constexpr(-2139095041)
# The weight of the most likely token. Sums of up to 2^22 integers of this size are exact in any order.
UNIT = tl.constexpr(2.0**40)


@triton.jit
def penalized(logits, seen, row, index, vocabulary, penalty):
    """fp32 logits ``index`` of a row after the repetition penalty; minus infinity behind the vocabulary.

    logits fp32 and seen uint8 ``[rows, vocabulary]``. A positive logit of a token that was seen is divided by
    the penalty, a negative one multiplied.
    """
    at = row.to(tl.int64) * vocabulary + index
    value = tl.load(logits + at, mask=index < vocabulary, other=float("-inf"))
    if penalty != 1:
        marked = tl.load(seen + at, mask=index < vocabulary, other=0)
        changed = tl.where(value < 0, value * penalty, tl.div_rn(value, penalty))
        value = tl.where(marked != 0, changed, value)
    return value


@triton.jit
def weights(scaled):
    """exp of logits that are at most 0 as whole multiples of 1 / UNIT, int64, rounded down."""
    return (tl.exp(scaled) * UNIT).to(tl.int64)


@triton.jit
def key_of_share(share):
    """The least key of a token whose exp(scaled logit) is at least ``share``, fp64 in [0, 1].

    Compared as logarithms, exactly; what is below the least weight there is counts as that.
    """
    limit = tl.log(tl.maximum(share, 1e-300))
    nearest = limit.to(tl.float32)
    return ordered(nearest) + (nearest.to(tl.float64) < limit).to(tl.int32)


@triton.jit
def uniform(seed, step):
    """fp64 in [0, 1): number ``step`` of a seed's sequence, as ``uniforms`` of generation/sampling.py."""
    state = _mixed(seed.to(tl.uint64, bitcast=True))
    state += (step + 1).to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15
    return (_mixed(state) >> 11).to(tl.float64) * (1.0 / (1 << 53))


@triton.jit
def _mixed(z):
    """SplitMix64's finalizer."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)
