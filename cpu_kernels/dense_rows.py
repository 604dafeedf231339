"""Rows of a plain fp32 matrix, under the signatures of ``row_kernels.py``."""

import functools

from realizar_torch.cpu_kernels.attention import dot
from realizar_torch.cpu_kernels.jit import jit
from realizar_torch.cpu_kernels.memory import store_f32
from realizar_torch.cpu_kernels.native import address_of
from realizar_torch.cpu_kernels.step_vectors import copy_row


@functools.cache
def dense_rows() -> int:
    """Address of ``out[row] = weight[row] · x`` for fp32 rows ``row_bytes`` apart."""

    @jit
    def dense_rows_kernel(weight, row_bytes, first_row, last_row, width, x, scale, sums, out):
        for row in range(first_row, last_row):
            store_f32(out, dot(weight + row * row_bytes, x, width), 4 * row)

    return address_of(dense_rows_kernel, 9)


@functools.cache
def dense_row() -> int:
    """Address of the "decoder" of an fp32 row, which copies it."""

    @jit
    def dense_row_kernel(row, count, target):
        copy_row(row, count, target)

    return address_of(dense_row_kernel, 3)
