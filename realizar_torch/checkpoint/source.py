"""What every model source presents, whatever its container: GGUF names, GGUF metadata, tensors by name."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from realizar_torch.checkpoint.gguf import TensorInfo


class ModelSource(Protocol):
    """An open model. GGUFFile is the model of it; its docstrings hold here."""

    @property
    def path(self) -> Path: ...
    @property
    def shards(self) -> tuple[Path, ...]: ...
    @property
    def arch(self) -> str: ...
    @property
    def metadata(self) -> Mapping[str, Any]: ...
    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...
    def read(self, name: str) -> Tensor: ...
    def release(self, name: str) -> None: ...


class SourceView:
    """A source as it is; subclasses present some part of it differently."""

    def __init__(self, source: ModelSource) -> None:
        self._source = source

    @property
    def path(self) -> Path:
        return self._source.path

    @property
    def shards(self) -> tuple[Path, ...]:
        return self._source.shards

    @property
    def arch(self) -> str:
        return self._source.arch

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self._source.metadata

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._source.tensors

    def read(self, name: str) -> Tensor:
        return self._source.read(name)

    def release(self, name: str) -> None:
        self._source.release(name)
