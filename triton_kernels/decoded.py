"""Products of many rows: packed rows are decoded into one buffer, a chunk at a time, and torch multiplies."""

from collections.abc import Iterator, Sequence

import torch

from realizar_torch.triton_kernels.configs import choose_chunk
from realizar_torch.triton_kernels.dequantize import decode_rows
from realizar_torch.triton_kernels.launch import PackedRows


def decoded_matmul(x: torch.Tensor, weights: Sequence[PackedRows], out: torch.Tensor) -> torch.Tensor:
    """out = x · decode(W)ᵀ for the rows of all ``weights``, one below the other; fp32 accumulation.

    x ``[M, K]`` of any float dtype, which the weights are rounded to; out ``[M, rows of all weights]`` in the
    same dtype, columns consecutive in memory. Weights share K. Memory beyond ``out`` is one chunk.
    """
    in_features = weights[0].in_features
    total = sum(weight.rows for weight in weights)
    step = choose_chunk(total, in_features, x.element_size())
    # of float64 too the kernel decodes to fp32, which is exact
    dtype = torch.float32 if x.dtype == torch.float64 else x.dtype
    buffer = torch.empty(step, in_features, dtype=dtype, device=x.device)
    for first in range(0, total, step):
        count = min(step, total - first)
        filled = 0
        for weight, start, rows in _parts(weights, first, count):
            decode_rows(weight, start, rows, buffer[filled:])
            filled += rows
        torch.mm(x, buffer[:count].to(x.dtype).T, out=out[:, first : first + count])
    return out


def _parts(weights: Sequence[PackedRows], first: int, count: int) -> Iterator[tuple[PackedRows, int, int]]:
    """(weight, first row, rows) of what rows first … first + count - 1 of the stack are made of."""
    top = 0
    for weight in weights:
        start, end = max(first - top, 0), min(first + count - top, weight.rows)
        if start < end:
            yield weight, start, end - start
        top += weight.rows
