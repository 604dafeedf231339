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
        "post_mlp_norm": "post_ffw_norm",
    }
)
MODEL_TENSORS: Mapping[str, str] = MappingProxyType(
    {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
)
# q, k and v as one tensor, rows in this order, which files of any architecture may have in their place.
FUSED_QKV = "attn_qkv"
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
    optional: Shapes = {f"{head}.weight": (vocab, hidden), f"{head}.bias": (vocab,)}
    for name in (ROPE_DIVISORS, SHORT_DIVISORS, LONG_DIVISORS):
        optional[name] = (config.rotary_dim // 2,)
    _expect_norm(config, MODEL_TENSORS["norm"], (hidden,), required)
    for layer in range(config.num_layers):
        _expect_layer(config, f"blk.{layer}.", tensors, required, optional)
    return required, optional


def _expect_layer(
    config: ModelConfig, prefix: str, tensors: Mapping[str, TensorInfo], required: Shapes, optional: Shapes
) -> None:
    hidden, inner, arch = config.hidden_size, config.intermediate_size, config.arch
    matrices: Shapes = {
        "self_attn.o_proj": (hidden, config.q_dim),
        "mlp.up_proj": (2 * inner if arch.fused_gate_up else inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    if not arch.fused_gate_up:
        matrices["mlp.gate_proj"] = (inner, hidden)
    names = {module: LAYER_TENSORS[module] for module in matrices}
    rows = dict(zip(QUERY_KEY_VALUE, (config.q_dim, config.kv_dim, config.kv_dim), strict=True))
    biased = set(arch.biases)
    if f"{prefix}{FUSED_QKV}.weight" in tensors:
        matrices["self_attn.qkv_proj"], names["self_attn.qkv_proj"] = (sum(rows.values()), hidden), FUSED_QKV
        biased |= {"self_attn.qkv_proj"} if biased & rows.keys() else set()
    else:
        matrices |= {module: (count, hidden) for module, count in rows.items()}
        names |= {module: LAYER_TENSORS[module] for module in rows}
    for module, shape in matrices.items():
        required[f"{prefix}{names[module]}.weight"] = shape
        (required if module in biased else optional)[f"{prefix}{names[module]}.bias"] = shape[:1]

    norms: Shapes = {}
    if arch.pre_norms:
        norms |= {"attn_norm": (hidden,), "mlp_norm": (hidden,)}
    if arch.post_norms:
        norms |= {"post_attn_norm": (hidden,), "post_mlp_norm": (hidden,)}
    if arch.qk_norm == "head":
        norms |= {"self_attn.q_norm": (config.head_dim,), "self_attn.k_norm": (config.head_dim,)}
    if arch.qk_norm == "whole":
        norms |= {"self_attn.q_norm": (config.q_dim,), "self_attn.k_norm": (config.kv_dim,)}
    for module, shape in norms.items():
        _expect_norm(config, prefix + LAYER_TENSORS[module], shape, required)


def _expect_norm(config: ModelConfig, name: str, shape: tuple[int, ...], required: Shapes) -> None:
    required[f"{name}.weight"] = shape
    if config.arch.normalization == "layernorm":
        required[f"{name}.bias"] = shape


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
        if name in known and len(known[name]) == 1 and info.fmt.packed
    ]
    return problems


def check_tensors(tensors: Mapping[str, TensorInfo], config: ModelConfig, source: str) -> None:
    """MissingTensorsError names the first problems and counts the rest."""
    problems = tensor_problems(tensors, config)
    if problems:
        shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise MissingTensorsError(f"{source} is no complete {config.arch.name} model: {shown}")
