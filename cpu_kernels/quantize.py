"""fp32 vectors to int8 in blocks of 32, equal to ``reference.quantize_activations`` bit for bit.

Per block: ``scale = max|x| / 127``, ``q = round_half_even(x * (1 / scale))``, and per half block of 16
``sum = scale * (q_0 + … + q_15)``, all in fp32. A block whose ``1 / scale`` is not finite is all zeros; one
that holds NaN or infinity has a NaN scale, so that every product with it is NaN.
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from realizar_torch.cpu_kernels.jit import jit
from realizar_torch.cpu_kernels.memory import (
    f32_bits,
    f32_from_bits,
    load_f32,
    pointer_at,
    stack_alloc,
    store_f32,
    store_i64,
)
from realizar_torch.cpu_kernels.simd import I32, F32x16, call, splat

BLOCK = 32
_HALF = 16
_INFINITY_BITS, _NAN_BITS = 0x7F800000, 0x7FC00000
_ONE, _STEPS = np.float32(1), np.float32(127)
# 1.5 * 2^23: adding it rounds a number below 2^22 to an integer, half to even, and leaves it in the low bits
_ROUNDER, _ROUNDER_BITS = 12582912.0, 0x4B400000


@intrinsic
def _largest_magnitude(typing_context, address):
    """Bits of the largest |x| of 32 fp32 values. As integers, infinity exceeds all numbers and NaN infinity."""

    def generate(context, builder, signature, arguments):
        words = ir.VectorType(I32, BLOCK)
        bits = builder.load(pointer_at(builder, words, arguments[0]), align=1)
        magnitude = builder.and_(bits, splat(builder, I32(0x7FFFFFFF), words))
        largest = call(builder, f"llvm.vector.reduce.umax.v{BLOCK}i32", I32, magnitude)
        return builder.zext(largest, ir.IntType(64))

    return types.int64(types.int64), generate


@intrinsic
def _round_sixteen(typing_context, x, inverse, q):
    """Store round(x[i] * inverse) as 16 int8 at ``q``; their sum. Every |x[i] * inverse| is below 127.5."""

    def generate(context, builder, signature, arguments):
        x, inverse, q = arguments
        floats, words = F32x16.llvm, ir.VectorType(I32, _HALF)
        values = builder.load(pointer_at(builder, floats, x), align=1)
        scaled = builder.fmul(values, splat(builder, inverse, floats))
        rounded = builder.fadd(scaled, splat(builder, ir.Constant(ir.FloatType(), _ROUNDER), floats))
        integers = builder.sub(builder.bitcast(rounded, words), splat(builder, I32(_ROUNDER_BITS), words))
        small = builder.trunc(integers, ir.VectorType(ir.IntType(8), _HALF))
        builder.store(small, pointer_at(builder, small.type, q), align=1)
        return builder.sext(
            call(builder, f"llvm.vector.reduce.add.v{_HALF}i32", I32, integers), ir.IntType(64)
        )

    return types.int64(types.int64, types.float32, types.int64), generate


@jit(device=True)
def _quantize_block(x, q, scales, sums):
    largest = _largest_magnitude(x)
    finite = largest < _INFINITY_BITS
    scale = f32_from_bits(largest) / _STEPS if finite else f32_from_bits(_NAN_BITS)
    inverse = _ONE / scale
    store_f32(scales, scale)
    if finite and f32_bits(inverse) < _INFINITY_BITS:
        store_f32(sums, scale * np.float32(_round_sixteen(x, inverse, q)))
        store_f32(sums, scale * np.float32(_round_sixteen(x + 4 * _HALF, inverse, q + _HALF)), 4)
        return
    for word in range(BLOCK // 8):
        store_i64(q, 0, 8 * word)
    store_f32(sums, scale * np.float32(0))
    store_f32(sums, scale * np.float32(0), 4)


@jit(device=True)
def quantize_vector(x, width, padded_width, q, scales, sums):
    """fp32 x[width] → int8 q[padded_width], fp32 scales[padded_width / 32] and sums[padded_width / 16].

    ``padded_width`` is a multiple of 32; what exceeds ``width`` counts as zero and is not read.
    """
    tail = stack_alloc(4 * 32, 64)
    for block in range(padded_width // BLOCK):
        values = x + 4 * BLOCK * block
        if BLOCK * (block + 1) > width:
            for index in range(BLOCK):
                inside = BLOCK * block + index < width
                store_f32(tail, load_f32(values, 4 * index) if inside else np.float32(0), 4 * index)
            values = tail
        _quantize_block(values, q + BLOCK * block, scales + 4 * block, sums + 8 * block)


@jit
def quantize_vectors(thread, n_threads, x, count, width, padded_width, q, scales, sums):
    """``quantize_vector`` of ``count`` vectors that follow each other, shared among the threads."""
    for index in range(thread, count, n_threads):
        block = index * padded_width
        quantize_vector(
            x + 4 * width * index, width, padded_width, q + block, scales + block // 8, sums + block // 4
        )
