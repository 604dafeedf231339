"""Ctrl-C where it would do lasting harm: it comes, but after the work."""

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from realizar_torch.interrupts import interrupts_deferred

pytest.importorskip("numba")

import numba
from numba.core import event

from realizar_torch.cpu_kernels.jit import jit


@pytest.fixture(autouse=True)
def handler_kept() -> Iterator[None]:
    """Each test finds Python's own handler of SIGINT, and leaves it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    after = signal.signal(signal.SIGINT, before)
    assert after is signal.default_int_handler


def test_an_interrupt_comes_when_the_block_has_ended():
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts_deferred():
        signal.raise_signal(signal.SIGINT)
        done.append("inner")
    assert done == ["inner"]


def test_an_interrupt_comes_once_at_the_start_of_an_inner_block_or_the_end_of_the_outer_one():
    came, done = [], []
    signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    with interrupts_deferred():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        done.append(list(came))
        with interrupts_deferred():
            done.append(list(came))
            signal.raise_signal(signal.SIGINT)
        done.append(list(came))
    assert done == [[], [signal.SIGINT], [signal.SIGINT]]
    assert came == [signal.SIGINT, signal.SIGINT]
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_an_interrupt_after_an_error_comes_and_keeps_the_error():
    with pytest.raises(KeyboardInterrupt) as raised, interrupts_deferred():
        signal.raise_signal(signal.SIGINT)
        raise ValueError("the work failed")
    assert isinstance(raised.value.__context__, ValueError)


def test_without_an_interrupt_nothing_happens():
    with interrupts_deferred():
        pass
    with pytest.raises(ValueError, match="the work failed"), interrupts_deferred():
        raise ValueError("the work failed")


@pytest.mark.parametrize("disposition", [signal.SIG_IGN, signal.SIG_DFL])
def test_what_the_system_does_itself_is_left_to_it(disposition):
    signal.signal(signal.SIGINT, disposition)
    with interrupts_deferred():
        assert signal.getsignal(signal.SIGINT) is disposition
    assert signal.signal(signal.SIGINT, signal.default_int_handler) is disposition


def test_other_threads_leave_the_handler_alone():
    seen = []

    def work() -> None:
        with interrupts_deferred():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


_WHILE_NUMBA_IS_IMPORTED = """
import signal, sys

class Interrupting:
    def find_spec(self, name, path, target=None):
        if name == "numba.core.types":
            sys.meta_path.remove(self)
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
from realizar_torch.ops.cpu import kernels
try:
    kernels()
except KeyboardInterrupt:
    print("interrupted")
print(kernels().__name__)
"""


def test_numba_can_be_used_after_an_interrupt_of_its_import():
    done = subprocess.run(
        [sys.executable, "-W", "error:the Numba", "-c", _WHILE_NUMBA_IS_IMPORTED],
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["interrupted", "realizar_torch.cpu_kernels.launch"], done.stderr


class _Interrupting(event.Listener):
    """Presses Ctrl-C when something begins."""

    def on_start(self, event):
        signal.raise_signal(signal.SIGINT)

    def on_end(self, event):
        pass


def test_a_kernel_is_compiled_to_its_end_before_an_interrupt():
    def double(number):
        return 2 * number

    kernel = jit(double)
    with event.install_listener("numba:compile", _Interrupting()), pytest.raises(KeyboardInterrupt):
        kernel(21)
    assert list(kernel.overloads) == [(numba.int64,)]
    assert kernel(21) == 42


def test_an_interrupt_comes_between_the_functions_of_a_kernel():
    def double(number):
        return 2 * number

    inner = jit(device=True)(double)

    def quadruple(number):
        return inner(inner(number))

    kernel = jit(quadruple)
    with event.install_listener("numba:compile", _Interrupting()), pytest.raises(KeyboardInterrupt):
        kernel(21)
    assert (len(kernel.overloads), len(inner.overloads)) == (0, 0)
    assert kernel(21) == 84
