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

from realizar_torch.formats import Q2_K, Q3_K, Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0

_Q4_0, _Q4_1, _Q5_0, _Q5_1, _Q8_0 = (f.ggml_type for f in (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0))
_Q2_K, _Q3_K, _Q4_K, _Q5_K, _Q6_K = (f.ggml_type for f in (Q2_K, Q3_K, Q4_K, Q5_K, Q6_K))


def _rows(fmt, decode):
    """``float_rows`` of one format."""
    size, block_bytes = fmt.block_size, fmt.block_bytes
    sub_blocks = size // SUB_BLOCK

    @jit(device=True)
    def rows_of_format(weight, row_bytes, first_row, last_row, width, x, out):
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

_rows_q4_0, _rows_q4_1, _rows_q5_0, _rows_q5_1 = (ROWS[f.name] for f in (Q4_0, Q4_1, Q5_0, Q5_1))
_rows_q8_0, _rows_q2_k, _rows_q3_k = (ROWS[f.name] for f in (Q8_0, Q2_K, Q3_K))
_rows_q4_k, _rows_q5_k, _rows_q6_k = (ROWS[f.name] for f in (Q4_K, Q5_K, Q6_K))


@jit(device=True)
def float_rows(ggml_type, weight, row_bytes, first_row, last_row, width, x, out):
    """``out[row] = sum_k w[row, k] * x[k]`` in fp32 for ``first_row <= row < last_row`` and ``k < width``.

    ``weight`` and ``out`` are the addresses of row 0; ``x`` is fp32 [width], and nothing beyond it is read.
    An unknown ``ggml_type`` writes nothing.
    """
    rest = (weight, row_bytes, first_row, last_row, width, x, out)
    if ggml_type == _Q4_0:
        _rows_q4_0(*rest)
    elif ggml_type == _Q4_1:
        _rows_q4_1(*rest)
    elif ggml_type == _Q5_0:
        _rows_q5_0(*rest)
    elif ggml_type == _Q5_1:
        _rows_q5_1(*rest)
    elif ggml_type == _Q8_0:
        _rows_q8_0(*rest)
    elif ggml_type == _Q2_K:
        _rows_q2_k(*rest)
    elif ggml_type == _Q3_K:
        _rows_q3_k(*rest)
    elif ggml_type == _Q4_K:
        _rows_q4_k(*rest)
    elif ggml_type == _Q5_K:
        _rows_q5_k(*rest)
    elif ggml_type == _Q6_K:
        _rows_q6_k(*rest)
