"""A fingerprint notices whatever a graph or a fused step has taken for granted, and keeps no weight alive."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from tiny_models import write_tiny_llama
from torch import nn

import realizar_torch as rt
from realizar_torch.generation.fingerprint import Fingerprint


@pytest.fixture
def model(tmp_path) -> rt.Transformer:
    return rt.load(write_tiny_llama(tmp_path / "tiny.gguf"), device="cpu", dtype=torch.float32)[0]


CHANGES: dict[str, Callable] = {
    "a hook": lambda m: m.layers[1].mlp.register_forward_hook(lambda *_: None),
    "a hook of the model": lambda m: m.register_forward_pre_hook(lambda *_: None),
    "a forward of its own": lambda m: setattr(m.layers[0].mlp, "forward", lambda x: x),
    "a forward of the model's own": lambda m: setattr(m, "forward", lambda x: x),
    "another class": lambda m: setattr(m.norm, "__class__", nn.Identity),
    "another module": lambda m: setattr(m.layers[0], "mlp", m.layers[1].mlp),
    "a module more": lambda m: m.layers.append(m.layers[0]),
    "a scripted module": lambda m: setattr(m.layers[1], "mlp", torch.jit.script(nn.Identity())),
    "another constant": lambda m: setattr(m.layers[0].attn_norm, "eps", 0.5),
    "other numerics": lambda m: setattr(m.layers[0].mlp.up_proj, "activations", "float"),
    "moved weights": lambda m: setattr(m.norm.weight, "data", m.norm.weight.data.clone()),
    "a weight seen with other strides": lambda m: setattr(
        m.norm.weight, "data", m.norm.weight.data.as_strided(m.norm.weight.shape, (0,))
    ),
    "fewer rows of a weight": lambda m: setattr(
        m.layers[1].self_attn.o_proj, "weight", nn.Parameter(m.layers[1].self_attn.o_proj.weight[:8], False)
    ),
    "frequencies written to": lambda m: m.rope.inv_freq.mul_(0.5),
    "another dtype": lambda m: m.to(torch.float16),
    "a bias": lambda m: setattr(m.layers[0].self_attn.o_proj, "bias", nn.Parameter(torch.ones(64))),
}


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_noticed(model: rt.Transformer, change: str) -> None:
    fingerprint = Fingerprint(model, "gpu_states")
    assert fingerprint.matches(model)
    CHANGES[change](model)
    assert not fingerprint.matches(model)


def test_a_hook_of_all_modules_is_noticed(model: rt.Transformer) -> None:
    fingerprint = Fingerprint(model, "gpu_states")
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert not fingerprint.matches(model)
    finally:
        handle.remove()
    assert fingerprint.matches(model)


def test_use_is_no_change(model: rt.Transformer) -> None:
    fingerprint = Fingerprint(model, "gpu_states")
    ids = torch.tensor([[3, 5, 7]])
    model(ids)
    model.generate(ids, max_new_tokens=3)
    model.norm.weight.data.mul_(2)
    assert fingerprint.matches(model)


def test_a_module_that_holds_its_owner_is_read_once(model: rt.Transformer) -> None:
    model.layers[0].owner = model
    fingerprint = Fingerprint(model, "gpu_states")
    assert fingerprint.matches(model)
    model.layers[0].attn_norm.eps = 0.5
    assert not fingerprint.matches(model)


@torch.inference_mode()
def test_tensors_of_inference_mode_count_no_writes(tmp_path) -> None:
    model = rt.load(write_tiny_llama(tmp_path / "tiny.gguf"), device="cpu")[0]
    assert model.rope.inv_freq.is_inference()
    assert Fingerprint(model, "gpu_states").matches(model)


def test_replaced_weights_are_not_kept(model: rt.Transformer) -> None:
    fingerprint = Fingerprint(model, "gpu_states")
    old = weakref.ref(model.norm.weight)
    model.norm.weight = nn.Parameter(torch.randn(model.norm.weight.shape))
    gc.collect()
    assert old() is None
    assert not fingerprint.matches(model)
