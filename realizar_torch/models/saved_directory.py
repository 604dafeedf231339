"""A directory that rt.save wrote, presented as a GGUF file; all is compared before a weight is read."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from realizar_torch.checkpoint.gguf import TensorInfo
from realizar_torch.checkpoint.gguf_errors import damaged, shown, shown_path
from realizar_torch.checkpoint.json_files import read_json
from realizar_torch.checkpoint.mapped import stored_bytes
from realizar_torch.checkpoint.safetensors_files import SafetensorsFiles, StoredTensor
from realizar_torch.errors import CheckpointError, MissingTensorsError
from realizar_torch.formats import F32, FORMATS, BlockFormat
from realizar_torch.models.saved_format import (
    CONFIG_FILE,
    FORMAT,
    FORMATS_KEY,
    TOKENIZER_FILE,
    VERSION,
    gguf_name,
)

_MAX_NAMES_SHOWN = 8


class SavedDirectory:
    """``realizar.json`` and what it describes, with the attributes of GGUFFile.

    Raises before any weight is read: CheckpointError for an unknown version and for files that are damaged or
    contradict each other, IncompleteShardsError, MissingTensorsError for tensors that are missing or unasked.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory
        self._source = shown_path(directory / CONFIG_FILE)
        config = read_json(directory / CONFIG_FILE)
        self._check_version(config)
        entries: dict[str, dict[str, Any]] = self._section(config, "tensors")
        self._constants = {
            name: self._constant(name, values) for name, values in self._section(config, "constants").items()
        }
        tokenizer = read_json(directory / TOKENIZER_FILE)
        self.metadata: Mapping[str, Any] = MappingProxyType(self._section(config, "metadata") | tokenizer)
        self._files = SafetensorsFiles(directory)
        self.shards = self._files.paths
        self._check_names(entries)
        self._names: dict[str, str] = {}
        tensors = {}
        for stored_name, entry in entries.items():
            info = self._describe(self._files.tensors[stored_name], entry)
            tensors[info.name], self._names[info.name] = info, stored_name
        for name, values in self._constants.items():
            tensors[name] = TensorInfo(name, F32, tuple(values.shape), 0, values.nbytes, 0)
        self._check_tied(self._section(config, "tied"))
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(tensors)

    @property
    def arch(self) -> str:
        """``general.architecture``."""
        return self.metadata["general.architecture"]

    def read(self, name: str) -> Tensor:
        """As GGUFFile.read."""
        return self._constants[name] if name in self._constants else self._files.read(self._names[name])

    def release(self, name: str) -> None:
        """As GGUFFile.release."""
        if name not in self._constants:
            self._files.release(self._names[name])

    def _check_version(self, config: Mapping[str, Any]) -> None:
        found = config.get("format"), config.get("version")
        if found != (FORMAT, VERSION):
            expected = f"format {FORMAT!r} version {VERSION}"
            advice = "A later version of this package may have written it: update, or save the model again."
            raise damaged(
                self._source, "version", f"format {found[0]!r} version {found[1]!r}", expected, advice
            )

    def _section(self, config: Mapping[str, Any], name: str) -> dict[str, Any]:
        value = config.get(name)
        if not isinstance(value, dict):
            raise self._broken(f"entry {name!r}", f"{value!r:.40}", "an object")
        return value

    def _constant(self, name: str, values: Any) -> Tensor:
        try:
            return torch.tensor(values, dtype=torch.float32)
        except (TypeError, ValueError, RuntimeError):
            raise self._broken(f"constant {shown(name)}", f"{values!r:.40}", "a list of numbers") from None

    def _check_names(self, entries: Mapping[str, Any]) -> None:
        stored = self._files.tensors.keys()
        problems = [f"missing {shown(name)}" for name in sorted(entries.keys() - stored)]
        problems += [f"unexpected {shown(name)}" for name in sorted(stored - entries.keys())]
        problems += [f"unknown {shown(name)}" for name in sorted(entries) if gguf_name(name) is None]
        if problems:
            more = (
                f"; and {len(problems) - _MAX_NAMES_SHOWN} more" if len(problems) > _MAX_NAMES_SHOWN else ""
            )
            raise MissingTensorsError(
                f"{self._source} does not fit the safetensors beside it: "
                f"{'; '.join(problems[:_MAX_NAMES_SHOWN])}{more}. Save the model again, or fetch all files."
            )

    def _describe(self, stored: StoredTensor, entry: Any) -> TensorInfo:
        fmt, shape = self._declared(stored.name, entry)
        told = self._told_format(stored)
        expected: tuple[str, tuple[int, ...]] = (fmt.name, shape)
        if fmt.packed:
            expected = ("U8", (*shape[:-1], fmt.row_bytes(shape[-1])))
        if (stored.dtype, stored.shape) != expected or told != fmt.name:
            raise damaged(
                shown_path(self.shards[stored.shard]),
                f"tensor {shown(stored.name)}",
                f"{stored.dtype} {list(stored.shape)}, format {told!r}",
                f"{expected[0]} {list(expected[1])}, format {fmt.name!r}, as {CONFIG_FILE} says",
            )
        name = gguf_name(stored.name)
        assert name is not None
        return TensorInfo(name, fmt, shape, stored.offset, stored_bytes(fmt, shape), stored.shard)

    def _declared(self, name: str, entry: Any) -> tuple[BlockFormat, tuple[int, ...]]:
        fmt = entry.get("fmt") if isinstance(entry, dict) else None
        shape = entry.get("shape") if isinstance(entry, dict) else None
        if not isinstance(fmt, str) or fmt not in FORMATS:
            raise self._broken(f"format of {shown(name)}", f"{fmt!r:.40}", f"one of {', '.join(FORMATS)}")
        if not isinstance(shape, list) or not shape or not all(type(n) is int and n > 0 for n in shape):
            raise self._broken(f"shape of {shown(name)}", f"{shape!r:.40}", "positive numbers")
        return FORMATS[fmt], tuple(shape)

    def _told_format(self, stored: StoredTensor) -> Any:
        try:
            return json.loads(self._files.metadata[stored.shard][FORMATS_KEY])[stored.name]
        except (KeyError, ValueError, TypeError, RecursionError):
            return None

    def _check_tied(self, tied: Mapping[str, Any]) -> None:
        if tied not in ({}, {"lm_head.weight": "embed_tokens.weight"}):
            raise self._broken("entry 'tied'", f"{tied!r:.80}", "the head tied to the embedding, or nothing")
        if bool(tied) == ("output.weight" in self._names):
            found = "a head of its own" if tied else "no output head"
            raise self._broken("entry 'tied'", f"{tied!r:.80} and {found}", "one of the two")

    def _broken(self, where: str, found: str, expected: str) -> CheckpointError:
        return damaged(self._source, where, found, expected)

    def __repr__(self) -> str:
        return f"SavedDirectory({str(self.path)!r}, arch={self.arch!r}, tensors={len(self.tensors)})"
