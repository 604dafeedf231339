"""int8 matrix-vector product over a range of rows: the format is chosen once per call."""

from realizar_torch.cpu_kernels.int8_k import dot_q2_k, dot_q3_k, dot_q4_k, dot_q5_k, dot_q6_k
from realizar_torch.cpu_kernels.int8_legacy import dot_q4_0, dot_q4_1, dot_q5_0, dot_q5_1, dot_q8_0
from realizar_torch.cpu_kernels.jit import jit
from realizar_torch.cpu_kernels.memory import store_f32

from realizar_torch.formats import Q2_K, Q3_K, Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0

_Q4_0, _Q4_1, _Q5_0, _Q5_1, _Q8_0 = (f.ggml_type for f in (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0))
_Q2_K, _Q3_K, _Q4_K, _Q5_K, _Q6_K = (f.ggml_type for f in (Q2_K, Q3_K, Q4_K, Q5_K, Q6_K))


def _rows(dot):
    """The loop over rows of one format."""

    @jit(device=True)
    def matvec(target, weight, row_bytes, first_row, last_row, n_blocks, q, scale, sums, out):
        for row in range(first_row, last_row):
            store_f32(out, dot(target, weight + row * row_bytes, n_blocks, q, scale, sums), 4 * row)

    return matvec


_rows_q4_0, _rows_q4_1, _rows_q5_0, _rows_q5_1 = (
    _rows(dot) for dot in (dot_q4_0, dot_q4_1, dot_q5_0, dot_q5_1)
)
_rows_q8_0, _rows_q2_k, _rows_q3_k = (_rows(dot) for dot in (dot_q8_0, dot_q2_k, dot_q3_k))
_rows_q4_k, _rows_q5_k, _rows_q6_k = (_rows(dot) for dot in (dot_q4_k, dot_q5_k, dot_q6_k))


@jit(device=True)
def matvec_rows(target, ggml_type, weight, row_bytes, first_row, last_row, n_blocks, q, scale, sums, out):
    """``out[row] = dot(weight row, vector)`` in fp32 for ``first_row <= row < last_row``.

    ``weight`` and ``out`` are the addresses of row 0; a row is ``n_blocks`` blocks at the start of its
    ``row_bytes`` bytes. ``q``, ``scale``, ``sums``: one vector of ``reference.quantize_activations``.
    Nothing but the rows' blocks and the vector is read; an unknown ``ggml_type`` writes nothing.
    """
    rest = (weight, row_bytes, first_row, last_row, n_blocks, q, scale, sums, out)
    if ggml_type == _Q4_1:
        _rows_q4_1(target, *rest)
    elif ggml_type == _Q8_0:
        _rows_q8_0(target, *rest)
    elif ggml_type == _Q5_0:
        _rows_q5_0(target, *rest)
    elif ggml_type == _Q4_K:
        _rows_q4_k(target, *rest)
    elif ggml_type == _Q6_K:
        _rows_q6_k(target, *rest)
    elif ggml_type == _Q4_0:
        _rows_q4_0(target, *rest)
    elif ggml_type == _Q5_K:
        _rows_q5_k(target, *rest)
    elif ggml_type == _Q5_1:
        _rows_q5_1(target, *rest)
    elif ggml_type == _Q3_K:
        _rows_q3_k(target, *rest)
    elif ggml_type == _Q2_K:
        _rows_q2_k(target, *rest)
