"""Copies, files, casts and hooks of a whole model that rt.load gave: the same answers, or our error."""

import copy
import io
import pickle

import accelerate
import pytest
import torch
from tiny_models import TINY, write_tiny_llama
from torch import nn

import realizar_torch as rt

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
IDS = torch.randint(3, 20, (2, 5), generator=torch.Generator().manual_seed(1))
STEPS = {"max_new_tokens": 4, "eos_token_id": []}


@pytest.fixture(params=DEVICES)
def model(request: pytest.FixtureRequest, tmp_path) -> rt.CausalLM:
    path = write_tiny_llama(tmp_path / "m.gguf", sizes=TINY._replace(layers=1))
    return rt.load(path, device=request.param)[0]


def _saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _state_dict(model: nn.Module) -> nn.Module:
    other = copy.deepcopy(model).to("meta")
    other.load_state_dict(model.state_dict(), assign=True)
    return other


def _round_trip(model: nn.Module) -> nn.Module:
    device = model.device
    return copy.deepcopy(model).to("cpu").to(device)


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), _saved, _state_dict, _round_trip]
)
@pytest.mark.parametrize("generated", [False, True])
def test_duplicates_answer_as_the_model_does(model, duplicate, generated: bool) -> None:
    """Before the first generation and after it, when the model holds whatever decoding keeps."""
    ids = IDS.to(model.device)
    if generated:
        model.generate(ids, **STEPS)
    other = duplicate(model)
    tokens, logits = model.generate(ids, **STEPS), model(ids).logits
    assert torch.equal(other.generate(ids, **STEPS), tokens)
    assert torch.equal(other(ids).logits, logits)


def test_casts_and_hooks_keep_the_answers_close(model) -> None:
    ids = IDS.to(model.device)
    expected = model(ids).logits
    hooked = accelerate.dispatch_model(copy.deepcopy(model), {"": str(model.device)}, force_hooks=True)
    # hooks have every linear called by itself: a GPU rounds more often then than in one launch for several
    alone = copy.deepcopy(model)
    for module in alone.modules():
        module.register_forward_hook(lambda *_: None)
    assert torch.equal(hooked(ids).logits, alone(ids).logits)
    if model.device.type == "cpu":
        assert torch.equal(alone(ids).logits, expected)
    with pytest.warns(UserWarning, match="module by module"):
        tokens = hooked.generate(ids, **STEPS)
    # the fused step of a GPU rounds to bfloat16 elsewhere
    if model.device.type == "cpu":
        assert torch.equal(tokens, model.generate(ids, **STEPS))
    half = copy.deepcopy(model).bfloat16()
    # 8 bits of activations through one layer, logits of whole units
    assert (half(ids).logits - expected).abs().max() < 0.05 * expected.abs().max()


def test_weights_elsewhere_are_an_error_of_ours(model) -> None:
    ids = IDS.to(model.device)
    for away in (copy.deepcopy(model).to("meta"), accelerate.cpu_offload(copy.deepcopy(model), model.device)):
        for use in (lambda m: m(ids), lambda m: m.generate(ids, **STEPS)):
            with pytest.raises(rt.FormatError, match="the model is on meta"):
                use(away)
