"""GpuPrompt: prompts through all layers of a packed Transformer on GPU kernels, many tokens at a time."""

from collections.abc import Sequence

import torch
from torch import Tensor

from realizar_torch.generation.gpu_product import GpuProduct
from realizar_torch.generation.prompt_rows import Piece, Rows, passes, rows_of
from realizar_torch.models.transformer import Block, Transformer
from realizar_torch.nn.attention import Attention
from realizar_torch.nn.kv_cache import KVCache
from realizar_torch.nn.mlp import GatedMLP
from realizar_torch.nn.norm import RMSNorm
from realizar_torch.nn.rope import RotaryEmbedding

# Tokens of one pass: its scratch memory is some 150 KB per token for 8B shapes.
_TOKENS = 4096


def why_not(model: Transformer) -> str | None:
    """What the pass does not know of a model that a GpuStep takes, or None."""
    layers = list(model.layers)
    attentions = [layer.self_attn for layer in layers]
    facts = {
        "its attention scores are capped": any(attention.softcap for attention in attentions),
        "its queries grow with their position": model.config.temperature != 0,
        "some layers do not rotate": not all(attention.rotary for attention in attentions),
        "it has learned positions": model.embed_positions is not None,
        "it adds attention and MLP in parallel": any(layer.parallel for layer in layers),
        "it scales what layers add": any(layer.residual_scale != 1.0 for layer in layers),
        "it has no norm before attention or MLP": any(
            layer.attn_norm is None or layer.mlp_norm is None for layer in layers
        ),
        "it norms q in another way than each head alike": any(
            attention.q_norm is not None
            and (type(attention.q_norm) is not RMSNorm or attention.q_norm.features != attention.head_dim)
            for attention in attentions
        ),
        "its MLP is not gated by SiLU or tanh-GELU": any(
            not isinstance(layer.mlp, GatedMLP) or layer.mlp.activation == "gelu" for layer in layers
        ),
    }
    return next((fact for fact, present in facts.items() if present), None)


class GpuPrompt:
    """Fills caches with prompts. It holds the weights: build a new one when any of them may have moved.

    For models that ``why_not`` has no word against. Products of many rows take and give the model's dtype and
    add in fp32, whatever the ``activations`` of the linears; the residual stream is fp32.
    """

    def __init__(self, model: Transformer):
        # parts, not the model: it owns the states that own this
        self._head_dim = model.config.head_dim
        self._parts = [_Parts(layer) for layer in model.layers]

    def run(
        self, model: Transformer, input_ids: Tensor, attention_mask: Tensor | None, cache: KVCache
    ) -> Tensor:
        """input_ids int [B, T] behind what is cached -> fp32 logits [B, V] of the last position."""
        model.begin(input_ids, attention_mask, cache)
        batch, count = input_ids.shape
        starts = cache.starts.tolist() if cache.padded else [0] * batch
        end = cache.length + count
        pieces = []
        for sequence, start in enumerate(starts):
            slot = max(start, cache.length)
            pieces.append(Piece(sequence, slot, end - slot, start))
        tokens = input_ids.reshape(-1)
        if cache.padded:
            tokens = torch.cat([input_ids[piece.sequence, count - piece.count :] for piece in pieces])
        last = self.fill(model, tokens, pieces, cache)
        cache.advance(count)
        return model.logits(last)

    @torch.no_grad()
    def fill(self, model: Transformer, tokens: Tensor, pieces: Sequence[Piece], cache: KVCache) -> Tensor:
        """Writes keys and values of ``pieces`` to their slots; does not advance the cache.

        tokens int [N]: those of all pieces. Returns the residual stream behind the last layer, fp32 [W,
        hidden], of the last token of each piece that wants it. Earlier slots must be filled.
        """
        from realizar_torch.triton_kernels.prompt_attention import prompt_block_rows

        block_rows = prompt_block_rows(self._head_dim, cache.keys.element_size())
        device, first, ends = cache.keys.device, 0, []
        for batch in passes(pieces, _TOKENS):
            count = sum(piece.count for piece in batch)
            rows = rows_of(batch, block_rows, device)
            # a copy is aligned: for a pointer that is not, Triton would compile another kernel
            part = tokens[first : first + count].to(torch.int64, copy=True)
            ends.append(_Pass(model, self._parts, rows, cache).run(part))
            first += count
        return ends[0] if len(ends) == 1 else torch.cat(ends)


class _Parts:
    """The products of one layer."""

    def __init__(self, layer: Block):
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv = GpuProduct(attention.q_proj, attention.k_proj, attention.v_proj)
        self.output = GpuProduct(attention.o_proj)
        self.gate_up = GpuProduct(mlp.gate_proj, mlp.up_proj)
        self.down = GpuProduct(mlp.down_proj)


