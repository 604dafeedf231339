"""Times dispatched ops for ``record_dispatch``: one look at a context variable where nothing is recorded."""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from realizar_torch.metrics import RECORDING, DispatchMetrics


def recorded(op: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """``run``, whose calls count as dispatches of ``op`` on its first argument's device."""

    @functools.wraps(run)
    def call(*args: Any, **kwargs: Any) -> Any:
        metrics = RECORDING.get()
        if metrics is None:
            return run(*args, **kwargs)
        return observe(metrics, op, args[0].device, functools.partial(run, *args, **kwargs))

    return call


def dispatch(op: str, device: torch.device, run: Callable[..., Any], *args: Any) -> Any:
    """``run(*args)``, which counts as one dispatch of ``op`` on ``device``."""
    metrics = RECORDING.get()
    if metrics is None:
        return run(*args)
    return observe(metrics, op, device, functools.partial(run, *args))


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """Counts nothing of what the block dispatches."""
    token = RECORDING.set(None)
    try:
        yield
    finally:
        RECORDING.reset(token)


def observe(metrics: DispatchMetrics, op: str, device: torch.device, run: Callable[[], Any]) -> Any:
    """Runs and records: wall time on the CPU; on a GPU the time between two events, without waiting.

    What ``run`` itself dispatches is part of it.
    """
    if device.type != "cuda":
        return _timed_by_the_host(metrics, op, device.type, run)
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            return _timed_by_the_host(metrics, op, device.type, run)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        with unrecorded():
            result = run()
        end.record()

    def microseconds() -> float:
        end.synchronize()
        return start.elapsed_time(end) * 1e3

    metrics.defer(op, device.type, microseconds)
    return result


def _timed_by_the_host(metrics: DispatchMetrics, op: str, backend: str, run: Callable[[], Any]) -> Any:
    started = time.perf_counter()
    with unrecorded():
        result = run()
    metrics.record(op, backend, (time.perf_counter() - started) * 1e6)
    return result
