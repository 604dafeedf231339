"""LayerProgram: a Transformer's layers as instructions for the fused CPU kernels, over given memory."""

from collections.abc import Sequence
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn

from realizar_torch.models.transformer import Block, Transformer
from realizar_torch.nn.attention import Attention
from realizar_torch.nn.embedding import QuantizedEmbedding
from realizar_torch.nn.experts import (
    DenseExperts,
    GatedExperts,
    MixtureOfExperts,
    QuantizedExperts,
    Scores,
)
from realizar_torch.nn.kv_cache import KVCache
from realizar_torch.nn.linear import QuantizedLinear
from realizar_torch.nn.mlp import MLP, GatedMLP
from realizar_torch.nn.norm import PerHeadNorm, RMSNorm

Linear = QuantizedLinear | nn.Linear
# What multiplies in a mixture: one matrix for each expert, or a linear without bias.
Matrices = QuantizedExperts | DenseExperts | Scores
# Operands of a weight that an instruction can have twice.
_SECOND = ("kernel", "int8", "weight", "row_bytes", "bias")


class LayerProgram:
    """Instructions of the embedding and of all layers; a subclass says which kernels multiply.

    hidden, qkv, wide: fp32 rows, one for every token of a pass, for the outputs of projections. ``kept`` gets
    every tensor whose address an instruction holds.
    """

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        buffers: tuple[Tensor, Tensor, Tensor],
        kept: list[Tensor],
    ):
        from realizar_torch.cpu_kernels import program

        self._ops, self._model, self._cache, self._kept = program, model, cache, kept
        self._hidden, self._qkv, self._wide = (self.buffer(buffer) for buffer in buffers)
        self._count = len(buffers[0])
        # buffers that mixtures use one after the other: by name and shape
        self._rooms: dict[tuple[str, int, int], tuple[int, int]] = {}
        self.rows: list[dict[str, Any]] = []
        table = self._table(model.embed_tokens)
        if model.embed_positions is not None:
            table |= _second(self._table(model.embed_positions))
        self.emit("EMBED", scale=model.config.embedding_scale, **table, **self.readers([]))

    def layers(self) -> None:
        for index, layer in enumerate(self._model.layers):
            self._block(index, layer)

    def instructions(self) -> np.ndarray:
        names = self._ops.INSTRUCTION.names
        zeros = [0] * len(names)
        return np.array([tuple(map(row.get, names, zeros)) for row in self.rows], self._ops.INSTRUCTION)

    def weight(self, linear: Linear | Matrices) -> dict[str, Any]:
        """Operands that name a weight, the kernel that multiplies by it, and its bias where it has one."""
        raise NotImplementedError

    def readers(self, linears: Sequence[Linear | Matrices]) -> dict[str, Any]:
        """Operands of an instruction whose activations these linears read."""
        raise NotImplementedError

    def inputs(self, mlp: Any) -> dict[str, Any]:
        """Operands of the norm in front of an MLP or a mixture."""
        return self.readers(_readers_of(mlp))

    def finish_mlp(self, mlp: GatedMLP | MLP) -> None:
        """Emits what follows the activation."""
        raise NotImplementedError

    def mixture(self, mixture: MixtureOfExperts) -> None:
        """Emits what turns activations into the output of a mixture."""
        raise NotImplementedError

    def emit(self, opcode: str, **operands: Any) -> None:
        self.rows.append({"opcode": getattr(self._ops, opcode), **operands})

    def norm(self, norm: RMSNorm | None, **operands: Any) -> None:
        """The norm of the residual stream, or the stream itself, as activations."""
        width = self._model.config.hidden_size
        self.emit("NORM", width=width, **self._normed(norm), **operands)

    def load(self, source: tuple[int, int], width: int, reader: Linear | Matrices, **operands: Any) -> None:
        place = {"source": source[0], "source_stride": source[1]}
        self.emit("LOAD", width=width, **place, **self.readers([reader]), **operands)

    def linear(
        self, linear: Linear | Scores, target: tuple[int, int], column: int = 0, **operands: Any
    ) -> None:
        place = {"target": target[0] + 4 * column, "target_stride": target[1]}
        self.emit("LINEAR", **{"barrier": 1, **place, **self.weight(linear), **operands})

    def room(self, name: str, rows: int, width: int) -> tuple[int, int]:
        """A buffer for ``rows`` rows of each sequence or column."""
        key = name, rows, width
        if key not in self._rooms:
            memory = torch.empty(self._count * rows, width, dtype=torch.float32, device="cpu")
            self._rooms[key] = self.buffer(memory)
        return self._rooms[key]

    def buffer(self, buffer: Tensor) -> tuple[int, int]:
        """Address and distance between rows, in bytes."""
        return self.address(buffer), 4 * buffer.stride(0)

    def address(self, tensor: Tensor) -> int:
        # detached: a cast swaps the storage under a Parameter, and the old one must outlive the program
        self._kept.append(tensor.detach())
        return tensor.data_ptr()

    def gated(
        self,
        mlp: GatedMLP | MLP | GatedExperts,
        target: tuple[int, int],
        opcode: str = "GATED",
        **operands: Any,
    ) -> None:
        """The product, or the two, whose activation the last projection reads."""
        first, second = mlp.up_proj, {}
        if not isinstance(mlp, MLP):
            first, second = mlp.gate_proj, _second(self.weight(mlp.up_proj))
        place = {"target": target[0], "target_stride": target[1]}
        activation = getattr(self._ops, mlp.activation.upper())
        expanded = {**self.readers([mlp.down_proj]), **place, **self.weight(first), **second}
        self.emit(opcode, **{**expanded, "activation": activation, "barrier": 1, **operands})

    def bias(self, linear: Linear | Matrices) -> int:
        bias = getattr(linear, "bias", None)
        return 0 if bias is None else self.address(bias)

    def matrix(self, weight: Tensor) -> dict[str, int]:
        """Of one matrix, or of several of one size behind each other."""
        rows, columns = weight.shape[-2:]
        row_bytes = columns * weight.element_size()
        return {"weight": self.address(weight), "rows": rows, "row_bytes": row_bytes}

    def _block(self, index: int, layer: Block) -> None:
        attention = layer.self_attn
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        self.norm(layer.attn_norm, **self.readers(projections))
        columns = 0
        for projection in projections:
            self.linear(projection, self._qkv, columns, barrier=int(projection is attention.v_proj))
            columns += projection.out_features
        self._attention(index, attention)
        self.load(self._wide, self._model.config.q_dim, attention.o_proj)
        self.linear(attention.o_proj, self._hidden)
        if not layer.parallel:
            self._add(layer.post_attn_norm, layer)
        self._mlp(layer)
        self._add(layer.post_mlp_norm, layer)

    def _mlp(self, layer: Block) -> None:
        mlp, norm = layer.mlp, layer.mlp_norm
        if layer.parallel:
            norm = layer.attn_norm if norm is None else norm
        self.norm(norm, **self.inputs(mlp))
        if layer.parallel:
            # not before the MLP has its input, and before it writes to the same place
            self._add(layer.post_attn_norm, layer)
        if isinstance(mlp, MixtureOfExperts):
            self.mixture(mlp)
        else:
            self.gated(mlp, self._wide)
            self.finish_mlp(mlp)

    def _add(self, norm: RMSNorm | None, layer: Block) -> None:
        """Adds what attention or MLP gave to the residual stream."""
        source = {"source": self._hidden[0], "source_stride": self._hidden[1]}
        options = {"width": self._model.config.hidden_size, "scale": layer.residual_scale}
        self.emit("ADD", **source, **options, **self._normed(norm), **self.readers([]))

    def _normed(self, norm: RMSNorm | None) -> dict[str, Any]:
        if norm is None:
            return {}
        bias = 0 if norm.bias is None else self.address(norm.bias)
        kind = {"centre": int(norm.normalization == "layernorm"), "epsilon": norm.eps}
        return {"gamma": self._gain(norm), "bias": bias, **kind}

    def _gain(self, norm: RMSNorm) -> int:
        return self.address(norm.weight + 1 if norm.zero_centered else norm.weight)

    def _attention(self, index: int, attention: Attention) -> None:
        config = self._model.config
        shared = {
            "keys": self.address(self._cache.keys[index]),
            "values": self.address(self._cache.values[index]),
            "source": self._qkv[0],
            "source_stride": self._qkv[1],
            "barrier": 1,
        }
        local = config.is_sliding(index) and self._model.local_rope is not None
        rope = int(attention.rotary) * (2 if local else 1)
        self.emit("ROTATE", rope=rope, **self._head_norms(attention), **shared)
        target = {"target": self._wide[0], "target_stride": self._wide[1]}
        kind = {"window": config.window(index) or 0, "softcap": attention.softcap}
        self.emit("ATTEND", scale=attention.scale, **kind, **target, **shared)

    def _head_norms(self, attention: Attention) -> dict[str, Any]:
        """Operands of the norms of each head; norms over all heads are emitted in front of them."""
        q_norm, k_norm = attention.q_norm, attention.k_norm
        if q_norm is None or k_norm is None:
            return {}
        if isinstance(q_norm, PerHeadNorm):
            weights = {
                "gamma": self.address(q_norm.weight),
                "second_gamma": self.address(k_norm.weight),
                "gamma_stride": 4 * attention.head_dim,
            }
            return weights | {"centre": int(q_norm.normalization == "layernorm"), "epsilon": q_norm.eps}
        assert isinstance(q_norm, RMSNorm) and isinstance(k_norm, RMSNorm)
        if q_norm.features == attention.head_dim:
            return {**self._normed(q_norm), "second_gamma": self._gain(k_norm)}
        for norm, column in ((q_norm, 0), (k_norm, q_norm.features)):
            place = {"source": self._qkv[0] + 4 * column, "source_stride": self._qkv[1]}
            self.emit(
                "NORM_ROW", width=norm.features, barrier=int(norm is k_norm), **place, **self._normed(norm)
            )
        return {}

    def _table(self, embedding: QuantizedEmbedding | nn.Embedding) -> dict[str, Any]:
        """Operands of the embedding table."""
        from realizar_torch.cpu_kernels import dense_rows, row_kernels

        packed = isinstance(embedding, QuantizedEmbedding)
        kernel = row_kernels.decode_row(embedding.fmt) if packed else dense_rows.dense_row()
        return {"kernel": kernel, **self.matrix(embedding.weight)}


def takes_int8(linear: nn.Module) -> TypeGuard[QuantizedLinear | QuantizedExperts]:
    """Whether it is packed and rounds its activations."""
    return isinstance(linear, QuantizedLinear | QuantizedExperts) and linear.activations == "int8"


def _readers_of(mlp: Any) -> list[Linear | Matrices]:
    """What reads the input of an MLP or a mixture."""
    if isinstance(mlp, MixtureOfExperts):
        parts = [mlp.experts] if mlp.shared_expert is None else [mlp.experts, mlp.shared_expert]
        return [mlp.router, *(reader for part in parts for reader in _readers_of(part))]
    return [mlp.gate_proj, mlp.up_proj] if isinstance(mlp, GatedMLP | GatedExperts) else [mlp.up_proj]


def _second(operands: dict[str, Any]) -> dict[str, Any]:
    """Operands of the second weight of an instruction."""
    return {f"second_{name}": operands[name] for name in _SECOND if name in operands}
