"""fp32 vectors of the fused decode step, 16 lanes at a time and the rest value by value."""

import numpy as np

from realizar_torch.cpu_kernels import program
from realizar_torch.cpu_kernels.jit import jit
from realizar_torch.cpu_kernels.memory import load_f32, stack_alloc, store_f32
from realizar_torch.cpu_kernels.simd import (
    load_f32x16,
    max_f32x16,
    maximum,
    splat_f32x16,
    store,
    sum_f32x16,
)
from realizar_torch.cpu_kernels.vector_math import (
    exp_f32x16,
    gelu_f32x16,
    gelu_tanh_f32x16,
    silu_f32x16,
    tanh_f32x16,
)

_LANES = 16
# e^-70 is 4e-31: nothing beside the largest exponential, 1
_NOTHING = -70


@jit(device=True)
def copy_row(source, count, target):
    """target = source."""
    whole = count // _LANES
    for chunk in range(whole):
        store(target, load_f32x16(source, 64 * chunk), 64 * chunk)
    for index in range(whole * _LANES, count):
        store_f32(target, load_f32(source, 4 * index), 4 * index)


@jit(device=True)
def add_rows(target, source, count):
    """target += source."""
    whole = count // _LANES
    for chunk in range(whole):
        store(target, load_f32x16(target, 64 * chunk) + load_f32x16(source, 64 * chunk), 64 * chunk)
    for index in range(whole * _LANES, count):
        store_f32(target, load_f32(target, 4 * index) + load_f32(source, 4 * index), 4 * index)


@jit(device=True)
def add_scaled(target, source, count, factor):
    """target += factor * source."""
    whole = count // _LANES
    for chunk in range(whole):
        total = load_f32x16(target, 64 * chunk) + load_f32x16(source, 64 * chunk) * factor
        store(target, total, 64 * chunk)
    for index in range(whole * _LANES, count):
        total = load_f32(target, 4 * index) + load_f32(source, 4 * index) * factor
        store_f32(target, total, 4 * index)


@jit(device=True)
def multiply_row(target, source, count):
    """target *= source."""
    whole = count // _LANES
    for chunk in range(whole):
        store(target, load_f32x16(target, 64 * chunk) * load_f32x16(source, 64 * chunk), 64 * chunk)
    for index in range(whole * _LANES, count):
        store_f32(target, load_f32(target, 4 * index) * load_f32(source, 4 * index), 4 * index)


@jit(device=True)
def scale_row(target, count, factor):
    """target *= factor."""
    whole = count // _LANES
    for chunk in range(whole):
        store(target, load_f32x16(target, 64 * chunk) * factor, 64 * chunk)
    for index in range(whole * _LANES, count):
        store_f32(target, load_f32(target, 4 * index) * factor, 4 * index)


@jit(device=True)
def fill_row(target, count, value):
    """target = value."""
    whole, values = count // _LANES, splat_f32x16(value)
    for chunk in range(whole):
        store(target, values, 64 * chunk)
    for index in range(whole * _LANES, count):
        store_f32(target, value, 4 * index)


@jit(device=True)
def largest(row, count):
    """The largest value of a row; NaN may be passed over, so it shows in the sum of exponentials."""
    lanes, whole = splat_f32x16(-np.inf), count // _LANES
    for chunk in range(whole):
        lanes = maximum(lanes, load_f32x16(row, 64 * chunk))
    result = max_f32x16(lanes)
    for index in range(whole * _LANES, count):
        result = max(result, load_f32(row, 4 * index))
    return result


@jit(device=True)
def exponentials(row, count):
    """row = e^(row - largest); returns their sum, added in a fixed order.

    Below e^_NOTHING it is zero, which changes no sum in fp32 and keeps products of small weights normal
    numbers: subnormal ones are a hundred times slower.
    """
    top = largest(row, count)
    total, whole = splat_f32x16(0), count // _LANES
    for chunk in range(whole):
        values = _exp_or_zero(load_f32x16(row, 64 * chunk) - top)
        store(row, values, 64 * chunk)
        total = total + values
    result = sum_f32x16(total)
    if whole * _LANES < count:
        result += _last_exponentials(row, whole * _LANES, count, top)
    return result


@jit(device=True)
def _exp_or_zero(x):
    lowest = splat_f32x16(_NOTHING)
    return exp_f32x16(maximum(lowest, x)) - exp_f32x16(lowest)


@jit(device=True)
def _last_exponentials(row, first, count, top):
    rest = stack_alloc(64, 64)
    store(rest, splat_f32x16(-np.inf))
    copy_row(row + 4 * first, count - first, rest)
    store(rest, _exp_or_zero(load_f32x16(rest) - top))
    result = np.float32(0)
    for index in range(first, count):
        value = load_f32(rest, 4 * (index - first))
        store_f32(row, value, 4 * index)
        result += value
    return result


@jit(device=True)
def activate_row(activation, row, count):
    """row = activation(row)."""
    whole = count // _LANES
    for chunk in range(whole):
        store(row, _activate(activation, load_f32x16(row, 64 * chunk)), 64 * chunk)
    if whole * _LANES < count:
        rest, left = stack_alloc(64, 64), count - whole * _LANES
        store(rest, splat_f32x16(0))
        copy_row(row + 64 * whole, left, rest)
        store(rest, _activate(activation, load_f32x16(rest)))
        copy_row(rest, left, row + 64 * whole)


@jit(device=True)
def _activate(activation, x):
    if activation == program.SILU:
        return silu_f32x16(x)
    if activation == program.GELU_TANH:
        return gelu_tanh_f32x16(x)
    if activation == program.GELU:
        return gelu_f32x16(x)
    return tanh_f32x16(x)


@jit(device=True)
def cap_row(row, count, cap):
    """row = cap * tanh(row / cap)."""
    scale_row(row, count, np.float32(1) / cap)
    activate_row(program.TANH, row, count)
    scale_row(row, count, cap)
