"""Kernels on caches of 8 bits against float64: interpreted in CI, with the real launch shapes on a GPU."""

import math

import pytest
import torch
from attention_case import ATTENTION_TOLERANCE, AttentionCase, rotated

from realizar_torch.nn.cache_rows import dequantize_rows, quantize_rows

pytest.importorskip("triton")

import triton
import triton.language as tl

from realizar_torch.errors import FormatError
from realizar_torch.generation.prompt_rows import Piece, rows_of
from realizar_torch.triton_kernels import prompt_attention as prompt
from realizar_torch.triton_kernels.attention import decode_attention
from realizar_torch.triton_kernels.cache_rows import halves_of_bytes, halves_of_pairs
from realizar_torch.triton_kernels.configs import AttentionLaunch, PromptAttentionLaunch
from realizar_torch.triton_kernels.prompt_heads import place_heads

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KINDS = [torch.int8, torch.float8_e4m3fn]
# queries and probabilities have fp16's 11 bits, elements are exact
TOLERANCE = ATTENTION_TOLERANCE[torch.float16]
MERGED = AttentionLaunch(2, 16, 2, 1, 1, 2)


@triton.jit
def _decode_kernel(source, whole, first, second, INT8: tl.constexpr):
    byte, pair = tl.arange(0, 256), tl.arange(0, 128)
    tl.store(whole + byte, halves_of_bytes(tl.load(source + byte), INT8))
    pairs = tl.load(source.to(tl.pointer_type(tl.int16)) + pair)
    even, odd = halves_of_pairs(pairs, INT8)
    tl.store(first + pair, even)
    tl.store(second + pair, odd)


@pytest.mark.parametrize("kind", KINDS)
def test_every_byte_becomes_the_half_that_it_stores(kind):
    source = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(torch.int8)
    whole = torch.empty(256, dtype=torch.float16, device=DEVICE)
    first, second = whole.new_empty(128), whole.new_empty(128)
    _decode_kernel[(1,)](source, whole, first, second, INT8=kind == torch.int8)
    expected = source.view(kind).half()
    # e4m3's two patterns without a number are never stored
    known = expected.isfinite()
    assert torch.equal(whole[known], expected[known]) and known.sum() >= 254
    for found, part in ((first, 0), (second, 1)):
        assert torch.equal(found[known[part::2]], expected[part::2][known[part::2]])


def check_rows(elements, scales, rows):
    """Of float64 ``rows``, as a kernel has stored them; returns what a reader sees."""
    kind = elements.dtype
    expected, expected_scales = quantize_rows(rows.float(), kind)
    torch.testing.assert_close(scales, expected_scales, rtol=1e-6, atol=0)
    near, stored = (
        dequantize_rows(*pair, torch.float64) for pair in ((expected, expected_scales), (elements, scales))
    )
    # a sum in another order may round to the neighbour
    step = scales[:, None] if kind == torch.int8 else near.abs() / 8 + scales[:, None] / 512
    assert ((stored - near).abs() <= 1.001 * step).all()
    assert (elements.view(torch.int8) == expected.view(torch.int8)).double().mean() > 0.9
    return stored


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("launch", [None, MERGED], ids=["one run", "merged runs"])
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
            stored = check_rows(cache[row, :, position], scales[row, :, position], new[row])
            seen[row, :, position] = stored
    # the new rows are those that were stored
    expected = case.expected(stored=True)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=TOLERANCE)


def packed_cache(rows, kind):
    """Elements and scales of ``rows [batch, kv_heads, capacity, D]``, and what a reader sees, float64."""
    elements, scales = quantize_rows(rows, kind)
    return elements, scales, dequantize_rows(elements, scales, torch.float64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("window", "softcap", "padded"), [(30, 0.0, True), (0, 5.0, True), (0, 0.0, False)])
def test_decode_in_windows_with_caps_and_padding_beside_poison(kind, window, softcap, padded):
    case = AttentionCase([70, 45], torch.float32, capacity=80)
    starts = torch.tensor([3, 31], device=DEVICE) if padded else None
    k, v = case.pack(kind)
    for row, position in enumerate(case.positions.tolist()):
        unused = [slice(position, None)] + ([slice(0, int(starts[row]))] if padded else [])
        for scales in case.scales.values():
            for part in unused:
                scales[row, :, part] = torch.nan
    options = {"starts": starts, "window": window, "softcap": softcap, "launch": MERGED}
    found, _ = decode_attention(
        case.qkv, k, v, case.positions, case.cos, case.sin, scale=case.scale, **options, **case.scales
    )
    for row, position in enumerate(case.positions.tolist()):
        for cache, elements, name in ((case.k, k, "k_scales"), (case.v, v, "v_scales")):
            scales = case.scales[name][row, :, position]
            cache[row, :, position] = dequantize_rows(elements[row, :, position], scales, torch.float64)
    expected = case.expected(starts, window, softcap, stored=True)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=TOLERANCE)


