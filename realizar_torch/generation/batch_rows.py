"""Rows of a batch that come and go: each has its own text in its own row of one cache.

``place`` fills a row's cache up to the last known token, which the next step is fed; ``issue`` steps all
rows; ``read`` gives the tokens of the oldest step not read. HostRows wait for each step, GraphRows do not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from realizar_torch.generation.cpu_step import CpuStep
from realizar_torch.generation.gpu_state import GpuState
from realizar_torch.generation.graph import DecodeGraph
from realizar_torch.generation.prompt_rows import Piece
from realizar_torch.generation.sampling import SamplingParams, sample, uniforms
from realizar_torch.generation.step import DecodeState, require_graph
from realizar_torch.ops.recording import dispatch


@dataclass(frozen=True)
class Text:
    """What a row is to go on with. ids: prompt and tokens so far, of which ``chosen`` are new. cached: how
    many of them the row's cache holds already. seed: of the row's random numbers."""

    ids: Sequence[int]
    chosen: int
    cached: int
    sampling: SamplingParams
    seed: int


class Rows(Protocol):
    """ahead: steps that may be issued before the oldest one is read."""

    ahead: int

    def restart(self) -> None:
        """Makes all rows idle and forgets steps that were not read. The cache stays as it is."""

    def place(self, row: int, text: Text) -> None: ...

    def clear(self, row: int) -> None: ...

    def issue(self) -> None: ...

    def read(self) -> list[int]:
        """A token per row: -1 where logits were not finite, anything in a row that was idle."""


def rows_of(model: Any, state: DecodeState | GpuState, cuda_graph: bool | str) -> Rows:
    """The rows of a state's cache; it was made for ``model``, which may have changed since."""
    state.prepare(model)
    require_graph(state, cuda_graph)
    if state.decoder is not None:
        return GraphRows(model, state, state.decoder, cuda_graph)
    return HostRows(model, state)


def fill_row(
    model: Any,
    state: DecodeState | GpuState,
    row: int,
    ids: Sequence[int],
    slot: int,
    cuda_graph: bool | str = "auto",
) -> None:
    """Runs ``ids`` through the model into the cache of one row, from ``slot`` on.

    One text at a time: its keys and values must not depend on who else arrives.
    """
    if not ids:
        return
    tokens = _int64(ids).to(model.device)
    if state.prompt is None:
        model(tokens[None], cache=state.cache.row(row, slot), logits_to_keep=1)
    elif isinstance(state, GpuState):
        state.compile(model, len(ids))
        piece = Piece(row, slot, len(ids), wanted=False)
        state.prompt.fill(tokens, [piece], state.cache, cuda_graph=cuda_graph)
    else:
        state.prompt.fill(tokens, row, slot)


class HostRows:
    """Steps that have been computed when ``issue`` returns, by the fused CPU step or by the modules."""

    ahead = 0

    def __init__(self, model: Any, state: DecodeState | GpuState) -> None:
        self._model, self._state = model, state
        self._cache = state.cache
        self._texts: list[Text | None] = [None] * self._cache.batch_size
        self._ids: list[list[int]] = [[] for _ in self._texts]
        self._chosen: list[int] = []

    def restart(self) -> None:
        self._texts = [None] * len(self._texts)

    def place(self, row: int, text: Text) -> None:
        fill_row(self._model, self._state, row, text.ids[text.cached : -1], text.cached)
        self._ids[row] = list(text.ids)
        self._texts[row] = text

    def clear(self, row: int) -> None:
        self._texts[row] = None

    def issue(self) -> None:
        busy = [row for row, text in enumerate(self._texts) if text is not None]
        tokens = [0] * len(self._texts)
        for row, logits in zip(busy, self._logits(busy), strict=True):
            tokens[row] = self._choose(row, logits)
        for row in busy:
            self._ids[row].append(tokens[row])
        self._chosen = tokens

    def read(self) -> list[int]:
        return self._chosen

    def _logits(self, busy: Sequence[int]) -> list[Tensor]:
        """fp32 [1, V] of each busy row."""
        fused = self._state.fused
        if isinstance(fused, CpuStep):
            # rows behind the last busy one need no step
            rows = range(busy[-1] + 1)
            ids = [self._ids[row] if self._texts[row] is not None else [0] for row in rows]
            tokens, positions = _int64([row[-1] for row in ids]), _int64([len(row) - 1 for row in ids])
            logits = dispatch("decode_step", tokens.device, fused.run_at, tokens, positions)
            return [logits[row : row + 1] for row in busy]
        return [self._by_modules(row) for row in busy]

    def _by_modules(self, row: int) -> Tensor:
        ids = self._ids[row]
        token = torch.tensor([ids[-1:]], device=self._model.device)
        return self._model(token, cache=self._cache.row(row, len(ids) - 1)).logits[:, -1]

    def _choose(self, row: int, logits: Tensor) -> int:
        text, ids = self._texts[row], self._ids[row]
        assert text is not None
        sampling, device = text.sampling, logits.device
        seen = uniform = None
        if sampling.repetition_penalty != 1:
            seen = torch.zeros(logits.shape, dtype=torch.bool, device=device)
            seen[0, torch.tensor(ids, device=device)] = True
        if not sampling.greedy:
            step = text.chosen + len(ids) - len(text.ids)
            uniform = uniforms(*(torch.tensor([value], device=device) for value in (text.seed, step)))
        return int(sample(logits, sampling, seen, uniform))


class GraphRows:
    """Steps of a DecodeGraph: one is on its way while the tokens of the one before are read."""

    ahead = 1

    def __init__(self, model: Any, state: GpuState, graph: DecodeGraph, cuda_graph: bool | str) -> None:
        self._model, self._state, self._graph, self._wanted = model, state, graph, cuda_graph
        self.restart()

    def restart(self) -> None:
        self._graph.begin_rows(cuda_graph=self._wanted)

    def place(self, row: int, text: Text) -> None:
        ids = text.ids[text.cached : -1]
        fill_row(self._model, self._state, row, ids, text.cached, self._wanted)
        seen = None
        if text.sampling.repetition_penalty != 1:
            seen = _int64(text.ids).to(self._model.device)
        position = len(text.ids) - 1
        self._graph.place(row, text.ids[-1], position, text.sampling, text.seed, text.chosen, seen)

    def clear(self, row: int) -> None:
        self._graph.clear(row)

    def issue(self) -> None:
        self._graph.issue_rows()

    def read(self) -> list[int]:
        return self._graph.read()


def _int64(numbers: Sequence[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")
