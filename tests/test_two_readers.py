"""One GGUF file, two readers: rt.load's model and transformers' say the same of it, or one refuses it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import write_gguf
from make_fixtures import FIXTURES

import realizar_torch as rt

# fp32 on both sides; logits of size 10
TOLERANCE = 2e-4


def changed(name: str, path: Path, changes: dict[str, Any]) -> Path:
    """The fixture with keys of its architecture changed; None removes one."""
    file = rt.open_gguf(FIXTURES / f"{name}.gguf")
    arch = file.metadata["general.architecture"]
    metadata = {
        key: value if isinstance(value, str | int | float) else list(value)
        for key, value in file.metadata.items()
    }
    metadata |= {f"{arch}.{key}": value for key, value in changes.items()}
    tensors = {
        tensor: (info.fmt.name, info.shape, file.read(tensor).view(torch.uint8).numpy().tobytes())
        for tensor, info in file.tensors.items()
    }
    kept = {key: value for key, value in metadata.items() if value is not None and value != []}
    return write_gguf(path, kept, tensors)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        # parts of a head that transformers' config classes would choose themselves
        ("gptneox", {"rope.dimension_count": None}),
        ("stablelm", {"rope.dimension_count": None}),
        ("phi2", {"rope.dimension_count": 2}),
        # short and long factors meet at the context's length
        ("phi3-long", {"rope.scaling.original_context_length": None}),
        ("qwen3", {"rope.scaling.type": "linear", "rope.scaling.factor": 3.0}),
        (
            "gemma",
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 3.0}
            | {"rope.scaling.original_context_length": 16},
        ),
        ("gemma3", {"final_logit_softcapping": 2.0, "attention.sliding_window": 5}),
        ("granite", {"attention.scale": 0.2, "logit_scale": 3.0}),
        ("qwen3", {"rope.freq_base": 77.0, "residual_scale": 1.0, "embedding_scale": 1.0}),
    ],
)
def test_both_come_to_the_same_logits(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    path = changed(name, tmp_path / "m.gguf", changes)
    model, _ = rt.load(path, activations="float")
    theirs, _ = rt.hf.from_gguf(path, dtype=torch.float32)
    ids = torch.randint(3, 60, (1, 40))
    with torch.no_grad():
        expected = model(ids).logits
        assert (theirs(ids).logits - expected).abs().max() <= TOLERANCE
        unchanged, _ = rt.load(FIXTURES / f"{name}.gguf", activations="float")
        assert (unchanged(ids).logits - expected).abs().max() > 0.01


@pytest.mark.parametrize(
    ("name", "changes", "error", "words"),
    [
        (
            "llama",
            {"rope.scaling.factor": 3.0},
            rt.UnsupportedArchitectureError,
            "rope_freqs.*factor at once",
        ),
        ("llama", {"rope.scaling.attn_factor": 1.4}, rt.UnsupportedArchitectureError, "attn_factor is not"),
        (
            "phi3-long",
            {"rope.scaling.factor": 3.0},
            rt.UnsupportedArchitectureError,
            "rope_factors_short.*at once",
        ),
        (
            "phi3-long",
            {"attention.temperature_scale": 0.3},
            rt.UnsupportedArchitectureError,
            "temperature_scale",
        ),
        (
            "gemma3",
            {"attn_logit_softcapping": 2.0},
            rt.UnsupportedArchitectureError,
            "attn_logit_softcapping = 2",
        ),
        ("qwen3", {"attention.scale": 1.0}, rt.UnsupportedArchitectureError, "attention.scale = 1"),
        ("qwen3", {"rope.dimension_count": 8}, rt.UnsupportedArchitectureError, "rotates whole heads, 16"),
        ("falcon", {"attention.head_count_kv": 2}, rt.MissingTensorsError, "m.gguf.*64 rows.*no 10 heads"),
        ("gemma2", {"embedding_scale": 1.0}, rt.UnsupportedArchitectureError, "embedding_scale = 1"),
        ("granite", {"attention.clamp_kqv": 1.0}, rt.UnsupportedArchitectureError, "clamp_kqv = 1"),
    ],
)
def test_transformers_is_not_asked_for_what_it_has_not(
    name: str, changes: dict[str, Any], error: type[Exception], words: str, tmp_path: Path
) -> None:
    path = changed(name, tmp_path / "m.gguf", changes)
    with pytest.raises(error, match=words):
        rt.hf.from_gguf(path)