class _Pass:
    """One pass of rows through the layers, on buffers of its own."""

    def __init__(self, model: Transformer, parts: Sequence[_Parts], rows: Rows, cache: KVCache):
        self._model, self._parts, self._rows, self._cache = model, parts, rows, cache
        config = self._config = model.config
        self._stream = torch.empty(len(rows.places), config.hidden_size, device=cache.keys.device)
        self._narrow = self._rows_of(config.hidden_size)
        self._projected = self._rows_of(config.hidden_size)
        self._qkv = self._rows_of(config.q_dim + 2 * config.kv_dim)
        self._heads = self._rows_of(config.q_dim).view(-1, config.num_heads, config.head_dim)
        self._attended = torch.empty_like(self._heads)
        self._pair = self._rows_of(2 * config.intermediate_size)
        self._wide = self._rows_of(config.intermediate_size)
        self._blocks = rows.blocks
        self._angles = self._cos_sin(model.rope)
        self._local_angles = self._angles if model.local_rope is None else self._cos_sin(model.local_rope)

    def run(self, tokens: Tensor) -> Tensor:
        """tokens int [N] -> the wanted rows' residual stream behind the last layer, fp32 [W, hidden]."""
        from realizar_torch.triton_kernels.dequantize import embedding

        table = self._model.embed_tokens
        embedding(tokens, table.stored, table.fmt, table.embedding_dim, out=self._stream, layout=table.layout)
        if self._config.embedding_scale != 1.0:
            self._stream.mul_(self._config.embedding_scale)
        addition: Tensor | None = None
        last = len(self._parts) - 1
        for index, (layer, parts) in enumerate(zip(self._model.layers, self._parts, strict=True)):
            normed = self._norm(layer.attn_norm, addition)
            self._place(index, layer.self_attn, parts.qkv(normed, self._qkv))
            if index == last:
                self._keep_wanted()
                if len(self._stream) == 0:
                    return self._stream
            addition = self._layer(index, layer, parts)
        assert addition is not None
        return self._stream.add_(addition)

    def _layer(self, index: int, layer: Block, parts: _Parts) -> Tensor:
        """The layer behind its keys and values; what is then to be added to the residual stream."""
        from realizar_torch.triton_kernels.gated import gated
        from realizar_torch.triton_kernels.prompt_attention import prompt_attention

        cache = self._cache
        attended = prompt_attention(
            self._heads,
            cache.keys[index],
            cache.values[index],
            self._blocks,
            cache.starts,
            self._attended,
            scale=layer.self_attn.scale,
            window=self._config.window(index) or 0,
        )
        projected = parts.output(attended.flatten(1), self._projected)
        normed = self._norm(layer.mlp_norm, self._normed(layer.post_attn_norm, projected))
        pair = parts.gate_up(normed, self._pair)
        hidden = gated(pair, self._wide, activation=layer.mlp.activation)
        return self._normed(layer.post_mlp_norm, parts.down(hidden, self._projected))

    def _norm(self, norm: RMSNorm, addition: Tensor | None) -> Tensor:
        """The norm of the residual stream, after adding to it."""
        if addition is None:
            return self._normalized(norm, self._stream, self._narrow)
        return self._normalized(norm, addition, self._narrow, residual=self._stream, total=self._stream)

    def _normed(self, norm: RMSNorm | None, x: Tensor) -> Tensor:
        return x if norm is None else self._normalized(norm, x, torch.empty_like(x))

    def _normalized(self, norm: RMSNorm, x: Tensor, out: Tensor, **added: Tensor) -> Tensor:
        from realizar_torch.triton_kernels.quantize import normalize

        kind = {"normalization": norm.normalization, "eps": norm.eps, "zero_centered": norm.zero_centered}
        return normalize(x, norm.weight, norm.bias, out=out, **kind, **added)

    def _place(self, index: int, attention: Attention, qkv: Tensor) -> None:
        """Rotated queries to ``_heads``, keys and values to the cache."""
        from realizar_torch.triton_kernels.prompt_heads import place_heads

        norms: dict = {}
        if attention.q_norm is not None and attention.k_norm is not None:
            norms = {
                "q_norm": attention.q_norm.weight,
                "k_norm": attention.k_norm.weight,
                "eps": attention.q_norm.eps,
                "zero_centered": attention.q_norm.zero_centered,
            }
        cos, sin = self._local_angles if self._config.is_sliding(index) else self._angles
        keys, values = self._cache.keys[index], self._cache.values[index]
        place_heads(qkv, self._rows.places, cos, sin, self._heads, keys, values, **norms)

    def _rows_of(self, width: int) -> Tensor:
        return self._stream.new_empty(len(self._stream), width, dtype=self._model.dtype)

    def _keep_wanted(self) -> None:
        """Drops all rows but the wanted ones: nobody reads the others behind the last keys and values."""
        wanted = self._rows.ends
        self._stream, self._heads = self._stream[wanted], self._heads[wanted]
        for name in ("_narrow", "_projected", "_attended", "_pair", "_wide"):
            setattr(self, name, getattr(self, name)[: len(wanted)])
        self._blocks = self._rows.end_blocks

    def _cos_sin(self, rope: RotaryEmbedding) -> tuple[Tensor, Tensor]:
        """cos and sin of every row's angles, fp32 [N, rotary_dim/2]."""
        cos, sin = rope(self._rows.positions[None])
        return cos[0, 0], sin[0, 0]
