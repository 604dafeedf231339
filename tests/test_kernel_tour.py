"""The tour that compute-sanitizer watches leaves no kernel out, no element unwritten, and needs no order."""

import pytest
import torch

pytest.importorskip("triton")

from kernel_tour import kernels_of_package, launches, tour
from program_order import backwards

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="module")
def forwards():
    torch.manual_seed(3)
    with launches() as names:
        return names, [written.clone() for written in tour(DEVICE, [("Q5_0", "ggml")])]


def test_the_tour_launches_every_kernel_and_every_element_is_written(forwards):
    names, written = forwards
    # what launchers allocate holds NaN
    assert not any(part.isnan().any() for part in written)
    assert names == kernels_of_package() and len(names) > 20


def test_programs_in_another_order_write_the_same_bits(forwards):
    torch.manual_seed(3)
    with backwards():
        for number, written in enumerate(tour(DEVICE, [("Q5_0", "ggml")])):
            assert torch.equal(written, forwards[1][number]), number
