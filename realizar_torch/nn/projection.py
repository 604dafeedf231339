"""Several linear modules applied to one input, which is quantized once for all of them."""

import sys
from collections.abc import Sequence
from typing import TypeGuard

from torch import Tensor, nn
from torch.nn.modules import module as hooks

from realizar_torch import ops
from realizar_torch.nn.layout import stored_by
from realizar_torch.nn.linear import QuantizedLinear
from realizar_torch.ops.gates import GATES


def project(x: Tensor, linears: Sequence[nn.Module]) -> Sequence[Tensor]:
    """x [..., in_features] -> one [..., out_features] per module, what ``linear(x)`` gives.

    Packed modules of int8 activations are one op, ``ops.linears``, whose result their outputs are views of.
    Modules that are hooked, wrapped or of another kind get ``x`` themselves.
    """
    if not are_shared(linears):
        return [linear(x) for linear in linears]
    weights = [stored_by(linear) for linear in linears]
    joined = ops.linears(
        x,
        weights,
        [linear.fmt for linear in linears],
        linears[0].in_features,
        [linear.bias for linear in linears],
        activations="int8",
        layouts=[linear.layout for linear in linears],
    )
    outputs, column = [], 0
    for weight in weights:
        # not by split, whose views nobody may change in place where gradients are wanted
        outputs.append(joined.narrow(-1, column, len(weight)))
        column += len(weight)
    return outputs


def gated(x: Tensor, gate: nn.Module, up: nn.Module, activation: str) -> Tensor:
    """activation(gate(x)) * up(x), as one op where ``are_gated``."""
    pair = (gate, up)
    if not are_gated(pair):
        gates, ups = project(x, pair)
        return GATES[activation](gates) * ups
    first, second = pair
    return ops.gated_linear(
        x,
        stored_by(first),
        stored_by(second),
        first.fmt,
        first.in_features,
        activation=activation,
        activations=first.activations,
        layout=first.layout,
    )


def are_shared(linears: Sequence[nn.Module]) -> TypeGuard[Sequence[QuantizedLinear]]:
    """Whether ``project`` is one op: packed modules of int8 activations and one width that only multiply."""
    return (
        all(_only_multiplies(linear) and linear.activations == "int8" for linear in linears)
        and len({linear.in_features for linear in linears}) == 1
    )


def are_gated(pair: Sequence[nn.Module]) -> TypeGuard[Sequence[QuantizedLinear]]:
    """Whether ``gated`` is one op: two packed modules alike, without biases, that only multiply."""
    kinds = [
        (linear.fmt, linear.layout, linear.activations, linear.in_features, stored_by(linear).shape)
        for linear in pair
        if _only_multiplies(linear) and linear.bias is None
    ]
    return len(kinds) == 2 and kinds[0] == kinds[1]


def _only_multiplies(module: nn.Module) -> TypeGuard[QuantizedLinear]:
    # not type(module): a compiled model would compare those of each two modules in every call
    # and not what has_own_forward looks up in the class that it is given, for the same reason
    return (
        module.__class__ is QuantizedLinear
        and QuantizedLinear.forward is QuantizedLinear.own_forward
        and is_plain(module)
    )


def has_own_forward(kind: type[nn.Module]) -> bool:
    """Whether a class that a faster way replaces computes what it was written to.

    Such classes remember their forward: that of a subclass, or one that somebody has put in its place, is
    another. Those of torch and transformers have no memory of it, but it was defined where they were.
    """
    if kind.__module__.startswith(("torch.", "transformers.")):
        return getattr(kind.forward, "__globals__", None) is vars(sys.modules[kind.__module__])
    return kind.forward is getattr(kind, "own_forward", None)


def is_plain(module: nn.Module) -> bool:
    """Whether calling it is its class's forward and nothing else: accelerate's hooks, for one, replace it."""
    return (
        "forward" not in module.__dict__
        and not (module._forward_hooks or module._forward_pre_hooks)
        and not (module._backward_hooks or module._backward_pre_hooks)
        and not hooks._has_any_global_hook()
    )
