"""Fused Triton kernels of a decode step against float64: gate/up, QKV of mixed formats, rotary and cache
write, attention.
"""

import math

import pytest
import torch
from cases import assert_within, float_tolerance, int8_kernel_tolerance, random_activations, random_blocks

from realizar_torch import packing, reference
from realizar_torch.errors import FormatError

pytest.importorskip("triton")

from realizar_torch.triton_kernels.attention import attention_scratch, decode_attention
from realizar_torch.triton_kernels.configs import AttentionLaunch
from realizar_torch.triton_kernels.gate_up import gate_up, gate_up_int8
from realizar_torch.triton_kernels.qkv import qkv_int8
from realizar_torch.triton_kernels.quantize import quantize_activations
from realizar_torch.triton_kernels.rope import rope_and_store

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def dequantized(quantized: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return (quantized[0].double().unflatten(-1, (-1, 32)) * quantized[1].double().unsqueeze(-1)).flatten(-2)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("fmt", "layout"), [("Q4_K", "ggml"), ("Q6_K", "planar"), ("Q8_0", "ggml")])
def test_gate_and_up(fmt: str, layout: str, activation: str) -> None:
    weights = [random_blocks(fmt, 5, 512, seed).to(DEVICE) for seed in (1, 2)]
    gate, up = (packing.pack(w, fmt, layout) for w in weights)
    decoded = [reference.dequantize(w, fmt, 512, torch.float64) for w in weights]
    x = random_activations(2, 512).to(DEVICE) / 30

    def expect(seen: torch.Tensor, bounds: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        g, u = (seen @ d.T for d in decoded)
        if activation == "silu":
            active = torch.nn.functional.silu(g)
        else:
            active = torch.nn.functional.gelu(g, approximate="tanh")
        # both activations have slopes of at most 1.13; exp and the division cost a few ulp
        return active * u, 1.2 * bounds[0] * u.abs() + bounds[1] * active.abs() + 3e-6 * (
            active * u
        ).abs() + 1e-9

    y = gate_up(x, gate, up, fmt, 512, activation=activation, layout=layout)
    assert_within(y, *expect(x.double(), [float_tolerance(x, d) for d in decoded]))
    quantized = quantize_activations(x, 512)
    seen = dequantized(quantized)
    y = gate_up_int8(*quantized, gate, up, fmt, 512, activation=activation, layout=layout)
    assert_within(y, *expect(seen, [int8_kernel_tolerance(seen, d) for d in decoded]))


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("third", ["Q4_K", "Q6_K"])
def test_three_weights_of_different_formats_in_one_launch(third: str, batch: int) -> None:
    fmts, layouts = ("Q4_K", "Q4_K", third), ("ggml", "ggml", "planar" if third == "Q6_K" else "ggml")
    weights = [random_blocks(f, rows, 512, rows).to(DEVICE) for f, rows in zip(fmts, (9, 3, 5), strict=True)]
    decoded = torch.cat(
        [reference.dequantize(w, f, 512, torch.float64) for w, f in zip(weights, fmts, strict=True)]
    )
    packed = [packing.pack(w, f, lay) for w, f, lay in zip(weights, fmts, layouts, strict=True)]
    quantized = quantize_activations(random_activations(batch, 512).to(DEVICE), 512)
    seen = dequantized(quantized)
    for bias in (None, torch.randn(17, device=DEVICE)):
        y = qkv_int8(*quantized, packed, fmts, 512, bias, layouts=layouts)
        extra = 0 if bias is None else bias.double()
        assert_within(y, seen @ decoded.T + extra, int8_kernel_tolerance(seen, decoded) + 1e-6)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, style: str) -> torch.Tensor:
    """x ``[..., D]`` float64, cos and sin ``[..., R/2]``: the rotation written with complex numbers."""
    turn = torch.complex(cos.double(), sin.double())
    rotary = 2 * turn.shape[-1]
    head, tail = x[..., :rotary], x[..., rotary:]
    if style == "halves":
        first, second = head.chunk(2, -1)
        z = torch.complex(first, second) * turn
        return torch.cat([z.real, z.imag, tail], -1)
    z = torch.view_as_complex(head.unflatten(-1, (-1, 2)).contiguous()) * turn
    return torch.cat([torch.view_as_real(z).flatten(-2), tail], -1)


