"""Arena: the scratch memory of a fused CPU kernel, parts that all threads share and parts of each thread."""

import torch

_CACHE_LINE = 64


class Arena:
    """One allocation, every part of it on cache lines of its own; sizes in bytes.

    ``addresses`` of the shared parts; ``offsets`` of the own parts in a thread's memory, which starts at
    ``base`` + thread * ``stride``. The shared parts that ``zeroed`` names are zero at first.
    """

    def __init__(
        self, shared: dict[str, int], own: dict[str, int], threads: int, zeroed: tuple[str, ...] = ()
    ):
        self.threads = threads
        places, length = _places(shared)
        self.offsets, self.stride = _places(own)
        memory = torch.empty(length + threads * self.stride + _CACHE_LINE, dtype=torch.uint8, device="cpu")
        start = _aligned(memory.data_ptr())
        self._memory, skipped = memory, start - memory.data_ptr()
        for name in zeroed:
            memory[skipped + places[name] :][: shared[name]].zero_()
        self.addresses = {name: start + place for name, place in places.items()}
        self.base = start + length


def _places(sizes: dict[str, int]) -> tuple[dict[str, int], int]:
    places, length = {}, 0
    for name, nbytes in sizes.items():
        places[name] = length
        length += _aligned(nbytes)
    return places, length


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _CACHE_LINE) * _CACHE_LINE
