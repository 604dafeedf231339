"""Kernels over rows as native functions, one per format and numerics, compiled when first needed.

``float_rows`` and ``int8_rows`` have the signature
``(weight, row_bytes, first_row, last_row, width, x, scale, sums, out)``:
``out[row] = sum_k w[row, k] * x[k]`` in fp32 for ``first_row <= row < last_row`` and ``k < width``.
``weight`` and ``out`` are the addresses of row 0. Float kernels take fp32 ``x [width]`` and ignore ``scale``
and ``sums``; int8 kernels take one vector of ``reference.quantize_activations`` (``x`` is its ``q``).
``int8_matmul`` and ``bf16_matmul`` are ``matmul_tile_of`` and ``bf16_tile_of`` for this CPU. ``decode_row``
has the signature ``(row, count, target)``: the first ``count`` weights as fp32.
"""

import functools
from collections.abc import Mapping
from types import MappingProxyType

from realizar_torch.cpu_kernels import float_rows as floats
from realizar_torch.cpu_kernels.bf16_matmul import bf16_tile_of
from realizar_torch.cpu_kernels.decode import ROW_DECODERS
from realizar_torch.cpu_kernels.int8_affine_k import dot_q4_k, dot_q5_k
from realizar_torch.cpu_kernels.int8_k import dot_q2_k, dot_q3_k, dot_q6_k
from realizar_torch.cpu_kernels.int8_legacy import dot_q4_0, dot_q4_1, dot_q5_0, dot_q5_1, dot_q8_0
from realizar_torch.cpu_kernels.int8_matmul import matmul_tile_of
from realizar_torch.cpu_kernels.int8_rows import four_at_once, in_turn
from realizar_torch.cpu_kernels.jit import jit
from realizar_torch.cpu_kernels.native import address_of
from realizar_torch.cpu_kernels.targets import best_target
from realizar_torch.formats import get_packed_format

_INT8_ROWS: Mapping[str, object] = MappingProxyType(
    {
        "Q4_0": in_turn(dot_q4_0),
        "Q4_1": in_turn(dot_q4_1),
        "Q5_0": in_turn(dot_q5_0),
        "Q5_1": in_turn(dot_q5_1),
        "Q8_0": in_turn(dot_q8_0),
        "Q2_K": in_turn(dot_q2_k),
        "Q3_K": in_turn(dot_q3_k),
        "Q4_K": four_at_once(dot_q4_k),
        "Q5_K": four_at_once(dot_q5_k),
        "Q6_K": four_at_once(dot_q6_k),
    }
)


@functools.cache
def float_rows(fmt: str) -> int:
    """Address of the fp32 kernel of a format."""
    rows = floats.ROWS[fmt]

    @jit
    def float_rows_kernel(weight, row_bytes, first_row, last_row, width, x, scale, sums, out):
        rows(weight, row_bytes, first_row, last_row, width, x, out)

    return address_of(float_rows_kernel, 9)


def int8_rows_of(fmt: str) -> object:
    """The int8 kernel of a format as a device function, whose first argument is the target."""
    rows, block_size = _INT8_ROWS[fmt], get_packed_format(fmt).block_size

    @jit(device=True)
    def int8_rows_on_target(target, weight, row_bytes, first_row, last_row, width, q, scale, sums, out):
        n_blocks = (width + block_size - 1) // block_size
        rows(target, weight, row_bytes, first_row, last_row, n_blocks, q, scale, sums, out)

    return int8_rows_on_target


@functools.cache
def int8_rows(fmt: str) -> int:
    """Address of the int8 kernel of a format, for the best target of this CPU."""
    rows, target = int8_rows_of(fmt), best_target()

    @jit
    def int8_rows_kernel(weight, row_bytes, first_row, last_row, width, q, scale, sums, out):
        rows(target, weight, row_bytes, first_row, last_row, width, q, scale, sums, out)

    return address_of(int8_rows_kernel, 9)


@functools.cache
def int8_matmul(fmt: str) -> int:
    """Address of the int8 kernel of a format for several vectors, for the best target of this CPU."""
    tile, target = matmul_tile_of(fmt), best_target()

    @jit
    def int8_matmul_kernel(weight, row_bytes, rows, width, used, columns, q, scale, sums, out):
        tile(target, weight, row_bytes, rows, width, used, columns, q, scale, sums, out)

    return address_of(int8_matmul_kernel, 10)


@functools.cache
def bf16_matmul(fmt: str) -> int:
    """Address of the bf16 kernel of a format; the arguments are those of ``int8_matmul``, with bf16 ``q``."""
    tile = bf16_tile_of(fmt)

    @jit
    def bf16_matmul_kernel(weight, row_bytes, rows, width, used, columns, x, scale, sums, out):
        tile(weight, row_bytes, rows, width, used, columns, x, out)

    return address_of(bf16_matmul_kernel, 10)


@functools.cache
def decode_row(fmt: str) -> int:
    """Address of the row decoder of a format."""
    decode = ROW_DECODERS[fmt]

    @jit
    def decode_row_kernel(row, count, target):
        decode(row, count, target)

    return address_of(decode_row_kernel, 3)
