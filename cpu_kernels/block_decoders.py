"""Plain block decoders, one per packed format: int8 quants, and an fp32 scale and minimum per 16 weights.

``decode_<fmt>(block, q, scale, minimum)`` reads the block at address ``block`` and writes int8
``q[block_size]``, fp32 ``scale[block_size / 16]`` and fp32 ``minimum[block_size / 16]``. The weight is
``w[i] = scale[i // 16] * q[i] - minimum[i // 16]`` with one fp32 rounding for the product and one for the
difference, which is ggml's value bit for bit. Formats whose real sub-block is 32 write each scale twice.
Bit layouts are those of ggml's block structs; every CPU runs this, since LLVM splits vectors as it needs.
"""

import numpy as np

from realizar_torch.cpu_kernels.jit import jit
from realizar_torch.cpu_kernels.memory import (
    load_f16,
    load_i8,
    load_u8,
    load_u32,
    store_f32,
)
from realizar_torch.cpu_kernels.simd import (
    join_u8x16,
    load_u8x16,
    load_u8x32,
    shuffle,
    store,
)
from realizar_torch.cpu_kernels.simd_unpack import bytes_of_bits
from realizar_torch.formats import Q2_K, Q3_K, Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0

# Weights that share one scale and one minimum in the decoded form.
SUB_BLOCK = 16

_Q4_0_D, _Q4_0_QS = Q4_0.offset("d"), Q4_0.offset("qs")
_Q4_1_D, _Q4_1_M, _Q4_1_QS = Q4_1.offset("d"), Q4_1.offset("m"), Q4_1.offset("qs")
_Q5_0_D, _Q5_0_QH, _Q5_0_QS = Q5_0.offset("d"), Q5_0.offset("qh"), Q5_0.offset("qs")
_Q5_1_D, _Q5_1_M, _Q5_1_QH, _Q5_1_QS = (Q5_1.offset(name) for name in ("d", "m", "qh", "qs"))
_Q8_0_D, _Q8_0_QS = Q8_0.offset("d"), Q8_0.offset("qs")
_Q2_K_SCALES, _Q2_K_QS, _Q2_K_D, _Q2_K_DMIN = (Q2_K.offset(name) for name in ("scales", "qs", "d", "dmin"))
_Q3_K_HMASK, _Q3_K_QS, _Q3_K_SCALES, _Q3_K_D = (Q3_K.offset(name) for name in ("hmask", "qs", "scales", "d"))
_Q4_K_D, _Q4_K_DMIN, _Q4_K_SCALES, _Q4_K_QS = (Q4_K.offset(name) for name in ("d", "dmin", "scales", "qs"))
_Q5_K_D, _Q5_K_DMIN, _Q5_K_SCALES = (Q5_K.offset(name) for name in ("d", "dmin", "scales"))
_Q5_K_QH, _Q5_K_QS = Q5_K.offset("qh"), Q5_K.offset("qs")
_Q6_K_QL, _Q6_K_QH, _Q6_K_SCALES, _Q6_K_D = (Q6_K.offset(name) for name in ("ql", "qh", "scales", "d"))

_ZERO = np.float32(0)
_first_32 = shuffle(*range(32))


@jit(device=True)
def _store_pair(address, value):
    """One number for both halves of a sub-block of 32."""
    store_f32(address, value)
    store_f32(address, value, 4)


@jit(device=True)
def _nibbles(qs):
    """32 four-bit numbers of 16 bytes: the low nibbles, then the high ones."""
    packed = load_u8x16(qs)
    return join_u8x16(packed & 15, packed >> 4)


@jit(device=True)
def _fifth_bits(qh):
    """16 where bit i of the little-endian 32-bit word is set, in byte i."""
    return _first_32(bytes_of_bits(load_u32(qh))) & 16


@jit(device=True)
def decode_q4_0(block, q, scale, minimum):
    """w = d * (nibble - 8)."""
    store(q, _nibbles(block + _Q4_0_QS) - 8)
    _store_pair(scale, load_f16(block, _Q4_0_D))
    _store_pair(minimum, _ZERO)


@jit(device=True)
def decode_q4_1(block, q, scale, minimum):
    """w = d * nibble + m."""
    store(q, _nibbles(block + _Q4_1_QS))
    _store_pair(scale, load_f16(block, _Q4_1_D))
    _store_pair(minimum, -load_f16(block, _Q4_1_M))


@jit(device=True)
def decode_q5_0(block, q, scale, minimum):
    """w = d * (five bits - 16)."""
    store(q, (_nibbles(block + _Q5_0_QS) | _fifth_bits(block + _Q5_0_QH)) - 16)
    _store_pair(scale, load_f16(block, _Q5_0_D))
    _store_pair(minimum, _ZERO)


@jit(device=True)
def decode_q5_1(block, q, scale, minimum):
    """w = d * five bits + m."""
    store(q, _nibbles(block + _Q5_1_QS) | _fifth_bits(block + _Q5_1_QH))
    _store_pair(scale, load_f16(block, _Q5_1_D))
    _store_pair(minimum, -load_f16(block, _Q5_1_M))


@jit(device=True)
def decode_q8_0(block, q, scale, minimum):
    """w = d * int8."""
    store(q, load_u8x32(block, _Q8_0_QS))
    _store_pair(scale, load_f16(block, _Q8_0_D))
    _store_pair(minimum, _ZERO)


