"""State dicts of packed bytes without their metadata: a warning where another format's rows look the same."""

import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import PACKED, random_blocks
from torch import nn

import realizar_torch as rt
from realizar_torch.formats import get_format
from realizar_torch.nn.experts import QuantizedExperts

# rows of whole super-blocks
ALIKE = {"Q4_0": "Q4_K", "Q4_K": "Q4_0", "Q5_0": "Q5_K", "Q5_K": "Q5_0"}


def _linear(fmt: str) -> nn.Module:
    return rt.QuantizedLinear.from_blocks(random_blocks(fmt, 6, 512), 512, fmt, torch.randn(6))


def _prepacked(fmt: str) -> nn.Module:
    model = nn.Sequential(_linear(fmt))
    rt.prepack(model, "planar")
    return model[0]


def _experts(fmt: str) -> nn.Module:
    return QuantizedExperts(random_blocks(fmt, 6, 512).unflatten(0, (2, 3)), 512, fmt)


MODULES: dict[str, Callable[[str], nn.Module]] = {
    "linear": _linear,
    "prepacked": _prepacked,
    "embedding": lambda fmt: rt.QuantizedEmbedding.from_blocks(random_blocks(fmt, 6, 512), 512, fmt),
    "experts": _experts,
    "fused": lambda fmt: rt.FusedLayerNormLinear.fuse(nn.LayerNorm(512), _linear(fmt)),
    "fused, two": lambda fmt: rt.FusedLayerNormLinear.fuse(nn.LayerNorm(512), _linear("Q8_0"), _linear(fmt)),
}


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
@pytest.mark.parametrize("fmt", PACKED)
def test_what_was_assumed_is_told_where_it_matters(fmt: str, make: Callable[[str], nn.Module]) -> None:
    model, other = (nn.Sequential(make(fmt)) for _ in "ab")
    bare = dict(model.state_dict())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        other.load_state_dict(bare)
    assert all(torch.equal(tensor, bare[name]) for name, tensor in other.state_dict().items())
    assert [warning.category for warning in caught] == [UserWarning] * (fmt in ALIKE)
    for warning in caught:
        words = (
            f"were taken for {fmt}, for which the module was made; rows of {ALIKE[fmt]} have as many bytes"
        )
        assert words in str(warning.message) and "_metadata" in str(warning.message)
        assert warning.filename == __file__


def _through_a_file(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize("state", [nn.Module.state_dict, _through_a_file])
def test_nothing_is_told_where_the_format_is_known(state: Callable[[nn.Module], Any]) -> None:
    model, other = (nn.Sequential(_linear("Q4_K"), _prepacked("Q5_0")) for _ in "ab")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.load_state_dict(state(model))
        # nor where no bytes are loaded, as of adapters
        other.load_state_dict({"0.bias": torch.ones(6)}, strict=False)


def test_modules_of_one_format_are_told_of_once() -> None:
    """By Python's own filter, for which the sentence has to be the same."""
    model = nn.Sequential(*(_linear(fmt) for fmt in ("Q4_K", "Q4_K", "Q4_K", "Q5_0")))
    bare = dict(model.state_dict())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        model.load_state_dict(bare)
    assert len(caught) == 2


def test_bytes_of_another_size_are_an_error_alone() -> None:
    bare = {"weight": random_blocks("Q6_K", 6, 512), "bias": torch.zeros(6)}
    assert get_format("Q6_K").row_bytes(512) != get_format("Q4_K").row_bytes(512)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match="size mismatch for weight"):
            _linear("Q4_K").load_state_dict(bare)
