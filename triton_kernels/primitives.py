"""Loads at any alignment and the 4-byte dot product, the only places where kernels touch raw memory width or PTX."""

import triton
import triton.language as tl

# The interpreter has no PTX: every inline-assembly piece below has a twin in plain Triton.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def load_words(pointer, mask, ALIGN: tl.constexpr):
    """Four little-endian 32-bit words at each byte address: ``[..., 4]`` int32.

    ALIGN is a power of two that divides every address: one 16-byte load at 16, two-byte loads below 4.
    """
    lane = tl.arange(0, 4)
    if ALIGN >= 4:
        words = tl.expand_dims(pointer.to(tl.pointer_type(tl.int32)), -1) + lane
        if mask is None:
            return tl.load(words, eviction_policy="evict_first")
        return tl.load(words, mask=tl.expand_dims(mask, -1), other=0, eviction_policy="evict_first")
    pairs = tl.expand_dims(tl.expand_dims(pointer.to(tl.pointer_type(tl.uint16)), -1), -1)
    pairs = pairs + 2 * tl.expand_dims(lane, -1) + tl.arange(0, 2)
    if mask is None:
        halves = tl.load(pairs)
    else:
        halves = tl.load(pairs, mask=tl.expand_dims(tl.expand_dims(mask, -1), -1), other=0)
    low, high = tl.split(halves.to(tl.int32))
    return low | (high << 16)


@triton.jit
def load_word(pointer, mask, ALIGN: tl.constexpr):
    """One little-endian 32-bit word at each byte address, as int32."""
    if ALIGN >= 4:
        return load_scalar(pointer.to(tl.pointer_type(tl.int32)), mask)
    halves = pointer.to(tl.pointer_type(tl.uint16))
    low = load_scalar(halves, mask).to(tl.int32)
    return low | (load_scalar(halves + 1, mask).to(tl.int32) << 16)


@triton.jit
def load_half(pointer, mask):
    """The fp16 value at each (2-byte aligned) byte address, as fp32."""
    return load_scalar(pointer.to(tl.pointer_type(tl.float16)), mask).to(tl.float32)


@triton.jit
def load_scalar(pointer, mask):
    """``tl.load`` where ``mask`` may be None; masked lanes read 0."""
    if mask is None:
        return tl.load(pointer)
    return tl.load(pointer, mask=mask, other=0)


@triton.jit
def split_words(words):
    """``[a, b, c, 4]`` → four ``[a, b, c]`` tensors; a register rename when a thread holds the last axis."""
    even, odd = tl.split(tl.reshape(words, [words.shape[0], words.shape[1], words.shape[2], 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def dp4a(weights, activations, total, SIGNED: tl.constexpr):
    """total + Σ of the four byte products of two words; activations are int8, weights uint8 or (SIGNED) int8."""
    if INTERPRETED:
        for i in tl.static_range(4):
            byte = (weights >> (8 * i)) & 0xFF
            if SIGNED:
                byte = (byte << 24) >> 24
            total = total + byte * ((activations << (24 - 8 * i)) >> 24)
        return total
    if SIGNED:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [weights, activations, total], tl.int32, True, 1
        )
    return tl.inline_asm_elementwise(
        "dp4a.u32.s32 $0, $1, $2, $3;", "=r,r,r,r", [weights, activations, total], tl.int32, True, 1
    )


@triton.jit
def round_half_even(x):
    """Nearest integer of an fp32 value with |x| < 2^22, ties to even, as int32."""
    magic = 12582912.0
    if INTERPRETED:
        floor = tl.floor(x)
        fraction = x - floor
        odd = (floor.to(tl.int32) & 1) == 1
        up = (fraction > 0.5) | ((fraction == 0.5) & odd)
        return floor.to(tl.int32) + up.to(tl.int32)
    return tl.inline_asm_elementwise("cvt.rni.s32.f32 $0, $1;", "=r,f", [x], tl.int32, True, 1)
