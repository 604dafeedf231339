"""A mixture of experts in the place of an MLP: a router sends each token through a few gated MLPs of many."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from realizar_torch import ops
from realizar_torch.errors import FormatError
from realizar_torch.nn import packed
from realizar_torch.nn.layout import PackedModule, stored_by
from realizar_torch.nn.mlp import GatedMLP, activation_of
from realizar_torch.ops.autocast import autocasts
from realizar_torch.ops.grouping import by_expert
from realizar_torch.ops.normalization import compute_dtype
from realizar_torch.reference import padded_features


class QuantizedExperts(PackedModule):
    """One packed matrix for each expert; every row of the input is multiplied by those of its experts.

    ``weight``: ``uint8 [num_experts, out_features, row_bytes]``, frozen bytes of ``fmt`` blocks; everything
    else as in ``QuantizedLinear``.
    """

    def __init__(self, blocks: Tensor, in_features: int, fmt: str, *, activations: str = "float") -> None:
        super().__init__()
        packed.check_activations(activations)
        if blocks.ndim != 3 or 0 in blocks.shape:
            raise FormatError(f"blocks have shape {list(blocks.shape)}, expected [experts, rows, row_bytes]")
        packed.wrap_blocks(blocks[0], in_features, fmt)
        self.num_experts, self.out_features, _ = blocks.shape
        self.in_features, self.fmt, self.activations = in_features, fmt, activations
        self.weight = nn.Parameter(blocks, requires_grad=False)

    @property
    def columns(self) -> int:
        """``in_features``."""
        return self.in_features

    @property
    def padded_features(self) -> int:
        """As of a ``QuantizedLinear``."""
        return padded_features(self.in_features, self.fmt)

    def forward(self, x: Tensor, experts: Tensor) -> Tensor:
        """x [..., 1 or used, in_features], experts int64 [..., used] -> [..., used, out_features]."""
        return ops.expert_linear(
            x,
            experts,
            stored_by(self),
            self.fmt,
            self.in_features,
            activations=self.activations,
            layout=self.layout,
        )

    own_forward = forward

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The decoded weights ``[num_experts, out_features, in_features]``."""
        rows = self.stored.flatten(0, 1)
        values = ops.dequantize(rows, self.fmt, self.in_features, dtype=dtype, layout=self.layout)
        return values.unflatten(0, (self.num_experts, self.out_features))

    def extra_repr(self) -> str:
        return (
            f"{self.num_experts} experts, in_features={self.in_features}, out_features={self.out_features}, "
            f"activations={self.activations}, {super().extra_repr()}"
        )


class DenseExperts(nn.Module):
    """As ``QuantizedExperts``, with a float ``weight [num_experts, out_features, in_features]``."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor, experts: Tensor) -> Tensor:
        """x [..., 1 or used, in_features], experts int64 [..., used] -> [..., used, out_features]."""
        rows = x.expand(*experts.shape, x.shape[-1]).flatten(0, -2)
        ids, weight = experts.flatten(), self.weight
        if len(ids) <= ops.STEP_ROWS * experts.shape[-1]:
            # a token at a time: nobody waits for a GPU, and few matrices are copied at once
            used = experts.shape[-1]
            parts = zip(ids.split(used), rows.split(used), strict=True)
            y = torch.cat([(weight[chosen] @ row[..., None])[..., 0] for chosen, row in parts])
        else:
            order, spans = by_expert(ids, len(weight))
            rows = rows[order]
            products = [functional.linear(rows[span], weight[expert]) for expert, span in spans]
            y = torch.cat(products)[order.argsort()]
        # autocast computes in its own dtype
        return y.to(x.dtype).view(*experts.shape, weight.shape[1])

    own_forward = forward

    def extra_repr(self) -> str:
        experts, out_features, in_features = self.weight.shape
        return f"{experts} experts, in_features={in_features}, out_features={out_features}"


class GatedExperts(nn.Module):
    """down(activation(gate(x)) * up(x)) of each expert that a row goes to; packed or dense."""

    gate_proj: Any
    up_proj: Any
    down_proj: Any

    def __init__(self, gate_proj: nn.Module, up_proj: nn.Module, down_proj: nn.Module, *, activation: str):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate_proj, up_proj, down_proj
        activation_of(activation)
        self.activation = activation

    def forward(self, x: Tensor, experts: Tensor) -> Tensor:
        """x [..., hidden], experts int64 [..., used] -> [..., used, hidden]."""
        x = x[..., None, :]
        gate, up = self.gate_proj(x, experts), self.up_proj(x, experts)
        return self.down_proj(activation_of(self.activation)(gate) * up, experts)

    own_forward = forward

    def extra_repr(self) -> str:
        return self.activation


class Scores(nn.Module):
    """A small linear without bias, in float32 whatever the dtype of model or autocast: it decides on routes.

    ``weight [out_features, in_features]``, any float type; no nn.Linear, which would be quantized as one.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> float32 (float64 for float64) [..., out_features]."""
        dtype = compute_dtype(x.dtype)
        exact = torch.autocast(x.device.type, enabled=False) if autocasts(x) else nullcontext()
        with exact:
            return functional.linear(x.to(dtype), self.weight.to(dtype))

    own_forward = forward

    def extra_repr(self) -> str:
        return f"in_features={self.weight.shape[1]}, out_features={self.weight.shape[0]}"


class MixtureOfExperts(nn.Module):
    """Σ w·expert(x) over the ``used`` experts of the largest probability, and a shared one if there is one.

    The probabilities w are the softmax of all the ``router``'s scores; ``normalized`` makes those of the
    chosen experts add up to 1. The shared expert's output is multiplied by sigmoid(``shared_gate``(x)).
    """

    def __init__(
        self,
        router: Scores,
        experts: GatedExperts,
        shared_expert: GatedMLP | None = None,
        shared_gate: Scores | None = None,
        *,
        used: int,
        normalized: bool,
    ):
        super().__init__()
        self.router, self.experts = router, experts
        self.shared_expert, self.shared_gate = shared_expert, shared_gate
        self.used, self.normalized = used, normalized

    @property
    def shared(self) -> tuple[GatedMLP, Scores] | None:
        """The shared expert and its gate, where every row goes through one."""
        if self.shared_expert is None or self.shared_gate is None:
            return None
        return self.shared_expert, self.shared_gate

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] -> [..., hidden]."""
        weights, experts = choose_experts(self.router(x), self.used, self.normalized)
        y = (self.experts(x, experts) * weights[..., None]).sum(-2)
        if self.shared is not None:
            shared_expert, gate = self.shared
            y = y + gate(x).sigmoid() * shared_expert(x)
        return y.to(x.dtype)

    own_forward = forward

    def extra_repr(self) -> str:
        return f"used={self.used}, normalized={self.normalized}"


def choose_experts(scores: Tensor, used: int, normalized: bool) -> tuple[Tensor, Tensor]:
    """scores [..., experts] -> the largest probabilities and their experts, int64, both [..., used].

    Of equal scores the first come first, on every device.
    """
    experts = scores.sort(dim=-1, descending=True, stable=True).indices[..., :used]
    weights = scores.softmax(-1).gather(-1, experts)
    return (weights / weights.sum(-1, keepdim=True) if normalized else weights), experts
