"""PromptPass: rows of prompts through all layers of a model, as launches on given memory."""

from typing import Any

import torch
from torch import Tensor

from realizar_torch.generation.gpu_product import Activations, GpuProduct
from realizar_torch.generation.prompt_rows import Rows
from realizar_torch.models.transformer import Block, Transformer
from realizar_torch.nn.attention import Attention
from realizar_torch.nn.kv_cache import KVCache
from realizar_torch.nn.norm import RMSNorm
from realizar_torch.nn.rope import RotaryEmbedding


class PromptModel:
    """What a pass reads of a model: parts, not the model, which owns the states that own this."""

    def __init__(self, model: Transformer):
        self.config, self.dtype, self.device = model.config, model.dtype, model.device
        self.table, self.rope, self.local_rope = model.embed_tokens, model.rope, model.local_rope
        self.layers = [(layer, _Products(layer)) for layer in model.layers]


class _Products:
    """Those of one layer."""

    def __init__(self, layer: Block):
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv = GpuProduct(attention.q_proj, attention.k_proj, attention.v_proj)
        self.output = GpuProduct(attention.o_proj)
        self.gate_up = GpuProduct(mlp.gate_proj, mlp.up_proj)
        self.down = GpuProduct(mlp.down_proj)


class PromptMemory:
    """Buffers of a pass of up to ``rows`` rows, ``wanted`` of which are followed through the last layer.

    Some 150 KB per row for 8B shapes. The residual stream is fp32, all else the model's dtype.
    """

    def __init__(self, model: PromptModel, rows: int, wanted: int):
        config = model.config

        def empty(count: int, *width: int, dtype: torch.dtype = model.dtype) -> Tensor:
            return torch.empty(count, *width, dtype=dtype, device=model.device)

        hidden, heads = config.hidden_size, (config.num_heads, config.head_dim)
        self.stream = empty(rows, hidden, dtype=torch.float32)
        self.narrow, self.projected = empty(rows, hidden), empty(rows, hidden)
        self.qkv = empty(rows, config.q_dim + 2 * config.kv_dim)
        self.heads, self.attended = empty(rows, *heads), empty(rows, *heads)
        self.pair, self.wide = (
            empty(rows, 2 * config.intermediate_size),
            empty(rows, config.intermediate_size),
        )
        self.wanted_stream = empty(wanted, hidden, dtype=torch.float32)
        self.wanted_heads = empty(wanted, *heads)


