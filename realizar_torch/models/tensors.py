"""Which tensors the file of a model must hold, in which shapes; every difference in a sentence."""

from collections.abc import Mapping
from types import MappingProxyType

from realizar_torch.checkpoint.gguf import TensorInfo
from realizar_torch.errors import MissingTensorsError
from realizar_torch.models.arch import QUERY_KEY_VALUE
from realizar_torch.models.config import ModelConfig

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
        "mlp.router": "ffn_gate_inp",
        "mlp.experts.gate_proj": "ffn_gate_exps",
        "mlp.experts.up_proj": "ffn_up_exps",
        "mlp.experts.down_proj": "ffn_down_exps",
        "mlp.shared_gate": "ffn_gate_inp_shexp",
        "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
        "mlp.shared_expert.up_proj": "ffn_up_shexp",
        "mlp.shared_expert.down_proj": "ffn_down_shexp",
        "post_mlp_norm": "post_ffw_norm",
    }
)
MODEL_TENSORS: Mapping[str, str] = MappingProxyType(
    {
        "embed_tokens": "token_embd",
        "embed_positions": "position_embd",
        "norm": "output_norm",
        "lm_head": "output",
    }
)
# q, k and v as one tensor, rows in this order, which files of any architecture may have in their place.
FUSED_QKV = "attn_qkv"
# Where it is present it feeds the attention, and attn_norm the MLP (Falcon 40B).
SECOND_NORM = "attn_norm_2"
# Divisors of the rotary frequencies: of Llama 3, and LongRoPE's for short and for long texts.
ROPE_DIVISORS = "rope_freqs.weight"
SHORT_DIVISORS, LONG_DIVISORS = "rope_factors_short.weight", "rope_factors_long.weight"

Shapes = dict[str, tuple[int, ...]]


