"""The encoders: float rows to the blocks that ggml's quantizer writes on x86-64, byte for byte, in torch ops.

The definition, on any device; compiled kernels must equal it. ``BLOCK_ENCODERS`` take the values of whole
blocks as ``[block_size, blocks]``, so that a sum over a block is a sum over the first dimension, in order.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from realizar_torch.encode.blocks import join_fields
from realizar_torch.encode.k_quants import K_ENCODERS
from realizar_torch.encode.legacy import LEGACY_ENCODERS
from realizar_torch.formats import get_packed_format

__all__ = ["encode"]

# (values [block_size, blocks], importance alike or None, blocks per row) -> fields, each [blocks, count]
BLOCK_ENCODERS: Mapping[str, Callable[[Tensor, Tensor | None, int], dict[str, Tensor]]] = MappingProxyType(
    LEGACY_ENCODERS | K_ENCODERS
)


@torch.no_grad()
def encode(weight: Tensor, fmt: str, importance: Tensor | None = None) -> Tensor:
    """Finite float32 ``weight [rows, K]`` → uint8 ``[rows, row_bytes]``, K zero-padded to whole blocks.

    ``importance`` float32 ``[K]``: non-negative weights of the columns' squared errors (ggml's imatrix);
    padding has none. Holds some ten temporaries of the weight's size.
    """
    spec = get_packed_format(fmt)
    per_row = spec.blocks(weight.shape[1])
    padding = (0, per_row * spec.block_size - weight.shape[1])
    padded = torch.nn.functional.pad(weight, padding)
    if importance is not None:
        importance = torch.nn.functional.pad(importance, padding).expand_as(padded)
        importance = _columns(importance, spec.block_size)
    fields = BLOCK_ENCODERS[spec.name](_columns(padded, spec.block_size), importance, per_row)
    return join_fields(fields, spec).view(len(weight), -1)


def _columns(rows: Tensor, block_size: int) -> Tensor:
    """``[rows, K]`` → ``[block_size, blocks]``, one block a column."""
    return rows.reshape(-1, block_size).T.contiguous()
