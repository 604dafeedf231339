"""The one room where arguments of the ops are judged: messages say what was found and what was expected."""

from collections.abc import Sequence

import torch

from realizar_torch.errors import FormatError
from realizar_torch.formats import BlockFormat, get_packed_format, supported_formats
from realizar_torch.ops.arguments import NormLinear
from realizar_torch.ops.gates import GATES
from realizar_torch.ops.normalization import NORMALIZATIONS
from realizar_torch.packing import check_layout
from realizar_torch.reference import ACTIVATION_BLOCK, padded_features

ACTIVATIONS = ("float", "int8")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_weight(weight: torch.Tensor, fmt: str, in_features: int, layout: str) -> BlockFormat:
    """The format, if ``weight`` is ``uint8 [rows, row_bytes]`` of ``in_features`` weights per row."""
    check_dense(weight=weight)
    spec = get_packed_format(fmt)
    check_layout(layout)
    if in_features < 1:
        raise FormatError(f"in_features is {in_features}; expected at least 1")
    if weight.dtype != torch.uint8:
        raise FormatError(
            f"weight is {weight.dtype}, expected torch.uint8 bytes of {fmt} blocks; module.type(dtype) casts "
            "packed bytes and destroys them: use module.to(dtype), and load the weight again"
        )
    expected = spec.row_bytes(in_features)
    if weight.ndim != 2 or weight.shape[0] < 1 or weight.shape[1] != expected:
        raise FormatError(
            f"weight has shape {_shape(weight)}, expected [rows, {expected}]: {in_features} weights are "
            f"{spec.blocks(in_features)} {fmt} blocks of {spec.block_bytes} bytes"
        )
    return spec


def check_dense_weight(weight: torch.Tensor, in_features: int) -> None:
    """A float ``[rows, in_features]`` weight."""
    if weight.dtype not in FLOATS:
        raise FormatError(
            f"dense weight is {weight.dtype}, expected a float type; name its format for packed bytes"
        )
    if weight.ndim != 2 or weight.shape[0] < 1 or weight.shape[1] != in_features:
        raise FormatError(f"dense weight has shape {_shape(weight)}, expected [rows, {in_features}]")


def check_input(x: torch.Tensor, in_features: int) -> None:
    """A float ``[..., in_features]`` input."""
    check_dense(x=x)
    if x.dtype not in FLOATS:
        advice = "convert it first"
        if x.dtype == torch.uint8:
            advice = (
                "if the model casts it to its layer's weight.dtype, which is that of bytes here, that layer "
                "has to stay dense: name it in quantize_model(..., exclude=...)"
            )
        raise FormatError(f"input is {x.dtype}, expected one of {', '.join(map(str, FLOATS))}; {advice}")
    if x.ndim == 0 or x.shape[-1] != in_features:
        raise FormatError(f"input has shape {_shape(x)}, expected last dimension {in_features} (in_features)")


def check_features(x: torch.Tensor, fmt: str) -> BlockFormat:
    """The format, if ``x`` is a float ``[..., K]`` input, K at least 1."""
    spec = get_packed_format(fmt)
    if x.ndim == 0 or x.shape[-1] == 0:
        raise FormatError(f"input has shape {_shape(x)}; expected at least one feature")
    check_input(x, x.shape[-1])
    return spec


def check_quantized(
    q: torch.Tensor, scale: torch.Tensor, sums: torch.Tensor, spec: BlockFormat, in_features: int
) -> None:
    """Quantized activations whose padding fits a weight of ``in_features`` columns of ``spec``."""
    width = padded_features(in_features, spec)
    if q.ndim and q.shape[-1] != width:
        raise FormatError(
            f"activations are padded to {q.shape[-1]} values, but {spec.name} needs {width}; "
            f"quantize them for {spec.name}"
        )
    blocks = width // ACTIVATION_BLOCK
    for name, part, dtype, length in (
        ("q", q, torch.int8, width),
        ("scale", scale, torch.float32, blocks),
        ("sums", sums, torch.float32, 2 * blocks),
    ):
        if part.dtype != dtype or part.shape != (*q.shape[:-1], length):
            raise FormatError(
                f"{name} is {part.dtype} {_shape(part)}, expected {dtype} and shape "
                f"{[*q.shape[:-1], length]}, as ops.quantize_activations gives it"
            )