def expected_shapes(config: ModelConfig, tensors: Mapping[str, TensorInfo]) -> tuple[Shapes, Shapes]:
    """Tensor name -> shape (rows first): those the architecture requires, and those it may have.

    ``tensors``: those of the file, which decide between layouts that mean the same.
    """
    hidden, vocab = config.hidden_size, config.vocab_size
    embedding, head = MODEL_TENSORS["embed_tokens"], MODEL_TENSORS["lm_head"]
    required: Shapes = {f"{embedding}.weight": (vocab, hidden)}
    optional: Shapes = {f"{head}.weight": (vocab, hidden)}
    (required if "lm_head" in config.arch.biases else optional)[f"{head}.bias"] = (vocab,)
    if config.arch.learned_positions:
        required[f"{MODEL_TENSORS['embed_positions']}.weight"] = (config.context_length, hidden)
    for name in (ROPE_DIVISORS, SHORT_DIVISORS, LONG_DIVISORS):
        optional[name] = (config.rotary_dim // 2,)
    _expect_norm(config, MODEL_TENSORS["norm"], (hidden,), required)
    for layer in range(config.num_layers):
        _expect_linears(config, layer, tensors, required, optional)
        _expect_norms(config, layer, tensors, required)
    return required, optional


def layer_names(layer: int, tensors: Mapping[str, TensorInfo]) -> dict[str, str]:
    """Module path inside a layer -> tensor name without its ending; q, k and v are one module where fused."""
    names = dict(LAYER_TENSORS)
    if f"blk.{layer}.{FUSED_QKV}.weight" in tensors:
        names = {module: name for module, name in names.items() if module not in QUERY_KEY_VALUE}
        names["self_attn.qkv_proj"] = FUSED_QKV
    if f"blk.{layer}.{SECOND_NORM}.weight" in tensors:
        names["attn_norm"], names["mlp_norm"] = SECOND_NORM, names["attn_norm"]
    return {module: f"blk.{layer}.{name}" for module, name in names.items()}


def has_mlp_norm(config: ModelConfig, layer: int, tensors: Mapping[str, TensorInfo]) -> bool:
    """Whether the MLP of a layer has a norm of its own in front of it."""
    name = LAYER_TENSORS["mlp_norm"] if config.arch.mlp_norm == "as in the file" else SECOND_NORM
    return config.arch.pre_norms and (
        config.arch.mlp_norm == "own" or f"blk.{layer}.{name}.weight" in tensors
    )


def has_experts(config: ModelConfig, layer: int, tensors: Mapping[str, TensorInfo]) -> bool:
    """Whether a layer has a mixture of experts: in a model with experts, all layers without a dense MLP."""
    return config.experts is not None and f"blk.{layer}.{LAYER_TENSORS['mlp.up_proj']}.weight" not in tensors


def has_qk_norm(config: ModelConfig, layer: int, tensors: Mapping[str, TensorInfo]) -> bool:
    """Whether q and k of a layer are normed."""
    name = LAYER_TENSORS["self_attn.q_norm"]
    optional = config.arch.qk_norm == "each head"
    return f"blk.{layer}.{name}.weight" in tensors if optional else config.arch.qk_norm is not None


def _expect_linears(
    config: ModelConfig, layer: int, tensors: Mapping[str, TensorInfo], required: Shapes, optional: Shapes
) -> None:
    hidden, inner, arch = config.hidden_size, config.intermediate_size, config.arch
    names, biased = layer_names(layer, tensors), set(arch.biases)
    shapes: Shapes = {"self_attn.o_proj": (hidden, config.q_dim)}
    if has_experts(config, layer, tensors):
        required |= {f"{names[module]}.weight": shape for module, shape in _expert_shapes(config).items()}
        gate = f"{names['mlp.shared_gate']}.weight"
        if gate in required and gate in tensors and len(tensors[gate].shape) == 1:
            # a matrix of one row, which some writers store as a vector
            required[gate] = (hidden,)
    else:
        shapes["mlp.up_proj"] = (2 * inner if arch.fused_gate_up else inner, hidden)
        shapes["mlp.down_proj"] = (hidden, inner)
        if arch.gated and not arch.fused_gate_up:
            shapes["mlp.gate_proj"] = (inner, hidden)
    if "self_attn.qkv_proj" in names:
        shapes["self_attn.qkv_proj"] = (config.q_dim + 2 * config.kv_dim, hidden)
        biased |= {"self_attn.qkv_proj"} if biased.intersection(QUERY_KEY_VALUE) else set()
    else:
        rows = (config.q_dim, config.kv_dim, config.kv_dim)
        shapes |= {module: (count, hidden) for module, count in zip(QUERY_KEY_VALUE, rows, strict=True)}
    for module, shape in shapes.items():
        required[f"{names[module]}.weight"] = shape
        (required if module in biased else optional)[f"{names[module]}.bias"] = shape[:1]


def _expert_shapes(config: ModelConfig) -> Shapes:
    hidden, experts = config.hidden_size, config.experts
    assert experts is not None
    count, inner, shared = experts.count, experts.inner_size, experts.shared_size
    shapes: Shapes = {
        "mlp.router": (count, hidden),
        "mlp.experts.gate_proj": (count, inner, hidden),
        "mlp.experts.up_proj": (count, inner, hidden),
        "mlp.experts.down_proj": (count, hidden, inner),
    }
    if shared:
        shapes["mlp.shared_gate"] = (1, hidden)
        shapes["mlp.shared_expert.gate_proj"] = shapes["mlp.shared_expert.up_proj"] = (shared, hidden)
        shapes["mlp.shared_expert.down_proj"] = (hidden, shared)
    return shapes


def _expect_norms(
    config: ModelConfig, layer: int, tensors: Mapping[str, TensorInfo], required: Shapes
) -> None:
    names, arch, head_dim = layer_names(layer, tensors), config.arch, config.head_dim
    present = {
        "attn_norm": arch.pre_norms,
        "mlp_norm": has_mlp_norm(config, layer, tensors),
        "post_attn_norm": arch.post_norms,
        "post_mlp_norm": arch.post_norms,
    }
    for module in (module for module, there in present.items() if there):
        _expect_norm(config, names[module], (config.hidden_size,), required)
    if has_qk_norm(config, layer, tensors):
        for module, heads in (("q_norm", config.num_heads), ("k_norm", config.num_kv_heads)):
            shapes = {"head": (head_dim,), "each head": (heads, head_dim), "whole": (heads * head_dim,)}
            required[f"{names[f'self_attn.{module}']}.weight"] = shapes[str(arch.qk_norm)]


def _expect_norm(config: ModelConfig, name: str, shape: tuple[int, ...], required: Shapes) -> None:
    required[f"{name}.weight"] = shape
    if has_norm_bias(config):
        required[f"{name}.bias"] = shape


def has_norm_bias(config: ModelConfig) -> bool:
    """Whether the norms of the residual stream have biases; those of q and k never do."""
    return config.arch.normalization == "layernorm" and config.arch.norm_bias


def tensor_problems(tensors: Mapping[str, TensorInfo], config: ModelConfig) -> list[str]:
    """One line for every missing, unexpected or misshapen tensor; empty if the model is complete."""
    if config.num_layers > len(tensors):
        return [f"block_count is {config.num_layers}, but the file has only {len(tensors)} tensors"]
    required, optional = expected_shapes(config, tensors)
    known = required | optional
    problems = [f"missing {name} {list(shape)}" for name, shape in required.items() if name not in tensors]
    problems += [f"unexpected {name}" for name in tensors if name not in known]
    problems += [
        f"{name} has shape {list(info.shape)}, expected {list(known[name])}"
        for name, info in tensors.items()
        if name in known and tuple(info.shape) != known[name]
    ]
    problems += [
        f"{name} is {info.fmt.name}, but norms and biases must be plain floats"
        for name, info in tensors.items()
        if name in known and info.fmt.packed and (len(known[name]) == 1 or "_norm" in name)
    ]
    return problems


def check_tensors(tensors: Mapping[str, TensorInfo], config: ModelConfig, source: str) -> None:
    """MissingTensorsError names the first problems and counts the rest."""
    problems = tensor_problems(tensors, config)
    if problems:
        shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise MissingTensorsError(f"{source} is no complete {config.arch.name} model: {shown}")
