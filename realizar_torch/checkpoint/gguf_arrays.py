"""Metadata arrays of a GGUF file, decoded on access: 262k tokens cost nothing until somebody asks."""

import mmap
from array import array
from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np

from realizar_torch.checkpoint.gguf_errors import broken, shown


class StringArray(Sequence[str]):
    """An array of UTF-8 strings, left in the mapped file.

    ``starts[i]`` is the file position of the first byte of item i. A u64 byte count precedes each item, so
    item i ends 8 bytes before item i + 1; ``starts`` has one entry more than there are items.
    Reading an item that is not UTF-8 raises GGUFError.
    """

    def __init__(self, data: mmap.mmap, path: str, key: str, starts: array) -> None:
        self._data = data
        self._path = path
        self._key = key
        self._starts = starts

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self._decode(i) for i in range(len(self))[index]]
        return self._decode(range(len(self))[index])

    def __iter__(self) -> Iterator[str]:
        return map(self._decode, range(len(self)))

    def __reduce__(self) -> tuple:
        # a copy stands without the mapping
        return list, (list(self),)

    def __repr__(self) -> str:
        return f"<{len(self)} strings>"

    def _decode(self, index: int) -> str:
        raw = self._data[self._starts[index] : self._starts[index + 1] - 8]
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            where = f"metadata key {shown(self._key)}, item {index}"
            raise broken(self._path, where, f"bytes {shown(raw)} ({error.reason})", "UTF-8 text") from None


class NumberArray(Sequence[int | float | bool]):
    """An array of numbers or booleans of one ``dtype``, left in the mapped file."""

    def __init__(self, data: mmap.mmap, path: str, key: str, dtype: np.dtype, start: int, count: int) -> None:
        self.dtype = dtype
        self._data = data
        self._path = path
        self._key = key
        self._start = start
        self._count = count

    def numpy(self) -> np.ndarray:
        """All items as a new array of shape ``(len(self),)`` and dtype ``self.dtype``."""
        return self._read(0, self._count)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> int | float | bool: ...
    @overload
    def __getitem__(self, index: slice) -> list[int | float | bool]: ...
    def __getitem__(self, index: int | slice) -> int | float | bool | list[int | float | bool]:
        if isinstance(index, slice):
            return self.numpy()[index].tolist()
        position = range(self._count)[index]
        return self._read(position, 1)[0].item()

    def __iter__(self) -> Iterator[int | float | bool]:
        return iter(self.numpy().tolist())

    def __reduce__(self) -> tuple:
        return list, (list(self),)

    def __repr__(self) -> str:
        return f"<{self._count} x {self.dtype}>"

    def _read(self, first: int, count: int) -> np.ndarray:
        start = self._start + first * self.dtype.itemsize
        raw = self._data[start : start + count * self.dtype.itemsize]
        if self.dtype == np.bool_:
            if raw.strip(b"\0\1"):
                raise broken(
                    self._path, f"metadata key {shown(self._key)}", "a bool that is neither 0 nor 1", "0 or 1"
                )
        return np.frombuffer(bytearray(raw), self.dtype)
