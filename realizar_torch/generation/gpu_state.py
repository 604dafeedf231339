"""What a model needs to decode on a GPU, kept between requests so that addresses and graphs stay valid."""

import weakref
from collections.abc import Callable
from typing import Any

from realizar_torch.caller import warn_caller
from realizar_torch.generation import gpu_prompt
from realizar_torch.generation.fingerprint import Fingerprint
from realizar_torch.generation.gpu_prompt import GpuPrompt
from realizar_torch.generation.gpu_step import GpuStep, why_not
from realizar_torch.generation.graph import DecodeGraph
from realizar_torch.generation.rehearsal import rehearse
from realizar_torch.generation.workspace import Workspace
from realizar_torch.models.transformer import Transformer


class GpuState:
    """Cache, workspace, and a DecodeGraph for every batch size seen. One generation uses it at a time."""

    def __init__(self, model: Transformer, batch_size: int, max_positions: int, owner: "GpuStates | None"):
        self.cache = model.new_cache(batch_size, max_positions)
        self.workspace = Workspace.for_model(model.config, batch_size, device=model.device)
        self.decoder: DecodeGraph | None = None
        self.prompt: GpuPrompt | None = None
        self._decoders: dict[int, DecodeGraph] = {}
        # weakly: the owner keeps this state while it is idle, and a cycle would keep a deleted model's memory
        self._owner = None if owner is None else weakref.ref(owner)
        self._made_for = (model.device, model.dtype, model.cache_dtype)
        self._known: Fingerprint | None = None

    @property
    def fused(self) -> GpuStep | None:
        return None if self.decoder is None else self.decoder.step

    def fits(self, model: Transformer) -> bool:
        return self._made_for == (model.device, model.dtype, model.cache_dtype)

    def ensure(self, batch_size: int, max_positions: int) -> None:
        """Empties the cache and makes room; graphs are dropped if anything has moved."""
        moved = self.cache.ensure(batch_size, max_positions)
        if self.workspace.ensure(batch_size) or moved:
            self._decoders.clear()
        self.decoder = None

    def prepare(self, model: Transformer) -> None:
        """Picks the decoder of the cache's batch size; none, with a warning, for a model it does not know."""
        batch_size = self.cache.batch_size
        if self._known is None or not self._known.matches(model):
            self._decoders.clear()
            self.prompt = self._known = None
        if batch_size not in self._decoders:
            reason = why_not(model, self.cache)
            if reason is not None:
                self.decoder = self.prompt = None
                warn_caller(f"decoding runs module by module, which is slower: {reason}")
                return
            self._known = Fingerprint(model, apart="gpu_states")
            self._decoders[batch_size] = DecodeGraph(
                model, batch_size, cache=self.cache, workspace=self.workspace
            )
        if self.prompt is None and gpu_prompt.why_not(model) is None:
            self.prompt = GpuPrompt(model)
        self.decoder = self._decoders[batch_size]
        self.decoder.step.refresh()

    def compile(self, model: Transformer, rows: int) -> None:
        """Compiles what a prompt of ``rows`` rows (0: none) and greedy steps behind it launch, all at once.

        Little more than a look at two flags once that was done.
        """
        works: list[Callable[[], object]] = []
        if self.decoder is not None and not self.decoder.rehearsed:
            works.append(self.decoder.rehearse)
        if rows and self.prompt is not None:
            fill = self.prompt.rehearsal(rows, self.cache)
            if fill is not None:
                works.append(lambda: model.logits(fill()))
        rehearse(*works)

    def close(self) -> None:
        """Ends the generation; the state is free for the next one."""
        if self.decoder is not None:
            self.decoder.finish()
        owner = None if self._owner is None else self._owner()
        if owner is not None:
            owner.give_back(self)


class GpuStates:
    """The idle states of one model. Generations that overlap get a state each."""

    def __init__(self) -> None:
        self._idle: list[GpuState] = []

    def take(self, model: Any, batch_size: int, max_positions: int) -> GpuState:
        """A state with room for the model's own ``max_seq_len`` or more, so that it need not grow again."""
        positions = max(max_positions, model.max_seq_len)
        while (state := self._any_idle()) is not None:
            if state.fits(model):
                state.ensure(batch_size, positions)
                return state
        return GpuState(model, batch_size, positions, self)

    def _any_idle(self) -> GpuState | None:
        # without a look before: another thread may be quicker
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def give_back(self, state: GpuState) -> None:
        self._idle.append(state)

    def clear(self) -> None:
        """Frees the memory of all idle states."""
        self._idle.clear()

    def __deepcopy__(self, memo: dict) -> "GpuStates":
        return GpuStates()

    def __reduce__(self) -> tuple:
        return GpuStates, ()
