"""Every architecture row against transformers: files by llama.cpp's converter, logits stored beside them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from fixture_models import MODELS, WINDOW

from realizar_torch.checkpoint.gguf import open_gguf
from realizar_torch.models.loading import load_transformer

FIXTURES = Path(__file__).parent / "fixtures"
# fp32 on both sides; logits are of size 10, sums of up to 100 terms in other orders
TOLERANCE = 2e-4
# what a file does not tell and its reader must
OVERRIDES = {"mistral": {"llama.attention.sliding_window": WINDOW}}


def load(name: str):
    file = open_gguf(FIXTURES / f"{name}.gguf")
    file.metadata = {**file.metadata, **OVERRIDES.get(name, {})}
    return load_transformer(file, device=torch.device("cpu"), dtype=torch.float32, activations="float")


def golden(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    with np.load(FIXTURES / f"{name}.npz") as arrays:
        return torch.from_numpy(arrays["ids"]), torch.from_numpy(arrays["logits"])


def difference(name: str) -> torch.Tensor:
    """Largest difference from transformers at each position, [T]."""
    ids, expected = golden(name)
    with torch.inference_mode():
        return (load(name)(ids).logits - expected).abs().amax(-1)[0]


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name):
    assert difference(name).max() <= TOLERANCE
