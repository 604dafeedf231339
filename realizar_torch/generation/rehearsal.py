"""rehearse: passes and steps ask for their kernels before the first of them runs."""

from collections.abc import Callable

import torch

from realizar_torch.ops.recording import unrecorded


@torch.no_grad()
def rehearse(*works: Callable[[], object]) -> None:
    """Compiles the kernels of all ``works``, as ``triton_kernels.ahead`` does; none of it is recorded."""
    if not works:
        return
    from realizar_torch.triton_kernels.ahead import compile_ahead

    with unrecorded():
        compile_ahead(*works)
