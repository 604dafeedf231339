"""The op namespace ``realizar_torch``: frozen schemas, and beside each the fake that tracing uses."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import register_fake

from realizar_torch.ops import checks
from realizar_torch.ops.arguments import NormLinear
from realizar_torch.reference import ACTIVATION_BLOCK, padded_features

LIBRARY = torch.library.Library("realizar_torch", "FRAGMENT")

LIBRARY.define(
    "linear(Tensor x, Tensor weight, str fmt, int in_features, Tensor? bias=None, *, "
    'str activations="float", str layout="ggml") -> Tensor'
)


@register_fake("realizar_torch::linear", lib=LIBRARY)
def _linear(
    x: Tensor,
    weight: Tensor,
    fmt: str,
    in_features: int,
    bias: Tensor | None = None,
    *,
    activations: str = "float",
    layout: str = "ggml",
) -> Tensor:
    checks.check_linear(x, weight, fmt, in_features, bias, activations, layout)
    return x.new_empty(*x.shape[:-1], weight.shape[0])


LIBRARY.define(
    "linears(Tensor x, Tensor[] weights, str[] fmts, int in_features, Tensor?[] biases, *, "
    'str activations="float", str[] layouts) -> Tensor'
)


@register_fake("realizar_torch::linears", lib=LIBRARY)
def _linears(
    x: Tensor,
    weights: Sequence[Tensor],
    fmts: Sequence[str],
    in_features: int,
    biases: Sequence[Tensor | None],
    *,
    activations: str = "float",
    layouts: Sequence[str],
) -> Tensor:
    checks.check_linears(x, weights, fmts, in_features, biases, activations, layouts)
    return x.new_empty(*x.shape[:-1], sum(weight.shape[0] for weight in weights))


LIBRARY.define(
    "gated_linear(Tensor x, Tensor gate, Tensor up, str fmt, int in_features, *, str activation, "
    'str activations="float", str layout="ggml") -> Tensor'
)


@register_fake("realizar_torch::gated_linear", lib=LIBRARY)
def _gated_linear(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    fmt: str,
    in_features: int,
    *,
    activation: str,
    activations: str = "float",
    layout: str = "ggml",
) -> Tensor:
    checks.check_gated_linear(x, gate, up, fmt, in_features, activation, activations, layout)
    return x.new_empty(*x.shape[:-1], gate.shape[0])


LIBRARY.define(
    "embedding(Tensor ids, Tensor weight, str fmt, int embedding_dim, *, "
    'ScalarType dtype, str layout="ggml") -> Tensor'
)


@register_fake("realizar_torch::embedding", lib=LIBRARY)
def _embedding(
    ids: Tensor, weight: Tensor, fmt: str, embedding_dim: int, *, dtype: torch.dtype, layout: str = "ggml"
) -> Tensor:
    checks.check_embedding(ids, weight, fmt, embedding_dim, dtype, layout)
    return weight.new_empty(*ids.shape, embedding_dim, dtype=dtype)


LIBRARY.define(
    'dequantize(Tensor weight, str fmt, int in_features, *, ScalarType dtype, str layout="ggml") -> Tensor'
)


@register_fake("realizar_torch::dequantize", lib=LIBRARY)
def _dequantize(
    weight: Tensor, fmt: str, in_features: int, *, dtype: torch.dtype, layout: str = "ggml"
) -> Tensor:
    checks.check_dequantize(weight, fmt, in_features, dtype, layout)
    return weight.new_empty(weight.shape[0], in_features, dtype=dtype)


LIBRARY.define(
    "norm_linear(Tensor x, Tensor norm_weight, Tensor? norm_bias, Tensor weight, str? fmt, int in_features, "
    'Tensor? bias=None, *, str normalization, float eps, str activations="float", str layout="ggml") '
    "-> Tensor"
)


@register_fake("realizar_torch::norm_linear", lib=LIBRARY)
def _norm_linear(*args: Any, **kwargs: Any) -> Tensor:
    call = NormLinear(*args, **kwargs)
    checks.check_norm_linear(call)
    return call.x.new_empty(*call.x.shape[:-1], call.weight.shape[0])


LIBRARY.define(
    "expert_linear(Tensor x, Tensor experts, Tensor weight, str fmt, int in_features, *, "
    'str activations="float", str layout="ggml") -> Tensor'
)


@register_fake("realizar_torch::expert_linear", lib=LIBRARY)
def _expert_linear(
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
    return x.new_empty(*experts.shape, weight.shape[1])


LIBRARY.define(
    "expert_linear_transposed(Tensor grad, Tensor experts, Tensor weight, str fmt, int in_features, *, "
    'str layout="ggml") -> Tensor'
)


@register_fake("realizar_torch::expert_linear_transposed", lib=LIBRARY)
def _expert_linear_transposed(
    grad: Tensor, experts: Tensor, weight: Tensor, fmt: str, in_features: int, *, layout: str = "ggml"
) -> Tensor:
    checks.check_expert_transposed(grad, experts, weight, fmt, in_features, layout)
    return grad.new_empty(*experts.shape, in_features)


LIBRARY.define("quantize(Tensor weight, str fmt, Tensor? importance=None) -> Tensor")


@register_fake("realizar_torch::quantize", lib=LIBRARY)
def _quantize(weight: Tensor, fmt: str, importance: Tensor | None = None) -> Tensor:
    spec = checks.check_quantize(weight, fmt, importance)
    rows, columns = weight.shape
    return weight.new_empty(rows, spec.row_bytes(columns), dtype=torch.uint8)


LIBRARY.define("quantize_activations(Tensor x, str fmt) -> (Tensor, Tensor, Tensor)")


@register_fake("realizar_torch::quantize_activations", lib=LIBRARY)
def _quantize_activations(x: Tensor, fmt: str) -> tuple[Tensor, Tensor, Tensor]:
    spec = checks.check_features(x, fmt)
    lead, blocks = x.shape[:-1], padded_features(x.shape[-1], spec) // ACTIVATION_BLOCK
    return (
        x.new_empty(*lead, blocks * ACTIVATION_BLOCK, dtype=torch.int8),
        x.new_empty(*lead, blocks, dtype=torch.float32),
        x.new_empty(*lead, 2 * blocks, dtype=torch.float32),
    )


LIBRARY.define(
    "linear_quantized(Tensor q, Tensor scale, Tensor sums, Tensor weight, str fmt, int in_features, "
    'Tensor? bias=None, *, str layout="ggml") -> Tensor'
)


@register_fake("realizar_torch::linear_quantized", lib=LIBRARY)
def _linear_quantized(
    q: Tensor,
    scale: Tensor,
    sums: Tensor,
    weight: Tensor,
    fmt: str,
    in_features: int,
    bias: Tensor | None = None,
    *,
    layout: str = "ggml",
) -> Tensor:
    checks.check_linear_quantized(q, scale, sums, weight, fmt, in_features, bias, layout)
    return scale.new_empty(*q.shape[:-1], weight.shape[0])
