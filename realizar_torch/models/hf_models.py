"""The kinds of model that config.json may name: one row each, with what transformers takes for granted."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class HFModel:
    """What a ``model_type`` of config.json is in GGUF, and how its safetensors differ from GGUF's tensors.

    arch: the row in ``models.arch``. permuted_qk: converters interleave the rows of q and k. norm_offset:
    what converters add to norm weights (Gemma's 1). tied: whether the head is the embedding where config.json
    does not say. transposed: matrices stored [in, out], by the last part of their GGUF name. grouped_qkv: the
    fused rows are stored as [key head, (its queries, k, v)], which converters sort into all of q, k and v.
    activations: names that the row's activation goes by here beside the usual ones. reads: entries of
    SOME_READ that transformers acts upon here; unread: others that it does not. defaults: what its config
    class takes for entries that config.json leaves out, where leaving them out of a GGUF file means something
    else.
    """

    arch: str
    permuted_qk: bool = False
    norm_offset: float = 0.0
    tied: bool = False
    transposed: tuple[str, ...] = ()
    grouped_qkv: bool = False
    activations: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def acts_upon(self, entry: str) -> bool:
        return entry in self.reads if entry in SOME_READ else entry not in self.unread

    def complete(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The entries of config.json that transformers acts upon, and what it takes for those left out."""
        told = {entry: value for entry, value in config.items() if self.acts_upon(entry)}
        # null says that there is none, and elsewhere no more than leaving the entry out
        none = {entry: 0 for entry, value in told.items() if value is None and entry in _NONE_IF_NULL}
        return {**self.defaults, **{k: v for k, v in told.items() if v is not None}, **none}


# Entries that change the result of some kinds of model, and are without effect in the config.json of others.
SOME_READ = frozenset(
    {
        "sliding_window",
        "sliding_window_pattern",
        "layer_types",
        "use_sliding_window",
        "max_window_layers",
        "partial_rotary_factor",
        "rotary_pct",
        "rotary_emb_base",
        "rope_local_base_freq",
        "query_pre_attn_scalar",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "attention_multiplier",
        "embedding_multiplier",
        "residual_multiplier",
        "logits_scaling",
        "logit_scale",
        "use_parallel_residual",
        "norm_topk_prob",
        "layer_norm_eps",
        "layer_norm_epsilon",
        "norm_epsilon",
    }
)
_NONE_IF_NULL = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
_WINDOWS = ("sliding_window", "layer_types")
_QWEN = (*_WINDOWS, "use_sliding_window", "max_window_layers")
_GRANITE = ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")
_QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_GEMMA2 = {"query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
# the text part of a larger model may say little
_GEMMA3 = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}
# its config class gives layers with a window this base whatever ``rope_theta`` says
_OLMO3 = {"rope_theta": 500_000.0, "rope_local_base_freq": 500_000.0, "sliding_window": 4096}
_MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}

HF_MODELS: Mapping[str, HFModel] = MappingProxyType(
    {
        "llama": HFModel("llama", permuted_qk=True),
        "mistral": HFModel(
            "llama", permuted_qk=True, reads=("sliding_window",), defaults={"sliding_window": 4096}
        ),
        "smollm3": HFModel(
            "smollm3",
            permuted_qk=True,
            tied=True,
            reads=(*_WINDOWS, "use_sliding_window"),
            defaults={"rope_theta": 2_000_000.0, "use_sliding_window": False},
        ),
        "qwen2": HFModel("qwen2", reads=_QWEN, defaults=_QWEN_WINDOW),
        "qwen3": HFModel("qwen3", reads=_QWEN, defaults=_QWEN_WINDOW),
        "mixtral": HFModel(
            "llama", permuted_qk=True, reads=("sliding_window",), defaults={"rope_theta": 1_000_000.0}
        ),
        "qwen2_moe": HFModel(
            "qwen2moe",
            reads=(*_WINDOWS, "use_sliding_window", "norm_topk_prob"),
            defaults={"use_sliding_window": False, "sliding_window": 4096, "norm_topk_prob": False},
        ),
        "qwen3_moe": HFModel(
            "qwen3moe",
            reads=("sliding_window", "use_sliding_window", "norm_topk_prob"),
            defaults={"norm_topk_prob": False, "use_sliding_window": False},
        ),
        "phi3": HFModel(
            "phi3",
            reads=("sliding_window", "partial_rotary_factor"),
            defaults={"original_max_position_embeddings": 4096},
        ),
        "gemma": HFModel("gemma", norm_offset=1.0, tied=True, activations=("gelu",)),
        "gemma2": HFModel(
            "gemma2",
            norm_offset=1.0,
            tied=True,
            reads=(*_WINDOWS, *_GEMMA2),
            unread=("hidden_act",),
            defaults=_GEMMA2,
        ),
        "gemma3_text": HFModel(
            "gemma3",
            norm_offset=1.0,
            tied=True,
            reads=(
                *_WINDOWS,
                "sliding_window_pattern",
                "rope_local_base_freq",
                "query_pre_attn_scalar",
                "final_logit_softcapping",
            ),
            unread=("hidden_act",),
            defaults=_GEMMA3,
        ),
        "granite": HFModel(
            "granite", permuted_qk=True, reads=_GRANITE, defaults={"attention_multiplier": 1.0}
        ),
        "olmo2": HFModel("olmo2"),
        "olmo3": HFModel("olmo2", reads=_WINDOWS, defaults=_OLMO3),
        "starcoder2": HFModel("starcoder2", tied=True, reads=("sliding_window", "norm_epsilon")),
        "stablelm": HFModel(
            "stablelm",
            reads=("partial_rotary_factor", "use_parallel_residual", "layer_norm_eps"),
            defaults={"partial_rotary_factor": 0.25},
        ),
        "gpt2": HFModel(
            "gpt2",
            tied=True,
            transposed=("attn_qkv", "attn_output", "ffn_up", "ffn_down"),
            reads=("layer_norm_epsilon",),
            unread=("intermediate_size", "rope_theta", "rope_scaling", "rope_parameters"),
        ),
        "gpt_neox": HFModel(
            "gptneox",
            grouped_qkv=True,
            reads=("rotary_pct", "rotary_emb_base", "use_parallel_residual", "layer_norm_eps"),
            unread=("rope_theta",),
            defaults={"rotary_pct": 0.25},
        ),
        "falcon": HFModel(
            "falcon",
            tied=True,
            grouped_qkv=True,
            reads=("layer_norm_epsilon",),
            unread=("intermediate_size",),
        ),
        "phi": HFModel(
            "phi2", reads=("partial_rotary_factor", "layer_norm_eps"), defaults={"partial_rotary_factor": 0.5}
        ),
        "cohere": HFModel(
            "command-r",
            tied=True,
            reads=("logit_scale", "layer_norm_eps"),
            defaults={"rope_theta": 500_000.0, "logit_scale": 0.0625},
        ),
        "ministral3": HFModel(
            "mistral3",
            permuted_qk=True,
            reads=("sliding_window",),
            defaults={"rope_parameters": _MINISTRAL3_ROPE},
        ),
    }
)
