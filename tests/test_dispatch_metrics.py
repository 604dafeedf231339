"""record_dispatch: what is counted, how it is summed up, and that nothing happens outside a block."""

import contextvars
import math
import statistics
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import random_models
import torch
from arch_fixtures import write_resized
from cases import random_blocks
from module_linears import ModuleLinears

import realizar_torch as rt
from realizar_torch.checkpoint.gguf import open_gguf
from realizar_torch.generation.captures import Captures
from realizar_torch.generation.step import decode_step
from realizar_torch.metrics import RECORDING, DispatchMetrics
from realizar_torch.models.loading import load_transformer
from realizar_torch.nn.kv_cache import KVCache
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


def counts(metrics):
    return {(entry["op"], entry["backend"]): entry["count"] for entry in metrics.as_dict()["ops"]}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def model(request, tmp_path):
    path = random_models.write_random_model(tmp_path / "m.gguf", "llama", fmt="Q8_0")
    return rt.load(path, device=request.param)[0]


def test_a_generation_is_its_passes_and_its_steps(model):
    """Twice: the second time a GPU captures and replays the pass, which is as many dispatches."""
    ids, device = torch.randint(3, 200, (1, 50)).to(model.device), model.device.type
    for _ in range(2):
        with rt.record_dispatch() as metrics:
            model.generate(ids, max_new_tokens=4, eos_token_id=[])
        # the head of the prompt's last position is an op of its own
        assert counts(metrics) == {("prefill", device): 1, ("linear", device): 1, ("decode_step", device): 3}
    with rt.record_dispatch() as metrics:
        model.generate(ids[:, :1], max_new_tokens=4, eos_token_id=[])
    assert counts(metrics) == {("decode_step", device): 4}


def test_rows_of_a_batch_are_counted_alike(model):
    batch, device = rt.BatchedGenerator(model, max_batch=2), model.device.type
    with rt.record_dispatch() as metrics:
        for length in (9, 5):
            batch.add(list(range(20, 20 + length)), max_new_tokens=4, eos_token_id=[])
        assert len(list(batch)) == 2
    found = counts(metrics)
    # on a GPU one step is issued before the last tokens are read
    steps = found.pop(("decode_step", device))
    assert found == {("prefill", device): 2} and steps == (4 if device == "cpu" else 5)


@pytest.fixture
def interpreted(monkeypatch):
    """The GPU's passes and steps on this CPU, with the products of modules, which are ops."""
    pytest.importorskip("triton")
    from realizar_torch.generation import gpu_product, gpu_step

    monkeypatch.setattr(gpu_step, "GpuLinears", ModuleLinears)
    monkeypatch.setattr(gpu_product, "MATVEC_ROWS", 10**6)
    sizes = {"LAYERS": 1, "HIDDEN": 32, "INNER": 32, "HEADS": 2, "KV_HEADS": 1, "HEAD_DIM": 16}
    for name, size in sizes.items():
        monkeypatch.setattr(random_models, name, size)


def on_cpu(path):
    return load_transformer(
        open_gguf(path), device=torch.device("cpu"), dtype=torch.float32, activations="float"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled")
def test_a_step_with_experts_is_one_dispatch(interpreted, tmp_path):
    from realizar_torch.generation.gpu_step import GpuStep

    model = on_cpu(write_resized(tmp_path, "qwen2moe", "Q8_0")[0])
    with torch.inference_mode():
        cache = KVCache(model.config, 1, 8)
        step = GpuStep(model, cache, rt.Workspace.for_model(model.config, 1))
        with rt.record_dispatch() as metrics:
            decode_step(model, torch.tensor([5]), SimpleNamespace(cache=cache, fused=step))
    assert counts(metrics) == {("decode_step", "cpu"): 1}


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled")
@pytest.mark.parametrize("rows", [(8,), (2,)], ids=["static memory", "memory of its own"])
def test_a_gpu_pass_is_one_dispatch(interpreted, tmp_path, monkeypatch, rows):
    from realizar_torch.generation import prompt_graph
    from realizar_torch.generation.gpu_prompt import GpuPrompt

    monkeypatch.setattr(prompt_graph, "ROWS", rows)
    model = on_cpu(random_models.write_random_model(tmp_path / "m.gguf", "llama", fmt="Q8_0"))
    with torch.inference_mode(), rt.record_dispatch() as metrics:
        GpuPrompt(model).run(model, torch.randint(3, 200, (1, 5)), None, KVCache(model.config, 1, 8))
    assert counts(metrics) == {("prefill", "cpu"): 1, ("linear", "cpu"): 1}


def test_a_capture_is_no_dispatch():
    layer = rt.QuantizedLinear.from_blocks(random_blocks("Q8_0", 5, 64), 64, "Q8_0")
    with rt.record_dispatch() as metrics:
        Captures(torch.device("cpu"), "").attempt(lambda: layer(torch.randn(2, 64)), "auto")
        assert RECORDING.get() is metrics
    assert counts(metrics) == {}


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
    x = torch.randn(2, 64, device="cuda")
    # compiling is no part of what is timed
    layer(x)
    with rt.record_dispatch() as metrics:
        layer(x)
    assert metrics.gpu_ratio == 1.0 and 0 < metrics.summary("linear", "cuda").total < 1e6
