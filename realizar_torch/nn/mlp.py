"""Gated MLP: down(activation(gate(x)) * up(x))."""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from realizar_torch.errors import FormatError
from realizar_torch.nn.projection import project


class GatedMLP(nn.Module):
    """``activation`` is "silu" or "gelu_tanh"; the projections are given by the caller (packed or dense)."""

    gate_proj: Any
    up_proj: Any
    down_proj: Any

    def __init__(self, gate_proj: nn.Module, up_proj: nn.Module, down_proj: nn.Module, *, activation: str):
        super().__init__()
        if activation not in ("silu", "gelu_tanh"):
            raise FormatError(f"activation {activation!r} is unknown; known: silu, gelu_tanh")
        self.gate_proj, self.up_proj, self.down_proj = gate_proj, up_proj, down_proj
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] -> [..., hidden]."""
        gate, up = project(x, (self.gate_proj, self.up_proj))
        if self.activation == "silu":
            gate = functional.silu(gate)
        else:
            gate = functional.gelu(gate, approximate="tanh")
        return self.down_proj(gate * up)

    def extra_repr(self) -> str:
        return self.activation
