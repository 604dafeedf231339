"""What the verbs that run a model share: finding and loading it, its times, the notice of a first run."""

import argparse
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

EXIT_PROBLEMS, EXIT_ERROR, EXIT_INTERRUPTED = 1, 2, 130


@dataclass(frozen=True)
class Session:
    """A loaded model. Seconds: importing torch and the kernels' compiler, and loading the file.

    kernels_compiled: False when this machine's kernel cache was empty at the start.
    """

    path: Path
    model: Any
    tokenizer: Any
    import_seconds: float
    load_seconds: float
    kernels_compiled: bool

    def announce_compiling(self) -> None:
        """To be called before the first computation: on a first run, that one takes much longer."""
        if not self.kernels_compiled:
            print(
                "First run: compiling kernels for this machine (once, up to a minute)",
                file=sys.stderr,
                flush=True,
            )


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

        compiled = _kernels_are_compiled()
    imported = time.perf_counter()
    if args.threads:
        torch.set_num_threads(args.threads)
    model, tokenizer = load(
        path, device=args.device, max_seq_len=args.max_seq_len, activations=args.activations
    )
    loaded = time.perf_counter()
    return Session(path, model, tokenizer, imported - started, loaded - imported, compiled)


def _kernels_are_compiled() -> bool:
    """False when the kernel cache is empty or may not be written; True also where there is nothing to
    compile."""
    try:
        from realizar_torch.cpu_kernels.jit import cache_folder
    except ImportError:
        return True
    folder = cache_folder()
    return folder is not None and any(folder.iterdir())
