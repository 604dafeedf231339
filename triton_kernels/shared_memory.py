"""Shared memory by hand: an array in it, 16-byte copies into it that take no registers, loads from it.

An address in it is an int32. What Triton itself keeps in shared memory lies beside what is declared here.
The interpreter has none of this: callers have a twin that reads global memory.
"""

import triton
import triton.language as tl


@triton.constexpr_function
def _declaration(nbytes):
    return f"{{ .shared .align 128 .b8 array[{nbytes}]; mov.u32 $0, array; }}"


@triton.jit
def shared_memory(BYTES: tl.constexpr):
    """The address of an array of BYTES in a program's shared memory, at most 48 KB with what Triton keeps."""
    return tl.inline_asm_elementwise(_declaration(BYTES), "=r", [], tl.int32, False, 1)


@triton.jit
def copy_16_bytes(to, pointers, mask):
    """Ask for 16 bytes from each of ``pointers`` at the shared address ``to``, where ``mask`` is true:
    they are there for all threads after ``wait_for_copies`` and a barrier.

    Without a cache policy: versions of ptxas up to 13.3 lose its register, which is an illegal instruction.
    """
    if mask is None:
        tl.inline_asm_elementwise(
            "cp.async.cg.shared.global [$1], [$2], 16; // $0", "=r,r,l", [to, pointers], tl.int32, False, 1
        )
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p cp.async.cg.shared.global [$1], [$2], 16; } // $0",
            "=r,r,l,r", [to, pointers, mask.to(tl.int32)], tl.int32, False, 1,
        )  # fmt: skip


@triton.jit
def commit_copies():
    """Make one group of all copies since the last one (there may be none)."""
    tl.inline_asm_elementwise("cp.async.commit_group; // $0", "=r", [], tl.int32, False, 1)


@triton.constexpr_function
def _wait(groups):
    return f"cp.async.wait_group {groups}; // $0"


@triton.jit
def wait_for_copies(GROUPS: tl.constexpr):
    """Return when this thread's copies have arrived, but for those of the last GROUPS groups."""
    tl.inline_asm_elementwise(_wait(GROUPS), "=r", [], tl.int32, False, 1)


@triton.jit
def shared_words(address):
    """Four 32-bit words at each address, a multiple of 16: four int32 tensors."""
    return tl.inline_asm_elementwise(
        "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,r", [address],
        (tl.int32, tl.int32, tl.int32, tl.int32), False, 1,
    )  # fmt: skip


@triton.jit
def shared_word(address):
    """The 32-bit word at each address, a multiple of 4, as int32."""
    return tl.inline_asm_elementwise("ld.shared.b32 $0, [$1];", "=r,r", [address], tl.int32, False, 1)


@triton.jit
def shared_half(address):
    """The fp16 value at each even address."""
    bits = tl.inline_asm_elementwise("ld.shared.b16 $0, [$1];", "=h,r", [address], tl.int16, False, 1)
    return bits.to(tl.float16, bitcast=True)
