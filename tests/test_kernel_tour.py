"""The tour that compute-sanitizer watches leaves no kernel out, no element unwritten, and needs no order."""

import pytest
import torch

pytest.importorskip("triton")

from kernel_tour import kernels_of_package, launches, shared, tour
from program_order import backwards
from ring_shapes import launches_overlap

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_the_tour_launches_every_kernel_and_every_element_is_written():
    with launches() as names:
        for number, written in enumerate(tour(DEVICE, [("Q5_0", "ggml")])):
            # what launchers allocate holds NaN
            assert not written.isnan().any(), number
    # before Hopper nothing is launched through a ring
    rings = {name for name in kernels_of_package() if name.endswith("_ring_kernel")}
    assert names == kernels_of_package() - (set() if launches_overlap() else rings) and len(names) > 20


@pytest.mark.skipif(DEVICE.type == "cuda", reason="compiled programs have no order to change")
def test_programs_in_another_order_write_the_same_bits():
    torch.manual_seed(3)
    forwards = [written.clone() for written in shared(DEVICE)]
    torch.manual_seed(3)
    with backwards():
        for number, written in enumerate(shared(DEVICE)):
            assert torch.equal(written, forwards[number]), number
