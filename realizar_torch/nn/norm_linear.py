"""A norm and the linear layers it feeds as one module: each row is normalised once, for all of them."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrize

from realizar_torch import ops
from realizar_torch.errors import FormatError
from realizar_torch.nn import packed
from realizar_torch.nn.linear import QuantizedLinear
from realizar_torch.nn.norm import RMSNorm
from realizar_torch.ops.autocast import autocasts
from realizar_torch.ops.checks import check_choice, check_input
from realizar_torch.ops.normalization import NORMALIZATIONS, compute_dtype, normalize

Linear = nn.Linear | QuantizedLinear
_KINDS = (nn.Linear, QuantizedLinear, nn.LayerNorm, nn.RMSNorm, RMSNorm)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class FusedLayerNormLinear(nn.Module):
    """``linear(norm(x))``; with several weights, the tuple of ``linear_i(norm(x))``.

    ``out_features`` (and ``fmt``) may be sequences: one norm, several weights. ``fmt=None`` is a dense
    weight, initialised as in ``nn.Linear``; a packed one starts as zeros and is meant to be loaded.
    Statistics are float32, and the normalised row is not rounded to the input's dtype before the product.
    ``normalization``: "layernorm", or "rmsnorm", which has no ``layer_norm_bias``. ``zero_centered``: the
    stored norm weight is the scale minus one. ``activations="int8"`` holds for the packed weights.

    Keys: ``layer_norm_weight``, ``layer_norm_bias``, ``weight``, ``bias``; several weights: ``weight.0`` ….
    Lists of weights are modules of their own to accelerate: name this class in ``preload_module_classes``.
    """

    layer_norm_weight: nn.Parameter
    layer_norm_bias: nn.Parameter | None
    weight: nn.Parameter | nn.ParameterList
    bias: nn.Parameter | nn.ParameterList | None

    def __init__(
        self,
        in_features: int,
        out_features: int | Sequence[int],
        eps: float = 1e-5,
        bias: bool = True,
        *,
        fmt: str | Sequence[str | None] | None = None,
        normalization: str = "layernorm",
        zero_centered: bool = False,
        activations: str = "float",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_choice("normalization", normalization, NORMALIZATIONS)
        several = isinstance(out_features, Sequence)
        rows = list(out_features) if isinstance(out_features, Sequence) else [out_features]
        for count in rows:
            packed.check_sizes(in_features, count)
        formats = [fmt] * len(rows) if fmt is None or isinstance(fmt, str) else list(fmt)
        if not rows or len(formats) != len(rows):
            raise FormatError(f"{len(rows)} out_features and {len(formats)} formats; one format per weight")
        self.in_features = in_features
        self.eps = eps
        self.normalization = normalization
        self.zero_centered = zero_centered
        start = torch.zeros if zero_centered else torch.ones
        self.layer_norm_weight = nn.Parameter(start(in_features, device=device, dtype=dtype))
        norm_bias = nn.Parameter(torch.zeros(in_features, device=device, dtype=dtype))
        self.register_parameter("layer_norm_bias", norm_bias if normalization == "layernorm" else None)
        linears = [
            _new_linear(in_features, n, bias, f, device, dtype) for n, f in zip(rows, formats, strict=True)
        ]
        self._adopt(linears, activations, several)

    @classmethod
    def fuse(cls, norm: nn.Module, *linears: Linear) -> Self:
        """One module of a norm and the linears it feeds; it shares their parameters.

        ``norm``: ``nn.LayerNorm``, ``nn.RMSNorm`` or this package's norms, over the last dimension only;
        ``linears``: ``nn.Linear`` or ``QuantizedLinear`` of that many input features. FormatError otherwise,
        and for subclasses with a ``forward`` of their own and hooked modules, whose work would be lost.
        """
        for module in (norm, *linears):
            _refuse_changed(module)
        weight, bias, eps, normalization, zero_centered = _norm_parts(norm)
        features = weight.shape[0]
        if not linears:
            raise FormatError("fuse needs at least one linear layer after the norm")
        for linear in linears:
            if not isinstance(linear, Linear):
                raise FormatError(f"cannot fuse a {type(linear).__name__}; pass nn.Linear or QuantizedLinear")
            if linear.in_features != features:
                raise FormatError(f"a linear takes {linear.in_features} features, the norm gives {features}")
        modes = sorted({linear.activations for linear in linears if isinstance(linear, QuantizedLinear)})
        if len(modes) > 1:
            raise FormatError(f"the linears differ in activations: {', '.join(modes)}; set one mode for all")

        several = len(linears) > 1
        module = cls(
            features,
            [linear.out_features for linear in linears] if several else linears[0].out_features,
            eps,
            normalization=normalization,
            zero_centered=zero_centered,
            device="meta",
        )
        module.layer_norm_weight, module.layer_norm_bias = weight, bias
        module._adopt(linears, modes[0] if modes else "float", several)
        return module

    @property
    def memory_bytes(self) -> int:
        """Bytes of all parameters as stored."""
        return sum(parameter.nbytes for parameter in self.parameters())

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """``x [..., in_features]`` → ``[..., out_features]`` in the dtype of ``x``, one per weight."""
        check_input(x, self.in_features)
        wide = compute_dtype(x.dtype)
        scale = self.layer_norm_weight.to(wide) + 1 if self.zero_centered else self.layer_norm_weight
        if isinstance(self.weight, nn.ParameterList):
            normed = normalize(x, scale, self.layer_norm_bias, self.normalization, self.eps)
            outputs = (self._project(normed, *parts) for parts in self._linears())
            return tuple(y if autocasts(x) else y.to(x.dtype) for y in outputs)
        ((weight, fmt, bias),) = self._linears()
        return ops.norm_linear(
            x,
            scale,
            self.layer_norm_bias,
            weight,
            fmt,
            self.in_features,
            bias,
            normalization=self.normalization,
            eps=self.eps,
            activations=self.activations if fmt else "float",
        )

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, eps={self.eps}, "
            f"normalization={self.normalization}, zero_centered={self.zero_centered}, "
            f"activations={self.activations}, fmt={self.fmt}, layout=ggml, bytes={self.memory_bytes}"
        )

    def _adopt(self, linears: Sequence[Linear], activations: str, several: bool) -> None:
        """Take over the parameters of ``linears``: as lists if ``several``, else as plain attributes."""
        packed.check_activations(activations)
        self.activations = activations
        formats = tuple(linear.fmt if isinstance(linear, QuantizedLinear) else None for linear in linears)
        rows = tuple(linear.out_features for linear in linears)
        biases = [linear.bias for linear in linears]
        self.fmt: packed.Formats = formats if several else formats[0]
        self.out_features = rows if several else rows[0]
        if several:
            # a list also takes a missing bias
            self.weight = nn.ParameterList([linear.weight for linear in linears])
            self.bias = nn.ParameterList(biases)
        else:
            weight = linears[0].weight
            assert isinstance(weight, nn.Parameter)
            self.weight = weight
            self.register_parameter("bias", biases[0])

    def _linears(self) -> list[tuple[torch.Tensor, str | None, torch.Tensor | None]]:
        if isinstance(self.weight, nn.ParameterList):
            assert isinstance(self.bias, nn.ParameterList) and isinstance(self.fmt, tuple)
            return list(zip(self.weight, self.fmt, self.bias, strict=True))
        assert not isinstance(self.bias, nn.ParameterList) and not isinstance(self.fmt, tuple)
        return [(self.weight, self.fmt, self.bias)]

    def _project(
        self, normed: torch.Tensor, weight: torch.Tensor, fmt: str | None, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if fmt is None:
            bias = None if bias is None else bias.to(weight.dtype)
            return functional.linear(normed.to(weight.dtype), weight, bias)
        return ops.linear(normed, weight, fmt, self.in_features, bias, activations=self.activations)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        packed.check_name(name, param)
        super().register_parameter(name, param)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        packed.save_form(destination, prefix, self.fmt, self.in_features)

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Mapping[str, Any], *args: Any
    ) -> None:
        packed.check_state(state_dict, prefix, local_metadata, self.fmt, self.in_features)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def _refuse_changed(module: nn.Module) -> None:
    """FormatError for a module of a known kind that does something else, or more."""
    name, problem = type(module).__name__, None
    if any(isinstance(module, kind) and type(module).forward is not kind.forward for kind in _KINDS):
        problem = f"{name} is a subclass with a forward of its own"
    elif "forward" in module.__dict__:
        problem = f"this {name} was given a forward of its own"
    elif parametrize.is_parametrized(module):
        problem = f"this {name} has parametrizations"
    elif any(getattr(module, hooks) for hooks in _HOOKS):
        problem = f"this {name} has hooks"
    elif isinstance(module, QuantizedLinear) and module.layout != "ggml":
        raise FormatError(f"this {name} is packed as {module.layout!r}; call rt.unpack before fusing")
    if problem:
        raise FormatError(
            f"cannot fuse: {problem}, which the fused module would lose; take it off or keep both"
        )


def _new_linear(
    in_features: int,
    out_features: int,
    bias: bool,
    fmt: str | None,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> Linear:
    if fmt is None:
        return nn.Linear(in_features, out_features, bias, device=device, dtype=dtype)
    return QuantizedLinear(in_features, out_features, bias, fmt=fmt, device=device, dtype=dtype)


def _norm_parts(norm: nn.Module) -> tuple[nn.Parameter, nn.Parameter | None, float, str, bool]:
    """Weight, bias, eps, normalization and zero_centered of a norm over the last dimension."""
    if isinstance(norm, RMSNorm):
        return norm.weight, norm.bias, norm.eps, norm.normalization, norm.zero_centered
    if not isinstance(norm, nn.LayerNorm | nn.RMSNorm):
        raise FormatError(
            f"cannot fuse a {type(norm).__name__}; pass nn.LayerNorm, nn.RMSNorm or this package's norms"
        )
    if len(norm.normalized_shape) != 1 or norm.weight is None or norm.eps is None:
        raise FormatError(f"cannot fuse {norm}; it needs one dimension, a weight and a stated eps")
    kind = "layernorm" if isinstance(norm, nn.LayerNorm) else "rmsnorm"
    return norm.weight, getattr(norm, "bias", None), norm.eps, kind, False
