"""rehearse: passes and steps ask for their kernels before the first of them runs."""

from collections.abc import Callable

import torch

from realizar_torch.metrics import RECORDING


@torch.no_grad()
def rehearse(*works: Callable[[], object]) -> None:
    """Compiles the kernels of all ``works``, as ``triton_kernels.ahead`` does; none of it is recorded."""
    if not works:
        return
    from realizar_torch.triton_kernels.ahead import compile_ahead

    token = RECORDING.set(None)
    try:
        compile_ahead(*works)
    finally:
        RECORDING.reset(token)
