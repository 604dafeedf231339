"""DecodeGraph: the decode step of a batch and the choice of its next tokens, captured once and replayed."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from realizar_torch.errors import BackendUnavailableError
from realizar_torch.generation.captures import Captures
from realizar_torch.generation.gpu_step import GpuStep, why_not
from realizar_torch.generation.rehearsal import rehearse
from realizar_torch.generation.row_sampling import RowSampling
from realizar_torch.generation.sampling import SamplingParams, new_seeds
from realizar_torch.generation.workspace import Workspace
from realizar_torch.nn.kv_cache import KVCache
from realizar_torch.ops.recording import dispatch


@dataclass(frozen=True)
class GraphStats:
    """captures: graphs made. graph_replays, eager_steps: steps issued so far, by kind. fallback: why there is
    no graph although one was wanted, or None."""

    captures: int
    graph_replays: int
    eager_steps: int
    fallback: str | None


class DecodeGraph:
    """Steps of ``batch_size`` sequences that run ahead of the host; nothing in a step waits for it.

    Fill ``cache`` by a forward pass of the model, call ``begin`` with the last logits, then ``issue`` a step
    and ``read`` the tokens of the one before. Sampling parameters are data: there is a graph that takes the
    highest logits and one that does all else. It holds addresses of the model's weights, the cache and the
    workspace: make a new one when any has moved.

    Rows may also be placed one by one, each at a position of its own: ``place``, and then ``issue_rows``.

    max_seq_len: positions of the cache; None is the model's own. BackendUnavailableError where the step
    cannot run on GPU kernels.
    """

    # tensors of inference mode could not be written to outside of it
    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(
        self,
        model: Any,
        batch_size: int,
        *,
        max_seq_len: int | None = None,
        cache: KVCache | None = None,
        workspace: Workspace | None = None,
    ) -> None:
        config = model.config
        if cache is None:
            cache = model.new_cache(batch_size, max_seq_len or model.max_seq_len)
        if workspace is None:
            workspace = Workspace.for_model(config, batch_size, device=model.device)
        reason = why_not(model, cache)
        if reason is not None:
            raise BackendUnavailableError(f"no decode graph: {reason}")
        from realizar_torch.triton_kernels.highest import highest_scratch

        self.cache, self.step = cache, GpuStep(model, cache, workspace)
        device = self.step.tokens.device
        # by whether every row takes the highest logit as it is
        self._graphs: dict[bool, torch.cuda.CUDAGraph] = {}
        self._captures = Captures(device, "decoding runs step by step")
        self._stream = torch.cuda.Stream(device)
        self._scratch = highest_scratch(batch_size, device)
        self._sampling = RowSampling(batch_size, config.vocab_size, device)
        # The host reads a step's tokens while the next step runs, so there are two places for them.
        pinned = device.type == "cuda"
        self._host_tokens = torch.zeros(2, batch_size, dtype=torch.int64, pin_memory=pinned)
        self._sent = (torch.cuda.Event(), torch.cuda.Event())
        self._issued = self._read = 0
        self._wanted: bool | str = "auto"
        self._rehearsed = False
        self._replays = self._eager_steps = 0

    @property
    def stats(self) -> GraphStats:
        captures = self._captures
        return GraphStats(captures.count, self._replays, self._eager_steps, captures.fallback)

    @property
    def rehearsed(self) -> bool:
        """Whether the kernels of a step have been asked for."""
        return self._rehearsed

    def rehearse(self) -> None:
        """A step that others may rehearse with theirs: it leaves the cache and all rows as they are."""
        with self._rows_kept():
            # outside the cache nothing is written
            self.step.positions.fill_(-1)
            self._work()
        self._rehearsed = True

    def begin(
        self,
        logits: Tensor,
        sampling: SamplingParams | None = None,
        seen: Tensor | None = None,
        generator: torch.Generator | None = None,
        *,
        cuda_graph: bool | str = "auto",
    ) -> None:
        """Chooses the first tokens from ``logits`` fp32 [B, V]; ``read`` gives them.

        seen: bool [B, V], tokens that a repetition penalty acts on. cuda_graph: False issues the same
        launches one by one; True makes a failed capture an error.
        """
        sampling = sampling or SamplingParams()
        seeds = None if sampling.greedy else new_seeds(logits.shape[0], generator, logits.device)
        self._sampling.fill(sampling, seeds, seen)
        self._wanted = cuda_graph
        self.step.refresh()
        # rows that were placed one by one have left their own
        self.step.positions.fill_(self.cache.length)
        self.step.moving.fill_(1)
        self._issued = self._read = 0
        self._choose(logits.contiguous())
        self._send()

    def issue(self) -> None:
        """Starts the step behind the last one. CacheFullError where the cache has no free position."""
        self.cache.require(1)
        self.step.place()
        self._launch()
        self.step.advance()
        self._send()

    def begin_rows(self, *, cuda_graph: bool | str = "auto") -> None:
        """Makes every row idle: it computes at position 0 of its cache until ``place`` gives it work."""
        self.finish()
        self._wanted = cuda_graph
        self._sampling.fill(SamplingParams(), None, None)
        for state in (self.step.tokens, self.step.positions, self.step.moving):
            state.zero_()
        self._issued = self._read = 0

    def place(
        self,
        row: int,
        token: int,
        position: int,
        sampling: SamplingParams,
        seed: int,
        chosen: int,
        seen: Tensor | None,
    ) -> None:
        """The next step puts ``token`` at ``position`` of ``row``, behind what the cache holds of it.

        seed, chosen, seen: see RowSampling. The caller keeps the row's position within the cache.
        """
        self._sampling.set_row(row, sampling, seed, chosen, seen)
        self._put(row, token, position, 1)

    def clear(self, row: int) -> None:
        """Makes a row idle again."""
        self._sampling.set_row(row, SamplingParams(), 0, 0)
        self._put(row, 0, 0, 0)

    def issue_rows(self) -> None:
        """Starts a step of every row at its own position, which no host counts."""
        self._launch()
        self._send()

    def read(self) -> list[int]:
        """Tokens of the oldest step not read yet, -1 where a row's logits were not finite. Waits for it."""
        slot = self._read % 2
        self._sent[slot].synchronize()
        self._read += 1
        return self._host_tokens[slot].tolist()

    def finish(self) -> None:
        """Waits for the steps that were issued and not read."""
        if self._issued:
            self._sent[(self._issued - 1) % 2].synchronize()

    def _put(self, row: int, token: int, position: int, moving: int) -> None:
        self.step.tokens[row].fill_(token)
        self.step.positions[row].fill_(position)
        self.step.moving[row].fill_(moving)

    def _launch(self) -> None:
        if not self._rehearsed:
            rehearse(self.rehearse)
        graph = self._graph() if self._wanted is not False else None
        run = self._work if graph is None else graph.replay
        dispatch("decode_step", self.step.tokens.device, run)
        self._eager_steps += graph is None
        self._replays += graph is not None

    def _work(self) -> None:
        """What a graph holds: tokens -> logits -> next tokens."""
        self.step.launch()
        self._choose(self.step.logits)

    def _choose(self, logits: Tensor) -> None:
        from realizar_torch.triton_kernels.highest import take_highest

        if self._sampling.plain:
            take_highest(logits, self.step.tokens, self._scratch)
        else:
            self._sampling.choose(logits, out=self.step.tokens)

    def _send(self) -> None:
        from realizar_torch.triton_kernels.launch import on_device

        slot = self._issued % 2
        self._host_tokens[slot].copy_(self.step.tokens, non_blocking=True)
        # in the stream that copies, also where another device is the current one
        with on_device(self.step.tokens.device):
            self._sent[slot].record()
        self._issued += 1

    def _graph(self) -> torch.cuda.CUDAGraph | None:
        """The graph for the rows' sampling, captured on first use; None after a capture has failed."""
        plain = self._sampling.plain
        if plain not in self._graphs:
            graph = self._captures.attempt(self._capture, self._wanted)
            if graph is None:
                return None
            self._graphs[plain] = graph
        return self._graphs[plain]

    def _capture(self) -> torch.cuda.CUDAGraph:
        """Runs the step once, so that everything is loaded, puts its state back, and captures it."""
        with torch.cuda.device(self.step.tokens.device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                try:
                    with self._rows_kept():
                        self._work()
                finally:
                    current.wait_stream(self._stream)
            return self._captures.record(self._work, self._stream)

    @contextlib.contextmanager
    def _rows_kept(self) -> Iterator[None]:
        """Puts back what a step changes of its rows, also after a failure: steps go on from there."""
        states = (self.step.tokens, self.step.positions, *self._sampling.state)
        saved = [state.clone() for state in states]
        try:
            yield
        finally:
            for state, value in zip(states, saved, strict=True):
                state.copy_(value)
