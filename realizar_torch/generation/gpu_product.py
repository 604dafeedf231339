"""GpuProduct: the packed linears that read one input, as one product of many rows."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from realizar_torch.nn.linear import QuantizedLinear
from realizar_torch.ops.cuda import MATVEC_ROWS

# floats [M, in_features], or where they are taken (values, scale, sums) in groups of eight vectors
Activations = Any


class GpuProduct:
    """[W0; W1; …]·x + their biases. Holds addresses of the weights; biases are read at every call.

    Up to a few dozen rows for linears of int8 activations, tensor cores multiply the packed weights with
    grouped fp16 activations; more rows are multiplied with decoded weights.
    """

    def __init__(self, *linears: QuantizedLinear):
        from realizar_torch.triton_kernels.launch import packed_rows

        self._linears: Sequence[QuantizedLinear] = linears
        self._weights = [
            packed_rows(linear.stored, linear.fmt, linear.in_features, linear.layout) for linear in linears
        ]
        self.width = linears[0].padded_features
        self.out_features = sum(linear.out_features for linear in linears)
        first, last = linears[0], linears[-1]
        alike = (first.fmt, first.layout) == (last.fmt, last.layout)
        # a pair must make act(gate) * up in one launch
        one_launch = len(linears) != 2 or (alike and first.bias is None and last.bias is None)
        self._grouped = one_launch and all(linear.activations == "int8" for linear in linears)

    def __call__(self, x: Activations, out: Tensor) -> Tensor:
        """x [M, in_features] -> out [M, out_features], of one float dtype."""
        from realizar_torch.triton_kernels.decoded import decoded_matmul

        if self.takes_grouped(len(out)):
            self._multiply_grouped(x, out)
        elif len(out) <= MATVEC_ROWS:
            return torch.cat([linear(x) for linear in self._linears], dim=1, out=out)
        else:
            decoded_matmul(x, self._weights, out)
        column = 0
        for linear in self._linears:
            if linear.bias is not None:
                out[:, column : column + linear.out_features].add_(linear.bias)
            column += linear.out_features
        return out

    def gated(self, x: Activations, pair: Tensor, out: Tensor, activation: str) -> Tensor:
        """act(W0·x) * (W1·x) -> out [M, out_features / 2], by way of ``pair`` [M, out_features]."""
        from realizar_torch.triton_kernels.gated import gated
        from realizar_torch.triton_kernels.matmul_gate_up import matmul_gate_up

        if not self.takes_grouped(len(out)):
            return gated(self(x, pair), out, activation=activation)
        gate, up = self._linears
        operands = (gate.stored, up.stored, gate.fmt, gate.in_features)
        kind = {"activation": activation, "layout": gate.layout, "out": out}
        return matmul_gate_up(*self._in_groups(x), len(out), *operands, **kind)

    def takes_grouped(self, rows: int) -> bool:
        """Whether so many rows are multiplied in groups, which a norm may then give: see ``room``."""
        from realizar_torch.triton_kernels.configs import MATMUL_ROWS

        return self._grouped and MATVEC_ROWS < rows <= MATMUL_ROWS

    def room(self, rows: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """(values, scale, sums) for ``rows`` vectors, uninitialised."""
        from realizar_torch.triton_kernels.grouped import empty_grouped

        return empty_grouped(rows, self.width, device)

    def _multiply_grouped(self, x: Activations, out: Tensor) -> None:
        from realizar_torch.triton_kernels.matmul import matmul
        from realizar_torch.triton_kernels.matmul_qkv import matmul_qkv

        first = self._linears[0]
        grouped = self._in_groups(x)
        if len(self._linears) == 1:
            operands = (first.stored, first.fmt, first.in_features)
            matmul(*grouped, len(out), *operands, out=out, layout=first.layout)
            return
        weights, fmts, layouts = zip(
            *((one.stored, one.fmt, one.layout) for one in self._linears), strict=True
        )
        matmul_qkv(*grouped, len(out), weights, fmts, first.in_features, layouts=layouts, out=out)

    def _in_groups(self, x: Activations) -> tuple[Tensor, Tensor, Tensor]:
        from realizar_torch.triton_kernels.quantize import quantize_activations

        if isinstance(x, tuple):
            return x
        return quantize_activations(x, self.width, self.room(len(x), x.device))
