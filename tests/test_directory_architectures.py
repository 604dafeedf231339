"""Every architecture as a Hugging Face directory and as a saved one: the logits of transformers each time.

The models are those of tests/fixtures. What a directory's names, row orders, norm offsets and config entries
mean has to come out as llama.cpp's converter wrote it into the GGUF file.
"""

import numpy as np
import pytest
import torch
from fixture_models import MODELS, WINDOW, make_model
from make_fixtures import FIXTURES

import realizar_torch as rt
from realizar_torch.models.arch import ARCHITECTURES
from realizar_torch.models.hf_models import HF_MODELS
from realizar_torch.models.sources import open_source

# fp32 on both sides; logits of size 10
TOLERANCE = 2e-4
# transformers has no InternLM2
WITHOUT_DIRECTORY = {"internlm2"}


def expected(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompt and transformers' logits."""
    stored = np.load(FIXTURES / f"{name}.npz")
    return torch.from_numpy(stored["ids"]), torch.from_numpy(stored["logits"])


def test_every_architecture_has_a_row():
    assert {model.arch for model in HF_MODELS.values()} == set(ARCHITECTURES) - WITHOUT_DIRECTORY


@pytest.mark.parametrize("name", [name for name in MODELS if name not in WITHOUT_DIRECTORY])
def test_a_directory_of_transformers(name, tmp_path):
    make_model(name).save_pretrained(tmp_path)
    gguf = rt.open_gguf(FIXTURES / f"{name}.gguf")
    model, _ = rt.load(tmp_path, activations="float", tokenizer=FIXTURES / f"{name}.gguf")
    ids, logits = expected(name)
    with torch.inference_mode():
        assert (model(ids).logits - logits).abs().max() <= TOLERANCE
    # the same tensors, to the bit where the file holds them in full (half precision is exact here)
    source = open_source(tmp_path)
    assert set(source.tensors) == set(gguf.tensors)
    for tensor in gguf.tensors:
        ours, theirs = source.read(tensor).float(), gguf.read(tensor).float()
        assert ours.shape == theirs.shape, tensor
        # divisors of RoPE and shifted norms are computed
        assert (ours - theirs).abs().max() <= 1e-6 * theirs.abs().max(), tensor


@pytest.mark.parametrize("name", MODELS)
def test_a_saved_directory(name, tmp_path):
    # the converter leaves Mistral's window out
    config = {"llama.attention.sliding_window": WINDOW} if name == "mistral" else {}
    model, tokenizer = rt.load(FIXTURES / f"{name}.gguf", activations="float", config=config)
    rt.save(model, tmp_path / "saved")
    again, other = rt.load(tmp_path / "saved", activations="float")
    ids, logits = expected(name)
    with torch.inference_mode():
        ours = again(ids).logits
        assert torch.equal(ours, model(ids).logits)
    assert (ours - logits).abs().max() <= TOLERANCE
    assert other.encode("that thing") == tokenizer.encode("that thing")
