"""Launchers of the CPU kernels: torch tensors in and out, arguments checked, work shared among threads.

``weight`` is uint8 [N, row_bytes], canonical GGUF bytes of ``fmt`` ("Q4_K") with ``in_features`` weights per
row. Tensors are on the CPU, weights and outputs contiguous. Results do not depend on the number of threads,
which is ``torch.get_num_threads()``; a forked child starts with one. A wrong argument is a FormatError.
"""

import ctypes
import sys

import torch
from torch import Tensor

from realizar_torch.cpu_kernels import matmul_float, pool, row_kernels
from realizar_torch.cpu_kernels.activation_panel import COLUMNS
from realizar_torch.cpu_kernels.checks import check_output, check_tensor, check_weight
from realizar_torch.cpu_kernels.experts import expert_tiles
from realizar_torch.cpu_kernels.int8_matmul import kind_of_sums
from realizar_torch.cpu_kernels.int8_tile import TILE_ROWS
from realizar_torch.cpu_kernels.jit import jit
from realizar_torch.cpu_kernels.matmul_int8 import STATE_BYTES, matmul_int8_tiles
from realizar_torch.cpu_kernels.matvec import gate_up_tiles, matvec_tiles
from realizar_torch.cpu_kernels.memory import store_i64
from realizar_torch.cpu_kernels.program import GELU, GELU_TANH, SILU
from realizar_torch.cpu_kernels.quantize import BLOCK, quantize_vectors
from realizar_torch.cpu_kernels.rooms import room
from realizar_torch.cpu_kernels.rows_of_table import decode_table_rows
from realizar_torch.cpu_kernels.vectors import Vectors, check_vectors
from realizar_torch.errors import FormatError
from realizar_torch.formats import get_packed_format
from realizar_torch.reference import QuantizedActivations

# Below this many products, waking threads costs more than they save (about 20 µs of one thread's work).
SERIAL_WORK = 1 << 19

_ACTIVATIONS = {"silu": SILU, "gelu": GELU, "gelu_tanh": GELU_TANH}


@jit
def _answer(address):
    store_i64(address, 42)


def available() -> str | None:
    """None if kernels compile and run here, else the reason why not."""
    if sys.byteorder != "little":
        return "GGUF bytes are little-endian, this CPU is not"
    cell = ctypes.c_int64()
    try:
        _answer(ctypes.addressof(cell))
    except Exception as error:
        return f"Numba cannot compile here: {error}"
    return None if cell.value == 42 else "a compiled kernel gave a wrong result"


def matmul(x: Tensor, weight: Tensor, fmt: str, in_features: int) -> Tensor:
    """fp32 ``x [M, K] @ decode(weight).T`` → fp32 [M, N]; a row's result does not depend on M."""
    return _product(None, x, weight, fmt, in_features, None)


def matmul_int8(qx: QuantizedActivations, weight: Tensor, fmt: str) -> Tensor:
    """Quantized activations [M, Kp] times ``decode(weight).T`` → fp32 [M, N]."""
    return _product(None, qx, weight, fmt, qx.in_features, None)


def matvec_into(
    out: Tensor,
    x: Tensor | QuantizedActivations,
    weight: Tensor,
    fmt: str,
    in_features: int,
    bias: Tensor | None = None,
) -> Tensor:
    """``out [M, N] = x [M, K] @ decode(weight).T + bias`` in the caller's fp32 buffer, which is returned.

    ``x`` is fp32 or quantized, ``bias`` fp32 [N]. ``out`` may share no memory with any input.
    """
    return _product(out, x, weight, fmt, in_features, bias)