def wild(shape, generator):
    """Rows whose sizes differ by 2^60, of zeros, and with one huge element."""
    rows = torch.randn(shape, generator=generator)
    rows *= 2.0 ** (60 * torch.rand(shape[:-1], generator=generator) - 30)[..., None]
    rows[..., 3, :] = 0
    rows[..., 5, 1] = 2.0**40
    return rows.to(DEVICE)


@pytest.mark.parametrize("kind", KINDS)
def test_decode_of_values_of_all_sizes(kind):
    """With huge queries and tiny keys, and a query of zeros: as exact as the largest value allows."""
    generator = torch.Generator().manual_seed(1)
    case = AttentionCase([60], torch.float32, q_heads=4, kv_heads=2, capacity=64)
    v, v_scales, seen = packed_cache(wild(case.v.shape, generator), kind)
    k, k_scales, case.k = packed_cache(case.k / 2.0**20, kind)
    case.qkv[:, :32] = 0
    case.qkv[:, 32:128] *= 2.0**20
    case.qkv[:, 128:192] /= 2.0**20
    case.qkv[:, 192:] = 0
    case.heads = case.qkv.double().view(1, 8, 32).split([4, 2, 2], 1)
    found, _ = decode_attention(
        case.qkv, k, v, case.positions, case.cos, case.sin, scale=case.scale,
        k_scales=k_scales, v_scales=v_scales, launch=MERGED,
    )  # fmt: skip
    q, _, _ = case.new_heads()
    for head in range(4):
        rows = case.k[0, head // 2].clone()
        rows[60] = dequantize_rows(k[0, head // 2, 60], k_scales[0, head // 2, 60], torch.float64)
        values = seen[0, head // 2].clone()
        values[60] = 0
        shares = (rows[:61] @ q[0, head] * case.scale).softmax(0)
        expected = shares @ values[:61]
        largest = (shares[:, None] * values[:61].abs()).sum(0).max()
        mine = found[0, 32 * head : 32 * head + 32].double()
        assert (mine - expected).abs().max() <= TOLERANCE * largest


def exact_rows(q, keys, values, pieces, starts, scale, window):
    group, rows, row = q.shape[1] // keys.shape[1], [], 0
    for piece in pieces:
        for slot in range(piece.slot, piece.slot + piece.count):
            first = max(starts[piece.sequence], slot + 1 - window if window else 0)
            seen = [
                part[piece.sequence, :, first : slot + 1].repeat_interleave(group, 0)
                for part in (keys, values)
            ]
            shares = (seen[0] @ q[row].double()[..., None] * scale).softmax(1)
            rows.append((shares * seen[1]).sum(1))
            row += 1
    return torch.stack(rows)


def check_prompt(kind, pieces, starts, heads, kv_heads, dim, window, dtype, capacity):
    generator = torch.Generator().manual_seed(3)
    shape = (len(starts), kv_heads, capacity, dim)
    k, k_scales, keys = packed_cache(torch.randn(shape, generator=generator).to(DEVICE), kind)
    sizes = 2.0 ** torch.linspace(-3, 3, capacity)[:, None]
    v, v_scales, values = packed_cache((torch.randn(shape, generator=generator) * sizes).to(DEVICE), kind)
    # what nobody has written
    for piece in pieces:
        for scales in (k_scales, v_scales):
            scales[piece.sequence, :, : starts[piece.sequence]] = torch.nan
            scales[piece.sequence, :, piece.slot + piece.count :] = torch.nan
    count = sum(piece.count for piece in pieces)
    q = torch.randn(count, heads, dim, generator=generator).to(DEVICE, dtype)
    rows = rows_of(pieces, prompt.prompt_block_rows(dim, dtype.itemsize), DEVICE)
    found = prompt.prompt_attention(
        q, k, v, rows.blocks, torch.tensor(starts, device=DEVICE), torch.empty_like(q), scale=0.3,
        window=window, k_scales=k_scales, v_scales=v_scales,
    )  # fmt: skip
    expected = exact_rows(q, keys, values, pieces, starts, 0.3, window)
    # |v| < 5 times 2^3, fp16 has steps of 2^-11 in shares and queries, and the result is rounded to dtype
    tolerance = 40 * (TOLERANCE / 4 + torch.finfo(dtype).eps)
    assert (found - expected).abs().max() <= tolerance


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("window", "dim"), [(0, 24), (5, 32), (37, 32)])
def test_prompts_of_ragged_rows_in_blocks_and_windows(monkeypatch, kind, window, dim):
    if DEVICE.type == "cpu":
        shape = PromptAttentionLaunch(16, 16, 1, 4)
        monkeypatch.setattr(prompt, "choose_prompt_attention", lambda lanes, itemsize: shape)
    pieces = [Piece(2, 9, 33, 9), Piece(0, 40, 5, 2), Piece(1, 3, 1, 3)]
    check_prompt(kind, pieces, [2, 3, 9], 6, 2, dim, window, torch.float32, 64)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("window", "dim"), [(0, 128), (300, 128), (0, 64), (0, 256)])
def test_prompts_of_long_rows(kind, window, dim):
    check_prompt(
        kind, [Piece(1, 300, 500, 7), Piece(0, 0, 129)], [0, 7], 8, 2, dim, window, torch.bfloat16, 900
    )


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_write_rows_as_torch_quantizes_them(kind):
    """Rows that go nowhere write nothing; slots of two sequences, keys rotated, values as they are."""
    places = torch.tensor([[1, 4], [-1, 0], [0, 7]], dtype=torch.int32, device=DEVICE)
    angles = 3 * torch.rand(3, 12, device=DEVICE)
    qkv = torch.randn(3, (4 + 2 * 2) * 24, device=DEVICE)
    shape = (2, 2, 9, 24)
    k, v = (torch.zeros(shape, dtype=torch.int8, device=DEVICE).view(kind) for _ in range(2))
    scales = torch.full((2, *shape[:-1]), -1.0, device=DEVICE)
    q = torch.empty(3, 4, 24, device=DEVICE)
    place_heads(
        qkv, places, angles.cos(), angles.sin(), q, k, v, k_scales=scales[0], v_scales=scales[1]
    )  # fmt: skip
    heads = qkv.view(3, 8, 24)
    written = torch.zeros(2, 9, dtype=torch.bool)
    for row, (sequence, slot) in enumerate(places.tolist()):
        if sequence < 0:
            continue
        written[sequence, slot] = True
        turned = rotated(heads[row].double(), angles[row].cos(), angles[row].sin())
        for cache, own, expected in ((k, scales[0], turned[4:6]), (v, scales[1], heads[row, 6:].double())):
            check_rows(cache[sequence, :, slot], own[sequence, :, slot], expected)
    for part in scales:
        assert (part.transpose(1, 2)[~written] == -1).all() and (part.transpose(1, 2)[written] > 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_decode_at_real_sizes(kind, dim):
    case = AttentionCase(
        [8190, 128], torch.float32, q_heads=32, kv_heads=8, dim=dim, capacity=8192, rotary=dim, normed=True
    )
    case.scale = 1 / (4 * math.sqrt(dim))
    k, v = case.pack(kind)

    def run():
        options = case.scales | case.norms | {"scale": case.scale, "quantize": True}
        return decode_attention(case.qkv, k, v, case.positions, case.cos, case.sin, **options)[0]

    found = run()
    for row, position in enumerate(case.positions.tolist()):
        for cache, elements, name in ((case.k, k, "k_scales"), (case.v, v, "v_scales")):
            scales = case.scales[name][row, :, position]
            cache[row, :, position] = dequantize_rows(elements[row, :, position], scales, torch.float64)
    expected = case.expected(stored=True)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=TOLERANCE)
    assert torch.equal(run(), found)


def test_odd_heads_are_refused():
    case = AttentionCase([3], torch.float32, dim=31, rotary=30)
    k, v = case.pack(torch.int8)
    with pytest.raises(FormatError, match="heads of 31 elements"):
        decode_attention(case.qkv, k, v, case.positions, case.cos, case.sin, scale=case.scale, **case.scales)


def test_rows_at_odd_addresses_are_refused():
    case = AttentionCase([3], torch.float32)
    k, v = case.pack(torch.int8)
    wide = torch.zeros(*k.shape[:-1], k.shape[-1] + 1, dtype=torch.int8, device=k.device)
    with pytest.raises(FormatError, match="even addresses"):
        decode_attention(
            case.qkv, wide[..., 1:], v, case.positions, case.cos, case.sin, scale=case.scale, **case.scales
        )
