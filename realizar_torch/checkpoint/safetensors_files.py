"""The safetensors files of a model directory, one or sharded by an index: checked as a whole, mapped, read.

Layout of one file (huggingface/safetensors): header length u64, the header in JSON, the data. The
``safetensors`` library judges each header (sizes, overlaps, holes); here it is compared with the index.
"""

import json
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from realizar_torch.checkpoint.gguf_errors import DAMAGED, complaint, damaged, shown, shown_path
from realizar_torch.checkpoint.json_files import read_json
from realizar_torch.checkpoint.mapped import map_file, release
from realizar_torch.errors import IncompleteShardsError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# what weights are stored as; other tensors are listed, but cannot be read
DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "U8": torch.uint8}
)
_MAX_NAMES_SHOWN = 8


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies. dtype: the file's word ("BF16"). offset, nbytes: bytes in file ``shard``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    shard: int


class SafetensorsFiles:
    """``model.safetensors`` of a directory, or every file that ``model.safetensors.index.json`` names.

    paths: the files in order. metadata: the texts each file carries beside its tensors. tensors: StoredTensor
    by name. CheckpointError for a file that is missing or
    cannot be right, IncompleteShardsError where files and index disagree. Data is mapped, not read; the
    mapping is private, as that of GGUFFile.
    """

    def __init__(self, directory: Path) -> None:
        expected = _indexed(directory)
        names = [SINGLE_FILE] if expected is None else sorted(set(expected.values()))
        self.paths = tuple(directory / name for name in names)
        missing = [shown(path.name) for path in self.paths if not path.is_file()]
        if missing:
            found = f"{len(names) - len(missing)} of {len(names)} files"
            listed = ", ".join(missing[:_MAX_NAMES_SHOWN])
            advice = "Download the missing files."
            raise _disagreement(directory, found, f"also {listed}", advice)
        self._mappings = [_map(path) for path in self.paths]
        self.metadata: list[Mapping[str, str]] = []
        tensors: dict[str, StoredTensor] = {}
        for shard, (path, data) in enumerate(zip(self.paths, self._mappings, strict=True)):
            own, metadata = _read_table(path, data, shard)
            self.metadata.append(metadata)
            if doubled := tensors.keys() & own.keys():
                found = f"tensor {shown(min(doubled))}, which an earlier file has too"
                raise _disagreement(path, found, "every tensor once", DAMAGED)
            tensors |= own
        if expected is not None:
            _compare(directory, expected, {name: names[t.shard] for name, t in tensors.items()})
        self.tensors: Mapping[str, StoredTensor] = MappingProxyType(tensors)

    def read(self, name: str) -> torch.Tensor:
        """The tensor as stored (one of DTYPES), without a copy: it shares memory with the private mapping."""
        info = self.tensors[name]
        dtype = DTYPES[info.dtype]
        count = info.nbytes // dtype.itemsize
        flat = torch.frombuffer(self._mappings[info.shard], dtype=dtype, count=count, offset=info.offset)
        return flat.view(info.shape)

    def release(self, name: str) -> None:
        """Gives back the memory of a tensor that was read and is no longer used."""
        info = self.tensors[name]
        release(self._mappings[info.shard], info.offset, info.nbytes)


def _indexed(directory: Path) -> dict[str, str] | None:
    """Tensor -> file name as the index says; None for a directory with a single file."""
    path = directory / INDEX_FILE
    if (directory / SINGLE_FILE).is_file():
        return None
    if not path.is_file():
        present = sorted(file.name for file in directory.glob("*.safetensors"))[:_MAX_NAMES_SHOWN]
        found = f"{', '.join(map(shown, present))}, but no {INDEX_FILE}" if present else "none"
        expected = f"{SINGLE_FILE}, or {INDEX_FILE} and the files it names"
        raise _disagreement(directory, found, expected, "Download the missing files.")
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise damaged(shown_path(path), "weight_map", f"{weight_map!r:.40}", "tensor names and their files")
    for tensor, name in weight_map.items():
        # a path could lead anywhere
        if not isinstance(name, str) or not name.endswith(".safetensors") or set(name) & set("/\\\0"):
            raise damaged(
                shown_path(path),
                f"file of tensor {shown(tensor)}",
                shown(str(name)),
                "the name of a .safetensors file in this directory",
            )
    return weight_map


def _map(path: Path) -> mmap.mmap:
    try:
        return map_file(path)
    except (OSError, ValueError) as error:
        found = getattr(error, "strerror", None) or str(error)
        raise damaged(shown_path(path), "path", found, "a safetensors file") from error


def _read_table(path: Path, data: mmap.mmap, shard: int) -> tuple[dict[str, StoredTensor], Mapping[str, str]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt"):
            pass
    except (SafetensorError, OSError) as error:
        found = f"{error} (first bytes {shown(data[:16])})"
        raise damaged(shown_path(path), "header", found, "a whole safetensors file") from None
    # from here on the library has vouched for every number
    start = 8 + int.from_bytes(data[:8], "little")
    header: dict[str, Any] = json.loads(data[8:start])
    metadata = header.pop("__metadata__", {})
    tensors = {
        name: StoredTensor(
            name,
            entry["dtype"],
            tuple(entry["shape"]),
            start + entry["data_offsets"][0],
            entry["data_offsets"][1] - entry["data_offsets"][0],
            shard,
        )
        for name, entry in header.items()
    }
    return tensors, metadata


def _compare(directory: Path, expected: Mapping[str, str], found: Mapping[str, str]) -> None:
    """Raises unless the index and the files name the same tensors in the same places."""
    wrong = [
        f"{shown(name)} in {shown(found[name]) if name in found else 'no file'}, "
        f"index: {shown(expected[name]) if name in expected else 'no entry'}"
        for name in sorted(expected.keys() | found.keys())
        if expected.get(name) != found.get(name)
    ]
    if wrong:
        listed = "; ".join(wrong[:_MAX_NAMES_SHOWN])
        more = f" and {len(wrong) - _MAX_NAMES_SHOWN} more" if len(wrong) > _MAX_NAMES_SHOWN else ""
        raise _disagreement(
            directory / INDEX_FILE, listed + more, "each tensor where the index says", DAMAGED
        )


def _disagreement(path: Path, found: str, expected: str, advice: str) -> IncompleteShardsError:
    return IncompleteShardsError(complaint(shown_path(path), "safetensors files", found, expected, advice))
