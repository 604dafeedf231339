"""The vectors that weights are multiplied by, fp32 or int8: checked, and as addresses for kernels."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from realizar_torch.cpu_kernels import row_kernels
from realizar_torch.cpu_kernels.checks import check_tensor
from realizar_torch.cpu_kernels.quantize import BLOCK
from realizar_torch.errors import FormatError
from realizar_torch.formats import get_packed_format
from realizar_torch.reference import QuantizedActivations


class Vectors(NamedTuple):
    """How many vectors, the row kernel of each format, and the addresses of and bytes between vectors."""

    count: int
    kernel: Callable[[str], int]
    addresses: tuple[int, int, int]
    strides: tuple[int, int, int]
    # what holds the memory
    tensors: tuple[Tensor, ...]


def check_vectors(x: Tensor | QuantizedActivations, fmts: Sequence[str], in_features: int) -> Vectors:
    """Checked fp32 [M, in_features], or quantized vectors padded to the blocks of every format."""
    if isinstance(x, Tensor):
        check_tensor("x", x, torch.float32, (None, in_features), contiguous=False)
        x = x.contiguous()
        addresses, strides = (x.data_ptr(), 0, 0), (4 * in_features, 0, 0)
        return Vectors(x.shape[0], row_kernels.float_rows, addresses, strides, (x,))
    if x.in_features != in_features:
        raise FormatError(f"activations have {x.in_features} features, the weight has {in_features}")
    for fmt in fmts:
        spec = get_packed_format(fmt)
        padded = spec.blocks(in_features) * spec.block_size
        check_tensor("q", x.q, torch.int8, (None, padded))
    count = x.q.shape[0]
    check_tensor("scale", x.scale, torch.float32, (count, padded // BLOCK))
    check_tensor("sums", x.sums, torch.float32, (count, 2 * padded // BLOCK))
    tensors = (x.q, x.scale, x.sums)
    strides = (padded, 4 * padded // BLOCK, 8 * padded // BLOCK)
    return Vectors(count, row_kernels.int8_rows, tuple(t.data_ptr() for t in tensors), strides, tensors)
