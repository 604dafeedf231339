"""GGUF architectures as transformers models: one row of facts each; names of tensors come from ``gguf``."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from realizar_torch.checkpoint.gguf_errors import shown
from realizar_torch.errors import UnsupportedArchitectureError

# Config field -> metadata key behind "<architecture>.", for every row that does not say otherwise.
SIZES: Mapping[str, str] = MappingProxyType(
    {
        "max_position_embeddings": "context_length",
        "num_hidden_layers": "block_count",
        "hidden_size": "embedding_length",
        "intermediate_size": "feed_forward_length",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "head_dim": "attention.key_length",
    }
)
RMS_EPSILON, EPSILON = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"


@dataclass(frozen=True)
class Architecture:
    """How the files of one architecture differ from what its transformers class expects."""

    name: str
    # Which config and model class of transformers.
    model_type: str
    # Sliding window where the file tells none, 0 for no window; None: there can be none.
    sliding_window: int | None = None
    # Which config and model class where there is a window, if ``model_type`` has none.
    windowed_type: str | None = None
    # Config field -> the name this model's config has for it; None: it has none.
    renamed: Mapping[str, str | None] = field(default_factory=dict)
    # The config's field for the epsilon of norms, and its key.
    epsilon: tuple[str, str] = ("rms_norm_eps", RMS_EPSILON)
    # Config field -> (key, value where there is no such key or a float of 0, or what makes it of the sizes).
    numbers: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    # Config field, which is the key as well -> cap where the file names none; 0 is no cap.
    softcaps: Mapping[str, float] = field(default_factory=dict)
    # Config field -> tensor whose presence (or absence, behind a "!") makes it true.
    flags: Mapping[str, str] = field(default_factory=dict)
    # RoPE base where the file names none; None: no rotary embedding.
    rope_theta: float | None = 10000.0
    # RoPE base of layers with a sliding window where it, and no scaling, is their own; 0: the same base.
    local_rope_theta: float | None = None
    # Heads may be rotated in part.
    partial_rotary: bool = False
    # The converter interleaved the rows of each q and k head; transformers wants the halves apart.
    interleaved_qk: bool = False
    # The converter took q, k and v of fused projections apart; transformers wants them group by group.
    grouped_qkv: bool = False
    # What the converter added to norm weights and transformers adds again.
    norm_offset: int = 0
    # Attention is scaled by sqrt(head_dim), or by sqrt(hidden/heads) in the variant of so many layers.
    query_scalar: int | None = None


_ATTENTION_BIAS = {"attention_bias": "blk.0.attn_q.bias"}
_LLAMA_BIASES = _ATTENTION_BIAS | {"mlp_bias": "blk.0.ffn_gate.bias"}

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        row.name: row
        for row in (
            Architecture(
                "llama", "llama", 0, windowed_type="mistral", flags=_LLAMA_BIASES, interleaved_qk=True
            ),
            Architecture("smollm3", "smollm3", flags=_LLAMA_BIASES, interleaved_qk=True),
            Architecture("qwen2", "qwen2"),
            Architecture("qwen3", "qwen3", flags=_ATTENTION_BIAS),
            Architecture("gemma", "gemma", norm_offset=1),
            Architecture(
                "gemma2",
                "gemma2",
                4096,
                softcaps={"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
                norm_offset=1,
                query_scalar=46,
            ),
            Architecture(
                "gemma3",
                "gemma3_text",
                0,
                softcaps={"final_logit_softcapping": 0.0},
                rope_theta=1_000_000.0,
                local_rope_theta=10_000.0,
                norm_offset=1,
                query_scalar=62,
            ),
            Architecture("phi3", "phi3", 0, partial_rotary=True),
            Architecture(
                "olmo2", "olmo2", 0, windowed_type="olmo3", local_rope_theta=0.0, flags=_ATTENTION_BIAS
            ),
            Architecture(
                "granite",
                "granite",
                numbers={
                    "attention_multiplier": ("attention.scale", lambda sizes: sizes["head_dim"] ** -0.5),
                    "embedding_multiplier": ("embedding_scale", 1.0),
                    "residual_multiplier": ("residual_scale", 1.0),
                    "logits_scaling": ("logit_scale", 1.0),
                },
                flags=_LLAMA_BIASES,
                interleaved_qk=True,
            ),
            Architecture(
                "command-r",
                "cohere",
                epsilon=("layer_norm_eps", EPSILON),
                numbers={"logit_scale": ("logit_scale", 1.0)},
                flags=_ATTENTION_BIAS | {"use_qk_norm": "blk.0.attn_q_norm.weight"},
            ),
            Architecture(
                "starcoder2",
                "starcoder2",
                epsilon=("norm_epsilon", EPSILON),
                flags={"use_bias": "blk.0.attn_q.bias"},
            ),
            Architecture(
                "stablelm",
                "stablelm",
                epsilon=("layer_norm_eps", EPSILON),
                partial_rotary=True,
                flags={
                    "use_qkv_bias": "blk.0.attn_q.bias",
                    "use_parallel_residual": "!blk.0.ffn_norm.weight",
                    "qk_layernorm": "blk.0.attn_q_norm.weight",
                },
            ),
            Architecture("phi2", "phi", epsilon=("layer_norm_eps", EPSILON), partial_rotary=True),
            Architecture("internlm2", "llama", flags=_LLAMA_BIASES, interleaved_qk=True),
            Architecture(
                "gptneox",
                "gpt_neox",
                renamed={"num_key_value_heads": None, "head_dim": None},
                epsilon=("layer_norm_eps", EPSILON),
                numbers={"use_parallel_residual": ("use_parallel_residual", True)},
                flags={"attention_bias": "blk.0.attn_qkv.bias"},
                partial_rotary=True,
                grouped_qkv=True,
            ),
            Architecture(
                "gpt2",
                "gpt2",
                renamed={"intermediate_size": "n_inner", "num_key_value_heads": None, "head_dim": None},
                epsilon=("layer_norm_epsilon", EPSILON),
                rope_theta=None,
            ),
            Architecture(
                "falcon",
                "falcon",
                renamed={
                    "intermediate_size": "ffn_hidden_size",
                    "num_key_value_heads": "num_kv_heads",
                    "head_dim": None,
                },
                epsilon=("layer_norm_epsilon", EPSILON),
                flags={"new_decoder_architecture": "blk.0.attn_norm_2.weight"},
                grouped_qkv=True,
            ),
        )
    }
)


def get_architecture(name: str, source: str) -> Architecture:
    """The row called ``name``; UnsupportedArchitectureError lists the rows there are."""
    if name not in ARCHITECTURES:
        raise UnsupportedArchitectureError(
            f"{source}: architecture {shown(name)} has no transformers model here; there are rows for "
            f"{', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]
