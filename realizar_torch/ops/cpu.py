"""The ops on CPUs: Numba kernels, or torch ops with one warning where Numba cannot be used."""

import functools
from collections.abc import Callable
from typing import Any

from realizar_torch.caller import warn_caller
from realizar_torch.interrupts import interrupts_deferred
from realizar_torch.ops import bodies, torch_kernels
from realizar_torch.ops.library import LIBRARY
from realizar_torch.ops.recording import recorded


@functools.cache
def kernels() -> bodies.Kernels:
    """The launchers in use, chosen at the first call: importing this package must not import Numba."""
    try:
        # once half imported, Numba cannot be imported any more
        with interrupts_deferred():
            from realizar_torch.cpu_kernels import launch

            reason = launch.available()
    # OSError: llvmlite's shared library is there and cannot be loaded
    except (ImportError, OSError) as error:
        reason = str(error)
    if reason is None:
        return launch
    warn_caller(
        f"the Numba kernels cannot be used ({reason}); packed weights run in torch ops, many times slower"
    )
    return torch_kernels


def _implementation(body: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return body(kernels(), *args, **kwargs)

    return run


for _name in bodies.OPS:
    LIBRARY.impl(_name, recorded(_name, _implementation(getattr(bodies, _name))), "CPU")
