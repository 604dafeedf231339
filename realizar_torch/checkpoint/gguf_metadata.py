"""The metadata section of a GGUF file: keys with typed values; arrays stay in the file, read on access.

Each entry is a string (the key), a value type u32 and the value. A bool is one byte, 0 or 1; an array is an
element type u32, a count u64 and the elements (ggml, docs/gguf.md). Arrays of arrays are refused: no known
writer makes them, and their depth would be a hostile file's to choose.
"""

import struct
from array import array
from collections.abc import Mapping

import numpy as np

from realizar_torch.checkpoint.gguf_arrays import NumberArray, StringArray
from realizar_torch.checkpoint.gguf_cursor import Cursor
from realizar_torch.checkpoint.gguf_errors import shown

MetadataValue = int | float | bool | str | StringArray | NumberArray

_NUMBERS = {
    0: "u1",
    1: "i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_CODES = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 10: "<Q", 11: "<q", 12: "<d"}
_U32, _BOOL, _STRING, _ARRAY = 4, 7, 8, 9
# the keys whose type the specification fixes and which the reader itself acts on
_FIXED_TYPES = {"general.alignment": _U32, "general.architecture": _STRING}

# the specification's limit
_MAX_KEY_BYTES = 65535
# More than the largest known models use; bounds the time that a hostile count can cost to about a second.
_MAX_STRINGS = 1 << 21
_MAX_TEXT_BYTES = 1 << 26


def read_metadata(cursor: Cursor, count: int) -> dict[str, MetadataValue]:
    """Read ``count`` entries at the cursor; GGUFError names the key that cannot be right."""
    metadata: dict[str, MetadataValue] = {}
    for index in range(count):
        key = cursor.name(f"metadata key {index} of {count}", _MAX_KEY_BYTES)
        where = f"metadata key {shown(key)}"
        if key in metadata:
            raise cursor.broken(where, "it twice", "every key once")
        kind = cursor.u32(where)
        if kind != _FIXED_TYPES.get(key, kind):
            raise cursor.broken(where, f"value type {kind}", f"type {_FIXED_TYPES[key]}")
        metadata[key] = _read_value(cursor, kind, key, where)
    return metadata


def integer(cursor: Cursor, metadata: Mapping[str, MetadataValue], key: str, default: int) -> int:
    """The value of an integer key, ``default`` if the file has no such key."""
    value = metadata.get(key, default)
    if type(value) is not int:
        raise cursor.broken(f"metadata key '{key}'", repr(value), "an integer")
    return value


def _read_value(cursor: Cursor, kind: int, key: str, where: str) -> MetadataValue:
    if kind in _CODES:
        return cursor.number(_CODES[kind], where)
    if kind == _BOOL:
        byte = cursor.number("<B", where)
        if byte > 1:
            raise cursor.broken(where, f"a bool of value {byte}", "0 or 1")
        return bool(byte)
    if kind == _STRING:
        return cursor.text(where, _MAX_TEXT_BYTES)
    if kind == _ARRAY:
        return _read_array(cursor, key, where)
    raise cursor.broken(where, f"value type {kind}", "a type from 0 to 12")


def _read_array(cursor: Cursor, key: str, where: str) -> StringArray | NumberArray:
    kind, count = cursor.u32(where), cursor.u64(where)
    if kind == _STRING:
        return StringArray(cursor.data, cursor.path, key, _string_starts(cursor, count, where))
    if kind == _ARRAY:
        raise cursor.broken(where, "an array of arrays", "an array of numbers, bools or strings")
    if kind != _BOOL and kind not in _NUMBERS:
        raise cursor.broken(where, f"array element type {kind}", "a type from 0 to 12")
    dtype = np.dtype(np.bool_ if kind == _BOOL else _NUMBERS[kind])
    start = cursor.take(count * dtype.itemsize, f"{where}, an array of {count} items")
    return NumberArray(cursor.data, cursor.path, key, dtype, start, count)


def _string_starts(cursor: Cursor, count: int, where: str) -> array:
    """Walk over ``count`` strings; the result is StringArray's ``starts``."""
    # each string takes at least its byte count
    most = min(_MAX_STRINGS, cursor.remaining // 8)
    if count > most:
        raise cursor.broken(
            where, f"an array of {count} strings", f"at most {most} from here to the end of the file"
        )
    data, length_at, size, position = (
        cursor.data,
        struct.Struct("<Q").unpack_from,
        cursor.size,
        cursor.position,
    )
    starts = array("Q")
    for index in range(count):
        if position > size - 8:
            raise cursor.truncated(f"{where}, item {index} of {count}", position, 8)
        starts.append(position + 8)
        position += 8 + length_at(data, position)[0]
    if position > size:
        raise cursor.truncated(f"{where}, item {count - 1} of {count}", starts[-1], position - starts[-1])
    starts.append(position + 8)
    cursor.position = position
    return starts
