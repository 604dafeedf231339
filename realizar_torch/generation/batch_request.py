"""One request of a batch: what was asked for, what has come of it so far, and why it ended."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch

from realizar_torch.errors import FormatError, RealizarError
from realizar_torch.generation.batch_rows import Text
from realizar_torch.generation.options import Options, check_keywords
from realizar_torch.generation.request import make_request
from realizar_torch.generation.sampling import new_seeds
from realizar_torch.generation.stopping import RowStop
from realizar_torch.generation.text import encode_prompt, end_with_turn

# what rows of a batch cannot have each for itself
_SHARED = {
    "prefix_cache": "holds one sequence: use model.generate with it",
    "cuda_graph": "is for the whole batch: give it to BatchedGenerator",
}


@dataclass(frozen=True)
class Completion:
    """What a request has come to. id: what ``add`` returned. token_ids: the new ids, a stop id included.
    text: theirs, without what stopped it; None without a tokenizer. reason: "eos", "stop_string", "length",
    "cancelled" or "error"; error: what went wrong, or None."""

    id: int
    prompt_tokens: int
    token_ids: tuple[int, ...]
    text: str | None
    reason: str
    error: RealizarError | None = None


class BatchRequest:
    """A checked request and its tokens so far. placed: its row's cache holds all of them but the last."""

    def __init__(
        self, number: int, model: Any, prompt: Any, max_seq_len: int,
        tokenizer: Any, options: Options,
    ):  # fmt: skip
        check_keywords("add", options)
        for name, reason in _SHARED.items():
            if name in options:
                raise FormatError(f"{name} {reason}")
        self._preceding: Sequence[int] = ()
        if _is_text(prompt):
            if tokenizer is None:
                raise FormatError(f"the prompt is {prompt!r}: pass its tokenizer= as well, or ids")
            ids = _ids(encode_prompt(tokenizer, prompt))
            # an answer to messages begins a text of its own
            if isinstance(prompt, str):
                self._preceding = ids[0].tolist()
            else:
                end_with_turn(model, tokenizer, options)
        else:
            ids = _ids(prompt)
        self.id, self.placed, self.cancelled = number, False, False
        self.error: RealizarError | None = None
        self._request = make_request(model, ids, tokenizer=tokenizer, max_seq_len=max_seq_len, **options)
        self._prompt: list[int] = ids[0].tolist()
        self._tokens: list[int] = []
        self._seed = 0
        if not self._request.sampling.greedy:
            generator = self._request.generator
            device = torch.device("cpu") if generator is None else generator.device
            self._seed = int(new_seeds(1, generator, device))
        self.replay()

    @property
    def ended(self) -> bool:
        return self._stop.reason is not None or self.error is not None or self.cancelled

    @property
    def next_text(self) -> Text:
        """What a row needs to go on with this request."""
        ids = [*self._prompt, *self._tokens]
        cached = len(ids) - 1 if self.placed else 0
        return Text(ids, len(self._tokens), cached, self._request.sampling, self._seed)

    @property
    def completion(self) -> Completion:
        reason = "error" if self.error else "cancelled" if self.cancelled else self._stop.reason
        assert reason is not None
        text = None if self._request.tokenizer is None else self._text
        return Completion(self.id, len(self._prompt), tuple(self._tokens), text, reason, self.error)

    def push(self, token: int) -> None:
        """Takes the next token; -1 ends the request with an error."""
        if token < 0:
            self.error = RealizarError(
                f"the logits of request {self.id} are NaN or infinite at step {len(self._tokens)} (the first "
                "is 0), so no token can be chosen; the file may be damaged, or a value exceed its dtype"
            )
            return
        self._tokens.append(token)
        self._follow(token, len(self._tokens))

    def replay(self) -> None:
        """Makes stop and text anew from the tokens, of which the last may have been half counted."""
        request, detokenizer = self._request, None
        if request.tokenizer is not None:
            detokenizer = request.tokenizer.detokenizer()
            for token in self._preceding:
                detokenizer.push(token)
        self._stop = RowStop(request.stop_ids, request.stop_strings, detokenizer)
        self._text = ""
        for count, token in enumerate(self._tokens, 1):
            self._follow(token, count)
        if request.max_new_tokens == 0:
            self._stop.end("length")

    def _follow(self, token: int, count: int) -> None:
        self._text += self._stop.push(token)
        if self._stop.reason is None and count == self._request.max_new_tokens:
            self._text += self._stop.end("length")


def _is_text(prompt: Any) -> bool:
    messages = isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], Mapping)
    return isinstance(prompt, str) or messages


def _ids(prompt: Any) -> torch.Tensor:
    """The prompt's ids as a tensor [1, T]; make_request checks the rest."""
    ids: torch.Tensor | None = None
    try:
        if isinstance(prompt, torch.Tensor):
            ids = prompt.cpu()
        # numbers for Python, but not meant as ids one after the other
        elif not isinstance(prompt, bytes | Mapping | Set):
            ids = torch.tensor(list(prompt), device="cpu")
    except (TypeError, ValueError, RuntimeError):
        # said below
        pass
    if ids is None or ids.dim() != 1 or len(ids) == 0:
        raise FormatError(f"the prompt is {prompt!r}; expected ids [T], at least one, a str or messages")
    return ids[None]
