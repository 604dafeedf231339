"""The loop: prefill once, then choose, check for stops, and step; ids out with transformers' semantics."""

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, Unpack

import torch

from realizar_torch.errors import FormatError, RealizarError
from realizar_torch.generation.options import Options, check_keywords
from realizar_torch.generation.request import Request, make_request
from realizar_torch.generation.sampling import new_seeds, sample, uniforms
from realizar_torch.generation.step import decode_step, new_state, prefill
from realizar_torch.generation.step_bytes import decode_bytes
from realizar_torch.generation.stopping import RowStop
from realizar_torch.metrics import GenerationMetrics


class Streamer(Protocol):
    """transformers' streamer protocol: the prompt first, then each step's tokens, then the end."""

    def put(self, value: torch.Tensor) -> None: ...

    def end(self) -> None: ...


class Decoding:
    """One request being decoded: iterate for each step's tokens as a list of B ints (pad in rows that have
    ended).

    released: the text each row has let go in the latest step, where the rows have detokenizers. rows: a
    RowStop per row. metrics: the numbers so far. Iteration ends when every row has ended or
    ``max_new_tokens`` are reached. preceding: ids of the text that the answer continues.
    """

    def __init__(
        self, model: Any, request: Request, *, with_text: bool = False, preceding: Sequence[int] = ()
    ) -> None:
        self._model = model
        self._request = request
        needs_text = with_text or bool(request.stop_strings.texts)
        self.rows = [
            RowStop(
                request.stop_ids,
                request.stop_strings,
                _detokenizer(request.tokenizer, preceding) if needs_text else None,
            )
            for _ in range(request.input_ids.shape[0])
        ]
        self.released = [""] * len(self.rows)
        self._new_tokens = self._reused_tokens = self._steps = 0
        self._accepted = time.perf_counter()
        self._first_token: float | None = None
        self._last_token: float | None = None

    @property
    def metrics(self) -> GenerationMetrics:
        rows, prompt_tokens = len(self.rows), self._request.prompt_tokens
        return GenerationMetrics(
            prompt_tokens,
            self._new_tokens,
            rows,
            self._first_token,
            self._last_token,
            self._reused_tokens,
            decode_bytes(self._model, rows, prompt_tokens, self._steps),
        )

    def __iter__(self) -> Generator[list[int]]:
        model, request = self._model, self._request
        if request.max_new_tokens == 0:
            self._end_at_length()
            return
        with self._state() as state:
            seen = self._tokens_of_prompt()
            # Inference mode is entered per step: a generator that held it would switch it on in its
            # consumer's code.
            with torch.inference_mode():
                new_ids = request.input_ids[:, self._reused_tokens :]
                mask = request.attention_mask
                logits = prefill(model, new_ids, mask, state, cuda_graph=request.cuda_graph)
            run = self._wait_for_each_step if state.decoder is None else self._run_ahead
            yield from run(state, logits, seen)

    @contextmanager
    def _state(self) -> Iterator[Any]:
        """The state of this request, closed at the end; with a prefix cache, one that holds some of it."""
        request = self._request
        batch_size, prompt_length = request.input_ids.shape
        positions = prompt_length + request.max_new_tokens
        if request.prefix_cache is not None:
            with request.prefix_cache.resumed(request.input_ids[0].tolist(), positions) as state:
                self._reused_tokens = state.cache.length
                yield state
            return
        state = new_state(self._model, batch_size, positions)
        try:
            yield state
        finally:
            state.close()

    def _run_ahead(self, state: Any, logits: torch.Tensor, seen: torch.Tensor | None) -> Iterator[list[int]]:
        """Each step is on its way before the tokens of the one before are read; one is wasted at a stop."""
        request, decoder = self._request, state.decoder
        with torch.inference_mode():
            decoder.begin(logits, request.sampling, seen, request.generator, cuda_graph=request.cuda_graph)
        for step in range(request.max_new_tokens):
            last = step + 1 == request.max_new_tokens
            if not last:
                with torch.inference_mode():
                    decoder.issue()
            chosen = self._follow(decoder.read(), step)
            if last:
                self._end_at_length()
            yield chosen
            if all(row.reason for row in self.rows):
                return

    def _wait_for_each_step(
        self, state: Any, logits: torch.Tensor, seen: torch.Tensor | None
    ) -> Iterator[list[int]]:
        model, request = self._model, self._request
        seeds = None
        if not request.sampling.greedy:
            seeds = new_seeds(len(self.rows), request.generator, logits.device)
        for step in range(request.max_new_tokens):
            with torch.inference_mode():
                uniform = None if seeds is None else uniforms(seeds, torch.full_like(seeds, step))
                tokens = sample(logits, request.sampling, seen, uniform)
            chosen = self._follow(tokens.tolist(), step)
            if step + 1 == request.max_new_tokens:
                self._end_at_length()
            yield chosen
            if all(row.reason for row in self.rows):
                return
            with torch.inference_mode():
                if any(row.reason for row in self.rows):
                    tokens = torch.tensor(chosen, device=tokens.device)
                if seen is not None:
                    seen.scatter_(1, tokens.unsqueeze(1), True)
                logits = decode_step(model, tokens, state)

    def _follow(self, tokens: list[int], step: int) -> list[int]:
        """Books a step's tokens; returns them with pad in the rows that had ended before."""
        now = time.perf_counter() - self._accepted
        for index, row in enumerate(self.rows):
            self.released[index] = ""
            if row.reason is not None:
                tokens[index] = self._request.pad_token_id
                continue
            if tokens[index] < 0:
                raise RealizarError(
                    f"the logits of row {index} are NaN or infinite at step {step} (the first is 0), so "
                    "no token can be chosen; the file may be damaged, or a value beyond the dtype's range"
                )
            self.released[index] = row.push(tokens[index])
            self._new_tokens += 1
        if self._request.prefix_cache is not None:
            self._request.prefix_cache.append(tokens[0])
        if step == 0:
            self._first_token = now
        self._last_token, self._steps = now, step
        return tokens

    def _end_at_length(self) -> None:
        for index, row in enumerate(self.rows):
            if row.reason is None:
                self.released[index] += row.end("length")

    def _tokens_of_prompt(self) -> torch.Tensor | None:
        """bool [B, V]: the tokens of each prompt, without its padding; None where nobody asks."""
        request = self._request
        if request.sampling.repetition_penalty == 1:
            return None
        shape = (request.input_ids.shape[0], self._model.config.vocab_size)
        counts = torch.zeros(shape, dtype=torch.uint8, device=request.input_ids.device)
        mask = request.attention_mask
        present = torch.ones_like(request.input_ids) if mask is None else mask
        return counts.scatter_reduce_(1, request.input_ids, present.to(torch.uint8), "amax").bool()


