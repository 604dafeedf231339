"""Ctrl-C waits for work that an exception would leave half done for the rest of the process."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """SIGINT comes at the end of the block, through the handler that stood before it; once, however often it
    came meanwhile. Blocks may nest, and do nothing in threads other than the main one, where Python handles
    no signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):
        # the system's own: ignored, or the end of the process
        yield
        return
    came: list[tuple] = []
    try:
        signal.signal(signal.SIGINT, lambda *arguments: came.append(arguments))
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(*came[0])
