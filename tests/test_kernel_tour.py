"""The tour that compute-sanitizer watches leaves no kernel out, and no element unwritten."""

import pytest
import torch

pytest.importorskip("triton")

from kernel_tour import kernels_of_package, launches, tour

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_the_tour_launches_every_kernel_and_every_element_is_written():
    with launches() as names:
        for number, written in enumerate(tour(DEVICE, [("Q5_0", "ggml")])):
            # what launchers allocate holds NaN
            assert not written.isnan().any(), number
    assert names == kernels_of_package() and len(names) > 20
