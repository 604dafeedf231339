"""The arguments of ``norm_linear``, stated once for all that implement it."""

from dataclasses import KW_ONLY, dataclass

from torch import Tensor


@dataclass(frozen=True)
class NormLinear:
    """``NormLinear(*args, **kwargs)`` binds a call of ``realizar_torch::norm_linear``."""

    x: Tensor
    norm_weight: Tensor
    norm_bias: Tensor | None
    weight: Tensor
    fmt: str | None
    in_features: int
    bias: Tensor | None = None
    _: KW_ONLY
    normalization: str
    eps: float
    activations: str = "float"
    layout: str = "ggml"
