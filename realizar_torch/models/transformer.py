"""Transformer: one decoder-only model for every architecture row."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from realizar_torch.errors import CacheFullError, FormatError
from realizar_torch.models.config import ModelConfig
from realizar_torch.nn.attention import Attention, AttentionInputs, attention_mask
from realizar_torch.nn.experts import MixtureOfExperts
from realizar_torch.nn.kv_cache import KVCache
from realizar_torch.nn.mlp import MLP, GatedMLP
from realizar_torch.nn.norm import RMSNorm
from realizar_torch.nn.rope import RotaryEmbedding
from realizar_torch.ops.checks import check_dense


@dataclass(frozen=True)
class ModelOutput:
    """logits: fp32 [B, T, vocab_size], or the last ``logits_to_keep`` positions of it."""

    logits: Tensor


torch.export.register_dataclass(ModelOutput, serialized_type_name="realizar_torch.ModelOutput")


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); norms before and behind where the architecture has them.

    ``parallel``: x + attention(norm(x)) + mlp(norm(x)), where the MLP takes the attention's normed input if
    it has no norm of its own. ``residual_scale`` multiplies what attention and MLP add.
    """

    # norms of either kind, or None; an MLP with a gate or without, or a mixture of experts
    attn_norm: Any
    mlp_norm: Any
    mlp: Any

    def __init__(
        self,
        attn_norm: RMSNorm | None,
        self_attn: Attention,
        mlp_norm: RMSNorm | None,
        mlp: GatedMLP | MLP | MixtureOfExperts,
        post_attn_norm: RMSNorm | None = None,
        post_mlp_norm: RMSNorm | None = None,
        *,
        parallel: bool = False,
        residual_scale: float = 1.0,
    ):
        super().__init__()
        self.attn_norm, self.self_attn, self.post_attn_norm = attn_norm, self_attn, post_attn_norm
        self.mlp_norm, self.mlp, self.post_mlp_norm = mlp_norm, mlp, post_mlp_norm
        self.parallel, self.residual_scale = parallel, residual_scale

    def forward(self, x: Tensor, inputs: AttentionInputs, cache: KVCache | None, layer: int) -> Tensor:
        normed = _normed(self.attn_norm, x)
        y = _normed(self.post_attn_norm, self.self_attn(normed, inputs, cache, layer))
        if self.parallel:
            z = self.mlp(normed if self.mlp_norm is None else self.mlp_norm(x))
            return x + self._scaled(y + _normed(self.post_mlp_norm, z))
        x = x + self._scaled(y)
        y = self.mlp(_normed(self.mlp_norm, x))
        return x + self._scaled(_normed(self.post_mlp_norm, y))

    own_forward = forward

    def _scaled(self, y: Tensor) -> Tensor:
        return y if self.residual_scale == 1.0 else y * self.residual_scale

    def extra_repr(self) -> str:
        parallel = "parallel, " if self.parallel else ""
        return f"{parallel}residual_scale={self.residual_scale:g}"


