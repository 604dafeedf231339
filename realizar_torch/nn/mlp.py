"""The two kinds of MLP: down(activation(gate(x)) * up(x)), and down(activation(up(x)))."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from realizar_torch.nn.projection import gated
from realizar_torch.ops.checks import check_choice
from realizar_torch.ops.gates import GATES


def activation_of(name: str) -> Callable[[Tensor], Tensor]:
    """The function called "silu", "gelu" (exact) or "gelu_tanh"; FormatError for other names."""
    check_choice("activation", name, tuple(GATES))
    return GATES[name]


class GatedMLP(nn.Module):
    """``activation``: "silu", "gelu" (exact) or "gelu_tanh"; the projections are packed or dense."""

    gate_proj: Any
    up_proj: Any
    down_proj: Any

    def __init__(self, gate_proj: nn.Module, up_proj: nn.Module, down_proj: nn.Module, *, activation: str):
        super().__init__()
        check_choice("activation", activation, tuple(GATES))
        self.gate_proj, self.up_proj, self.down_proj = gate_proj, up_proj, down_proj
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] -> [..., hidden]."""
        return self.down_proj(gated(x, self.gate_proj, self.up_proj, self.activation))

    own_forward = forward

    def extra_repr(self) -> str:
        return self.activation


class MLP(nn.Module):
    """Without a gate; otherwise as GatedMLP."""

    up_proj: Any
    down_proj: Any

    def __init__(self, up_proj: nn.Module, down_proj: nn.Module, *, activation: str):
        super().__init__()
        check_choice("activation", activation, tuple(GATES))
        self.up_proj, self.down_proj, self.activation = up_proj, down_proj, activation

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] -> [..., hidden]."""
        return self.down_proj(GATES[self.activation](self.up_proj(x)))

    own_forward = forward

    def extra_repr(self) -> str:
        return self.activation
