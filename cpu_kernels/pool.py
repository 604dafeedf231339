"""Threads of our own: one ``run`` is one dispatch of a kernel on persistent, idle-when-idle threads.

Numba's threading layers die in a forked child (omp), abort on concurrent callers (workqueue) or cost a
package of their own (tbb). These threads are plain Python daemon threads blocked on a lock; a kernel runs
without the GIL. Each process has its own pool, and a caller who finds it busy works alone.
"""

import ctypes
import functools
import operator
import os
import queue
import sys
import threading

import numba

from realizar_torch.cpu_kernels.jit import jit
from realizar_torch.cpu_kernels.memory import (
    cpu_pause,
    exchange_i64,
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
def _add(address, amount):
    fetch_add_i64(address, amount)


@jit
def _put(address, value):
    store_release_i64(address, value)


@jit
def _take(address):
    """Whether the ticket at ``address`` was still there; it is gone now."""
    return exchange_i64(address, 0) != 0


@jit
def _take_back(ticket, awaited):
    if _take(ticket):
        fetch_add_i64(awaited, -1)


@jit
def _wait_for(finished, awaited):
    """Wait until both int64 are equal: native code, which no signal handler interrupts."""
    spins = 0
    while load_acquire_i64(finished) != load_acquire_i64(awaited):
        _rest(spins)
        spins += 1


@functools.cache
def _compile_own() -> None:
    one, two = (numba.int64,), (numba.int64, numba.int64)
    for function, signature in ((_add, two), (_put, two), (_take, one), (_take_back, two), (_wait_for, two)):
        function.compile(signature)


def run(kernel, n_threads: int, *args: int | float) -> None:
    """Call ``kernel(thread, n_threads, *args)`` once on each of ``n_threads`` threads, the caller being 0.

    ``kernel`` is compiled by ``@jit`` and takes addresses and numbers; ``n_threads`` inside the kernel may
    be 1 where more were asked for (pool busy with another caller, or no thread to be had), so results must
    not depend on it. Returns when all have finished. An exception in any of them is raised here.
    """
    _run(kernel, n_threads, args, False)


def share(kernel, n_threads: int, *args: int | float) -> None:
    """``run`` for kernels whose threads take tiles from a counter until none is left, without barriers.

    A thread that has not begun when the caller has finished its own call is not waited for and does not
    begin: where other threads keep the cores busy (torch's spin for a while after each of its ops) it would
    come late to find nothing to do.
    """
    _run(kernel, n_threads, args, True)


def _run(kernel, n_threads: int, args: tuple, late_ones_stay_away: bool) -> None:
    if n_threads <= 1 or sys.is_finalizing():
        kernel(0, 1, *args)
    else:
        _pool().run(kernel, n_threads, args, late_ones_stay_away)


@functools.cache
def _pool() -> "_Pool":
    return _Pool()


if hasattr(os, "register_at_fork"):
    # threads do not survive a fork: the child makes a pool of its own
    os.register_at_fork(after_in_child=_pool.cache_clear)


class _Worker:
    """A thread that waits for ``go``, makes one call if its ticket is still there, and counts as finished."""

    def __init__(self, number: int, finished: int):
        self.call = None
        self.error: BaseException | None = None
        self._finished = finished
        self._ticket = ctypes.c_int64()
        self.ticket = ctypes.addressof(self._ticket)
        self._signals: queue.SimpleQueue[None] = queue.SimpleQueue()
        # a signal too many, from a run that did not wait, finds no ticket
        self.go = functools.partial(self._signals.put, None)
        threading.Thread(target=self._work, name=f"realizar_torch-{number}", daemon=True).start()

    def _work(self) -> None:
        while True:
            self._signals.get()
            if not _take(self.ticket):
                continue
            try:
                self.call()
            except BaseException as error:
                self.error = error
            self.call = None
            _add(self._finished, 1)


class _Pool:
    """The threads of one process, used by one caller at a time."""

    def __init__(self):
        self._free = threading.Lock()
        self._workers: list[_Worker] = []
        # calls that workers have finished, and those that the caller waits for
        self._finished, self._awaited = ctypes.c_int64(), ctypes.c_int64()

    def run(self, kernel, n_threads: int, args: tuple, late_ones_stay_away: bool) -> None:
        if not self._free.acquire(blocking=False):
            kernel(0, 1, *args)
            return
        try:
            workers = self._prepare(kernel, n_threads, args)
            if workers:
                own_call = functools.partial(kernel, 0, n_threads, *args)
                self._run_together(own_call, workers, late_ones_stay_away)
        finally:
            self._free.release()
        if not workers:
            kernel(0, 1, *args)

    def _prepare(self, kernel, n_threads: int, args: tuple) -> list[_Worker]:
        """The workers for a run, each holding its call; none if threads cannot be started."""
        # compiled here: compiling is Python code, and the threads must start together
        _compile_own()
        if not kernel.overloads:
            kernel.compile(tuple(numba.typeof(argument) for argument in (0, n_threads, *args)))
        try:
            while len(self._workers) < n_threads - 1:
                number = len(self._workers) + 1
                self._workers.append(_Worker(number, ctypes.addressof(self._finished)))
        except RuntimeError:
            # no more threads: a limit of the system, or the interpreter is shutting down
            return []
        workers = self._workers[: n_threads - 1]
        for thread, worker in enumerate(workers, start=1):
            worker.error = None
            worker.call = functools.partial(kernel, thread, n_threads, *args)
        return workers

    def _run_together(self, own_call, workers: list[_Worker], late_ones_stay_away: bool) -> None:
        self._finished.value, self._awaited.value = 0, len(workers)
        finished, awaited = ctypes.addressof(self._finished), ctypes.addressof(self._awaited)
        ending = [functools.partial(_wait_for, finished, awaited)]
        if late_ones_stay_away:
            ending[:0] = [functools.partial(_take_back, worker.ticket, awaited) for worker in workers]
        started: list[bool] = []
        beginning = [functools.partial(started.append, True)]
        for worker in workers:
            beginning += functools.partial(_put, worker.ticket, 1), worker.go
        # One call into C: Python runs signal handlers between bytecodes only, so a KeyboardInterrupt cannot
        # come between waking the workers and joining them, nor leave while they use the caller's memory.
        try:
            list(map(operator.call, (*beginning, own_call, *ending)))
        finally:
            if started:
                list(map(operator.call, ending))
        for worker in workers:
            if worker.error is not None:
                raise worker.error
