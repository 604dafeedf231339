"""The GGUF tensor formats: each one frozen value whose sizes and offsets are derived from its fields.

No other file states a block size in bytes. Layouts follow ggml's block structs; a block stores
``block_size`` consecutive weights of one row.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from realizar_torch.errors import FormatError

_ITEM_BYTES = {"u8": 1, "i8": 1, "f16": 2, "bf16": 2, "f32": 4}


@dataclass(frozen=True)
class Field:
    """One member of a block: ``count`` items of type ``kind`` (u8, i8, f16, bf16 or f32)."""

    name: str
    kind: str
    count: int

    @property
    def nbytes(self) -> int:
        return _ITEM_BYTES[self.kind] * self.count


@dataclass(frozen=True)
class BlockFormat:
    """A tensor format: ``block_size`` weights stored in ``fields``, in this order, without padding."""

    name: str
    ggml_type: int
    block_size: int
    fields: tuple[Field, ...]

    @functools.cached_property
    def block_bytes(self) -> int:
        return sum(field.nbytes for field in self.fields)

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.block_bytes / self.block_size

    @property
    def packed(self) -> bool:
        """True for block-quantized formats, False for plain F32, F16 and BF16."""
        return self.block_size > 1

    def offset(self, field_name: str) -> int:
        """Byte offset of a field inside the block."""
        position = 0
        for field in self.fields:
            if field.name == field_name:
                return position
            position += field.nbytes
        raise FormatError(f"{self.name} has no field {field_name!r}; it has {[f.name for f in self.fields]}")

    def blocks(self, in_features: int) -> int:
        """Blocks that hold a row of ``in_features`` weights (the last one may be padding in part)."""
        return -(-in_features // self.block_size)

    def row_bytes(self, in_features: int) -> int:
        """Bytes of a row of ``in_features`` weights, padded to whole blocks."""
        return self.blocks(in_features) * self.block_bytes


F32 = BlockFormat("F32", 0, 1, (Field("x", "f32", 1),))
F16 = BlockFormat("F16", 1, 1, (Field("x", "f16", 1),))
BF16 = BlockFormat("BF16", 30, 1, (Field("x", "bf16", 1),))

Q4_0 = BlockFormat("Q4_0", 2, 32, (Field("d", "f16", 1), Field("qs", "u8", 16)))
Q4_1 = BlockFormat("Q4_1", 3, 32, (Field("d", "f16", 1), Field("m", "f16", 1), Field("qs", "u8", 16)))
Q5_0 = BlockFormat("Q5_0", 6, 32, (Field("d", "f16", 1), Field("qh", "u8", 4), Field("qs", "u8", 16)))
Q5_1 = BlockFormat(
    "Q5_1", 7, 32, (Field("d", "f16", 1), Field("m", "f16", 1), Field("qh", "u8", 4), Field("qs", "u8", 16))
)
Q8_0 = BlockFormat("Q8_0", 8, 32, (Field("d", "f16", 1), Field("qs", "i8", 32)))

Q2_K = BlockFormat(
    "Q2_K",
    10,
    256,
    (Field("scales", "u8", 16), Field("qs", "u8", 64), Field("d", "f16", 1), Field("dmin", "f16", 1)),
)
Q3_K = BlockFormat(
    "Q3_K",
    11,
    256,
    (Field("hmask", "u8", 32), Field("qs", "u8", 64), Field("scales", "u8", 12), Field("d", "f16", 1)),
)
Q4_K = BlockFormat(
    "Q4_K",
    12,
    256,
    (Field("d", "f16", 1), Field("dmin", "f16", 1), Field("scales", "u8", 12), Field("qs", "u8", 128)),
)
Q5_K = BlockFormat(
    "Q5_K",
    13,
    256,
    (
        Field("d", "f16", 1),
        Field("dmin", "f16", 1),
        Field("scales", "u8", 12),
        Field("qh", "u8", 32),
        Field("qs", "u8", 128),
    ),
)
Q6_K = BlockFormat(
    "Q6_K",
    14,
    256,
    (Field("ql", "u8", 128), Field("qh", "u8", 64), Field("scales", "i8", 16), Field("d", "f16", 1)),
)

PLAIN_FORMATS = (F32, F16, BF16)
PACKED_FORMATS = (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K)
FORMATS: Mapping[str, BlockFormat] = MappingProxyType({f.name: f for f in PLAIN_FORMATS + PACKED_FORMATS})
FORMATS_BY_GGML_TYPE: Mapping[int, BlockFormat] = MappingProxyType({f.ggml_type: f for f in FORMATS.values()})


def get_format(name: str) -> BlockFormat:
    """The format called ``name``, plain or packed; FormatError lists the known names."""
    try:
        return FORMATS[name]
    except (KeyError, TypeError):
        raise FormatError(f"unknown format {name!r}; known: {', '.join(FORMATS)}") from None


def get_packed_format(name: str) -> BlockFormat:
    """The block-quantized format called ``name``; plain formats are refused."""
    fmt = get_format(name)
    if not fmt.packed:
        raise FormatError(f"{name} is a plain float format; packed formats: {', '.join(supported_formats())}")
    return fmt


def supported_formats() -> tuple[str, ...]:
    """Names of the packed formats that every kernel of this package runs."""
    return tuple(fmt.name for fmt in PACKED_FORMATS)
