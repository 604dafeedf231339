"""RMSNorm and LayerNorm against torch's, in every dtype."""

import pytest
import torch
from cases import random_activations
from torch import nn

from realizar_torch.nn.norm import LayerNorm, RMSNorm


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_norms_equal_torch_in_float64(kind: type[RMSNorm], dtype: torch.dtype) -> None:
    norm = kind(770, 1e-5)
    norm.weight.data.normal_()
    dense = nn.RMSNorm(770, 1e-5) if kind is RMSNorm else nn.LayerNorm(770, 1e-5)
    dense.load_state_dict(norm.state_dict())
    x = random_activations(2, 3, 770, dtype=dtype)
    y = norm(x)
    assert y.dtype == dtype
    epsilon = max(torch.finfo(dtype).eps, 1e-6)
    torch.testing.assert_close(y.double(), dense.double()(x.double()), rtol=epsilon, atol=epsilon)


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_fp16_rows_whose_squares_overflow(kind: type[RMSNorm]) -> None:
    x = torch.full((2, 2048), 8000.0, dtype=torch.float16)
    x[:, ::2] *= -1
    norm = kind(2048)
    norm.weight.data.normal_()
    torch.testing.assert_close(norm(x).float(), norm.weight * x.sign().float(), rtol=2**-10, atol=0)


def test_zero_centered_norm_adds_one_to_the_stored_weight() -> None:
    norm, plain = RMSNorm(16, zero_centered=True, dtype=torch.bfloat16), RMSNorm(16)
    norm.weight.data.fill_(2**-10)
    plain.weight.data.fill_(1 + 2**-10)
    x = torch.randn(3, 16)
    assert torch.equal(norm(x), plain(x))
    assert not torch.equal(RMSNorm(16)(x), plain(x))
