"""Loads at any alignment, the 4-byte dot product and launches that overlap: beside shared_memory.py the only
place where kernels touch raw memory width or PTX.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from realizar_torch.triton_kernels.shared_memory import shared_half, shared_word, shared_words

# The interpreter has no PTX: every inline-assembly piece below has a twin in plain Triton.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def load_words(row, offset, mask, ALIGN: tl.constexpr):
    """Four little-endian 32-bit words, ``offset [1, lanes]`` bytes into each ``row [rows, 1]``: int32
    ``[rows, lanes, 4]``.

    ALIGN is a power of two that divides every address: one 16-byte load at 16, four- or two-byte loads below.
    A row is a pointer, or an address in shared memory, of which nothing is masked; so it is in ``load_word``
    and ``load_half``.
    """
    if not row.dtype.is_ptr():
        tl.static_assert(mask is None)
        word0, word1, word2, word3 = shared_words(row + offset)
        result = _in_order(word0, word1, word2, word3)
    elif ALIGN == 16:
        words = tl.expand_dims(row.to(tl.pointer_type(tl.int32)) + offset // 4, -1) + tl.arange(0, 4)
        # what ALIGN says, in the compiler's terms; for the 2 see load_scalar
        words = tl.multiple_of(tl.max_contiguous(words, [1, 2, 4]), [1, 1, 16])
        if mask is None:
            result = tl.load(words, eviction_policy="evict_first")
        else:
            result = tl.load(words, mask=tl.expand_dims(mask, -1), other=0, eviction_policy="evict_first")
    else:
        word0 = load_word(row, offset, mask, ALIGN)
        word1 = load_word(row, offset + 4, mask, ALIGN)
        word2 = load_word(row, offset + 8, mask, ALIGN)
        word3 = load_word(row, offset + 12, mask, ALIGN)
        result = _in_order(word0, word1, word2, word3)
    return result


@triton.jit
def _in_order(word0, word1, word2, word3):
    """Four ``[rows, lanes]`` → ``[rows, lanes, 4]``."""
    pairs = tl.join(tl.join(word0, word2), tl.join(word1, word3))
    return tl.reshape(pairs, [word0.shape[0], word0.shape[1], 4])


@triton.jit
def load_word(row, offset, mask, ALIGN: tl.constexpr):
    """One little-endian 32-bit word, ``offset`` bytes into each row, as int32."""
    if not row.dtype.is_ptr():
        tl.static_assert(mask is None)
        result = shared_word(row + offset)
    elif ALIGN >= 4:
        result = load_scalar(row.to(tl.pointer_type(tl.int32)), offset // 4, mask)
    else:
        halves = row.to(tl.pointer_type(tl.uint16))
        low = load_scalar(halves, offset // 2, mask)
        high = load_scalar(halves, offset // 2 + 1, mask)
        result = low.to(tl.int32) | (high.to(tl.int32) << 16)
    return result


@triton.jit
def load_half(row, offset, mask):
    """The fp16 value, ``offset`` (even) bytes into each row."""
    if not row.dtype.is_ptr():
        tl.static_assert(mask is None)
        result = shared_half(row + offset)
    else:
        result = load_scalar(row.to(tl.pointer_type(tl.float16)), offset // 2, mask)
    return result


@triton.jit
def load_scalar(base, index, mask):
    """The elements ``index [1, lanes]`` of ``base`` (one pointer, or one per row); masked lanes read 0.

    The hint makes lanes, and not rows, neighbours in a warp: among dimensions of equal contiguity versions of
    Triton choose differently, and another choice costs a trip through shared memory and barriers per loop
    step. The alignment of one element keeps two of them from being taken as a wider load. A hint is lost
    unless it is given where the address is computed.
    """
    SIZE: tl.constexpr = base.dtype.element_ty.primitive_bitwidth // 8
    pointer = base + index
    # of one lane the compiler makes a scalar, which cannot carry the hint
    if index.shape[1] > 1:
        pointer = tl.multiple_of(tl.max_contiguous(pointer, [1, 2]), [1, SIZE])
    if mask is None:
        return tl.load(pointer)
    else:
        return tl.load(pointer, mask=mask, other=0)


@triton.jit
def split_words(words):
    """``[rows, lanes, 4]`` → four ``[rows, lanes]``; a register rename when a thread holds the last axis."""
    even, odd = tl.split(tl.reshape(words, [words.shape[0], words.shape[1], 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def dp4a(weights, activations, total, SIGNED: tl.constexpr):
    """total + Σ of the four byte products of two words: int8 activations, uint8 or (SIGNED) int8 weights."""
    if INTERPRETED:
        for i in tl.static_range(4):
            byte = (weights >> (8 * i)) & 0xFF
            if SIGNED:
                byte = (byte << 24) >> 24
            total = total + byte * ((activations << (24 - 8 * i)) >> 24)
    elif SIGNED:
        total = tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [weights, activations, total], tl.int32, True, 1
        )
    else:
        total = tl.inline_asm_elementwise(
            "dp4a.u32.s32 $0, $1, $2, $3;", "=r,r,r,r", [weights, activations, total], tl.int32, True, 1
        )
    return total


@triton.jit
def byte_to_float(word, index, bias: tl.constexpr):
    """Byte ``index`` of ``word``, unsigned, minus ``bias`` (an integer), as exact fp32.

    As the low mantissa bits of 2^23 a byte becomes a float without a conversion, which has few lanes.
    """
    if INTERPRETED:
        value = ((word >> (8 * index)) & 0xFF).to(tl.float32) - bias
    else:
        bits = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [word, 0x4B000000, 0x7440 + index], tl.int32, True, 1
        )
        value = bits.to(tl.float32, bitcast=True) - (8388608.0 + bias)
    return value


@triton.jit
def round_half_even(x):
    """Nearest integer of an fp32 value with |x| < 2^22, ties to even, as int32."""
    if INTERPRETED:
        floor = tl.floor(x)
        fraction = x - floor
        odd = (floor.to(tl.int32) & 1) == 1
        up = (fraction > 0.5) | ((fraction == 0.5) & odd)
        nearest = floor.to(tl.int32) + up.to(tl.int32)
    else:
        nearest = tl.inline_asm_elementwise("cvt.rni.s32.f32 $0, $1;", "=r,f", [x], tl.int32, True, 1)
    return nearest


@triton.jit
def cast(value, DTYPE: tl.constexpr):
    """An fp32 value rounded to nearest even in DTYPE (the interpreter would truncate to bf16)."""
    if INTERPRETED and tl.bfloat16 == DTYPE:
        bits = value.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        # NaN stays as it is
        value = tl.where(value == value, rounded.to(tl.float32, bitcast=True), value)
    return value.to(DTYPE)


@triton.jit
def rounded_product(a, b):
    """a * b, rounded before anything is added to it.

    In a sum over the lanes of a warp each lane adds its neighbour's product to its own. A compiler that fuses
    this addition with the lane's own product gives the lanes different sums, of which any may be stored.
    """
    return tl.fma(a, b, 0.0)


@triton.jit
def wait_for_predecessor(DEPENDENT: tl.constexpr):
    """Return when the stream's previous kernel has finished, and with it all before: only then may what they
    wrote be read.

    That holds as long as at least one program of every overlapping launch waits.
    """
    if DEPENDENT and not INTERPRETED:
        gdc_wait()


@triton.jit
def wait_and_release(RELEASE: tl.constexpr, DEPENDENT: tl.constexpr):
    """Wait for the predecessor. The successor may start "before" that; or "after", when all that ran before
    this launch has ended, so that the successor may look at it; or "later".
    """
    if RELEASE == "before":
        release_successor(DEPENDENT)
    wait_for_predecessor(DEPENDENT)
    if RELEASE == "after":
        release_successor(DEPENDENT)


@triton.jit
def keep_loads_ahead():
    """What was loaded before is asked for before anything that follows is computed.

    The assembler spreads loads out among arithmetic to save registers, and fewer bytes are then on their way.
    It moves none across a barrier of a warp, which costs nothing.
    """
    if not INTERPRETED:
        tl.inline_asm_elementwise("bar.warp.sync 0xffffffff; // dummy $0", "=r", [], tl.int32, False, 1)


@triton.jit
def release_successor(DEPENDENT: tl.constexpr):
    """Let the next kernel of the stream start (its programs wait for this grid to finish before they read
    from it).
    """
    if DEPENDENT and not INTERPRETED:
        gdc_launch_dependents()


@triton.jit
def prefetch_l2(pointers):
    """Ask for the cache lines that ``pointers`` name, without waiting for them."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], tl.int32, False, 1
        )
