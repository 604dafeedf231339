"""Memory for results and scratch: kernels know addresses alone, so nothing may depend on torch's defaults."""

import torch
from torch import Tensor


def room(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Uninitialised CPU memory, whatever ``torch.set_default_dtype`` and ``set_default_device`` say."""
    return torch.empty(sizes, dtype=dtype, device="cpu")
