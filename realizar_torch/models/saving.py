"""rt.save: a model as a directory of safetensors, which rt.load reads back byte for byte.

``realizar.json`` holds the version, the model's metadata and the format of each tensor, and
``realizar_tokenizer.json`` the tokenizer's metadata. The safetensors hold the state dict under its own names:
packed weights as canonical bytes (uint8), tied weights once.
"""

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from realizar_torch import packing
from realizar_torch.caller import warn_caller
from realizar_torch.checkpoint.gguf_errors import shown_path
from realizar_torch.checkpoint.safetensors_files import INDEX_FILE, SINGLE_FILE
from realizar_torch.errors import CheckpointError, FormatError
from realizar_torch.models.metadata import MODULE_ROWS
from realizar_torch.models.saved_format import (
    CONFIG_FILE,
    FORMAT,
    FORMATS_KEY,
    TOKENIZER_FILE,
    VERSION,
    Origin,
    gguf_name,
)
from realizar_torch.models.transformer import Transformer
from realizar_torch.nn.embedding import QuantizedEmbedding
from realizar_torch.nn.experts import QuantizedExperts
from realizar_torch.nn.layout import PackedModule
from realizar_torch.nn.linear import QuantizedLinear

DEFAULT_SHARD_BYTES = 5_000_000_000
_PLAIN = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class _Entry:
    """One tensor to save. shape: rows and columns as weights; blocks are ``(*rows, row_bytes)``."""

    name: str
    fmt: str
    shape: tuple[int, ...]
    stored: Tensor
    layout: str = "ggml"

    def tensor(self) -> Tensor:
        """On the CPU, in canonical form."""
        stored = self.stored.detach()
        canonical = packing.unpack(stored, self.fmt, self.layout) if self.layout != "ggml" else stored
        return canonical.cpu().contiguous()


