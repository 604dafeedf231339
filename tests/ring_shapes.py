"""Rings of few tiles, so that small weights fill them again and again."""

import contextlib
import dataclasses
from collections.abc import Iterator
from unittest import mock

import torch

from realizar_torch.triton_kernels import matvec as matvecs
from realizar_torch.triton_kernels.configs import RingLaunch, choose_ring


def launches_overlap() -> bool:
    """Whether kernels may be launched as in a decode graph: interpreted ones, or on an H100 and newer."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (9, 0)


@contextlib.contextmanager
def small_rings(stages: int, programs: int = 1) -> Iterator[list[RingLaunch]]:
    """Inside, at most ``programs`` programs do all tiles of a weight, ``stages`` of them on their way.

    Gives the rings that launches choose.
    """
    chosen: list[RingLaunch] = []

    def choose(*shape: object, **options: object) -> RingLaunch | None:
        ring = choose_ring(*shape, **options)
        if ring is not None:
            nbytes = ring.bytes // ring.stages * stages
            ring = dataclasses.replace(ring, stages=stages, bytes=nbytes, programs=programs)
            chosen.append(ring)
        return ring

    with mock.patch.object(matvecs, "choose_ring", choose):
        yield chosen
