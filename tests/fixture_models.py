"""The models behind tests/fixtures: tiny random transformers models, odd on purpose, one per convention.

Three query heads share a key head, head sizes are not hidden/heads where the architecture allows it, the
vocabulary is no multiple of 32, biases are large and norm weights far from 1. Windows, and the lengths at
which RoPE is scaled, are 16, so that a prompt of 60 tokens is beyond all of them.
"""

from typing import Any

import torch

VOCAB, WINDOW, PROMPT = 99, 16, 60
# sizes of architectures that tell the head size, and of those whose heads are hidden/heads wide
FREE = {"hidden_size": 36, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}
BOUND = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2}
HEADS = {"hidden_size": 48, "num_attention_heads": 6}
COMMON = {
    "vocab_size": VOCAB,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
    "attn_implementation": "eager",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": WINDOW,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 4 * WINDOW,
}
# rotates 6 of the 8 elements of a head
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": WINDOW,
    "short_factor": [1.0, 1.3, 1.7],
    "long_factor": [1.5, 4.0, 9.0],
}
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
MINISTRAL = YARN | {
    "original_max_position_embeddings": WINDOW,
    "rope_theta": 100.0,
    "beta_fast": 1.2,
    "beta_slow": 0.1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.7,
}

# fixture -> transformers model class (without its ending), entries of its config
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", FREE | {"rope_parameters": LLAMA3}),
    "llama-linear": (
        "Llama",
        FREE
        | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}
        | {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    ),
    "mistral": ("Mistral", FREE | {"sliding_window": WINDOW}),
    "smollm3": (
        "SmolLM3",
        BOUND | {"num_hidden_layers": 4, "intermediate_size": 24, "tie_word_embeddings": True},
    ),
    "qwen2": ("Qwen2", BOUND | {"rope_parameters": YARN}),
    "qwen3": ("Qwen3", FREE | {"tie_word_embeddings": True}),
    "phi3": ("Phi3", BOUND | {"sliding_window": WINDOW}),
    "phi3-long": (
        "Phi3",
        BOUND | {"original_max_position_embeddings": WINDOW, "rope_parameters": LONGROPE},
    ),
    "gemma": ("Gemma", FREE | {"tie_word_embeddings": True}),
    "gemma2": (
        "Gemma2",
        FREE
        | {"num_hidden_layers": 3, "head_dim": 8, "query_pre_attn_scalar": 8, "tie_word_embeddings": True}
        | {"sliding_window": WINDOW, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
    ),
    "gemma3": (
        "Gemma3",
        FREE
        | {"num_hidden_layers": 6, "head_dim": 8, "intermediate_size": 32, "tie_word_embeddings": True}
        | {"sliding_window": WINDOW, "query_pre_attn_scalar": 8}
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            }
        },
    ),
    "granite": (
        "Granite",
        BOUND
        | {"embedding_multiplier": 3.0, "residual_multiplier": 0.6, "tie_word_embeddings": True}
        | {"attention_multiplier": 0.5, "logits_scaling": 2.5},
    ),
    "olmo2": ("Olmo2", BOUND),
    "olmo3": (
        "Olmo3",
        BOUND
        | {"num_hidden_layers": 3, "intermediate_size": 32, "sliding_window": WINDOW}
        | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}
        | {
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            }
        },
    ),
    "starcoder2": ("Starcoder2", BOUND | {"tie_word_embeddings": True}),
    "stablelm": ("StableLm", BOUND | {"use_qkv_bias": True, "rope_parameters": PARTIAL}),
    "stablelm-parallel": (
        "StableLm",
        BOUND | {"use_parallel_residual": True, "qk_layernorm": True, "rope_parameters": PARTIAL},
    ),
    "gpt2": (
        "GPT2",
        HEADS | {"hidden_size": 36, "max_position_embeddings": 64, "tie_word_embeddings": True},
    ),
    "gptneox": ("GPTNeoX", HEADS | {"rope_parameters": PARTIAL}),
    "gptneox-sequential": (
        "GPTNeoX",
        HEADS | {"use_parallel_residual": False, "num_hidden_layers": 1, "rope_parameters": PARTIAL},
    ),
    "falcon": ("Falcon", HEADS | {"multi_query": True, "tie_word_embeddings": True}),
    "falcon-groups": ("Falcon", HEADS | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "phi2": (
        "Phi",
        {"hidden_size": 40, "num_attention_heads": 5, "intermediate_size": 160, "rope_parameters": PARTIAL},
    ),
    "command-r": ("Cohere", BOUND | {"logit_scale": 0.4, "tie_word_embeddings": True}),
    "command-r-norms": (
        "Cohere",
        BOUND | {"logit_scale": 0.4, "use_qk_norm": True, "tie_word_embeddings": True},
    ),
    "internlm2": ("Llama", BOUND),
    "mistral3": ("Ministral3", FREE | {"rope_parameters": MINISTRAL}),
    "mixtral": (
        "Mixtral",
        FREE | {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 24},
    ),
    "qwen2moe": (
        "Qwen2Moe",
        BOUND
        | {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
        | {"shared_expert_intermediate_size": 28},
    ),
    "qwen3moe": (
        "Qwen3Moe",
        FREE
        | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        | {"norm_topk_prob": True, "tie_word_embeddings": True},
    ),
}


def make_model(name: str) -> torch.nn.Module:
    """The transformers model in fp32, whose matrices are exact in half precision."""
    import transformers

    stem, entries = MODELS[name]
    ending = "LMHeadModel" if stem == "GPT2" else "ForCausalLM"
    model_class = getattr(transformers, stem + ending)
    model = model_class(model_class.config_class(**COMMON | entries)).eval()
    generator = torch.Generator().manual_seed(sum(name.encode()))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(_values(stem, key, parameter, generator))
    return model


def _values(stem: str, key: str, parameter: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(parameter.shape, generator=generator)
    if parameter.ndim == 1 and key.endswith("bias"):
        return noise
    if parameter.ndim == 1:
        # Gemma's norms multiply with one more than their weight
        return noise.sigmoid() * 1.6 + (-0.8 if stem.startswith("Gemma") else 0.2)
    spread = 1.0 if "embed" in key else 1.6 / parameter.shape[-1] ** 0.5
    return (noise * spread).half().float()


def is_long(name: str) -> bool:
    """True where short texts have frequencies of their own (LongRoPE)."""
    return MODELS[name][1].get("rope_parameters") is LONGROPE


def has_experts(name: str) -> bool:
    """True for a mixture of experts."""
    return any("experts" in entry for entry in MODELS[name][1])


def prompt(name: str) -> torch.Tensor:
    """int64 [1, PROMPT]"""
    generator = torch.Generator().manual_seed(len(name))
    return torch.randint(3, VOCAB, (1, PROMPT), generator=generator)
