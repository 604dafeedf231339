"""From config.json to our config and from ours to transformers': what is left out means the same."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, FalconConfig, Qwen2Config, Qwen3Config

from realizar_torch.checkpoint.gguf import open_gguf
from realizar_torch.hf.architectures import get_architecture
from realizar_torch.hf.config import read_config
from realizar_torch.models.config import ModelConfig
from realizar_torch.models.hf_config import HF_MODELS, gguf_metadata

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "max_position_embeddings": 128,
}


def read(model_type: str, **config: Any) -> dict[str, Any]:
    """The metadata without the architecture in front."""
    metadata = gguf_metadata({"model_type": model_type, **SIZES, **config}, "config.json")
    return {key.partition(".")[2]: value for key, value in metadata.items()}


@pytest.mark.parametrize("model_type", HF_MODELS)
def test_heads_are_tied_where_nothing_is_said(model_type: str) -> None:
    assert HF_MODELS[model_type].tied == CONFIG_MAPPING[model_type]().tie_word_embeddings


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, 1),
        ({"multi_query": False}, 6),
        ({"multi_query": True, "num_kv_heads": 3}, 1),
        ({"new_decoder_architecture": True, "num_kv_heads": 3}, 3),
    ],
)
def test_key_heads_of_falcon(flags: dict[str, Any], expected: int) -> None:
    """Its own config names as many as there are queries, unless one is shared by all."""
    config = FalconConfig(**SIZES, **flags)
    shared = config.multi_query and not config.new_decoder_architecture
    assert expected == (1 if shared else config.num_kv_heads)
    flags = {"new_decoder_architecture": False, **flags}
    assert read("falcon", **flags)["attention.head_count_kv"] == expected


@pytest.mark.parametrize("first", [0, 2, 5])
def test_layers_with_a_window_of_old_configs(first: int) -> None:
    """Before transformers had ``layer_types``: from ``max_window_layers`` on."""
    stated = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": first}
    pattern = [kind == "sliding_attention" for kind in Qwen2Config(**SIZES, **stated).layer_types]
    assert read("qwen2", **stated)["attention.sliding_window_pattern"] == pattern
    assert "attention.sliding_window" not in read("qwen2", **stated | {"use_sliding_window": False})


def test_a_window_that_no_row_knows_ends_the_context() -> None:
    """Qwen3 models have none; one that had would see too much behind it."""
    stated = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
    assert Qwen3Config(**SIZES, **stated).sliding_window == 8
    metadata = read("qwen3", **stated)
    assert metadata["context_length"] == 8 and "attention.sliding_window" not in metadata


@pytest.mark.parametrize(("name", "layers"), [("gemma2", 46), ("gemma2", 45), ("gemma3", 62), ("gemma3", 48)])
def test_the_largest_gemmas_scale_attention_by_their_width(name: str, layers: int) -> None:
    """No key tells; our own model and transformers' have to come to the same factor."""
    file = open_gguf(Path(__file__).parent / "fixtures" / f"{name}.gguf")
    metadata = {**file.metadata, f"{name}.block_count": layers}
    more = dict.fromkeys(map(str, range(layers)), next(iter(file.tensors.values())))
    source: Any = SimpleNamespace(
        path=file.path, metadata=metadata, tensors={**file.tensors, **more}, read=file.read
    )
    ours, theirs = ModelConfig.from_gguf(metadata), read_config(source, get_architecture(name, ""), {}, {})
    assert ours.attention_scale == pytest.approx(theirs.query_pre_attn_scalar**-0.5)
    wide = layers in (46, 62)
    expected = ours.hidden_size // ours.num_heads if wide else ours.head_dim
    assert theirs.query_pre_attn_scalar == expected != (ours.head_dim if wide else 0)
