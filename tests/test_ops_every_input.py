"""Every float input of every registered op has its derivatives in every mode, or the op refuses."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import random_blocks
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.utils._pytree import tree_leaves

from realizar_torch import ops
from realizar_torch.errors import FormatError

OPS = torch.ops.realizar_torch
ROWS, COLUMNS = 2, 5
A, B = (random_blocks("Q4_K", ROWS, COLUMNS, seed) for seed in (0, 1))
EXPERTS, IDS = torch.stack([A, B]), torch.tensor([[0, 1], [1, 1]])
TABLE = ("Q4_K", COLUMNS)


def _randn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


def _normed(weight: Tensor, fmt: str | None, lead: tuple[int, ...], normalization: str) -> tuple:
    scale, shift, bias = _randn(COLUMNS), _randn(COLUMNS), _randn(ROWS)
    arguments = (_randn(*lead, COLUMNS), scale, shift, weight, fmt, COLUMNS, bias)
    return arguments, {"normalization": normalization, "eps": 1e-2}


def _quantized() -> tuple:
    qx = ops.quantize_activations(_randn(2, COLUMNS), "Q4_K")
    return qx.q, qx.scale, qx.sums, A, *TABLE, _randn(ROWS, dtype=torch.float32)


# together, the samples of an op give it every tensor that it may have
SAMPLES: dict[str, tuple[Callable[[], tuple[tuple, dict[str, Any]]], ...]] = {
    "linear": (
        lambda: ((_randn(2, COLUMNS), A, *TABLE, _randn(ROWS)), {}),
        lambda: ((_randn(COLUMNS), A, *TABLE, _randn(ROWS)), {}),
        lambda: (
            (_randn(1, 2, COLUMNS), random_blocks("Q5_1", ROWS, COLUMNS), "Q5_1", COLUMNS, _randn(ROWS)),
            {},
        ),
    ),
    "linears": (
        lambda: (
            (_randn(2, COLUMNS), [A, B], ["Q4_K"] * 2, COLUMNS, [None, _randn(ROWS)]),
            {"layouts": ["ggml"] * 2},
        ),
    ),
    "gated_linear": (lambda: ((_randn(2, COLUMNS), A, B, *TABLE), {"activation": "silu"}),),
    "norm_linear": (
        lambda: _normed(A, "Q4_K", (2,), "layernorm"),
        lambda: _normed(A, "Q4_K", (), "rmsnorm"),
        lambda: _normed(_randn(ROWS, COLUMNS), None, (2,), "rmsnorm"),
        lambda: _normed(_randn(ROWS, COLUMNS), None, (1, 1), "layernorm"),
    ),
    "expert_linear": (
        lambda: ((_randn(2, 1, COLUMNS), IDS, EXPERTS, *TABLE), {}),
        lambda: ((_randn(2, 2, COLUMNS), IDS, EXPERTS, *TABLE), {}),
    ),
    "expert_linear_transposed": (lambda: ((_randn(2, 2, ROWS), IDS, EXPERTS, *TABLE), {}),),
    "embedding": (lambda: ((IDS, A, *TABLE), {"dtype": torch.float64}),),
    "dequantize": (lambda: ((A, *TABLE), {"dtype": torch.float64}),),
}
REFUSED: dict[str, Callable[[], tuple]] = {
    "quantize": lambda: (_randn(ROWS, COLUMNS), "Q8_0", _randn(COLUMNS).abs()),
    "quantize_activations": lambda: (_randn(2, COLUMNS), "Q4_K"),
    "linear_quantized": _quantized,
}


def _floats(arguments: Any) -> list[Tensor]:
    leaves = tree_leaves(arguments)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _with_floats(arguments: Any, values: list[Tensor]) -> Any:
    """The same arguments with other float tensors; takes them from ``values``."""
    if isinstance(arguments, list | tuple):
        return type(arguments)(_with_floats(argument, values) for argument in arguments)
    if isinstance(arguments, Tensor) and arguments.is_floating_point():
        return values.pop(0)
    return arguments


def test_every_tensor_of_every_op_is_in_a_sample() -> None:
    """The dispatcher knows what this package has registered."""
    names = torch._C._dispatch_get_all_op_names()
    ours = {name.removeprefix("realizar_torch::") for name in names if name.startswith("realizar_torch::")}
    assert SAMPLES.keys() | REFUSED.keys() == ours
    for name in ours:
        calls = [sample()[0] for sample in SAMPLES.get(name, ())] or [REFUSED[name]()]
        for place, argument in enumerate(getattr(OPS, name).default._schema.arguments):
            if "Tensor" in str(argument.type):
                given = [leaf for call in calls if place < len(call) for leaf in tree_leaves(call[place])]
                assert any(isinstance(leaf, Tensor) for leaf in given), f"{name} never gets {argument.name}"


@pytest.mark.parametrize(
    ("name", "sample"),
    [pytest.param(name, s, id=f"{name}-{i}") for name, all_ in SAMPLES.items() for i, s in enumerate(all_)],
)
def test_derivatives_in_every_mode_to_second_order(name: str, sample: Callable) -> None:
    arguments, options = sample()
    inputs = [tensor.requires_grad_() for tensor in _floats(arguments)]

    def function(*values: Tensor) -> Tensor:
        return getattr(OPS, name)(*_with_floats(arguments, list(values)), **options)

    if not inputs:
        assert not function().requires_grad
        return
    every = {"check_batched_grad": True, "check_forward_ad": True, "check_batched_forward_grad": True}
    assert gradcheck(function, inputs, **every)
    assert gradgradcheck(function, inputs, check_batched_grad=True)


def _reverse(function: Callable[[Tensor], Tensor], value: Tensor) -> Any:
    return function(value.clone().requires_grad_())


def _forward(function: Callable[[Tensor], Tensor], value: Tensor) -> Any:
    with forward_ad.dual_level():
        return function(forward_ad.make_dual(value, torch.ones_like(value)))


def _total(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda value: sum(part.float().sum() for part in tree_leaves(function(value)))


MODES: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "reverse": _reverse,
    "forward": _forward,
    "grad": lambda f, v: torch.func.grad(_total(f))(v),
    "jvp": lambda f, v: torch.func.jvp(f, (v,), (v,)),
    "jvp-without-grad-mode": lambda f, v: torch.no_grad()(lambda: torch.func.jvp(f, (v,), (v,)))(),
    "vmap-of-grad": lambda f, v: torch.func.vmap(torch.func.grad(_total(f)))(torch.stack([v, v])),
    # of the outer transform alone
    "grad-around-grad": lambda f, v: torch.func.grad(
        lambda value: torch.func.grad(lambda other: other * _total(f)(value))(torch.ones(()))
    )(v),
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize(("name", "sample"), REFUSED.items(), ids=REFUSED)
def test_what_has_no_derivative_is_refused_by_the_op_itself(
    name: str, sample: Callable, mode: Callable
) -> None:
    arguments = sample()
    inputs = _floats(arguments)
    assert inputs
    for place, value in enumerate(inputs):

        def function(value: Tensor, place: int = place) -> Any:
            values = [*inputs[:place], value, *inputs[place + 1 :]]
            return getattr(OPS, name)(*_with_floats(arguments, values))

        with pytest.raises(FormatError, match="no derivative"):
            mode(function, value)
        with torch.no_grad():
            kept = function(value.clone().requires_grad_())
        for found, expected in zip(tree_leaves(kept), tree_leaves(function(value)), strict=True):
            assert torch.equal(found, expected)
