"""BatchedGenerator: many requests through a few rows; a row that has ended takes the next one that waits."""

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar, Unpack

import torch

from realizar_torch.errors import FormatError
from realizar_torch.generation.arguments import check_model, integer
from realizar_torch.generation.batch_request import BatchRequest, Completion
from realizar_torch.generation.batch_rows import Rows, rows_of
from realizar_torch.generation.options import Options
from realizar_torch.generation.request import check_cuda_graph
from realizar_torch.generation.step import new_state
from realizar_torch.generation.text import Prompt
from realizar_torch.generation.workspace import MAX_BATCH

P = ParamSpec("P")
T = TypeVar("T")


def _by_one_thread(
    method: Callable[Concatenate["BatchedGenerator", P], T],
) -> Callable[Concatenate["BatchedGenerator", P], T]:
    """The method, which refuses to run while another thread is in one of these."""

    @functools.wraps(method)
    def alone(self: "BatchedGenerator", *args: P.args, **kwargs: P.kwargs) -> T:
        if not self._in_use.acquire(blocking=False):
            raise FormatError(
                "the BatchedGenerator is in use by another thread; give each thread one of its own, or add "
                "to it and step it under one lock"
            )
        try:
            return method(self, *args, **kwargs)
        finally:
            self._in_use.release()

    return alone


