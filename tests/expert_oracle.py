"""What a mixture of experts computes, in float64 of its decoded weights, and how far rounding may take it."""

import torch
from torch import Tensor
from torch.nn import functional

from realizar_torch import reference
from realizar_torch.nn.experts import MixtureOfExperts, QuantizedExperts, choose_experts
from realizar_torch.nn.linear import QuantizedLinear

# Roundings are independent of each other: their effects add as squares, and six deviations are never reached.
_DEVIATIONS = 6
# the steepest slope of x * sigmoid(x)
_SILU_SLOPE = 1.1


def mixture_oracle(mixture: MixtureOfExperts, x: Tensor) -> tuple[Tensor, Tensor]:
    """x [N, hidden] -> values and their largest errors, both float64 [N, hidden].

    Products, activations and sums round to the dtype of ``x``; int8 activations are rounded exactly as the
    reference does, except for those so near to the next quant that an error reaches it. No two experts may be
    so close that rounding decides between them.
    """
    router, exact = mixture.router.weight.double(), x.double()
    scores, score_error = exact @ router.T, _sum_error(exact, router, torch.float32).amax(-1, keepdim=True)
    in_order = scores.sort(-1, descending=True).values
    if mixture.used < len(router):
        gap = in_order[:, mixture.used - 1] - in_order[:, mixture.used]
        assert (gap > 2 * _DEVIATIONS * score_error[:, 0]).all()
    shares, chosen = choose_experts(scores, mixture.used, mixture.normalized)
    values, variance = torch.zeros_like(exact), torch.zeros_like(exact)
    for place in range(mixture.used):
        pairs = zip(x, chosen[:, place], strict=True)
        rows = [_gated(mixture.experts, row[None], int(expert)) for row, expert in pairs]
        y, error = (torch.cat(parts) for parts in zip(*rows, strict=True))
        share = shares[:, place, None]
        values += share * y
        # a share is a quotient of exponentials of scores
        variance += (share * error) ** 2 + (share * y * (2 * score_error + _epsilon(torch.float32))) ** 2
    if mixture.shared_expert is not None and mixture.shared_gate is not None:
        y, error = _gated(mixture.shared_expert, x)
        gate = mixture.shared_gate.weight.double()
        share = (exact @ gate.T).sigmoid()
        share_error = _sum_error(exact, gate, torch.float32) / 4 + _epsilon(torch.float32)
        values += share * y
        variance += (share * error) ** 2 + (share_error * y) ** 2
    return values, _DEVIATIONS * (variance + (_epsilon(x.dtype) * values) ** 2).sqrt()


def _gated(mlp, x: Tensor, expert: int | None = None) -> tuple[Tensor, Tensor]:
    """The MLP, or one of the experts' MLPs, and the deviation of its values."""
    exact, dtype = x.double(), x.dtype
    gate, gate_error = _product(mlp.gate_proj, exact, torch.zeros_like(exact), dtype, expert)
    up, up_error = _product(mlp.up_proj, exact, torch.zeros_like(exact), dtype, expert)
    inner = functional.silu(gate) * up
    # of the factors, and of rounding silu and the product
    parts = (_SILU_SLOPE * gate_error * up, functional.silu(gate) * up_error, 2 * _epsilon(dtype) * inner)
    return _product(mlp.down_proj, inner, sum(part**2 for part in parts) ** 0.5, dtype, expert)


def _product(
    module, x: Tensor, error: Tensor, dtype: torch.dtype, expert: int | None
) -> tuple[Tensor, Tensor]:
    """x, whose deviation is ``error``, times the weight of a module, and the deviation of that."""
    packed = isinstance(module, QuantizedLinear | QuantizedExperts)
    weight = (module.dequantize(torch.float64) if packed else module.weight.double()).detach()
    weight = weight if expert is None else weight[expert]
    if packed and module.activations == "int8":
        x, error = _quantized(x, error, module.fmt)
    carried = (error**2 @ (weight**2).T).sqrt()
    return x @ weight.T, (carried**2 + _sum_error(x, weight, dtype) ** 2).sqrt()


def _sum_error(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Deviation of sums of some hundred products: twice epsilon times the root of their squares.

    The k-th partial sum of K is of size sqrt(k) and its rounding error at most epsilon / 2 of it, 0.3 epsilon
    on average: 0.3 epsilon * sqrt(K / 2) in all, which is 2 epsilon for K = 96. Factors may have been rounded
    to ``dtype`` too, and the sum is.
    """
    return 2 * _epsilon(dtype) * (x**2 @ (weight**2).T).sqrt() + _epsilon(dtype) * (x @ weight.T).abs()


def _quantized(x: Tensor, error: Tensor, fmt: str) -> tuple[Tensor, Tensor]:
    """x as its quants say, and their deviation: that of their scale, and a step where an error reaches it."""
    width = x.shape[-1]
    q = reference.quantize_activations(x.float(), fmt)
    scale, quants = q.scale.double().repeat_interleave(32, -1)[..., :width], q.q.double()[..., :width]
    largest = functional.pad(error, (0, -width % 32)).unflatten(-1, (-1, 32)).amax(-1)
    scale_error = largest.repeat_interleave(32, -1)[..., :width] / 127 + _epsilon(torch.float32) * scale
    reach = _DEVIATIONS * (error / scale + 127 * scale_error / scale)
    steps = torch.stack([(x / scale + side * reach).round() - quants for side in (-1, 1)]).abs().amax(0)
    return quants * scale, steps * scale + quants.abs() * scale_error


def _epsilon(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps
