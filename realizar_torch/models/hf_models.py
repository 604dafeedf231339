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
    unread: entries that transformers does not act upon either. defaults: what transformers' config class
    takes for entries that config.json leaves out, where leaving them out of a GGUF file means something else;
    heads are rotated in part only where there is one for the part.
    """

    arch: str
    permuted_qk: bool = False
    norm_offset: float = 0.0
    tied: bool = False
    transposed: tuple[str, ...] = ()
    grouped_qkv: bool = False
    unread: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)


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
        "mistral": HFModel("llama", permuted_qk=True, defaults={"sliding_window": 4096}),
        "smollm3": HFModel(
            "smollm3",
            permuted_qk=True,
            tied=True,
            defaults={"rope_theta": 2_000_000.0, "use_sliding_window": False},
        ),
        "qwen2": HFModel("qwen2", defaults=_QWEN_WINDOW),
        "qwen3": HFModel("qwen3", defaults=_QWEN_WINDOW),
        "mixtral": HFModel("llama", permuted_qk=True, defaults={"rope_theta": 1_000_000.0}),
        "qwen2_moe": HFModel("qwen2moe", defaults=_QWEN_WINDOW | {"norm_topk_prob": False}),
        "qwen3_moe": HFModel("qwen3moe", defaults={"norm_topk_prob": False, "use_sliding_window": False}),
        "phi3": HFModel(
            "phi3", defaults={"partial_rotary_factor": 1.0, "original_max_position_embeddings": 4096}
        ),
        "gemma": HFModel("gemma", norm_offset=1.0, tied=True, unread=("hidden_act",)),
        "gemma2": HFModel("gemma2", norm_offset=1.0, tied=True, defaults=_GEMMA2),
        "gemma3_text": HFModel("gemma3", norm_offset=1.0, tied=True, defaults=_GEMMA3),
        "granite": HFModel("granite", permuted_qk=True, defaults={"attention_multiplier": 1.0}),
        "olmo2": HFModel("olmo2"),
        "olmo3": HFModel("olmo2", defaults={"rope_theta": 500_000.0, "sliding_window": 4096}),
        "starcoder2": HFModel("starcoder2", tied=True),
        "stablelm": HFModel("stablelm", defaults={"partial_rotary_factor": 0.25}),
        "gpt2": HFModel(
            "gpt2",
            tied=True,
            transposed=("attn_qkv", "attn_output", "ffn_up", "ffn_down"),
            unread=("intermediate_size",),
        ),
        "gpt_neox": HFModel("gptneox", grouped_qkv=True, defaults={"rotary_pct": 0.25}),
        "falcon": HFModel("falcon", tied=True, grouped_qkv=True, unread=("intermediate_size",)),
        "phi": HFModel("phi2", defaults={"partial_rotary_factor": 0.5}),
        "cohere": HFModel("command-r", tied=True, defaults={"rope_theta": 500_000.0, "logit_scale": 0.0625}),
        "ministral3": HFModel("mistral3", permuted_qk=True, defaults={"rope_parameters": _MINISTRAL3_ROPE}),
    }
)
