"""A class's forward that somebody replaces or overrides is called, where a faster way would do its work."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from arch_fixtures import load
from cases import random_activations, random_blocks
from torch import nn

import realizar_torch as rt
from realizar_torch.generation import fusable
from realizar_torch.generation.causal_lm import CausalLM
from realizar_torch.generation.cpu_step import why_not
from realizar_torch.generation.fingerprint import Fingerprint
from realizar_torch.nn.experts import QuantizedExperts
from realizar_torch.nn.mlp import GatedMLP
from realizar_torch.nn.norm import RMSNorm
from realizar_torch.nn.projection import gated, project

pytest.importorskip("numba")

PROMPT = torch.tensor([[5, 7, 11]])
OPTIONS: dict[str, Any] = {"max_new_tokens": 4, "eos_token_id": []}
KNOWN = (
    fusable._KNOWN_MODULES | fusable._DENSE_MODULES | fusable._EXPERT_MODULES | fusable._DENSE_EXPERTS
) - {nn.ModuleList}
KINDS = sorted({CausalLM} | KNOWN, key=lambda kind: kind.__name__)


def packed() -> CausalLM:
    model = load("qwen2moe", model_class=CausalLM)
    for layer in model.layers:
        for part in ("gate_proj", "up_proj", "down_proj"):
            dense = getattr(layer.mlp.experts, part).weight
            blocks = rt.quantize(dense.flatten(0, 1), "Q8_0").unflatten(0, dense.shape[:2])
            setattr(layer.mlp.experts, part, QuantizedExperts(blocks, dense.shape[2], "Q8_0"))
    rt.quantize_model(model, "Q8_0", exclude=())
    return model


def model_with(kind: type[nn.Module]) -> CausalLM:
    """A model that has such modules; between them the fixtures have all that a fused step knows."""
    dense = (load(name, model_class=CausalLM) for name in ("llama", "gpt2", "stablelm-parallel", "qwen2moe"))
    for model in (*dense, packed()):
        if any(type(module) is kind for module in model.modules()):
            return model
    raise AssertionError(f"no fixture has a {kind.__name__}")


def counting(kind: Any, calls: list) -> Callable:
    forward = kind.forward

    def counted(self: nn.Module, *args: Any, **options: Any) -> Any:
        calls.append(self)
        return forward(self, *args, **options)

    return counted


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_patched_class_is_called_and_the_fused_step_comes_back(kind: Any, monkeypatch) -> None:
    model, calls = model_with(kind), []
    expected = model.generate(PROMPT, **OPTIONS)
    with monkeypatch.context() as patch:
        patch.setattr(kind, "forward", counting(kind, calls))
        with pytest.warns(UserWarning, match=rf"slower: {kind.__name__}\.forward was replaced"):
            model.generate(PROMPT, **OPTIONS)
    count = len(calls)
    assert count >= OPTIONS["max_new_tokens"]
    # a warning would be an error here
    assert torch.equal(model.generate(PROMPT, **OPTIONS), expected) and len(calls) == count
    assert why_not(model, model.new_cache(1, 8)) is None


def test_what_a_patched_class_computes_is_what_comes_out(monkeypatch) -> None:
    model = model_with(GatedMLP)
    before = model.generate(PROMPT, **OPTIONS)
    last = model.norm.weight.numel() - 1
    # a final norm that always gives the same row
    constant = model.lm_head.weight[:, last].argmax()
    only_last = nn.functional.one_hot(torch.tensor(last), last + 1).float()
    own = RMSNorm.forward
    monkeypatch.setattr(
        RMSNorm,
        "forward",
        lambda self, x: only_last.expand_as(x) if self is model.norm else own(self, x),
    )
    with pytest.warns(UserWarning, match=r"RMSNorm\.forward was replaced"):
        after = model.generate(PROMPT, **OPTIONS)
    assert bool((after[0, 3:] == constant).all()) and not torch.equal(after, before)


def test_a_model_that_overrides_forward_is_called() -> None:
    calls: list = []

    class Mine(CausalLM):
        def forward(self, *args: Any, **options: Any) -> Any:
            calls.append(self)
            return super().forward(*args, **options)

    model = load("llama", model_class=Mine)
    with pytest.warns(UserWarning, match=r"slower: Mine\.forward was replaced or overridden"):
        model.generate(PROMPT, **OPTIONS)
    assert len(calls) == OPTIONS["max_new_tokens"]


def test_a_model_whose_logits_are_another_s_gives_them_at_every_token() -> None:
    class Only(CausalLM):
        def logits(self, x: torch.Tensor) -> torch.Tensor:
            y = super().logits(x)
            return nn.functional.one_hot(torch.full(y.shape[:-1], 7), y.shape[-1]).float()

    model = load("llama", model_class=Only)
    with pytest.warns(UserWarning, match=r"slower: Only\.logits was replaced or overridden"):
        assert model.generate(PROMPT, **OPTIONS)[0, 3:].tolist() == [7] * 4
    model = load("llama", model_class=CausalLM)
    model.logits = lambda x: -CausalLM.logits(model, x)
    with pytest.warns(UserWarning, match=r"slower: CausalLM\.logits was replaced"):
        ids = model.generate(PROMPT, **OPTIONS)
    for end in range(3, 7):
        assert ids[0, end] == model(ids[:, :end]).logits[0, -1].argmax()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_fingerprint_sees_a_patch_come_and_go(kind: Any, monkeypatch) -> None:
    model = model_with(kind)
    fingerprint = Fingerprint(model, "gpu_states")
    with monkeypatch.context() as patch:
        patch.setattr(kind, "forward", counting(kind, []))
        assert not fingerprint.matches(model)
        patched = Fingerprint(model, "gpu_states")
    assert fingerprint.matches(model) and not patched.matches(model)


@torch.no_grad()
def test_linears_of_a_patched_class_are_called_one_by_one(monkeypatch) -> None:
    x, pair, calls = random_activations(2, 300), linears(), []
    expected = [*project(x, pair), gated(x, *pair, "silu")]
    monkeypatch.setattr(rt.QuantizedLinear, "forward", counting(rt.QuantizedLinear, calls))
    found = [*project(x, pair), gated(x, *pair, "silu")]
    assert calls == [*pair, *pair]
    assert all(torch.equal(y, right) for y, right in zip(found[:2], expected[:2], strict=True))


@torch.no_grad()
def test_a_compiled_module_calls_a_patched_class_and_goes_back(monkeypatch) -> None:
    torch._dynamo.reset()
    mlp = GatedMLP(*linears(), linears(33)[0], activation="silu")
    compiled = torch.compile(mlp, backend="eager", fullgraph=True)
    x = random_activations(2, 300)
    expected, own = mlp(x), rt.QuantizedLinear.forward
    assert torch.equal(compiled(x), expected)
    with monkeypatch.context() as patch:
        patch.setattr(rt.QuantizedLinear, "forward", lambda self, x: 2 * own(self, x))
        patched = mlp(x)
        assert not torch.allclose(patched, expected)
        assert torch.equal(compiled(x), patched)
    assert torch.equal(compiled(x), expected)


def linears(columns: int = 300) -> list[rt.QuantizedLinear]:
    options = {"activations": "int8"}
    return [
        rt.QuantizedLinear.from_blocks(random_blocks("Q4_K", 33, columns, seed), columns, "Q4_K", **options)
        for seed in (1, 2)
    ]
