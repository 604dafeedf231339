"""transformers' config.json as GGUF metadata: one row per key (hf_models.py has one per kind of model).

The keys and their meaning are those that llama.cpp's converter writes (conversion/base.py), so that a
directory and the GGUF file made from it describe the same model.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from realizar_torch.checkpoint.gguf_errors import damaged, shown
from realizar_torch.errors import UnsupportedArchitectureError
from realizar_torch.models.arch import ArchSpec, get_arch
from realizar_torch.models.hf_models import HF_MODELS, HFModel
from realizar_torch.models.hf_rope import rope_entries
from realizar_torch.models.metadata import LARGEST_INT, MOST_LAYERS

Config = Mapping[str, Any]

_ACTIVATIONS = {"silu": ("silu", "swish"), "gelu": ("gelu",), "gelu_tanh": ("gelu_pytorch_tanh", "gelu_new")}
# More elements than any head has; it bounds the list of their frequencies.
_LARGEST_HEAD = 1 << 16
# Flags of which no row knows the other value, and which would change the result.
_FLAGS = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "parallel_attn": True,
    "alibi": False,
    "use_bidirectional_attention": False,
}


def text_config(config: Config) -> Config:
    """The part about the language model: all of it, or ``text_config`` of a model that also sees or hears."""
    part = config.get("text_config")
    return {**config, **part} if isinstance(part, dict) else config


def find_hf_model(config: Config, source: str) -> HFModel:
    """The row of ``model_type``; UnsupportedArchitectureError lists the known ones."""
    kind = str(config.get("model_type"))
    if kind not in HF_MODELS:
        raise UnsupportedArchitectureError(
            f"{source}: model_type {shown(kind)} is not supported; supported: {', '.join(HF_MODELS)}"
        )
    if "quantization_config" in config:
        stated = config["quantization_config"]
        method = stated.get("quant_method") if isinstance(stated, dict) else stated
        raise UnsupportedArchitectureError(
            f"{source}: the weights are already quantized ({shown(str(method))}); "
            "take the model in bf16 or fp16, or as a GGUF file"
        )
    return HF_MODELS[kind]


def gguf_metadata(config: Config, source: str) -> dict[str, Any]:
    """The metadata a converter would write for ``config``, without the tokenizer's.

    CheckpointError for an entry that is missing or cannot be right, UnsupportedArchitectureError for a model
    or feature that is not implemented.
    """
    model = find_hf_model(config, source)
    spec = get_arch(model.arch, source)
    config = model.complete(config)
    config |= rope_entries(config, source)
    if not {"partial_rotary_factor", "rotary_pct"} & set(model.reads):
        config.pop("rope.partial_rotary_factor", None)
    _check_conventions(config, spec, model, source)
    metadata: dict[str, Any] = {"general.architecture": model.arch}
    for key, read in _ROWS.items():
        try:
            value = read(config)
        except (TypeError, ValueError, ZeroDivisionError, AttributeError, OverflowError) as error:
            raise damaged(source, f"entries for {key!r}", f"{error}", "numbers") from None
        if value is not None:
            metadata[f"{model.arch}.{key}"] = value
        elif key in _REQUIRED:
            raise damaged(source, "entries", f"none for {key!r}", _REQUIRED[key])
    if not spec.sliding_pattern:
        metadata = _within_window(metadata, model.arch)
    return metadata


def _head_dim(config: Config) -> int | None:
    """Elements of one head, stated or hidden size over heads."""
    stated, hidden, heads = _int_of("head_dim")(config), _hidden(config), _heads(config)
    size = stated if stated is not None or not hidden or not heads else hidden // heads
    if size is not None and size > _LARGEST_HEAD:
        raise ValueError(f"heads of {size} elements")
    return size


def _first(config: Config, *names: str) -> Any:
    return next((config[name] for name in names if name in config), None)


def _int_of(*names: str) -> Callable[[Config], int | None]:
    def read(config: Config) -> int | None:
        value = _first(config, *names)
        if value is not None and (type(value) is not int or not 1 <= value <= LARGEST_INT):
            raise ValueError(f"{names[0]} = {value!r:.40}")
        return value

    return read


_layers = _int_of("num_hidden_layers", "n_layer")
_hidden = _int_of("hidden_size", "n_embd")
_heads = _int_of("num_attention_heads", "n_head")


def _inner(config: Config) -> int | None:
    """Stated, or four times the width, as GPT-2 and Falcon leave out."""
    stated, hidden = _int_of("intermediate_size", "n_inner", "ffn_hidden_size")(config), _hidden(config)
    return stated if stated is not None or hidden is None else 4 * hidden


def _kv_heads(config: Config) -> int | None:
    """Falcon names its key heads only where ``new_decoder_architecture`` is set."""
    if "new_decoder_architecture" in config and not config["new_decoder_architecture"]:
        return 1 if config.get("multi_query", True) else _heads(config)
    return _int_of("num_key_value_heads", "num_kv_heads")(config)


def _number(name: str, value: Any) -> float:
    if type(value) not in (int, float):
        raise ValueError(f"{name} = {value!r:.40}")
    return float(value)


def _float_of(*names: str) -> Callable[[Config], float | None]:
    def read(config: Config) -> float | None:
        value = _first(config, *names)
        return None if value is None else _number(names[0], value)

    return read


def _factor_of(*names: str) -> Callable[[Config], float | None]:
    """In GGUF a factor of 0 is none at all."""

    def read(config: Config) -> float | None:
        value = _float_of(*names)(config)
        if value == 0:
            raise ValueError(f"{names[0]} = 0")
        return value

    return read


def _rotary_dim(config: Config) -> int | None:
    size, part = _head_dim(config), _float_of(*_PARTIAL)(config)
    return size if size is None or part is None else int(size * part)


def _window(config: Config) -> int | None:
    """The sliding window, where any layer has one."""
    kinds, used = config.get("layer_types", ["sliding_attention"]), config.get("use_sliding_window", True)
    if not isinstance(kinds, list) or not isinstance(used, bool):
        raise ValueError(f"layer_types = {kinds!r:.40}, use_sliding_window = {used!r:.40}")
    return config.get("sliding_window") if used and "sliding_attention" in kinds else None


def _window_pattern(config: Config) -> Any:
    """Which layers have it: a flag for each, or the period of which the last sees everything."""
    if "layer_types" in config:
        return [kind == "sliding_attention" for kind in config["layer_types"]] if _window(config) else None
    if "max_window_layers" in config:
        layers = min(_layers(config) or 0, MOST_LAYERS)
        return [layer >= config["max_window_layers"] for layer in range(layers)]
    return config.get("sliding_window_pattern")


def _attention_scale(config: Config) -> float | None:
    scalar = _float_of("query_pre_attn_scalar")(config)
    if scalar is None:
        return _factor_of("attention_multiplier")(config)
    if scalar <= 0:
        raise ValueError(f"query_pre_attn_scalar = {scalar:g}")
    return scalar**-0.5


_PARTIAL = ("rope.partial_rotary_factor", "partial_rotary_factor", "rotary_pct")
# GGUF key behind the architecture's name -> its value; None: the key is left out
_ROWS: Mapping[str, Callable[[Config], Any]] = MappingProxyType(
    {
        "block_count": _layers,
        "context_length": _int_of("max_position_embeddings", "n_positions", "n_ctx"),
        "embedding_length": _hidden,
        "feed_forward_length": _inner,
        "vocab_size": _int_of("vocab_size"),
        "attention.head_count": _heads,
        "attention.head_count_kv": _kv_heads,
        "attention.key_length": _head_dim,
        "attention.value_length": _head_dim,
        "attention.layer_norm_rms_epsilon": _float_of("rms_norm_eps"),
        "attention.layer_norm_epsilon": _float_of("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
        "attention.scale": _attention_scale,
        "attention.temperature_scale": _float_of("rope.llama_4_scaling_beta"),
        "attention.sliding_window": _window,
        "attention.sliding_window_pattern": _window_pattern,
        "attn_logit_softcapping": _float_of("attn_logit_softcapping"),
        "final_logit_softcapping": _float_of("final_logit_softcapping"),
        "logit_scale": _factor_of("logit_scale", "logits_scaling"),
        "embedding_scale": _factor_of("embedding_multiplier"),
        "residual_scale": _factor_of("residual_multiplier"),
        "use_parallel_residual": lambda config: config.get("use_parallel_residual"),
        "expert_count": _int_of("num_local_experts", "num_experts"),
        "expert_used_count": _int_of("num_experts_per_tok"),
        "expert_feed_forward_length": _int_of("moe_intermediate_size"),
        "expert_shared_feed_forward_length": _int_of("shared_expert_intermediate_size"),
        "expert_weights_norm": lambda config: config.get("norm_topk_prob"),
        "rope.dimension_count": _rotary_dim,
        "rope.freq_base": _float_of("rope.rope_theta"),
        "rope.freq_base_swa": _float_of("rope_local.rope_theta"),
        "rope.scaling.type": lambda config: config.get("rope.kind"),
        "rope.scaling.factor": _float_of("rope.factor"),
        "rope.scaling.original_context_length": _int_of("rope.original_max_position_embeddings"),
        "rope.scaling.attn_factor": _float_of("rope.magnitude"),
        "rope.scaling.yarn_attn_factor": _float_of("rope.yarn_magnitude"),
        "rope.scaling.yarn_beta_fast": _float_of("rope.beta_fast"),
        "rope.scaling.yarn_beta_slow": _float_of("rope.beta_slow"),
    }
)
_REQUIRED = {
    "block_count": "'num_hidden_layers'",
    "embedding_length": "'hidden_size'",
    "attention.head_count": "'num_attention_heads'",
    "context_length": "'max_position_embeddings'",
    "vocab_size": "'vocab_size'",
}


def _check_conventions(config: Config, spec: ArchSpec, model: HFModel, source: str) -> None:
    """UnsupportedArchitectureError for what the row takes for granted and this model does otherwise."""
    others = [flag for flag, expected in _FLAGS.items() if config.get(flag, expected) != expected]
    if others:
        found = ", ".join(f"{flag} = {config[flag]!r:.40}" for flag in others)
        known = ", ".join(f"{flag} = {_FLAGS[flag]}" for flag in others)
        raise UnsupportedArchitectureError(f"{source}: {found} is not supported, only {known}")
    rotary = config.get("no_rope_layers", [])
    if not isinstance(rotary, list):
        raise damaged(source, "entry 'no_rope_layers'", f"{rotary!r:.40}", "a list")
    pattern = [spec.rotary_pattern[layer % len(spec.rotary_pattern)] for layer in range(len(rotary))]
    if [bool(flag) for flag in rotary] != pattern:
        raise UnsupportedArchitectureError(f"{source}: no_rope_layers {rotary} are not supported")
    stated = _first(config, "hidden_activation", "hidden_act", "activation_function", "activation")
    if stated is not None and stated not in (*_ACTIVATIONS[spec.activation], *model.activations):
        raise UnsupportedArchitectureError(
            f"{source}: activation {shown(str(stated))} is not supported for {spec.name}; "
            f"supported: {', '.join(_ACTIVATIONS[spec.activation])}"
        )


def _within_window(metadata: dict[str, Any], arch: str) -> dict[str, Any]:
    """Without window keys; positions end at the window, since beyond it these models would see too much."""
    window = metadata.pop(f"{arch}.attention.sliding_window", None)
    pattern = metadata.pop(f"{arch}.attention.sliding_window_pattern", None)
    if window and (not isinstance(pattern, list) or any(pattern)):
        metadata[f"{arch}.context_length"] = min(metadata[f"{arch}.context_length"], window)
    return metadata
