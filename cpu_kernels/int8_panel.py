"""Decode 16 weight rows into a panel for the int8 matmul: unsigned bytes in steps of four, and their scales.

A panel holds up to PANEL_WEIGHTS weights of each row: ``[weights / 4][16 rows][4]`` uint8 ``u``, and for
every sub-block fp32 ``[16]`` row scales, followed by ``[16]`` row minima if the format is affine:
``w = scale * (u - offset)`` or ``w = scale * u - minimum``.
"""

from collections.abc import Mapping
from types import MappingProxyType

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from realizar_torch.cpu_kernels.int8_k import (
    q3_scales,
    then_shifted_1,
    then_shifted_2,
    then_shifted_4,
)
from realizar_torch.cpu_kernels.int8_legacy import (
    pair_q4_0,
    pair_q4_1,
    pair_q5_0,
    pair_q5_1,
)
from realizar_torch.cpu_kernels.int8_rows import FAR
from realizar_torch.cpu_kernels.jit import jit
from realizar_torch.cpu_kernels.memory import load_f16, load_i64, load_u32, pointer_at, stack_alloc, store_f32
from realizar_torch.cpu_kernels.simd import (
    I32x16,
    i8x16_to_f32x16,
    join_u8x32,
    load_u8x16,
    load_u8x32,
    load_u8x64,
    prefetch,
    shuffle,
    store,
    u8x16_to_f32x16,
)
from realizar_torch.cpu_kernels.simd_unpack import pair_f32x16, u8x16_of
from realizar_torch.formats import Q2_K, Q3_K, Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0

# What unsigned weights are too large by; affine formats have a minimum instead.
OFFSETS = MappingProxyType({"Q4_0": 8, "Q5_0": 16, "Q8_0": 128, "Q3_K": 4, "Q6_K": 32})

PANEL_WEIGHTS = 512
PANEL_BYTES = 16 * PANEL_WEIGHTS
# at most a scale and a minimum for every 16 weights of 16 rows
SCALE_BYTES = 2 * 4 * PANEL_WEIGHTS

_Q8_0_QS = Q8_0.offset("qs")
_Q2_QS, _Q2_D, _Q2_DMIN = (Q2_K.offset(field) for field in ("qs", "d", "dmin"))
_Q3_QS, _Q3_SCALES, _Q3_D = (Q3_K.offset(field) for field in ("qs", "scales", "d"))
_Q4_QS, _Q5_QS, _Q5_QH = Q4_K.offset("qs"), Q5_K.offset("qs"), Q5_K.offset("qh")
_Q6_QH, _Q6_SCALES, _Q6_D = (Q6_K.offset(field) for field in ("qh", "scales", "d"))

# from [scales 0-3, minima 0-3, scales 4-7, minima 4-7] to scale 0, minimum 0, scale 1, minimum 1 …
_interleaved = shuffle(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15)
_alternating = shuffle(*[0, 8] * 8)


@jit(device=True)
def _pair_q8_0(first, second):
    return join_u8x32(load_u8x32(first, _Q8_0_QS), load_u8x32(second, _Q8_0_QS)) ^ 128


@jit(device=True)
def _chunk_q4_k(block, chunk):
    return then_shifted_4(load_u8x32(block, _Q4_QS + 32 * chunk)) & 15


@jit(device=True)
def _chunk_q5_k(block, chunk):
    high = then_shifted_1(load_u8x32(block, _Q5_QH)) >> 2 * chunk
    return then_shifted_4(load_u8x32(block, _Q5_QS + 32 * chunk)) & 15 | (high & 1) << 4


@jit(device=True)
def _chunk_q6_k(block, chunk):
    half, shift = chunk // 2, 4 * (chunk % 2)
    high = then_shifted_2(load_u8x32(block, _Q6_QH + 32 * half)) >> shift
    return load_u8x64(block, 64 * half) >> shift & 15 | (high & 3) << 4


@jit(device=True)
def _chunk_q3_k(block, chunk):
    half, shift = chunk // 2, 4 * (chunk % 2)
    high = then_shifted_1(load_u8x32(block)) >> 2 * chunk
    return then_shifted_2(load_u8x32(block, _Q3_QS + 32 * half)) >> shift & 3 | (high & 1) << 2


@jit(device=True)
def _chunk_q2_k(block, chunk):
    half, shift = chunk // 2, 4 * (chunk % 2)
    return then_shifted_2(load_u8x32(block, _Q2_QS + 32 * half)) >> shift & 3


@jit(device=True)
def _six_bit_scales(scales):
    """The 12 bytes of Q4_K and Q5_K scales as bytes [scales 0-3, minima 0-3, scales 4-7, minima 4-7]."""
    first, rest = load_i64(scales), load_u32(scales, 8)
    low_nibbles = (rest | rest << 28) & 0x0F0F0F0F0F0F0F0F
    return u8x16_of(first & 0x3F3F3F3F3F3F3F3F, low_nibbles | (first >> 2) & 0x3030303030303030)


def _affine_scales(fmt):
    """Scales and minima of a Q4_K or Q5_K super-block, alternating, for one row in ``words``."""
    scales, dmin = fmt.offset("scales"), fmt.offset("dmin")

    @jit(device=True)
    def load_scales(block, words):
        d_dmin = _alternating(pair_f32x16(load_f16(block), load_f16(block, dmin)))
        store(words, _interleaved(u8x16_to_f32x16(_six_bit_scales(block + scales))) * d_dmin)

    return load_scales


@jit(device=True)
def _scales_q6_k(block, words):
    store(words, i8x16_to_f32x16(load_u8x16(block, _Q6_SCALES)) * load_f16(block, _Q6_D))


