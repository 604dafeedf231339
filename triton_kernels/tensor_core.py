"""Tensor-core products of one warp's registers, arithmetic of fp16 pairs, and wide loads: PTX of the matmul.

Tensors here have one element per thread: element i of ``[threads]`` is in thread i, which is Triton's layout
of every such vector. A thread of a warp is lane 4 g + t. A *pair* is an int32 word of two fp16 values. The
operands of a product ``[16, 16] x [16, 8]`` are

    left   word 2 j + i:  row g + 8 i,  values 2 t + 8 j and the next one
    right  word j:        values 2 t + 8 j and the next one of column g
    total  2 i + c:       row g + 8 i,  column 2 t + c
"""

import triton
import triton.language as tl

from realizar_torch.triton_kernels.primitives import INTERPRETED


@triton.jit
def _halves(word, like):
    """The two fp16 values of a pair, in fp32; a number stands for that pair in every element of ``like``."""
    word = word + tl.zeros(like.shape, tl.int32)
    low = word.to(tl.int16).to(tl.float16, bitcast=True)
    high = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def _pair(low, high):
    """Two fp32 values, rounded to fp16, as a pair."""
    low = low.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    return (low & 0xFFFF) | (high.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def fma_pair(a, b, c):
    """a * b + c of pairs, rounded once."""
    if INTERPRETED:
        a0, a1 = _halves(a, a)
        b0, b1 = _halves(b, a)
        c0, c1 = _halves(c, a)
        result = _pair(a0 * b0 + c0, a1 * b1 + c1)
    else:
        result = tl.inline_asm_elementwise(
            "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], tl.int32, True, 1
        )
    return result


@triton.jit
def multiply_pair(a, b):
    if INTERPRETED:
        a0, a1 = _halves(a, a)
        b0, b1 = _halves(b, a)
        result = _pair(a0 * b0, a1 * b1)
    else:
        result = tl.inline_asm_elementwise("mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, True, 1)
    return result


@triton.jit
def odd_bytes(word):
    """Bytes 1 and 3 of a word as the bits of a pair."""
    if INTERPRETED:
        result = (word >> 8) & 0x00FF00FF
    else:
        result = tl.inline_asm_elementwise("prmt.b32 $0, $1, 0, 0x4341;", "=r,r", [word], tl.int32, True, 1)
    return result


@triton.jit
def whole_number(value):
    """A pair of twice the fp16 value of an int32 from 0 to 1023."""
    if INTERPRETED:
        result = _pair(value.to(tl.float32), value.to(tl.float32))
    else:
        # as low bits of 1024
        bits = (value | 0x6400) * 0x10001
        result = tl.inline_asm_elementwise(
            "sub.rn.f16x2 $0, $1, $2;", "=r,r,r", [bits, 0x64006400], tl.int32, True, 1
        )
    return result


@triton.jit
def _values(pairs):
    """Two words of every thread -> fp32 ``[warps, 8, 16]``."""
    WARPS: tl.constexpr = pairs[0].shape[0] // 32
    first, second = _halves(pairs[0], pairs[0]), _halves(pairs[1], pairs[1])
    values = tl.join(tl.join(first[0], first[1]), tl.join(second[0], second[1]))
    return tl.reshape(values, [WARPS, 8, 16])


@triton.jit
def _rows_of_product(left, right):
    """Twin of a product for the interpreter: pairs of eight rows and of eight columns -> two registers."""
    WARPS: tl.constexpr = left[0].shape[0] // 32
    a, b = _values(left), _values(right)
    products = tl.sum(tl.expand_dims(a, 2) * tl.expand_dims(b, 1), 3)
    return tl.split(tl.reshape(products, [WARPS * 32, 2]))


@triton.jit
def multiply_halves(left, right, total):
    """total + left x right in fp32: four words, two words and four registers."""
    if INTERPRETED:
        upper = _rows_of_product((left[0], left[2]), right)
        lower = _rows_of_product((left[1], left[3]), right)
        result = (upper[0] + total[0], upper[1] + total[1], lower[0] + total[2], lower[1] + total[3])
    else:
        result = tl.inline_asm_elementwise(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
            "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
            (left[0], left[1], left[2], left[3], right[0], right[1], total[0], total[1], total[2], total[3]),
            (tl.float32, tl.float32, tl.float32, tl.float32), True, 1,
        )  # fmt: skip
    return result


@triton.jit
def largest_of_four(value):
    """The largest of the (not negative) int32 values of lanes 4 g … 4 g + 3, in each of them."""
    if INTERPRETED:
        rows = tl.max(tl.reshape(value, [value.shape[0] // 4, 4]), 1)
        result = tl.reshape(tl.broadcast_to(rows[:, None], [value.shape[0] // 4, 4]), [value.shape[0]])
    else:
        result = tl.inline_asm_elementwise(
            "{ .reg .b32 other, most;"
            " shfl.sync.bfly.b32 other, $1, 1, 31, 0xffffffff; max.s32 most, other, $1;"
            " shfl.sync.bfly.b32 other, most, 2, 31, 0xffffffff; max.s32 $0, other, most; }",
            "=r,r", [value], tl.int32, True, 1,
        )  # fmt: skip
    return result


@triton.jit
def load_half(address):
    """The 16 bits at each thread's (even) byte pointer, as int32."""
    if INTERPRETED:
        bits = tl.load(address.to(tl.pointer_type(tl.uint16))).to(tl.int32)
    else:
        # the compiler takes time quadratic in its own loads: a minute for some kernels of these
        bits = tl.inline_asm_elementwise(
            "ld.global.u16 $0, [$1];", "=r,l", [address.to(tl.int64)], tl.int32, False, 1
        )
    return bits


@triton.jit
def _load_word(address, ALIGN: tl.constexpr):
    if ALIGN < 4:
        word = load_half(address) | (load_half(address + 2) << 16)
    elif INTERPRETED:
        word = tl.load(address.to(tl.pointer_type(tl.int32)))
    else:
        word = tl.inline_asm_elementwise(
            "ld.global.b32 $0, [$1];", "=r,l", [address.to(tl.int64)], tl.int32, False, 1
        )
    return word


@triton.jit
def load_vector(address, COUNT: tl.constexpr, ALIGN: tl.constexpr):
    """COUNT (1, 2 or 4) consecutive int32 words at each thread's pointer; ALIGN divides the pointers."""
    address = address.to(tl.pointer_type(tl.uint8))
    if INTERPRETED or ALIGN < 4 * COUNT or COUNT == 1:
        words = ()
        for i in tl.static_range(COUNT):
            words = words + (_load_word(address + 4 * i, ALIGN),)
    elif COUNT == 2:
        words = tl.inline_asm_elementwise(
            "ld.global.v2.b32 {$0,$1}, [$2];", "=r,=r,l", [address.to(tl.int64)],
            (tl.int32, tl.int32), False, 1,
        )  # fmt: skip
    else:
        words = tl.inline_asm_elementwise(
            "ld.global.v4.b32 {$0,$1,$2,$3}, [$4];", "=r,=r,=r,=r,l", [address.to(tl.int64)],
            (tl.int32, tl.int32, tl.int32, tl.int32), False, 1,
        )  # fmt: skip
    return words


@triton.jit
def load_once(address, ALIGN: tl.constexpr):
    """Four words likewise, which the L1 cache need not keep: no other program reads them."""
    address = address.to(tl.pointer_type(tl.uint8))
    if INTERPRETED or ALIGN < 16:
        words = load_vector(address, 4, ALIGN)
    else:
        words = tl.inline_asm_elementwise(
            "ld.global.L1::evict_first.v4.b32 {$0,$1,$2,$3}, [$4];", "=r,=r,=r,=r,l",
            [address.to(tl.int64)], (tl.int32, tl.int32, tl.int32, tl.int32), False, 1,
        )  # fmt: skip
    return words
