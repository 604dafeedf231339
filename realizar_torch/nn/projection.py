"""Several linear modules applied to one input, whose activations are quantized once for all of them."""

from collections.abc import Sequence

from torch import Tensor, nn

from realizar_torch import ops
from realizar_torch.nn.linear import QuantizedLinear
from realizar_torch.ops.cuda import MATVEC_ROWS


def project(x: Tensor, linears: Sequence[nn.Module]) -> list[Tensor]:
    """x [..., in_features] -> one [..., out_features] per module, each equal to ``linear(x)``."""
    # many rows on a GPU go through float matrix products
    quantizes = not x.is_cuda or x.numel() // x.shape[-1] <= MATVEC_ROWS
    if not quantizes or not all(isinstance(m, QuantizedLinear) and m.activations == "int8" for m in linears):
        return [linear(x) for linear in linears]
    shared: dict[int, ops.QuantizedActivations] = {}
    outputs = []
    for linear in linears:
        assert isinstance(linear, QuantizedLinear)
        width = linear.padded_features
        if width not in shared:
            shared[width] = ops.quantize_activations(x, linear.fmt)
        outputs.append(linear(shared[width]).view(*x.shape[:-1], -1).to(x.dtype))
    return outputs
