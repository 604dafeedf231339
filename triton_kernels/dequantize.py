"""Packed rows, or rows picked by id, to floats: bit-equal to gguf's decoder in fp32."""

import torch
import triton
import triton.language as tl

from realizar_torch.errors import FormatError
from realizar_torch.triton_kernels.blocks import block_size, group_of, planes, units
from realizar_torch.triton_kernels.decode import decode_unit, load_unit, word_weights
from realizar_torch.triton_kernels.launch import FLOAT_DTYPES, PackedRows, on_device, packed_rows, same_device
from realizar_torch.triton_kernels.matvec import output_tensor
from realizar_torch.triton_kernels.primitives import cast
from realizar_torch.triton_kernels.row_sums import lane_position


@triton.jit
def _widened(values):
    """The tuple's tensors with one more dimension."""
    result = ()
    for i in tl.static_range(len(values)):
        result = result + (tl.expand_dims(values[i], -1),)
    return result


@triton.jit(do_not_specialize=["first_row"])
def _decode_rows_kernel(
    weight, row_stride, first_row, n_rows, blocks, ids, out, in_features,
    FMT: tl.constexpr, PLANAR: tl.constexpr, ALIGN: tl.constexpr, CB: tl.constexpr, HAS_IDS: tl.constexpr,
):  # fmt: skip
    """Program (i, j): blocks j*CB … of row first_row + i (or of row ids[i]) → ``out[i]``, w = scale * (q -
    zero) - minimum.

    Two threads share a unit: each has eight successive weights of every plane, in 16-bit types a store of 16
    bytes, and the pair fills a whole sector. An id outside 0 … n_rows-1 gives a row of NaN: the id is on the
    device, so no error can be raised without a sync.
    """
    i = tl.program_id(0).to(tl.int64)
    source = first_row + i
    known = True
    if HAS_IDS:
        source = tl.load(ids + i).to(tl.int64)
        known = (source >= 0) & (source < n_rows)
        source = tl.where(known, source, 0)
    block, unit = lane_position(tl.program_id(1) * CB, FMT, CB)
    row = weight + source * tl.multiple_of(row_stride, ALIGN) + tl.zeros([1, 1], tl.int32)
    raw = load_unit(row, block, unit, blocks, block < blocks, FMT, PLANAR, ALIGN)
    words, s, minimum, d, dmin = decode_unit(raw, unit, FMT)
    s, minimum, d, dmin = _widened(s), _widened(minimum), tl.expand_dims(d, -1), tl.expand_dims(dmin, -1)
    for p in tl.static_range(planes(FMT)):
        weights = word_weights(words[p], s, minimum, d, dmin, p, FMT)
        if HAS_IDS:
            weights = tl.where(known, weights, float("nan"))
        weights = tl.reshape(cast(weights, out.dtype.element_ty), [1, block.shape[1], 16])
        first = block * block_size(FMT) + 16 * group_of(unit, p, FMT)
        column = tl.expand_dims(first, -1) + tl.arange(0, 16)
        tl.store(out + i * in_features + column, weights, mask=column < in_features)


def dequantize(
    weight: torch.Tensor,
    fmt: str,
    in_features: int,
    dtype: torch.dtype = torch.float32,
    *,
    layout: str = "ggml",
) -> torch.Tensor:
    """weight uint8 ``[rows, row_bytes]`` → ``[rows, in_features]`` in ``dtype`` (fp32, fp16 or bf16)."""
    packed = packed_rows(weight, fmt, in_features, layout)
    return _decode(packed, None, packed.rows, dtype)


def embedding(
    ids: torch.Tensor,
    weight: torch.Tensor,
    fmt: str,
    embedding_dim: int,
    dtype: torch.dtype = torch.float32,
    *,
    out: torch.Tensor | None = None,
    layout: str = "ggml",
) -> torch.Tensor:
    """Rows ``ids`` (int32 or int64, any shape) of a packed table → ``[*ids.shape, embedding_dim]``.

    Ids outside the table give rows of NaN. ``out``: contiguous floats to fill instead, of any float dtype.
    """
    packed = packed_rows(weight, fmt, embedding_dim, layout)
    if ids.dtype not in (torch.int32, torch.int64):
        raise FormatError(f"ids are {ids.dtype}; expected int32 or int64")
    same_device(ids, weight)
    flat = ids.reshape(-1).contiguous()
    if out is not None:
        out = output_tensor(out, (*ids.shape, embedding_dim), dtype, weight.device).view(-1, embedding_dim)
    return _decode(packed, flat, flat.numel(), dtype, out).view(*ids.shape, embedding_dim)


def decode_rows(packed: PackedRows, first: int, count: int, out: torch.Tensor) -> None:
    """Rows first … first + count - 1 into the beginning of ``out``, contiguous floats. Nothing is checked."""
    _launch(packed, first, count, None, out)


def _decode(
    packed: PackedRows,
    ids: torch.Tensor | None,
    count: int,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    if dtype not in FLOAT_DTYPES:
        raise FormatError(f"cannot decode to {dtype}; expected float32, float16 or bfloat16")
    if out is None:
        out = torch.empty(count, packed.in_features, dtype=dtype, device=packed.data.device)
    if out.numel() > 0:
        _launch(packed, 0, count, ids, out)
    return out


def _launch(packed: PackedRows, first: int, count: int, ids: torch.Tensor | None, out: torch.Tensor) -> None:
    fmt = packed.fmt.name
    step = min(triton.next_power_of_2(packed.blocks), 64 // units(fmt))
    with on_device(packed.data.device):
        _decode_rows_kernel[(count, triton.cdiv(packed.blocks, step))](
            packed.data, packed.stride, first, packed.rows, packed.blocks, ids, out, packed.in_features,
            FMT=fmt, PLANAR=packed.planar, ALIGN=packed.align, CB=step, HAS_IDS=ids is not None,
            num_warps=max(1, step * units(fmt) // 16), enable_fp_fusion=True,
        )  # fmt: skip