class BatchedGenerator:
    """Generates for any number of requests, up to ``max_batch`` at a time.

        batch = rt.BatchedGenerator(model, max_batch=32)
        for prompt in prompts:
            batch.add(prompt, tokenizer=tokenizer, max_new_tokens=100)
        for completion in batch:
            print(completion.id, completion.text)

    First come, first served: a request is prefilled into the first row that is free, while the others keep
    theirs, and leaves it when it ends. Every row has its own position, stop, sampling parameters and random
    numbers; for one ``max_batch`` and ``max_seq_len`` a request gets the same tokens, bit for bit, whatever
    its row, its neighbours and the order they came in. Logits that are not finite end that request alone,
    with an error.

    max_batch: 1 to 32 rows. max_seq_len: positions of each, prompt and new tokens; None: the model's. The
    keys and values of all of them are allocated here. cuda_graph: as in ``model.generate``.

    An exception out of ``step``, KeyboardInterrupt included, loses nothing: the next ``step`` goes on from
    the tokens that are known. One thread at a time: FormatError for another that comes meanwhile.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_batch: int = 8,
        max_seq_len: int | None = None,
        cuda_graph: bool | str = "auto",
    ) -> None:
        check_model(model)
        max_batch = integer(max_batch, "max_batch")
        if not 1 <= max_batch <= MAX_BATCH:
            raise FormatError(f"max_batch is {max_batch}; expected 1 to {MAX_BATCH}")
        positions = model.max_seq_len if max_seq_len is None else integer(max_seq_len, "max_seq_len")
        longest = model.config.context_length
        if not 1 <= positions <= longest:
            raise FormatError(
                f"max_seq_len is {max_seq_len!r}; the model was made for 1 to {longest} positions"
            )
        check_cuda_graph(cuda_graph, model.device)
        self._model, self._cuda_graph = model, cuda_graph
        self.max_batch, self.max_seq_len = max_batch, positions
        self._state, self._made_for = new_state(model, max_batch, positions, pooled=False), _kind(model)
        self._rows: Rows | None = None
        self._next_id = 0
        self._waiting: deque[BatchRequest] = deque()
        self._seats: list[BatchRequest | None] = [None] * max_batch
        # who sat where in each step that was issued and not read
        self._in_flight: deque[list[BatchRequest | None]] = deque()
        self._ended: deque[BatchRequest] = deque()
        self._consistent = True
        self._in_use = threading.RLock()

    @property
    def pending(self) -> int:
        """Requests that wait or run."""
        return len(self._waiting) + sum(seat is not None for seat in self._seats)

    @_by_one_thread
    def add(
        self,
        prompt: Prompt | Sequence[int] | torch.Tensor,
        *,
        tokenizer: Any = None,
        **options: Unpack[Options],
    ) -> int:
        """Queues a request and returns its id: 0, 1, ….

        prompt: ids [T], or, with a tokenizer, a str or messages. The options are those of ``model.generate``
        but prefix_cache and cuda_graph; max_new_tokens must be given. generator: gives the seed of the
        request, here and now; its tokens depend on no other draw.

        Raises FormatError for an argument out of range and CacheFullError for a request longer than
        ``max_seq_len``, both before any compute.
        """
        request = BatchRequest(self._next_id, self._model, prompt, self.max_seq_len, tokenizer, options)
        self._next_id += 1
        (self._ended if request.ended else self._waiting).append(request)
        return request.id

    @_by_one_thread
    def cancel(self, request_id: int) -> bool:
        """Ends a request that waits or runs, with the tokens it has; False if there is none of this id."""
        self._settle()
        for request in (*self._waiting, *self._seats):
            if request is not None and request.id == request_id:
                request.cancelled = True
                if request in self._waiting:
                    self._waiting.remove(request)
                    self._ended.append(request)
                else:
                    self._retire(self._seats.index(request), request)
                self._rest()
                return True
        return False

    @_by_one_thread
    def reset(self) -> None:
        """Forgets all requests and what has come of them; the cache keeps its memory and nothing else."""
        self._waiting.clear()
        self._ended.clear()
        self._seats[:] = [None] * self.max_batch
        self._in_flight.clear()
        self._rows, self._consistent = None, True

    @_by_one_thread
    def step(self) -> bool:
        """Fills free rows from the queue and advances every running request by a token at most.

        True while requests are left. On a GPU the tokens of a step are read while the next one runs, so the
        first call only starts one.
        """
        self._settle()
        self._consistent = False
        with torch.inference_mode():
            self._admit()
            if self._rows is not None and any(self._seats):
                self._rows.issue()
                self._in_flight.append(list(self._seats))
                if len(self._in_flight) > self._rows.ahead:
                    self._read(self._rows)
        self._rest()
        self._consistent = True
        return self.pending > 0

    @_by_one_thread
    def collect(self) -> list[Completion]:
        """What has ended since the last call, in the order of ending."""
        self._settle()
        completions = [request.completion for request in self._ended]
        self._ended.clear()
        return completions

    def __iter__(self) -> Iterator[Completion]:
        """Steps until no request is left, of those added meanwhile either; gives each completion as soon as
        it is there."""
        # the consumer may add some
        while self.pending or self._ended:
            self.step()
            while completion := self._next_completion():
                yield completion

    @_by_one_thread
    def _next_completion(self) -> Completion | None:
        return self._ended.popleft().completion if self._ended else None

    def _admit(self) -> None:
        for row, seat in enumerate(self._seats):
            if seat is None and self._waiting:
                if self._rows is None:
                    self._rows = self._start()
                # in both places for a moment rather than in none
                self._seats[row] = request = self._waiting[0]
                self._waiting.popleft()
                self._place(self._rows, row, request)

    def _start(self) -> Rows:
        """The rows of a batch that was idle; the model may have changed meanwhile."""
        model = self._model
        if _kind(model) != self._made_for:
            self._state = new_state(model, self.max_batch, self.max_seq_len, pooled=False)
            self._made_for = _kind(model)
        return rows_of(model, self._state, self._cuda_graph)

    def _place(self, rows: Rows, row: int, request: BatchRequest) -> None:
        rows.place(row, request.next_text)
        request.placed = True

    def _read(self, rows: Rows) -> None:
        """Gives each request the token that the oldest step has chosen in its row."""
        for row, (token, request) in enumerate(zip(rows.read(), self._in_flight.popleft(), strict=True)):
            # a request that has left the row since has no use for it
            if request is not None and request is self._seats[row]:
                request.push(token)
                if request.ended:
                    self._retire(row, request)

    def _retire(self, row: int, request: BatchRequest) -> None:
        if not any(request is ended for ended in self._ended):
            self._ended.append(request)
        self._seats[row] = None
        if self._rows is not None:
            with torch.inference_mode():
                self._rows.clear(row)

    def _settle(self) -> None:
        """After an exception within a step: every row again as the tokens say that the host knows."""
        if self._consistent:
            return
        self._in_flight.clear()
        if self._waiting and any(self._waiting[0] is seat for seat in self._seats):
            self._waiting.popleft()
        with torch.inference_mode():
            if self._rows is not None:
                self._rows.restart()
            for row, request in enumerate(self._seats):
                if request is None:
                    continue
                request.replay()
                if request.ended:
                    self._retire(row, request)
                elif self._rows is not None:
                    self._place(self._rows, row, request)
        self._rest()
        self._consistent = True

    def _rest(self) -> None:
        """Without requests there are no rows, and what is still on its way is nobody's."""
        if not self.pending:
            self._in_flight.clear()
            self._rows = None


def _kind(model: Any) -> tuple:
    """What a cache for the model has to be like."""
    return model.device, model.dtype, model.cache_dtype
