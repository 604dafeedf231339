"""Rows sorted by the expert that they go to, so that one product serves all rows of an expert."""

from collections.abc import Iterator

import torch
from torch import Tensor


def groups(experts: Tensor, count: int) -> Iterator[tuple[int, Tensor]]:
    """(expert, positions in ``experts`` that hold it, in order) for each of the experts 0 to ``count``-1 that
    occurs in ``experts``, integers [P]. Reads the sizes of the groups on the host: it waits for a GPU."""
    ordered, order = experts.sort(stable=True)
    ends = torch.arange(count, device=experts.device, dtype=experts.dtype)
    first = torch.searchsorted(ordered, ends).tolist()
    last = torch.searchsorted(ordered, ends, right=True).tolist()
    for expert, (start, end) in enumerate(zip(first, last, strict=True)):
        if end > start:
            yield expert, order[start:end]
