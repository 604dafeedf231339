"""fp32 matrix-vector product over a range of rows of any packed format: weights decoded in registers.

One accumulator of 16 lanes per row, lane i adding weights i, i+16, …; so a row's result depends on nothing
but the row and the vector. ``matmul_float.py`` adds in the same order.
"""

from collections.abc import Mapping
from types import MappingProxyType

from realizar_torch.cpu_kernels.block_decoders import DECODERS, SUB_BLOCK
from realizar_torch.cpu_kernels.decode import Q_BYTES, SCALE_BYTES, WEIGHT_BYTES, sixteen_weights
from realizar_torch.cpu_kernels.jit import jit
from realizar_torch.cpu_kernels.memory import load_f32, stack_alloc, store_f32
from realizar_torch.cpu_kernels.simd import fma, load_f32x16, splat_f32x16, sum_f32x16


def _rows(fmt, decode):
    """The loop over rows of one format."""
    size, block_bytes = fmt.block_size, fmt.block_bytes
    sub_blocks = size // SUB_BLOCK

    @jit(device=True)
    def rows_of_format(weight, row_bytes, first_row, last_row, width, x, out):
        """``out[row] = sum_k w[row, k] * x[k]`` for ``first_row <= row < last_row``; addresses of row 0.

        ``x`` is fp32 [width], and nothing beyond it is read.
        """
        q, scale, minimum = (
            stack_alloc(Q_BYTES, 64),
            stack_alloc(SCALE_BYTES, 64),
            stack_alloc(SCALE_BYTES, 64),
        )
        # the vector ends where the last block's padding begins
        tail = stack_alloc(WEIGHT_BYTES, 64)
        for index in range(size):
            position = width // size * size + index
            store_f32(tail, load_f32(x, 4 * position) if position < width else 0.0, 4 * index)
        n_blocks = (width + size - 1) // size
        for row in range(first_row, last_row):
            total = splat_f32x16(0)
            for block in range(n_blocks):
                decode(weight + row * row_bytes + block_bytes * block, q, scale, minimum)
                values = x + 4 * size * block if size * (block + 1) <= width else tail
                for sub in range(sub_blocks):
                    weights = sixteen_weights(q, scale, minimum, sub)
                    total = fma(weights, load_f32x16(values, 4 * SUB_BLOCK * sub), total)
            store_f32(out, sum_f32x16(total), 4 * row)

    return rows_of_format


ROWS: Mapping[str, object] = MappingProxyType({fmt.name: _rows(fmt, decode) for fmt, decode in DECODERS})
