"""GGUF files of the first mixtures of experts: a tensor for each expert, presented as one of all of them.

llama.cpp wrote ``blk.N.ffn_up.E.weight`` until April 2024, and since then ``blk.N.ffn_up_exps.weight``.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from realizar_torch.checkpoint.gguf import TensorInfo
from realizar_torch.checkpoint.gguf_errors import damaged, shown, shown_path
from realizar_torch.checkpoint.source import ModelSource, SourceView
from realizar_torch.errors import MissingTensorsError

_NUMBERED = re.compile(r"(?P<stem>blk\.\d+\.ffn_(?:gate|up|down))\.(?P<number>\d+)\.weight")


def with_stacked_experts(source: ModelSource) -> ModelSource:
    """The source itself, or a view of one that has a tensor for each expert."""
    return StackedExperts(source) if any(map(_NUMBERED.fullmatch, source.tensors)) else source


class StackedExperts(SourceView):
    """The matrices of all experts in one tensor [experts, rows, columns], copied together when it is read.

    MissingTensorsError where a number is left out, CheckpointError where formats or shapes differ.
    """

    def __init__(self, source: ModelSource) -> None:
        super().__init__(source)
        numbered: dict[str, dict[int, TensorInfo]] = {}
        tensors = {}
        for name, info in source.tensors.items():
            match = _NUMBERED.fullmatch(name)
            if match is None:
                tensors[name] = info
            else:
                numbered.setdefault(f"{match['stem']}_exps.weight", {})[int(match["number"])] = info
        self._parts = {name: self._in_order(name, parts) for name, parts in numbered.items()}
        tensors |= {name: self._stacked(name, parts) for name, parts in self._parts.items()}
        self._tensors: Mapping[str, TensorInfo] = MappingProxyType(tensors)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    def read(self, name: str) -> Tensor:
        """As GGUFFile.read."""
        parts = self._parts.get(name)
        if parts is None:
            return super().read(name)
        return torch.stack([super(StackedExperts, self).read(part.name) for part in parts])

    def release(self, name: str) -> None:
        for part in self._parts.get(name, (self._tensors[name],)):
            super().release(part.name)

    def _in_order(self, name: str, parts: Mapping[int, TensorInfo]) -> tuple[TensorInfo, ...]:
        if missing := sorted(set(range(max(parts) + 1)) - parts.keys()):
            lost = name.replace("_exps.", f".{missing[0]}.")
            raise MissingTensorsError(f"{shown_path(self.path)}: missing {lost} of {max(parts) + 1} experts")
        return tuple(parts[number] for number in range(len(parts)))

    def _stacked(self, name: str, parts: tuple[TensorInfo, ...]) -> TensorInfo:
        first = parts[0]
        for part in parts:
            if (part.fmt, part.shape) != (first.fmt, first.shape):
                found = f"{part.fmt.name} {list(part.shape)}"
                expected = f"{first.fmt.name} {list(first.shape)}, as {shown(first.name)}"
                raise damaged(shown_path(self.path), f"tensor {shown(part.name)}", found, expected)
        shape, nbytes = (len(parts), *first.shape), sum(part.nbytes for part in parts)
        return TensorInfo(name, first.fmt, shape, first.offset, nbytes, first.shard)
