"""Fused Triton kernels of a decode step against float64: gate/up, QKV of mixed formats, rotary and cache
write, attention.
"""

import math
from functools import partial

import pytest
import torch
from attention_case import ATTENTION_TOLERANCE, AttentionCase
from cases import assert_within, float_tolerance, int8_kernel_tolerance, random_activations, random_blocks
from torch.nn import functional

from realizar_torch import packing, reference
from realizar_torch.errors import FormatError

pytest.importorskip("triton")

from program_order import backwards

from realizar_torch.triton_kernels.attention import attention_scratch
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


@pytest.mark.parametrize("dim", [6, 7, 10, 33, 50])
def test_heads_of_any_size_stay_in_their_place(dim: int) -> None:
    case = AttentionCase([5, 3], torch.float32, dim=dim, capacity=8, rotary=2)
    memory, guard = torch.full((2 * 6 * dim + 32,), 777.0, device=DEVICE), 16
    out = memory[guard:-guard].view(2, 6 * dim)
    with backwards():
        case.run(out=out)
    torch.testing.assert_close(out.double(), case.expected(), rtol=0, atol=1e-5)
    assert (memory[:guard] == 777).all() and (memory[-guard:] == 777).all()


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
