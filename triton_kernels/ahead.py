"""compile_ahead: the kernels of work that is still to be done, compiled side by side."""

import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import triton

from realizar_torch.triton_kernels.primitives import INTERPRETED


class _Rehearsal(triton.AsyncCompileMode):
    """While active, a launch of a kernel that is not compiled yet has it compiled, and is left out."""

    def submit(self, *arguments: object) -> None:
        super().submit(*arguments)
        # for a kernel of None, as for one that a hook refuses, Triton launches nothing


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
    with ThreadPoolExecutor() as pool, _Rehearsal(pool, ignore_errors=True):
        for work in works:
            work()
