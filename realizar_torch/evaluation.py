"""Perplexity of a text, chunk by chunk, as llama.cpp's llama-perplexity defines it."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from realizar_torch.errors import CacheFullError, FormatError, RealizarError
from realizar_torch.generation.arguments import check_model, check_tokenizer, integer
from realizar_torch.ops.checks import check_callable

# the logits of 256 positions of a 262k vocabulary are 270 MB already: no second tensor of that size
_SLICE = 64


@dataclass(frozen=True)
class Perplexity:
    """losses: negative log-likelihood (nats) of the scored tokens of each chunk, summed. context: tokens of
    a chunk."""

    losses: tuple[float, ...]
    context: int

    @property
    def scored_tokens(self) -> int:
        """Tokens that count, over all chunks: of each the second half but for its first token."""
        return len(self.losses) * _scored(self.context)

    @property
    def value(self) -> float:
        """exp of the mean loss of a scored token; infinite above 709 nats, where no float holds it."""
        try:
            return math.exp(sum(self.losses) / self.scored_tokens)
        except OverflowError:
            return math.inf


def perplexity(
    model: Any,
    tokenizer: Any,
    text: str,
    *,
    context: int = 512,
    chunks: int | None = None,
    progress: Callable[[Perplexity], None] | None = None,
) -> Perplexity:
    """Scores ``text`` in chunks of ``context`` tokens, the first ``chunks`` of them or all; a shorter rest
    is left out.

    The tokens are BOS and the text; the first token of every chunk is replaced by BOS. Scored are the
    tokens at positions context/2 + 1 to the end of a chunk, each given all before it. A tokenizer without
    BOS adds and replaces nothing. progress: called after each chunk with the result so far.

    Raises FormatError for a text shorter than asked for, CacheFullError for a context beyond the model's, and
    RealizarError, naming the chunk, when logits are NaN or infinite.
    """
    check_model(model)
    check_tokenizer(tokenizer)
    check_callable("progress", progress)
    context = integer(context, "context")
    if context < 4:
        raise FormatError(f"context is {context}; expected at least 4 tokens")
    longest = model.config.context_length
    if context > longest:
        raise CacheFullError(f"context is {context}, but the model was made for {longest} positions")
    if chunks is not None and (chunks := integer(chunks, "chunks")) < 1:
        raise FormatError(f"chunks is {chunks}; expected at least 1, or None for all of the text")
    bos = tokenizer.bos_token_id
    ids = [] if bos is None else [bos]
    ids += tokenizer.encode(text, add_special_tokens=False)
    available = len(ids) // context
    if available < (chunks or 1):
        found = f"{available} chunks of {context}"
        raise FormatError(f"the text has {len(ids)} tokens, {found}; expected at least {chunks or 1}")

    result = Perplexity((), context)
    for chunk in range(chunks or available):
        tokens = ids[chunk * context : (chunk + 1) * context]
        if bos is not None:
            tokens[0] = bos
        loss = _loss(model, torch.tensor([tokens], device=model.device), _scored(context))
        if not math.isfinite(loss):
            raise RealizarError(
                f"the loss of chunk {chunk} is {loss} (the first is 0): its logits are NaN or infinite, so "
                "the text has no perplexity; the file may be damaged, or a value beyond the dtype's range"
            )
        result = Perplexity((*result.losses, loss), context)
        if progress is not None:
            progress(result)
    return result


def _scored(context: int) -> int:
    return context - context // 2 - 1


@torch.inference_mode()
def _loss(model: Any, tokens: torch.Tensor, scored: int) -> float:
    """Summed loss of the last ``scored`` tokens of one row [1, T]."""
    logits = model(tokens, logits_to_keep=scored + 1).logits[0, :-1]
    parts = zip(logits.split(_SLICE), tokens[0, -scored:].split(_SLICE), strict=True)
    losses = [torch.nn.functional.cross_entropy(part, targets, reduction="sum") for part, targets in parts]
    return float(torch.stack(losses).double().sum())
