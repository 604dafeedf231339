"""A generation request: every argument of ``generate`` checked before anything is computed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from realizar_torch.caller import warn_caller
from realizar_torch.errors import BackendUnavailableError, CacheFullError, FormatError
from realizar_torch.generation.arguments import (
    check_model,
    check_tokenizer,
    check_values,
    integer,
    plain,
)
from realizar_torch.generation.prefix import PrefixCache
from realizar_torch.generation.sampling import SamplingParams
from realizar_torch.generation.stopping import StopStrings
from realizar_torch.generation.workspace import MAX_BATCH
from realizar_torch.models.transformer import check_loaded

# A stronger one makes infinities of logits.
_STRONGEST_PENALTY = 1e6


@dataclass(frozen=True)
class Request:
    """What the loops run. input_ids: int64 [B, T] on the model's device. attention_mask: bool [B, T], False
    on the padding at the left of short rows, or None where no row is padded."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor | None
    max_new_tokens: int
    sampling: SamplingParams
    stop_ids: tuple[int, ...]
    pad_token_id: int
    stop_strings: StopStrings
    tokenizer: Any
    generator: torch.Generator | None
    prefix_cache: PrefixCache | None = None
    cuda_graph: bool | str = "auto"

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of all rows, padding not counted."""
        mask = self.attention_mask
        return self.input_ids.numel() if mask is None else int(mask.sum())


def make_request(
    model: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    max_new_tokens: int,
    do_sample: bool = False,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    stop_strings: str | Sequence[str] | None = None,
    tokenizer: Any = None,
    generator: torch.Generator | None = None,
    prefix_cache: PrefixCache | None = None,
    cuda_graph: bool | str = "auto",
    max_seq_len: int | None = None,
) -> Request:
    """Checks the arguments of ``generate`` (described there) against the model. max_seq_len: positions of the
    cache; None: the model's.

    Raises FormatError for a value out of range, CacheFullError when prompt and new tokens exceed the KV
    cache, and BackendUnavailableError for ``cuda_graph=True`` where no graph can be captured.
    """
    check_model(model)
    chosen = (do_sample, temperature, top_k, top_p, min_p, repetition_penalty)
    sampling = SamplingParams(*map(plain, chosen))
    if not 1 / _STRONGEST_PENALTY <= repetition_penalty <= _STRONGEST_PENALTY:
        raise FormatError(
            f"repetition_penalty is {repetition_penalty!r}; expected {1 / _STRONGEST_PENALTY:g} to "
            f"{_STRONGEST_PENALTY:g} (1 switches it off)"
        )
    if not do_sample and (temperature not in (0, 1) or top_k or top_p != 1 or min_p):
        warn_caller("temperature, top_k, top_p and min_p have no effect without do_sample=True")
    check_cuda_graph(cuda_graph, model.device)

    check_loaded(torch.device(model.device))
    vocab_size = model.config.vocab_size
    input_ids = _checked_ids(input_ids, vocab_size, model.device)
    rows, prompt_length = input_ids.shape
    if rows > MAX_BATCH:
        raise FormatError(f"input_ids hold {rows} sequences; expected at most {MAX_BATCH} at once")
    max_new_tokens = integer(max_new_tokens, "max_new_tokens")
    if max_new_tokens < 0:
        raise FormatError(f"max_new_tokens is {max_new_tokens}; expected 0 or more")
    positions = model.max_seq_len if max_seq_len is None else max_seq_len
    if prompt_length + max_new_tokens > positions:
        raise CacheFullError(
            f"prompt of {prompt_length} + {max_new_tokens} new tokens need {prompt_length + max_new_tokens} "
            f"positions, but the KV cache has {positions}; shorten the prompt, lower max_new_tokens "
            f"or load with a larger max_seq_len (the model's own context is {model.config.context_length})"
        )

    stop_ids = _checked_stop_ids(eos_token_id, model.eos_token_ids, vocab_size)
    pad = _choose_pad(pad_token_id, model, stop_ids, vocab_size)
    if attention_mask is not None:
        attention_mask = _checked_mask(attention_mask, input_ids)
    elif rows > 1:
        attention_mask = _mask_of_leading_pads(input_ids, model.pad_token_id, model.eos_token_ids)

    if stop_strings is not None and not isinstance(stop_strings, Sequence):
        raise FormatError(f"stop_strings is {stop_strings!r}; expected a string or a list of strings")
    strings = (stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings or ())
    if any(not isinstance(stop, str) or not stop for stop in strings):
        raise FormatError(f"stop_strings is {stop_strings!r}; expected non-empty strings")
    if strings and tokenizer is None:
        raise FormatError("stop_strings are searched in text: pass tokenizer= as well")
    if tokenizer is not None:
        check_tokenizer(tokenizer)
    if generator is not None and not isinstance(generator, torch.Generator):
        raise FormatError(f"generator is {generator!r}; expected a torch.Generator")
    if generator is not None and generator.device.type != torch.device(model.device).type:
        raise FormatError(
            f"generator is on {generator.device}, the model on {model.device}; "
            f"make it with torch.Generator({str(model.device)!r})"
        )
    if prefix_cache is not None:
        _check_prefix_cache(prefix_cache, model, rows, attention_mask)
    return Request(
        input_ids,
        attention_mask,
        max_new_tokens,
        sampling,
        stop_ids,
        pad,
        StopStrings.of(strings, tokenizer),
        tokenizer,
        generator,
        prefix_cache,
        cuda_graph,
    )


def check_cuda_graph(cuda_graph: bool | str, device: torch.device | str) -> None:
    """FormatError for what is no choice, BackendUnavailableError where True cannot be had."""
    if cuda_graph not in (True, False, "auto"):
        raise FormatError(f"cuda_graph is {cuda_graph!r}; expected True, False or 'auto'")
    if cuda_graph is True and torch.device(device).type != "cuda":
        raise BackendUnavailableError(f"cuda_graph=True: no graph runs on {device}; use 'auto' or False")


def _checked_ids(input_ids: torch.Tensor, vocab_size: int, device: torch.device) -> torch.Tensor:
    if not isinstance(input_ids, torch.Tensor):
        raise FormatError(
            f"input_ids is a {type(input_ids).__name__}; expected an integer tensor [batch, length], "
            "for example torch.tensor([tokenizer.encode(text)])"
        )
    check_values(input_ids, "input_ids")
    if input_ids.dtype not in (torch.int64, torch.int32, torch.int16, torch.uint8):
        raise FormatError(f"input_ids has dtype {input_ids.dtype}; expected token ids as int64 or int32")
    if input_ids.dim() != 2 or 0 in input_ids.shape:
        raise FormatError(
            f"input_ids has shape {list(input_ids.shape)}; expected [batch, length] with at least one row "
            "and one token (input_ids[None] makes a batch of one prompt)"
        )
    lowest, highest = (int(bound) for bound in input_ids.aminmax())
    if lowest < 0 or highest >= vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise FormatError(f"input_ids holds token {wrong}; the model's vocabulary is 0 to {vocab_size - 1}")
    return input_ids.to(device=device, dtype=torch.int64)


def _checked_mask(attention_mask: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor | None:
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.shape != input_ids.shape:
        found = list(attention_mask.shape) if isinstance(attention_mask, torch.Tensor) else attention_mask
        raise FormatError(
            f"attention_mask is {found}; expected a tensor of the ids' shape {list(input_ids.shape)}"
        )
    check_values(attention_mask, "attention_mask")
    mask = attention_mask.to(input_ids.device) != 0
    if not bool(((attention_mask == 0) | (attention_mask == 1)).all()):
        raise FormatError("attention_mask holds values other than 0 and 1")
    if not bool(mask[:, -1].all()):
        row = int((~mask[:, -1]).nonzero()[0, 0])
        raise FormatError(
            f"row {row} of attention_mask ends with padding; pad at the left (padding_side='left'), "
            "so that every prompt ends where its answer begins"
        )
    gap = mask[:, :-1] & ~mask[:, 1:]
    if bool(gap.any()):
        row = int(gap.nonzero()[0, 0])
        raise FormatError(f"row {row} of attention_mask has a hole; expected zeros, then ones")
    return None if bool(mask.all()) else mask


def _check_prefix_cache(cache: PrefixCache, model: Any, rows: int, mask: torch.Tensor | None) -> None:
    if not isinstance(cache, PrefixCache):
        raise FormatError(f"prefix_cache is a {type(cache).__name__}; expected a PrefixCache")
    if cache.model is not model:
        raise FormatError("the prefix_cache belongs to another model; make one with PrefixCache(model)")
    if rows > 1 or mask is not None:
        raise FormatError(
            f"a prefix_cache holds one sequence without padding; found {rows} "
            f"sequences {'with' if mask is not None else 'without'} padding"
        )


def _checked_stop_ids(
    eos_token_id: int | Sequence[int] | None, default: tuple[int, ...], vocab_size: int
) -> tuple[int, ...]:
    if eos_token_id is None:
        return default
    if isinstance(eos_token_id, torch.Tensor):
        eos_token_id = eos_token_id.flatten().tolist()
    if not isinstance(eos_token_id, Sequence) and not hasattr(eos_token_id, "__index__"):
        raise FormatError(f"eos_token_id is {eos_token_id!r}; expected an id, a list of ids or None")
    given = eos_token_id if isinstance(eos_token_id, Sequence) else (eos_token_id,)
    stop_ids = tuple(integer(stop_id, "eos_token_id") for stop_id in given)
    for stop_id in stop_ids:
        _check_id(stop_id, "eos_token_id", vocab_size)
    return stop_ids


def _check_id(token_id: int, name: str, vocab_size: int) -> None:
    if not 0 <= token_id < vocab_size:
        raise FormatError(f"{name} is {token_id}; the model's vocabulary is 0 to {vocab_size - 1}")


def _choose_pad(pad_token_id: int | None, model: Any, stop_ids: tuple[int, ...], vocab_size: int) -> int:
    """The id that fills rows which end early: the caller's, the file's, or else a stop id."""
    for candidate in (pad_token_id, model.pad_token_id, *stop_ids, *model.eos_token_ids):
        if candidate is not None:
            candidate = integer(candidate, "pad_token_id")
            _check_id(candidate, "pad_token_id", vocab_size)
            return candidate
    return 0


def _mask_of_leading_pads(
    input_ids: torch.Tensor, pad_token_id: int | None, eos_token_ids: tuple[int, ...]
) -> torch.Tensor | None:
    """The mask a caller of a padded batch forgot. A pad id that is also a stop id may be real text: then
    only warn."""
    if pad_token_id is None:
        return None
    text = (input_ids != pad_token_id).cummax(-1).values
    if bool(text.all()):
        return None
    if pad_token_id in eos_token_ids:
        warn_caller(
            f"rows begin with token {pad_token_id}, which is both padding and a stop token, and without an "
            "attention_mask it is read as text"
        )
        return None
    return _checked_mask(text, input_ids)
