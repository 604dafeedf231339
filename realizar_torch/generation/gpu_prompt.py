"""GpuPrompt: prompts through all layers of a packed Transformer on GPU kernels, many tokens at a time."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from realizar_torch.generation.graph import GraphStats
from realizar_torch.generation.prompt_graph import PromptGraphs
from realizar_torch.generation.prompt_pass import PromptMemory, PromptModel, PromptPass
from realizar_torch.generation.prompt_rows import Piece, passes, rows_of
from realizar_torch.models.transformer import Transformer
from realizar_torch.nn.kv_cache import KVCache
from realizar_torch.nn.mlp import GatedMLP
from realizar_torch.nn.norm import RMSNorm
from realizar_torch.ops.recording import dispatch

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

    For models that ``why_not`` has no word against. Products of up to 64 rows by linears of int8 activations
    take fp16 ones and packed weights, others the model's dtype; all add in fp32, and the residual stream is
    fp32. Passes of up to 1,024 rows run from CUDA graphs, from the second of a size on.
    """

    def __init__(self, model: Transformer):
        from realizar_torch.triton_kernels.prompt_attention import prompt_block_rows

        self._model = PromptModel(model)
        self._block_rows = prompt_block_rows(model.config.head_dim, model.dtype.itemsize)
        self._graphs = PromptGraphs(self._model, self._block_rows)

    @property
    def stats(self) -> GraphStats:
        """Of the passes of few rows, where it says steps."""
        return self._graphs.stats

    def run(
        self,
        model: Transformer,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        cache: KVCache,
        *,
        cuda_graph: bool | str = "auto",
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
        last = self.fill(tokens, pieces, cache, cuda_graph=cuda_graph)
        cache.advance(count)
        return model.logits(last)

    def rehearsal(self, rows: int, cache: KVCache) -> Callable[[], Tensor] | None:
        """A pass of ``rows`` rows to be rehearsed, whose result tells nothing; None after the first."""
        return self._graphs.rehearsal(rows, cache)

    @torch.no_grad()
    def fill(
        self, tokens: Tensor, pieces: Sequence[Piece], cache: KVCache, *, cuda_graph: bool | str = "auto"
    ) -> Tensor:
        """Writes keys and values of ``pieces`` to their slots; does not advance the cache.

        tokens int [N]: those of all pieces. Returns the residual stream behind the last layer, fp32 [W,
        hidden], of the last token of each piece that wants it. Earlier slots must be filled. cuda_graph: as
        in ``DecodeGraph.begin``, for passes of few rows.
        """
        first, ends = 0, []
        for batch in passes(pieces, _TOKENS):
            count = sum(piece.count for piece in batch)
            part = tokens[first : first + count]
            if self._graphs.takes(batch, cache):
                ends.append(self._graphs.run(part, batch, cache, cuda_graph))
            else:
                ends.append(dispatch("prefill", self._model.device, self._once, part, batch, cache))
            first += count
        return ends[0] if len(ends) == 1 else torch.cat(ends)

    def _once(self, tokens: Tensor, pieces: Sequence[Piece], cache: KVCache) -> Tensor:
        """A pass on memory of its own."""
        rows = rows_of(pieces, self._block_rows, self._model.device)
        memory = PromptMemory(self._model, len(tokens), len(rows.ends))
        # a copy is aligned: for a pointer that is not, Triton would compile another kernel
        return PromptPass(self._model, rows, cache, memory).run(tokens.to(torch.int64, copy=True))
