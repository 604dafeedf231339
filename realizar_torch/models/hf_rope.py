"""RoPE as config.json states it, in any spelling of the years: entries for the table of keys; divisors."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from realizar_torch.checkpoint.gguf_errors import damaged, shown
from realizar_torch.errors import UnsupportedArchitectureError

# transformers' word -> GGUF's; Llama 3's scaling is a tensor of divisors there
_KINDS = {
    "default": None,
    "llama3": None,
    "linear": "linear",
    "yarn": "yarn",
    "longrope": "longrope",
    "su": "longrope",
}
# entries that would change the result and are not here are refused
_KNOWN = {
    "rope_theta",
    "rope_type",
    "type",
    "factor",
    "original_max_position_embeddings",
    # written by Ministral3Config, read by nobody
    "max_position_embeddings",
    "partial_rotary_factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "low_freq_factor",
    "high_freq_factor",
    "short_factor",
    "long_factor",
    "mscale",
    "mscale_all_dim",
    "llama_4_scaling_beta",
}

_ORIGINAL = "original_max_position_embeddings"


def rope_entries(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Entries ``rope.*`` (layers with global attention) and ``rope_local.*`` (with a sliding window) of a
    completed config (``HFModel.complete``).

    ``rope.kind`` is GGUF's word for the scaling, absent where there is none; ``rope.magnitude`` (LongRoPE)
    and ``rope.yarn_magnitude`` are factors on cos and sin. CheckpointError for entries of the wrong kind,
    UnsupportedArchitectureError for a scaling that is not implemented.
    """
    rope, local = _parameters(config, source)
    kind = _kind(rope)
    unknown = sorted((rope.keys() | local.keys()) - _KNOWN)
    if _KINDS.get(kind) is None and "llama_4_scaling_beta" in rope:
        unknown.append("llama_4_scaling_beta")
    if kind not in _KINDS or unknown:
        what = f"entry {shown(unknown[0])}" if unknown else f"scaling {shown(str(kind))}"
        raise UnsupportedArchitectureError(
            f"{source}: RoPE {what} is not supported; supported: {', '.join(_KINDS)}"
        )
    entries = {f"rope_local.{key}": value for key, value in local.items() if value is not None}
    for key in ("rope_theta", "partial_rotary_factor"):
        if rope.get(key) is not None:
            entries[f"rope.{key}"] = rope[key]
    if _KINDS[kind] is None:
        return entries
    entries |= {f"rope.{key}": value for key, value in rope.items() if value is not None}
    entries["rope.kind"] = _KINDS[kind]
    with _expecting_numbers(source):
        entries["rope.original_max_position_embeddings"] = _original_length(config, rope)
        if entries["rope.kind"] == "longrope":
            entries["rope.magnitude"] = _longrope_magnitude(config, rope)
            entries.pop("rope.factor", None)
        if entries["rope.kind"] == "yarn":
            entries["rope.yarn_magnitude"] = _yarn_magnitude(rope)
    return entries


def rope_divisors(config: Mapping[str, Any], rotary_dim: int, source: str) -> dict[str, list[float]]:
    """The tensors of rotary divisors that a converter would add, by GGUF name (Llama 3's and LongRoPE's), for
    a completed config."""
    rope, _ = _parameters(config, source)
    kind = _kind(rope)
    with _expecting_numbers(source):
        if kind == "llama3":
            return {"rope_freqs.weight": _llama3_divisors(config, rope, rotary_dim)}
        if _KINDS.get(kind) == "longrope":
            return {
                f"rope_factors_{name}.weight": [float(value) for value in rope[f"{name}_factor"]]
                for name in ("long", "short")
            }
    return {}


@contextmanager
def _expecting_numbers(source: str) -> Iterator[None]:
    """Arithmetic on entries as they were found: what it stumbles over is a CheckpointError."""
    try:
        yield
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        found = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise damaged(source, "RoPE entries", found, "the numbers of its kind") from None


def _parameters(config: Mapping[str, Any], source: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """What is stated for layers with global attention and for those with a sliding window.

    Older files state it among the other entries, which still count for what ``rope_parameters`` leaves out.
    """
    theta = config.get("rope_theta", config.get("rotary_emb_base"))
    own = {} if theta is None else {"rope_theta": theta}
    scaling = _object(config, "rope_scaling", source)
    stated = _object(config, "rope_parameters", source)
    # the rows of Gemma 3 and OLMo 3 always have it: their layers with a window have a RoPE of their own
    if "rope_local_base_freq" in config or "full_attention" in stated:
        local = {"rope_theta": config["rope_local_base_freq"]} if "rope_local_base_freq" in config else own
        full = _object(stated, "full_attention", source) or {"rope_type": "default"}
        return {**own, **full, **scaling}, {**local, **_object(stated, "sliding_attention", source)}
    # beside the others it counts before what stands among them (Phi-3)
    original = {_ORIGINAL: config[_ORIGINAL]} if _ORIGINAL in config else {}
    return {**own, **(scaling or stated), **original}, {}


def _object(config: Mapping[str, Any], name: str, source: str) -> Mapping[str, Any]:
    """The object under ``name``; empty where there is none, or null."""
    value = config.get(name)
    if not isinstance(value, dict | None):
        raise damaged(source, f"entry {name!r}", f"{value!r:.40}", "an object")
    return value or {}


def _kind(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type", rope.get("type", "default")))


def _original_length(config: Mapping[str, Any], rope: Mapping[str, Any]) -> int:
    return rope.get(_ORIGINAL) or config["max_position_embeddings"]


def _longrope_magnitude(config: Mapping[str, Any], rope: Mapping[str, Any]) -> float:
    """transformers' _compute_longrope_parameters: sqrt(1 + ln(stretch) / ln(original length))."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    original = _original_length(config, rope)
    stretch = config["max_position_embeddings"] / original
    return math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0


def _yarn_magnitude(rope: Mapping[str, Any]) -> float:
    """transformers' _compute_yarn_parameters: 1 + 0.1·mscale·ln(factor), over the same of mscale_all_dim."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])

    def magnitude(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope["factor"]) + 1.0 if rope["factor"] > 1 else 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return magnitude(rope["mscale"]) / magnitude(rope["mscale_all_dim"])
    return magnitude(1.0)


def _llama3_divisors(config: Mapping[str, Any], rope: Mapping[str, Any], rotary_dim: int) -> list[float]:
    """transformers' _compute_llama3_parameters: frequencies that turn less than ``low_freq_factor`` times in
    the original context are divided by ``factor``, those of more than ``high_freq_factor`` turns stay, with a
    ramp between the two."""
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    divisors = []
    for pair in range(rotary_dim // 2):
        frequency = rope.get("rope_theta", 10000.0) ** (-2 * pair / rotary_dim)
        turns = _original_length(config, rope) * frequency / (2 * math.pi)
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        divisors.append(1 / ((1 - smooth) / factor + smooth))
    return divisors
