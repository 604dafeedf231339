"""Named byte layouts of packed weights: permutations inside each row, of the same size, with exact inverses.

``"ggml"``    the file's bytes: block after block, each with its fields in order.
``"planar"``  one plane per field: that field's bytes of all blocks of the row, planes in field order; allows
              wide aligned loads where the block size is not a multiple of 4.
"""

import torch

from realizar_torch.errors import FormatError
from realizar_torch.formats import BlockFormat, get_packed_format

LAYOUTS = ("ggml", "planar")


def check_layout(layout: str) -> None:
    """FormatError unless ``layout`` is one of ``LAYOUTS``."""
    if layout not in LAYOUTS:
        raise FormatError(f"unknown layout {layout!r}; known: {', '.join(LAYOUTS)}")


def pack(weight: torch.Tensor, fmt: str, layout: str) -> torch.Tensor:
    """Rearrange canonical bytes ``uint8 [..., row_bytes]``; for "ggml" the result is ``weight`` itself."""
    spec, blocks = _check(weight, fmt, layout)
    if layout == "ggml":
        return weight
    bytes_of_blocks = weight.unflatten(-1, (blocks, spec.block_bytes))
    planes = bytes_of_blocks.split([field.nbytes for field in spec.fields], -1)
    return torch.cat([plane.flatten(-2) for plane in planes], -1)


def unpack(weight: torch.Tensor, fmt: str, layout: str) -> torch.Tensor:
    """The inverse of ``pack``: canonical bytes from ``weight`` in ``layout``."""
    spec, blocks = _check(weight, fmt, layout)
    if layout == "ggml":
        return weight
    planes = weight.split([field.nbytes * blocks for field in spec.fields], -1)
    fields = [
        plane.unflatten(-1, (blocks, field.nbytes)) for plane, field in zip(planes, spec.fields, strict=True)
    ]
    return torch.cat(fields, -1).flatten(-2)


def _check(weight: torch.Tensor, fmt: str, layout: str) -> tuple[BlockFormat, int]:
    check_layout(layout)
    spec = get_packed_format(fmt)
    if weight.dtype != torch.uint8 or weight.ndim == 0 or weight.shape[-1] % spec.block_bytes:
        raise FormatError(
            f"{weight.dtype} of shape {tuple(weight.shape)} is not uint8 rows of whole {fmt} blocks "
            f"({spec.block_bytes} bytes each)"
        )
    return spec, weight.shape[-1] // spec.block_bytes
