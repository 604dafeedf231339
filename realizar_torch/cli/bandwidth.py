"""The read bandwidth of a device's memory, which bounds how fast weights can be read."""

import time
from typing import Any

_BYTES, _REPETITIONS = 1 << 29, 5


def read_bandwidth(device: Any) -> float:
    """GB/s of summing half a GB of int64 on a torch.device, best of five."""
    import torch

    data = torch.ones(_BYTES // 8, dtype=torch.int64, device=device)

    def seconds() -> float:
        started = time.perf_counter()
        # the number on the host ends the clock
        data.sum().item()
        return time.perf_counter() - started

    return _BYTES / min(seconds() for _ in range(_REPETITIONS)) / 1e9
