"""MLPs and attentions of transformers whose packed projections multiply their one input together.

A module gets a class that extends its own by a ``forward``; parameters, names and hooks stay where they are.
Where a projection is hooked, adapted or replaced, or the forward of a class of transformers patched since a
module of it was first extended, the module's forward is that of transformers.
"""

import inspect
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from transformers.activations import ACT2CLS

from realizar_torch.hf.extended import Extended, extend
from realizar_torch.nn.projection import (
    are_gated,
    are_shared,
    gated,
    has_own_forward,
    is_plain,
    project,
)

_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
# of the names that transformers has for them
_GATES = {
    kind: (name, kind.forward)
    for kind, name in (
        (ACT2CLS["silu"], "silu"),
        (ACT2CLS["swish"], "silu"),
        (ACT2CLS["gelu"], "gelu"),
        (ACT2CLS["gelu_pytorch_tanh"], "gelu_tanh"),
    )
    if has_own_forward(kind)
}


def share_inputs(model: nn.Module) -> None:
    """Extends every gated MLP and every attention with q, k and v of ``model``, whatever they are called.

    For a transformers model that ``rt.quantize_model`` has packed; ``from_gguf`` and ``from_pretrained`` call
    it. Where projections are not packed, modules go on as before.
    """
    for module in model.modules():
        for kind in (_GatedMLP, _Attention):
            if not isinstance(module, Extended) and kind.extends(type(module), module):
                extend(module, kind)


class _GatedMLP(Extended):
    gate_proj: Any
    up_proj: Any
    down_proj: Any
    act_fn: Any

    @staticmethod
    def extends(kind: type[nn.Module], module: nn.Module) -> bool:
        """Whether its forward is down(act(gate(x)) * up(x)), of an ``x`` of that name: tried with numbers."""
        if not all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")):
            return False
        if list(inspect.signature(kind.forward).parameters) != ["self", "x"]:
            return False
        trial: Any = SimpleNamespace(
            gate_proj=lambda x: x + 1,
            up_proj=lambda x: x + 2,
            down_proj=lambda x: 3 * x,
            act_fn=lambda x: x + 4,
        )
        try:
            return kind.forward(trial, 5) == 3 * (5 + 1 + 4) * (5 + 2)
        except Exception:
            # of any kind: it needs more than that
            return False

    def forward(self, x: Tensor) -> Tensor:
        activation = _gate(self.act_fn)
        patched = self.extended_class.forward is not self.own_forward
        if activation is None or patched or not are_gated((self.gate_proj, self.up_proj)):
            return super().forward(x)
        return self.down_proj(gated(x, self.gate_proj, self.up_proj, activation))


def _gate(activation: Any) -> str | None:
    """The name of an activation that kernels know, as long as nobody has changed it or its class."""
    kind = type(activation)
    name, forward = _GATES.get(kind, (None, None))
    return name if name and kind.forward is forward and is_plain(activation) else None


class _Attention(Extended):
    q_proj: Any
    k_proj: Any
    v_proj: Any

    @staticmethod
    def extends(kind: type[nn.Module], module: nn.Module) -> bool:
        """Whether it has such projections, and one input, by the names that transformers gives them.

        Of two inputs, as in a decoder behind an encoder, keys and values would be made for nothing.
        """
        if not all(hasattr(module, name) for name in _PROJECTIONS):
            return False
        first, *others = list(inspect.signature(kind.forward).parameters)[1:] or [""]
        one_input = first == "hidden_states" and not any(name.endswith("_states") for name in others)
        # super() in a forward refuses a stand-in for the module
        return one_input and "__class__" not in inspect.unwrap(kind.forward).__code__.co_freevars

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        projections = [getattr(self, name) for name in _PROJECTIONS]
        patched = self.extended_class.forward is not self.own_forward
        if patched or not are_shared(projections):
            return super().forward(hidden_states, *args, **kwargs)
        outputs = project(hidden_states, projections)
        return self.own_forward(_Projected(self, hidden_states, outputs), hidden_states, *args, **kwargs)


class _Projected:
    """An attention, to its own forward, whose projections of ``x`` are known."""

    def __init__(self, attention: nn.Module, x: Tensor, outputs: Sequence[Tensor]) -> None:
        for name, value in (("_attention", attention), ("_x", x), ("_outputs", outputs)):
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._attention, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._attention, name, value)

    def q_proj(self, x: Tensor) -> Tensor:
        return self._output(0, x)

    def k_proj(self, x: Tensor) -> Tensor:
        return self._output(1, x)

    def v_proj(self, x: Tensor) -> Tensor:
        return self._output(2, x)

    def _output(self, index: int, x: Tensor) -> Tensor:
        if x is self._x:
            return self._outputs[index]
        return getattr(self._attention, _PROJECTIONS[index])(x)
