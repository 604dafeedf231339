"""Workspace: the scratch memory of one decode step, allocated once and only ever grown."""

from dataclasses import dataclass

import torch
from torch import Tensor

from realizar_torch.errors import FormatError
from realizar_torch.models.config import ModelConfig

MAX_BATCH = 32
# Widths are padded to the largest activation block, so that kernels may work on whole blocks.
_WIDTH_MULTIPLE = 256


@dataclass(frozen=True)
class WorkspaceStats:
    """capacity: sequences the buffers hold. nbytes: memory held. reallocations: times the buffers moved."""

    capacity: int
    nbytes: int
    reallocations: int


class Workspace:
    """fp32 buffers for up to ``capacity`` sequences: one row each, widths padded to 256.

    ``hidden`` [B, max(hidden, q_dim, intermediate)] receives projections back to the residual width,
    ``qkv`` [B, q_dim + 2·kv_dim] the attention inputs, ``wide`` (as wide as hidden) attention and MLP
    activations, ``logits`` [B, vocab_size] the result of a step. Pointers stay valid until ``ensure``
    returns True or ``clear`` is called.
    """

    hidden: Tensor
    qkv: Tensor
    wide: Tensor
    logits: Tensor

    def __init__(self, config: ModelConfig, *, device: torch.device | str | None = None):
        self._config, self._device = config, torch.device("cpu" if device is None else device)
        self._capacity = self._reallocations = 0

    @classmethod
    def for_model(
        cls, config: ModelConfig, batch_size: int = 1, *, device: torch.device | str | None = None
    ) -> "Workspace":
        """A workspace with room for ``batch_size`` sequences (1 to 32)."""
        workspace = cls(config, device=device)
        workspace.ensure(batch_size)
        return workspace

    def ensure(self, batch_size: int) -> bool:
        """Makes room for ``batch_size`` sequences. True: the buffers moved, every kept pointer is stale."""
        if not 1 <= batch_size <= MAX_BATCH:
            raise FormatError(f"batch size {batch_size} is outside 1 to {MAX_BATCH}")
        if batch_size <= self._capacity:
            return False
        config = self._config
        width = padded_width(max(config.hidden_size, config.q_dim, config.intermediate_size))
        self.hidden = self._buffer(batch_size, width)
        self.wide = self._buffer(batch_size, width)
        self.qkv = self._buffer(batch_size, padded_width(config.q_dim + 2 * config.kv_dim))
        self.logits = self._buffer(batch_size, config.vocab_size)
        self._capacity = batch_size
        self._reallocations += 1
        return True

    def clear(self) -> None:
        """Frees the buffers; the next ``ensure`` allocates them anew."""
        if self._capacity:
            del self.hidden, self.qkv, self.wide, self.logits
        self._capacity = 0

    @property
    def stats(self) -> WorkspaceStats:
        buffers = (self.hidden, self.qkv, self.wide, self.logits) if self._capacity else ()
        return WorkspaceStats(self._capacity, sum(b.nbytes for b in buffers), self._reallocations)

    def _buffer(self, rows: int, width: int) -> Tensor:
        return torch.zeros(rows, width, dtype=torch.float32, device=self._device)


def padded_width(width: int) -> int:
    return -(-width // _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE
