"""The searches of ``realizar_torch/encode/search.py`` on 16 sub-blocks at a time, one per lane.

``x`` and ``weights`` are addresses of ``count`` fp32 columns (at most 32), ``q`` of ``count`` byte columns
that receive the levels; encode_lanes.py says what columns are. The formulas stand in the definition.
"""

from realizar_torch.cpu_kernels.encode_lanes import (
    COLUMN,
    absolute,
    choose,
    differs,
    equal,
    furthest_from_zero,
    less,
    load_levels,
    nearest_int,
    nearest_level,
    negative,
    store_levels,
)
from realizar_torch.cpu_kernels.jit import jit
from realizar_torch.cpu_kernels.memory import stack_alloc
from realizar_torch.cpu_kernels.simd import (
    load_f32x16,
    minimum,
    splat_f32x16,
    splat_i32x16,
    store,
    to_f32x16,
)

_EPSILON = 1e-15
_REFINEMENTS = 5
# 32 columns
_TRIAL_BYTES = 2048


@jit(device=True)
def scale_and_minimum(x, weights, count, top, first, step, steps, by_magnitude, q):
    """``x ≈ scale * q - minimum``, q in 0 … top → (scale, minimum)."""
    trial = stack_alloc(_TRIAL_BYTES, 64)
    zero, highest = splat_f32x16(0), splat_f32x16(top)
    low = high = load_f32x16(x)
    sum_w = load_f32x16(weights)
    sum_x = sum_w * low
    for i in range(1, count):
        value, weight = load_f32x16(x, COLUMN * i), load_f32x16(weights, COLUMN * i)
        low = choose(less(value, low), value, low)
        high = choose(less(high, value), value, high)
        sum_w = sum_w + weight
        sum_x = sum_x + weight * value
    low = choose(less(zero, low), zero, low)
    varies = equal(high, low) ^ -1
    inverse = highest / (high - low)
    scale = splat_f32x16(1) / inverse
    _trial_sums(x, weights, count, inverse, low, top, trial)
    error = _trial_error(x, weights, count, scale, low, by_magnitude, trial)
    # q follows from the inverse scale and the minimum it was tried with
    best_inverse, best_low = inverse, low
    for i in range(steps + 1):
        inverse = (splat_f32x16(first) + splat_f32x16(step) * splat_f32x16(i) + highest) / (high - low)
        sum_q, sum_q2, sum_xq = _trial_sums(x, weights, count, inverse, low, top, trial)
        determinant = sum_w * sum_q2 - sum_q * sum_q
        new_scale = (sum_w * sum_xq - sum_x * sum_q) / determinant
        new_low = (sum_q2 * sum_x - sum_q * sum_xq) / determinant
        above = less(zero, new_low)
        new_low = choose(above, zero, new_low)
        new_scale = choose(above, sum_xq / sum_q2, new_scale)
        new_error = _trial_error(x, weights, count, new_scale, new_low, by_magnitude, trial)
        better = varies & less(zero, determinant) & less(new_error, error)
        best_inverse = choose(better, inverse, best_inverse)
        best_low = choose(better, low, best_low)
        error = choose(better, new_error, error)
        scale = choose(better, new_scale, scale)
        low = choose(better, new_low, low)
    for i in range(count):
        level = nearest_level(best_inverse * (load_f32x16(x, COLUMN * i) - best_low), 0, top)
        store_levels(q, i, level & varies)
    return choose(varies, scale, zero), negative(low)


@jit(device=True)
def _trial_sums(x, weights, count, inverse, low, top, trial):
    """Levels for an inverse scale and a minimum, and the sums of ``w q``, ``w q²`` and ``w x q``."""
    sum_q = sum_q2 = sum_xq = splat_f32x16(0)
    for i in range(count):
        value = load_f32x16(x, COLUMN * i)
        level = to_f32x16(nearest_level(inverse * (value - low), 0, top))
        store(trial, level, COLUMN * i)
        weighted = load_f32x16(weights, COLUMN * i) * level
        sum_q = sum_q + weighted
        sum_q2 = sum_q2 + weighted * level
        sum_xq = sum_xq + weighted * value
    return sum_q, sum_q2, sum_xq


@jit(device=True)
def _trial_error(x, weights, count, scale, low, by_magnitude, trial):
    error = splat_f32x16(0)
    for i in range(count):
        difference = scale * load_f32x16(trial, COLUMN * i) + low - load_f32x16(x, COLUMN * i)
        penalty = absolute(difference) if by_magnitude else difference * difference
        error = error + load_f32x16(weights, COLUMN * i) * penalty
    return error


@jit(device=True)
def symmetric_scale(x, weights, count, half, q):
    """``x ≈ scale * (q - half)``, q in 0 … 2 half - 1 → scale."""
    zero = splat_f32x16(0)
    largest = furthest_from_zero(x, count)
    found = less(absolute(largest), splat_f32x16(_EPSILON)) ^ -1
    best_inverse = splat_f32x16(-half) / largest
    sum_xq, sum_q2 = _signed_sums(x, weights, count, best_inverse, half)
    scale = choose(differs(sum_q2, zero), sum_xq / sum_q2, zero)
    best = scale * sum_xq
    for i in range(-9, 10):
        if i != 0:
            inverse = negative(splat_f32x16(half) + splat_f32x16(0.1) * splat_f32x16(i)) / largest
            sum_xq, sum_q2 = _signed_sums(x, weights, count, inverse, half)
            better = less(zero, sum_q2) & less(best * sum_q2, sum_xq * sum_xq)
            best_inverse = choose(better, inverse, best_inverse)
            scale = choose(better, sum_xq / sum_q2, scale)
            best = choose(better, scale * sum_xq, best)
    for i in range(count):
        level = nearest_level(best_inverse * load_f32x16(x, COLUMN * i), -half, half - 1)
        store_levels(q, i, (level + half) & found)
    return choose(found, scale, zero)