def gate_up(
    x: Tensor | QuantizedActivations,
    gate_weight: Tensor,
    gate_fmt: str,
    up_weight: Tensor,
    up_fmt: str,
    in_features: int,
    activation: str,
) -> Tensor:
    """``activation(gate_weight · x) * (up_weight · x)`` → fp32 [1, N]: both weights in one pass.

    ``x`` is one vector, fp32 [1, K] or quantized. ``activation``: "silu", "gelu" or "gelu_tanh".
    """
    check_weight("gate_weight", gate_weight, gate_fmt, in_features)
    rows = gate_weight.shape[0]
    up = check_weight("up_weight", up_weight, up_fmt, in_features)
    check_tensor("up_weight", up_weight, torch.uint8, (rows, up.row_bytes(in_features)))
    if activation not in _ACTIVATIONS:
        raise FormatError(f"unknown activation {activation!r}, expected one of {', '.join(_ACTIVATIONS)}")
    vectors = check_vectors(x, (gate_fmt, up_fmt), in_features)
    if vectors.count != 1:
        raise FormatError(f"gate_up got {vectors.count} vectors, expected 1; use matmul for more")
    out, other, counter = room(1, rows), room(rows), ctypes.c_int64()
    pool.share(
        gate_up_tiles,
        threads_for(2 * rows * in_features),
        ctypes.addressof(counter),
        vectors.kernel(gate_fmt),
        gate_weight.data_ptr(),
        gate_weight.shape[1],
        vectors.kernel(up_fmt),
        up_weight.data_ptr(),
        up_weight.shape[1],
        rows,
        in_features,
        *vectors.addresses,
        _ACTIVATIONS[activation],
        other.data_ptr(),
        out.data_ptr(),
    )
    return out


def expert_matvec(
    x: Tensor | QuantizedActivations, experts: Tensor, weight: Tensor, fmt: str, in_features: int, share: int
) -> Tensor:
    """Row ``i // share`` of ``x`` times the matrix ``experts[i]`` → fp32 [n, N].

    ``experts``: int64 [n], each below E; ``weight``: uint8 [E, N, row_bytes].
    """
    check_tensor("weight", weight, torch.uint8, (None, None, None))
    matrices, rows, row_bytes = weight.shape
    check_weight("weight", weight.view(matrices * rows, row_bytes), fmt, in_features)
    check_tensor("experts", experts, torch.int64, (None,))
    vectors, count = check_vectors(x, (fmt,), in_features), len(experts)
    if count != share * vectors.count:
        raise FormatError(f"{count} experts for {vectors.count} vectors, expected {share} for each")
    if count and not 0 <= int(experts.min()) <= int(experts.max()) < matrices:
        raise FormatError(f"experts {int(experts.min())} to {int(experts.max())} exceed {matrices} matrices")
    out, counter = room(count, rows), ctypes.c_int64()
    addressed = [pair for both in zip(vectors.addresses, vectors.strides, strict=True) for pair in both]
    pool.share(
        expert_tiles,
        threads_for(count * rows * in_features),
        ctypes.addressof(counter),
        vectors.kernel(fmt),
        weight.data_ptr(),
        row_bytes,
        rows,
        in_features,
        experts.data_ptr(),
        count,
        share,
        *addressed,
        out.data_ptr(),
    )
    return out


