"""The ops on devices without kernels of their own: torch ops, with one warning per device type."""

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from realizar_torch.caller import warn_caller
from realizar_torch.ops import bodies, torch_kernels
from realizar_torch.ops.library import LIBRARY


@functools.cache
def _warn(device_type: str) -> None:
    warn_caller(f"no kernels for {device_type} devices: packed weights run in torch ops, many times slower")


def _implementation(body: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        result = body(torch_kernels, *args, **kwargs)
        # only now is it known that all arguments are on one device
        _warn((result if isinstance(result, Tensor) else result[0]).device.type)
        return result

    return run


# the key that PyTorch falls back to where a device has no implementation of its own
for _name in bodies.OPS:
    LIBRARY.impl(_name, _implementation(getattr(bodies, _name)), "CompositeExplicitAutograd")