@pytest.mark.parametrize("style", ["interleaved", "halves"])
@pytest.mark.parametrize("rotary", [16, 24])
@pytest.mark.parametrize("normed", [False, True])
def test_rope_and_cache_write(style: str, rotary: int, normed: bool) -> None:
    batch, tokens, q_heads, kv_heads, dim, capacity = 2, 2, 4, 2, 24, 10
    qkv = torch.randn(batch * tokens, (q_heads + 2 * kv_heads) * dim, device=DEVICE)
    angles = 3 * torch.rand(capacity, rotary // 2, device=DEVICE)
    cos, sin = angles.cos(), angles.sin()
    # strided views, as layers of one allocation are
    store = torch.full((batch, capacity, 2, kv_heads, dim), torch.nan, device=DEVICE)
    k_cache, v_cache = store[:, :, 0].transpose(1, 2), store[:, :, 1].transpose(1, 2)
    gains = [torch.rand(dim, device=DEVICE) + 0.5 for _ in range(2)] if normed else [None, None]
    positions = torch.tensor([3, 4, 9, capacity], device=DEVICE)
    q = rope_and_store(
        qkv, positions, cos, sin, k_cache, v_cache,
        q_heads=q_heads, style=style, q_norm=gains[0], k_norm=gains[1], eps=1e-6,
    )  # fmt: skip
    heads = qkv.double().view(batch * tokens, -1, dim)
    parts = [heads[:, :q_heads], heads[:, q_heads : q_heads + kv_heads]]
    if normed:
        parts = [
            p / (p.square().mean(-1, keepdim=True) + 1e-6).sqrt() * g.double()
            for p, g in zip(parts, gains, strict=True)
        ]
    inside = positions < capacity
    at = positions.clamp(max=capacity - 1)
    expected = [rotated(p, cos[at][:, None], sin[at][:, None], style) for p in parts]
    torch.testing.assert_close(q[inside].double(), expected[0][inside], rtol=1e-5, atol=1e-5)
    written = torch.zeros(batch, capacity, dtype=torch.bool, device=DEVICE)
    for row, position in enumerate(positions.tolist()):
        if position < capacity:
            written[row // tokens, position] = True
            torch.testing.assert_close(
                k_cache[row // tokens, :, position].double(), expected[1][row], rtol=1e-5, atol=1e-5
            )
            assert torch.equal(v_cache[row // tokens, :, position].double(), heads[row, q_heads + kv_heads :])
    assert store[~written].isnan().all()


def attention_oracle(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: list[int],
    scale: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    batch, heads, dim = q.shape
    group = heads // k.shape[1]
    out = torch.zeros(batch, heads, dim, dtype=torch.float64, device=q.device)
    for b, length in enumerate(lengths):
        start = max(0, length - window) if window else 0
        for h in range(heads):
            score = k[b, h // group, start:length].double() @ q[b, h].double() * scale
            if softcap:
                score = softcap * torch.tanh(score / softcap)
            if length:
                out[b, h] = score.softmax(0) @ v[b, h // group, start:length].double()
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (30, 0.0), (0, 5.0)])
@pytest.mark.parametrize("launch", [None, AttentionLaunch(16, 1, 2, 4, 2)], ids=["one run", "merged runs"])
def test_decode_attention(
    dtype: torch.dtype, window: int, softcap: float, launch: AttentionLaunch | None
) -> None:
    batch, q_heads, kv_heads, dim, capacity = 3, 6, 2, 32, 300
    q = torch.randn(batch, q_heads, dim, device=DEVICE)
    k, v = (
        torch.randn(batch, capacity, kv_heads, dim, device=DEVICE).to(dtype).transpose(1, 2) for _ in range(2)
    )
    scratch = attention_scratch(batch, q_heads, kv_heads, dim, capacity, q.device)
    for lengths in ([1, 64, 300], [0, 65, 31]):
        out, int8 = decode_attention(
            q, k, v, torch.tensor(lengths, device=DEVICE),
            scale=0.25, window=window, softcap=softcap, scratch=scratch, quantize=True, launch=launch,
        )  # fmt: skip
        expected = attention_oracle(q, k, v, lengths, 0.25, window, softcap)
        # a query and probabilities rounded to the cache's type: 2^-8 of |score| <= 4 and of |v| <= 4 for bf16
        atol = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
        torch.testing.assert_close(out.view(batch, q_heads, dim).double(), expected, rtol=0, atol=atol)
        exact = reference.quantize_activations(out.cpu(), "Q8_0")
        assert torch.equal(int8[0].cpu(), exact.q)
        assert torch.equal(int8[1].cpu(), exact.scale) and torch.equal(int8[2].cpu(), exact.sums)
        assert (scratch[2] == 0).all()


def test_attention_propagates_nan_and_names_wrong_shapes() -> None:
    q = torch.randn(1, 2, 16, device=DEVICE)
    k = torch.randn(1, 2, 8, 16, device=DEVICE)
    v = torch.randn(1, 2, 8, 16, device=DEVICE)
    k[0, 1, 3] = torch.nan
    lengths = torch.tensor([8], device=DEVICE)
    out, _ = decode_attention(q, k, v, lengths, scale=0.25)
    assert out[0, 16:].isnan().all() and not out[0, :16].isnan().any()
    with pytest.raises(FormatError, match="q is"):
        decode_attention(q[:, :1], k, v, lengths, scale=0.25)
    with pytest.raises(FormatError, match="lengths"):
        decode_attention(q, k, v, lengths.float(), scale=0.25)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
def test_decode_attention_at_real_sizes(dtype: torch.dtype, dim: int) -> None:
    batch, q_heads, kv_heads, capacity = 2, 32, 8, 3000
    q = torch.randn(batch, q_heads, dim, device=DEVICE)
    k, v = (torch.randn(batch, kv_heads, capacity, dim, device=DEVICE).to(dtype) for _ in range(2))
    lengths = torch.tensor([2999, 129], device=DEVICE, dtype=torch.int32)
    scale = 1 / math.sqrt(dim)
    out, _ = decode_attention(q, k, v, lengths, scale=scale, quantize=True)
    expected = attention_oracle(q, k, v, [2999, 129], scale, 0, 0.0)
    atol = 5e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.view(batch, q_heads, dim).double(), expected, rtol=0, atol=atol)
    again, _ = decode_attention(q, k, v, lengths, scale=scale, quantize=True)
    assert torch.equal(out, again)
