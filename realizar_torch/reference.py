"""The oracle: slow, obvious decoding, linear and int8 activations in torch, which every kernel must equal.

Decoding equals ``gguf.quants.dequantize`` bit for bit. Bit layouts are those of ggml's ``ggml-quants.c``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from realizar_torch.errors import FormatError
from realizar_torch.formats import BlockFormat, get_format

ACTIVATION_BLOCK = 32
_FLOAT_KINDS = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}

Fields = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class QuantizedActivations:
    """Vectors quantized to int8 in blocks of 32, shared by every weight that multiplies them.

    ``q`` int8 [..., Kp], ``scale`` float32 [..., Kp/32] and ``sums`` float32 [..., Kp/16] with
    ``x ≈ q * scale`` and ``sums[i] = scale * sum(q[16 i : 16 i + 16])``. Kp is ``in_features`` rounded up to
    whole blocks of the weight's format; the padding is zero.
    """

    q: torch.Tensor
    scale: torch.Tensor
    sums: torch.Tensor
    in_features: int


def dequantize(
    blocks: torch.Tensor,
    fmt: str | BlockFormat,
    in_features: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Decode uint8 rows ``[..., row_bytes]`` of a plain or packed format to ``[..., in_features]``.

    ``in_features=None`` decodes every stored column. Values are computed in float32, then cast to ``dtype``.
    FormatError: unknown format, not uint8, a ``dtype`` that is no float, or rows that are not the whole
    blocks of ``in_features`` weights.
    """
    fmt = _resolve(fmt)
    if blocks.dtype != torch.uint8:
        raise FormatError(f"blocks are {blocks.dtype}, expected torch.uint8 rows of {fmt.name} blocks")
    if not dtype.is_floating_point:
        raise FormatError(f"output dtype is {dtype}, expected a float type: weights are fractions")
    if blocks.ndim == 0 or blocks.shape[-1] % fmt.block_bytes:
        raise FormatError(
            f"shape {tuple(blocks.shape)} does not end in whole {fmt.name} blocks of {fmt.block_bytes} bytes"
        )
    stored = blocks.shape[-1] // fmt.block_bytes * fmt.block_size
    columns = stored if in_features is None else in_features
    if padded_features(columns, fmt) != stored:
        raise FormatError(
            f"rows of {blocks.shape[-1]} bytes hold {stored} {fmt.name} weights, but in_features={columns} "
            f"needs {fmt.row_bytes(columns)} bytes"
        )
    flat = blocks.reshape(-1, fmt.block_bytes)
    values = (
        _DECODERS[fmt.name](_fields(flat, fmt)) if flat.numel() else flat.new_empty(0, dtype=torch.float32)
    )
    return values.reshape(*blocks.shape[:-1], stored)[..., :columns].to(dtype).contiguous()


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    fmt: str | BlockFormat,
    in_features: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """``x @ decode(weight).T + bias``, in float64 for float64 ``x``, else in float32; gives ``x.dtype``."""
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    y = x.to(compute) @ dequantize(weight, fmt, in_features, compute).T
    if bias is not None:
        y = y + bias.to(compute)
    return y.to(x.dtype)


def padded_features(in_features: int, fmt: str | BlockFormat) -> int:
    """``in_features`` rounded up to whole blocks; formats that agree can share quantized activations."""
    fmt = _resolve(fmt)
    return fmt.blocks(in_features) * fmt.block_size