@jit(device=True)
def decode_q2_k(block, q, scale, minimum):
    """16 sub-blocks: w = d * (byte & 15) * two bits - dmin * (byte >> 4); 32 bytes hold four runs of 32."""
    d, dmin = load_f16(block, _Q2_K_D), load_f16(block, _Q2_K_DMIN)
    for half in range(2):
        packed = load_u8x32(block, _Q2_K_QS + 32 * half)
        for run in range(4):
            store(q, (packed >> (2 * run)) & 3, 128 * half + 32 * run)
    for sub in range(16):
        byte = load_u8(block, _Q2_K_SCALES + sub)
        store_f32(scale, d * np.float32(byte & 15), 4 * sub)
        store_f32(minimum, dmin * np.float32(byte >> 4), 4 * sub)


@jit(device=True)
def decode_q3_k(block, q, scale, minimum):
    """16 sub-blocks: w = d * (six-bit scale - 32) * (two bits - 4 unless the run's bit of hmask is set)."""
    d = load_f16(block, _Q3_K_D)
    mask = load_u8x32(block, _Q3_K_HMASK)
    for half in range(2):
        packed = load_u8x32(block, _Q3_K_QS + 32 * half)
        for run in range(4):
            high = ((mask >> (4 * half + run)) & 1) << 2
            store(q, ((packed >> (2 * run)) & 3) + high - 4, 128 * half + 32 * run)
    for sub in range(16):
        # bytes 0-7: low nibbles of scales 0-7, then of 8-15; bytes 8-11: their top bits, two per scale
        low = load_u8(block, _Q3_K_SCALES + sub % 8) >> (4 * (sub // 8)) & 15
        high = load_u8(block, _Q3_K_SCALES + 8 + sub % 4) >> (2 * (sub // 4)) & 3
        store_f32(scale, d * np.float32((low | high << 4) - 32), 4 * sub)
        store_f32(minimum, _ZERO, 4 * sub)


@jit(device=True)
def _six_bit_scales(packed, d, dmin, scale, minimum):
    """Scales and minima of Q4_K and Q5_K: eight and eight six-bit numbers in 12 bytes.

    Bytes 0-3 and 4-7 hold numbers 0-3 of each in six bits; numbers 4-7 have their low four bits in the
    nibbles of bytes 8-11 (scale low, minimum high) and their top two bits in the tops of bytes 0-3 and 4-7.
    """
    for j in range(4):
        first, second, third = load_u8(packed, j), load_u8(packed, j + 4), load_u8(packed, j + 8)
        _store_pair(scale + 8 * j, d * np.float32(first & 63))
        _store_pair(minimum + 8 * j, dmin * np.float32(second & 63))
        _store_pair(scale + 8 * j + 32, d * np.float32(third & 15 | first >> 6 << 4))
        _store_pair(minimum + 8 * j + 32, dmin * np.float32(third >> 4 | second >> 6 << 4))


@jit(device=True)
def decode_q4_k(block, q, scale, minimum):
    """8 sub-blocks of 32: w = d * scale * nibble - dmin * min; 32 bytes hold two, low nibbles first."""
    d, dmin = load_f16(block, _Q4_K_D), load_f16(block, _Q4_K_DMIN)
    _six_bit_scales(block + _Q4_K_SCALES, d, dmin, scale, minimum)
    for pair in range(4):
        packed = load_u8x32(block, _Q4_K_QS + 32 * pair)
        store(q, packed & 15, 64 * pair)
        store(q, packed >> 4, 64 * pair + 32)


@jit(device=True)
def decode_q5_k(block, q, scale, minimum):
    """As Q4_K with a fifth bit: bit s of byte l of ``qh`` belongs to weight l of sub-block s."""
    d, dmin = load_f16(block, _Q5_K_D), load_f16(block, _Q5_K_DMIN)
    _six_bit_scales(block + _Q5_K_SCALES, d, dmin, scale, minimum)
    high = load_u8x32(block, _Q5_K_QH)
    for pair in range(4):
        packed = load_u8x32(block, _Q5_K_QS + 32 * pair)
        store(q, packed & 15 | (high >> (2 * pair) & 1) << 4, 64 * pair)
        store(q, packed >> 4 | (high >> (2 * pair + 1) & 1) << 4, 64 * pair + 32)


@jit(device=True)
def decode_q6_k(block, q, scale, minimum):
    """16 sub-blocks: w = d * int8 scale * (six bits - 32), in halves of 128 weights.

    Weights 0-31 and 64-95 of a half are the low and high nibbles of ``ql`` bytes 0-31, weights 32-63 and
    96-127 of bytes 32-63; ``qh`` byte l holds the two top bits of weights l, l+32, l+64, l+96.
    """
    d = load_f16(block, _Q6_K_D)
    for half in range(2):
        high = load_u8x32(block, _Q6_K_QH + 32 * half)
        for side in range(2):
            low = load_u8x32(block, _Q6_K_QL + 64 * half + 32 * side)
            target = q + 128 * half + 32 * side
            store(target, (low & 15 | (high >> (2 * side) & 3) << 4) - 32)
            store(target, (low >> 4 | (high >> (2 * side + 4) & 3) << 4) - 32, 64)
    for sub in range(16):
        store_f32(scale, d * np.float32(load_i8(block, _Q6_K_SCALES + sub)), 4 * sub)
        store_f32(minimum, _ZERO, 4 * sub)


DECODERS = (
    (Q4_0, decode_q4_0),
    (Q4_1, decode_q4_1),
    (Q5_0, decode_q5_0),
    (Q5_1, decode_q5_1),
    (Q8_0, decode_q8_0),
    (Q2_K, decode_q2_k),
    (Q3_K, decode_q3_k),
    (Q4_K, decode_q4_k),
    (Q5_K, decode_q5_k),
    (Q6_K, decode_q6_k),
)
