"""The op namespace ``realizar_torch``: four frozen schemas, and beside each the fake that tracing uses."""

import torch
from torch import Tensor
from torch.library import register_fake

from realizar_torch.ops import checks

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
def _norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    weight: Tensor,
    fmt: str | None,
    in_features: int,
    bias: Tensor | None = None,
    *,
    normalization: str,
    eps: float,
    activations: str = "float",
    layout: str = "ggml",
) -> Tensor:
    checks.check_norm_linear(
        x, norm_weight, norm_bias, weight, fmt, in_features, bias, normalization, activations, layout
    )
    return x.new_empty(*x.shape[:-1], weight.shape[0])