class PromptPass:
    """tokens int64 [N] -> the wanted rows' residual stream behind the last layer, fp32 [W, hidden].

    Keys and values go to the cache. It reads the tables of ``rows`` when it runs, and holds addresses of
    them, the weights, the cache and the memory.
    """

    def __init__(self, model: PromptModel, rows: Rows, cache: KVCache, memory: PromptMemory):
        self._model, self._tables, self._cache, self._memory = model, rows, cache, memory

    def run(self, tokens: Tensor) -> Tensor:
        from realizar_torch.triton_kernels.dequantize import embedding

        model, table = self._model, self._model.table
        self._rows, self._blocks = len(self._tables.places), self._tables.blocks
        self._stream, self._heads = self._part("stream"), self._part("heads")
        angles = self._cos_sin(model.rope)
        local_angles = angles if model.local_rope is None else self._cos_sin(model.local_rope)
        embedding(tokens, table.stored, table.fmt, table.embedding_dim, out=self._stream, layout=table.layout)
        if model.config.embedding_scale != 1.0:
            self._stream.mul_(model.config.embedding_scale)
        addition: Tensor | None = None
        last = len(model.layers) - 1
        for index, (layer, products) in enumerate(model.layers):
            normed = self._norm(layer.attn_norm, addition, products.qkv)
            qkv = products.qkv(normed, self._part("qkv"))
            self._place(
                index, layer.self_attn, qkv, local_angles if model.config.is_sliding(index) else angles
            )
            if index == last:
                self._keep_wanted()
                if len(self._stream) == 0:
                    return self._stream
            addition = self._layer(index, layer, products)
        assert addition is not None
        return self._stream.add_(addition)

    def _layer(self, index: int, layer: Block, products: _Products) -> Tensor:
        """The layer behind its keys and values; what is then to be added to the residual stream."""
        from realizar_torch.triton_kernels.prompt_attention import prompt_attention

        cache = self._cache
        attended = prompt_attention(
            self._heads,
            cache.keys[index],
            cache.values[index],
            self._blocks,
            cache.starts,
            self._part("attended"),
            scale=layer.self_attn.scale,
            window=self._model.config.window(index) or 0,
            **cache.layer_scales(index),
        )
        projected = products.output(attended.flatten(1), self._part("projected"))
        normed = self._norm(layer.mlp_norm, self._normed(layer.post_attn_norm, projected), products.gate_up)
        pair, wide = self._part("pair"), self._part("wide")
        hidden = products.gate_up.gated(normed, pair, wide, layer.mlp.activation)
        return self._normed(layer.post_mlp_norm, products.down(hidden, self._part("projected")))

    def _norm(self, norm: RMSNorm, addition: Tensor | None, reader: GpuProduct) -> Activations:
        """The norm of the residual stream, after adding to it, as ``reader`` takes it."""
        from realizar_torch.triton_kernels.quantize import norm_quantize

        source, added = self._stream, {}
        if addition is not None:
            source, added = addition, {"residual": self._stream, "total": self._stream}
        if not reader.takes_grouped(self._rows):
            return _normalized(norm, source, self._part("narrow"), **added)
        room = reader.room(self._rows, source.device)
        options = _kind(norm) | added
        return norm_quantize(source, norm.weight, norm.bias, width=reader.width, out=room, **options)

    def _normed(self, norm: RMSNorm | None, x: Tensor) -> Tensor:
        return x if norm is None else _normalized(norm, x, torch.empty_like(x))

    def _place(self, index: int, attention: Attention, qkv: Tensor, angles: tuple[Tensor, Tensor]) -> None:
        """Rotated queries to ``_heads``, keys and values to the cache."""
        from realizar_torch.triton_kernels.prompt_heads import place_heads

        options: dict = self._cache.layer_scales(index)
        if attention.q_norm is not None and attention.k_norm is not None:
            options |= {
                "q_norm": attention.q_norm.weight,
                "k_norm": attention.k_norm.weight,
                "eps": attention.q_norm.eps,
                "zero_centered": attention.q_norm.zero_centered,
            }
        keys, values = self._cache.keys[index], self._cache.values[index]
        place_heads(qkv, self._tables.places, *angles, self._heads, keys, values, **options)

    def _part(self, name: str) -> Tensor:
        return getattr(self._memory, name)[: self._rows]

    def _keep_wanted(self) -> None:
        """Drops all rows but the wanted ones: nobody reads the others behind the last keys and values."""
        wanted, memory = self._tables.ends, self._memory
        self._rows, self._blocks = len(wanted), self._tables.end_blocks
        stream, heads = memory.wanted_stream[: self._rows], memory.wanted_heads[: self._rows]
        self._stream = torch.index_select(self._stream, 0, wanted, out=stream)
        self._heads = torch.index_select(self._heads, 0, wanted, out=heads)

    def _cos_sin(self, rope: RotaryEmbedding) -> tuple[Tensor, Tensor]:
        """cos and sin of every row's angles, fp32 [N, rotary_dim/2]."""
        cos, sin = rope(self._tables.positions[None])
        return cos[0, 0], sin[0, 0]


def _normalized(norm: RMSNorm, x: Tensor, out: Tensor, **added: Tensor) -> Tensor:
    from realizar_torch.triton_kernels.quantize import normalize

    return normalize(x, norm.weight, norm.bias, out=out, **_kind(norm), **added)


def _kind(norm: RMSNorm) -> dict[str, Any]:
    return {"normalization": norm.normalization, "eps": norm.eps, "zero_centered": norm.zero_centered}