@jit(device=True)
def _scales_q3_k(block, words):
    store(words, (u8x16_to_f32x16(q3_scales(block + _Q3_SCALES)) - 32) * load_f16(block, _Q3_D))


@jit(device=True)
def _scales_q2_k(block, words):
    packed = load_u8x16(block)
    store(words, u8x16_to_f32x16(packed & 15) * load_f16(block, _Q2_D))
    store(words, u8x16_to_f32x16(packed >> 4) * load_f16(block, _Q2_DMIN), 1024)


@intrinsic
def _transpose(typing_context, source, source_stride, target, stride):
    """Transpose 16 × 16 words of 32 bits between rows ``source_stride`` and ``stride`` bytes apart."""

    def generate(context, builder, signature, arguments):
        # shared code: inlined into every format it would multiply the compile time
        builder.function.attributes.add("noinline")
        source, source_stride, target, stride = arguments
        places = [builder.add(source, builder.mul(source_stride, ir.IntType(64)(i))) for i in range(16)]
        rows = [builder.load(pointer_at(builder, I32x16.llvm, place), align=1) for place in places]
        for distance in (1, 2, 4, 8):
            for i in (i for i in range(16) if not i & distance):
                upper, lower = rows[i], rows[i + distance]
                # exchange the off-diagonal quadrants of every square of 2 * distance
                to_upper = [j if not j & distance else j - distance + 16 for j in range(16)]
                to_lower = [j + distance if not j & distance else j + 16 for j in range(16)]
                order = [ir.Constant(I32x16.llvm, indices) for indices in (to_upper, to_lower)]
                rows[i], rows[i + distance] = (builder.shuffle_vector(upper, lower, o) for o in order)
        for row in rows:
            builder.store(row, pointer_at(builder, I32x16.llvm, target), align=1)
            target = builder.add(target, stride)

    return types.void(*[types.int64] * 4), generate


@jit(device=True)
def transpose_16x16(source, source_stride, target, stride):
    """``_transpose`` as a function that all formats share."""
    _transpose(source, source_stride, target, stride)


def _legacy_panel(fmt, unpack):
    """``fill(rows, row_bytes, n_rows, first_block, last_block, panel, scales)`` for blocks of 32 weights."""
    size = fmt.block_bytes
    affine = any(field.name == "m" for field in fmt.fields)
    m = fmt.offset("m") if affine else 0
    scale_bytes = 128 if affine else 64

    @jit(device=True)
    def fill(rows, row_bytes, n_rows, first_block, last_block, panel, scales):
        words = stack_alloc(1024, 64)
        for pair in range((last_block - first_block + 1) // 2):
            position = first_block + 2 * pair
            partner = min(position + 1, last_block - 1)
            for row in range(n_rows):
                start = rows + row * row_bytes
                first, second = start + size * position, start + size * partner
                prefetch(first + FAR)
                store(words, unpack(first, second), 64 * row)
                target = scales + 2 * pair * scale_bytes + 4 * row
                store_f32(target, load_f16(first))
                store_f32(target + scale_bytes, load_f16(second))
                if affine:
                    store_f32(target + 64, -load_f16(first, m))
                    store_f32(target + scale_bytes + 64, -load_f16(second, m))
            transpose_16x16(words, 64, panel + 1024 * pair, 64)

    return fill


def _k_panel(fmt, chunk, load_scales, scale_and_minimum_apart=False):
    """The same for super-blocks of 256 weights; Q2_K has 16 scales apart from 16 minima."""
    size = fmt.block_bytes

    @jit(device=True)
    def fill(rows, row_bytes, n_rows, first_block, last_block, panel, scales):
        words = stack_alloc(2048, 64)
        for block in range(first_block, last_block):
            for row in range(n_rows):
                start = rows + row * row_bytes + size * block
                for line in range(0, size, 64):
                    prefetch(start + line + FAR)
                load_scales(start, words + 64 * row)
            if scale_and_minimum_apart:
                target = scales + 2048 * (block - first_block)
                transpose_16x16(words, 64, target, 128)
                transpose_16x16(words + 1024, 64, target + 64, 128)
            else:
                transpose_16x16(words, 64, scales + 1024 * (block - first_block), 64)
        # one loop over all chunks: unrolled by four it would only make code
        for i in range(4 * (last_block - first_block)):
            for row in range(n_rows):
                start = rows + row * row_bytes + size * (first_block + i // 4)
                store(words, chunk(start, i % 4), 64 * row)
            transpose_16x16(words, 64, panel + 1024 * i, 64)

    return fill


# ``fill`` of every format: decode blocks ``first_block`` to ``last_block`` of up to 16 rows, the first of
# which is at ``rows``, into PANEL_BYTES and SCALE_BYTES bytes; lanes of absent rows are undefined.
FILLERS: Mapping[str, object] = MappingProxyType(
    {
        "Q4_0": _legacy_panel(Q4_0, pair_q4_0),
        "Q4_1": _legacy_panel(Q4_1, pair_q4_1),
        "Q5_0": _legacy_panel(Q5_0, pair_q5_0),
        "Q5_1": _legacy_panel(Q5_1, pair_q5_1),
        "Q8_0": _legacy_panel(Q8_0, _pair_q8_0),
        "Q2_K": _k_panel(Q2_K, _chunk_q2_k, _scales_q2_k, scale_and_minimum_apart=True),
        "Q3_K": _k_panel(Q3_K, _chunk_q3_k, _scales_q3_k),
        "Q4_K": _k_panel(Q4_K, _chunk_q4_k, _affine_scales(Q4_K)),
        "Q5_K": _k_panel(Q5_K, _chunk_q5_k, _affine_scales(Q5_K)),
        "Q6_K": _k_panel(Q6_K, _chunk_q6_k, _scales_q6_k),
    }
)
