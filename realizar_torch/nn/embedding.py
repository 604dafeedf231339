"""An embedding table that stays packed; only the rows that are looked up are decoded."""

from collections.abc import Callable
from typing import Self

import torch
from torch import nn

from realizar_torch import ops
from realizar_torch.errors import FormatError
from realizar_torch.nn import packed
from realizar_torch.nn.layout import PackedModule, stored_by


class QuantizedEmbedding(PackedModule):
    """``ids`` → rows of the table, used as ``nn.Embedding``.

    ``weight``: ``uint8 [num_embeddings, row_bytes]``, frozen bytes of ``fmt`` blocks; it starts as zeros
    and is meant to be loaded. ``dtype`` is the output's (None: ``torch.get_default_dtype()``); ``.to(dtype)``
    and ``.half()`` change it, as they change a dense table's. ``padding_idx`` (negative: from the
    end) is kept for compatibility: a frozen table has no gradient to mask.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        fmt: str = "Q8_0",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        weight = packed.zero_blocks(num_embeddings, embedding_dim, fmt, device)
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise FormatError(f"padding_idx {padding_idx} is outside the table of {num_embeddings} rows")
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.fmt = fmt
        self.dtype = dtype or torch.get_default_dtype()
        self.weight = weight

    @classmethod
    def from_embedding(cls, embedding: nn.Embedding, fmt: str) -> Self:
        """Encode an ``nn.Embedding``, as ``rt.quantize`` does; one with ``max_norm`` is a FormatError."""
        if embedding.max_norm is not None:
            raise FormatError(
                f"the embedding has max_norm={embedding.max_norm}, which rescales rows as they are read; "
                "packed rows are frozen: rescale the table first and set max_norm to None"
            )
        blocks = ops.quantize(embedding.weight, fmt)
        dtype, padding_idx = embedding.weight.dtype, embedding.padding_idx
        module = cls.from_blocks(blocks, embedding.embedding_dim, fmt, padding_idx, dtype=dtype)
        return module.train(embedding.training)

    @classmethod
    def from_blocks(
        cls,
        blocks: torch.Tensor,
        embedding_dim: int,
        fmt: str,
        padding_idx: int | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """Wrap packed rows ``uint8 [num_embeddings, row_bytes]`` without copying them."""
        weight = packed.wrap_blocks(blocks, embedding_dim, fmt)
        module = cls(len(blocks), embedding_dim, padding_idx, fmt=fmt, dtype=dtype, device="meta")
        module.weight = weight
        return module

    @property
    def columns(self) -> int:
        """``embedding_dim``."""
        return self.embedding_dim

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """``ids`` int64 or int32, any shape → ``[*ids.shape, embedding_dim]``; others are a FormatError."""
        return ops.embedding(
            ids, stored_by(self), self.fmt, self.embedding_dim, dtype=self.dtype, layout=self.layout
        )

    own_forward = forward

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The decoded table ``[num_embeddings, embedding_dim]``."""
        return ops.dequantize(self.stored, self.fmt, self.embedding_dim, dtype=dtype, layout=self.layout)

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        sizes = f"{self.num_embeddings}, {self.embedding_dim}{padding}"
        return f"{sizes}, dtype={self.dtype}, {super().extra_repr()}"

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        # .to(dtype) and .half() reach float tensors only; an empty one tells what they would do to the output
        self.dtype = fn(torch.zeros(0, dtype=self.dtype, device="cpu")).dtype
        return super()._apply(fn, recurse)


class ScaledEmbedding(QuantizedEmbedding):
    """Rows times a number, as Gemma's: transformers rounds it to the dtype of the table, here of the rows."""

    scale: float = 1.0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """``ids``, any shape → ``[*ids.shape, embedding_dim]``."""
        rows = super().forward(ids)
        return rows * torch.full((), self.scale, dtype=rows.dtype, device=rows.device)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, scale={self.scale}"
