"""Threads of our own: one ``run`` is one dispatch of a kernel on persistent, idle-when-idle threads.

Numba's threading layers die in a forked child (omp), abort on concurrent callers (workqueue) or cost a
package of their own (tbb). These threads are plain Python daemon threads blocked on a lock; a kernel runs
without the GIL. Each process has its own pool, and a caller who finds it busy works alone.
"""

import ctypes
import functools
import operator
import os
import sys
import threading

import numba

from realizar_torch.cpu_kernels.jit import jit
from realizar_torch.cpu_kernels.memory import (
    cpu_pause,
    fetch_add_i64,
    load_acquire_i64,
    sched_yield,
    store_i64,
    store_release_i64,
)

# Arrivals and generation stand on cache lines of their own, so that waiting does not slow arriving.
BARRIER_BYTES = 128
_GENERATION = 64

# 20 to 80 µs of pauses: longer than the threads of a step differ, short enough when cores are oversubscribed.
_SPINS_BEFORE_YIELD = 2000


@jit(device=True)
def barrier(state, n_threads):
    """Wait until ``n_threads`` threads have called this with the same ``state``.

    ``state`` is the address of BARRIER_BYTES zeroed bytes, 8-byte aligned; it can be used again at once.
    What a thread wrote before the barrier is visible to all after it. A kernel with barriers must not raise.
    """
    if n_threads == 1:
        return
    generation = load_acquire_i64(state + _GENERATION)
    if fetch_add_i64(state, 1) == n_threads - 1:
        store_i64(state, 0)
        store_release_i64(state + _GENERATION, generation + 1)
        return
    spins = 0
    while load_acquire_i64(state + _GENERATION) == generation:
        _rest(spins)
        spins += 1


@jit(device=True)
def _rest(spins):
    if spins < _SPINS_BEFORE_YIELD:
        cpu_pause()
    else:
        sched_yield()


@jit
def _add_one(address):
    fetch_add_i64(address, 1)


@jit
def _wait_for(address, value):
    """Wait until the int64 at ``address`` is ``value``: native code, which no signal handler interrupts."""
    spins = 0
    while load_acquire_i64(address) != value:
        _rest(spins)
        spins += 1


def run(kernel, n_threads: int, *args: int | float) -> None:
    """Call ``kernel(thread, n_threads, *args)`` once on each of ``n_threads`` threads, the caller being 0.

    ``kernel`` is compiled by ``@jit`` and takes addresses and numbers; ``n_threads`` inside the kernel may
    be 1 where more were asked for (pool busy with another caller, or no thread to be had), so results must
    not depend on it. Returns when all have finished. An exception in any of them is raised here.
    """
    if n_threads <= 1 or sys.is_finalizing():
        kernel(0, 1, *args)
    else:
        _pool().run(kernel, n_threads, args)


@functools.cache
def _pool() -> "_Pool":
    return _Pool()


if hasattr(os, "register_at_fork"):
    # threads do not survive a fork: the child makes a pool of its own
    os.register_at_fork(after_in_child=_pool.cache_clear)


class _Worker:
    """A thread that waits for ``go``, makes one call, and counts itself as finished."""

    def __init__(self, number: int, finished: int):
        self.call = None
        self.error: BaseException | None = None
        self._finished = finished
        self._gate = threading.Lock()
        self._gate.acquire()
        self.go = self._gate.release
        threading.Thread(target=self._work, name=f"realizar_torch-{number}", daemon=True).start()

    def _work(self) -> None:
        while True:
            self._gate.acquire()
            try:
                self.call()
            except BaseException as error:
                self.error = error
            self.call = None
            _add_one(self._finished)


class _Pool:
    """The threads of one process, used by one caller at a time."""

    def __init__(self):
        self._free = threading.Lock()
        self._workers: list[_Worker] = []
        self._finished = ctypes.c_int64()

    def run(self, kernel, n_threads: int, args: tuple) -> None:
        if not self._free.acquire(blocking=False):
            kernel(0, 1, *args)
            return
        try:
            workers = self._prepare(kernel, n_threads, args)
            if workers:
                self._run_together(functools.partial(kernel, 0, n_threads, *args), workers)
        finally:
            self._free.release()
        if not workers:
            kernel(0, 1, *args)

    def _prepare(self, kernel, n_threads: int, args: tuple) -> list[_Worker]:
        """The workers for a run, each holding its call; none if threads cannot be started."""
        address = ctypes.addressof(self._finished)
        # compiled here: compiling is Python code, and the threads must start together
        for function, arguments in ((kernel, (0, n_threads, *args)), (_add_one, (0,)), (_wait_for, (0, 0))):
            if not function.signatures:
                function.compile(tuple(numba.typeof(argument) for argument in arguments))
        try:
            while len(self._workers) < n_threads - 1:
                self._workers.append(_Worker(len(self._workers) + 1, address))
        except RuntimeError:
            # no more threads: a limit of the system, or the interpreter is shutting down
            return []
        workers = self._workers[: n_threads - 1]
        for thread, worker in enumerate(workers, start=1):
            worker.error = None
            worker.call = functools.partial(kernel, thread, n_threads, *args)
        return workers

    def _run_together(self, own_call, workers: list[_Worker]) -> None:
        self._finished.value = 0
        wait = functools.partial(_wait_for, ctypes.addressof(self._finished), len(workers))
        started: list[bool] = []
        steps = (functools.partial(started.append, True), *(worker.go for worker in workers), own_call, wait)
        # One call into C: Python runs signal handlers between bytecodes only, so a KeyboardInterrupt cannot
        # come between waking the workers and joining them, nor leave while they use the caller's memory.
        try:
            list(map(operator.call, steps))
        finally:
            if started:
                wait()
        for worker in workers:
            if worker.error is not None:
                raise worker.error
