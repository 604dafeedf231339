"""compile_ahead: the kernels of work that is still to be done, compiled side by side."""

import contextlib
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import triton
from triton.runtime import driver

from realizar_torch.triton_kernels.launch import on_device
from realizar_torch.triton_kernels.primitives import INTERPRETED


class _Rehearsal(triton.AsyncCompileMode):
    """While active, a launch of a new kernel has it compiled and loaded, and is left out."""

    def submit(self, key: str, compile_kernel: Callable[[], Any], *others: object) -> None:
        device = torch.device("cuda", driver.active.get_current_device())

        def compile_and_load() -> Any:
            kernel = compile_kernel()
            with on_device(device):
                # its launcher is, for some versions of Triton, a C file that is compiled at the first look
                _ = kernel.run
            return kernel

        super().submit(key, compile_and_load, *others)
        # for a kernel of None, as for one that a hook refuses, Triton launches nothing

    def __exit__(self, *raised: Any) -> None:
        # what cannot be compiled fails when it is launched in earnest
        with contextlib.suppress(Exception):
            super().__exit__(*raised)


def compile_ahead(*works: Callable[[], object]) -> None:
    """Calls each of ``works`` and returns when every kernel that they launch is compiled.

    Launches of kernels that were compiled already take place, all others do not: ``works`` must put back what
    they change, and not look at what they compute. Compiling takes threads: Triton's passes and ptxas run
    without the interpreter's lock. A kernel that cannot be compiled fails when it is launched in earnest.
    Nothing is called where kernels are interpreted.
    """
    if not INTERPRETED:
        # in a context of its own an interrupt cannot leave the mode active
        contextvars.copy_context().run(_rehearse, works)


def _rehearse(works: tuple[Callable[[], object], ...]) -> None:
    with ThreadPoolExecutor() as pool, _Rehearsal(pool):
        for work in works:
            work()
