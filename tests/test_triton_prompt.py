"""Kernels of the prompt pass against float64: interpreted in CI, with the real launch shapes on a GPU."""

import math

import pytest
import torch

pytest.importorskip("triton")

from realizar_torch.errors import FormatError
from realizar_torch.generation.prompt_rows import Piece, rows_of
from realizar_torch.triton_kernels import prompt_attention as attention
from realizar_torch.triton_kernels.configs import PromptAttentionLaunch
from realizar_torch.triton_kernels.gated import gated

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def exact_attention(q, keys, values, pieces, starts, scale, window):
    """Row by row in float64."""
    group = q.shape[1] // keys.shape[1]
    rows, row = [], 0
    for piece in pieces:
        for slot in range(piece.slot, piece.slot + piece.count):
            first = max(starts[piece.sequence], slot + 1 - window if window else 0)
            k, v = (
                cache[piece.sequence, :, first : slot + 1].double().repeat_interleave(group, 0)
                for cache in (keys, values)
            )
            shares = (k @ q[row].double()[..., None] * scale).softmax(1)
            rows.append((shares * v).sum(1))
            row += 1
    return torch.stack(rows)


def check_attention(pieces, starts, heads, kv_heads, dim, window, dtype, capacity):
    generator = torch.Generator().manual_seed(3)
    count = sum(piece.count for piece in pieces)
    shape = (len(starts), kv_heads, capacity, dim)
    keys, values = (torch.full(shape, math.nan, dtype=dtype, device=DEVICE) for _ in range(2))
    for piece in pieces:
        written = slice(starts[piece.sequence], piece.slot + piece.count)
        for cache in (keys, values):
            part = cache[piece.sequence, :, written]
            part.copy_(torch.randn(part.shape, generator=generator))
    q = torch.randn(count, heads, dim, generator=generator).to(DEVICE, dtype)
    block_rows = attention.prompt_block_rows(dim, dtype.itemsize)
    rows = rows_of(pieces, block_rows, DEVICE)
    begins = torch.tensor(starts, device=DEVICE)
    out = attention.prompt_attention(
        q, keys, values, rows.blocks, begins, torch.empty_like(q), scale=0.3, window=window
    )
    expected = exact_attention(q, keys, values, pieces, starts, 0.3, window)
    # |out| is at most max|v| < 5; shares and result are rounded to the dtype, sums are fp32
    tolerance = 5 * 2 * torch.finfo(dtype).eps + 2e-6 * capacity
    assert (out - expected).abs().max() <= tolerance


@pytest.mark.parametrize("window", [0, 5, 37])
@pytest.mark.parametrize("dim", [16, 24])
def test_attention_of_ragged_rows_in_blocks_and_windows(monkeypatch, window, dim):
    """Sequences that begin late, go on behind a cache, and end inside a block; many steps per block."""
    if DEVICE.type == "cpu":
        shape = PromptAttentionLaunch(16, 8, 1, 4)
        monkeypatch.setattr(attention, "choose_prompt_attention", lambda lanes, itemsize: shape)
    pieces = [Piece(2, 9, 33, 9), Piece(0, 40, 5, 2), Piece(1, 3, 1, 3)]
    check_attention(pieces, [2, 3, 9], 6, 2, dim, window, torch.float32, 64)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 100, 1000])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
def test_attention_of_long_rows(window, dtype, dim):
    pieces = [Piece(1, 300, 500, 7), Piece(0, 0, 129)]
    check_attention(pieces, [0, 7], 8, 2, dim, window, dtype, 900)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_equals_torch(activation):
    pair = 3 * torch.randn(3, 2 * 1100, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    gate, up = pair.double().chunk(2, 1)
    act = torch.nn.functional.silu(gate)
    if activation == "gelu_tanh":
        act = torch.nn.functional.gelu(gate, approximate="tanh")
    found = gated(pair, torch.empty(3, 1100, device=DEVICE), activation=activation)
    # exp, a division and two products in fp32, of numbers below 16
    assert (found - act * up).abs().max() <= 8 * 16**2 * 2**-24
    rounded = gated(pair, torch.empty(3, 1100, device=DEVICE, dtype=torch.bfloat16), activation=activation)
    assert torch.equal(rounded, found.bfloat16())


def test_gated_refuses_other_shapes():
    with pytest.raises(FormatError, match=r"expected contiguous floats \(2, 8\) and \(2, 4\)"):
        gated(torch.zeros(2, 6), torch.zeros(2, 4), activation="silu")
    with pytest.raises(FormatError, match="unknown activation"):
        gated(torch.zeros(2, 8), torch.zeros(2, 4), activation="relu")