def check_vector(name: str, vector: torch.Tensor | None, length: int) -> None:
    """None, or a float ``[length]``: a bias or the parameters of a norm."""
    if vector is None:
        return
    if vector.dtype not in FLOATS or vector.shape != (length,):
        raise FormatError(
            f"{name} is {vector.dtype} {_shape(vector)}, expected a float type and shape [{length}]"
        )


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """FormatError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise FormatError(f"{name} is {value!r}, expected one of {', '.join(map(repr, choices))}")


def check_callable(name: str, value: object) -> None:
    """FormatError unless ``value`` can be called, or is None."""
    if value is not None and not callable(value):
        raise FormatError(f"{name} is {value!r:.80}; expected a function, or None")


def check_dense(**tensors: object) -> None:
    """No sparse or nested tensor, which kernels would misread and torch's dispatcher refuses in words of its
    own."""
    for name, value in tensors.items():
        if isinstance(value, torch.Tensor) and (value.layout != torch.strided or value.is_nested):
            kind, advice = str(value.layout), "to_dense()"
            if value.is_nested:
                kind, advice = "nested", "to_padded_tensor(0.0), or give its parts one by one"
            raise FormatError(f"{name} is a {kind} tensor, expected a dense one: call {advice}")


def check_devices(**tensors: torch.Tensor | None) -> None:
    """All tensors on one device; the message names two that are not."""
    present = [(name, tensor.device) for name, tensor in tensors.items() if tensor is not None]
    first_name, first = present[0]
    for name, device in present:
        if device != first:
            advice = "move one of them"
            if "meta" in (device.type, first.type):
                advice = (
                    "a weight on meta has not been loaded yet, or is offloaded apart from its module: "
                    "name the module's class in accelerate's preload_module_classes"
                )
            raise FormatError(f"{first_name} is on {first}, {name} is on {device}; {advice}")


def check_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    fmt: str,
    in_features: int,
    bias: torch.Tensor | None,
    activations: str,
    layout: str,
) -> BlockFormat:
    """Everything about ``realizar_torch::linear``."""
    spec = check_weight(weight, fmt, in_features, layout)
    check_input(x, in_features)
    check_vector("bias", bias, weight.shape[0])
    check_choice("activations", activations, ACTIVATIONS)
    check_devices(x=x, weight=weight, bias=bias)
    return spec


def check_linears(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    fmts: Sequence[str],
    in_features: int,
    biases: Sequence[torch.Tensor | None],
    activations: str,
    layouts: Sequence[str],
) -> None:
    """Everything about ``realizar_torch::linears``."""
    if not weights or not len(weights) == len(fmts) == len(biases) == len(layouts):
        raise FormatError(
            f"{len(weights)} weights, {len(fmts)} formats, {len(biases)} biases and {len(layouts)} layouts; "
            "expected one of each for every weight, and a weight at least"
        )
    for weight, fmt, bias, layout in zip(weights, fmts, biases, layouts, strict=True):
        check_linear(x, weight, fmt, in_features, bias, activations, layout)


def check_gated_linear(
    x: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    fmt: str,
    in_features: int,
    activation: str,
    activations: str,
    layout: str,
) -> None:
    """Everything about ``realizar_torch::gated_linear``."""
    check_choice("activation", activation, tuple(GATES))
    for weight in (gate, up):
        check_linear(x, weight, fmt, in_features, None, activations, layout)
    if gate.shape != up.shape:
        raise FormatError(f"gate has shape {_shape(gate)}, up has {_shape(up)}; expected equal shapes")


def check_expert_linear(
    x: torch.Tensor,
    experts: torch.Tensor,
    weight: torch.Tensor,
    fmt: str,
    in_features: int,
    activations: str,
    layout: str,
) -> BlockFormat:
    """Everything about ``realizar_torch::expert_linear`` but the values of ``experts``."""
    spec = _check_choices(experts, weight, fmt, in_features, layout)
    check_input(x, in_features)
    used = experts.shape[-1]
    if x.shape[:-2] != experts.shape[:-1] or x.ndim < 2 or x.shape[-2] not in (1, used):
        raise FormatError(
            f"input has shape {_shape(x)}, experts have {_shape(experts)}; expected the same leading "
            f"dimensions, then 1 or {used} rows of {in_features}"
        )
    check_choice("activations", activations, ACTIVATIONS)
    check_devices(x=x, experts=experts, weight=weight)
    return spec


def check_expert_transposed(
    grad: torch.Tensor, experts: torch.Tensor, weight: torch.Tensor, fmt: str, in_features: int, layout: str
) -> None:
    """Everything about ``realizar_torch::expert_linear_transposed`` but the values of ``experts``."""
    _check_choices(experts, weight, fmt, in_features, layout)
    if grad.dtype not in FLOATS or grad.shape != (*experts.shape, weight.shape[1]):
        expected = [*experts.shape, weight.shape[1]]
        raise FormatError(f"grad is {grad.dtype} {_shape(grad)}, expected a float type and shape {expected}")
    check_devices(grad=grad, experts=experts, weight=weight)


def _check_choices(
    experts: torch.Tensor, weight: torch.Tensor, fmt: str, in_features: int, layout: str
) -> BlockFormat:
    if weight.ndim != 3 or 0 in weight.shape:
        raise FormatError(f"weight has shape {_shape(weight)}, expected [experts, rows, row_bytes]")
    if experts.dtype not in (torch.int32, torch.int64) or experts.ndim == 0 or experts.shape[-1] == 0:
        raise FormatError(
            f"experts are {experts.dtype} {_shape(experts)}, expected torch.int64 or torch.int32 and a last "
            "dimension of the experts that each row goes to"
        )
    return check_weight(weight[0], fmt, in_features, layout)


def check_linear_quantized(
    q: torch.Tensor,
    scale: torch.Tensor,
    sums: torch.Tensor,
    weight: torch.Tensor,
    fmt: str,
    in_features: int,
    bias: torch.Tensor | None,
    layout: str,
) -> BlockFormat:
    """Everything about ``realizar_torch::linear_quantized``."""
    spec = check_weight(weight, fmt, in_features, layout)
    check_quantized(q, scale, sums, spec, in_features)
    check_vector("bias", bias, weight.shape[0])
    check_devices(x=q, scale=scale, sums=sums, weight=weight, bias=bias)
    return spec


def check_embedding(
    ids: torch.Tensor, weight: torch.Tensor, fmt: str, embedding_dim: int, dtype: torch.dtype, layout: str
) -> None:
    """Everything about ``realizar_torch::embedding`` but the values of ``ids``."""
    check_dequantize(weight, fmt, embedding_dim, dtype, layout)
    if ids.dtype not in (torch.int32, torch.int64):
        raise FormatError(f"ids are {ids.dtype}, expected torch.int64 or torch.int32")
    check_devices(ids=ids, weight=weight)


def check_dequantize(
    weight: torch.Tensor, fmt: str, in_features: int, dtype: torch.dtype, layout: str
) -> None:
    """Everything about ``realizar_torch::dequantize``."""
    check_weight(weight, fmt, in_features, layout)
    if dtype not in FLOATS:
        raise FormatError(f"output dtype is {dtype}, expected one of {', '.join(map(str, FLOATS))}")


def check_dense_arguments(fmt: object, *, weight: object, importance: object) -> None:
    """What the dispatcher of torch would refuse in words of its own, before ``realizar_torch::quantize``."""
    check_dense(weight=weight, importance=importance)
    for name, value in (("weight", weight), ("importance", importance)):
        if not isinstance(value, torch.Tensor) and (name == "weight" or value is not None):
            raise FormatError(f"{name} is a {type(value).__name__}, expected a torch.Tensor")
    if not isinstance(fmt, str):
        raise FormatError(f"fmt is {fmt!r:.80}, expected one of {', '.join(supported_formats())}")


def check_quantize(weight: torch.Tensor, fmt: str, importance: torch.Tensor | None) -> BlockFormat:
    """Everything about ``realizar_torch::quantize`` but the values."""
    spec = get_packed_format(fmt)
    if weight.dtype not in FLOATS:
        raise FormatError(f"weight is {weight.dtype}, expected one of {', '.join(map(str, FLOATS))}")
    if weight.ndim != 2 or 0 in weight.shape:
        raise FormatError(f"weight has shape {_shape(weight)}, expected [rows, columns], neither of them 0")
    check_vector("importance", importance, weight.shape[1])
    check_devices(weight=weight, importance=importance)
    return spec


def check_norm_linear(call: NormLinear) -> None:
    """Everything about ``realizar_torch::norm_linear``."""
    x, weight, in_features = call.x, call.weight, call.in_features
    if call.fmt is None:
        check_dense_weight(weight, in_features)
        if call.activations != "float":
            raise FormatError(
                f"activations={call.activations!r} needs a packed weight; a dense one takes 'float'"
            )
    else:
        check_weight(weight, call.fmt, in_features, call.layout)
        check_choice("activations", call.activations, ACTIVATIONS)
    check_input(x, in_features)
    check_choice("normalization", call.normalization, NORMALIZATIONS)
    check_vector("norm_weight", call.norm_weight, in_features)
    check_vector("norm_bias", call.norm_bias, in_features)
    check_vector("bias", call.bias, weight.shape[0])
    check_devices(x=x, weight=weight, bias=call.bias, norm_weight=call.norm_weight, norm_bias=call.norm_bias)


def _shape(tensor: torch.Tensor) -> str:
    return str(list(tensor.shape))