def _detokenizer(tokenizer: Any, preceding: Sequence[int]) -> Any:
    """A detokenizer for text that goes on after ``preceding``: a first word keeps the space before it."""
    detokenizer = tokenizer.detokenizer()
    for token in preceding:
        detokenizer.push(token)
    return detokenizer


def generate_ids(
    model: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    tokenizer: Any = None,
    streamer: Streamer | None = None,
    **options: Unpack[Options],
) -> torch.Tensor:
    """Continues token ids: int64 [B, T + new] on the model's device, prompt included, as transformers'
    ``generate``.

    input_ids: integers [B, T], T at least 1, B from 1 to 32. attention_mask: [B, T] of 0 and 1, zeros only at
    the left. Without one, leading pad tokens of a batch count as padding unless the pad id is also a stop id.
    streamer: gets ``put`` and ``end``. The options, of which only max_new_tokens must be given:

    max_new_tokens: 0 or more; prompt and new tokens together must fit the model's ``max_seq_len``.
    do_sample=False, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0: see
    SamplingParams; the penalty ignores padding.
    eos_token_id=None: an id or several; None: the file's end-of-generation ids; []: never stop. The stop
    token is kept. stop_strings=None: need ``tokenizer``; a row ends with the token that completes one of them
    in its new text, where the text of a special token ("<|im_end|>") also stands for the token, which has
    none. pad_token_id=None: fills rows that end early; None: the file's pad id, or else a stop id.
    generator=None: a torch.Generator on the model's device; None: torch's default one.
    prefix_cache=None: a PrefixCache, which saves computing what prompts have in common.
    cuda_graph="auto": uses a graph where there is one; True insists.

    Raises FormatError for an argument out of range and CacheFullError for too long a request, both before any
    compute; RealizarError, naming the step, when logits are NaN.
    """
    check_keywords("generate", options)
    for method in () if streamer is None else ("put", "end"):
        if not callable(getattr(streamer, method, None)):
            raise FormatError(f"streamer is {streamer!r:.80}; expected an object with put(tokens) and end()")
    request = make_request(model, input_ids, attention_mask, tokenizer=tokenizer, **options)
    columns = []
    try:
        if streamer is not None:
            streamer.put(request.input_ids.cpu())
        for tokens in Decoding(model, request):
            columns.append(tokens)
            if streamer is not None:
                streamer.put(torch.tensor(tokens, device="cpu"))
    finally:
        # A reader of a queue would wait for ever if an error here kept the end from it.
        if streamer is not None:
            streamer.end()
    new = torch.tensor(columns, dtype=torch.int64, device=request.input_ids.device)
    return torch.cat([request.input_ids, new.reshape(-1, request.input_ids.shape[0]).T], dim=1)
