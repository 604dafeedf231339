"""ModelConfig: the sizes and constants of one model, read from GGUF metadata and checked."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from realizar_torch.errors import GGUFError, UnsupportedArchitectureError
from realizar_torch.models.arch import ArchSpec, get_arch

# Factors and caps of other architectures; 0 and 1 mean none.
_UNREAD_NUMBERS = (
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logit_scale",
    "residual_scale",
    "embedding_scale",
    "attention.scale",
    "rope.scaling.attn_factor",
)


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a decoder-only transformer. Lengths are in tokens, widths in elements.

    ``rope_theta`` and ``rope_factor`` (linear scaling: positions are divided by it) belong to the layers with
    global attention; layers with a sliding window use ``local_rope_theta`` where it is set. Every
    ``sliding_period``-th layer attends globally, the others to the last ``sliding_window`` positions.
    """

    arch: ArchSpec
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    norm_eps: float
    rope_theta: float
    rope_factor: float = 1.0
    sliding_window: int | None = None
    sliding_period: int = 0
    local_rope_theta: float | None = None

    @property
    def q_dim(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def attention_scale(self) -> float:
        """Factor on q·k before the softmax."""
        return self.arch.attention_scale(self.hidden_size, self.num_layers, self.num_heads, self.head_dim)

    @property
    def embedding_scale(self) -> float:
        return math.sqrt(self.hidden_size) if self.arch.scale_embedding else 1.0

    def window(self, layer: int) -> int | None:
        """Positions a query of ``layer`` can see, itself included; None: all of them."""
        return self.sliding_window if self.is_sliding(layer) else None

    def is_sliding(self, layer: int) -> bool:
        """True where ``layer`` attends to the last ``sliding_window`` positions only."""
        return bool(self.sliding_window and self.sliding_period and (layer + 1) % self.sliding_period)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], source: str = "the file") -> "ModelConfig":
        """Reads ``<architecture>.*`` keys. GGUFError names a key that is missing or has an impossible value;
        UnsupportedArchitectureError names a feature that is not implemented."""
        arch = get_arch(_require(metadata, "general.architecture", str, source), source)
        keys = _Keys(metadata, arch.name, source)

        hidden = keys.positive("embedding_length")
        heads = keys.positive("attention.head_count")
        head_dim = keys.positive("attention.key_length", default=hidden // heads)
        for other in ("attention.value_length", "rope.dimension_count"):
            found = keys.positive(other, default=head_dim)
            if found != head_dim:
                raise UnsupportedArchitectureError(
                    f"{source}: {arch.name}.{other} is {found}, only the key length {head_dim} is supported"
                )
        if head_dim % 2:
            raise GGUFError(f"{source}: head size {head_dim} is odd; rotary embedding needs an even one")
        kv_heads = keys.positive("attention.head_count_kv", default=heads)
        if heads % kv_heads:
            raise GGUFError(f"{source}: {heads} heads cannot share {kv_heads} key/value heads evenly")
        if experts := keys.optional("expert_count", int, 0):
            raise UnsupportedArchitectureError(
                f"{source}: {arch.name} with {experts} experts is not supported"
            )
        _refuse_other_mathematics(keys, source)

        window = keys.optional("attention.sliding_window", int, 0) if arch.sliding_period else 0
        if window < 0:
            raise GGUFError(f"{source}: {arch.name}.attention.sliding_window is {window}, expected 0 or more")
        local_theta = None
        if window and arch.local_rope_theta is not None:
            default = arch.local_rope_theta
            local_theta = keys.positive("rope.freq_base_swa", default=default, kind=float)
        return cls(
            arch=arch,
            vocab_size=_vocab_size(metadata, keys, source),
            hidden_size=hidden,
            intermediate_size=keys.positive("feed_forward_length"),
            num_layers=keys.positive("block_count"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            context_length=keys.positive("context_length"),
            norm_eps=keys.positive("attention.layer_norm_rms_epsilon", kind=float),
            rope_theta=keys.positive("rope.freq_base", default=arch.rope_theta, kind=float),
            rope_factor=_rope_factor(keys, source),
            sliding_window=window or None,
            sliding_period=keys.positive("attention.sliding_window_pattern", default=arch.sliding_period)
            if window
            else 0,
            local_rope_theta=local_theta,
        )


class _Keys:
    """Typed access to the keys of one architecture."""

    def __init__(self, metadata: Mapping[str, Any], arch: str, source: str):
        self._metadata, self._arch, self._source = metadata, arch, source

    def optional(self, name: str, kind: type, default: Any) -> Any:
        key = f"{self._arch}.{name}"
        return _require(self._metadata, key, kind, self._source) if key in self._metadata else default

    def positive(self, name: str, default: float | None = None, kind: type = int) -> Any:
        key = f"{self._arch}.{name}"
        if key not in self._metadata and default is not None:
            value = default
        else:
            value = _require(self._metadata, key, kind, self._source)
        if not (value > 0 and math.isfinite(value)):
            raise GGUFError(f"{self._source}: {key} is {value}, expected a positive number")
        return value


def _require(metadata: Mapping[str, Any], key: str, kind: type, source: str) -> Any:
    if key not in metadata:
        raise GGUFError(
            f"{source}: metadata key {key!r} is missing; the file cannot describe a model without it"
        )
    value = metadata[key]
    accepted = (int, float) if kind is float else kind
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise GGUFError(f"{source}: {key} is {type(value).__name__}, expected one {kind.__name__}")
    return value


def _vocab_size(metadata: Mapping[str, Any], keys: _Keys, source: str) -> int:
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    if not isinstance(tokens, Sequence) or isinstance(tokens, str):
        raise GGUFError(f"{source}: tokenizer.ggml.tokens is {type(tokens).__name__}, expected an array")
    declared = keys.optional("vocab_size", int, len(tokens))
    if declared <= 0:
        raise GGUFError(f"{source}: neither a vocab_size key nor a token list tells the vocabulary size")
    return declared


def _refuse_other_mathematics(keys: _Keys, source: str) -> None:
    """UnsupportedArchitectureError for a key that would change the result and that no row here honours."""
    for name in _UNREAD_NUMBERS:
        value = keys.optional(name, float, 0)
        if value not in (0, 1):
            raise UnsupportedArchitectureError(f"{source}: {name} = {value} is not supported")
    if not keys.optional("attention.causal", bool, True):
        raise UnsupportedArchitectureError(f"{source}: attention that is not causal is not supported")


def _rope_factor(keys: _Keys, source: str) -> float:
    """Linear scaling, under its new or old key; a factor without a type is linear, as in llama.cpp."""
    factor = keys.optional("rope.scaling.factor", float, 0) or keys.optional("rope.scale_linear", float, 0)
    kind = keys.optional("rope.scaling.type", str, "linear")
    if kind == "none" or (kind == "linear" and factor == 0):
        return 1.0
    if kind != "linear":
        raise UnsupportedArchitectureError(
            f"{source}: RoPE scaling {kind!r} is not supported; supported: none, linear, rope_freqs"
        )
    if not (factor > 0 and math.isfinite(factor)):
        raise GGUFError(f"{source}: the RoPE scaling factor is {factor}, expected a positive number")
    return float(factor)