def save(
    model: Transformer, directory: str | os.PathLike[str], *, max_shard_size: int = DEFAULT_SHARD_BYTES
) -> None:
    """Writes a model that rt.load made, quantized since or not, with its tokenizer's data into ``directory``.
    That is the tokenizer that ``rt.load`` was given, if it was; one of the caller's own class is not saved,
    with a warning, and has to be given again.

    directory: created with its parents; it must not hold anything yet. All files are written beside it first
    and appear at once, or not at all; into an empty directory that is there they are moved, realizar.json
    last. max_shard_size: bytes of weights a file holds at most, unless one tensor is larger; more files get
    an index. The model may be prepacked and on any device; one file's weights at a time are copied, dense
    ones in the model's dtype.

    FormatError for a model that rt.load did not make or a directory that is not empty, CheckpointError where
    the disk refuses.
    """
    from safetensors import SafetensorError

    origin = getattr(model, "origin", None)
    if not isinstance(origin, Origin):
        raise FormatError(
            f"rt.save takes a model that rt.load made, not this {type(model).__name__}; save other modules "
            "with torch.save(model.state_dict(), file), which keeps the formats of packed weights (_metadata)"
        )
    if type(max_shard_size) is not int or max_shard_size < 1:
        raise FormatError(f"max_shard_size is {max_shard_size!r}; expected a number of bytes, at least 1")
    entries, tied = _entries(model)
    target = check_target(directory)
    if origin.foreign_tokenizer is not None:
        warn_caller(
            f"this model was loaded with a tokenizer of the class {origin.foreign_tokenizer}, which rt.save "
            "cannot write: the directory gets none; give rt.load(..., tokenizer=...) the same one again"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
        scratch.mkdir()
        try:
            _write(scratch, entries, tied, origin, max_shard_size)
            _move(scratch, target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    # safetensors wraps what the system says
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{shown_path(target)} cannot be written: {error}") from error


def check_target(directory: str | os.PathLike[str]) -> Path:
    """The path without links, if nothing is there but perhaps an empty directory; FormatError otherwise."""
    if not isinstance(directory, str | os.PathLike):
        raise FormatError(f"directory is {directory!r:.80}; expected a path")
    target = Path(os.path.realpath(directory))
    try:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise FormatError(f"{shown_path(target)} is not an empty directory; save to a new one")
    except OSError as error:
        raise CheckpointError(f"{shown_path(target)} cannot be read: {error}") from error
    return target


def _move(scratch: Path, target: Path) -> None:
    if not target.exists():
        scratch.replace(target)
        return
    # a directory that is there stays the one it is: somebody may stand in it
    for file in sorted(scratch.iterdir(), key=lambda file: file.name == CONFIG_FILE):
        file.replace(target / file.name)


def _entries(model: Transformer) -> tuple[list[_Entry], dict[str, str]]:
    """Every tensor once, and name -> name of the tensor it shares."""
    entries: list[_Entry] = []
    tied: dict[str, str] = {}
    first: dict[int, str] = {}
    for entry in _all_entries(model):
        if gguf_name(entry.name) is None:
            raise FormatError(
                f"rt.save does not know {entry.name}, which rt.load did not make; merge or remove what was "
                "added to the model (adapters), or save all with torch.save(model.state_dict(), file)"
            )
        if id(entry.stored) in first:
            tied[entry.name] = first[id(entry.stored)]
        else:
            first[id(entry.stored)] = entry.name
            entries.append(entry)
    return entries, tied


def _all_entries(model: Transformer) -> Iterator[_Entry]:
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(module, PackedModule):
            stored = module.stored
            shape = (*stored.shape[:-1], _columns(module))
            yield _Entry(f"{prefix}weight", module.fmt, shape, stored, module.layout)
        persistent = (item for item in module.named_buffers(recurse=False) if item[0] in _saved(module))
        for name, tensor in (*module.named_parameters(recurse=False), *persistent):
            if isinstance(module, PackedModule) and name == "weight":
                continue
            if tensor.dtype not in _PLAIN:
                raise FormatError(
                    f"{prefix}{name} is {tensor.dtype}; rt.save takes {', '.join(_PLAIN.values())}"
                )
            yield _Entry(f"{prefix}{name}", _PLAIN[tensor.dtype], tuple(tensor.shape), tensor)


def _columns(module: PackedModule) -> int:
    if isinstance(module, QuantizedEmbedding):
        return module.embedding_dim
    assert isinstance(module, QuantizedLinear | QuantizedExperts)
    return module.in_features


def _saved(module: torch.nn.Module) -> set[str]:
    return module._buffers.keys() - module._non_persistent_buffers_set


def _write(
    folder: Path, entries: list[_Entry], tied: Mapping[str, str], origin: Origin, max_shard_size: int
) -> None:
    from safetensors.torch import save_file

    shards = _shards(entries, max_shard_size)
    stem = SINGLE_FILE.removesuffix(".safetensors")
    names = [f"{stem}-{n + 1:05d}-of-{len(shards):05d}.safetensors" for n in range(len(shards))]
    if len(shards) == 1:
        names = [SINGLE_FILE]
    else:
        weight_map = {entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard}
        total = sum(_nbytes(entry) for entry in entries)
        _write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})
    for name, shard in zip(names, shards, strict=True):
        formats = json.dumps({entry.name: entry.fmt for entry in shard})
        save_file({entry.name: entry.tensor() for entry in shard}, folder / name, {FORMATS_KEY: formats})
    metadata = {key: _plain_value(value) for key, value in origin.metadata.items()}
    config = {
        "format": FORMAT,
        "version": VERSION,
        "metadata": {k: v for k, v in metadata.items() if not k.startswith("tokenizer.")}
        | {MODULE_ROWS: True},
        "tensors": {entry.name: {"fmt": entry.fmt, "shape": list(entry.shape)} for entry in entries},
        "tied": dict(tied),
        "constants": {name: tensor.tolist() for name, tensor in origin.constants.items()},
    }
    _write_json(folder / CONFIG_FILE, config)
    tokenizer = {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}
    _write_json(folder / TOKENIZER_FILE, tokenizer)


def _shards(entries: list[_Entry], max_shard_size: int) -> list[list[_Entry]]:
    """Consecutive tensors of at most that many bytes together."""
    shards: list[list[_Entry]] = [[]]
    size = 0
    for entry in entries:
        nbytes = _nbytes(entry)
        if shards[-1] and size + nbytes > max_shard_size:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += nbytes
    return shards


def _nbytes(entry: _Entry) -> int:
    return entry.stored.nbytes


def _plain_value(value: Any) -> Any:
    """JSON-ready: arrays that lie in the file as lists."""
    return value if isinstance(value, str | int | float | bool | dict) else list(value)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")
