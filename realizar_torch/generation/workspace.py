"""Workspace: the scratch memory of one decode step, allocated once and only ever grown."""

from dataclasses import dataclass

import torch
from torch import Tensor

from realizar_torch.errors import FormatError
from realizar_torch.models.config import ModelConfig
from realizar_torch.reference import ACTIVATION_BLOCK

MAX_BATCH = 32
# Widths are padded to the largest activation block, so that kernels may work on whole blocks.
_WIDTH_MULTIPLE = 256
_GROUP = 8
_BUFFERS = ("hidden", "narrow", "wide", "qkv", "logits", "quants", "scales", "sums")


@dataclass(frozen=True)
class WorkspaceStats:
    """capacity: sequences the buffers hold. nbytes: memory held. reallocations: times the buffers moved."""

    capacity: int
    nbytes: int
    reallocations: int


class Workspace:
    """fp32 buffers for up to ``capacity`` sequences: one row each, widths padded to 256.

    ``hidden``, ``narrow`` and ``wide`` [B, max(hidden, q_dim, intermediate)] hold the residual stream and the
    activations on their way, ``qkv`` [B, q_dim + 2·kv_dim] the attention inputs, ``logits`` [B, vocab_size]
    the result of a step; ``quants`` int8 [B, 2·width], ``scales`` [B, width/32] and ``sums`` [B, width/16]
    activations in int8 or grouped fp16, B in whole groups of eight. Pointers stay valid until ``ensure``
    returns True or ``clear`` is called.
    """

    hidden: Tensor
    narrow: Tensor
    wide: Tensor
    qkv: Tensor
    logits: Tensor
    quants: Tensor
    scales: Tensor
    sums: Tensor

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
        """Makes room for ``batch_size`` sequences. True: the buffers moved, every kept pointer is stale.

        Where there is too little memory, torch's error leaves a workspace without buffers.
        """
        if not 1 <= batch_size <= MAX_BATCH:
            raise FormatError(f"batch size {batch_size} is outside 1 to {MAX_BATCH}")
        if batch_size <= self._capacity:
            return False
        config = self._config
        width = padded_width(max(config.hidden_size, config.q_dim, config.intermediate_size))
        # the old buffers are freed first: two sets need not fit
        self.clear()
        # tensor cores take vectors in whole groups
        rows = -(-batch_size // _GROUP) * _GROUP
        buffers = {name: self._buffer(batch_size, width) for name in ("hidden", "narrow", "wide")} | {
            "quants": self._buffer(rows, 2 * width, torch.int8),
            "scales": self._buffer(rows, width // ACTIVATION_BLOCK),
            "sums": self._buffer(rows, 2 * width // ACTIVATION_BLOCK),
            "qkv": self._buffer(batch_size, padded_width(config.q_dim + 2 * config.kv_dim)),
            "logits": self._buffer(batch_size, config.vocab_size),
        }
        vars(self).update(buffers)
        self._capacity = batch_size
        self._reallocations += 1
        return True

    def clear(self) -> None:
        """Frees the buffers; the next ``ensure`` allocates them anew."""
        if self._capacity:
            for name in _BUFFERS:
                delattr(self, name)
        self._capacity = 0

    @property
    def stats(self) -> WorkspaceStats:
        buffers: list[Tensor] = [getattr(self, name) for name in _BUFFERS] if self._capacity else []
        return WorkspaceStats(self._capacity, sum(b.nbytes for b in buffers), self._reallocations)

    # tensors of inference mode could not be written to outside of it
    @torch.inference_mode(False)
    def _buffer(self, rows: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(rows, width, dtype=dtype, device=self._device)


def padded_width(width: int) -> int:
    return -(-width // _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE
