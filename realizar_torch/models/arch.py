"""The supported architectures, one row of facts each; whatever reads a row knows no architecture by name."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from realizar_torch.checkpoint.gguf_errors import shown
from realizar_torch.errors import UnsupportedArchitectureError

QUERY_KEY_VALUE = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
ALL_LINEARS = (*QUERY_KEY_VALUE, "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")


@dataclass(frozen=True)
class ArchSpec:
    """Conventions that a GGUF file does not state but its architecture implies.

    Norm weights are stored as the factor to multiply with: converters have already added Gemma's 1. A pattern
    tells of each layer in turn and starts again at its end.
    """

    name: str

    normalization: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    # LayerNorms have a bias, but for those of q and k.
    norm_bias: bool = True
    # Norms in front of attention and MLP, and behind them before the residual addition.
    pre_norms: bool = True
    post_norms: bool = False
    # Attention and MLP both take the layer's input, and their outputs are added to it at once.
    parallel_residual: bool = False
    # The MLP has a norm of its own, or takes what the attention's norm gives, in parallel with the attention.
    mlp_norm: Literal["own", "shared", "as in the file"] = "own"
    # Norm of q and k before RoPE: per head with one weight for all of them ("head"), per head with weights of
    # its own, in those files that have them ("each head"), or over all heads at once ("whole").
    qk_norm: Literal["head", "each head", "whole"] | None = None

    # Rotation pairs the rows 2i and 2i+1 of each q and k head; loading reorders them to pair halves.
    interleaved_qk: bool = False
    # Modules that always have a bias; the others have one where the file holds it.
    biases: tuple[str, ...] = ()
    # Layers that rotate q and k, and RoPE's base where the file names none.
    rotary_pattern: tuple[bool, ...] = (True,)
    rope_theta: float = 10000.0
    # Layers with a sliding window, if the file tells its size (or this default); () where none can have one.
    sliding_pattern: tuple[bool, ...] = ()
    sliding_window: int = 0
    # Sliding layers rotate without the file's scaling; their base where it is another one.
    local_rope: bool = False
    local_rope_theta: float | None = None
    # Layer count of the variant whose attention is scaled by sqrt(hidden/heads) instead of sqrt(head_dim).
    width_scaled_layers: int = 0
    # cap·tanh(x/cap) on attention scores and on logits where the file names none; 0: no cap.
    attention_softcap: float = 0.0
    final_softcap: float = 0.0

    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    gated: bool = True
    # Gate and up projection are one tensor, the gate's rows first.
    fused_gate_up: bool = False

    # The MLPs are mixtures of experts, or may be dense where the file has no experts.
    experts: Literal["some files", "every file"] | None = None
    # Weights of a token's experts are scaled to add up to 1, where the file does not say.
    normalized_experts: bool = False
    # One more expert is used by every token, times a gate.
    shared_expert: bool = False
    # A file that tells one inner size only means that of all used experts together.
    split_experts: bool = False

    # A learned vector per position is added to the embedding.
    learned_positions: bool = False
    # Embeddings are multiplied by sqrt(hidden_size); a tied head uses them unscaled.
    scale_embedding: bool = False
    # What the file's logit_scale does to the logits.
    logit_scale: Literal["multiplies", "divides"] | None = None
    # Some models of this name have a sliding window, but their files do not tell it.
    hidden_window: bool = False

    def in_module_form(self) -> "ArchSpec":
        """The same for a directory of rt.save, whose tensors have the rows and names of the modules."""
        mlp_norm = self.mlp_norm if self.mlp_norm == "own" else "as in the file"
        return replace(self, interleaved_qk=False, fused_gate_up=False, mlp_norm=mlp_norm)

    def attention_scale(self, hidden_size: int, num_layers: int, num_heads: int, head_dim: int) -> float:
        """1/sqrt(head size), or 1/sqrt(hidden/heads) for the variant that was trained so (Gemma 3 27B)."""
        if num_layers == self.width_scaled_layers:
            return 1.0 / math.sqrt(hidden_size / num_heads)
        return 1.0 / math.sqrt(head_dim)


ARCHITECTURES: Mapping[str, ArchSpec] = MappingProxyType(
    {
        spec.name: spec
        for spec in (
            ArchSpec(
                "llama",
                interleaved_qk=True,
                sliding_pattern=(True,),
                hidden_window=True,
                experts="some files",
                normalized_experts=True,
            ),
            ArchSpec("smollm3", interleaved_qk=True, rotary_pattern=(True, True, True, False)),
            ArchSpec("qwen2", biases=QUERY_KEY_VALUE, sliding_pattern=(True,), hidden_window=True),
            ArchSpec("qwen3", qk_norm="head"),
            ArchSpec(
                "qwen2moe",
                biases=QUERY_KEY_VALUE,
                experts="every file",
                shared_expert=True,
                split_experts=True,
            ),
            ArchSpec(
                "qwen3moe",
                qk_norm="head",
                experts="every file",
                normalized_experts=True,
                split_experts=True,
            ),
            ArchSpec("phi3", fused_gate_up=True, sliding_pattern=(True,)),
            ArchSpec("gemma", activation="gelu_tanh", scale_embedding=True),
            ArchSpec(
                "gemma2",
                activation="gelu_tanh",
                post_norms=True,
                scale_embedding=True,
                sliding_pattern=(True, False),
                sliding_window=4096,
                attention_softcap=50.0,
                final_softcap=30.0,
                width_scaled_layers=46,
            ),
            ArchSpec(
                "gemma3",
                activation="gelu_tanh",
                qk_norm="head",
                post_norms=True,
                scale_embedding=True,
                sliding_pattern=(True,) * 5 + (False,),
                rope_theta=1_000_000.0,
                local_rope=True,
                local_rope_theta=10_000.0,
                width_scaled_layers=62,
            ),
            ArchSpec("granite", interleaved_qk=True, logit_scale="divides"),
            ArchSpec(
                "olmo2",
                pre_norms=False,
                post_norms=True,
                qk_norm="whole",
                sliding_pattern=(True, True, True, False),
                local_rope=True,
            ),
            ArchSpec(
                "starcoder2",
                normalization="layernorm",
                biases=ALL_LINEARS,
                activation="gelu_tanh",
                gated=False,
                sliding_pattern=(True,),
                hidden_window=True,
            ),
            ArchSpec("stablelm", normalization="layernorm", mlp_norm="as in the file", qk_norm="each head"),
            ArchSpec(
                "gpt2",
                normalization="layernorm",
                biases=ALL_LINEARS,
                rotary_pattern=(False,),
                activation="gelu_tanh",
                gated=False,
                learned_positions=True,
            ),
            ArchSpec(
                "gptneox",
                normalization="layernorm",
                parallel_residual=True,
                biases=ALL_LINEARS,
                activation="gelu",
                gated=False,
            ),
            ArchSpec(
                "falcon",
                normalization="layernorm",
                parallel_residual=True,
                mlp_norm="shared",
                activation="gelu",
                gated=False,
            ),
            ArchSpec(
                "phi2",
                normalization="layernorm",
                parallel_residual=True,
                mlp_norm="shared",
                biases=(*ALL_LINEARS, "lm_head"),
                activation="gelu_tanh",
                gated=False,
            ),
            ArchSpec(
                "command-r",
                normalization="layernorm",
                norm_bias=False,
                parallel_residual=True,
                mlp_norm="shared",
                qk_norm="each head",
                interleaved_qk=True,
                logit_scale="multiplies",
            ),
            ArchSpec("internlm2", interleaved_qk=True),
            ArchSpec("mistral3", interleaved_qk=True, sliding_pattern=(True,)),
        )
    }
)


def get_arch(name: str, source: str = "the file") -> ArchSpec:
    """The row called ``name``; UnsupportedArchitectureError lists the supported ones."""
    if name not in ARCHITECTURES:
        raise UnsupportedArchitectureError(
            f"{source}: architecture {shown(name)} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]
