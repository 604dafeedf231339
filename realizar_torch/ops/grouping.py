"""Rows sorted by the expert that they go to, so that one product serves all rows of an expert."""

from itertools import pairwise

import torch
from torch import Tensor


def by_expert(experts: Tensor, count: int) -> tuple[Tensor, list[tuple[int, slice]]]:
    """The order that sorts ``experts``, integers [P], and where in it each expert below ``count`` lies, if it
    occurs. Reads the bounds on the host: it waits for a GPU."""
    ordered, order = experts.sort(stable=True)
    numbers = torch.arange(count + 1, device=experts.device, dtype=experts.dtype)
    bounds = torch.searchsorted(ordered, numbers).tolist()
    return order, [
        (expert, slice(*ends)) for expert, ends in enumerate(pairwise(bounds)) if ends[0] < ends[1]
    ]
