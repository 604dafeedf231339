"""The thread pool of the CPU kernels: concurrent callers, barriers, errors, forks, signals, shutdown."""

import multiprocessing
import os
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest

pytest.importorskip("numba")

from realizar_torch.cpu_kernels import pool
from realizar_torch.cpu_kernels.jit import jit
from realizar_torch.cpu_kernels.memory import (
    cpu_pause,
    fetch_add_i64,
    load_acquire_i64,
    load_i64,
    store_i64,
)

# a hang guard only: every test here takes milliseconds, a cold compile included seconds
_PATIENCE = 120


@jit
def _record(thread, n_threads, calls, sizes):
    """Count the call of this thread, and note how many threads it was told of."""
    fetch_add_i64(calls + 8 * thread, 1)
    store_i64(sizes, n_threads, 8 * thread)


@jit
def _sum_tiles(thread, n_threads, counter, values, n, total):
    """Add all ``n`` values, tiles handed out by an atomic counter."""
    while True:
        tile = fetch_add_i64(counter, 1)
        if tile >= n:
            return
        fetch_add_i64(total, load_i64(values, 8 * tile))


@jit
def _fail_on(thread, n_threads, culprit):
    if thread == culprit:
        raise ZeroDivisionError


@jit
def _hold(thread, n_threads, release):
    while load_acquire_i64(release) == 0:
        cpu_pause()


@jit
def _lockstep(thread, n_threads, state, cells, rounds, wrong):
    """Every thread writes its round, and after the barrier must see the round of every other thread."""
    for step in range(rounds):
        store_i64(cells, step, 64 * thread)
        pool.barrier(state, n_threads)
        for other in range(n_threads):
            if load_i64(cells, 64 * other) != step:
                fetch_add_i64(wrong, 1)
        pool.barrier(state, n_threads)


def _zeros(count: int) -> np.ndarray:
    return np.zeros(count, np.int64)


def _sum_with(n_threads: int, values: np.ndarray, run=pool.run) -> int:
    counter, total = _zeros(1), _zeros(1)
    run(_sum_tiles, n_threads, counter.ctypes.data, values.ctypes.data, len(values), total.ctypes.data)
    return int(total[0])


@pytest.mark.parametrize("n_threads", [1, 2, 3, 8])
def test_every_thread_runs_once(n_threads):
    calls, sizes = _zeros(n_threads + 1), _zeros(n_threads + 1)
    for repetition in range(1, 4):
        pool.run(_record, n_threads, calls.ctypes.data, sizes.ctypes.data)
        assert calls.tolist() == [repetition] * n_threads + [0]
        assert sizes.tolist() == [n_threads] * n_threads + [0]


def test_threads_are_reused_and_idle():
    values = np.arange(100)
    _sum_with(3, values)
    workers = [thread for thread in threading.enumerate() if thread.name.startswith("realizar_torch-")]
    before = os.times()
    for _ in range(50):
        assert _sum_with(3, values) == 4950
    after = [thread for thread in threading.enumerate() if thread.name.startswith("realizar_torch-")]
    assert after == workers
    assert all(worker.daemon for worker in workers)
    threading.Event().wait(0.3)
    idle = os.times()
    # blocked, not spinning: 0.3 s of one spinning thread would be 0.3 s of processor time
    assert idle.user + idle.system - before.user - before.system < 0.28


