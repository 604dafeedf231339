"""The ops under ``torch.autocast``: they cast as ``nn.Linear`` does, and norms compute in float32.

Lookups and decoding state their dtype and are left alone. ``float64`` tensors are never cast.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from realizar_torch.ops import checks
from realizar_torch.ops.arguments import NormLinear
from realizar_torch.ops.library import LIBRARY
from realizar_torch.ops.normalization import normalize

DEVICE_TYPES = ("cpu", "cuda")
Cast = Callable[[Any], Any]


def autocasts(x: Tensor) -> bool:
    """Whether the ops cast where ``x`` is."""
    return x.device.type in DEVICE_TYPES and torch.is_autocast_enabled(x.device.type)


def linear(
    cast: Cast,
    x: Tensor,
    weight: Tensor,
    fmt: str,
    in_features: int,
    bias: Tensor | None = None,
    **options: str,
) -> Tensor:
    return torch.ops.realizar_torch.linear(cast(x), weight, fmt, in_features, cast(bias), **options)


def linears(
    cast: Cast,
    x: Tensor,
    weights: Sequence[Tensor],
    fmts: Sequence[str],
    in_features: int,
    biases: Sequence[Tensor | None],
    **options: Any,
) -> Tensor:
    biases = [cast(bias) for bias in biases]
    return torch.ops.realizar_torch.linears(cast(x), weights, fmts, in_features, biases, **options)


def gated_linear(cast: Cast, x: Tensor, *args: Any, **options: str) -> Tensor:
    return torch.ops.realizar_torch.gated_linear(cast(x), *args, **options)


def expert_linear(
    cast: Cast, x: Tensor, experts: Tensor, weight: Tensor, fmt: str, in_features: int, **options: str
) -> Tensor:
    return torch.ops.realizar_torch.expert_linear(cast(x), experts, weight, fmt, in_features, **options)


def norm_linear(cast: Cast, *args: Any, **kwargs: Any) -> Tensor:
    """The norm of ``x`` as it is, then a product in the autocast dtype, like the two modules in a row."""
    call = NormLinear(*args, **kwargs)
    checks.check_norm_linear(call)
    normed = cast(normalize(call.x, call.norm_weight, call.norm_bias, call.normalization, call.eps))
    if call.fmt is None:
        return functional.linear(normed, cast(call.weight), cast(call.bias))
    options = {"activations": call.activations, "layout": call.layout}
    return linear(cast, normed, call.weight, call.fmt, call.in_features, call.bias, **options)


def _implementation(rule: Callable[..., Tensor], device_type: str) -> Callable[..., Tensor]:
    key = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autocast{device_type.upper()}"))

    def run(*args: Any, **kwargs: Any) -> Tensor:
        dtype = torch.get_autocast_dtype(device_type)

        def cast(x: Tensor | None) -> Tensor | None:
            if x is None or not x.is_floating_point() or x.dtype == torch.float64:
                return x
            return x.to(dtype)

        with torch._C._ExcludeDispatchKeyGuard(key):
            return rule(cast, *args, **kwargs)

    return run


for _name, _rule in (
    ("linear", linear),
    ("linears", linears),
    ("gated_linear", gated_linear),
    ("expert_linear", expert_linear),
    ("norm_linear", norm_linear),
):
    for _device_type in DEVICE_TYPES:
        LIBRARY.impl(_name, _implementation(_rule, _device_type), f"Autocast{_device_type.upper()}")
