"""Tensors in mapped files: views of a private mapping, whose pages can be given back to the system."""

import mmap
import stat
from pathlib import Path

import torch

from realizar_torch.formats import BlockFormat

_PLAIN_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def map_file(path: Path) -> mmap.mmap:
    """A private, copy-on-write mapping of a regular file; ValueError for anything else and for an empty one.

    OSError passes through. Asked before opening: opening a pipe would wait for a writer.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("something that is not a file")
    if status.st_size == 0:
        raise ValueError("an empty file")
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def stored_bytes(fmt: BlockFormat, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor of ``shape`` whose rows are stored as ``fmt``, padded to whole blocks."""
    *rows, columns = shape
    return fmt.row_bytes(columns) * torch.Size(rows).numel()


def view(data: mmap.mmap, fmt: BlockFormat, shape: tuple[int, ...], offset: int) -> torch.Tensor:
    """The tensor at byte ``offset``: float32, float16 or bfloat16 of ``shape``, or uint8 [..., row_bytes]."""
    *rows, columns = shape
    if fmt.packed:
        dtype, columns = torch.uint8, fmt.row_bytes(columns)
    else:
        dtype = _PLAIN_DTYPES[fmt.name]
    count = stored_bytes(fmt, shape) // dtype.itemsize
    return torch.frombuffer(data, dtype=dtype, count=count, offset=offset).view(*rows, columns)


def release(data: mmap.mmap, offset: int, nbytes: int) -> None:
    """Gives back the memory of the pages that lie wholly inside; changes made there are lost.

    A later read fetches them from the file again. Where the system cannot do it, nothing happens.
    """
    start, end = (
        -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE,
        (offset + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE,
    )
    if hasattr(mmap, "MADV_DONTNEED") and start < end:
        data.madvise(mmap.MADV_DONTNEED, start, end - start)
