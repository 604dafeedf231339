"""int8 activations in groups of eight vectors, the order in which tensor-core products read them.

Block b of 32 activations of vector 8 n + c is ``q[n, b, c]``; its scale is ``scale[n, b, c]``, and the sums
of its halves are ``sums[n, b, c]``: what a warp loads at a time lies together. What stands for vectors past
the last one has no meaning.
"""

import torch

from realizar_torch.errors import FormatError

GROUP = 8
Int8Activations = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def grouped_shapes(batch: int, width: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Shapes of q, scale and sums of ``batch`` vectors of ``width`` activations (a multiple of 32)."""
    lead = (-(-batch // GROUP), width // 32, GROUP)
    return (*lead, 32), lead, (*lead, 2)


def empty_grouped(batch: int, width: int, device: torch.device) -> Int8Activations:
    """Uninitialised q int8, scale fp32 and sums fp32 for ``batch`` vectors."""
    q, scale, sums = grouped_shapes(batch, width)
    return (
        torch.empty(q, dtype=torch.int8, device=device),
        torch.empty(scale, dtype=torch.float32, device=device),
        torch.empty(sums, dtype=torch.float32, device=device),
    )


def grouped(q: torch.Tensor, scale: torch.Tensor, sums: torch.Tensor) -> Int8Activations:
    """Row-major activations (``matvec.matvec_int8`` takes those) in groups: a copy."""
    batch, width = q.shape
    result = empty_grouped(batch, width, q.device)
    for part, target in zip((q, scale, sums), result, strict=True):
        for n, rows in enumerate(part.view(batch, width // 32, *target.shape[3:]).split(GROUP)):
            target[n, :, : len(rows)] = rows.transpose(0, 1)
    return result


def check_grouped(q: torch.Tensor, scale: torch.Tensor, sums: torch.Tensor, batch: int, width: int) -> None:
    """FormatError unless they are ``batch`` vectors of ``width`` activations, grouped and aligned."""
    parts = (q, scale, sums)
    right = (
        tuple(tuple(part.shape) for part in parts) == grouped_shapes(batch, width)
        and tuple(part.dtype for part in parts) == (torch.int8, torch.float32, torch.float32)
        # loads of eight bytes
        and all(part.is_contiguous() and part.data_ptr() % 8 == 0 for part in parts)
    )
    if not right:
        found = ", ".join(f"{part.dtype} {tuple(part.shape)}" for part in parts)
        raise FormatError(
            f"grouped int8 activations are {found}; expected contiguous int8, float32 and float32 "
            f"{grouped_shapes(batch, width)} at multiples of 8 bytes, as grouped() makes them"
        )
