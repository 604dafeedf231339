"""PrefixCache: keys and values that stay between generations; only what is new of a prompt is computed."""

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from realizar_torch.errors import FormatError
from realizar_torch.generation.arguments import check_model
from realizar_torch.generation.gpu_state import GpuState
from realizar_torch.generation.step import DecodeState, new_state


class PrefixCache:
    """The latest sequence of one conversation, prompt and answer: its ids, keys and values.

    Give it to every call, ``rt.generate(model, tokenizer, messages, prefix_cache=cache, ...)``. The longest
    beginning that the next prompt has in common with the sequence is kept, the rest is rolled back, and the
    prompt is computed from there on, its last token always. Keys and values that an earlier call computed
    differ from a fresh prompt's as one kernel's rounding differs from another's, and so may logits.

    It holds one sequence without padding, for one generation at a time, and memory for the model's
    ``max_seq_len`` positions from the first call on. A model whose tensors have moved or changed since starts
    anew; call ``reset`` after a change that tensors do not show, such as an adapter switched off.
    """

    def __init__(self, model: Any) -> None:
        check_model(model)
        self.model = model
        self._state: DecodeState | GpuState | None = None
        self._made_for: tuple = ()
        self._ids: list[int] = []
        self._in_use = threading.Lock()

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The ids whose keys and values are kept."""
        return tuple(self._ids)

    @property
    def memory_bytes(self) -> int:
        """Bytes of keys and values, 0 before the first call."""
        return 0 if self._state is None else self._state.cache.memory_bytes

    def reset(self) -> None:
        """Forgets the sequence and frees its memory. FormatError while a generation runs."""
        with self._claimed():
            self._state, self._ids = None, []

    @contextmanager
    def resumed(self, prompt: Sequence[int], positions: int) -> Iterator[DecodeState | GpuState]:
        """A state with room for ``positions``, whose cache holds what is kept of ``prompt``.

        Within the block the cache is filled and ``append`` told the tokens that are chosen; at its end every
        position is kept whose token is known.
        """
        with self._claimed():
            state = self._state_for(positions)
            state.cache.rollback(_common_length(self._ids, prompt[:-1]))
            self._ids = list(prompt)
            try:
                yield state
            finally:
                state.close()
                # the last token chosen was never fed, or a step too many has run
                del self._ids[state.cache.length :]
                state.cache.rollback(len(self._ids))

    def append(self, token: int) -> None:
        """Takes the next token of the sequence that is being generated."""
        self._ids.append(token)

    def _state_for(self, positions: int) -> DecodeState | GpuState:
        made_for = _fingerprint(self.model)
        if self._state is None or made_for != self._made_for or positions > self._state.cache.max_seq_len:
            # freed first: two need not fit
            self._state, self._ids = None, []
            positions = max(positions, self.model.max_seq_len)
            self._state = new_state(self.model, 1, positions, pooled=False)
            self._made_for = made_for
        return self._state

    @contextmanager
    def _claimed(self) -> Iterator[None]:
        if not self._in_use.acquire(blocking=False):
            raise FormatError(
                "the prefix_cache is in use by a generation that has not ended: "
                "exhaust or close its stream first, or give each conversation a PrefixCache of its own"
            )
        try:
            yield
        finally:
            self._in_use.release()


def _common_length(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


def _fingerprint(model: Any) -> tuple:
    """Differs when a tensor of the model has moved or was written to."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    return (
        model.device,
        model.dtype,
        model.cache_dtype,
        tuple((tensor.data_ptr(), _version(tensor)) for tensor in tensors),
    )


def _version(tensor: Tensor) -> int:
    # tensors made in inference mode count no writes
    return 0 if tensor.is_inference() else tensor._version
