"""Loads the files of tests/fixtures and the logits that transformers computes for them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fixture_models import WINDOW

from realizar_torch.checkpoint.gguf import open_gguf
from realizar_torch.checkpoint.source import ModelSource, SourceView
from realizar_torch.models.loading import load_transformer
from realizar_torch.models.transformer import Transformer

FIXTURES = Path(__file__).parent / "fixtures"
# fp32 on both sides; logits are of size 10, sums of up to 190 terms in other orders
TOLERANCE = 2e-4
# what a file does not tell, so that its reader must
UNTOLD: dict[str, dict[str, Any]] = {"mistral": {"llama.attention.sliding_window": WINDOW}}


def load(name: str, metadata: Mapping[str, Any] | None = None, **options: Any) -> Transformer:
    """The fixture's model in fp32; ``metadata`` replaces keys, or removes those that are None."""
    source = _Edited(open_gguf(FIXTURES / f"{name}.gguf"), UNTOLD.get(name, {}) | dict(metadata or {}))
    choice = {"device": torch.device("cpu"), "dtype": torch.float32, "activations": "float"}
    return load_transformer(source, **choice | options)


class _Edited(SourceView):
    def __init__(self, source: ModelSource, changes: Mapping[str, Any]) -> None:
        super().__init__(source)
        self._changes = changes

    @property
    def metadata(self) -> Mapping[str, Any]:
        keys = {**self._source.metadata, **self._changes}
        return {key: value for key, value in keys.items() if value is not None}


def golden(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A prompt, int64 [1, T], and transformers' logits for it, fp32 [1, T, V]."""
    with np.load(FIXTURES / f"{name}.npz") as arrays:
        return torch.from_numpy(arrays["ids"]), torch.from_numpy(arrays["logits"])


def golden_short(name: str) -> torch.Tensor:
    """Logits of a text that ends before LongRoPE's long frequencies begin."""
    with np.load(FIXTURES / f"{name}.npz") as arrays:
        return torch.from_numpy(arrays["short"])


def deviation(model: Transformer, name: str) -> torch.Tensor:
    """Largest difference from transformers' logits at each position, [T]."""
    ids, expected = golden(name)
    with torch.inference_mode():
        return (model(ids).logits - expected).abs().amax(-1)[0]
