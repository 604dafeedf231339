"""Elementary functions of 16 fp32 lanes: exp, and the activations made of it."""

import math

import numpy as np

from realizar_torch.cpu_kernels.jit import jit
from realizar_torch.cpu_kernels.simd import (
    bits_of_f32x16,
    f32x16_of_bits,
    fma,
    maximum,
    minimum,
    splat_f32x16,
)

# exp(x) = 2^n e^r with n the nearest integer to x / ln 2 and |r| <= ln(2) / 2
_LOG2_E = 1.4426950408889634
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
# beyond these exp is 0 (its last normal value) or overflows
_LOWEST, _HIGHEST = -87.33654, 88.37626
# 1.5 * 2^23: adding it rounds to an integer, which then stands in the low bits
_ROUNDER, _ROUNDER_BITS = 12582912.0, 0x4B400000
_TAYLOR = tuple(1.0 / math.factorial(power) for power in (6, 5, 4, 3, 2))
_SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
# erfc(z) = (a1 t + ... + a5 t^5) e^-z² to 1.5e-7 for z >= 0, t = 1 / (1 + p z): Abramowitz and Stegun 7.1.26
_ERFC_P = 0.3275911
_ERFC_A = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)


@jit(device=True)
def exp_f32x16(x):
    """e^x to 2 ulp for -87.3 < x < 88.4, clamped to that range; NaN stays NaN.

    Cody-Waite reduction and the Taylor polynomial of degree 6, whose remainder at ln(2)/2 is 1.2e-7.
    """
    x = minimum(splat_f32x16(_HIGHEST), maximum(splat_f32x16(_LOWEST), x))
    shifted = fma(x, splat_f32x16(_LOG2_E), splat_f32x16(_ROUNDER))
    n = shifted - _ROUNDER
    r = fma(n, splat_f32x16(-_LN2_LOW), fma(n, splat_f32x16(-_LN2_HIGH), x))
    p = splat_f32x16(_TAYLOR[0])
    p = fma(p, r, splat_f32x16(_TAYLOR[1]))
    p = fma(p, r, splat_f32x16(_TAYLOR[2]))
    p = fma(p, r, splat_f32x16(_TAYLOR[3]))
    p = fma(p, r, splat_f32x16(_TAYLOR[4]))
    p = fma(p, r * r, r) + 1
    return p * f32x16_of_bits((bits_of_f32x16(shifted) - (_ROUNDER_BITS - 127)) << 23)


@jit(device=True)
def silu_f32x16(x):
    """x / (1 + e^-x)."""
    return x / (exp_f32x16(splat_f32x16(0) - x) + 1)


@jit(device=True)
def gelu_tanh_f32x16(x):
    """x (1 + tanh(u)) / 2 with u = sqrt(2/pi) (x + 0.044715 x³), which is x / (1 + e^-2u)."""
    u = (x + x * x * x * np.float32(0.044715)) * np.float32(_SQRT_2_OVER_PI)
    return x / (exp_f32x16(u * np.float32(-2)) + 1)


@jit(device=True)
def gelu_f32x16(x):
    """x Φ(x) = max(x, 0) - |x| erfc(|x| / sqrt(2)) / 2."""
    magnitude = maximum(x, splat_f32x16(0) - x)
    z = magnitude * np.float32(math.sqrt(0.5))
    t = splat_f32x16(1) / (z * np.float32(_ERFC_P) + 1)
    p = splat_f32x16(_ERFC_A[0])
    p = fma(p, t, splat_f32x16(_ERFC_A[1]))
    p = fma(p, t, splat_f32x16(_ERFC_A[2]))
    p = fma(p, t, splat_f32x16(_ERFC_A[3]))
    p = fma(p, t, splat_f32x16(_ERFC_A[4]))
    tail = p * t * exp_f32x16(splat_f32x16(0) - z * z) * np.float32(0.5)
    return maximum(splat_f32x16(0), x) - magnitude * tail


@jit(device=True)
def tanh_f32x16(x):
    """1 - 2 / (e^2x + 1)."""
    return splat_f32x16(1) - splat_f32x16(2) / (exp_f32x16(x * np.float32(2)) + 1)
