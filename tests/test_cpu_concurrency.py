"""The CPU launchers under several Python threads and in forked children, after torch's own threads ran."""

import multiprocessing
import os
import threading
from functools import partial

import pytest
import torch
from cases import PACKED

pytest.importorskip("numba")

from launcher_calls import everything, first_numbers

from realizar_torch.cpu_kernels import launch

# a hang guard only
_PATIENCE = 120


def _equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_several_python_threads_get_their_own_results():
    expected = {seed: everything(seed) for seed in range(len(PACKED))}
    wrong, errors = [], []

    def call(seed: int) -> None:
        try:
            for _ in range(5):
                if not _equal(everything(seed), expected[seed]):
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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def testfirst_numbersren_compute_what_the_parent_does(method):
    """F-61: after the parent's threads, and torch's, have run."""
    expected = [first_numbers(seed) for seed in (1, 6)]
    torch.randn(512, 512) @ torch.randn(512, 512)
    with multiprocessing.get_context(method).Pool(2) as children:
        assert children.map_async(first_numbers, (1, 6)).get(_PATIENCE) == expected
    assert [first_numbers(seed) for seed in (1, 6)] == expected


def test_never_more_threads_than_torch_was_told_to_use(monkeypatch):
    """F-63."""
    told = []

    def tell(call, kernel, n_threads, *rest):
        told.append(n_threads)
        call(kernel, n_threads, *rest)

    for name in ("run", "share"):
        monkeypatch.setattr(launch.pool, name, partial(tell, getattr(launch.pool, name)))
    for n_threads in (1, 2, 3):
        torch.set_num_threads(n_threads)
        everything(0)
        assert max(told) == n_threads
        told.clear()
