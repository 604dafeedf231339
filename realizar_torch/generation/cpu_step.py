"""CpuStep: a Transformer's decode step as a program for the fused CPU kernel."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from realizar_torch.errors import FormatError
from realizar_torch.generation.fusable import obstacle
from realizar_torch.generation.workspace import Workspace, padded_width
from realizar_torch.models.transformer import Block, Transformer
from realizar_torch.nn.embedding import QuantizedEmbedding
from realizar_torch.nn.kv_cache import KVCache
from realizar_torch.nn.linear import QuantizedLinear
from realizar_torch.nn.norm import RMSNorm
from realizar_torch.ops import torch_kernels
from realizar_torch.ops.cpu import kernels
from realizar_torch.reference import ACTIVATION_BLOCK

_CACHE_LINE = 64
# Operands of a weight that a gated instruction has twice.
_SECOND = ("kernel", "int8", "weight", "row_bytes", "bias")


def why_not(model: Transformer, cache: KVCache) -> str | None:
    """Why the fused kernel cannot take the place of the modules, or None if it computes exactly the same."""
    if model.device.type != "cpu":
        return f"the model is on {model.device}"
    if kernels() is torch_kernels:
        return "Numba cannot be used"
    if {model.dtype, cache.keys.dtype} != {torch.float32}:
        return f"the model computes in {model.dtype}, with a cache of {cache.keys.dtype}"
    if any(getattr(module, "layout", "ggml") != "ggml" for module in model.modules()):
        return "weights are prepacked"
    return obstacle(model, dense=True)


class CpuStep:
    """One token of every sequence of a cache in one kernel call.

    It holds addresses of the weights, the cache and the workspace: build a new one when any of them may have
    moved. ``run`` allocates no tensors.
    """

    def __init__(self, model: Transformer, cache: KVCache, workspace: Workspace):
        self._cache, self._workspace = cache, workspace
        self._tokens = torch.zeros(cache.batch_size, dtype=torch.int64)
        # Keeps every tensor alive whose address the program holds.
        self._kept: list[Tensor] = [self._tokens, cache.keys, cache.values, cache.starts]
        ropes = [model.rope] + ([] if model.local_rope is None else [model.local_rope])
        self._frequencies = torch.stack([rope.inv_freq for rope in ropes]).contiguous()
        self._program = _Program(model, cache, workspace, self._kept)
        self._context = self._make_context(model, len(ropes))
        self._threads = 0
        self._arena = torch.empty(0)

    def run(self, token_ids: Tensor) -> Tensor:
        """token_ids int64 [B] -> fp32 logits [B, V], valid until the next step."""
        from realizar_torch.cpu_kernels import pool, step

        threads = torch.get_num_threads()
        if threads > self._threads:
            self._make_arena(threads)
        self._check(token_ids)
        self._tokens.copy_(token_ids)
        batch = self._cache.batch_size
        pool.run(step.run_step, threads, self._program.instructions, self._context, batch, self._cache.length)
        self._cache.advance(1)
        return self._workspace.logits[:batch]

    def _check(self, token_ids: Tensor) -> None:
        """The kernel would read whatever memory an id outside the table points to."""
        rows = self._program.vocabulary
        for token in token_ids.tolist():
            if not 0 <= token < rows:
                raise FormatError(f"token id {token} is outside the vocabulary of {rows}")

    def _make_context(self, model: Transformer, ropes: int) -> np.ndarray:
        from realizar_torch.cpu_kernels import program

        config = model.config
        context = np.zeros(1, program.CONTEXT)
        fields: dict[str, int] = {
            "tokens": self._tokens.data_ptr(),
            "starts": self._cache.starts.data_ptr(),
            "frequencies": self._frequencies.data_ptr(),
            "ropes": ropes,
            "quantized": int(any(row.get("int8", 0) for row in self._program.rows)),
            "plain": int(any(row.get("int8", 1) == 0 for row in self._program.rows)),
            "heads": config.num_heads,
            "kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "hidden": config.hidden_size,
            "max_positions": self._cache.max_seq_len,
        }
        for name, value in fields.items():
            context[name] = value
        return context

    def _make_arena(self, threads: int) -> None:
        """Memory of each thread: its copy of the residual stream, activations, attention scores."""
        from realizar_torch.cpu_kernels import pool, program, step

        context, batch = self._context, self._cache.batch_size
        width = self._program.widest
        head_dim, ropes = int(context["head_dim"][0]), int(context["ropes"][0])
        group = int(context["heads"][0] // context["kv_heads"][0])
        sizes = {
            "residual": 4 * batch * int(context["hidden"][0]),
            "activations": 4 * batch * width,
            "q": batch * width,
            "scales": 4 * batch * width // ACTIVATION_BLOCK,
            "sums": 8 * batch * width // ACTIVATION_BLOCK,
            "cos": 4 * batch * ropes * head_dim // 2,
            "sin": 4 * batch * ropes * head_dim // 2,
            "scores": 4 * group * self._cache.max_seq_len,
            "tile": 4 * step.TILE_ROWS,
        }
        offset = 0
        for name, nbytes in sizes.items():
            context[name] = offset
            offset += _aligned(nbytes)
        context["activations_stride"], context["q_stride"] = 4 * width, width

        shared = _aligned(program.COUNTER_BYTES * len(self._program.instructions)) + pool.BARRIER_BYTES
        self._arena = torch.zeros(shared + threads * offset + _CACHE_LINE, dtype=torch.uint8)
        base = _aligned(self._arena.data_ptr())
        context["barrier"], context["tiles"] = base, base + pool.BARRIER_BYTES
        context["arena"], context["arena_stride"] = base + shared, offset
        self._threads = threads


class _Program:
    """The instructions of one model over one cache and workspace."""

    def __init__(self, model: Transformer, cache: KVCache, workspace: Workspace, kept: list[Tensor]):
        from realizar_torch.cpu_kernels import program

        self._ops, self._model, self._cache, self._kept = program, model, cache, kept
        self._hidden, self._qkv, self._wide = (
            self._buffer(b) for b in (workspace.hidden, workspace.qkv, workspace.wide)
        )
        self.rows: list[dict[str, Any]] = []
        config = model.config
        self.widest = padded_width(max(config.hidden_size, config.q_dim, config.intermediate_size))

        self.vocabulary = config.vocab_size
        self._emit("EMBED", **self._table(model.embed_tokens), scale=config.embedding_scale)
        pending: dict[str, Any] = {}
        for index, layer in enumerate(model.layers):
            pending = self._block(index, layer, pending)
        self._norm(model.norm, pending)
        self._linear(model.lm_head, self._buffer(workspace.logits), 0, barrier=False)
        self.instructions = np.zeros(len(self.rows), program.INSTRUCTION)
        for instruction, row in zip(self.instructions, self.rows, strict=True):
            for name, value in row.items():
                instruction[name] = value

    def _block(self, index: int, layer: Block, pending: dict[str, Any]) -> dict[str, Any]:
        """Emits one layer; ``pending`` is what its first norm adds to the residual stream."""
        config, attention, mlp = self._model.config, layer.self_attn, layer.mlp
        self._norm(layer.attn_norm, pending)
        columns = 0
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
            self._linear(projection, self._qkv, columns, barrier=projection is attention.v_proj)
            columns += projection.out_features
        sliding = config.is_sliding(index)
        shared = {
            "keys": self._address(self._cache.keys[index]),
            "values": self._address(self._cache.values[index]),
            "source": self._qkv[0],
            "source_stride": self._qkv[1],
            "barrier": 1,
        }
        norms: dict[str, Any] = {}
        if attention.q_norm is not None and attention.k_norm is not None:
            norms = {
                "gamma": self._address(attention.q_norm.weight),
                "second_gamma": self._address(attention.k_norm.weight),
                "epsilon": attention.q_norm.eps,
            }
        rope = int(sliding and self._model.local_rope is not None)
        self._emit("ROTATE", rope=rope, **norms, **shared)
        window = config.window(index) or 0
        target = {"target": self._wide[0], "target_stride": self._wide[1]}
        self._emit("ATTEND", window=window, scale=attention.scale, **target, **shared)
        self._load(self._wide, config.q_dim)
        self._linear(attention.o_proj, self._hidden, 0)

        self._norm(layer.mlp_norm, self._addition(layer.post_attn_norm))
        gate, up = self._weight(mlp.gate_proj), self._weight(mlp.up_proj)
        second = {f"second_{name}": up[name] for name in _SECOND}
        activation = self._ops.SILU if mlp.activation == "silu" else self._ops.GELU_TANH
        self._emit("GATED", activation=activation, barrier=1, **target, **gate, **second)
        self._load(self._wide, config.intermediate_size)
        self._linear(mlp.down_proj, self._hidden, 0)
        return self._addition(layer.post_mlp_norm)

    def _addition(self, post_norm: RMSNorm | None) -> dict[str, Any]:
        gamma = 0 if post_norm is None else self._address(post_norm.weight)
        return {"source": self._hidden[0], "source_stride": self._hidden[1], "post_gamma": gamma}

    def _norm(self, norm: RMSNorm, pending: dict[str, Any]) -> None:
        gamma, width = self._address(norm.weight), self._model.config.hidden_size
        self._emit("NORM", gamma=gamma, epsilon=norm.eps, width=width, **pending)

    def _load(self, buffer: tuple[int, int], width: int) -> None:
        self._emit("LOAD", source=buffer[0], source_stride=buffer[1], width=width)

    def _linear(
        self, linear: QuantizedLinear, target: tuple[int, int], column: int, barrier: bool = True
    ) -> None:
        place = {"target": target[0] + 4 * column, "target_stride": target[1], "barrier": int(barrier)}
        self._emit("LINEAR", **place, **self._weight(linear))

    def _table(self, embedding: QuantizedEmbedding | nn.Embedding) -> dict[str, Any]:
        """Operands of the embedding table."""
        from realizar_torch.cpu_kernels import dense_rows, row_kernels

        packed = isinstance(embedding, QuantizedEmbedding)
        kernel = row_kernels.decode_row(embedding.fmt) if packed else dense_rows.dense_row()
        return {"kernel": kernel, **self._matrix(embedding.weight)}

    def _weight(self, linear: QuantizedLinear | nn.Linear) -> dict[str, Any]:
        """Operands that name a weight, the kernel of its rows, and its bias where it has one."""
        from realizar_torch.cpu_kernels import dense_rows, row_kernels

        int8 = False
        if isinstance(linear, nn.Linear):
            kernel = dense_rows.dense_rows()
        elif int8 := linear.activations == "int8":
            kernel = row_kernels.int8_rows(linear.fmt)
        else:
            kernel = row_kernels.float_rows(linear.fmt)
        bias = 0 if linear.bias is None else self._address(linear.bias)
        width = linear.in_features
        return {
            "kernel": kernel,
            "int8": int(int8),
            "width": width,
            "bias": bias,
            **self._matrix(linear.weight),
        }

    def _matrix(self, weight: Tensor) -> dict[str, int]:
        row_bytes = weight.shape[1] * weight.element_size()
        return {"weight": self._address(weight), "rows": weight.shape[0], "row_bytes": row_bytes}

    def _emit(self, opcode: str, **operands: Any) -> None:
        self.rows.append({"opcode": getattr(self._ops, opcode), **operands})

    def _buffer(self, buffer: Tensor) -> tuple[int, int]:
        """Address and distance between sequences, in bytes."""
        return self._address(buffer), 4 * buffer.stride(0)

    def _address(self, tensor: Tensor) -> int:
        # detached: a cast swaps the storage under a Parameter, and the old one must outlive the program
        self._kept.append(tensor.detach())
        return tensor.data_ptr()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _CACHE_LINE) * _CACHE_LINE
