"""Gradients and tracing of the ops: against dense layers, opcheck and torch.compile."""

import pytest
import torch
from cases import PACKED, random_activations, random_blocks
from torch import nn

import realizar_torch as rt
from realizar_torch import ops, reference
from realizar_torch.ops import torch_kernels

OPS = torch.ops.realizar_torch


def _leaves(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    return [torch.randn(*shape, dtype=dtype, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("activations", ["float", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fmt", PACKED)
def test_input_gradient_is_that_of_the_dense_layer(fmt: str, dtype: torch.dtype, activations: str) -> None:
    weight = random_blocks(fmt, 65, 300)
    x, bias = _leaves((2, 3, 300), (65,), dtype=dtype)
    grad_y = torch.randn(2, 3, 65).to(dtype)
    ops.linear(x, weight, fmt, 300, bias, activations=activations).backward(grad_y)
    decoded = reference.dequantize(weight, fmt, 300).double()
    assert x.grad.dtype == bias.grad.dtype == dtype
    torch.testing.assert_close(x.grad, (grad_y.double() @ decoded).to(dtype), rtol=2**-7, atol=1e-4)
    torch.testing.assert_close(bias.grad, grad_y.double().sum((0, 1)).to(dtype), rtol=2**-7, atol=1e-5)


def test_gradient_does_not_depend_on_the_slices_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_blocks("Q6_K", 10, 512)
    grads = []
    for limit in (1, 3 * 4 * 512, 1 << 24):
        monkeypatch.setattr(torch_kernels, "CHUNK_BYTES", limit)
        x = torch.ones(2, 512, dtype=torch.float64, requires_grad=True)
        ops.linear(x, weight, "Q6_K", 512).square().sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(grads[0], grads[2], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grads[1], grads[2], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("limit", [1, 3 * 4 * 300, 1 << 24])
@pytest.mark.parametrize("activations", ["float", "int8"])
def test_batches_of_gradients_are_those_of_dense_modules(
    activations: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of jacobian(vectorize=True); a view of all rows is another one than a view of some."""
    monkeypatch.setattr(torch_kernels, "CHUNK_BYTES", limit)
    blocks = (random_blocks("Q6_K", 5, 300, seed) for seed in (0, 1))
    from_blocks = rt.QuantizedLinear.from_blocks
    parts = [from_blocks(b, 300, "Q6_K", torch.randn(5), activations=activations) for b in blocks]
    norm = nn.LayerNorm(300)
    packed = (*parts, rt.FusedLayerNormLinear.fuse(norm, *parts))
    first, second = (part.to_linear() for part in parts)
    dense = (first, second, lambda x: (first(norm(x)), second(norm(x))))
    x = torch.randn(2, 300)
    for ours, theirs in zip(packed, dense, strict=True):
        found, expected = (torch.autograd.functional.jacobian(f, x, vectorize=True) for f in (ours, theirs))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    leaf, grads = x.clone().requires_grad_(), torch.randn(3, 2, 5)
    found, expected = (
        torch.autograd.grad(f(leaf), (leaf, f.bias), grads, is_grads_batched=True) for f in (parts[0], first)
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fmt", ["Q4_K", None])
@pytest.mark.parametrize("lead", [(), (4,), (2, 3)], ids=str)
def test_outputs_may_be_changed_in_place(lead: tuple[int, ...], fmt: str | None) -> None:
    """As those of nn.Linear: an output that autograd takes for a view of something refuses."""
    weight = random_blocks("Q4_K", 7, 300) if fmt else torch.randn(7, 300)
    x, scale = _leaves((*lead, 300), (300,), dtype=torch.float32)

    def outputs() -> list[torch.Tensor]:
        normed = ops.norm_linear(x, scale, None, weight, fmt, 300, normalization="rmsnorm", eps=1e-5)
        return [normed, ops.linear(x, weight, fmt, 300)] if fmt else [normed]

    for changed, plain in zip(outputs(), outputs(), strict=True):
        assert not changed._is_view()
        changed.mul_(2).relu_().square().sum().backward()
        found, x.grad = x.grad, None
        (2 * plain).relu().square().sum().backward()
        assert torch.equal(found, x.grad) and found.count_nonzero()
        x.grad = None


def _op_calls(batch: tuple[int, ...]) -> list[tuple[torch._ops.OpOverload, tuple, dict]]:
    weight = random_blocks("Q4_K", 7, 300)
    x = random_activations(*batch, 300).requires_grad_()
    strided = random_activations(*batch, 600)[..., ::2].requires_grad_()
    bias, scale, shift = _leaves((7,), (300,), (300,), dtype=torch.float32)
    norm = {"normalization": "layernorm", "eps": 1e-5}
    return [
        (OPS.linear.default, (x, weight, "Q4_K", 300, bias), {}),
        (OPS.linear.default, (strided, weight, "Q4_K", 300), {"activations": "int8"}),
        (OPS.linear.default, (x.detach().to(torch.bfloat16), weight, "Q4_K", 300), {}),
        (
            OPS.embedding.default,
            (torch.zeros(batch, dtype=torch.int64), weight, "Q4_K", 300),
            {"dtype": torch.float16},
        ),
        (OPS.dequantize.default, (weight, "Q4_K", 300), {"dtype": torch.bfloat16}),
        (OPS.norm_linear.default, (x, scale, shift, weight, "Q4_K", 300, bias), norm),
        (OPS.norm_linear.default, (strided, scale, None, torch.randn(7, 300), None, 300), norm),
        (OPS.quantize_activations.default, (strided.detach(), "Q4_K"), {}),
        (
            OPS.linear_quantized.default,
            (*OPS.quantize_activations(x.detach(), "Q4_K"), weight, "Q4_K", 300, bias.detach()),
            {},
        ),
    ]


@pytest.mark.parametrize("batch", [(0,), ()], ids=str)
@pytest.mark.parametrize("call", range(len(_op_calls((1,)))))
def test_opcheck(call: int, batch: tuple[int, ...]) -> None:
    op, args, kwargs = _op_calls(batch)[call]
    torch.library.opcheck(op, args, kwargs)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_graph_breaks(dynamic: bool) -> None:
    weight, table = random_blocks("Q4_K", 300, 300), random_blocks("Q8_0", 50, 300)
    scale = torch.randn(300, requires_grad=True)

    def model(ids: torch.Tensor) -> torch.Tensor:
        h = ops.embedding(ids, table, "Q8_0", 300)
        h = ops.linear(h * scale, weight, "Q4_K", 300)
        return ops.norm_linear(h, scale, None, weight, "Q4_K", 300, normalization="rmsnorm", eps=1e-5)

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for batch in (3, 5):
        ids = torch.arange(batch)
        expected, actual = model(ids), compiled(ids)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
        (expected_grad,) = torch.autograd.grad(expected.square().mean(), scale)
        (actual_grad,) = torch.autograd.grad(actual.square().mean(), scale)
        torch.testing.assert_close(actual_grad, expected_grad, rtol=1e-5, atol=1e-5)
