"""Generations of one model and of two in threads at once, and the first one of a process: as alone."""

import gc
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

import pytest
import torch
from random_models import write_random_model

import realizar_torch as rt
from realizar_torch.errors import BackendUnavailableError
from realizar_torch.generation.captures import Captures

# the penalty: without it such a model says one token again and again
OPTIONS = {"max_new_tokens": 20, "eos_token_id": [], "repetition_penalty": 1.5}
# a hang guard only
PATIENCE = 120


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], scope="module")
def device(request):
    return request.param


@pytest.fixture(scope="module")
def models(device, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    paths = [write_random_model(folder / f"{arch}.gguf", arch, fmt="Q8_0") for arch in ("llama", "gemma3")]
    return [rt.load(path, device=device)[0] for path in paths]


def requests(model, length):
    """The same three times: the second one captures what the first has run."""
    ids = torch.randint(3, 250, (1, length), generator=torch.Generator().manual_seed(length))
    return [model.generate(ids.to(model.device), **OPTIONS).tolist() for _ in range(3)]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("used", [(0, 0), (0, 1)], ids=["one model", "two models"])
def test_threads_get_what_each_gets_alone(models, used):
    """F-62."""
    work = [(models[index], length) for index, length in zip(used, (5, 33), strict=True)]
    alone = [requests(*one) for one in work]
    for model in models:
        model.gpu_states.clear()
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(requests, *one) for one in work]
        assert [one.result(PATIENCE) for one in running] == alone
    states = [state for model in models for state in model.gpu_states._idle]
    for state in states:
        assert all(decoder.stats.fallback is None for decoder in state._decoders.values())
    assert bool(states) == (models[0].device.type == "cuda")


COLD = """
import json, sys, torch
import realizar_torch as rt

path, device, cuda_graph = sys.argv[1], sys.argv[2], sys.argv[2] == "cuda" or "auto"
model, _ = rt.load(path, device=device)
ids = torch.arange(20, 29, device=device)[None]
options = {"max_new_tokens": 20, "eos_token_id": [], "repetition_penalty": 1.5}
print(json.dumps([model.generate(ids, cuda_graph=kind, **options).tolist() for kind in (cuda_graph, False)]))
"""


def test_the_first_call_of_a_process_may_be_a_graph(device, tmp_path):
    """F-53: no kernel has been compiled yet, neither in this process nor before."""
    path = write_random_model(tmp_path / "m.gguf", "llama", fmt="Q8_0")
    done = subprocess.run(
        [sys.executable, "-c", COLD, str(path), device],
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    first, again = json.loads(done.stdout)
    assert first == again and len(set(first[0])) > 10


def test_one_graph_is_captured_at_a_time(monkeypatch):
    """The beginning of a capture waits for the device, which CUDA forbids during another one."""
    begun, second, overlapped = [], threading.Event(), []

    @contextmanager
    def capturing(*_, **__):
        begun.append(None)
        if len(begun) == 2:
            second.set()
        yield

    def work():
        # gives the other thread the time to begin
        overlapped.append(second.wait(0.3))

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    captures = [Captures(torch.device("cpu"), "") for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        for recording in [pool.submit(one.record, work, None) for one in captures]:
            recording.result(PATIENCE)
    # the second one began after the first one's end
    assert overlapped == [False, True] and [one.count for one in captures] == [1, 1]


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_destroyed_during_a_capture(monkeypatch, enabled):
    """A CUDA graph among it would end the capture."""
    destroyed, inside = [], []

    class Graph:
        def __init__(self):
            self.itself = self

        def __del__(self):
            destroyed.append(None)

    def work():
        Graph()
        # enough for many collections
        kept = [[] for _ in range(10_000)]
        inside.append((len(kept), len(destroyed)))

    def failing():
        raise ValueError("no such stream")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    captures, were = Captures(torch.device("cpu"), ""), gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        captures.record(work, None)
        assert gc.isenabled() == enabled
        with pytest.raises(ValueError, match="no such stream"):
            captures.record(failing, None)
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if were else gc.disable)()
    gc.collect()
    assert inside == [(10_000, 0)] and len(destroyed) == 1


def test_what_failed_is_the_cause_of_the_error():
    captures, error = Captures(torch.device("cpu"), ""), ValueError("no such stream")

    def failing():
        raise error

    with pytest.raises(BackendUnavailableError, match="ValueError: no such stream") as first:
        captures.attempt(failing, True)
    assert first.value.__cause__ is error
    # later ones know its line only: a traceback keeps the memory of what failed
    with pytest.raises(BackendUnavailableError, match="ValueError: no such stream") as again:
        captures.attempt(failing, True)
    assert again.value.__cause__ is None
