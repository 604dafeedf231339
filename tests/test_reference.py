"""The oracle: bit-exact against the gguf package, exact on the probe blocks; the int8 rule by hand."""

import hashlib

import gguf
import numpy as np
import pytest
import torch
from cases import (
    COLUMNS,
    PACKED,
    PROBES,
    assert_within,
    int8_tolerance,
    probe_vector,
    random_activations,
    random_blocks,
)

from realizar_torch import reference
from realizar_torch.errors import FormatError
from realizar_torch.formats import FORMATS, get_format

PLAIN = [name for name in FORMATS if name not in PACKED]


def _gguf_decode(blocks: torch.Tensor, fmt: str) -> torch.Tensor:
    kind = gguf.GGMLQuantizationType[fmt]
    values = gguf.quants.dequantize(blocks.numpy(), kind)
    return torch.from_numpy(np.ascontiguousarray(values, np.float32))


def _assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype == torch.float32
    assert torch.equal(actual.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("fmt", PACKED)
def test_decode_equals_gguf_bit_for_bit(fmt: str) -> None:
    blocks = random_blocks(fmt, 37, 5 * get_format(fmt).block_size)
    _assert_same_bits(reference.dequantize(blocks, fmt), _gguf_decode(blocks, fmt))


@pytest.mark.parametrize("fmt", FORMATS)
def test_decode_of_any_bytes_equals_gguf(fmt: str) -> None:
    """Every byte random: scales may be subnormal, infinite or NaN. NaNs need only agree on where they are."""
    spec = get_format(fmt)
    data = np.random.default_rng(5).integers(0, 256, (2000, 3 * spec.block_bytes), dtype=np.uint8)
    blocks = torch.from_numpy(data)
    with np.errstate(all="ignore"):
        expected = _gguf_decode(blocks, fmt)
    actual = reference.dequantize(blocks, fmt)
    nan = expected.isnan()
    assert torch.equal(actual.isnan(), nan)
    _assert_same_bits(actual.masked_fill(nan, 0), expected.masked_fill(nan, 0))


@pytest.mark.parametrize("fmt", PACKED)
def test_probe_blocks_decode_exactly(fmt: str) -> None:
    probe = PROBES[fmt]
    values = reference.dequantize(probe.rows(), fmt)[0]
    assert hashlib.sha1(values.numpy().astype("<f4").tobytes()).hexdigest()[:12] == probe.sha1
    assert values.sum().item() == probe.total
    assert (values @ probe_vector(len(values))).item() == probe.dot
    assert {i: values[i].item() for i in probe.samples} == dict(probe.samples)


def test_one_high_bit_of_q5_k_moves_one_weight_by_sixteen() -> None:
    spec = get_format("Q5_K")
    for byte in (0, 13, 31):
        for bit in range(8):
            block = bytearray(spec.block_bytes)
            block[spec.offset("d") : spec.offset("d") + 2] = np.float16(1).tobytes()
            # six-bit scales 1 for all eight sub-blocks, minima 0
            scales = spec.offset("scales")
            block[scales : scales + 4] = block[scales + 8 : scales + 12] = bytes([1] * 4)
            block[spec.offset("qh") + byte] = 1 << bit
            values = reference.dequantize(torch.frombuffer(block, dtype=torch.uint8), "Q5_K")
            assert {int(i): values[i].item() for i in values.nonzero()[:, 0]} == {32 * bit + byte: 16.0}


@pytest.mark.parametrize("fmt", ["Q4_0", "Q5_0", "Q6_K"])
def test_every_nibble_pair(fmt: str) -> None:
    """All 256 byte values in the quants: catches unsigned wrap-around and sign extension."""
    spec = get_format(fmt)
    quants = spec.fields[-1] if fmt != "Q6_K" else spec.fields[0]
    blocks = random_blocks(fmt, -(-256 // quants.count), spec.block_size)
    start = spec.offset(quants.name)
    blocks[:, start : start + quants.count] = torch.arange(256).to(torch.uint8).view(-1, quants.count)
    _assert_same_bits(reference.dequantize(blocks, fmt), _gguf_decode(blocks, fmt))


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("fmt", ["Q5_0", "Q4_K"])
def test_padding_columns_are_cut_off(fmt: str, columns: int) -> None:
    blocks = random_blocks(fmt, 3, columns)
    values = reference.dequantize(blocks, fmt, columns)
    assert values.shape == (3, columns)
    _assert_same_bits(values, _gguf_decode(blocks, fmt)[:, :columns].contiguous())


@pytest.mark.parametrize("fmt", FORMATS)
def test_leading_dimensions_views_and_unaligned_bytes(fmt: str) -> None:
    spec = get_format(fmt)
    row = 2 * spec.block_bytes
    storage = torch.from_numpy(np.random.default_rng(1).integers(0, 100, 1 + 12 * row, dtype=np.uint8))
    unaligned = storage[1:].view(2, 3, 2, row)
    expected = _gguf_decode(unaligned.clone().view(12, row), fmt)
    _assert_same_bits(reference.dequantize(unaligned, fmt), expected.view(2, 3, 2, -1))
    strided = unaligned[:, ::2].transpose(0, 1)
    _assert_same_bits(
        reference.dequantize(strided, fmt), expected.view(2, 3, 2, -1)[:, ::2].transpose(0, 1).contiguous()
    )
    assert reference.dequantize(unaligned[:0], fmt).shape == (0, 3, 2, 2 * spec.block_size)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_decode_rounds_once_from_float32(dtype: torch.dtype) -> None:
    blocks = random_blocks("Q5_K", 4, 512)
    assert torch.equal(
        reference.dequantize(blocks, "Q5_K", dtype=dtype), _gguf_decode(blocks, "Q5_K").to(dtype)
    )


@pytest.mark.parametrize(
    ("blocks", "fmt", "columns", "message"),
    [
        (torch.zeros(2, 288), "Q4_K", None, "torch.float32, expected torch.uint8"),
        (torch.zeros(2, 145, dtype=torch.uint8), "Q4_K", None, r"\(2, 145\) does not end in whole Q4_K"),
        (torch.zeros((), dtype=torch.uint8), "F32", None, "does not end in whole F32"),
        (torch.zeros(2, 288, dtype=torch.uint8), "Q4_K", 256, "hold 512 Q4_K weights, but in_features=256"),
        (torch.zeros(2, 144, dtype=torch.uint8), "Q4_K", 257, "hold 256 Q4_K weights, but in_features=257"),
        (torch.zeros(2, 144, dtype=torch.uint8), "Q9_K", None, "unknown format 'Q9_K'"),
    ],
)
def test_wrong_blocks_are_refused(blocks: torch.Tensor, fmt: str, columns: int, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        reference.dequantize(blocks, fmt, columns)


def test_fractions_are_not_cut_to_integers() -> None:
    with pytest.raises(FormatError, match=r"output dtype is torch\.int8, expected a float type"):
        reference.dequantize(random_blocks("Q4_K", 1, 256), "Q4_K", dtype=torch.int8)


def test_linear_is_decode_then_matmul() -> None:
    weight, bias = random_blocks("Q3_K", 5, 300), torch.randn(5)
    x = random_activations(2, 4, 300, dtype=torch.float64)
    decoded = _gguf_decode(weight, "Q3_K")[:, :300].double()
    exact = x @ decoded.T + bias.double()
    torch.testing.assert_close(reference.linear(x, weight, "Q3_K", 300, bias), exact, rtol=1e-13, atol=1e-12)
    half = reference.linear(x.half(), weight, "Q3_K", 300)
    assert half.dtype == torch.float16
    expected = (x.half().float() @ decoded.float().T).half()
    torch.testing.assert_close(half, expected, rtol=2**-9, atol=0.1)


def _quantize_by_hand(row: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The rule of int8 activations, one float32 operation at a time."""
    one, top = np.float32(1), np.float32(127)
    q, scales, sums = [], [], []
    for block in row.astype(np.float32).reshape(-1, 32):
        scale = np.abs(block).max() / top
        inverse = one / scale if scale > 0 else np.float32(0)
        values = [int(np.clip(np.rint(v * inverse), -127, 127)) for v in block]
        q += values
        scales.append(scale)
        sums += [scale * np.float32(sum(values[:16])), scale * np.float32(sum(values[16:]))]
    return np.array(q, np.int8), np.array(scales, np.float32), np.array(sums, np.float32)


@pytest.mark.parametrize(("fmt", "columns"), [("Q8_0", 64), ("Q8_0", 77), ("Q6_K", 512), ("Q6_K", 300)])
def test_activation_quantization_by_hand(fmt: str, columns: int) -> None:
    x = random_activations(2, 3, columns) * torch.logspace(-6, 6, 3).view(3, 1)
    x[1, 2, :32] = 0
    quantized = reference.quantize_activations(x, fmt)
    padded = get_format(fmt).blocks(columns) * get_format(fmt).block_size
    assert quantized.in_features == columns
    assert quantized.q.shape == (2, 3, padded)
    for index in np.ndindex(2, 3):
        row = np.zeros(padded, np.float32)
        row[:columns] = x[index].numpy()
        q, scale, sums = _quantize_by_hand(row)
        np.testing.assert_array_equal(quantized.q[index].numpy(), q)
        np.testing.assert_array_equal(quantized.scale[index].numpy(), scale)
        np.testing.assert_array_equal(quantized.sums[index].numpy(), sums)


def test_activation_rounding_is_half_to_even() -> None:
    x = torch.zeros(1, 32)
    x[0, :6] = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5])
    assert reference.quantize_activations(x, "Q8_0").q[0, :6].tolist() == [127, 0, 2, 2, 0, -2]


@pytest.mark.parametrize("amax", [1e-45, 1e-40, 3e-37])
def test_vanishing_blocks_become_zeros_not_nan(amax: float) -> None:
    x = torch.zeros(1, 64)
    x[0, 3], x[0, 40] = amax, 1.0
    quantized = reference.quantize_activations(x, "Q8_0")
    assert quantized.q[0, :32].count_nonzero() == 0
    assert quantized.q[0, 40] == 127
    assert quantized.sums.isfinite().all()


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_infinity_reach_the_output(poison: float) -> None:
    x = torch.ones(2, 64)
    x[0, 40] = poison
    quantized = reference.quantize_activations(x, "Q8_0")
    assert quantized.scale[0].isnan().tolist() == [False, True]
    y = reference.linear_int8(quantized, random_blocks("Q8_0", 3, 64), "Q8_0", 64)
    assert y.isnan().all(1).tolist() == [True, False]


@pytest.mark.parametrize("fmt", PACKED)
def test_int8_product_is_near_the_exact_one(fmt: str) -> None:
    """Within half a quantization step per value; one outlier channel only coarsens its own block."""
    weight = random_blocks(fmt, 65, 576)
    x = random_activations(3, 576)
    decoded = reference.dequantize(weight, fmt, 576)
    y = reference.linear_int8(reference.quantize_activations(x, fmt), weight, fmt, 576)
    exact = x.double() @ decoded.double().T
    assert_within(y, exact, int8_tolerance(x, decoded))
    assert not torch.equal(y, exact)