def _normed(norm: RMSNorm | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


class Transformer(nn.Module):
    """Embedding, blocks, final norm, output head. Built by ``models.loading``, which supplies the modules."""

    # packed or dense; ``embed_positions`` may be None, ``layers`` is a ModuleList of Block
    embed_tokens: Any
    embed_positions: Any
    lm_head: Any
    layers: Any

    def __init__(
        self,
        config: ModelConfig,
        embed_tokens: nn.Module,
        layers: list[Block],
        norm: RMSNorm,
        lm_head: nn.Module,
        rope_divisors: tuple[float, ...] | None = None,
        embed_positions: nn.Module | None = None,
    ):
        super().__init__()
        self.config = config
        # of keys and values in caches made for the model; None: its own
        self.kv_dtype: torch.dtype | None = None
        self.embed_positions = embed_positions
        self.embed_tokens, self.layers, self.norm, self.lm_head = (
            embed_tokens,
            nn.ModuleList(layers),
            norm,
            lm_head,
        )
        rotary, theta, scaling = config.rotary_dim, config.rope_theta, config.rope_scaling
        told, divisors = scaling.divisors(rotary, theta), rope_divisors
        if told is not None:
            divisors = tuple(a * b for a, b in zip(told, rope_divisors or [1.0] * len(told), strict=True))
        magnitude, device = scaling.magnitude, norm.weight.device
        self.rope = RotaryEmbedding(rotary, theta, divisors=divisors, magnitude=magnitude, device=device)
        local = config.local_rope_theta
        self.local_rope = None if local is None else RotaryEmbedding(rotary, local, device=device)

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of activations and norms; packed weights stay uint8."""
        return self.norm.weight.dtype

    @property
    def cache_dtype(self) -> torch.dtype:
        """Dtype of keys and values in caches made for the model."""
        return self.dtype if self.kv_dtype is None else self.kv_dtype

    def new_cache(self, batch_size: int, max_seq_len: int) -> KVCache:
        """An empty cache for ``batch_size`` sequences of up to ``max_seq_len`` positions."""
        return KVCache(self.config, batch_size, max_seq_len, device=self.device, dtype=self.cache_dtype)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        cache: KVCache | None = None,
        logits_to_keep: int = 0,
    ) -> ModelOutput:
        """input_ids int [B, T] -> logits. With a cache the tokens follow the cached ones and join them.

        attention_mask [B, T] (only with an empty cache): 1 for tokens, 0 for padding, padding on the left.
        logits_to_keep n > 0 computes the head for the last n positions only.
        """
        config = self.config
        if logits_to_keep < 0:
            raise FormatError(f"logits_to_keep is {logits_to_keep}, expected 0 (all positions) or more")
        starts = self.begin(input_ids, attention_mask, cache)
        past, count = 0 if cache is None else cache.length, input_ids.shape[1]

        positions = self._positions(starts, past, count)
        inputs = self._attention_inputs(positions, starts, past, count)
        x = self.embed_tokens(input_ids)
        if self.embed_positions is not None:
            x = x + self.embed_positions(positions)
        if config.embedding_scale != 1.0:
            x = x * config.embedding_scale
        for index, layer in enumerate(self.layers):
            x = layer(x, inputs[int(config.is_sliding(index))], cache, index)
        if cache is not None:
            cache.advance(count)
        return ModelOutput(self.logits(x[:, -logits_to_keep:]))

    own_forward = forward

    def begin(self, input_ids: Tensor, attention_mask: Tensor | None, cache: KVCache | None) -> Tensor | None:
        """Checks what is to follow the cached tokens; gives, and tells the cache, the first real position of
        each row (int64 [B]), or None where no row is padded."""
        check_dense(input_ids=input_ids, attention_mask=attention_mask)
        self._check_ids(input_ids)
        batch, count = input_ids.shape
        if cache is not None and cache.batch_size != batch:
            raise FormatError(f"input_ids hold {batch} sequences, the cache is for {cache.batch_size}")
        end, learned = count + (0 if cache is None else cache.length), self.config.context_length
        if self.embed_positions is not None and end > learned:
            raise CacheFullError(f"{end} positions, but the model has learned {learned}; shorten the prompt")
        starts = self._starts(attention_mask, input_ids, cache)
        if cache is not None:
            cache.require(count)
        return starts

    def logits(self, x: Tensor) -> Tensor:
        """The residual stream behind the last layer, [..., hidden] -> fp32 [..., V]."""
        logits = self.lm_head(self.norm(x)).float()
        if self.config.logit_scale != 1.0:
            logits = logits * self.config.logit_scale
        if cap := self.config.final_softcap:
            logits = torch.tanh(logits / cap) * cap
        return logits

    def _load_from_state_dict(self, state_dict: Mapping[str, Tensor], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        weight = state_dict.get(prefix + "norm.weight")
        for rope in (self.rope, self.local_rope):
            # no state dict holds frequencies: a model on meta gets them where its weights come from
            if weight is not None and rope is not None and rope.inv_freq.is_meta:
                rope.to_empty(device=weight.device)

    def _check_ids(self, input_ids: Tensor) -> None:
        if input_ids.dim() != 2 or input_ids.dtype not in (torch.int64, torch.int32) or 0 in input_ids.shape:
            raise FormatError(
                f"input_ids are {input_ids.dtype} {list(input_ids.shape)}, "
                "expected int64 or int32 [batch, tokens], not empty"
            )
        if not input_ids.is_meta:
            check_loaded(self.device)
        if input_ids.device != self.device:
            raise FormatError(
                f"input_ids are on {input_ids.device}, the model is on {self.device}; move one of them"
            )

    def _starts(self, mask: Tensor | None, input_ids: Tensor, cache: KVCache | None) -> Tensor | None:
        """First real position of each row (int64 [B]), or None where no row is padded."""
        if cache is not None and cache.length > 0:
            if mask is not None:
                raise FormatError(
                    "attention_mask belongs to the first tokens of a cache; it is already filled"
                )
            return cache.starts if cache.padded else None
        starts = None if mask is None else left_padding(mask, input_ids)
        if cache is not None:
            cache.set_starts(starts)
        return starts

    def _positions(self, starts: Tensor | None, past: int, count: int) -> Tensor:
        """Place of each new token in its own text, int64 [B or 1, T]; 0 for padding."""
        positions = torch.arange(past, past + count, device=self.device)[None]
        return positions if starts is None else (positions - starts[:, None]).clamp_min(0)

    def _attention_inputs(
        self, positions: Tensor, starts: Tensor | None, past: int, count: int
    ) -> tuple[AttentionInputs, ...]:
        """Inputs of global layers and of sliding layers, indexed by ``config.is_sliding(layer)``."""
        cos, sin = self.rope(positions)
        scale = self.q_scale(positions)
        mask = attention_mask(starts, past, count, None, self.device)
        everywhere = AttentionInputs(cos, sin, mask, scale)
        if self.config.sliding_window is None:
            return (everywhere,)
        if self.local_rope is not None:
            cos, sin = self.local_rope(positions)
        window = self.config.sliding_window
        mask = attention_mask(starts, past, count, window, self.device)
        return everywhere, AttentionInputs(cos, sin, mask, scale)

    def q_scale(self, positions: Tensor) -> Tensor | None:
        """Queries grow with their position, as those of Llama 4: 1 + t·ln(1 + floor(p / original length))."""
        if not self.config.temperature:
            return None
        turns = (positions // self.config.rope_scaling.original_length).float()
        return (1.0 + self.config.temperature * turns.log1p())[:, None, :, None]


def check_loaded(device: torch.device) -> None:
    """FormatError if a model on ``device`` has no weights in memory."""
    if device.type == "meta":
        raise FormatError(
            "the model is on meta: its weights have not been loaded, or accelerate offloads them, which "
            "works with models of rt.hf.from_gguf and not with this one"
        )


def left_padding(mask: Tensor, input_ids: Tensor) -> Tensor | None:
    """Number of padding positions at the left of each row (int64 [B]); None where there are none.

    FormatError for a mask of another shape, with holes, with padding on the right or without any token.
    """
    if mask.shape != input_ids.shape:
        raise FormatError(
            f"attention_mask is {list(mask.shape)}, input_ids are {list(input_ids.shape)}; they must agree"
        )
    real = mask.to(device=input_ids.device, dtype=torch.bool)
    starts = real.shape[1] - real.sum(dim=1)
    expected = torch.arange(real.shape[1], device=real.device) >= starts[:, None]
    if not torch.equal(real, expected) or bool((starts == real.shape[1]).any()):
        raise FormatError(
            "attention_mask must be zeros, then ones in every row (left padding), with at least one 1"
        )
    return starts if bool(starts.any()) else None
