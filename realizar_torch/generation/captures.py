"""Captures: CUDA graphs of one memory pool, until one cannot be captured."""

import contextlib
import gc
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch

from realizar_torch.caller import warn_caller
from realizar_torch.errors import BackendUnavailableError
from realizar_torch.ops.recording import unrecorded


class Captures:
    """Makes graphs whose memory is one pool's.

    device: where they run. otherwise: what happens without a graph, for the warning. count: graphs made so
    far. fallback: the error that ended it, or None.
    """

    # the beginning of a capture waits for the whole device, which CUDA forbids during another one
    _one_at_a_time: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, device: torch.device, otherwise: str) -> None:
        self._device, self._otherwise = device, otherwise
        self.count = 0
        self.fallback: str | None = None
        self._pool: Any = None
        self.new_pool()

    def new_pool(self) -> None:
        """Graphs to come share no memory with those that are there."""
        if self._device.type == "cuda":
            self._pool = torch.cuda.graph_pool_handle()

    def attempt(
        self, capture: Callable[[], torch.cuda.CUDAGraph], wanted: bool | str
    ) -> torch.cuda.CUDAGraph | None:
        """What ``capture`` returns, which records nothing; None, with one warning, once a capture has failed.

        wanted: True makes that a BackendUnavailableError, whose cause is what ``capture`` raised.
        """
        if self.fallback is None:
            try:
                with unrecorded():
                    return capture()
            # any: what is wrong with the work itself will be raised when it runs without a graph
            except Exception as error:
                self.fallback = traceback.format_exception_only(error)[0].splitlines()[0]
                # the failed capture's memory goes with its pool
                self.new_pool()
                if wanted is True:
                    raise self._failed() from error
                warn_caller(f"no CUDA graph, {self._otherwise}: {self.fallback}")
        if wanted is True:
            raise self._failed()
        return None

    def _failed(self) -> BackendUnavailableError:
        return BackendUnavailableError(f"cuda_graph=True, but the capture failed: {self.fallback}")

    def record(self, work: Callable[[], object], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
        """A graph of what ``work`` launches, on the current device."""
        graph = torch.cuda.CUDAGraph()
        # other threads may allocate meanwhile
        options = {"pool": self._pool, "stream": stream, "capture_error_mode": "thread_local"}
        with self._one_at_a_time, _collector_at_rest(), torch.cuda.graph(graph, **options):
            work()
        self.count += 1
        return graph


@contextlib.contextmanager
def _collector_at_rest() -> Iterator[None]:
    """No cyclic garbage is destroyed inside: a CUDA graph or a kernel among it would end the capture.

    torch.cuda.graph collects it first only in versions before 2.9.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
