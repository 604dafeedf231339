"""GpuProduct: the packed linears that read one input, as one product of many rows."""

from collections.abc import Sequence

import torch
from torch import Tensor

from realizar_torch.nn.linear import QuantizedLinear
from realizar_torch.ops.cuda import MATVEC_ROWS


class GpuProduct:
    """[W0; W1; …]·x + their biases. Holds addresses of the weights; biases are read at every call."""

    def __init__(self, *linears: QuantizedLinear):
        from realizar_torch.triton_kernels.launch import packed_rows

        self._linears: Sequence[QuantizedLinear] = linears
        self._weights = [
            packed_rows(linear.stored, linear.fmt, linear.in_features, linear.layout) for linear in linears
        ]
        self.out_features = sum(linear.out_features for linear in linears)

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        """x [M, in_features] -> out [M, out_features], of one float dtype."""
        from realizar_torch.triton_kernels.decoded import decoded_matmul

        if len(x) <= MATVEC_ROWS:
            return torch.cat([linear(x) for linear in self._linears], dim=1, out=out)
        decoded_matmul(x, self._weights, out)
        column = 0
        for linear in self._linears:
            if linear.bias is not None:
                out[:, column : column + linear.out_features].add_(linear.bias)
            column += linear.out_features
        return out
