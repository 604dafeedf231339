"""The kernel launchers in plain torch, on any device: decode a slice of rows, multiply, go on.

Slow and right: used where no compiled kernels exist. Memory beyond the result is bounded by ``CHUNK_BYTES``.
"""

from collections.abc import Iterator

import torch

from realizar_torch import reference
from realizar_torch.reference import QuantizedActivations, quantize_activations

__all__ = [
    "dequantize",
    "embedding",
    "expert_matvec",
    "matmul",
    "matmul_int8",
    "quantize_activations",
    "row_slices",
]

# decoded weights held at a time; large enough for efficient products, small beside any model
CHUNK_BYTES = 1 << 24


def row_slices(rows: int, in_features: int, chunk_bytes: int | None = None) -> Iterator[slice]:
    """Slices that cover ``rows`` rows, each of at most ``chunk_bytes`` (None: CHUNK_BYTES) of float32, or of
    one row.
    """
    step = max(1, (chunk_bytes or CHUNK_BYTES) // (4 * in_features))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def matmul(x: torch.Tensor, weight: torch.Tensor, fmt: str, in_features: int) -> torch.Tensor:
    """``x [M, K] @ decode(weight [N, row_bytes]).T`` in the dtype of ``x`` (float32 or float64)."""
    y = x.new_empty(x.shape[0], weight.shape[0])
    for rows in row_slices(weight.shape[0], in_features):
        y[:, rows] = x @ reference.dequantize(weight[rows], fmt, in_features, x.dtype).T
    return y


def matmul_int8(qx: QuantizedActivations, weight: torch.Tensor, fmt: str) -> torch.Tensor:
    """The product of the decoded weights with ``q * scale``, float32 [M, N]."""
    scale = qx.scale.repeat_interleave(reference.ACTIVATION_BLOCK, -1)
    x = (qx.q.to(torch.float32) * scale)[:, : qx.in_features]
    return matmul(x, weight, fmt, qx.in_features)


def dequantize(weight: torch.Tensor, fmt: str, in_features: int) -> torch.Tensor:
    """Rows of ``uint8 [N, row_bytes]`` as float32 [N, in_features]."""
    return reference.dequantize(weight, fmt, in_features)


def embedding(ids: torch.Tensor, weight: torch.Tensor, fmt: str, embedding_dim: int) -> torch.Tensor:
    """The rows ``ids`` (int64 [n]) of the table as float32 [n, embedding_dim]."""
    return reference.dequantize(weight[ids], fmt, embedding_dim)


def expert_matvec(
    x: torch.Tensor | QuantizedActivations,
    experts: torch.Tensor,
    weight: torch.Tensor,
    fmt: str,
    in_features: int,
    share: int,
) -> torch.Tensor:
    """Row ``i // share`` of ``x`` times the decoded matrix ``experts[i]``, float32 [len(experts), N]."""
    if isinstance(x, QuantizedActivations):
        x = (x.q.to(torch.float32) * x.scale.repeat_interleave(reference.ACTIVATION_BLOCK, -1))[
            :, :in_features
        ]
    products = [
        matmul(x[i // share][None], weight[expert], fmt, in_features)
        for i, expert in enumerate(experts.tolist())
    ]
    return torch.cat(products)
