"""What every benchmark of GPU kernels asks first."""

import torch


def require_gpu() -> None:
    """Ends the script in one sentence where torch can use no NVIDIA GPU."""
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs an NVIDIA GPU, and torch.cuda.is_available() is False here")
