"""ModelConfig: the sizes and constants of one model, read from GGUF metadata and checked."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from realizar_torch.checkpoint.overridden import wrong_entry
from realizar_torch.errors import UnsupportedArchitectureError
from realizar_torch.models.arch import ArchSpec, get_arch
from realizar_torch.models.experts import Experts, read_experts
from realizar_torch.models.metadata import MODULE_ROWS, MOST_LAYERS, Keys, require
from realizar_torch.models.rope_scaling import RopeScaling, read_rope_scaling


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a decoder-only transformer. Lengths are in tokens, widths in elements.

    ``rope_theta`` and ``rope_scaling`` belong to the layers with global attention; layers with a sliding
    window use ``local_rope_theta``, unscaled, where it is set. ``sliding_pattern`` tells of each layer in
    turn, over and over, whether it attends to the last ``sliding_window`` positions only.
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
    # The first ``rotary_dim`` elements of each head are rotated.
    rotary_dim: int
    rope_scaling: RopeScaling
    # Factor on q·k before the softmax.
    attention_scale: float
    local_rope_theta: float | None = None
    sliding_window: int | None = None
    sliding_pattern: tuple[bool, ...] = ()
    # False where a file says so of an architecture that can do either.
    parallel_residual: bool = False
    # Queries at position p are multiplied by 1 + temperature·ln(1 + floor(p / original length)).
    temperature: float = 0.0
    # Factors on embeddings, on what attention and MLP add, on logits; soft caps, 0 for none.
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    attention_softcap: float = 0.0
    final_softcap: float = 0.0
    # Mixtures of experts, in all layers whose tensors are not those of a dense MLP.
    experts: Experts | None = None

    @property
    def q_dim(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.num_kv_heads * self.head_dim

    def window(self, layer: int) -> int | None:
        """Positions a query of ``layer`` can see, itself included; None: all of them."""
        return self.sliding_window if self.is_sliding(layer) else None

    def is_sliding(self, layer: int) -> bool:
        """True where ``layer`` attends to the last ``sliding_window`` positions only."""
        pattern = self.sliding_pattern
        return bool(self.sliding_window) and pattern[layer % len(pattern)]

    def is_rotary(self, layer: int) -> bool:
        """True where ``layer`` rotates q and k."""
        pattern = self.arch.rotary_pattern
        return pattern[layer % len(pattern)]

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], source: str = "the file") -> "ModelConfig":
        """Reads ``<architecture>.*`` keys. GGUFError names a key that is missing or has an impossible value,
        FormatError one whose value the caller gave, UnsupportedArchitectureError a feature that is not
        implemented."""
        arch = get_arch(require(metadata, "general.architecture", str, source), source)
        if MODULE_ROWS in metadata:
            arch = arch.in_module_form()
        keys = Keys(metadata, arch.name, source)
        _refuse_other_mathematics(keys, arch)

        hidden = keys.positive("embedding_length")
        layers = keys.positive("block_count")
        heads = keys.positive("attention.head_count")
        kv_heads = keys.positive("attention.head_count_kv", default=heads)
        if heads % kv_heads:
            sentence = f"{heads} heads cannot share {kv_heads} key/value heads evenly"
            raise keys.wrong(sentence, "attention.head_count_kv", "attention.head_count")
        head_dim = keys.positive("attention.key_length", default=hidden // heads)
        check_value_length(keys, head_dim)
        scale = arch.attention_scale(hidden, layers, heads, head_dim)
        logit_scale = keys.factor("logit_scale")
        theta = keys.positive("rope.freq_base", default=arch.rope_theta, kind=float)
        window, pattern = _sliding(keys, arch, layers)
        return cls(
            arch=arch,
            vocab_size=_vocab_size(metadata, keys),
            hidden_size=hidden,
            intermediate_size=keys.positive("feed_forward_length"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            context_length=keys.positive("context_length"),
            norm_eps=keys.positive(_EPSILON[arch.normalization], kind=float),
            rope_theta=theta,
            rotary_dim=read_rotary_dim(keys, head_dim),
            rope_scaling=read_rope_scaling(keys, theta),
            attention_scale=_attention_scale(keys, scale),
            local_rope_theta=_local_rope_theta(keys, arch, theta) if window and arch.local_rope else None,
            sliding_window=window,
            sliding_pattern=pattern,
            parallel_residual=arch.parallel_residual and keys.optional("use_parallel_residual", bool, True),
            temperature=_temperature(keys),
            embedding_scale=keys.factor(
                "embedding_scale", default=math.sqrt(hidden) if arch.scale_embedding else 1.0
            ),
            residual_scale=keys.factor("residual_scale"),
            logit_scale=1.0 / logit_scale if arch.logit_scale == "divides" else logit_scale,
            attention_softcap=_softcap(keys, "attn_logit_softcapping", arch.attention_softcap),
            final_softcap=_softcap(keys, "final_logit_softcapping", arch.final_softcap),
            experts=read_experts(keys, arch),
        )


_EPSILON = {"rmsnorm": "attention.layer_norm_rms_epsilon", "layernorm": "attention.layer_norm_epsilon"}


def _vocab_size(metadata: Mapping[str, Any], keys: Keys) -> int:
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    if not isinstance(tokens, Sequence) or isinstance(tokens, str):
        sentence = f"tokenizer.ggml.tokens is {type(tokens).__name__}, expected an array"
        raise wrong_entry(metadata, sentence, "tokenizer.ggml.tokens", source=keys.source)
    declared = keys.optional("vocab_size", int, len(tokens))
    if declared <= 0:
        raise keys.wrong("neither a vocab_size key nor a token list tells the vocabulary size", "vocab_size")
    return declared


def check_value_length(keys: Keys, head_dim: int) -> None:
    """UnsupportedArchitectureError unless values are as long as keys: the cache holds both alike."""
    if (found := keys.positive("attention.value_length", default=head_dim)) != head_dim:
        raise UnsupportedArchitectureError(
            f"{keys.source}: attention.value_length is {found}, only the key length {head_dim} is supported"
        )


def read_rotary_dim(keys: Keys, head_dim: int) -> int:
    """Rotated elements of a head: an even number, at most all."""
    size = keys.positive("rope.dimension_count", default=head_dim)
    if size % 2 or size > head_dim:
        raise keys.wrong(
            f"{size} of the {head_dim} elements of a head are to be rotated; "
            "rotary embedding needs an even number, at most all",
            *("rope.dimension_count", "attention.key_length", "embedding_length", "attention.head_count"),
        )
    return size


def _sliding(keys: Keys, arch: ArchSpec, layers: int) -> tuple[int | None, tuple[bool, ...]]:
    """The window and the layers that have it; None and () where all layers see everything."""
    window = keys.optional("attention.sliding_window", int, arch.sliding_window)
    if window < 0:
        name = "attention.sliding_window"
        raise keys.wrong(f"{name} is {window}, expected 0 or more", name)
    if not window or not arch.sliding_pattern:
        return None, ()
    told = keys.flags("attention.sliding_window_pattern")
    if told is None:
        return window, arch.sliding_pattern
    pattern = told if isinstance(told, tuple) else one_in(told)
    if isinstance(told, tuple) and len(told) != layers:
        name = "attention.sliding_window_pattern"
        raise keys.wrong(f"{name} tells of {len(told)} layers of {layers}", name, "block_count")
    return window, pattern


def one_in(period: int) -> tuple[bool, ...]:
    """The pattern of which the last layer sees everything; a period beyond any model's layers is cut."""
    return (True,) * (min(period, MOST_LAYERS) - 1) + (False,)


