"""The op ``quantize``, floats to blocks, a slice of rows at a time: Numba on CPUs, torch ops elsewhere."""

from collections.abc import Callable

import torch
from torch import Tensor

from realizar_torch.encode import encode
from realizar_torch.encode.reach import check_held
from realizar_torch.errors import FormatError
from realizar_torch.ops import checks, cpu, torch_kernels
from realizar_torch.ops.library import LIBRARY
from realizar_torch.ops.recording import recorded

# (float32 weight [rows, K], fmt, float32 importance [K] or None) -> uint8 [rows, row_bytes]
Encoder = Callable[[Tensor, str, Tensor | None], Tensor]


# of float32: a GPU waits for the host's launches, thousands a slice, unless each has much to do
GPU_CHUNK_BYTES = 1 << 26


def quantize(
    encoder: Encoder,
    weight: Tensor,
    fmt: str,
    importance: Tensor | None = None,
    chunk_bytes: int | None = None,
) -> Tensor:
    spec = checks.check_quantize(weight, fmt, importance)
    rows, columns = weight.shape
    if importance is not None:
        importance = importance.to(torch.float32)
        if not (importance.isfinite() & (importance >= 0)).all():
            raise FormatError("importance holds negative or non-finite numbers, expected weights of squares")
    blocks = weight.new_empty(rows, spec.row_bytes(columns), dtype=torch.uint8)
    for part in torch_kernels.row_slices(rows, columns, chunk_bytes):
        values = weight[part].to(torch.float32).contiguous()
        extremes = torch.stack(values.aminmax())
        _check_finite(values, extremes, part.start)
        blocks[part] = encoder(values, spec.name, importance)
        check_held(values, extremes, blocks[part], spec, part.start)
    return blocks


def _check_finite(values: Tensor, extremes: Tensor, first_row: int) -> None:
    # NaN passes through both ends
    if extremes.isfinite().all():
        return
    row, column = (~values.isfinite()).nonzero()[0].tolist()
    raise FormatError(
        f"weight[{first_row + row}, {column}] is {values[row, column].item()} in float32, expected finite "
        "numbers; no block can hold it"
    )


def _torch(weight: Tensor, fmt: str, importance: Tensor | None = None) -> Tensor:
    return quantize(encode, weight, fmt, importance)


def _cuda(weight: Tensor, fmt: str, importance: Tensor | None = None) -> Tensor:
    return quantize(encode, weight, fmt, importance, GPU_CHUNK_BYTES)


def _cpu(weight: Tensor, fmt: str, importance: Tensor | None = None) -> Tensor:
    if cpu.kernels() is torch_kernels:
        return _torch(weight, fmt, importance)
    from realizar_torch.cpu_kernels.encode import encode as compiled

    return quantize(compiled, weight, fmt, importance)


LIBRARY.impl("quantize", recorded("quantize", _cpu), "CPU")
LIBRARY.impl("quantize", recorded("quantize", _cuda), "CUDA")
LIBRARY.impl("quantize", _torch, "CompositeExplicitAutograd")
