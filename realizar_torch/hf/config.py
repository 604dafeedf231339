"""From the metadata of a GGUF file to the transformers config of its model."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig

from realizar_torch.checkpoint.gguf_errors import shown_path
from realizar_torch.checkpoint.source import ModelSource
from realizar_torch.errors import (
    FormatError,
    GGUFError,
    MissingTensorsError,
    RealizarError,
    UnsupportedArchitectureError,
)
from realizar_torch.hf.architectures import SIZES, Architecture
from realizar_torch.models.arch import get_arch
from realizar_torch.models.config import check_value_length, one_in, read_rotary_dim
from realizar_torch.models.metadata import Keys
from realizar_torch.models.rope_scaling import read_rope_scaling

# Tensors that say how positions are rotated; the config carries what they say.
ROPE_DIVISORS = "rope_freqs.weight"
SHORT_DIVISORS, LONG_DIVISORS = "rope_factors_short.weight", "rope_factors_long.weight"
ROPE_TENSORS = (ROPE_DIVISORS, SHORT_DIVISORS, LONG_DIVISORS)

# Keys that change the result, unless they have one of these values; a row names those that its model knows.
_MATHEMATICS: Mapping[str, tuple[float, ...]] = MappingProxyType(
    {
        "attn_logit_softcapping": (0,),
        "final_logit_softcapping": (0,),
        "logit_scale": (0, 1),
        "residual_scale": (0, 1),
        "embedding_scale": (0, 1),
        "attention.scale": (0,),
        "attention.temperature_scale": (0,),
        "attention.clamp_kqv": (0,),
        "attention.max_alibi_bias": (0,),
        "attention.sliding_window": (0,),
        "expert_count": (0,),
    }
)
# Llama 3's stretching (transformers' rope_type "llama3"): what every published model has.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def read_config(
    file: ModelSource, row: Architecture, special_ids: Mapping[str, Any], replaced: Mapping[str, Any]
) -> PreTrainedConfig:
    """The config of the model in ``file``.

    ``special_ids``: bos_token_id, eos_token_id and pad_token_id; there is none where one is missing.
    ``replaced``: fields whose value is not the file's; FormatError if the config has no such field, or
    refuses the value.
    GGUFError names a key that is missing or impossible, UnsupportedArchitectureError a feature that the
    transformers model has not, MissingTensorsError a tensor that sizes are read from.
    """
    source = shown_path(file.path)
    keys = Keys(file.metadata, row.name, source)
    _refuse_other_mathematics(keys, row)
    if "token_embd.weight" not in file.tensors:
        raise MissingTensorsError(f"{source}: missing token_embd.weight, the table of embeddings")

    sizes = _sizes(keys)
    if (layers := sizes["num_hidden_layers"]) > len(file.tensors):
        # transformers makes lists of that length
        raise MissingTensorsError(
            f"{source}: block_count is {layers}, but the file has only {len(file.tensors)} tensors"
        )
    names = {name: row.renamed.get(name, name) for name in sizes}
    fields: dict[str, Any] = {name: sizes[size] for size, name in names.items() if name is not None}
    fields[row.epsilon[0]] = keys.positive(row.epsilon[1], kind=float)
    for name, (key, default) in row.numbers.items():
        value = keys.optional(key, bool if isinstance(default, bool) else float, None)
        if not value and value is not False:
            value = default(sizes) if callable(default) else default
        fields[name] = value
    for name, cap in row.softcaps.items():
        fields[name] = keys.optional(name, float, cap) or None
    told = keys.optional("attention.sliding_window", int, row.sliding_window)
    window = replaced.get("sliding_window", told) or None
    model_type = row.windowed_type if window and row.windowed_type else row.model_type
    config_class = CONFIG_MAPPING[model_type]
    if model_type == row.windowed_type or not row.windowed_type:
        fields |= _windows(keys, window, layers, config_class)
    for name, tensor in row.flags.items():
        fields[name] = (tensor.removeprefix("!") in file.tensors) != tensor.startswith("!")
    if row.query_scalar is not None:
        wide = layers == row.query_scalar
        by_width = sizes["hidden_size"] // sizes["num_attention_heads"]
        fields["query_pre_attn_scalar"] = by_width if wide else sizes["head_dim"]
    if row.rope_theta is not None:
        fields |= _rope(file, keys, row, sizes, config_class)
    fields |= {name: special_ids.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    fields["vocab_size"] = file.tensors["token_embd.weight"].shape[0]
    fields["tie_word_embeddings"] = "output.weight" not in file.tensors
    for name in replaced:
        if name not in fields and not hasattr(config_class, str(name)):
            raise FormatError(f"config has {name!r}, which is no field of {config_class.__name__}")
    with refusals(source, config=replaced):
        return config_class(**fields | dict(replaced))


@contextmanager
def refusals(source: str, **arguments: Any) -> Iterator[None]:
    """What transformers says against its settings: a FormatError that names the ``arguments``, or a GGUFError
    where none was given and all settings are the file's."""
    try:
        yield
    except RealizarError:
        raise
    # there is no class that all its refusals share
    except Exception as error:
        given = ", ".join(f"{name}={value!r:.200}" for name, value in arguments.items() if value)
        reason = " ".join(str(error).split())
        if given:
            raise FormatError(f"{source}: transformers refuses {given}: {reason}") from error
        raise GGUFError(
            f"{source}: transformers refuses what the file says of its model: {reason}"
        ) from error


