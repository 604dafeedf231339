"""Writes GGUF files for tests: any metadata, tensors, alignment, version or split, sound or deliberately not.

The layout follows the GGUF specification (ggml, docs/gguf.md) and shares no code with the reader under test::

    write_gguf(
        path,
        {"general.architecture": "llama", "llama.block_count": 2, "tokenizer.ggml.tokens": ["a", "b"]},
        {"output.weight": ("Q4_K", (rows, columns), packed_bytes), "output_norm.weight": plain(torch_tensor)},
    )

Metadata values are Python values: ``bool``, ``int`` (u32, else the smallest of i32, u64, i64 that holds it),
``float`` (f32), ``str``, and lists of one of them (int lists are i32, else i64). ``Typed("u16", 3)`` and
``Typed("f64", [1.0])`` choose the type by hand; an empty list needs that.
A tensor is ``(format name or ggml type number, shape, bytes)``, with the shape in torch order (rows first).
Bytes are written as they are: nothing checks that they fit the shape, so broken files can be written as well.
"""

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from realizar_torch.checkpoint.gguf import GGUFFile
from realizar_torch.formats import FORMATS

VALUE_TYPES = {
    "u8": (0, "B"),
    "i8": (1, "b"),
    "u16": (2, "H"),
    "i16": (3, "h"),
    "u32": (4, "I"),
    "i32": (5, "i"),
    "f32": (6, "f"),
    "bool": (7, "?"),
    "string": (8, ""),
    "array": (9, ""),
    "u64": (10, "Q"),
    "i64": (11, "q"),
    "f64": (12, "d"),
}
_INT_LIMITS = {
    "u32": (0, 1 << 32),
    "i32": (-1 << 31, 1 << 31),
    "u64": (0, 1 << 64),
    "i64": (-1 << 63, 1 << 63),
}

Tensor = tuple[str | int, Sequence[int], bytes]


class Typed(NamedTuple):
    """A metadata value with an explicit GGUF type; a list makes an array of that type."""

    kind: str
    value: Any


def write_gguf(
    path: str | Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    version: int = 3,
    alignment: int = 32,
) -> Path:
    """Write one file and return its path. An alignment other than 32 is recorded in the metadata."""
    path = Path(path)
    path.write_bytes(gguf_bytes(metadata, tensors, version=version, alignment=alignment))
    return path


def write_split_gguf(
    directory: str | Path,
    stem: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    counts: Sequence[int],
    *,
    alignment: int = 32,
) -> list[Path]:
    """Write ``len(counts)`` shards, the i-th with ``counts[i]`` tensors, named and keyed as by llama.cpp."""
    if sum(counts) != len(tensors):
        raise ValueError(f"counts {counts} do not add up to {len(tensors)} tensors")
    remaining = list(tensors.items())
    paths = []
    for number, count in enumerate(counts):
        split = {
            "split.no": Typed("u16", number),
            "split.count": Typed("u16", len(counts)),
            "split.tensors.count": Typed("i32", len(tensors)),
        }
        path = Path(directory) / f"{stem}-{number + 1:05d}-of-{len(counts):05d}.gguf"
        own = {**metadata, **split} if number == 0 else split
        paths.append(write_gguf(path, own, dict(remaining[:count]), alignment=alignment))
        remaining = remaining[count:]
    return paths


def gguf_bytes(
    metadata: Mapping[str, Any], tensors: Mapping[str, Tensor], *, version: int = 3, alignment: int = 32
) -> bytes:
    """The whole file as bytes."""
    if alignment != 32:
        metadata = {**metadata, "general.alignment": alignment}
    out = [b"GGUF", struct.pack("<IQQ", version, len(tensors), len(metadata))]
    out += [string(key) + value(entry) for key, entry in metadata.items()]
    offset = 0
    for name, (fmt, shape, data) in tensors.items():
        out.append(tensor_info(name, fmt, shape, offset))
        offset += len(data) + -len(data) % alignment
    header = b"".join(out)
    parts = [header, bytes(-len(header) % alignment)]
    for _, _, data in tensors.values():
        parts += [data, bytes(-len(data) % alignment)]
    return b"".join(parts)


def plain(tensor: torch.Tensor) -> Tensor:
    """A float32, float16 or bfloat16 tensor as an entry for :func:`write_gguf`."""
    names = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    return names[tensor.dtype], tuple(tensor.shape), tensor.contiguous().view(torch.uint8).numpy().tobytes()


def packed(name: str, *shape: int, seed: int = 0) -> Tensor:
    """A tensor of random bytes in a packed format, as an entry for :func:`write_gguf`."""
    fmt = FORMATS[name]
    count = int(np.prod(shape[:-1], dtype=int)) * fmt.row_bytes(shape[-1])
    return name, shape, np.random.default_rng(seed).bytes(count)


def assert_tensors(file: GGUFFile, tensors: Mapping[str, Tensor]) -> None:
    """The file holds exactly these tensors, in this order, and reads their bytes, shapes and formats."""
    assert list(file.tensors) == list(tensors)
    for name, (fmt, shape, data) in tensors.items():
        info, tensor = file.tensors[name], file.read(name)
        assert (info.name, info.fmt.name, info.shape, info.nbytes) == (name, fmt, shape, len(data))
        last = info.fmt.row_bytes(shape[-1]) if info.fmt.packed else shape[-1]
        assert tuple(tensor.shape) == (*shape[:-1], last)
        assert tensor.view(torch.uint8).numpy().tobytes() == data
        start = file.shards[info.shard].read_bytes()[info.offset : info.offset + info.nbytes]
        assert start == data


def string(text: str | bytes) -> bytes:
    """A GGUF string: u64 byte count, then the bytes."""
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def value(entry: Any) -> bytes:
    """A metadata value with its leading type number."""
    if not isinstance(entry, Typed):
        if hasattr(entry, "tolist"):
            entry = entry.tolist()
        entry = Typed(_kind(entry), entry)
    number, code = VALUE_TYPES[entry.kind]
    if not isinstance(entry.value, list | tuple):
        body = string(entry.value) if entry.kind == "string" else struct.pack("<" + code, entry.value)
        return struct.pack("<I", number) + body
    if entry.kind == "string":
        body = b"".join(map(string, entry.value))
    else:
        body = struct.pack(f"<{len(entry.value)}{code}", *entry.value)
    return struct.pack("<IIQ", VALUE_TYPES["array"][0], number, len(entry.value)) + body


def tensor_info(name: str | bytes, fmt: str | int, shape: Sequence[int], offset: int) -> bytes:
    """One row of the tensor table; ``shape`` is in torch order, the file stores it reversed."""
    number = fmt if isinstance(fmt, int) else FORMATS[fmt].ggml_type
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
    return string(name) + dims + struct.pack("<IQ", number, offset)


def _kind(entry: Any) -> str:
    items = entry if isinstance(entry, list | tuple) else [entry]
    if not items:
        raise ValueError('an empty array has no type of its own: use Typed("u8", [])')
    for python_type, kind in ((bool, "bool"), (str, "string"), (bytes, "string"), (float, "f32")):
        if isinstance(items[0], python_type):
            return kind
    order = ("i32", "i64") if items is entry else tuple(_INT_LIMITS)
    for kind in order:
        low, high = _INT_LIMITS[kind]
        if all(low <= item < high for item in items):
            return kind
    raise ValueError(f"no GGUF integer type holds {entry}")
