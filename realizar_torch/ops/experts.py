"""Products with the weights of chosen experts: one launch for few rows, one product per expert for many."""

from typing import Any

import torch
from torch import Tensor

from realizar_torch.errors import FormatError
from realizar_torch.ops import bodies, checks, cpu, cuda, derivatives, torch_kernels
from realizar_torch.ops.autograd import times_weight
from realizar_torch.ops.grouping import by_expert
from realizar_torch.ops.library import LIBRARY
from realizar_torch.ops.recording import recorded
from realizar_torch.reference import padded_features

# Rows of a decode step: up to this many a GPU is given all work at once and nobody waits for it.
STEP_ROWS = 32


def expert_linear(
    kernels: bodies.Kernels,
    x: Tensor,
    experts: Tensor,
    weight: Tensor,
    fmt: str,
    in_features: int,
    *,
    activations: str = "float",
    layout: str = "ggml",
) -> Tensor:
    checks.check_expert_linear(x, experts, weight, fmt, in_features, activations, layout)
    bodies.require_canonical(layout, weight.device)
    ids = experts.reshape(-1).to(torch.int64).contiguous()
    if ids.numel():
        low, high = (int(end) for end in ids.aminmax())
        if low < 0 or high >= weight.shape[0]:
            raise FormatError(f"expert {low if low < 0 else high} is none of the {weight.shape[0]}")
    rows, share = _rows(x, experts)
    y = rows.new_empty(len(ids), weight.shape[1])
    if _prefers_matvec(ids, weight) and x.dtype != torch.float64:
        xs: Any = rows.to(torch.float32).contiguous()
        if activations == "int8":
            xs = kernels.quantize_activations(xs, fmt)
        y.copy_(kernels.expert_matvec(xs, ids, weight.contiguous(), fmt, in_features, share))
    else:
        order, spans = by_expert(ids, weight.shape[0])
        xs, ys = rows[order // share], torch.empty_like(y)
        for expert, span in spans:
            ys[span] = bodies.product(kernels, xs[span], weight[expert], fmt, None, activations)
        y[order] = ys
    return y.view(*experts.shape, weight.shape[1])


def _prefers_matvec(ids: Tensor, weight: Tensor) -> bool:
    # fewer choices than experts: most experts would have a product of one row
    return len(ids) <= weight.shape[0]


def _rows(x: Tensor, experts: Tensor) -> tuple[Tensor, int]:
    """``x`` as a matrix, and how many choices in a row take the same row of it."""
    return x.reshape(-1, x.shape[-1]), experts.shape[-1] // x.shape[-2]


def on_cuda(
    x: Tensor,
    experts: Tensor,
    weight: Tensor,
    fmt: str,
    in_features: int,
    *,
    activations: str = "float",
    layout: str = "ggml",
) -> Tensor:
    """As on the CPU, but an expert that there is not gives a row of NaN: an error would have to wait."""
    checks.check_expert_linear(x, experts, weight, fmt, in_features, activations, layout)
    ids, weight = experts.reshape(-1).to(torch.int64).contiguous(), weight.contiguous()
    rows, share = _rows(x, experts)
    kernels_take = x.dtype != torch.float64
    if kernels_take and len(ids) <= STEP_ROWS * experts.shape[-1]:
        y = _matvec(rows, ids, weight, fmt, share, activations, layout)
        return y.view(*experts.shape, weight.shape[1])
    order, spans = by_expert(ids, weight.shape[0])
    xs, ys = rows[order // share], rows.new_full((len(ids), weight.shape[1]), torch.nan)
    alone: list[int] = []
    for expert, span in spans:
        if kernels_take and span.stop - span.start <= cuda.MATVEC_ROWS:
            alone += range(span.start, span.stop)
            continue
        ys[span] = cuda.linear(
            xs[span], weight[expert], fmt, in_features, activations=activations, layout=layout
        )
    if alone:
        few = torch.tensor(alone, device=ids.device)
        ys[few] = _matvec(xs[few], ids[order[few]], weight, fmt, 1, activations, layout)
    y = torch.empty_like(ys)
    y[order] = ys
    return y.view(*experts.shape, weight.shape[1])


def _matvec(
    rows: Tensor, ids: Tensor, weight: Tensor, fmt: str, share: int, activations: str, layout: str
) -> Tensor:
    from realizar_torch.triton_kernels import experts, quantize

    if activations == "float":
        return experts.expert_matvec(rows, ids, weight, fmt, share, layout=layout)
    q = quantize.quantize_activations(rows, padded_features(rows.shape[1], fmt))
    return experts.expert_matvec_int8(
        *q, ids, weight, fmt, rows.shape[1], share, out_dtype=rows.dtype, layout=layout
    )


def expert_linear_transposed(
    grad: Tensor, experts: Tensor, weight: Tensor, fmt: str, in_features: int, *, layout: str = "ggml"
) -> Tensor:
    """``grad [..., used, N]`` times the weight of each row's expert → [..., used, in_features]."""
    checks.check_expert_transposed(grad, experts, weight, fmt, in_features, layout)
    if grad.is_cuda and cuda.problem() is None:
        from realizar_torch.triton_kernels.launch import require_layout

        # no kernel is launched where no row chose an expert
        require_layout(fmt, layout)
    else:
        bodies.require_canonical(layout, grad.device)
    ids, rows = experts.reshape(-1), grad.reshape(-1, grad.shape[-1])
    order, spans = by_expert(ids, weight.shape[0])
    sorted_rows, product = rows[order], rows.new_zeros(len(rows), in_features)
    for expert, span in spans:
        product[order[span]] = times_weight(sorted_rows[span], weight[expert], fmt, in_features, layout)
    return product.view(*experts.shape, in_features)


def _save(
    ctx: Any,
    x: Tensor,
    experts: Tensor,
    weight: Tensor,
    fmt: str,
    in_features: int,
    *,
    layout: str = "ggml",
    **numerics: str,
) -> None:
    ctx.fmt, ctx.in_features, ctx.layout, ctx.shared = fmt, in_features, layout, x.shape[-2] == 1
    ctx.save_for_backward(experts, weight)
    ctx.save_for_forward(experts, weight)


def _backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
    """``grad_x = grad_y @ W`` of each row's expert, summed where a row of ``x`` went to several."""
    experts, weight = ctx.saved_tensors
    grad_x = torch.ops.realizar_torch.expert_linear_transposed(
        grad_y, experts, weight, ctx.fmt, ctx.in_features, layout=ctx.layout
    )
    return (grad_x.sum(-2, keepdim=True) if ctx.shared else grad_x), None, None, None, None


def _jvp(ctx: Any, x_t: Tensor, *_: None) -> Tensor:
    experts, weight = ctx.saved_tensors
    return torch.ops.realizar_torch.expert_linear(
        x_t, experts, weight, ctx.fmt, ctx.in_features, layout=ctx.layout
    )


def _transposed_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _jvp(ctx, grad), None, None, None, None


def _transposed_jvp(ctx: Any, grad_t: Tensor, *_: None) -> Tensor:
    experts, weight = ctx.saved_tensors
    return torch.ops.realizar_torch.expert_linear_transposed(
        grad_t, experts, weight, ctx.fmt, ctx.in_features, layout=ctx.layout
    )


def _cpu(*args: Any, **kwargs: Any) -> Tensor:
    return expert_linear(cpu.kernels(), *args, **kwargs)


def _torch(*args: Any, **kwargs: Any) -> Tensor:
    return expert_linear(torch_kernels, *args, **kwargs)


LIBRARY.impl("expert_linear", recorded("expert_linear", _cpu), "CPU")
LIBRARY.impl("expert_linear", recorded("expert_linear", cuda.with_kernels(on_cuda, expert_linear)), "CUDA")
LIBRARY.impl("expert_linear", _torch, "CompositeExplicitAutograd")
LIBRARY.impl("expert_linear_transposed", expert_linear_transposed, "CompositeExplicitAutograd")
derivatives.register("expert_linear", _save, _backward, _jvp)
derivatives.register("expert_linear_transposed", _save, _transposed_backward, _transposed_jvp)