def _sizes(keys: Keys) -> dict[str, int]:
    heads = keys.positive("attention.head_count")
    defaults = {
        "num_key_value_heads": heads,
        "head_dim": keys.positive("embedding_length") // heads,
    }
    sizes = {name: keys.positive(key, default=defaults.get(name)) for name, key in SIZES.items()}
    check_value_length(keys, sizes["head_dim"])
    return sizes


def _windows(keys: Keys, window: int | None, layers: int, config_class: Any) -> dict[str, Any]:
    """The sliding window, and which layers have it if the file says so; else the config's pattern holds."""
    if not hasattr(config_class, "sliding_window"):
        return {}
    pattern = keys.flags("attention.sliding_window_pattern") if window else (False,)
    if pattern is None or (window is None and not hasattr(config_class, "layer_types")):
        return {"sliding_window": window}
    if not hasattr(config_class, "layer_types"):
        raise UnsupportedArchitectureError(
            f"{keys.source}: attention.sliding_window_pattern is not supported in {config_class.model_type}"
        )
    if isinstance(pattern, int):
        pattern = one_in(pattern)
    kinds = ("full_attention", "sliding_attention")
    types = [kinds[pattern[layer % len(pattern)]] for layer in range(layers)]
    return {"sliding_window": window, "layer_types": types}


def _refuse_other_mathematics(keys: Keys, row: Architecture) -> None:
    read = {key for key, _ in row.numbers.values()} | row.softcaps.keys()
    read |= {"attention.sliding_window"} if row.sliding_window is not None else set()
    for name, neutral in _MATHEMATICS.items():
        value = keys.optional(name, float, 0)
        if name == "embedding_scale" and get_arch(row.name, keys.source).scale_embedding:
            # 1 would be another scale than the model's own
            neutral = (0,)
        if name not in read and value not in neutral:
            raise UnsupportedArchitectureError(
                f"{keys.source}: {row.name}.{name} = {value:g} has no counterpart in transformers' "
                f"{row.model_type}"
            )
    if not keys.optional("attention.causal", bool, True):
        raise UnsupportedArchitectureError(f"{keys.source}: attention that is not causal is not supported")


def _rope(
    file: ModelSource, keys: Keys, row: Architecture, sizes: dict[str, int], config_class: Any
) -> dict[str, Any]:
    """The config's ``rope_parameters``, and ``original_max_position_embeddings`` where it has a say."""
    assert row.rope_theta is not None
    theta = keys.positive("rope.freq_base", default=row.rope_theta, kind=float)
    rotated = read_rotary_dim(keys, sizes["head_dim"])
    scaling = read_rope_scaling(keys, theta)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if row.partial_rotary:
        # also a whole head: the config classes have parts of their own
        rope["partial_rotary_factor"] = rotated / sizes["head_dim"]
    elif rotated != sizes["head_dim"]:
        raise UnsupportedArchitectureError(
            f"{keys.source}: {row.name}.rope.dimension_count = {rotated} has no counterpart in "
            f"transformers' {row.model_type}, which rotates whole heads, {sizes['head_dim']} elements"
        )
    divided = next((name for name in ROPE_TENSORS if name in file.tensors), None)
    if divided is not None and (scaling.factor != 1.0 or scaling.yarn != 1.0):
        raise UnsupportedArchitectureError(
            f"{keys.source}: {divided} and {row.name}.rope.scaling.factor at once is not supported"
        )
    if divided == ROPE_DIVISORS:
        rope |= stretched(_divisors(file, ROPE_DIVISORS), theta, rotated, sizes["max_position_embeddings"])
    elif divided is not None:
        rope |= {
            "rope_type": "longrope",
            "short_factor": _divisors(file, SHORT_DIVISORS),
            "long_factor": _divisors(file, LONG_DIVISORS),
            "attention_factor": scaling.magnitude,
            "original_max_position_embeddings": scaling.original_length,
        }
    elif scaling.yarn != 1.0:
        rope |= {
            "rope_type": "yarn",
            "factor": scaling.yarn,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "attention_factor": scaling.magnitude,
            "original_max_position_embeddings": scaling.original_length,
        }
    elif scaling.factor != 1.0:
        rope |= {"rope_type": "linear", "factor": scaling.factor}
    if scaling.magnitude != 1.0 and rope.get("attention_factor") != scaling.magnitude:
        raise UnsupportedArchitectureError(
            f"{keys.source}: {row.name}.rope.scaling.attn_factor is not supported"
        )
    two = row.windowed_type is None or config_class.model_type == row.windowed_type
    if row.local_rope_theta is not None and two:
        local = keys.positive("rope.freq_base_swa", default=row.local_rope_theta or theta, kind=float)
        sliding = {"rope_type": "default", "rope_theta": local}
        return {"rope_parameters": {"full_attention": rope, "sliding_attention": sliding}}
    fields: dict[str, Any] = {"rope_parameters": rope}
    if hasattr(config_class, "original_max_position_embeddings"):
        fields["original_max_position_embeddings"] = scaling.original_length
    return fields


def _divisors(file: ModelSource, name: str) -> list[float]:
    if name not in file.tensors:
        raise MissingTensorsError(f"{shown_path(file.path)}: missing {name}, one of two sets of RoPE factors")
    divisors = file.read(name).double()
    if not bool((divisors.isfinite() & (divisors > 0)).all()):
        raise GGUFError(f"{shown_path(file.path)}: {name} holds values that are not positive and finite")
    return list(divisors.tolist())


def stretched(divisors: list[float], theta: float, rotated: int, context: int) -> dict[str, Any]:
    """The parameters that give these divisors of the frequencies: Llama 3's, or a list like LongRoPE's.

    The list would do for both, but transformers looks at positions to choose between two lists, which breaks
    compiled graphs.
    """
    factor = max(divisors)
    if len(divisors) == rotated // 2 and torch.allclose(
        torch.tensor(divisors), torch.tensor(llama3_divisors(factor, theta, rotated)), rtol=1e-5, atol=0.0
    ):
        return {"rope_type": "llama3", "factor": factor} | _LLAMA3
    return {
        "rope_type": "longrope",
        "short_factor": divisors,
        "long_factor": divisors,
        "attention_factor": 1.0,
        "original_max_position_embeddings": context,
    }


def llama3_divisors(factor: float, theta: float, rotated: int) -> list[float]:
    """Frequencies slower than one turn per 8192 positions are divided by ``factor``, those faster than four
    are kept, and in between the two are blended (Llama 3.1's ``apply_scaling``)."""
    low, high, length = (_LLAMA3[name] for name in _LLAMA3)
    result = []
    for i in range(rotated // 2):
        turns = length * theta ** (-2 * i / rotated) / (2 * math.pi)
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        result.append(1.0 / ((1.0 - kept) / factor + kept))
    return result
