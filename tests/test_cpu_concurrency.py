"""The CPU launchers under several Python threads and in forked children, after torch's own threads ran."""

import multiprocessing
import os
import threading

import pytest
import torch
from cases import PACKED, random_activations, random_blocks

pytest.importorskip("numba")

from realizar_torch.cpu_kernels import launch

# a hang guard only
_PATIENCE = 120


def _everything(seed: int) -> list[torch.Tensor]:
    """One call of every launcher, large enough to be shared among threads."""
    fmt = PACKED[seed % len(PACKED)]
    weight, x = random_blocks(fmt, 300, 1024, seed), random_activations(3, 1024, seed=seed)
    qx = launch.quantize_activations(x, fmt)
    one = launch.quantize_activations(x[:1], fmt)
    return [
        launch.matmul(x, weight, fmt, 1024),
        launch.matmul(x[:1], weight, fmt, 1024),
        launch.matmul_int8(qx, weight, fmt),
        launch.matmul_int8(one, weight, fmt),
        launch.gate_up(one, weight, fmt, weight, fmt, 1024, "silu"),
        launch.dequantize(weight, fmt, 1024),
        launch.embedding(torch.arange(0, 300, 2), weight, fmt, 1024),
    ]


def _equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_several_python_threads_get_their_own_results():
    expected = {seed: _everything(seed) for seed in range(len(PACKED))}
    wrong, errors = [], []

    def call(seed: int) -> None:
        try:
            for _ in range(5):
                if not _equal(_everything(seed), expected[seed]):
                    wrong.append(seed)
        except Exception as error:
            errors.append(error)

    callers = [threading.Thread(target=call, args=(seed,)) for seed in (0, 3, 7, 9)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(_PATIENCE)
    assert not any(caller.is_alive() for caller in callers)
    assert (wrong, errors) == ([], [])


def _child(seed: int) -> list[list[float]]:
    return [tensor.flatten()[:50].tolist() for tensor in _everything(seed)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_compute_what_the_parent_does(method):
    """F-61: after the parent's threads, and torch's, have run."""
    expected = [_child(seed) for seed in (1, 6)]
    torch.randn(512, 512) @ torch.randn(512, 512)
    with multiprocessing.get_context(method).Pool(2) as children:
        assert children.map_async(_child, (1, 6)).get(_PATIENCE) == expected
    assert [_child(seed) for seed in (1, 6)] == expected


def test_never_more_threads_than_torch_was_told_to_use(monkeypatch):
    """F-63."""
    told = []
    run = launch.pool.run
    monkeypatch.setattr(launch.pool, "run", lambda kernel, n, *rest: (told.append(n), run(kernel, n, *rest)))
    for n_threads in (1, 2, 3):
        torch.set_num_threads(n_threads)
        _everything(0)
        assert max(told) == n_threads
        told.clear()
