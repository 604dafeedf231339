"""Norms and decode attention of the CPU kernels against torch in float64."""

import pytest
import torch
from torch.nn import functional

pytest.importorskip("numba")

from realizar_torch.cpu_kernels import launch, launch_dense
from realizar_torch.errors import FormatError


@pytest.fixture(autouse=True)
def shared_work(monkeypatch):
    """Small cases, too, are shared among threads."""
    monkeypatch.setattr(launch, "SERIAL_WORK", 0)


@pytest.mark.parametrize("width", [1, 3, 17, 64, 96, 768, 1025])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_norms_equal_float64(width, count):
    x, weight, bias = 3 + 2 * torch.randn(count, width), torch.randn(width), torch.randn(width)
    double = (x.double(), (width,), weight.double())
    expected = functional.rms_norm(*double, eps=1e-6)
    y = launch_dense.rms_norm(x, weight, 1e-6)
    # a few roundings of the statistics and of each factor
    torch.testing.assert_close(y.double(), expected, rtol=1e-6, atol=1e-7)
    for b in (bias, None):
        expected = functional.layer_norm(*double, None if b is None else b.double(), 1e-5)
        y = launch_dense.layer_norm(x, weight, b, 1e-5)
        # x - mean cancels: one rounding of |x| over the deviation
        torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-4 if width == 1 else 1e-5)


def test_norm_statistics_do_not_overflow_or_cancel():
    """F-18 and F-19: no padded lane in the variance; a small spread on a large mean; large values."""
    x = (5 + 0.01 * torch.arange(768.0)).view(1, -1)
    one = torch.ones(768)
    expected = functional.layer_norm(x.double(), (768,), eps=1e-5)
    torch.testing.assert_close(
        launch_dense.layer_norm(x, one, None, 1e-5).double(), expected, rtol=0, atol=2e-6
    )
    large = torch.full((1, 2048), 8000.0) * torch.tensor([1.0, -1.0]).repeat(1024)
    y = launch_dense.rms_norm(large, torch.ones(2048), 1e-6)
    torch.testing.assert_close(y, large.sign(), rtol=1e-6, atol=0)


def _oracle(q, keys, values, starts, ends, scale, window=None, softcap=None):
    q, keys, values = q.double(), keys.double(), values.double()
    group, outputs = q.shape[1] // keys.shape[1], []
    for b in range(q.shape[0]):
        start, end = int(starts[b]), int(ends[b])
        start = start if window is None else max(start, end - window)
        k, v = (t[b, :, start:end].repeat_interleave(group, 0) for t in (keys, values))
        scores = scale * torch.einsum("hd,htd->ht", q[b], k)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        outputs.append(torch.einsum("ht,htd->hd", scores.softmax(-1), v))
    return torch.stack(outputs)


@pytest.mark.parametrize("heads", [(1, 1), (9, 3), (4, 1), (8, 8)], ids=str)
@pytest.mark.parametrize("head_dim", [2, 20, 64, 256])
@pytest.mark.parametrize(
    "options", [{}, {"window": 7}, {"softcap": 3.0}, {"window": 1, "softcap": 30.0}], ids=str
)
def test_decode_attention_equals_float64(heads, head_dim, options):
    n_heads, kv_heads = heads
    q = 2 * torch.randn(3, n_heads, head_dim)
    keys, values = torch.randn(2, 3, kv_heads, 40, head_dim)
    starts, ends = torch.tensor([0, 5, 39]), torch.tensor([33, 6, 40])
    for b in range(3):
        # rows outside are never read
        for cache in (keys, values):
            cache[b, :, : starts[b]] = torch.nan
            cache[b, :, ends[b] :] = torch.nan
    y = launch_dense.decode_attention(q, keys, values, starts, ends, head_dim**-0.5, **options)
    expected = _oracle(q, keys, values, starts, ends, head_dim**-0.5, **options)
    # scores up to about 10 with relative errors of head_dim * 2^-24; values of about 1
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=2e-5)


def test_decode_attention_does_not_depend_on_threads_or_neighbours():
    q, (keys, values) = torch.randn(4, 6, 64), torch.randn(2, 4, 2, 100, 64)
    starts, ends = torch.tensor([0, 10, 3, 0]), torch.tensor([100, 90, 4, 57])
    before, results = torch.get_num_threads(), []
    try:
        for n_threads in (1, 2, 5):
            torch.set_num_threads(n_threads)
            results.append(launch_dense.decode_attention(q, keys, values, starts, ends, 0.125))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    alone = launch_dense.decode_attention(
        q[1:2], keys[1:2].clone(), values[1:2].clone(), starts[1:2], ends[1:2], 0.125
    )
    assert torch.equal(alone[0], results[0][1])


def test_wrong_arguments_are_refused():
    q, (keys, values) = torch.randn(2, 4, 8), torch.randn(2, 2, 2, 16, 8)
    starts, ends = torch.tensor([0, 1]), torch.tensor([3, 16])
    attend = launch_dense.decode_attention
    with pytest.raises(FormatError, match="4 heads, expected a multiple of the 3"):
        attend(q, torch.randn(2, 3, 16, 8), torch.randn(2, 3, 16, 8), starts, ends, 1.0)
    for wrong_starts, wrong_ends in (((0, 1), (3, 17)), ((3, 1), (3, 16)), ((-1, 1), (3, 16))):
        with pytest.raises(FormatError, match="expected 0 <= start < end <= 16"):
            attend(q, keys, values, torch.tensor(wrong_starts), torch.tensor(wrong_ends), 1.0)
    with pytest.raises(FormatError, match="window is 0"):
        attend(q, keys, values, starts, ends, 1.0, window=0)
    with pytest.raises(FormatError, match="values has shape"):
        attend(q, keys, values[..., :7], starts, ends, 1.0)
    with pytest.raises(FormatError, match="weight has shape"):
        launch_dense.rms_norm(torch.randn(2, 8), torch.ones(7), 1e-6)
