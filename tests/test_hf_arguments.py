"""The arguments of rt.hf.from_gguf: what they replace, and what of them is refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_directories import write_hf_directory
from tiny_models import write_tiny_llama
from transformers import T5Config

import realizar_torch as rt
from realizar_torch.checkpoint.gguf import open_gguf
from realizar_torch.errors import (
    FormatError,
    GGUFError,
    MissingTensorsError,
    UnsupportedArchitectureError,
)
from realizar_torch.hf.loading import load_model

FIXTURES = Path(__file__).parent / "fixtures"


def fixture_model(name: str, **options: Any) -> Any:
    return load_model(open_gguf(FIXTURES / f"{name}.gguf"), dtype=torch.float32, **options)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"activations": "int4"}, "activations"),
        ({"dtype": "float31"}, "dtype is 'float31', expected 'auto' or one of float16"),
        ({"dtype": "int8"}, "dtype is 'int8', expected"),
        ({"dtype": None}, "dtype is None, expected 'auto'"),
        ({"dtype": torch.int8}, "dtype is torch.int8, expected"),
        ({"dtype": torch.float8_e4m3fn}, "dtype is torch.float8_e4m3fn, expected"),
        ({"tokenizer": 3}, "tokenizer is 3, expected one of transformers"),
        ({"config": {"slidng_window": 4}}, "config has 'slidng_window'"),
        ({"config": {3: 4}}, "config has 3, which is no field"),
        ({"config": 3}, "config is 3, expected a dict"),
        (
            {"config": {"num_attention_heads": 7}},
            r"refuses config=\{'num_attention_heads': 7\}: .*heads \(7\)",
        ),
        ({"config": {"num_attention_heads": 0}}, r"refuses config=\{'num_attention_heads': 0\}"),
        ({"config": {"hidden_act": "no-such"}}, r"refuses config=\{'hidden_act': 'no-such'\}"),
        ({"config": T5Config()}, r"refuses config=T5Config"),
        ({"attn_implementation": "no-such"}, "refuses attn_implementation='no-such'"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(wrong: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf")
    with pytest.raises(FormatError, match=message):
        rt.hf.from_gguf(path, **wrong)


def test_sizes_of_the_file_that_transformers_refuses_are_the_files_fault(tmp_path: Path) -> None:
    metadata = {"llama.attention.head_count": 7, "llama.attention.key_length": 32}
    path = write_tiny_llama(tmp_path / "tiny.gguf", metadata=metadata)
    with pytest.raises(GGUFError, match=r"tiny\.gguf: transformers refuses what the file says"):
        rt.hf.from_gguf(path)


@pytest.mark.parametrize(
    ("key", "value", "error", "message"),
    [
        ("block_count", 2**31 - 1, MissingTensorsError, "has only 21 tensors"),
        ("rope.dimension_count", 64, GGUFError, "64 of the 32 elements of a head"),
        (
            "rope.dimension_count",
            16,
            UnsupportedArchitectureError,
            "= 16 has no counterpart.*heads, 32",
        ),
        ("attention.value_length", 16, UnsupportedArchitectureError, "value_length is 16"),
    ],
)
def test_impossible_sizes_are_refused_before_transformers_sees_them(
    key: str, value: int, error: type[Exception], message: str, tmp_path: Path
) -> None:
    """transformers would rotate more than there is, and list layers until the memory ends."""
    path = write_tiny_llama(tmp_path / "tiny.gguf", metadata={f"llama.{key}": value})
    with pytest.raises(error, match=message):
        rt.hf.from_gguf(path)


def test_attention_is_what_the_model_has() -> None:
    """sdpa does not cap scores, as gemma2 does; transformers 5.16 would take it, and be wrong by 5."""
    assert fixture_model("gemma2").config._attn_implementation == "eager"
    assert fixture_model("gemma3").config._attn_implementation == "sdpa"
    with pytest.raises(FormatError, match=r"attn_implementation='sdpa' does not cap.*use 'eager'"):
        fixture_model("gemma2", attn_implementation="sdpa")
    settings = fixture_model("gemma3", attn_implementation="eager").config
    again = fixture_model("gemma3", config=settings)
    assert again.config._attn_implementation == "eager"


def test_a_directory_of_hugging_face_is_pointed_to_its_loaders(tmp_path: Path) -> None:
    write_hf_directory(tmp_path)
    with pytest.raises(FormatError, match=r"rt\.load or.*AutoModelForCausalLM\.from_pretrained"):
        rt.hf.from_gguf(tmp_path)


def test_config_replaces_what_the_file_says(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf")
    model, _ = rt.hf.from_gguf(path, config={"max_position_embeddings": 64, "sliding_window": 8})
    assert type(model).__name__ == "MistralForCausalLM"
    assert (model.config.max_position_embeddings, model.config.sliding_window) == (64, 8)
    again, _ = rt.hf.from_gguf(path, config=model.config)
    ids = torch.arange(20)[None]
    assert torch.equal(model(ids).logits, again(ids).logits)
    full, _ = rt.hf.from_gguf(path)
    assert not torch.allclose(model(ids).logits[:, -1], full(ids).logits[:, -1], atol=1e-2)


def test_another_tokenizer_takes_the_place_of_the_files_own(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf", metadata={"tokenizer.ggml.model": "t5"})
    _, tokenizer = rt.hf.from_gguf(write_tiny_llama(tmp_path / "known.gguf"))
    tokenizer.eos_token, tokenizer.pad_token = "the", None
    model, found = rt.hf.from_gguf(path, tokenizer=tokenizer)
    assert found is tokenizer
    assert model.generation_config.eos_token_id == model.config.eos_token_id == tokenizer.eos_token_id != 2
    assert model.generation_config.pad_token_id == tokenizer.eos_token_id
