"""The header of one GGUF file: bytes in, metadata and a checked tensor table out.

Layout, little-endian (ggml, docs/gguf.md): magic ``GGUF``, version u32, tensor count u64, key count u64;
the metadata; the tensor table (string name, dimension count u32, dimensions u64 with the innermost first,
type u32, offset u64 from the start of the data); zero bytes up to the next multiple of
``general.alignment`` (32 if not stated); the tensor data. A string is a u64 byte count and UTF-8 bytes.
Versions 2 and 3 are the same bytes. Sizes are Python integers, compared with the length of the file before
anything is read or allocated by them.
"""

import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from realizar_torch.checkpoint.gguf_cursor import Cursor
from realizar_torch.checkpoint.gguf_errors import shown
from realizar_torch.checkpoint.gguf_metadata import MetadataValue, integer, read_metadata
from realizar_torch.errors import GGUFError
from realizar_torch.formats import FORMATS, FORMATS_BY_GGML_TYPE, BlockFormat

_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4
# the specification's limit
_MAX_NAME_BYTES = 64
# More than the largest known models use; bounds the time that a hostile count can cost to about a second.
_MAX_KEYS = 1 << 16
_MAX_TENSORS = 1 << 16
_MAX_TENSORS_NAMED = 1000

_FOREIGN = {
    b"PK\3\4": "a zip archive (perhaps a PyTorch checkpoint)",
    b"\x80": "a Python pickle (perhaps a PyTorch checkpoint)",
    b"version https://git-lfs": "a Git LFS pointer (`git lfs pull` fetches the file itself)",
    b"<": "an HTML or XML page saved under this name",
    b"FUGG": "a GGUF magic with its bytes swapped",
    b"lmgg": "a GGML file, a predecessor of GGUF",
    b"fmgg": "a GGMF file, a predecessor of GGUF",
    b"tjgg": "a GGJT file, a predecessor of GGUF",
}
_NOT_GGUF = "This is not a GGUF file: give one, or convert the model."


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies.

    shape: in torch order, outermost dimension first.
    offset, nbytes: bytes, the offset counted from the start of its file.
    shard: the index of its file in ``GGUFFile.shards``.
    """

    name: str
    fmt: BlockFormat
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    shard: int


@dataclass(frozen=True, slots=True)
class Header:
    """What one file says; a file that is not part of a split model is shard 0 of 1."""

    version: int
    metadata: dict[str, MetadataValue]
    tensors: dict[str, TensorInfo]
    shard: int
    shard_count: int


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of the tensor table as it stands in the file."""

    name: str
    dims: tuple[int, ...]
    kind: int
    offset: int


def parse_header(data: mmap.mmap, path: str) -> Header:
    """Parse and check the header at the start of ``data``; GGUFError for anything that cannot be right.

    A file that passes holds every byte of every tensor, and behind the last one nothing but zero bytes.
    """
    cursor = Cursor(data, path)
    version = _read_version(cursor)
    tensor_count, key_count = cursor.u64("tensor count"), cursor.u64("key count")
    _check_count(cursor, "tensor count", tensor_count, _MAX_TENSORS)
    _check_count(cursor, "key count", key_count, _MAX_KEYS)
    metadata = read_metadata(cursor, key_count)
    shard, shard_count = _split(cursor, metadata)
    rows = _read_rows(cursor, tensor_count)
    alignment = integer(cursor, metadata, "general.alignment", _DEFAULT_ALIGNMENT)
    data_start = _data_start(cursor, alignment)
    tensors = {row.name: _locate(cursor, row, data_start, alignment, shard) for row in rows}
    _check_layout(cursor, tensors, data_start)
    return Header(version, metadata, tensors, shard, shard_count)


def _read_version(cursor: Cursor) -> int:
    start = cursor.data[:32]
    if start[:4] != b"GGUF":
        looks = "".join(f", which is {text}" for prefix, text in _FOREIGN.items() if start.startswith(prefix))
        raise cursor.broken("magic", f"first bytes {shown(start)}{looks}", "b'GGUF'", _NOT_GGUF)
    cursor.take(4, "magic")
    version = cursor.u32("version")
    if version and version & 0xFFFF == 0:
        found = f"0x{version:08x}, so the file is big-endian"
        raise cursor.broken(
            "version", found, "a little-endian file", "Convert the model for this byte order."
        )
    if version not in (2, 3):
        raise cursor.broken(
            "version", f"version {version}", "version 2 or 3", "Convert the model to version 3."
        )
    return version