def quantize_activations(
    x: torch.Tensor, fmt: str | BlockFormat, device: torch.device | str | None = None
) -> QuantizedActivations:
    """Quantize ``x [..., K]`` for weights of ``fmt``; the result is on ``device`` (default: where ``x`` is).

    Per block of 32, all in float32: ``scale = max|x| / 127``, ``q = round_half_even(x * (1 / scale))``
    clamped to ±127. A block whose ``1 / scale`` is not finite (all zeros, or below 4e-37) becomes zeros;
    a block that holds NaN or infinity gets a NaN scale, so that the product is NaN.
    """
    fmt = _resolve(fmt)
    in_features = x.shape[-1]
    padding = padded_features(in_features, fmt) - in_features
    padded = torch.nn.functional.pad(x.detach().to(device or x.device, torch.float32), (0, padding))
    blocks = padded.unflatten(-1, (-1, ACTIVATION_BLOCK))
    amax = blocks.abs().amax(-1, keepdim=True)
    # by a tensor: CUDA turns the division by a number into a product with its reciprocal
    scale = torch.where(amax.isfinite(), amax / torch.full_like(amax, 127), torch.nan)
    inverse = 1 / scale
    inverse = torch.where(inverse.isfinite(), inverse, 0)
    q = (blocks * inverse).round().clamp(-127, 127).nan_to_num(0).to(torch.int8)
    half_sums = q.unflatten(-1, (2, ACTIVATION_BLOCK // 2)).sum(-1, dtype=torch.int32)
    return QuantizedActivations(
        q.flatten(-2), scale.squeeze(-1), (scale * half_sums.to(torch.float32)).flatten(-2), in_features
    )


def linear_int8(
    qx: QuantizedActivations, weight: torch.Tensor, fmt: str | BlockFormat, in_features: int
) -> torch.Tensor:
    """The int8 oracle: float64 product of the decoded weights with ``q * scale``, ``[..., rows]``."""
    x = qx.q.to(torch.float64) * qx.scale.to(torch.float64).repeat_interleave(ACTIVATION_BLOCK, -1)
    return x[..., :in_features] @ dequantize(weight, fmt, in_features, torch.float64).T


def _resolve(fmt: str | BlockFormat) -> BlockFormat:
    return fmt if isinstance(fmt, BlockFormat) else get_format(fmt)


def _fields(blocks: torch.Tensor, fmt: BlockFormat) -> Fields:
    """Every field of uint8 ``[n, block_bytes]``: u8 and i8 as they are, floats as float32."""
    fields = {}
    for field in fmt.fields:
        start = fmt.offset(field.name)
        raw = blocks[:, start : start + field.nbytes]
        if field.kind in _FLOAT_KINDS:
            # the copy is aligned for the wider type, whatever the storage offset was
            raw = raw.clone(memory_format=torch.contiguous_format).view(_FLOAT_KINDS[field.kind]).float()
        elif field.kind == "i8":
            raw = raw.view(torch.int8)
        fields[field.name] = raw
    return fields


def _unpack(packed: torch.Tensor, lanes: int, width: int) -> torch.Tensor:
    """Values of ``width`` bits: a run of ``lanes`` bytes holds 8/width runs of values, lowest bits first."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=packed.device).view(1, 1, -1, 1)
    runs = packed.reshape(packed.shape[0], -1, 1, lanes)
    return ((runs >> shifts) & (2**width - 1)).reshape(packed.shape[0], -1)


def _scaled(q: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor | None = None) -> torch.Tensor:
    """``scale * q - minimum`` with one scale per sub-block: q [n, B], scale and minimum [n, sub-blocks]."""
    values = scale.unsqueeze(-1) * q.to(torch.float32).unflatten(-1, (scale.shape[-1], -1))
    if minimum is not None:
        values = values - minimum.unsqueeze(-1)
    return values.flatten(1)


def _plain(f: Fields) -> torch.Tensor:
    return f["x"]


def _q4_0(f: Fields) -> torch.Tensor:
    return _scaled(_unpack(f["qs"], 16, 4).to(torch.int8) - 8, f["d"])


def _q4_1(f: Fields) -> torch.Tensor:
    return _scaled(_unpack(f["qs"], 16, 4), f["d"]) + f["m"]


def _q5(f: Fields) -> torch.Tensor:
    """Five-bit values of Q5_0 and Q5_1: bit i of the little-endian word ``qh`` is the top bit of value i."""
    return _unpack(f["qs"], 16, 4) | (_unpack(f["qh"], 1, 1) << 4)


def _q5_0(f: Fields) -> torch.Tensor:
    return _scaled(_q5(f).to(torch.int8) - 16, f["d"])


def _q5_1(f: Fields) -> torch.Tensor:
    return _scaled(_q5(f), f["d"]) + f["m"]


def _q8_0(f: Fields) -> torch.Tensor:
    return _scaled(f["qs"], f["d"])


def _q2_k(f: Fields) -> torch.Tensor:
    """16 sub-blocks of 16; a scale byte holds the scale in its low and the minimum in its high four bits."""
    scale = f["d"] * (f["scales"] & 15).to(torch.float32)
    minimum = f["dmin"] * (f["scales"] >> 4).to(torch.float32)
    return _scaled(_unpack(f["qs"], 32, 2), scale, minimum)


def _q3_k(f: Fields) -> torch.Tensor:
    """16 sub-blocks of 16; a clear bit of ``hmask`` subtracts 4; scales are six-bit numbers minus 32."""
    low = _unpack(f["scales"][:, :8], 8, 4)
    high = _unpack(f["scales"][:, 8:], 4, 2)
    scale = f["d"] * ((low | (high << 4)).to(torch.int8) - 32).to(torch.float32)
    q = _unpack(f["qs"], 32, 2).to(torch.int8) + 4 * _unpack(f["hmask"], 32, 1).to(torch.int8) - 4
    return _scaled(q, scale)


def _k4_scales(f: Fields) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight scales and eight minima of six bits in 12 bytes, as Q4_K and Q5_K store them.

    Bytes 0-3 and 4-7 hold numbers 0-3 of each in their low six bits; numbers 4-7 have their low four bits in
    bytes 8-11 (scale low nibble, minimum high nibble) and their two top bits in the top of bytes 0-3 and 4-7.
    """
    first, second, third = f["scales"].split(4, -1)
    scale = torch.cat([first & 63, (third & 15) | ((first >> 6) << 4)], -1)
    minimum = torch.cat([second & 63, (third >> 4) | ((second >> 6) << 4)], -1)
    return f["d"] * scale.to(torch.float32), f["dmin"] * minimum.to(torch.float32)


def _q4_k(f: Fields) -> torch.Tensor:
    return _scaled(_unpack(f["qs"], 32, 4), *_k4_scales(f))


def _q5_k(f: Fields) -> torch.Tensor:
    return _scaled(_unpack(f["qs"], 32, 4) | (_unpack(f["qh"], 32, 1) << 4), *_k4_scales(f))


def _q6_k(f: Fields) -> torch.Tensor:
    """16 sub-blocks of 16 with signed byte scales; values are six bits minus 32."""
    q = (_unpack(f["ql"], 64, 4) | (_unpack(f["qh"], 32, 2) << 4)).to(torch.int8) - 32
    return _scaled(q, f["d"] * f["scales"].to(torch.float32))


_DECODERS: Mapping[str, Callable[[Fields], torch.Tensor]] = MappingProxyType(
    {
        "F32": _plain,
        "F16": _plain,
        "BF16": _plain,
        "Q4_0": _q4_0,
        "Q4_1": _q4_1,
        "Q5_0": _q5_0,
        "Q5_1": _q5_1,
        "Q8_0": _q8_0,
        "Q2_K": _q2_k,
        "Q3_K": _q3_k,
        "Q4_K": _q4_k,
        "Q5_K": _q5_k,
        "Q6_K": _q6_k,
    }
)
