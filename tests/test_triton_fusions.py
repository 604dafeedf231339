"""Fused Triton kernels of a decode step against float64: gate/up, QKV of mixed formats, rotary and cache
write, attention.
"""

import math
from functools import partial

import pytest
import torch
from cases import assert_within, float_tolerance, int8_kernel_tolerance, random_activations, random_blocks
from torch.nn import functional

from realizar_torch import packing, reference
from realizar_torch.errors import FormatError
from realizar_torch.nn.cache_rows import dequantize_rows, quantize_rows

pytest.importorskip("triton")

from realizar_torch.triton_kernels.attention import attention_scratch, decode_attention
from realizar_torch.triton_kernels.configs import AttentionLaunch
from realizar_torch.triton_kernels.gate_up import gate_up, gate_up_int8
from realizar_torch.triton_kernels.highest import highest_scratch, take_highest
from realizar_torch.triton_kernels.qkv import qkv_int8
from realizar_torch.triton_kernels.quantize import quantize_activations

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def dequantized(quantized: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return (quantized[0].double().unflatten(-1, (-1, 32)) * quantized[1].double().unsqueeze(-1)).flatten(-2)


ACTIVATIONS = {"silu": functional.silu, "gelu": functional.gelu}
ACTIVATIONS["gelu_tanh"] = partial(functional.gelu, approximate="tanh")


@pytest.mark.parametrize(
    ("fmt", "layout", "activation"),
    [
        ("Q4_K", "ggml", "silu"),
        ("Q4_K", "ggml", "gelu_tanh"),
        ("Q6_K", "planar", "silu"),
        ("Q6_K", "planar", "gelu_tanh"),
        ("Q8_0", "ggml", "silu"),
        ("Q8_0", "ggml", "gelu"),
    ],
)
def test_gate_and_up(fmt: str, layout: str, activation: str) -> None:
    weights = [random_blocks(fmt, 5, 512, seed).to(DEVICE) for seed in (1, 2)]
    gate, up = (packing.pack(w, fmt, layout) for w in weights)
    decoded = [reference.dequantize(w, fmt, 512, torch.float64) for w in weights]
    x = random_activations(2, 512).to(DEVICE) / 30

    def expect(seen: torch.Tensor, bounds: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        g, u = (seen @ d.T for d in decoded)
        active = ACTIVATIONS[activation](g)
        # the activations have slopes of at most 1.13; exp and the division cost a few ulp, erf one ulp of 1
        own = 3e-6 * (active * u).abs() + 1e-9 + (1e-7 * (g * u).abs() if activation == "gelu" else 0)
        return active * u, 1.2 * bounds[0] * u.abs() + bounds[1] * active.abs() + own

    y = gate_up(x, gate, up, fmt, 512, activation=activation, layout=layout)
    assert_within(y, *expect(x.double(), [float_tolerance(x, d) for d in decoded]))
    quantized = quantize_activations(x, 512)
    seen = dequantized(quantized)
    y = gate_up_int8(*quantized, gate, up, fmt, 512, activation=activation, layout=layout)
    assert_within(y, *expect(seen, [int8_kernel_tolerance(seen, d) for d in decoded]))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activated_and_quantized_at_once(activation: str) -> None:
    x = 2 * torch.randn(2, 70)
    exact = functional.pad(ACTIVATIONS[activation](x.double()), (0, 26))
    found = dequantized(quantize_activations(x.to(DEVICE), 96, activation=activation)).cpu()
    # half of a block's steps, of which the largest value has 127
    largest = exact.unflatten(-1, (3, 32)).abs().amax(-1).repeat_interleave(32, dim=-1)
    assert_within(found, exact, 1.0001 * largest / 254 + 1e-6)
    with pytest.raises(FormatError, match="unknown activation 'relu'"):
        quantize_activations(x.to(DEVICE), 96, activation="relu")


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


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x ``[..., D]`` float64, cos and sin ``[..., R/2]``: halves turned, written with complex numbers."""
    turn = torch.complex(cos.double(), sin.double())
    head, tail = x[..., : 2 * turn.shape[-1]], x[..., 2 * turn.shape[-1] :]
    first, second = head.chunk(2, -1)
    z = torch.complex(first, second) * turn
    return torch.cat([z.real, z.imag, tail], -1)


class AttentionCase:
    """Random caches with ``positions`` known rows per sequence, new heads, and the float64 answer."""

    def __init__(
        self, positions, dtype, *, q_heads=6, kv_heads=2, dim=32, capacity=300, rotary=24, normed=False
    ):
        batch = len(positions)
        self.scale, self.positions = 0.25, torch.tensor(positions, device=DEVICE)
        self.qkv = torch.randn(batch, (q_heads + 2 * kv_heads) * dim, device=DEVICE)
        # strided views, as layers of one allocation are
        self.store = torch.randn(batch, capacity, 2, kv_heads, dim, device=DEVICE).to(dtype)
        self.k, self.v = self.store[:, :, 0].transpose(1, 2), self.store[:, :, 1].transpose(1, 2)
        angles = 3 * torch.rand(capacity, rotary // 2, device=DEVICE)
        self.cos, self.sin = angles.cos(), angles.sin()
        self.norms = {}
        if normed:
            gains = {name: torch.rand(dim, device=DEVICE) + 0.5 for name in ("q_norm", "k_norm")}
            self.norms = gains | {"eps": 1e-6, "zero_centered": True}
        self.heads = self.qkv.double().view(batch, -1, dim).split([q_heads, kv_heads, kv_heads], 1)

        self.scales = {}

    def pack(self, dtype):
        """Both caches in an 8-bit type; k and v become what a reader sees."""
        (k, k_scales), (v, v_scales) = (quantize_rows(rows, dtype) for rows in (self.k, self.v))
        self.scales = {"k_scales": k_scales, "v_scales": v_scales}
        self.k, self.v = (dequantize_rows(*pair, torch.float64) for pair in ((k, k_scales), (v, v_scales)))
        return k, v

    def run(self, **options):
        options |= {"scale": self.scale} | self.norms
        return decode_attention(self.qkv, self.k, self.v, self.positions, self.cos, self.sin, **options)

    def new_heads(self, starts=None):
        """Rotated q and k and the new v of every sequence, float64 ``[batch, heads, D]``."""
        q, k, v = self.heads
        if self.norms:
            q, k = (
                p / (p.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + self.norms[name].double())
                for p, name in ((q, "q_norm"), (k, "k_norm"))
            )
        at = self.positions - (0 if starts is None else starts)
        return *(rotated(p, self.cos[at][:, None], self.sin[at][:, None]) for p in (q, k)), v

    def expected(self, starts=None, window=0, softcap=0.0, stored=False):
        """``stored``: the new rows as the caches hold them."""
        q, k_new, v_new = self.new_heads(starts)
        dtype, group = self.k.dtype, q.shape[1] // k_new.shape[1]
        out = torch.zeros_like(q)
        for b, position in enumerate(self.positions.tolist()):
            start = 0 if starts is None else int(starts[b])
            if window:
                start = max(start, position + 1 - window)
            if stored:
                k_new[b], v_new[b] = self.k[b, :, position], self.v[b, :, position]
            for h in range(q.shape[1]):
                keys = torch.cat(
                    [self.k[b, h // group, start:position], k_new[b, h // group, None].to(dtype)]
                )
                values = torch.cat(
                    [self.v[b, h // group, start:position], v_new[b, h // group, None].to(dtype)]
                )
                score = keys.double() @ q[b, h] * self.scale
                if softcap:
                    score = softcap * torch.tanh(score / softcap)
                out[b, h] = score.softmax(0) @ values.double()
        return out.flatten(1)


# a query and probabilities rounded to the cache's type: 2^-8 of |score| <= 4 and of |v| <= 4 for bf16
ATTENTION_TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (30, 0.0), (0, 5.0)])
@pytest.mark.parametrize("launch", [None, AttentionLaunch(2, 16, 2, 1, 1, 2)], ids=["one run", "merged runs"])
def test_decode_attention(
    dtype: torch.dtype, window: int, softcap: float, launch: AttentionLaunch | None
) -> None:
    scratch = attention_scratch(3, 6, 2, 32, 300, torch.device(DEVICE))
    for positions in ([1, 64, 299], [0, 65, 31]):
        case = AttentionCase(positions, dtype)
        expected = case.expected(window=window, softcap=softcap)
        out, int8 = case.run(window=window, softcap=softcap, scratch=scratch, quantize=True, launch=launch)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=ATTENTION_TOLERANCE[dtype])
        exact = reference.quantize_activations(out.cpu(), "Q8_0")
        assert torch.equal(int8[0].cpu(), exact.q)
        assert torch.equal(int8[1].cpu(), exact.scale) and torch.equal(int8[2].cpu(), exact.sums)
        assert (scratch[2] == 0).all()


@pytest.mark.parametrize("rotary", [16, 32])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_the_new_position_is_rotated_and_written(rotary: int, normed: bool, padded: bool) -> None:
    case = AttentionCase([3, 70, 9], torch.float32, rotary=rotary, normed=normed)
    starts = torch.tensor([2, 0, 9], device=DEVICE) if padded else None
    before = case.store.clone()
    expected = case.expected(starts)
    out, _ = case.run(starts=starts)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)
    _, k, v = case.new_heads(starts)
    for row, position in enumerate(case.positions.tolist()):
        torch.testing.assert_close(case.k[row, :, position].double(), k[row], rtol=1e-5, atol=1e-5)
        assert torch.equal(case.v[row, :, position].double(), v[row])
        before[row, position] = case.store[row, position]
    assert torch.equal(case.store, before), "another position was written"


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("launch", [None, AttentionLaunch(2, 16, 2, 1, 1, 2)], ids=["one run", "merged runs"])
def test_caches_of_8_bits(dtype: torch.dtype, launch: AttentionLaunch | None) -> None:
    case = AttentionCase([70, 0], torch.float32, q_heads=3, kv_heads=1, capacity=80)
    k, v = case.pack(dtype)
    _, k_new, v_new = case.new_heads()
    found, _ = decode_attention(
        case.qkv, k, v, case.positions, case.cos, case.sin, scale=case.scale, launch=launch, **case.scales
    )
    for row, position in enumerate(case.positions.tolist()):
        for cache, seen, scales, new in (
            (k, case.k, case.scales["k_scales"], k_new), (v, case.v, case.scales["v_scales"], v_new)
        ):  # fmt: skip
            elements, scale = quantize_rows(new[row], dtype)
            torch.testing.assert_close(scales[row, :, position], scale, rtol=1e-6, atol=0)
            stored = dequantize_rows(cache[row, :, position], scales[row, :, position], torch.float64)
            # a sum in another order may round to the neighbour
            near = dequantize_rows(elements, scale, torch.float64)
            step = scale[:, None] if dtype == torch.int8 else near.abs() / 8 + scale[:, None] / 512
            assert ((stored - near).abs() <= 1.001 * step).all() and (stored == near).double().mean() > 0.9
            seen[row, :, position] = stored
    # the new rows are those that were stored
    expected = case.expected(stored=True)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=ATTENTION_TOLERANCE[torch.bfloat16])


def test_a_position_outside_the_cache_is_not_written() -> None:
    case = AttentionCase([300, -1, 5], torch.float32)
    before = case.store.clone()
    out, _ = case.run()
    assert out[:2].isnan().all() and out[2].isfinite().all()
    assert torch.equal(case.store[:2], before[:2])


def test_attention_propagates_nan_and_names_wrong_shapes() -> None:
    case = AttentionCase([8], torch.float32, q_heads=2)
    case.k[0, 1, 3] = torch.nan
    out, _ = case.run()
    assert out[0, 32:].isnan().all() and not out[0, :32].isnan().any()
    case.qkv[0, :32] = torch.nan
    assert case.run()[0].isnan().all()
    case.positions = case.positions.float()
    with pytest.raises(FormatError, match="positions"):
        case.run()
    case.qkv = case.qkv[:, :-1]
    with pytest.raises(FormatError, match="qkv is"):
        case.run()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
def test_decode_attention_at_real_sizes(dtype: torch.dtype, dim: int) -> None:
    case = AttentionCase(
        [2998, 128], dtype, q_heads=32, kv_heads=8, dim=dim, capacity=3000, rotary=dim // 4 * 2, normed=True
    )
    # norm weights near 2 make q·k four times as large
    case.scale = 1 / (4 * math.sqrt(dim))
    expected = case.expected()
    out, _ = case.run(quantize=dim % 32 == 0)
    atol = 5e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=atol)
    again, _ = case.run(quantize=dim % 32 == 0)
    assert torch.equal(out, again)


@pytest.mark.parametrize("vocabulary", [5, 4099])
def test_highest_token(vocabulary: int) -> None:
    logits = torch.randn(7, vocabulary, device=DEVICE)
    logits[1] = -logits[1].abs() - 1
    logits[2, 4], logits[3, 1], logits[4] = math.nan, math.inf, -math.inf
    logits[5, 1] = logits[5, vocabulary - 1] = 90.0
    logits[6] = -1.0
    logits[6, 2:4] = torch.tensor([-0.0, 0.0])
    tokens, scratch = torch.full((7,), 99, device=DEVICE), highest_scratch(7, torch.device(DEVICE))
    for _ in range(2):
        take_highest(logits, tokens, scratch)
        assert tokens[:2].tolist() == logits[:2].argmax(-1).tolist()
        assert tokens[2:].tolist() == [-1, -1, -1, 1, 2]
