"""Runs interpreted kernels from their last program to the first: a GPU keeps no order either."""

import contextlib
from collections.abc import Iterator
from unittest import mock

from triton.runtime import interpreter


@contextlib.contextmanager
def backwards() -> Iterator[None]:
    """Within the block; compiled kernels are as they are."""
    builder = interpreter.interpreter_builder
    forwards = builder.set_grid_idx

    def set_grid_idx(*index: int) -> None:
        forwards(*(size - 1 - i for size, i in zip(builder.grid_dim, index, strict=True)))

    with mock.patch.object(builder, "set_grid_idx", set_grid_idx):
        yield