def _check_count(cursor: Cursor, where: str, count: int, limit: int) -> None:
    # no key and no tensor takes fewer than 14 bytes: length of the name, name, type, value
    most = min(limit, cursor.remaining // 14)
    if count > most:
        raise cursor.broken(where, str(count), f"at most {most} in a file of {cursor.size} bytes")


def _split(cursor: Cursor, metadata: Mapping[str, MetadataValue]) -> tuple[int, int]:
    number = integer(cursor, metadata, "split.no", 0)
    # a count of 0 also says that the model is not split
    count = max(integer(cursor, metadata, "split.count", 1), 1)
    if not 0 <= number < count:
        raise cursor.broken(
            "metadata key 'split.no'", str(number), f"0 to {count - 1}, as 'split.count' says"
        )
    return number, count


def _read_rows(cursor: Cursor, count: int) -> list[_Row]:
    rows: dict[str, _Row] = {}
    for index in range(count):
        name = cursor.name(f"name of tensor {index} of {count}", _MAX_NAME_BYTES)
        where = f"tensor {shown(name)}"
        if name in rows:
            raise cursor.broken(where, "it twice", "every tensor once")
        rank = cursor.u32(where)
        if not 1 <= rank <= _MAX_DIMS:
            raise cursor.broken(where, f"{rank} dimensions", f"1 to {_MAX_DIMS}")
        dims = struct.unpack_from(f"<{rank}Q", cursor.data, cursor.take(8 * rank, where))
        rows[name] = _Row(name, dims, cursor.u32(where), cursor.u64(where))
    bad = [row for row in rows.values() if row.kind not in FORMATS_BY_GGML_TYPE]
    if bad:
        raise _unsupported(cursor, bad)
    return list(rows.values())


def _unsupported(cursor: Cursor, rows: list[_Row]) -> GGUFError:
    names: dict[int, list[str]] = {}
    for row in rows[:_MAX_TENSORS_NAMED]:
        names.setdefault(row.kind, []).append(shown(row.name))
    found = "; ".join(f"type {_type_label(kind)} in {', '.join(names[kind])}" for kind in sorted(names))
    if len(rows) > _MAX_TENSORS_NAMED:
        found += f" and {len(rows) - _MAX_TENSORS_NAMED} more"
    advice = "Take the model in another quantization, for example Q4_K_M or Q8_0."
    return cursor.broken(f"{len(rows)} unsupported tensors", found, f"types {', '.join(FORMATS)}", advice)


def _type_label(kind: int) -> str:
    # only words for a message: reading a file does not need the gguf package
    try:
        from gguf import GGMLQuantizationType

        return f"{kind} ({GGMLQuantizationType(kind).name})"
    except (ImportError, ValueError):
        return str(kind)


def _data_start(cursor: Cursor, alignment: int) -> int:
    if alignment < 8 or alignment & (alignment - 1):
        raise cursor.broken("metadata key 'general.alignment'", str(alignment), "a power of two from 8 up")
    start = -(-cursor.position // alignment) * alignment
    # with a wrong tensor count, the rest of the table would pass for padding
    _check_zero(cursor, "padding behind the tensor table", cursor.position, min(start, cursor.size))
    return start


def _check_zero(cursor: Cursor, where: str, start: int, end: int) -> None:
    stray = re.compile(rb"[^\0]").search(cursor.data, start, end)
    if stray:
        raise cursor.broken(
            where, f"{stray[0]!r} at byte {stray.start()}", f"zeros from byte {start} to {end}"
        )


def _locate(cursor: Cursor, row: _Row, data_start: int, alignment: int, shard: int) -> TensorInfo:
    fmt, where, dims = FORMATS_BY_GGML_TYPE[row.kind], f"tensor {shown(row.name)}", list(row.dims)
    if 0 in dims:
        raise cursor.broken(where, f"dimensions {dims}", "no dimension of size 0")
    if dims[0] % fmt.block_size:
        expected = f"rows of whole {fmt.name} blocks of {fmt.block_size} values"
        raise cursor.broken(where, f"dimensions {dims}", expected)
    if row.offset % alignment:
        raise cursor.broken(where, f"offset {row.offset}", f"a multiple of the alignment {alignment}")
    start, nbytes = data_start + row.offset, fmt.row_bytes(dims[0]) * math.prod(dims[1:])
    if start + nbytes > cursor.size:
        raise cursor.truncated(f"{where} ({fmt.name}, dimensions {dims})", start, nbytes)
    return TensorInfo(row.name, fmt, row.dims[::-1], start, nbytes, shard)


def _check_layout(cursor: Cursor, tensors: Mapping[str, TensorInfo], data_start: int) -> None:
    in_order = sorted(tensors.values(), key=lambda info: info.offset)
    for left, right in pairwise(in_order):
        end = left.offset + left.nbytes
        if end > right.offset:
            where = f"tensors {shown(left.name)} and {shown(right.name)}"
            found = f"bytes {left.offset} to {end} and from byte {right.offset} on"
            raise cursor.broken(where, found, "tensors that do not overlap")
    # with a wrong alignment or tensor count, data is left over here
    end = in_order[-1].offset + in_order[-1].nbytes if in_order else data_start
    _check_zero(cursor, "bytes behind the last tensor", min(end, cursor.size), cursor.size)
