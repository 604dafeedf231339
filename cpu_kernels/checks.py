"""What the launchers demand of their tensors; kernels get addresses and would read anything."""

from collections.abc import Sequence

import torch
from torch import Tensor

from realizar_torch.errors import FormatError
from realizar_torch.formats import BlockFormat, get_packed_format


def check_tensor(
    name: str, tensor: Tensor, dtype: torch.dtype, shape: Sequence[int | None], *, contiguous: bool = True
) -> None:
    """A CPU tensor of ``dtype`` with ``shape`` (None: any size), contiguous unless that is waived."""
    if not tensor.is_cpu:
        raise FormatError(f"{name} is on {tensor.device}, expected a CPU tensor; move it with .cpu()")
    if tensor.numel() and not _has_memory(tensor):
        raise FormatError(
            f"{name} is a {type(tensor).__name__} without memory, as tracing makes them, expected numbers; "
            "call the ops of realizar_torch.ops, which can be traced"
        )
    if tensor.dtype != dtype:
        raise FormatError(f"{name} is {tensor.dtype}, expected {dtype}; convert it first")
    if not _fits(tensor.shape, shape):
        expected = ", ".join("any" if size is None else str(size) for size in shape)
        raise FormatError(f"{name} has shape {list(tensor.shape)}, expected [{expected}]")
    if contiguous and not tensor.is_contiguous():
        raise FormatError(
            f"{name} has strides {tensor.stride()}, expected contiguous memory; call .contiguous()"
        )


def _fits(found: Sequence[int], shape: Sequence[int | None]) -> bool:
    if len(found) != len(shape):
        return False
    # a loop: every call of an op comes here several times
    for size, expected in zip(found, shape, strict=True):
        if expected is not None and size != expected:
            return False
    return True


def _has_memory(tensor: Tensor) -> bool:
    try:
        return tensor.data_ptr() != 0
    # wrapped tensors of torch.func and torch.compile
    except RuntimeError:
        return False


def check_weight(name: str, weight: Tensor, fmt: str, in_features: int) -> BlockFormat:
    """``uint8 [rows, row_bytes]`` holding ``in_features`` weights of ``fmt`` per row; gives the format."""
    spec = get_packed_format(fmt)
    if in_features < 1:
        raise FormatError(f"in_features is {in_features}, expected at least 1")
    check_tensor(name, weight, torch.uint8, (None, spec.row_bytes(in_features)))
    return spec


def check_output(out: Tensor, shape: Sequence[int], inputs: Sequence[Tensor]) -> None:
    """A caller's fp32 buffer that shares no byte with any of ``inputs``."""
    check_tensor("out", out, torch.float32, shape)
    if out.requires_grad:
        raise FormatError("out requires grad, expected a plain buffer; use out.detach()")
    start, end = out.data_ptr(), out.data_ptr() + out.nbytes
    for tensor in inputs:
        if start < tensor.data_ptr() + tensor.nbytes and tensor.data_ptr() < end:
            raise FormatError("out overlaps an input, expected memory of its own; allocate it apart")
