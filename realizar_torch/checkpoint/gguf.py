"""Opens GGUF models: one file, or every shard of a split model, mapped privately and read without copying."""

import mmap
import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType

import torch

from realizar_torch.checkpoint.gguf_errors import DAMAGED, broken, shown, shown_path
from realizar_torch.checkpoint.gguf_header import Header, TensorInfo, parse_header
from realizar_torch.checkpoint.gguf_metadata import MetadataValue
from realizar_torch.checkpoint.mapped import map_file, release, view
from realizar_torch.checkpoint.paths import WHAT_TO_GIVE, given_path
from realizar_torch.errors import IncompleteShardsError

_SHARD_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_MAX_NAMES_SHOWN = 10


class GGUFFile:
    """An open GGUF model, whole or split.

    path: the file that was opened (of a directory, its first one).
    shards: the files of the model in order, one unless it is split.
    metadata: the keys of the first shard. Numbers, bool and str; arrays are lazy sequences, StringArray and
        NumberArray (which has ``.numpy()``).
    tensors: TensorInfo by name, of all shards, in the order of the files.

    The mapping is private and copy-on-write: tensors may be changed in place, the file never is. It lives as
    long as this object, a tensor or a metadata array of it does; there is no ``close``, which would take the
    memory from under the tensors. Nobody may shorten the file meanwhile: the system kills whoever reads bytes
    that are gone.
    """

    def __init__(
        self, path: Path, shards: tuple[Path, ...], headers: list[Header], mappings: list[mmap.mmap]
    ) -> None:
        self.path = path
        self.shards = shards
        self.metadata: Mapping[str, MetadataValue] = MappingProxyType(headers[0].metadata)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(_merge(shards, headers))
        self._mappings = mappings

    @property
    def arch(self) -> str:
        """``general.architecture``; GGUFError if the file does not name one."""
        arch = self.metadata.get("general.architecture")
        if not isinstance(arch, str):
            raise broken(
                shown_path(self.path), "metadata key 'general.architecture'", "no such key", "a text"
            )
        return arch

    def read(self, name: str) -> torch.Tensor:
        """The tensor ``name`` on the CPU, without a copy: it shares memory with the private mapping.

        Block-quantized: uint8 ``(*shape[:-1], row_bytes)``, the bytes of the file. Plain: F32, F16 or BF16 as
        float32, float16 or bfloat16 of ``shape``. Every call returns the same memory, so a change in place is
        seen by later reads. GGUFError for a name that the file does not have.
        """
        info = self.tensors.get(name)
        if info is None:
            known = ", ".join(map(shown, list(self.tensors)[:_MAX_NAMES_SHOWN]))
            found = f"no such tensor among {len(self.tensors)}"
            raise broken(shown_path(self.path), f"tensor {shown(name)}", found, f"a name like {known}", "")
        return view(self._mappings[info.shard], info.fmt, info.shape, info.offset)

    def release(self, name: str) -> None:
        """Gives back the memory of a tensor that was read and is no longer used."""
        info = self.tensors[name]
        release(self._mappings[info.shard], info.offset, info.nbytes)

    def __repr__(self) -> str:
        arch = shown(str(self.metadata.get("general.architecture")))
        nbytes = sum(info.nbytes for info in self.tensors.values())
        counts = f"shards={len(self.shards)}, tensors={len(self.tensors)}, tensor_bytes={nbytes}"
        return f"GGUFFile({str(self.path)!r}, arch={arch}, {counts})"