@pytest.mark.parametrize("n_threads", [2, 3, 8])
def test_barrier_orders_memory_even_when_oversubscribed(n_threads):
    state, cells, wrong = _zeros(pool.BARRIER_BYTES // 8), _zeros(8 * n_threads), _zeros(1)
    for _ in range(2):
        pool.run(_lockstep, n_threads, state.ctypes.data, cells.ctypes.data, 100, wrong.ctypes.data)
    assert wrong[0] == 0
    assert set(cells[::8].tolist()) == {99}


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_an_exception_in_any_thread_reaches_the_caller(culprit):
    with pytest.raises(ZeroDivisionError):
        pool.run(_fail_on, 3, culprit)
    pool.run(_fail_on, 3, 99)
    assert _sum_with(3, np.arange(100)) == 4950


def test_an_exception_of_the_caller_leaves_shared_work_in_order():
    for _ in range(20):
        with pytest.raises(ZeroDivisionError):
            pool.share(_fail_on, 3, 0)
    assert _sum_with(3, np.arange(100), pool.share) == 4950


def test_shared_work_is_complete_whoever_begins_in_time():
    values = np.arange(100)
    for _ in range(500):
        assert _sum_with(3, values, pool.share) == 4950


def test_shared_work_does_not_wait_for_threads_that_have_not_begun(monkeypatch):
    calls, sizes = _zeros(4), _zeros(4)
    pool.run(_record, 3, calls.ctypes.data, sizes.ctypes.data)
    workers = pool._pool()._workers[:2]
    wake = [worker.go for worker in workers]
    with monkeypatch.context() as asleep:
        for worker in workers:
            asleep.setattr(worker, "go", int)
        for _ in range(3):
            pool.share(_record, 3, calls.ctypes.data, sizes.ctypes.data)
    assert calls.tolist() == [4, 1, 1, 0]
    # late signals find nothing to do
    for signal in wake * 2:
        signal()
    pool.run(_record, 3, calls.ctypes.data, sizes.ctypes.data)
    assert calls.tolist() == [5, 2, 2, 0]


def test_a_second_caller_works_alone_while_the_pool_is_busy():
    release, calls, sizes = _zeros(1), _zeros(4), _zeros(4)
    holder = threading.Thread(target=pool.run, args=(_hold, 2, release.ctypes.data))
    pool.run(_record, 2, calls.ctypes.data, sizes.ctypes.data)
    holder.start()
    try:
        while sizes[0] != 1:
            pool.run(_record, 2, calls.ctypes.data, sizes.ctypes.data)
        assert _sum_with(2, np.arange(100)) == 4950
    finally:
        release[0] = 1
        holder.join(_PATIENCE)
    assert not holder.is_alive()
    pool.run(_record, 2, calls.ctypes.data, sizes.ctypes.data)
    assert sizes.tolist() == [2, 2, 0, 0]


def test_many_callers_at_once_get_their_own_results():
    expected = {seed: np.random.default_rng(seed).integers(0, 1000, 200) for seed in range(8)}
    wrong = []

    def call(seed: int) -> None:
        for _ in range(100):
            if _sum_with(2, expected[seed]) != expected[seed].sum():
                wrong.append(seed)

    callers = [threading.Thread(target=call, args=(seed,)) for seed in expected]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(_PATIENCE)
    assert not any(caller.is_alive() for caller in callers)
    assert wrong == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_forked_child_computes_and_the_parent_goes_on():
    values = np.arange(1000)
    assert _sum_with(2, values) == 499500
    child = os.fork()
    if child == 0:
        # no pytest in the child: report by exit status only
        os._exit(0 if _sum_with(2, values) == 499500 and _sum_with(1, values) == 499500 else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert _sum_with(2, values) == 499500


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_multiprocessing_children_compute():
    values = [np.arange(n) for n in range(1, 9)]
    _sum_with(2, values[0])
    with multiprocessing.get_context("fork").Pool(2) as children:
        results = children.starmap_async(_sum_with, [(2, v) for v in values]).get(_PATIENCE)
    assert results == [int(v.sum()) for v in values]


def _python(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=_PATIENCE
    )


_LONG_KERNEL = """
    import os, signal, sys, threading, time
    import numpy as np
    from realizar_torch.cpu_kernels import pool
    from realizar_torch.cpu_kernels.jit import jit
    from realizar_torch.cpu_kernels.memory import cpu_pause, fetch_add_i64

    @jit
    def long(thread, n_threads, n, finished):
        for i in range(n * (1 + thread)):
            cpu_pause()
        fetch_add_i64(finished, 1)

    finished = np.zeros(1, np.int64)
    pool.run(long, 2, 1, finished.ctypes.data)
    start = time.perf_counter()
    long(0, 1, 1_000_000, finished.ctypes.data)
    tenth = int(1_000_000 * 0.1 / (time.perf_counter() - start))
    finished[0] = 0
"""


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
@pytest.mark.parametrize("run", ["run", "share"])
def test_an_interrupt_waits_for_every_thread(run):
    result = _python(
        _LONG_KERNEL
        + f"    run = pool.{run}"
        + """
    # a job in the background inherits that interrupts are ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.03, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        run(long, 2, tenth, finished.ctypes.data)
        time.sleep(1)
    except KeyboardInterrupt:
        # thread 1 takes twice as long as the caller's own part
        print("interrupted", finished[0])
    pool.run(long, 2, 1, finished.ctypes.data)
    print("again", finished[0])
    """
    )
    assert result.stdout.split() == ["interrupted", "2", "again", "4"], result.stderr
    assert result.returncode == 0


def test_the_interpreter_ends_with_idle_and_with_busy_threads():
    idle = _python(_LONG_KERNEL)
    assert (idle.returncode, idle.stderr) == (0, "")
    busy = _python(
        _LONG_KERNEL
        + """
    threading.Thread(target=pool.run, args=(long, 2, 10**12, finished.ctypes.data), daemon=True).start()
    time.sleep(0.1)
    """
    )
    assert (busy.returncode, busy.stderr) == (0, "")


def test_an_exit_handler_may_still_use_threads():
    result = _python(
        _LONG_KERNEL
        + """
    import atexit
    atexit.register(lambda: print(finished[0]))
    atexit.register(pool.run, long, 2, 1, finished.ctypes.data)
    """
    )
    assert (result.returncode, result.stdout) == (0, "2\n"), result.stderr


def test_no_thread_is_waited_for_once_the_interpreter_shuts_down(monkeypatch):
    calls, sizes = _zeros(4), _zeros(4)
    monkeypatch.setattr(sys, "is_finalizing", lambda: True)
    pool.run(_record, 3, calls.ctypes.data, sizes.ctypes.data)
    assert sizes.tolist() == [1, 0, 0, 0]


def test_without_more_threads_the_caller_works_alone(monkeypatch):
    calls, sizes = _zeros(64), _zeros(64)

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    pool.run(_record, 60, calls.ctypes.data, sizes.ctypes.data)
    assert sizes.tolist() == [1] + [0] * 63
