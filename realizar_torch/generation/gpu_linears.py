"""GpuLinears: the matrix products of a GPU step, on int8, grouped fp16 or fp32 activations."""

import math

import torch
from torch import Tensor

from realizar_torch.generation.workspace import Workspace
from realizar_torch.models.transformer import Transformer
from realizar_torch.nn.attention import Attention
from realizar_torch.nn.linear import QuantizedLinear
from realizar_torch.nn.mlp import MLP, GatedMLP
from realizar_torch.ops.cuda import INT8_MATVEC_ROWS, MATVEC_ROWS
from realizar_torch.reference import ACTIVATION_BLOCK

# With more rows than this on tensor cores, what must begin alone is the products that are added up.
_OVERLAPPING_ROWS = 16
# int8 (q, scale, sums), for tensor cores fp16 in groups of eight vectors, or fp32 [B, features]
Activations = tuple[Tensor, Tensor, Tensor] | Tensor


class GpuLinears:
    """Products of ``batch`` vectors. ``dependent``: launches may overlap with the end of the one before.

    Where all launches of a step overlapped, multiprocessors would never come to rest, and products on tensor
    cores took up to twice as long: it seems that the L1 then stays as small as attention's shared memory
    leaves it. So once in a layer one begins alone: ``attention_overlaps`` tells whether it is another than
    attention.
    """

    def __init__(self, model: Transformer, workspace: Workspace, batch: int, dependent: bool):
        self.int8, self.dependent = model.lm_head.activations == "int8", dependent
        self.grouped = self.int8 and batch > INT8_MATVEC_ROWS
        many = self.grouped and batch > _OVERLAPPING_ROWS
        self.attention_overlaps = dependent and (many or not self.grouped)
        self._sums_overlap = dependent and not many
        self._workspace, self._batch, self._device = workspace, batch, model.device
        self._groups = [slice(i, min(i + MATVEC_ROWS, batch)) for i in range(0, batch, MATVEC_ROWS)]
        one_launch = all(_one_launch(layer.mlp) for layer in model.layers)
        shape = (batch, model.config.intermediate_size)
        self._up = None if one_launch else torch.zeros(shape, dtype=torch.float32, device=self._device)
        self._qkv_bias = {layer.self_attn: self._joined_bias(layer.self_attn) for layer in model.layers}

    def refresh(self) -> None:
        """Takes over q, k and v biases written to since: of no other weight is there a copy."""
        for attention, joined in self._qkv_bias.items():
            if joined is not None:
                written = self._joined_bias(attention)
                assert written is not None
                joined.copy_(written)

    def linear(
        self, linear: QuantizedLinear, x: Activations, out: Tensor, residual: Tensor | None = None
    ) -> Tensor:
        """out = linear(x) (+ residual, which may be ``out`` itself)."""
        from realizar_torch.triton_kernels.matmul import matmul
        from realizar_torch.triton_kernels.matvec import matvec, matvec_int8

        operands = (linear.stored, linear.fmt, linear.in_features, linear.bias)
        if self.grouped:
            kind = {"layout": linear.layout, "dependent": self._sums_overlap}
            return matmul(*x, self._batch, *operands, residual=residual, out=out, **kind)
        for rows in self._groups:
            options = {
                "residual": None if residual is None else residual[rows],
                "out": out[rows],
                "layout": linear.layout,
                "dependent": self.dependent,
            }
            if isinstance(x, tuple):
                matvec_int8(*(part[rows] for part in x), *operands, **options)
            else:
                matvec(x[rows], *operands, **options)
        return out

    def qkv(self, attention: Attention, x: Activations, out: Tensor) -> None:
        """out = [q(x), k(x), v(x)] with their biases."""
        from realizar_torch.triton_kernels.matmul_qkv import matmul_qkv
        from realizar_torch.triton_kernels.qkv import qkv, qkv_int8

        linears = (attention.q_proj, attention.k_proj, attention.v_proj)
        operands = (
            [linear.stored for linear in linears],
            [linear.fmt for linear in linears],
            attention.q_proj.in_features,
            self._qkv_bias[attention],
        )
        kind = {"layouts": [linear.layout for linear in linears], "dependent": self.dependent}
        if isinstance(x, tuple):
            if self.grouped:
                matmul_qkv(*x, self._batch, *operands, out=out, **kind)
                return
            for rows in self._groups:
                qkv_int8(*(part[rows] for part in x), *operands, out=out[rows], **kind)
            return
        if self._batch == 1:
            qkv(x, *operands, out=out, **kind)
            return
        column = 0
        for linear in linears:
            part = self.linear(linear, x, self.view(self._workspace.wide, linear.out_features))
            out[:, column : column + linear.out_features].copy_(part)
            column += linear.out_features

    def mlp(self, mlp: GatedMLP | MLP, x: Activations) -> Activations:
        """What the down projection takes: act(gate(x)) * up(x), or act(up(x)) where there is no gate."""
        wide = self.view(self._workspace.wide, mlp.up_proj.out_features)
        if isinstance(mlp, GatedMLP):
            self._gate_up(mlp, x, wide)
            return self.quantized(wide, mlp.down_proj)
        self.linear(mlp.up_proj, x, wide)
        if self.int8:
            return self.quantized(wide, mlp.down_proj, mlp.activation)
        return _activate(wide, mlp.activation)

    def _gate_up(self, mlp: GatedMLP, x: Activations, out: Tensor) -> None:
        from realizar_torch.triton_kernels.gate_up import gate_up, gate_up_int8
        from realizar_torch.triton_kernels.matmul_gate_up import matmul_gate_up

        gate, up = mlp.gate_proj, mlp.up_proj
        if not _one_launch(mlp):
            assert self._up is not None
            self.linear(gate, x, out)
            self.linear(up, x, self._up)
            _activate(out, mlp.activation).mul_(self._up)
            return
        weights = (gate.stored, up.stored, gate.fmt, gate.in_features)
        kind = {"activation": mlp.activation, "layout": gate.layout, "dependent": self.dependent}
        if self.grouped:
            matmul_gate_up(*x, self._batch, *weights, out=out, **kind)
            return
        for rows in self._groups:
            if isinstance(x, tuple):
                gate_up_int8(*(part[rows] for part in x), *weights, out=out[rows], **kind)
            else:
                gate_up(x[rows], *weights, out=out[rows], **kind)

    def quantized(self, x: Tensor, reader: QuantizedLinear, activation: str | None = None) -> Activations:
        """``x`` [B, features], activated where told, as ``reader`` takes it: int8, grouped or as it is."""
        from realizar_torch.triton_kernels.quantize import quantize_activations

        if not self.int8:
            return x
        width = reader.padded_features
        return quantize_activations(
            x, width, self.room(width), activation=activation, dependent=self.dependent
        )

    def view(self, buffer: Tensor, width: int) -> Tensor:
        """The beginning of a workspace buffer as contiguous [B, width]."""
        return buffer.view(-1)[: self._batch * width].view(self._batch, width)

    def room(self, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Room for int8 (or grouped) activations of ``width`` features in the workspace."""
        from realizar_torch.triton_kernels.grouped import grouped_shapes

        work = self._workspace
        if self.grouped:
            halves = [buffer.view(-1).view(torch.float16) for buffer in (work.quants, work.sums)]
            shapes = zip(
                (halves[0], work.scales.view(-1), halves[1]), grouped_shapes(self._batch, width), strict=True
            )
            values, scale, sums = (buffer[: math.prod(shape)].view(shape) for buffer, shape in shapes)
            return values, scale, sums
        blocks = width // ACTIVATION_BLOCK
        return (
            self.view(work.quants, width),
            self.view(work.scales, blocks),
            self.view(work.sums, 2 * blocks),
        )

    def _joined_bias(self, attention: Attention) -> Tensor | None:
        """The biases of q, k and v in one vector, zeros where one has none; None where none has."""
        linears = (attention.q_proj, attention.k_proj, attention.v_proj)
        if all(linear.bias is None for linear in linears):
            return None
        parts = [
            torch.zeros(linear.out_features, dtype=torch.float32, device=self._device)
            if linear.bias is None
            else linear.bias.float()
            for linear in linears
        ]
        return torch.cat(parts)


def _one_launch(mlp: GatedMLP | MLP) -> bool:
    """True if one kernel can compute gate and up: one format, one layout, no bias; or if there is no gate."""
    if not isinstance(mlp, GatedMLP):
        return True
    gate, up = mlp.gate_proj, mlp.up_proj
    return (gate.fmt, gate.layout) == (up.fmt, up.layout) and gate.bias is None and up.bias is None


def _activate(x: Tensor, activation: str) -> Tensor:
    """In place."""
    if activation == "silu":
        return torch.ops.aten.silu_(x)
    return torch.ops.aten.gelu_(x, approximate="tanh" if activation == "gelu_tanh" else "none")
