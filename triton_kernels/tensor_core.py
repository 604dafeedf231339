"""Tensor-core products of one warp's registers, and wide loads into them: the only PTX of the matmul.

Tensors here have one element per thread: element i of ``[32 * warps]`` is in thread i, which is Triton's
layout of every such vector. A thread of a warp is lane 4 g + t. With words of four int8 (or one tf32) the
operands of a product ``[16, K] x [K, 8]`` are

    left   word 2 j + i:  row g + 8 i,  word t + 4 j of K
    right  word j:        word t + 4 j of K,  column g
    result 2 i + c:       row g + 8 i,  column 2 t + c
"""

import triton
import triton.language as tl

from realizar_torch.triton_kernels.primitives import INTERPRETED

# 1.5 * 2^23: an fp32 of this exponent has its integer in the low bits
MAGIC = tl.constexpr(12582912.0)
_MAGIC_BITS = tl.constexpr(0x4B400000)


@triton.jit
def _rows_of_products(left, right, SIGNED: tl.constexpr, WORD: tl.constexpr):
    """Twin of a product for the interpreter: left and right words of eight rows → two result registers."""
    WARPS: tl.constexpr = left[0].shape[0] // 32
    products = tl.zeros([WARPS, 8, 8], tl.float32)
    for j in tl.static_range(len(left)):
        a = tl.reshape(left[j], [WARPS, 8, 1, 4])
        b = tl.reshape(right[j], [WARPS, 1, 8, 4])
        if WORD == 1:
            # tf32 has 10 bits of mantissa
            a = (a.to(tl.int32, bitcast=True) & -0x2000).to(tl.float32, bitcast=True)
            b = (b.to(tl.int32, bitcast=True) & -0x2000).to(tl.float32, bitcast=True)
            products += tl.sum(a * b, 3)
        else:
            for i in tl.static_range(4):
                if SIGNED:
                    quant = (a << (24 - 8 * i)) >> 24
                else:
                    quant = (a >> (8 * i)) & 0xFF
                products += tl.sum(quant * ((b << (24 - 8 * i)) >> 24), 3).to(tl.float32)
    even, odd = tl.split(tl.reshape(products, [WARPS * 32, 2]))
    return even, odd


@triton.jit
def multiply_int8(left, right, SIGNED: tl.constexpr):
    """MAGIC + left x right: four fp32 registers, exact below 2^22.

    left: four words (K = 32) or two (K = 16) of uint8 or (SIGNED) int8; right: two words or one of int8.
    """
    magic = tl.full(left[0].shape, _MAGIC_BITS, tl.int32)
    if INTERPRETED:
        if len(left) == 4:
            upper = _rows_of_products((left[0], left[2]), right, SIGNED, 4)
            lower = _rows_of_products((left[1], left[3]), right, SIGNED, 4)
        else:
            upper = _rows_of_products((left[0],), right, SIGNED, 4)
            lower = _rows_of_products((left[1],), right, SIGNED, 4)
        result = (upper[0] + MAGIC, upper[1] + MAGIC, lower[0] + MAGIC, lower[1] + MAGIC)
    else:
        if len(left) == 4:
            operands = (left[0], left[1], left[2], left[3], right[0], right[1], magic)
            if SIGNED:
                bits = tl.inline_asm_elementwise(
                    "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
                    "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$10,$10,$10};",
                    "=r,=r,=r,=r,r,r,r,r,r,r,r", operands, (tl.int32, tl.int32, tl.int32, tl.int32), True, 1,
                )  # fmt: skip
            else:
                bits = tl.inline_asm_elementwise(
                    "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 "
                    "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$10,$10,$10};",
                    "=r,=r,=r,=r,r,r,r,r,r,r,r", operands, (tl.int32, tl.int32, tl.int32, tl.int32), True, 1,
                )  # fmt: skip
        else:
            tl.static_assert(SIGNED)
            bits = tl.inline_asm_elementwise(
                "mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 "
                "{$0,$1,$2,$3}, {$4,$5}, {$6}, {$7,$7,$7,$7};",
                "=r,=r,=r,=r,r,r,r,r", (left[0], left[1], right[0], magic),
                (tl.int32, tl.int32, tl.int32, tl.int32), True, 1,
            )  # fmt: skip
        result = (
            bits[0].to(tl.float32, bitcast=True), bits[1].to(tl.float32, bitcast=True),
            bits[2].to(tl.float32, bitcast=True), bits[3].to(tl.float32, bitcast=True),
        )  # fmt: skip
    return result


@triton.jit
def multiply_tf32(left, right, total):
    """total + left x right: left four fp32 words (K = 8), right two, total four registers.

    Only the upper 19 bits of a word count.
    """
    if INTERPRETED:
        upper = _rows_of_products((left[0], left[2]), right, True, 1)
        lower = _rows_of_products((left[1], left[3]), right, True, 1)
        result = (upper[0] + total[0], upper[1] + total[1], lower[0] + total[2], lower[1] + total[3])
    else:
        result = tl.inline_asm_elementwise(
            "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
            "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
            "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
            (left[0], left[1], left[2], left[3], right[0], right[1], total[0], total[1], total[2], total[3]),
            (tl.float32, tl.float32, tl.float32, tl.float32), True, 1,
        )  # fmt: skip
    return result


@triton.jit
def scaled(value, scale, offset):
    """scale * (value - MAGIC) in one instruction: offset = -MAGIC * scale, exact, as scale has 22 bits at
    most.
    """
    if INTERPRETED:
        result = (value - MAGIC) * scale
    else:
        result = tl.fma(value, scale, offset)
    return result


@triton.jit
def byte_as_float(word, index):
    """2^23 + byte ``index`` (0 to 3, one for all threads or one each) of a word, as fp32."""
    if INTERPRETED:
        bits = ((word >> (8 * index)) & 0xFF) | 0x4B000000
    else:
        bits = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [word, 0x4B000000, index + 0x7440], tl.int32, True, 1
        )
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def byte_times(word, index: tl.constexpr, unit):
    """Byte ``index`` of a word times an fp32 of 16 bits of mantissa at most, which makes it exact."""
    if INTERPRETED:
        result = ((word >> (8 * index)) & 0xFF).to(tl.float32) * unit
    else:
        result = tl.fma(byte_as_float(word, index), unit, unit * -8388608.0)
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
def hold_loads(lane):
    """Keep ptxas from moving loads that stand above this place below it, to where their values are used."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "bar.warp.sync 0xffffffff; mov.b32 $0, $1;", "=r,r", [lane], tl.int32, False, 1
        )
