"""What launchers check before a kernel sees an address: format, shape, dtype, device, alignment, layout."""

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from realizar_torch.errors import FormatError
from realizar_torch.formats import BlockFormat, get_packed_format
from realizar_torch.triton_kernels.blocks import GGML_ONLY, alignment
from realizar_torch.triton_kernels.configs import PROCESSORS, SHARED_BYTES

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LAYOUTS = ("ggml", "planar")
MAX_ROWS = 8


@dataclass(frozen=True)
class PackedRows:
    """A checked packed weight: ``rows`` rows of ``blocks`` blocks, ``stride`` bytes apart."""

    data: torch.Tensor
    fmt: BlockFormat
    rows: int
    blocks: int
    in_features: int
    layout: str
    align: int

    @property
    def stride(self) -> int:
        return self.data.stride(0)

    @property
    def contiguous(self) -> bool:
        """Whether each row begins where the one before ends."""
        return self.rows <= 1 or self.stride == self.fmt.row_bytes(self.in_features)

    @property
    def planar(self) -> bool:
        return self.layout == "planar"


def require_layout(fmt: str, layout: str) -> None:
    """FormatError for a layout that no kernel reads."""
    if layout not in LAYOUTS or (layout == "planar" and fmt in GGML_ONLY):
        raise FormatError(
            f"{fmt} has no layout {layout!r} on CUDA; call rt.unpack, or pack it with layout='auto'"
        )


def packed_rows(weight: torch.Tensor, fmt: str, in_features: int, layout: str = "ggml") -> PackedRows:
    """``weight`` (uint8 ``[rows, row_bytes]``, rows may be strided) as kernel arguments.

    FormatError: another dtype or rank, a row length that is not ``in_features`` in whole blocks, bytes of a
    row apart, a base pointer or row stride that is odd, an unknown layout.
    """
    found = get_packed_format(fmt)
    require_layout(fmt, layout)
    if weight.dtype != torch.uint8 or weight.dim() != 2:
        raise FormatError(f"weight is {weight.dtype} {tuple(weight.shape)}; expected uint8 (rows, row_bytes)")
    if in_features < 1 or weight.shape[1] != found.row_bytes(in_features):
        raise FormatError(
            f"a {fmt} row of {in_features} weights takes {found.row_bytes(max(in_features, 0))} bytes; "
            f"weight has rows of {weight.shape[1]}"
        )
    if weight.stride(1) != 1 or weight.stride(0) % 2 or weight.data_ptr() % 2:
        raise FormatError(
            f"weight has strides {weight.stride()} and address % 2 = {weight.data_ptr() % 2}; expected "
            "consecutive bytes in a row and even row addresses: call .contiguous() or .clone()"
        )
    blocks = found.blocks(in_features)
    align = alignment(fmt, layout, weight.data_ptr(), weight.stride(0), blocks)
    return PackedRows(weight, found, weight.shape[0], blocks, in_features, layout, align)


def three_packed_rows(
    weights: Sequence[torch.Tensor], fmts: Sequence[str], in_features: int, layouts: Sequence[str]
) -> list[PackedRows]:
    """``packed_rows`` of q, k and v. FormatError unless there are three of everything."""
    if not len(weights) == len(fmts) == len(layouts) == 3:
        raise FormatError(
            f"{len(weights)} weights, {len(fmts)} formats, {len(layouts)} layouts; expected three of each"
        )
    return [packed_rows(w, f, in_features, lay) for w, f, lay in zip(weights, fmts, layouts, strict=True)]


def float_rows_of(x: torch.Tensor, in_features: int, limit: int | None = MAX_ROWS) -> torch.Tensor:
    """``x`` ``[..., in_features]`` as contiguous ``[M, in_features]``; FormatError on a wrong dtype, width or
    M.
    """
    if x.dtype not in FLOAT_DTYPES:
        raise FormatError(
            f"activations are {x.dtype}; expected float32, float16 or bfloat16: convert them first"
        )
    if x.dim() == 0 or x.shape[-1] != in_features:
        raise FormatError(f"activations have shape {tuple(x.shape)}; expected last dimension {in_features}")
    rows = x.reshape(-1, in_features).contiguous()
    if limit is not None and rows.shape[0] > limit:
        raise FormatError(f"{rows.shape[0]} activation rows; a matvec takes at most {limit}: use matmul")
    return rows


def same_device(*tensors: torch.Tensor | None) -> torch.device:
    """The one device of all tensors; FormatError naming both when they differ."""
    present = [t for t in tensors if t is not None]
    for tensor in present[1:]:
        if tensor.device != present[0].device:
            raise FormatError(
                f"tensors are on {present[0].device} and {tensor.device}; move them to one device"
            )
    return present[0].device


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Launch on the tensors' own device, not the current one (the interpreter runs on CPU tensors)."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@functools.cache
def processors_with_rings(device: torch.device) -> int:
    """Multiprocessors of ``device`` where each has the shared memory of an H100's, else 0; interpreted, an
    H100's.
    """
    if device.type != "cuda":
        return PROCESSORS
    found = torch.cuda.get_device_properties(device)
    return found.multi_processor_count if found.shared_memory_per_multiprocessor >= SHARED_BYTES else 0


def vector(value: torch.Tensor | None, size: int, name: str) -> torch.Tensor | None:
    """A bias, norm weight or similar as contiguous floats ``[size]``, or None."""
    if value is None:
        return None
    if value.dtype not in FLOAT_DTYPES or value.numel() != size:
        raise FormatError(f"{name} is {value.dtype} {tuple(value.shape)}; expected {size} floats")
    return value.reshape(-1).contiguous()
