"""LayerProgram: a Transformer's layers as instructions for the fused CPU kernels, over given memory."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from realizar_torch.models.transformer import Block, Transformer
from realizar_torch.nn.embedding import QuantizedEmbedding
from realizar_torch.nn.kv_cache import KVCache
from realizar_torch.nn.linear import QuantizedLinear
from realizar_torch.nn.mlp import GatedMLP
from realizar_torch.nn.norm import RMSNorm

Linear = QuantizedLinear | nn.Linear
# Operands of a weight that a gated instruction has twice.
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
        self.rows: list[dict[str, Any]] = []
        scale = model.config.embedding_scale
        self.emit("EMBED", **self._table(model.embed_tokens), scale=scale, **self.readers([]))

    def layers(self) -> dict[str, Any]:
        """Emits every layer; what the norm behind the last one has to add to the residual stream."""
        pending: dict[str, Any] = {}
        for index, layer in enumerate(self._model.layers):
            pending = self._block(index, layer, pending)
        return pending

    def instructions(self) -> np.ndarray:
        names = self._ops.INSTRUCTION.names
        zeros = [0] * len(names)
        return np.array([tuple(map(row.get, names, zeros)) for row in self.rows], self._ops.INSTRUCTION)

    def weight(self, linear: Linear) -> dict[str, Any]:
        """Operands that name a weight, the kernel that multiplies by it, and its bias where it has one."""
        raise NotImplementedError

    def readers(self, linears: Sequence[Linear]) -> dict[str, Any]:
        """Operands of an instruction whose activations these linears read."""
        raise NotImplementedError

    def finish_mlp(self, mlp: GatedMLP) -> None:
        """Emits what follows the gated product."""
        raise NotImplementedError

    def emit(self, opcode: str, **operands: Any) -> None:
        self.rows.append({"opcode": getattr(self._ops, opcode), **operands})

    def norm(self, norm: RMSNorm, pending: dict[str, Any], readers: Sequence[Linear]) -> None:
        width = self._model.config.hidden_size
        gamma = self.address(norm.weight)
        self.emit("NORM", gamma=gamma, epsilon=norm.eps, width=width, **pending, **self.readers(readers))

    def load(self, width: int, reader: Linear) -> None:
        source = {"source": self._wide[0], "source_stride": self._wide[1]}
        self.emit("LOAD", width=width, **source, **self.readers([reader]))

    def linear(
        self, linear: Linear, target: tuple[int, int], column: int = 0, barrier: int = 1, panel: int = 0
    ) -> None:
        place = {"target": target[0] + 4 * column, "target_stride": target[1]}
        self.emit("LINEAR", barrier=barrier, panel=panel, **place, **self.weight(linear))

    def buffer(self, buffer: Tensor) -> tuple[int, int]:
        """Address and distance between rows, in bytes."""
        return self.address(buffer), 4 * buffer.stride(0)

    def address(self, tensor: Tensor) -> int:
        # detached: a cast swaps the storage under a Parameter, and the old one must outlive the program
        self._kept.append(tensor.detach())
        return tensor.data_ptr()

    def bias(self, linear: Linear) -> int:
        return 0 if linear.bias is None else self.address(linear.bias)

    def matrix(self, weight: Tensor) -> dict[str, int]:
        row_bytes = weight.shape[1] * weight.element_size()
        return {"weight": self.address(weight), "rows": weight.shape[0], "row_bytes": row_bytes}

    def _block(self, index: int, layer: Block, pending: dict[str, Any]) -> dict[str, Any]:
        """Emits one layer; ``pending`` is what its first norm adds to the residual stream."""
        config, attention, mlp = self._model.config, layer.self_attn, layer.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        self.norm(layer.attn_norm, pending, projections)
        columns = 0
        for projection in projections:
            self.linear(projection, self._qkv, columns, barrier=int(projection is attention.v_proj))
            columns += projection.out_features
        self._attention(index, attention)
        self.load(config.q_dim, attention.o_proj)
        self.linear(attention.o_proj, self._hidden)

        self.norm(layer.mlp_norm, self._addition(layer.post_attn_norm), (mlp.gate_proj, mlp.up_proj))
        up = self.weight(mlp.up_proj)
        second = {f"second_{name}": up[name] for name in _SECOND if name in up}
        target = {"target": self._wide[0], "target_stride": self._wide[1]}
        activation = self._ops.SILU if mlp.activation == "silu" else self._ops.GELU_TANH
        gated = {**target, **self.weight(mlp.gate_proj), **second, **self.readers([mlp.down_proj])}
        self.emit("GATED", **{**gated, "activation": activation, "barrier": 1})
        self.finish_mlp(mlp)
        return self._addition(layer.post_mlp_norm)

    def _attention(self, index: int, attention: Any) -> None:
        config = self._model.config
        shared = {
            "keys": self.address(self._cache.keys[index]),
            "values": self.address(self._cache.values[index]),
            "source": self._qkv[0],
            "source_stride": self._qkv[1],
            "barrier": 1,
        }
        norms: dict[str, Any] = {}
        if attention.q_norm is not None and attention.k_norm is not None:
            norms = {
                "gamma": self.address(attention.q_norm.weight),
                "second_gamma": self.address(attention.k_norm.weight),
                "epsilon": attention.q_norm.eps,
            }
        rope = int(config.is_sliding(index) and self._model.local_rope is not None)
        self.emit("ROTATE", rope=rope, **norms, **shared)
        target = {"target": self._wide[0], "target_stride": self._wide[1]}
        window = config.window(index) or 0
        self.emit("ATTEND", window=window, scale=attention.scale, **target, **shared)

    def _addition(self, post_norm: RMSNorm | None) -> dict[str, Any]:
        gamma = 0 if post_norm is None else self.address(post_norm.weight)
        return {"source": self._hidden[0], "source_stride": self._hidden[1], "post_gamma": gamma}

    def _table(self, embedding: QuantizedEmbedding | nn.Embedding) -> dict[str, Any]:
        """Operands of the embedding table."""
        from realizar_torch.cpu_kernels import dense_rows, row_kernels

        packed = isinstance(embedding, QuantizedEmbedding)
        kernel = row_kernels.decode_row(embedding.fmt) if packed else dense_rows.dense_row()
        return {"kernel": kernel, **self.matrix(embedding.weight)}