@jit(device=True)
def _signed_sums(x, weights, count, inverse, half):
    """Sums of ``w x q`` and ``w q²``."""
    sum_xq = sum_q2 = splat_f32x16(0)
    for i in range(count):
        value, weight = load_f32x16(x, COLUMN * i), load_f32x16(weights, COLUMN * i)
        level = to_f32x16(nearest_level(inverse * value, -half, half - 1))
        sum_xq = sum_xq + weight * value * level
        sum_q2 = sum_q2 + weight * level * level
    return sum_xq, sum_q2


@jit(device=True)
def symmetric_scale_by_descent(x, weights, count, half, q):
    """``symmetric_scale`` that improves one level at a time."""
    trial = stack_alloc(_TRIAL_BYTES, 64)
    zero = splat_f32x16(0)
    largest = furthest_from_zero(x, count)
    found = less(absolute(largest), splat_f32x16(_EPSILON)) ^ -1
    inverse = splat_f32x16(-half) / largest
    for i in range(count):
        level = nearest_level(inverse * load_f32x16(x, COLUMN * i), -half, half - 1)
        store(trial, to_f32x16(level), COLUMN * i)
    sum_xq, sum_q2 = _signed_sums(x, weights, count, inverse, half)
    for _ in range(_REFINEMENTS):
        for i in range(count):
            value, weight = load_f32x16(x, COLUMN * i), load_f32x16(weights, COLUMN * i)
            old = load_f32x16(trial, COLUMN * i)
            rest_xq, rest_q2 = sum_xq - weight * value * old, sum_q2 - weight * old * old
            new = to_f32x16(nearest_level(value * rest_q2 / rest_xq, -half, half - 1))
            new_xq, new_q2 = rest_xq + weight * value * new, rest_q2 + weight * new * new
            gains = less(sum_xq * sum_xq * new_q2, new_xq * new_xq * sum_q2)
            better = less(zero, rest_xq) & differs(new, old) & less(zero, new_q2) & gains
            store(trial, choose(better, new, old), COLUMN * i)
            sum_xq, sum_q2 = choose(better, new_xq, sum_xq), choose(better, new_q2, sum_q2)
    for i in range(count):
        store_levels(q, i, (nearest_int(load_f32x16(trial, COLUMN * i)) + half) & found)
    return choose(found & less(zero, sum_q2), sum_xq / sum_q2, zero)


@jit(device=True)
def positive_scale(x, weights, count, top, q):
    """``x ≈ scale * q`` for non-negative x, q in 0 … top → scale; q of an x below zero wraps as a byte."""
    zero, one, highest = splat_f32x16(0), splat_f32x16(1), splat_f32x16(top)
    largest = zero
    for i in range(count):
        value = load_f32x16(x, COLUMN * i)
        largest = choose(less(largest, value), value, largest)
    found = less(largest, splat_f32x16(_EPSILON)) ^ -1
    best_inverse = highest / largest
    for i in range(count):
        store_levels(q, i, nearest_int(best_inverse * load_f32x16(x, COLUMN * i)))
    best = zero
    for i in range(count):
        difference = load_f32x16(x, COLUMN * i) - one / best_inverse * load_levels(q, i)
        best = best + load_f32x16(weights, COLUMN * i) * difference * difference
    for i in range(-4, 5):
        if i != 0:
            inverse = (splat_f32x16(0.1) * splat_f32x16(i) + highest) / largest
            error = _positive_error(x, weights, count, inverse, top)
            better = less(error, best)
            best = choose(better, error, best)
            best_inverse = choose(better, inverse, best_inverse)
    sum_xq = sum_q2 = zero
    for i in range(count):
        value, weight = load_f32x16(x, COLUMN * i), load_f32x16(weights, COLUMN * i)
        level = minimum(nearest_int(best_inverse * value), splat_i32x16(top))
        store_levels(q, i, level)
        unwrapped = to_f32x16(level)
        sum_xq = sum_xq + weight * value * unwrapped
        sum_q2 = sum_q2 + weight * unwrapped * unwrapped
    for _ in range(_REFINEMENTS):
        for i in range(count):
            value, weight, old = (
                load_f32x16(x, COLUMN * i),
                load_f32x16(weights, COLUMN * i),
                load_levels(q, i),
            )
            rest_xq, rest_q2 = sum_xq - weight * value * old, sum_q2 - weight * old * old
            new = to_f32x16(minimum(nearest_int(value * rest_q2 / rest_xq), splat_i32x16(top)))
            new_xq, new_q2 = rest_xq + weight * value * new, rest_q2 + weight * new * new
            gains = less(sum_xq * sum_xq * new_q2, new_xq * new_xq * sum_q2)
            better = less(zero, rest_xq) & less(zero, rest_q2) & differs(new, old) & gains
            store_levels(q, i, nearest_int(choose(better, new, old)))
            sum_xq, sum_q2 = choose(better, new_xq, sum_xq), choose(better, new_q2, sum_q2)
    for i in range(count):
        store_levels(q, i, nearest_int(load_levels(q, i)) & found)
    return choose(found & less(zero, sum_q2), sum_xq / sum_q2, zero)


@jit(device=True)
def _positive_error(x, weights, count, inverse, top):
    scale, error = splat_f32x16(1) / inverse, splat_f32x16(0)
    for i in range(count):
        value = load_f32x16(x, COLUMN * i)
        level = to_f32x16(minimum(nearest_int(inverse * value), splat_i32x16(top)))
        difference = value - scale * level
        error = error + load_f32x16(weights, COLUMN * i) * difference * difference
    return error
