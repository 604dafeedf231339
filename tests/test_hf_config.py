"""From config.json to our config and from ours to transformers': what is left out means the same."""

import copy
import inspect
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from fixture_models import COMMON, MODELS
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, FalconConfig, Qwen2Config, Qwen3Config

from realizar_torch import errors
from realizar_torch.checkpoint.gguf import open_gguf
from realizar_torch.hf.architectures import get_architecture
from realizar_torch.hf.config import read_config
from realizar_torch.models.config import ModelConfig
from realizar_torch.models.hf_config import gguf_metadata
from realizar_torch.models.hf_models import HF_MODELS, SOME_READ
from realizar_torch.models.hf_rope import rope_divisors

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


def modeling(model_type: str) -> Any:
    """The module of transformers that holds the model."""
    return inspect.getmodule(MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[model_type]])


# Named without effect: a cap that attention never uses, what the vision tower has, what only warns.
IN_VAIN = {
    ("gemma3_text", "attn_logit_softcapping"),
    ("gemma3_text", "layer_norm_eps"),
    ("mistral", "layer_types"),
    ("ministral3", "layer_types"),
    # says which layers have the window; ours end at it in any case
    ("qwen2_moe", "max_window_layers"),
    # an entry of ``rope_parameters`` only
    ("gpt_neox", "partial_rotary_factor"),
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
HALF = {"partial_rotary_factor": 0.5}
# a size that is left out is not the one that a tensor's shape shows, and refused for that
SHOWN_BY_TENSORS = {
    "intermediate_size",
    "num_key_value_heads",
    "head_dim",
    "new_decoder_architecture",
    "num_local_experts",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
}


def read_all(config: dict[str, Any]) -> dict[str, Any]:
    """The model's config as values that can be compared: a window for each layer."""
    metadata = gguf_metadata(config, "config.json") | {"tokenizer.ggml.tokens": []}
    ours = ModelConfig.from_gguf(metadata, "config.json")
    windows = tuple(ours.window(layer) for layer in range(ours.num_layers))
    completed = HF_MODELS[config["model_type"]].complete(config)
    divisors = rope_divisors(completed, ours.rotary_dim, "config.json")
    return {**vars(ours), "sliding_pattern": (), "sliding_window": windows, "divisors": divisors}


@pytest.mark.parametrize("name", MODELS)
def test_an_entry_that_is_left_out_or_null_means_what_it_does_in_transformers(name: str) -> None:
    """Or it is refused. Its config class fills in what is missing; we have to come to the same ourselves."""
    stem, entries = MODELS[name]
    model_class = getattr(transformers, stem + ("LMHeadModel" if stem == "GPT2" else "ForCausalLM"))
    # as a file has it
    config = json.loads(json.dumps(model_class.config_class(**COMMON | entries).to_dict()))
    compared = 0
    for key in config.keys() - SHOWN_BY_TENSORS - {"model_type"}:
        without = {k: v for k, v in config.items() if k != key}
        for stated in (without, without | {key: None}):
            try:
                found = read_all(stated)
            except errors.RealizarError:
                continue
            try:
                filled = CONFIG_MAPPING[config["model_type"]].from_dict(copy.deepcopy(stated)).to_dict()
            # transformers' own check, of a class that changed from release to release
            except Exception:
                continue
            assert found == read_all(json.loads(json.dumps(filled))), (key, key in stated)
            compared += 1
    assert compared > 20


@pytest.mark.parametrize(
    ("model_type", "stated"),
    [
        ("gpt_neox", {"rotary_emb_base": 777.0, "rotary_pct": 0.5}),
        ("llama", {"rope_theta": 777.0, "rope_scaling": {"type": "linear", "factor": 2.0}}),
        ("phi", {"rope_theta": 777.0, "partial_rotary_factor": 0.25}),
        ("gemma3_text", {"rope_theta": 777.0, "rope_local_base_freq": 55.0}),
        ("olmo3", {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 777.0}}}),
        ("qwen2", {"sliding_window": 8}),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2}),
        ("qwen2_moe", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 5}),
        ("mistral", {}),
        ("mistral", {"sliding_window": None}),
        ("mistral", {"use_sliding_window": False, "max_window_layers": 1, "sliding_window": 8}),
        ("gpt_neox", {"partial_rotary_factor": 0.5, "rope_theta": 55.0}),
        ("llama", {"rotary_emb_base": 55.0}),
        ("smollm3", {"rope_scaling": LLAMA3}),
        ("cohere", {"rope_scaling": LLAMA3}),
        ("mixtral", {"rope_scaling": LLAMA3}),
        ("llama", {"rope_scaling": LLAMA3, "original_max_position_embeddings": 128}),
        (
            "llama",
            {"rope_scaling": {k: v for k, v in LLAMA3.items() if k != "original_max_position_embeddings"}},
        ),
        ("gpt_neox", {"rope_scaling": LLAMA3}),
        ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_theta": 777.0}),
        ("gemma3_text", {"rope_parameters": {"rope_type": "linear", "rope_theta": 55.0, "factor": 8.0}}),
        ("olmo3", {"rope_theta": 777.0}),
        ("olmo3", {"rope_scaling": YARN, "original_max_position_embeddings": 128}),
        ("qwen2", {"rope_scaling": YARN, "rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}),
        ("ministral3", {}),
    ],
)
def test_older_and_shorter_configs_mean_what_they_do_in_transformers(
    model_type: str, stated: dict[str, Any]
) -> None:
    config = {"model_type": model_type, **SIZES, "num_key_value_heads": 2, **stated}
    if hasattr(CONFIG_MAPPING[model_type], "head_dim"):
        config["head_dim"] = 16
    if "moe" in model_type or model_type == "mixtral":
        config |= {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
        config |= {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    config |= {"rms_norm_eps": 1e-5, "layer_norm_eps": 1e-5}
    filled = CONFIG_MAPPING[model_type].from_dict(copy.deepcopy(config)).to_dict()
    assert read_all(config) == read_all(json.loads(json.dumps(filled)))


@pytest.mark.parametrize(
    ("model_type", "stated", "words"),
    [
        ("granite", {"embedding_multiplier": 0.0}, "embedding_multiplier = 0"),
        ("granite", {"residual_multiplier": 0.0}, "residual_multiplier = 0"),
        ("granite", {"attention_multiplier": 0.0}, "attention_multiplier = 0"),
        ("cohere", {"logit_scale": 0.0}, "logit_scale = 0"),
        ("gemma2", {"query_pre_attn_scalar": -4}, "query_pre_attn_scalar = -4"),
        ("llama", {"rope_theta": "8"}, "rope_theta = '8'"),
        ("llama", {"rms_norm_eps": True}, "rms_norm_eps = True"),
        ("qwen2", {"layer_types": "", "sliding_window": 8}, "layer_types = ''"),
        ("qwen2", {"use_sliding_window": "false"}, "use_sliding_window = 'false'"),
        ("gemma", {"hidden_act": "relu"}, "activation 'relu'"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        ("ministral3", {"rope_parameters": {"llama_4_scaling_beta": 0.1}}, "'llama_4_scaling_beta' is not"),
    ],
)
def test_entries_that_cannot_be_kept_are_refused(model_type: str, stated: dict[str, Any], words: str) -> None:
    with pytest.raises(errors.RealizarError, match=words):
        read(model_type, **{"num_key_value_heads": 2} | stated)


@pytest.mark.parametrize("rope", [HALF, {"rope_parameters": HALF}])
def test_parts_of_heads_are_rotated_where_transformers_does_that(rope: dict[str, Any]) -> None:
    """Its Llama rotates whole heads whatever the entry says: logits were 0.02 of 0.8 apart."""
    assert read("llama", **rope)["rope.dimension_count"] == 16
    assert read("phi", **rope)["rope.dimension_count"] == 8


@pytest.mark.parametrize("model_type", HF_MODELS)
def test_entries_act_where_transformers_reads_them(model_type: str) -> None:
    """Its models name what they act upon in their source; those of others are without effect."""
    source = inspect.getsource(modeling(model_type)) + inspect.getsource(CONFIG_MAPPING[model_type])
    model = HF_MODELS[model_type]
    others = {entry: 0.37 for entry in SOME_READ if not model.acts_upon(entry)}
    assert len(others) > 8 and read(model_type, **others) == read(model_type)
    for entry in SOME_READ:
        named = re.search(rf"(config|self)\.{entry}\b|[\"']{entry}[\"']", source) is not None
        assert model.acts_upon(entry) == (named and (model_type, entry) not in IN_VAIN), entry


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
