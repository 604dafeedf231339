"""Text in, text out: a prompt or a list of messages, answered at once or piece by piece."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, Unpack

import torch

from realizar_torch.errors import FormatError
from realizar_torch.generation.arguments import check_model, check_tokenizer
from realizar_torch.generation.loop import Decoding
from realizar_torch.generation.options import Options, check_keywords
from realizar_torch.generation.request import make_request
from realizar_torch.generation.spelled_tokens import warn_of_control_tokens
from realizar_torch.metrics import GenerationMetrics

Prompt = str | Sequence[Mapping[str, Any]]


class TextStream:
    """An answer on its way: iterate for its pieces, which joined are the whole answer.

    token_ids: the new ids so far, the stop token included. stop_reason: None while it runs, then "eos",
    "stop_string" or "length". metrics: the numbers so far. ``close`` ends it early.
    """

    def __init__(self, decoding: Decoding) -> None:
        self._decoding = decoding
        self.token_ids: list[int] = []
        self._pieces = _pieces(decoding, self.token_ids)

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        self._pieces.close()

    @property
    def stop_reason(self) -> str | None:
        return self._decoding.rows[0].reason

    @property
    def metrics(self) -> GenerationMetrics:
        return self._decoding.metrics


def _pieces(decoding: Decoding, token_ids: list[int]) -> Generator[str]:
    """Not a method: a loop that is left early ends the generation only if no cycle keeps this alive."""
    # closed here: Python 3.12.3 keeps what a closed generator was reading (python/cpython#118272)
    with closing(iter(decoding)) as steps:
        for tokens in steps:
            token_ids.append(tokens[0])
            if decoding.released[0]:
                yield decoding.released[0]


def encode_prompt(tokenizer: Any, prompt_or_messages: Prompt) -> list[int]:
    """Ids of a text (special tokens as the file says) or of messages through the file's chat template.

    Messages are mappings with "role" and "content". FormatError for anything else, and for a prompt without
    tokens. The text of control tokens is text in the one and gives the tokens in the other, with a warning.
    """
    check_tokenizer(tokenizer)
    if isinstance(prompt_or_messages, str):
        ids = tokenizer.encode(prompt_or_messages)
    elif isinstance(prompt_or_messages, Sequence) and prompt_or_messages:
        if not all(isinstance(message, Mapping) for message in prompt_or_messages):
            raise FormatError(
                "expected one prompt (str) or messages (mappings with role and content); "
                "for several prompts at once use model.generate"
            )
        ids = tokenizer.apply_chat_template(prompt_or_messages, add_generation_prompt=True)
    else:
        raise FormatError(f"the prompt is {prompt_or_messages!r}; expected a str or a list of messages")
    if not ids:
        raise FormatError("the prompt has no tokens; this model's tokenizer adds none of its own")
    warn_of_control_tokens(tokenizer, prompt_or_messages)
    return ids


def end_with_turn(model: Any, tokenizer: Any, options: Options) -> None:
    """The answer to messages ends at the tokenizer's ``turn_end_ids`` too, unless the options say where."""
    if options.get("eos_token_id") is None:
        # a tokenizer of the caller's own need not know them, and any may have ids that the model has not
        ids = (*model.eos_token_ids, *getattr(tokenizer, "turn_end_ids", ()))
        options["eos_token_id"] = [stop_id for stop_id in ids if stop_id < model.config.vocab_size]


def stream(model: Any, tokenizer: Any, prompt_or_messages: Prompt, **options: Unpack[Options]) -> TextStream:
    """Starts an answer; yields its text as it comes, never half a character, without the stop string or
    stop token.

    options: the keywords of ``model.generate`` that Options names; unless eos_token_id is among them, the
    answer to messages ends at the tokenizer's ``turn_end_ids`` as well. Errors in the arguments are raised
    here, not later.
    """
    check_keywords("stream", options)
    check_model(model)
    ids = encode_prompt(tokenizer, prompt_or_messages)
    if not isinstance(prompt_or_messages, str):
        end_with_turn(model, tokenizer, options)
    request = make_request(model, torch.tensor([ids], device="cpu"), tokenizer=tokenizer, **options)
    # an answer to messages begins a text of its own
    preceding = ids if isinstance(prompt_or_messages, str) else ()
    return TextStream(Decoding(model, request, with_text=True, preceding=preceding))


def generate(model: Any, tokenizer: Any, prompt_or_messages: Prompt, **options: Unpack[Options]) -> str:
    """The whole answer of ``stream`` as one string; the prompt is not part of it."""
    check_keywords("generate", options)
    return "".join(stream(model, tokenizer, prompt_or_messages, **options))
