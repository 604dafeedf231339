"""record_dispatch: what is counted, how it is summed up, and that nothing happens outside a block."""

import contextvars
import math
import statistics
import sys
import threading
import time

import numpy as np
import pytest
import torch
from cases import random_blocks

import realizar_torch as rt
from realizar_torch.metrics import RECORDING, DispatchMetrics
from realizar_torch.ops.recording import observe


def filled(values, op="linear", backend="cpu"):
    metrics = DispatchMetrics()
    for value in values:
        metrics.record(op, backend, value)
    return metrics


def test_summary_of_known_values():
    values = [50.0, 100.0, 100.5, 700.0, 1000.0, 4000.0, 9000.0]
    summary = filled(values).summary("linear", "cpu")
    assert (summary.count, summary.minimum, summary.maximum) == (7, 50.0, 9000.0)
    assert summary.total == sum(values) and summary.mean == pytest.approx(statistics.fmean(values))
    assert summary.variance == pytest.approx(statistics.variance(values))
    for name, percent in (("p50", 50), ("p95", 95), ("p99", 99)):
        assert getattr(summary, name) == pytest.approx(np.percentile(values, percent))
    assert summary.histogram == (2, 1, 2, 1, 1)


@pytest.mark.parametrize("values", [[], [3.0]])
def test_too_few_values_give_zero_and_never_nan(values):
    metrics = filled(values)
    summary = metrics.summary()
    assert summary.variance == 0 and summary.count == len(values)
    assert summary.mean == summary.p99 == (values or [0.0])[0]
    assert not any(math.isnan(value) for value in (metrics.gpu_ratio, metrics.throughput, summary.mean))


def test_durations_are_microseconds():
    metrics = DispatchMetrics()
    observe(metrics, "linear", torch.device("cpu"), lambda: time.sleep(0.02))
    assert 20_000 <= metrics.summary().total < 2_000_000


def test_ops_are_counted_inside_the_block_only():
    layer = rt.QuantizedLinear.from_blocks(random_blocks("Q8_0", 5, 64), 64, "Q8_0")
    x = torch.randn(2, 64)
    layer(x)
    with rt.record_dispatch() as metrics:
        layer(x)
        layer(x)
        layer.dequantize()
        assert RECORDING.get() is metrics
    layer(x)
    assert RECORDING.get() is None
    assert metrics.summary("linear", "cpu").count == 2
    assert (metrics.cpu_count, metrics.gpu_count, metrics.gpu_ratio) == (3, 0, 0.0)
    assert metrics.summary("linear").minimum > 0 and metrics.throughput > 0
    assert {entry["op"] for entry in metrics.as_dict()["ops"]} == {"linear", "dequantize"}


def test_ratio_and_deferred_durations():
    metrics = filled([1.0, 2.0])
    for value in (5.0, 6.0, 7.0):
        metrics.defer("linear", "cuda", lambda value=value: value)
    assert (metrics.cpu_count, metrics.gpu_count, metrics.gpu_ratio) == (2, 3, 0.6)
    assert metrics.summary(backend="cuda").total == 18.0


def test_threads_may_record_at_once():
    with rt.record_dispatch() as metrics:

        def work():
            for _ in range(2000):
                RECORDING.get().record("linear", "cpu", 1.0)

        workers = [threading.Thread(target=contextvars.copy_context().run, args=(work,)) for _ in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert metrics.summary().count == 8000 and metrics.summary().total == 8000.0


def test_prometheus_text():
    pytest.importorskip("prometheus_client")
    text = filled([50.0, 600.0], "embedding", "cuda").prometheus()
    assert 'realizar_dispatch_seconds_count{backend="cuda",op="embedding"} 2.0' in text
    assert 'realizar_dispatch_seconds_bucket{backend="cuda",le="0.0001",op="embedding"} 1.0' in text


def test_without_the_client_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(rt.BackendUnavailableError, match=r"realizar-torch\[metrics\]"):
        DispatchMetrics().prometheus()


@pytest.mark.gpu
def test_a_gpu_op_is_timed_by_the_device():
    layer = rt.QuantizedLinear.from_blocks(random_blocks("Q8_0", 5, 64), 64, "Q8_0").to("cuda")
    with rt.record_dispatch() as metrics:
        layer(torch.randn(2, 64, device="cuda"))
    assert metrics.gpu_ratio == 1.0 and 0 < metrics.summary("linear", "cuda").total < 1e6
