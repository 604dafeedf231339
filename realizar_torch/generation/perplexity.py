"""Perplexity of a text, chunk by chunk, as llama.cpp's llama-perplexity defines it."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from realizar_torch.errors import CacheFullError, FormatError

# The logits of 256 positions of a 262k vocabulary are 270 MB already; the losses are taken in slices of them.
_SLICE = 64


def chunk_losses(
    model: Any,
    ids: Sequence[int],
    *,
    context: int = 512,
    chunks: int | None = None,
    bos_token_id: int | None = None,
) -> Iterator[float]:
    """Sum of the negative log-likelihoods (nats) of the scored tokens of each chunk, as the chunks are run.

    ids: the tokens of the whole text. Chunk i is ``ids[i*context : (i+1)*context]`` with its first token
    replaced by BOS (if not None); the tokens of its second half are scored except the half's first,
    ``scored_tokens(context)`` of them, each given all before it in the chunk. A rest shorter than
    ``context`` is left out.

    Raises FormatError for fewer than one chunk or a context below 4, CacheFullError for one beyond the
    model's.
    """
    if context < 4:
        raise FormatError(f"context is {context}; expected at least 4 tokens")
    if context > model.config.context_length:
        raise CacheFullError(
            f"context is {context}, but the model was made for {model.config.context_length} positions"
        )
    available = len(ids) // context
    if available < (chunks or 1):
        found = f"{available} chunks of {context}"
        raise FormatError(f"the text has {len(ids)} tokens, {found}; expected at least {chunks or 1}")
    return _losses(model, ids, context, chunks or available, bos_token_id)


def scored_tokens(context: int) -> int:
    """How many tokens of a chunk count."""
    return context - context // 2 - 1


def _losses(
    model: Any, ids: Sequence[int], context: int, chunks: int, bos_token_id: int | None
) -> Iterator[float]:
    scored = scored_tokens(context)
    for chunk in range(chunks):
        tokens = torch.tensor([ids[chunk * context : (chunk + 1) * context]], device=model.device)
        if bos_token_id is not None:
            tokens[0, 0] = bos_token_id
        with torch.inference_mode():
            logits = model(tokens, logits_to_keep=scored + 1).logits[0, :-1]
            targets = tokens[0, -scored:]
            loss = sum(
                float(torch.nn.functional.cross_entropy(part, target, reduction="sum").double())
                for part, target in zip(logits.split(_SLICE), targets.split(_SLICE), strict=True)
            )
        yield loss
