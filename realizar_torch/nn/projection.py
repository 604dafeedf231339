"""Several linear modules applied to one input, whose activations are quantized once for all of them."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from realizar_torch import ops
from realizar_torch.nn.linear import QuantizedLinear
from realizar_torch.ops.autocast import autocasts
from realizar_torch.ops.cuda import INT8_MATVEC_ROWS


def project(x: Tensor, linears: Sequence[nn.Module]) -> list[Tensor]:
    """x [..., in_features] -> one [..., out_features] per module, each equal to ``linear(x)``.

    Modules that are hooked or have a bias to train, and an input that needs a gradient or that autocast would
    cast, get ``x`` itself: quantized activations carry none of that. So does a GPU's product of many rows,
    which takes other activations than int8.
    """
    sharable = all(_takes_quantized(linear) for linear in linears)
    many = x.is_cuda and x.numel() > INT8_MATVEC_ROWS * x.shape[-1]
    if not sharable or many or (x.requires_grad and torch.is_grad_enabled()) or autocasts(x):
        return [linear(x) for linear in linears]
    shared: dict[int, ops.QuantizedActivations] = {}
    outputs = []
    for linear in linears:
        assert isinstance(linear, QuantizedLinear)
        width = linear.padded_features
        if width not in shared:
            shared[width] = ops.quantize_activations(x, linear.fmt)
        outputs.append(linear(shared[width]).to(x.dtype))
    return outputs


def _takes_quantized(linear: nn.Module) -> bool:
    return (
        type(linear) is QuantizedLinear
        and linear.activations == "int8"
        and not (linear._forward_hooks or linear._forward_pre_hooks)
        and not (torch.is_grad_enabled() and linear.bias is not None and linear.bias.requires_grad)
    )
