"""RMSNorm and LayerNorm of fp32 vectors, statistics in fp32.

RMSNorm: ``x / sqrt(mean(x²) + eps) * weight``. LayerNorm: ``(x - mean) / sqrt(var + eps) * weight + bias``,
the biased variance taken around the mean, so that a large mean does not cancel it away.
"""

import math

import numpy as np

from realizar_torch.cpu_kernels.jit import jit
from realizar_torch.cpu_kernels.memory import load_f32, store_f32
from realizar_torch.cpu_kernels.simd import fma, load_f32x16, splat_f32x16, store, sum_f32x16

_LANES = 16


@jit(device=True)
def _sum(x, width):
    total = splat_f32x16(0)
    for chunk in range(width // _LANES):
        total = total + load_f32x16(x, 64 * chunk)
    result = sum_f32x16(total)
    for index in range(width // _LANES * _LANES, width):
        result += load_f32(x, 4 * index)
    return result


@jit(device=True)
def _sum_of_squares(x, width, mean):
    """sum((x - mean)²)."""
    total = splat_f32x16(0)
    for chunk in range(width // _LANES):
        centred = load_f32x16(x, 64 * chunk) - mean
        total = fma(centred, centred, total)
    result = sum_f32x16(total)
    for index in range(width // _LANES * _LANES, width):
        centred = load_f32(x, 4 * index) - mean
        result += centred * centred
    return result


@jit(device=True)
def _scale_and_shift(x, width, mean, factor, weight, bias, target):
    """``(x - mean) * factor * weight + bias``; a ``bias`` of 0 is none. ``target`` may be ``x``."""
    for chunk in range(width // _LANES):
        y = (load_f32x16(x, 64 * chunk) - mean) * factor * load_f32x16(weight, 64 * chunk)
        if bias:
            y = y + load_f32x16(bias, 64 * chunk)
        store(target, y, 64 * chunk)
    for index in range(width // _LANES * _LANES, width):
        y = (load_f32(x, 4 * index) - mean) * factor * load_f32(weight, 4 * index)
        if bias:
            y = y + load_f32(bias, 4 * index)
        store_f32(target, y, 4 * index)


@jit(device=True)
def rms_norm_vector(x, width, weight, epsilon, target):
    """fp32 x[width] → ``x / sqrt(mean(x²) + epsilon) * weight`` at ``target``, which may be ``x``."""
    zero = np.float32(0)
    mean_square = _sum_of_squares(x, width, zero) / np.float32(width)
    factor = np.float32(1 / math.sqrt(mean_square + np.float32(epsilon)))
    _scale_and_shift(x, width, zero, factor, weight, 0, target)


@jit(device=True)
def layer_norm_vector(x, width, weight, bias, epsilon, target):
    """fp32 x[width] → ``(x - mean) / sqrt(var + epsilon) * weight + bias``; a ``bias`` of 0 is none."""
    mean = _sum(x, width) / np.float32(width)
    variance = _sum_of_squares(x, width, mean) / np.float32(width)
    factor = np.float32(1 / math.sqrt(variance + np.float32(epsilon)))
    _scale_and_shift(x, width, mean, factor, weight, bias, target)


@jit(device=True)
def norm_vector(centre, x, width, weight, bias, epsilon, target):
    """``layer_norm_vector`` (``centre`` 1) or ``rms_norm_vector`` (0)."""
    if centre:
        layer_norm_vector(x, width, weight, bias, epsilon, target)
    else:
        rms_norm_vector(x, width, weight, epsilon, target)


@jit
def norm_vectors(thread, n_threads, centre, x, count, width, weight, bias, epsilon, target):
    """``norm_vector`` of ``count`` vectors."""
    for index in range(thread, count, n_threads):
        row = 4 * width * index
        norm_vector(centre, x + row, width, weight, bias, epsilon, target + row)