def quantize_activations(x: Tensor, fmt: str) -> QuantizedActivations:
    """fp32 ``x [M, K]`` → int8 blocks of 32, K padded to whole blocks of ``fmt``, for all its consumers."""
    check_tensor("x", x, torch.float32, (None, None), contiguous=False)
    x, (count, width) = x.contiguous(), x.shape
    spec = get_packed_format(fmt)
    padded = spec.blocks(width) * spec.block_size
    q = room(count, padded, dtype=torch.int8)
    scale, sums = room(count, padded // BLOCK), room(count, 2 * padded // BLOCK)
    addresses = (q.data_ptr(), scale.data_ptr(), sums.data_ptr())
    pool.run(quantize_vectors, threads_for(count * padded), x.data_ptr(), count, width, padded, *addresses)
    return QuantizedActivations(q, scale, sums, width)


def dequantize(weight: Tensor, fmt: str, in_features: int) -> Tensor:
    """All rows as fp32 [N, in_features], bit-equal to ggml."""
    return _decoded_rows(weight, fmt, in_features, None)


def embedding(ids: Tensor, weight: Tensor, fmt: str, embedding_dim: int) -> Tensor:
    """The rows ``ids`` (int64 [n], each below N) as fp32 [n, embedding_dim]."""
    check_tensor("ids", ids, torch.int64, (None,), contiguous=False)
    ids = ids.contiguous()
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < weight.shape[0]:
        raise FormatError(
            f"ids {int(ids.min())} to {int(ids.max())} exceed a table of {weight.shape[0]} rows"
        )
    return _decoded_rows(weight, fmt, embedding_dim, ids)


def _product(
    out: Tensor | None,
    x: Tensor | QuantizedActivations,
    weight: Tensor,
    fmt: str,
    in_features: int,
    bias: Tensor | None,
) -> Tensor:
    """``x · decoded weight + bias`` into ``out``, or into new memory."""
    check_weight("weight", weight, fmt, in_features)
    vectors = check_vectors(x, (fmt,), in_features)
    rows, inputs = weight.shape[0], [*vectors.tensors, weight]
    if bias is not None:
        check_tensor("bias", bias, torch.float32, (rows,))
        inputs.append(bias)
    if out is None:
        out = room(vectors.count, rows)
    else:
        check_output(out, (vectors.count, rows), inputs)
    bias_address = 0 if bias is None else bias.data_ptr()
    if vectors.count > 1:
        several = _matmul_float if isinstance(x, Tensor) else _matmul_int8
        several(out, vectors, weight, fmt, in_features, bias_address)
        return out
    counter = ctypes.c_int64()
    addressed = [pair for both in zip(vectors.addresses, vectors.strides, strict=True) for pair in both]
    pool.share(
        matvec_tiles,
        threads_for(vectors.count * rows * in_features),
        ctypes.addressof(counter),
        vectors.kernel(fmt),
        weight.data_ptr(),
        weight.shape[1],
        rows,
        in_features,
        vectors.count,
        *addressed,
        bias_address,
        out.data_ptr(),
        4 * rows,
    )
    return out


def _matmul_float(
    out: Tensor, vectors: Vectors, weight: Tensor, fmt: str, in_features: int, bias: int
) -> None:
    """``_product`` of several fp32 vectors."""
    rows = weight.shape[0]
    x = torch.nn.functional.pad(vectors.tensors[0], (0, -in_features % matmul_float.LANES)).contiguous()
    threads, counter = threads_for(vectors.count * rows * in_features), ctypes.c_int64()
    scratch = room(threads, matmul_float.TILE_ROWS, x.shape[1])
    pool.share(
        matmul_float.matmul_tiles,
        threads,
        ctypes.addressof(counter),
        row_kernels.decode_row(fmt),
        weight.data_ptr(),
        weight.shape[1],
        rows,
        in_features,
        4 * x.shape[1],
        vectors.count,
        x.data_ptr(),
        scratch.data_ptr(),
        bias,
        out.data_ptr(),
    )


def _matmul_int8(
    out: Tensor, vectors: Vectors, weight: Tensor, fmt: str, in_features: int, bias: int
) -> None:
    """``_product`` of several quantized vectors."""
    rows, width, count = weight.shape[0], vectors.strides[0], vectors.count
    threads = threads_for(count * rows * in_features)
    columns, kind = -(-count // COLUMNS) * COLUMNS, kind_of_sums(fmt)
    state = torch.zeros(STATE_BYTES // 8, dtype=torch.int64, device="cpu")
    q = room(-(-width // 64), columns, 64, dtype=torch.int8)
    scale, sums = room(width // BLOCK, columns), room(kind + 1, width // 16, columns)
    tiles = room(threads, columns, TILE_ROWS)
    pool.run(
        matmul_int8_tiles,
        threads,
        state.data_ptr(),
        row_kernels.int8_matmul(fmt),
        1 << kind,
        weight.data_ptr(),
        weight.shape[1],
        rows,
        width,
        count,
        columns,
        *vectors.addresses[:2],
        q.data_ptr(),
        scale.data_ptr(),
        sums.data_ptr(),
        tiles.data_ptr(),
        bias,
        out.data_ptr(),
    )


def _decoded_rows(weight: Tensor, fmt: str, width: int, ids: Tensor | None) -> Tensor:
    check_weight("weight", weight, fmt, width)
    count = weight.shape[0] if ids is None else ids.shape[0]
    out, counter = room(count, width), ctypes.c_int64()
    pool.share(
        decode_table_rows,
        threads_for(count * width),
        ctypes.addressof(counter),
        row_kernels.decode_row(fmt),
        weight.data_ptr(),
        weight.shape[1],
        0 if ids is None else ids.data_ptr(),
        count,
        width,
        out.data_ptr(),
    )
    return out


def threads_for(work: int) -> int:
    """Threads worth waking for this many products."""
    return 1 if work < SERIAL_WORK else torch.get_num_threads()