def _local_rope_theta(keys: Keys, arch: ArchSpec, theta: float) -> float:
    default = theta if arch.local_rope_theta is None else arch.local_rope_theta
    return keys.positive("rope.freq_base_swa", default=default, kind=float)


def _attention_scale(keys: Keys, default: float) -> float:
    if (scale := keys.factor("attention.scale", default=default)) < 0:
        raise keys.wrong(f"attention.scale is {scale}, expected a positive number", "attention.scale")
    return scale


def _temperature(keys: Keys) -> float:
    temperature = keys.factor("attention.temperature_scale", default=0.0)
    if temperature:
        keys.positive("rope.scaling.original_context_length")
    return temperature


def _softcap(keys: Keys, name: str, default: float) -> float:
    cap = keys.optional(name, float, default)
    if not (cap >= 0 and math.isfinite(cap)):
        raise keys.wrong(f"{name} is {cap}, expected a positive number, or 0 for none", name)
    return float(cap)


def _refuse_other_mathematics(keys: Keys, arch: ArchSpec) -> None:
    """UnsupportedArchitectureError for a key that would change the result and that nobody here honours."""
    if arch.logit_scale is None and keys.factor("logit_scale") != 1.0:
        raise UnsupportedArchitectureError(
            f"{keys.source}: a logit_scale is not supported in {arch.name} models, whose files have none"
        )
    if (bias := keys.optional("attention.max_alibi_bias", float, 0)) > 0:
        raise UnsupportedArchitectureError(f"{keys.source}: ALiBi (max_alibi_bias = {bias}) is not supported")
    if not keys.optional("attention.causal", bool, True):
        raise UnsupportedArchitectureError(f"{keys.source}: attention that is not causal is not supported")
