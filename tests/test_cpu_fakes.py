"""Tensors that tracing makes have no memory: the launchers name them instead of reading address zero."""

import pytest
import torch
from cases import random_activations, random_blocks
from torch._subclasses import FakeTensorMode

from realizar_torch import ops
from realizar_torch.cpu_kernels import launch
from realizar_torch.errors import FormatError

WEIGHT = random_blocks("Q4_K", 4, 300)
X = random_activations(2, 300)


def _fake(x: torch.Tensor) -> torch.Tensor:
    return FakeTensorMode().from_tensor(x)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("make", [_fake, torch._to_functional_tensor], ids=["fake", "functional"])
def test_launchers_refuse_tensors_without_memory(make) -> None:
    calls = (
        lambda: launch.matmul(make(X), WEIGHT, "Q4_K", 300),
        lambda: launch.matmul(X, make(WEIGHT), "Q4_K", 300),
        lambda: launch.quantize_activations(make(X), "Q4_K"),
        lambda: launch.dequantize(make(WEIGHT), "Q4_K", 300),
        lambda: launch.embedding(make(torch.tensor([1])), WEIGHT, "Q4_K", 300),
    )
    for call in calls:
        with pytest.raises(FormatError, match=r"without memory.*realizar_torch\.ops"):
            call()


def test_wrapped_tensors_of_torch_func_are_refused() -> None:
    with pytest.raises(FormatError, match="without memory"):
        torch.func.vmap(lambda x: launch.matmul(x, WEIGHT, "Q4_K", 300))(X[None])


def test_the_ops_take_fakes() -> None:
    with FakeTensorMode() as mode:
        x, weight = mode.from_tensor(X), mode.from_tensor(WEIGHT)
        qx = ops.quantize_activations(x, "Q4_K")
        y = ops.linear(qx, weight, "Q4_K", 300)
    assert (qx.q.shape, qx.scale.shape, qx.sums.shape) == ((2, 512), (2, 16), (2, 32))
    assert (y.shape, y.dtype) == ((2, 4), torch.float32)
