"""The ops on devices without kernels of their own: torch ops, with one warning per device type."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor

from realizar_torch.ops import bodies, torch_kernels
from realizar_torch.ops.library import LIBRARY


@functools.cache
def kernels(device_type: str) -> bodies.Kernels:
    """Torch launchers for any device."""
    warnings.warn(
        f"no kernels for {device_type} devices: packed weights run in torch ops, many times slower",
        stacklevel=2,
    )
    return torch_kernels


def _implementation(body: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(first: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return body(kernels(first.device.type), first, *args, **kwargs)

    return run


# the key that PyTorch falls back to where a device has no implementation of its own
for _name in bodies.OPS:
    LIBRARY.impl(_name, _implementation(getattr(bodies, _name)), "CompositeExplicitAutograd")
