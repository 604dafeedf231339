"""Ctrl-C waits for work that an exception would leave half done for the rest of the process."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """SIGINT comes at the end of the block, or where a block begins within it, through the handler that stood
    before; once, however often it came meanwhile.

    Does nothing in threads other than the main one, where Python handles no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, _Deferring):
        handler.catch_up()
        yield
        return
    if not callable(handler):
        # the system's own: ignored, or the end of the process
        yield
        return
    deferring = _Deferring(handler)
    try:
        signal.signal(signal.SIGINT, deferring)
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        deferring.catch_up()


class _Deferring:
    """A handler of signals that keeps one for later."""

    def __init__(self, handler: Any) -> None:
        self._handler = handler
        self._came: tuple = ()

    def __call__(self, *signal_and_frame: Any) -> None:
        self._came = signal_and_frame

    def catch_up(self) -> None:
        """Lets the handler have what came."""
        came, self._came = self._came, ()
        if came:
            self._handler(*came)
