"""project: linears that share an input quantize it once, and each gives what it gives alone."""

import accelerate
import pytest
import torch
from cases import random_activations, random_blocks

import realizar_torch as rt
from realizar_torch.nn.projection import gated, project
from realizar_torch.ops import cpu
from realizar_torch.ops.gates import GATES


def int8_linear(fmt: str = "Q4_K", seed: int = 0, columns: int = 300) -> rt.QuantizedLinear:
    blocks, bias = random_blocks(fmt, 33, columns, seed), torch.randn(33)
    return rt.QuantizedLinear.from_blocks(blocks, columns, fmt, bias, activations="int8")


@torch.no_grad()
def test_activations_are_quantized_once_for_formats_of_one_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each result is the module's own; 300 columns are padded to 512 for K-quants and to 320 for Q8_0."""
    linears = [int8_linear(fmt) for fmt in ("Q4_K", "Q8_0", "Q6_K")]
    x, kernels, quantized = random_activations(2, 3, 300), cpu.kernels(), []
    expected = [linear(x) for linear in linears]
    own = kernels.quantize_activations
    monkeypatch.setattr(kernels, "quantize_activations", lambda x, fmt: quantized.append(fmt) or own(x, fmt))
    with rt.record_dispatch() as metrics:
        outputs = project(x, linears)
    assert quantized == ["Q4_K", "Q8_0"] and metrics.summary().count == 1
    assert all(torch.equal(y, right) for y, right in zip(outputs, expected, strict=True))


@pytest.mark.parametrize("change", ["bias", "input", "autocast", "float"])
def test_whatever_is_asked_of_the_modules_they_give_the_same_together(change: str) -> None:
    """A bias that trains, an input that needs a gradient, autocast, exact activations."""
    linears, x = [int8_linear(fmt) for fmt in ("Q4_K", "Q5_0")], random_activations(3, 300)
    for linear in linears:
        linear.bias.requires_grad_(change == "bias")
        linear.activations = "float" if change == "float" else "int8"
    x.requires_grad_(change == "input")
    leaves = [x] if change == "input" else [linear.bias for linear in linears]
    with torch.autocast("cpu", torch.bfloat16, enabled=change == "autocast"):
        found, expected = project(x, linears), [linear(x) for linear in linears]
    assert found[0].dtype == (torch.bfloat16 if change == "autocast" else torch.float32)
    assert all(torch.equal(y, right) for y, right in zip(found, expected, strict=True))
    if change in ("bias", "input"):
        grads = [
            torch.autograd.grad(sum(y.square().sum() for y in outputs), leaves)
            for outputs in (found, expected)
        ]
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(*grads, strict=True))


@torch.no_grad()
def test_a_linear_of_another_width_refuses_the_input() -> None:
    """Rows of 290 weights take as many bytes as rows of 300."""
    x, pair = random_activations(2, 300), [int8_linear(), int8_linear(columns=290)]
    with pytest.raises(rt.FormatError, match="290"):
        project(x, pair)
    for linear in pair:
        linear.bias = None
    with pytest.raises(rt.FormatError, match="290"):
        gated(x, *pair, "silu")


@torch.no_grad()
def test_hooks_of_linears_that_share_an_input_see_the_input() -> None:
    linears, seen = [int8_linear() for _ in "qk"], []
    linears[1].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    x = random_activations(2, 3, 300)
    project(x, linears)
    assert len(seen) == 1 and seen[0] is x


@torch.no_grad()
def test_hooks_of_all_modules_see_every_linear() -> None:
    linears, seen = [int8_linear() for _ in "qk"], []
    for linear in linears:
        linear.bias = None
    x = random_activations(2, 3, 300)
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        project(x, linears)
        gated(x, *linears, "silu")
    finally:
        handle.remove()
    assert seen == 2 * linears


def test_outputs_may_be_changed_in_place_where_gradients_are_wanted() -> None:
    """Olmo clamps queries, keys and values so."""
    linears, grads = [int8_linear(fmt) for fmt in ("Q4_K", "Q8_0")], []
    for together in (True, False):
        x = random_activations(2, 3, 300).requires_grad_()
        outputs = project(x, linears) if together else [linear(x) for linear in linears]
        limit = outputs[0].detach().abs().mean()
        for y in outputs:
            y.clamp_(-limit, limit)
        sum(y.square().sum() for y in outputs).backward()
        grads.append(x.grad)
    assert grads[0].count_nonzero() and torch.equal(*grads)


@torch.no_grad()
def test_a_forward_that_was_replaced_is_called() -> None:
    """accelerate's way to bring a weight for one call."""
    linears, x = [int8_linear() for _ in "qkv"], random_activations(2, 300)
    accelerate.cpu_offload(linears[2], torch.device("cpu"))
    assert linears[2].weight.is_meta
    assert torch.equal(project(x, linears)[2], linears[2](x))


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("activations", ["float", "int8"])
@torch.no_grad()
def test_a_gated_pair_is_one_op(activations: str, activation: str) -> None:
    gate, up = (int8_linear(seed=seed) for seed in (0, 1))
    gate.bias, up.bias, x = None, None, random_activations(2, 3, 300)
    gate.activations = up.activations = activations
    expected = GATES[activation](gate(x)) * up(x)
    with rt.record_dispatch() as metrics:
        assert torch.equal(gated(x, gate, up, activation), expected)
    assert metrics.summary("gated_linear").count == metrics.summary().count == 1


@pytest.mark.parametrize("other", ["bias", "format", "activations", "hook", "dense"])
@torch.no_grad()
def test_a_pair_of_two_kinds_is_not(other: str) -> None:
    gate, up = int8_linear(), int8_linear("Q6_K" if other == "format" else "Q4_K", seed=1)
    gate.bias = None
    if other != "bias":
        up.bias = None
    if other == "activations":
        up.activations = "float"
    seen: list[torch.Tensor] = []
    if other == "hook":
        up.register_forward_hook(lambda _, __, y: seen.append(y))
    if other == "dense":
        up = up.to_linear()
    x = random_activations(2, 300)
    found = gated(x, gate, up, "silu")
    assert torch.equal(found, torch.nn.functional.silu(gate(x)) * up(x))
    assert len(seen) == (2 if other == "hook" else 0)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [4, 5, 9, 65])
@torch.no_grad()
def test_each_result_on_a_gpu_is_the_modules_own_for_any_number_of_rows(rows: int) -> None:
    linears = [int8_linear(fmt).cuda() for fmt in ("Q4_K", "Q8_0", "Q6_K")]
    x = random_activations(rows, 300).cuda()
    assert all(torch.equal(y, linear(x)) for y, linear in zip(project(x, linears), linears, strict=True))
