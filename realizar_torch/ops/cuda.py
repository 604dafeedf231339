"""The ops on NVIDIA GPUs: Triton kernels for up to eight rows, decoding and torch.matmul beyond.

With ``activations="int8"`` up to two rows are multiplied as int8 and up to 64 as fp16, on tensor cores.

Weights are taken in any layout, at any even address. Without Triton: torch ops, with one warning.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from realizar_torch.caller import warn_caller
from realizar_torch.formats import BlockFormat, get_packed_format
from realizar_torch.ops import bodies, checks, torch_kernels
from realizar_torch.ops.arguments import NormLinear
from realizar_torch.ops.library import LIBRARY
from realizar_torch.ops.normalization import normalize
from realizar_torch.ops.recording import recorded
from realizar_torch.reference import ACTIVATION_BLOCK, padded_features

# More rows than this leave the memory limit of a matvec; the kernels take no more.
MATVEC_ROWS = 8
# More rows of int8 activations than this are a product on tensor cores, which takes them in fp16.
INT8_MATVEC_ROWS = 2


@functools.cache
def problem() -> str | None:
    """Why the Triton kernels cannot be used, or None; asked at the first call, so that imports stay light."""
    try:
        from realizar_torch.triton_kernels import dequantize, matvec, quantize  # noqa: F401
    except ImportError as error:
        return str(error)
    return None


def linear(
    x: Tensor,
    weight: Tensor,
    fmt: str,
    in_features: int,
    bias: Tensor | None = None,
    *,
    activations: str = "float",
    layout: str = "ggml",
) -> Tensor:
    spec = checks.check_linear(x, weight, fmt, in_features, bias, activations, layout)
    rows, weight = x.reshape(-1, in_features), addressable(weight)
    if activations == "int8" and few(rows):
        q = quantized(rows, padded_features(in_features, spec))
        y = few_product(q, len(rows), weight, spec.name, in_features, bias, layout, x.dtype)
    elif matvec_takes(rows):
        from realizar_torch.triton_kernels.matvec import matvec

        y = matvec(rows, weight, spec.name, in_features, kernel_float(bias), layout=layout)
    else:
        y = _matmul(rows, weight, spec, bias, layout)
    return y.view(*x.shape[:-1], weight.shape[0])


def linear_quantized(
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
    """``linear`` of activations that are quantized already, ``q [..., Kp]`` → float32 [..., N].

    Up to eight rows by int8 matvecs; more are decoded and multiplied in fp32.
    """
    spec = checks.check_linear_quantized(q, scale, sums, weight, fmt, in_features, bias, layout)
    lead, weight = q.shape[:-1], addressable(weight)
    q, scale, sums = (part.reshape(-1, part.shape[-1]).contiguous() for part in (q, scale, sums))
    if len(q) <= MATVEC_ROWS:
        from realizar_torch.triton_kernels.matvec import matvec_int8

        y = matvec_int8(q, scale, sums, weight, spec.name, in_features, kernel_float(bias), layout=layout)
    else:
        x = q.to(torch.float32) * scale.repeat_interleave(ACTIVATION_BLOCK, -1)
        y = _matmul(x[:, :in_features], weight, spec, bias, layout)
    return y.view(*lead, weight.shape[0])


def quantize_activations(x: Tensor, fmt: str) -> tuple[Tensor, Tensor, Tensor]:
    """``x [..., K]`` → ``q [..., Kp]``, ``scale [..., Kp/32]``, ``sums [..., Kp/16]``."""
    from realizar_torch.triton_kernels import quantize

    spec = checks.check_features(x, fmt)
    parts = quantize.quantize_activations(kernel_float(x), padded_features(x.shape[-1], spec))
    q, scale, sums = (part.view(*x.shape[:-1], part.shape[-1]) for part in parts)
    return q, scale, sums


def embedding(
    ids: Tensor, weight: Tensor, fmt: str, embedding_dim: int, *, dtype: torch.dtype, layout: str = "ggml"
) -> Tensor:
    """As on the CPU, but an id outside the table gives a row of NaN: an error would have to wait."""
    from realizar_torch.triton_kernels import dequantize

    checks.check_embedding(ids, weight, fmt, embedding_dim, dtype, layout)
    computed = torch.float32 if dtype == torch.float64 else dtype
    weight = addressable(weight)
    return dequantize.embedding(ids, weight, fmt, embedding_dim, computed, layout=layout).to(dtype)


def dequantize(
    weight: Tensor, fmt: str, in_features: int, *, dtype: torch.dtype, layout: str = "ggml"
) -> Tensor:
    from realizar_torch.triton_kernels import dequantize as kernels

    checks.check_dequantize(weight, fmt, in_features, dtype, layout)
    computed = torch.float32 if dtype == torch.float64 else dtype
    return kernels.dequantize(addressable(weight), fmt, in_features, computed, layout=layout).to(dtype)


def norm_linear(*args: Any, **kwargs: Any) -> Tensor:
    """Two launches for up to eight rows (of int8 activations: 64): the norm with them, the product."""
    call = NormLinear(*args, **kwargs)
    if call.fmt is None:
        return bodies.norm_linear(torch_kernels, *args, **kwargs)
    checks.check_norm_linear(call)
    x, bias, layout, in_features = call.x, call.bias, call.layout, call.in_features
    spec, rows, weight = get_packed_format(call.fmt), x.reshape(-1, in_features), addressable(call.weight)
    norm = (rows, kernel_float(call.norm_weight), kernel_float(call.norm_bias))
    kind = {"normalization": call.normalization, "eps": call.eps}
    if call.activations == "int8" and few(rows):
        from realizar_torch.triton_kernels.quantize import norm_quantize

        width = padded_features(in_features, spec)
        q = norm_quantize(*norm, width=width, out=_room(rows, width), leading=overlaps(rows), **kind)
        y = few_product(q, len(rows), weight, spec.name, in_features, bias, layout, x.dtype)
    elif matvec_takes(rows):
        from realizar_torch.triton_kernels import matvec, quantize

        normed = quantize.normalize(*norm, **kind)
        y = x.new_empty(rows.shape[0], weight.shape[0])
        matvec.matvec(normed, weight, spec.name, in_features, kernel_float(bias), out=y, layout=layout)
    else:
        normed = normalize(rows, call.norm_weight, call.norm_bias, call.normalization, call.eps)
        y = _matmul(normed.to(x.dtype), weight, spec, bias, layout)
    return y.view(*x.shape[:-1], weight.shape[0])


def _matmul(x: Tensor, weight: Tensor, spec: BlockFormat, bias: Tensor | None, layout: str) -> Tensor:
    """``x [M, K] @ decode(weight).T + bias`` in the dtype of ``x``, a chunk of decoded rows at a time."""
    from realizar_torch.triton_kernels.decoded import decoded_matmul
    from realizar_torch.triton_kernels.launch import packed_rows

    packed = packed_rows(weight, spec.name, x.shape[1], layout)
    y = decoded_matmul(x, [packed], x.new_empty(x.shape[0], packed.rows))
    return y if bias is None else y.add_(bias.to(y.dtype))


def few(rows: Tensor) -> bool:
    """Whether kernels multiply ``rows [M, K]`` with packed weights, of int8 or grouped activations."""
    from realizar_torch.triton_kernels.configs import MATMUL_ROWS

    return len(rows) <= MATMUL_ROWS and rows.dtype != torch.float64


def quantized(rows: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """``rows [M, K]`` as int8 of ``width`` columns, or (more than INT8_MATVEC_ROWS) grouped."""
    from realizar_torch.triton_kernels.quantize import quantize_activations as quantize

    return quantize(rows, width, _room(rows, width), leading=overlaps(rows))


def few_product(
    q: tuple[Tensor, Tensor, Tensor],
    count: int,
    weight: Tensor,
    fmt: str,
    in_features: int,
    bias: Tensor | None,
    layout: str,
    dtype: torch.dtype,
) -> Tensor:
    """Of ``count`` rows as ``quantized`` gives them → ``[count, N]`` in ``dtype``."""
    from realizar_torch.triton_kernels.matmul import matmul
    from realizar_torch.triton_kernels.matvec import matvec_int8

    operands = (weight, fmt, in_features, kernel_float(bias))
    if count <= INT8_MATVEC_ROWS:
        return matvec_int8(*q, *operands, out_dtype=dtype, layout=layout, dependent=overlaps(q[0]))
    return matmul(*q, count, *operands, out_dtype=dtype, layout=layout)


def overlaps(rows: Tensor) -> bool:
    """Whether the product of ``rows``, or of their int8 form, may begin while they are quantized.

    Safe on every stream and in captured graphs: quantizing begins when all before it has ended, so weights
    are what they are to be, and the product waits for it before it reads anything else or writes. Products of
    grouped rows get slower by it.
    """
    return len(rows) <= INT8_MATVEC_ROWS and rows.is_cuda and _has_griddepcontrol(rows.device)


@functools.cache
def _has_griddepcontrol(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


def _room(rows: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """Where the grouped form of ``rows`` goes; None: int8 rows as they come."""
    from realizar_torch.triton_kernels.grouped import empty_grouped

    return None if len(rows) <= INT8_MATVEC_ROWS else empty_grouped(len(rows), width, rows.device)


def matvec_takes(rows: Tensor) -> bool:
    # float64 inputs are computed in float64, which the kernels do not do
    return rows.shape[0] <= MATVEC_ROWS and rows.dtype != torch.float64


def addressable(weight: Tensor) -> Tensor:
    """``weight`` itself where kernels can read it: consecutive bytes in a row, rows at even addresses."""
    readable = weight.stride(1) == 1 and weight.stride(0) % 2 == 0 and weight.data_ptr() % 2 == 0
    return weight if readable else weight.clone(memory_format=torch.contiguous_format)


def kernel_float(x: Tensor | None) -> Tensor | None:
    """Kernels read float32 and the 16-bit floats."""
    return x.to(torch.float32) if x is not None and x.dtype == torch.float64 else x


@functools.cache
def _warn_of_torch_ops() -> None:
    warn_caller(
        f"the Triton kernels cannot be used ({problem()}); packed weights run in torch ops, many times slower"
    )


def with_kernels(own: Callable[..., Any], body: Callable[..., Any]) -> Callable[..., Any]:
    """``own`` where the Triton kernels can be used, else ``body`` with torch ops."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if problem() is None:
            return own(*args, **kwargs)
        _warn_of_torch_ops()
        return body(torch_kernels, *args, **kwargs)

    return run


for _name, _own in (
    ("linear", linear),
    ("embedding", embedding),
    ("dequantize", dequantize),
    ("norm_linear", norm_linear),
    ("quantize_activations", quantize_activations),
    ("linear_quantized", linear_quantized),
):
    LIBRARY.impl(_name, recorded(_name, with_kernels(_own, getattr(bodies, _name))), "CUDA")
