"""The supported architectures, one row each: conventions of its files, names of their tensors."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from realizar_torch.checkpoint.gguf_errors import shown
from realizar_torch.errors import UnsupportedArchitectureError


@dataclass(frozen=True)
class ArchSpec:
    """Conventions that a GGUF file does not state but its architecture implies.

    Norm weights are stored as the factor to multiply with: converters have already added Gemma's 1.
    """

    name: str
    # Activation of the gated MLP: "silu" or "gelu_tanh".
    activation: str = "silu"
    # The converter interleaved the rows of each q and k head for pairwise rotation; loading undoes it.
    interleaved_qk: bool = False
    # RMSNorm over each q and k head, before RoPE.
    qk_norm: bool = False
    # Norms behind attention and MLP, before the residual addition.
    post_norms: bool = False
    # Embeddings are multiplied by sqrt(hidden_size); a tied head uses them unscaled.
    scale_embedding: bool = False
    # Every n-th layer attends globally, the others to a sliding window; 0: all global.
    sliding_period: int = 0
    # RoPE base where the file names none, and that of sliding layers where it differs.
    rope_theta: float = 10000.0
    local_rope_theta: float | None = None
    # Layer count of the variant whose attention is scaled by sqrt(hidden/heads) instead of sqrt(head_dim).
    width_scaled_layers: int = 0

    def attention_scale(self, hidden_size: int, num_layers: int, num_heads: int, head_dim: int) -> float:
        """1/sqrt(head size), or 1/sqrt(hidden/heads) for the variant that was trained so (Gemma 3 27B)."""
        if num_layers == self.width_scaled_layers:
            return 1.0 / math.sqrt(hidden_size / num_heads)
        return 1.0 / math.sqrt(head_dim)


ARCHITECTURES: Mapping[str, ArchSpec] = MappingProxyType(
    {
        spec.name: spec
        for spec in (
            ArchSpec("llama", interleaved_qk=True),
            ArchSpec(
                "gemma3",
                activation="gelu_tanh",
                qk_norm=True,
                post_norms=True,
                scale_embedding=True,
                sliding_period=6,
                rope_theta=1_000_000.0,
                local_rope_theta=10_000.0,
                width_scaled_layers=62,
            ),
        )
    }
)

# Module path inside one layer -> tensor name behind "blk.N."; a bias has the name of its weight.
LAYER_TENSORS: Mapping[str, str] = MappingProxyType(
    {
        "attn_norm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "self_attn.o_proj": "attn_output",
        "post_attn_norm": "post_attention_norm",
        "mlp_norm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "post_mlp_norm": "post_ffw_norm",
    }
)
MODEL_TENSORS: Mapping[str, str] = MappingProxyType(
    {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
)
# Divisors of the rotary frequencies (Llama 3 long-context scaling).
ROPE_DIVISORS = "rope_freqs.weight"


def get_arch(name: str, source: str = "the file") -> ArchSpec:
    """The row called ``name``; UnsupportedArchitectureError lists the supported ones."""
    if name not in ARCHITECTURES:
        raise UnsupportedArchitectureError(
            f"{source}: architecture {shown(name)} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]