def open_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Open the GGUF model at ``path``: a file, any shard of a split model, or a directory with one model.

    Headers are parsed and checked in full; tensor data is mapped, not read. Accepted are versions 2 and 3,
    little-endian, and as alignment every power of two from 8 up (the specification asks for multiples of 8).
    GGUFError for a file that is missing or cannot be right, IncompleteShardsError for a split model with a
    missing or foreign shard, FormatError for what is no path.
    """
    entry = given_path(path)
    try:
        return _open(_only_model(entry) if entry.is_dir() else entry)
    except OSError as error:
        found = f"'{error.strerror}'"
        raise broken(shown_path(entry), "path", found, "a readable file", WHAT_TO_GIVE) from error


def _open(entry: Path) -> GGUFFile:
    with ExitStack() as on_failure:
        mappings = [on_failure.enter_context(_map(entry))]
        headers = [parse_header(mappings[0], shown_path(entry))]
        shards = _shard_paths(entry, headers[0])
        if len(shards) > 1:
            mappings = [on_failure.enter_context(_map(shard)) for shard in shards]
            headers = [
                parse_header(data, shown_path(shard)) for data, shard in zip(mappings, shards, strict=True)
            ]
        model = GGUFFile(entry, shards, headers, mappings)
        # nothing failed: the mappings live on
        on_failure.pop_all()
    return model


def _map(path: Path) -> mmap.mmap:
    try:
        return map_file(path)
    except ValueError as error:
        raise broken(shown_path(path), "path", str(error), "a GGUF file", WHAT_TO_GIVE) from None


def _only_model(directory: Path) -> Path:
    files = sorted(directory.glob("*.gguf"))
    models: dict[object, str] = {}
    for file in files:
        match = _SHARD_NAME.fullmatch(file.name)
        # a split model goes by the name of its first file
        models.setdefault((match["stem"], match["count"]) if match else file.name, file.name)
    if len(models) != 1:
        names = ", ".join(shown(name) for name in list(models.values())[:_MAX_NAMES_SHOWN])
        found = f"{len(models)} models: {names}" if files else "no file that ends in .gguf"
        raise broken(shown_path(directory), "directory", found, "one model, whole or split", WHAT_TO_GIVE)
    return files[0]


def _shard_paths(entry: Path, header: Header) -> tuple[Path, ...]:
    """The paths of all shards, by llama.cpp's naming rule; raises unless each of them exists."""
    number, count = header.shard + 1, header.shard_count
    if count == 1:
        return (entry,)
    match = _SHARD_NAME.fullmatch(entry.name)
    if not match or (int(match["number"]), int(match["count"])) != (number, count):
        expected = f"one that ends in -{number:05d}-of-{count:05d}.gguf, as its metadata say"
        found = f"the file name {shown(entry.name)}"
        raise _incomplete(entry, found, expected, "Keep the names that the shards came with.")
    shards = tuple(
        entry.with_name(f"{match['stem']}-{index:05d}-of-{count:05d}.gguf") for index in range(1, count + 1)
    )
    missing = [shown(shard.name) for shard in shards if not shard.is_file()]
    if missing:
        found = f"{count - len(missing)} of {count} shards"
        names = ", ".join(missing[:_MAX_NAMES_SHOWN]) + (", …" if len(missing) > _MAX_NAMES_SHOWN else "")
        raise _incomplete(entry, found, f"beside it also {names}", "Download the missing files.")
    return shards


def _merge(shards: tuple[Path, ...], headers: list[Header]) -> dict[str, TensorInfo]:
    """The tensors of all shards; raises if a shard is not of this model or the tensors are not complete."""
    tensors: dict[str, TensorInfo] = {}
    for index, (shard, header) in enumerate(zip(shards, headers, strict=True)):
        if (header.shard, header.shard_count) != (index, len(shards)):
            found = f"shard {header.shard + 1} of {header.shard_count}"
            raise _incomplete(shard, found, f"shard {index + 1} of {len(shards)}", DAMAGED)
        doubled = tensors.keys() & header.tensors.keys()
        if doubled:
            found = f"tensor {shown(min(doubled))}, which an earlier shard has too"
            raise _incomplete(shard, found, "every tensor once", DAMAGED)
        tensors.update(header.tensors)
    for shard, header in zip(shards, headers, strict=True):
        total = header.metadata.get("split.tensors.count", len(tensors))
        if total != len(tensors):
            found = f"{len(tensors)} tensors in {len(shards)} shards"
            raise _incomplete(shard, found, f"{total} ('split.tensors.count')", DAMAGED)
    return tensors


def _incomplete(path: Path, found: str, expected: str, advice: str) -> IncompleteShardsError:
    return IncompleteShardsError(str(broken(shown_path(path), "split model", found, expected, advice)))
