"""Metadata of a wrong type, sign or size: a model or an error of ours, whatever key it stands under."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import Typed, write_gguf
from hf_directories import edit
from tiny_models import write_tiny_llama

import realizar_torch as rt
from realizar_torch.models.config import one_in

GGUF_VALUES: tuple[Any, ...] = (
    0,
    True,
    Typed("i32", -1),
    2**32 - 1,
    Typed("u64", 2**64 - 1),
    -1.0,
    3e38,
    float("nan"),
    float("inf"),
    "",
    "x",
    ["a", "b"],
    [1, 2, 3],
    [True, False],
    Typed("string", []),
)
# keys that the tiny file does not have
MORE_KEYS = (
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "attention.key_length",
    "attention.value_length",
    "attention.scale",
    "attention.temperature_scale",
    "attention.causal",
    "attention.max_alibi_bias",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.attn_factor",
    "rope.scaling.original_context_length",
    "expert_count",
    "vocab_size",
    "logit_scale",
    "residual_scale",
    "final_logit_softcapping",
)
JSON_VALUES: tuple[Any, ...] = (-1, 10**12, 10**400, float("nan"), "x", [], ["x"], {"a": 1})


@pytest.fixture(scope="module")
def parts(tmp_path_factory) -> tuple[dict[str, Any], dict[str, Any]]:
    """Metadata and tensors of a sound file."""
    file = rt.open_gguf(write_tiny_llama(tmp_path_factory.mktemp("sound") / "tiny.gguf"))
    scalar = int | float | str
    metadata = {
        key: entry if isinstance(entry, scalar) else list(entry) for key, entry in file.metadata.items()
    }
    tensors = {
        name: (info.fmt.name, info.shape, file.read(name).contiguous().view(torch.uint8).numpy().tobytes())
        for name, info in file.tensors.items()
    }
    return metadata, tensors


def use(path: Path) -> None:
    """Loads and does a little of everything that metadata have a say in; errors of ours are fine."""
    try:
        model, tokenizer = rt.load(path)
        tokenizer.decode(tokenizer.encode("the cat"))
        model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=2)
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    except rt.RealizarError as error:
        assert str(error).isprintable() or "\n" in str(error)


def test_every_key_of_a_file(parts, tmp_path):
    metadata, tensors = parts
    for key in (*metadata, *(f"llama.{name}" for name in MORE_KEYS)):
        for entry in GGUF_VALUES:
            use(write_gguf(tmp_path / "case.gguf", metadata | {key: entry}, tensors))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"tokenizer.ggml.tokens": [1, 2]},
            "tokenizer.ggml.tokens: found an array with int, expected.*texts",
        ),
        ({"tokenizer.ggml.merges": [0.5]}, "tokenizer.ggml.merges: found an array with float"),
        ({"llama.attention.sliding_window": Typed("u64", 2**64 - 1)}, "at most 2147483647"),
        ({"llama.attention.scale": -1.0}, "attention.scale is -1.0, expected a positive"),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 2.0,
                "llama.rope.scaling.original_context_length": 32,
                "llama.rope.freq_base": 1.0,
            },
            "YaRN needs a RoPE base above 1",
        ),
    ],
)
def test_what_is_wrong_is_named(parts, tmp_path, changes, words):
    path = write_gguf(tmp_path / "case.gguf", parts[0] | changes, parts[1])
    with pytest.raises(rt.GGUFError, match=words):
        rt.load(path)


def test_a_period_beyond_all_layers_is_no_list_of_that_length(parts, tmp_path):
    """Every layer slides, and no tuple of two billion flags is made."""
    window = {"llama.attention.sliding_window": 2, "llama.attention.sliding_window_pattern": 2**31 - 1}
    model, _ = rt.load(write_gguf(tmp_path / "case.gguf", parts[0] | window, parts[1]))
    assert [model.config.window(layer) for layer in range(2)] == [2, 2]
    assert one_in(3) == (True, True, False)


def test_a_chat_template_that_is_no_text_is_refused_when_used(parts, tmp_path):
    path = write_gguf(tmp_path / "case.gguf", parts[0] | {"tokenizer.chat_template": 7}, parts[1])
    _, tokenizer = rt.load(path)
    with pytest.raises(rt.FormatError, match="the chat template is 7, expected the text"):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])


def test_every_entry_of_a_directory(directory):
    path = directory / "config.json"
    config = json.loads(path.read_text())
    more = (
        "layer_types",
        "max_window_layers",
        "sliding_window",
        "no_rope_layers",
        "rope_scaling",
        "text_config",
    )
    rope = [("rope_parameters", name) for name in ("rope_theta", "rope_type", "factor")]
    for keys in (*((name,) for name in (*config, *more)), *rope):
        for entry in JSON_VALUES:
            *outer, last = keys
            edited = json.loads(json.dumps(config))
            (edited[outer[0]] if outer else edited)[last] = entry
            path.write_text(json.dumps(edited))
            use(directory)


def test_hostile_counts_of_a_directory_make_no_lists(directory):
    """Lists of a billion flags or frequencies would be made before any tensor is compared."""
    edit(directory / "config.json", max_window_layers=1, num_hidden_layers=2**31 - 1, sliding_window=8)
    with pytest.raises(rt.MissingTensorsError, match="2147483647 layers"):
        rt.load(directory)
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = llama3 | {"rope_theta": 1e4, "original_max_position_embeddings": 64}
    edit(directory / "config.json", num_hidden_layers=3, head_dim=2**31 - 2, rope_parameters=rope)
    with pytest.raises(rt.CheckpointError, match="heads of 2147483646 elements"):
        rt.load(directory)


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("tokenizer_config.json", {"bos_token": {}}),
        ("tokenizer_config.json", {"chat_template": ["x", {}, {"name": "default"}]}),
    ],
)
def test_settings_of_a_tokenizer_that_say_nothing_are_passed_over(directory, file, changes):
    edit(directory / file, **changes)
    _, tokenizer = rt.load(directory)
    assert tokenizer.decode(tokenizer.encode("the cat")) == "the cat"


def test_a_tokenizer_of_a_billion_ids_is_refused(directory):
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["vocab"]["a"] = 10**9
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(rt.CheckpointError, match="vocabulary: found 1000000001 ids"):
        rt.load(directory)


def test_a_tokenizer_library_that_panics_is_an_error_of_ours(directory):
    """A panic of Rust is no Exception for Python."""
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["continuing_subword_prefix"] = "a prefix longer than any merge"
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(rt.CheckpointError, match=r"tokenizer\.json: found"):
        rt.load(directory)
