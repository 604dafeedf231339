"""What the verbs that run a model share: finding and loading it, its times, the notice of a first run."""

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from realizar_torch.cli.demo_model import demo_model

EXIT_PROBLEMS, EXIT_ERROR = 1, 2
# as a shell tells of a process that SIGINT or SIGPIPE has ended
EXIT_INTERRUPTED, EXIT_UNREAD = 130, 141


@dataclass(frozen=True)
class Session:
    """A loaded model. Seconds: importing torch and the kernels' compiler, and loading the file.

    notice: what to say before kernels are compiled, None where they lie in the cache already.
    """

    path: Path
    model: Any
    tokenizer: Any
    import_seconds: float
    load_seconds: float
    notice: str | None

    def announce_compiling(self) -> None:
        """To be called before the first computation: on a first run, that one takes much longer."""
        if self.notice is not None:
            print(self.notice, file=sys.stderr, flush=True)


@contextmanager
def dying_of_interrupts() -> Iterator[None]:
    """Ctrl-C ends the process here, as the system does it. Imports need that: torch swallows a
    KeyboardInterrupt that comes while it imports numpy, and goes on without numpy."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def locate_model(reference: str | None) -> Path:
    """The path a ``--model`` value means; the demo model for None."""
    if reference is None:
        return demo_model(sys.stderr)
    from realizar_torch.checkpoint.hub import find_model

    return find_model(reference)


def open_session(args: argparse.Namespace) -> Session:
    """Loads what ``--model`` and its companions ask for."""
    path = locate_model(args.model)
    started = time.perf_counter()
    with dying_of_interrupts():
        import torch

        from realizar_torch.generation.causal_lm import load

        notice = _kernel_notice()
    imported = time.perf_counter()
    if args.threads:
        torch.set_num_threads(_sensible_threads(args.threads))
    model, tokenizer = load(
        path,
        device=args.device,
        kv_dtype=args.kv_dtype,
        max_seq_len=args.max_seq_len,
        activations=args.activations,
    )
    loaded = time.perf_counter()
    return Session(path, model, tokenizer, imported - started, loaded - imported, notice)


def _kernel_notice() -> str | None:
    """What a user should know if the first computation is going to take much longer than the next."""
    try:
        from realizar_torch.cpu_kernels.jit import cache_folder
    except ImportError:
        return None
    folder = cache_folder()
    if folder is None:
        return (
            "Compiling kernels, up to a minute at every run: the user's cache folder cannot be written "
            "(set XDG_CACHE_HOME to one that can)"
        )
    if any(folder.iterdir()):
        return None
    return "First run: compiling kernels for this machine (once, up to a minute)"


def _sensible_threads(asked: int) -> int:
    """At most one thread per usable core: threads beyond that wait for each other at every barrier."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if asked > usable:
        print(f"warning: {asked} threads on {usable} usable cores: using {usable}", file=sys.stderr)
    return min(asked, usable)
