"""Sums over a program's warps through shared memory: one barrier, always in the order of the warps.

Every thread holds 4 N fp32 sums, of 128 N results that all warps have a part of: result 128 n + 4 lane + r is
register 4 n + r of that lane.
"""

import triton
import triton.language as tl

from realizar_torch.triton_kernels.primitives import INTERPRETED


@triton.constexpr_function
def exchange_outputs(n, warps):
    """Elements of what ``sum_over_warps`` returns; the first 128 n of them are results."""
    return 128 * n if INTERPRETED.value else 32 * warps


@triton.constexpr_function
def _reserve(n, warps):
    return f"{{ .shared .align 16 .b8 sums[{2 * 512 * n * warps}]; mov.u32 $0, sums; }}"


@triton.constexpr_function
def _add(n, warps):
    """Operands: the sum; where to write, where to read, which result; then the 4 n registers."""
    lines = ["{ .reg .pred none;", f".reg .f32 part<{warps}>;"]
    for i in range(n):
        registers = ",".join(f"${4 + 4 * i + r}" for r in range(4))
        lines.append(f"st.shared.v4.f32 [$1+{512 * i}], {{{registers}}};")
    lines += [
        "bar.sync 0;",
        "mov.f32 $0, 0f00000000;",
        f"setp.ge.u32 none, $3, {128 * n};",
        "@none bra DONE;",
    ]
    lines += [f"ld.shared.f32 part{w}, [$2+{512 * n * w}];" for w in range(warps)]
    lines += [f"add.f32 $0, $0, part{w};" for w in range(warps)]
    return " ".join([*lines, "DONE: }"])


@triton.constexpr_function
def _constraints(n):
    return ",".join(["=&f", "r", "r", "r", *["f"] * (4 * n)])


@triton.jit
def exchange_buffer(thread, N: tl.constexpr, WARPS: tl.constexpr):
    """The shared address of two buffers of partial sums, in every thread. Once per kernel."""
    tl.static_assert(
        WARPS >= 4 * N and N <= 2, "a thread adds one result, and two buffers take 48 KB at most"
    )
    if INTERPRETED:
        address = thread
    else:
        address = tl.inline_asm_elementwise(_reserve(N, WARPS), "=r,r", [thread], tl.int32, False, 1)
    return address


@triton.jit
def sum_over_warps(total, buffer, turn, N: tl.constexpr, WARPS: tl.constexpr):
    """Result i in element i. ``turn`` counts the calls: those who still read the last one's buffer are not
    overwritten.
    """
    if INTERPRETED:
        sums = _tile(total, 0, WARPS)
        if N == 2:
            sums = tl.reshape(tl.trans(tl.join(sums, _tile(total, 4, WARPS))), [256])
    else:
        thread = tl.arange(0, 32 * WARPS)
        start = buffer + turn % 2 * (512 * N * WARPS)
        write = start + thread // 32 * (512 * N) + thread % 32 * 16
        operands = (write, start + 4 * thread, thread) + total  # noqa: RUF005
        sums = tl.inline_asm_elementwise(
            _add(N, WARPS), _constraints(N), operands, tl.float32, False, 1
        )  # fmt: skip
    return sums


@triton.jit
def _tile(total, START: tl.constexpr, WARPS: tl.constexpr):
    even, odd = tl.join(total[START], total[START + 2]), tl.join(total[START + 1], total[START + 3])
    return tl.sum(tl.reshape(tl.join(even, odd), [WARPS, 128]), 0)
