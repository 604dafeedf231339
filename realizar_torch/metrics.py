"""What the numbers mean: one arithmetic definition for every time and rate this package prints."""

import bisect
import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from typing import Any

from realizar_torch.errors import BackendUnavailableError

# upper edges of the histogram's buckets in microseconds; one more bucket holds what is longer
HISTOGRAM_EDGES = (100, 500, 1000, 5000)


@dataclass(frozen=True)
class GenerationMetrics:
    """One generation in numbers. Times are in seconds since the request was accepted; None means not reached.

    prompt_tokens and new_tokens count over all rows of the batch; padding is not counted. first_token: when
    the first new token of every row was known on the host. last_token: the same for the latest one. rows:
    batch size. reused_tokens: those of the prompt whose keys and values were kept from an earlier generation.
    decode_bytes: of weights, keys and values that had to be read between the two tokens.
    """

    prompt_tokens: int
    new_tokens: int
    rows: int
    first_token: float | None = None
    last_token: float | None = None
    reused_tokens: int = 0
    decode_bytes: int = 0

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from the accepted request to the first token: prefill and one choice, without loading."""
        return self.first_token

    @property
    def prompt_tokens_per_second(self) -> float | None:
        """Prompt tokens that were computed over the time to first token."""
        return rate(self.prompt_tokens - self.reused_tokens, self.first_token)

    @property
    def tokens_per_second(self) -> float | None:
        """Decode rate: tokens after each row's first, over the time since the first token."""
        if self.first_token is None or self.last_token is None:
            return None
        return rate(self.new_tokens - self.rows, self.last_token - self.first_token)

    @property
    def gigabytes_per_second(self) -> float:
        """Bytes that decoding had to read, over the time since the first token; 0 before the second token."""
        if self.first_token is None or self.last_token is None:
            return 0.0
        return (rate(self.decode_bytes, self.last_token - self.first_token) or 0.0) / 1e9

    def bandwidth_share(self, bandwidth: float) -> float:
        """``gigabytes_per_second`` over the device's ``bandwidth`` in GB/s; 0 where either is 0."""
        return self.gigabytes_per_second / bandwidth if bandwidth else 0.0

    def as_dict(self) -> dict[str, float | int | None]:
        """The counts, times and rates under the names that ``--json`` prints."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "reused_tokens": self.reused_tokens,
            "new_tokens": self.new_tokens,
            "time_to_first_token": self.time_to_first_token,
            "prompt_tokens_per_second": self.prompt_tokens_per_second,
            "tokens_per_second": self.tokens_per_second,
            "gigabytes_per_second": self.gigabytes_per_second,
        }


def rate(count: int, seconds: float | None) -> float | None:
    """``count`` per second, or None where there is nothing to divide."""
    return count / seconds if seconds and count > 0 else None


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Arithmetic mean and sample standard deviation (0 for a single value), as llama-bench prints them."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


@dataclass(frozen=True)
class DispatchSummary:
    """Durations of one op on one back end, in microseconds. variance: of the sample; everything is 0 where
    there are too few values. histogram: counts up to each edge of HISTOGRAM_EDGES, and beyond the last."""

    count: int
    total: float
    minimum: float
    maximum: float
    mean: float
    variance: float
    p50: float
    p95: float
    p99: float
    histogram: tuple[int, ...]

    @classmethod
    def of(cls, durations: Sequence[float]) -> "DispatchSummary":
        """Of durations in microseconds, in any order."""
        ordered = sorted(durations)
        buckets = [0] * (len(HISTOGRAM_EDGES) + 1)
        for duration in ordered:
            buckets[bisect.bisect_left(HISTOGRAM_EDGES, duration)] += 1
        return cls(
            count=len(ordered),
            total=sum(ordered),
            minimum=ordered[0] if ordered else 0.0,
            maximum=ordered[-1] if ordered else 0.0,
            mean=statistics.fmean(ordered) if ordered else 0.0,
            variance=statistics.variance(ordered) if len(ordered) > 1 else 0.0,
            p50=percentile(ordered, 50),
            p95=percentile(ordered, 95),
            p99=percentile(ordered, 99),
            histogram=tuple(buckets),
        )


class DispatchMetrics:
    """Every op dispatched in a ``record_dispatch`` block: (op, back end) -> durations. Safe for threads.

    A fused decode step is one dispatch, "decode_step", and a fused pass of a prompt is one, "prefill" (a long
    prompt takes several), also as the replay of a graph; what an op runs inside is part of it. Durations on
    GPUs are the device's own, from events that are read when the numbers are asked for.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._durations: dict[tuple[str, str], list[float]] = {}
        self._pending: list[tuple[str, str, Callable[[], float]]] = []
        self._started, self._seconds = time.perf_counter(), 0.0

    def record(self, op: str, backend: str, microseconds: float) -> None:
        """Counts one dispatch of ``op`` on ``backend`` ("cpu" or "cuda")."""
        with self._lock:
            self._durations.setdefault((op, backend), []).append(microseconds)

    def defer(self, op: str, backend: str, microseconds: Callable[[], float]) -> None:
        """Records a duration that is known later; the call waits for it."""
        with self._lock:
            self._pending.append((op, backend, microseconds))

    def stop(self) -> None:
        """Fixes the time that rates refer to."""
        self._seconds = time.perf_counter() - self._started

    def summary(self, op: str | None = None, backend: str | None = None) -> DispatchSummary:
        """Of one op or all, on one back end or all."""
        return DispatchSummary.of(
            [
                duration
                for (name, where), durations in self._known().items()
                if op in (None, name) and backend in (None, where)
                for duration in durations
            ]
        )

    @property
    def cpu_count(self) -> int:
        """Dispatches on the CPU."""
        return self.summary(backend="cpu").count

    @property
    def gpu_count(self) -> int:
        """Dispatches on GPUs."""
        return self.summary(backend="cuda").count

    @property
    def gpu_ratio(self) -> float:
        """Dispatches on the GPU over all of them, 0 where there were none."""
        total = self.summary().count
        return self.gpu_count / total if total else 0.0

    @property
    def throughput(self) -> float:
        """Dispatches per second of the block."""
        return rate(self.summary().count, self._seconds or time.perf_counter() - self._started) or 0.0

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready: a summary of each op on each back end, and the totals."""
        ops = [
            {"op": op, "backend": backend} | asdict(DispatchSummary.of(durations))
            for (op, backend), durations in sorted(self._known().items())
        ]
        return {
            "ops": ops,
            "cpu_count": self.cpu_count,
            "gpu_count": self.gpu_count,
            "gpu_ratio": self.gpu_ratio,
            "throughput": self.throughput,
        }

    def prometheus(self) -> str:
        """The histograms as Prometheus text, in seconds. BackendUnavailableError without
        ``prometheus_client``."""
        try:
            from prometheus_client import CollectorRegistry, Histogram, generate_latest
        except ImportError as error:
            raise BackendUnavailableError(
                f"the package prometheus_client cannot be imported ({error}); install it: "
                "pip install 'realizar-torch[metrics]'"
            ) from None
        registry = CollectorRegistry()
        histogram = Histogram(
            "realizar_dispatch_seconds",
            "Duration of dispatched ops",
            ["op", "backend"],
            buckets=[edge / 1e6 for edge in HISTOGRAM_EDGES],
            registry=registry,
        )
        for (op, backend), durations in sorted(self._known().items()):
            for duration in durations:
                histogram.labels(op, backend).observe(duration / 1e6)
        return generate_latest(registry).decode()

    def _known(self) -> dict[tuple[str, str], list[float]]:
        with self._lock:
            for op, backend, microseconds in self._pending:
                self._durations.setdefault((op, backend), []).append(microseconds())
            self._pending.clear()
            return {key: list(durations) for key, durations in self._durations.items()}


# The metrics of the innermost record_dispatch block around the running code.
RECORDING: ContextVar[DispatchMetrics | None] = ContextVar("realizar_dispatch", default=None)


@contextlib.contextmanager
def record_dispatch() -> Iterator[DispatchMetrics]:
    """Records the ops that the block dispatches, also from threads that run in a copy of its context."""
    metrics = DispatchMetrics()
    token = RECORDING.set(metrics)
    try:
        yield metrics
    finally:
        RECORDING.reset(token)
        metrics.stop()


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Linear interpolation between the closest ranks of sorted values (NumPy's default); 0 without values."""
    if not ordered:
        return 0.0
    position = (len(ordered) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)
