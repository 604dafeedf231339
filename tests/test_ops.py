"""The ops against the oracle, on both paths a CPU has: Numba kernels and torch ops."""

import pytest
import torch
from cases import (
    MATMUL_SHAPES,
    PACKED,
    PROBES,
    ROWS,
    assert_within,
    float_tolerance,
    int8_kernel_tolerance,
    int8_tolerance,
    probe_vector,
    random_activations,
    random_blocks,
    scaled_probe_rows,
)

from realizar_torch import ops, reference
from realizar_torch.errors import FormatError
from realizar_torch.formats import get_format
from realizar_torch.ops import cpu, torch_kernels

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@pytest.fixture(params=["numba", "torch"], autouse=True)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs on the compiled kernels and on the torch path that replaces them."""
    if request.param == "torch":
        monkeypatch.setattr(cpu, "kernels", lambda: torch_kernels)
    else:
        assert cpu.kernels().__name__ == "realizar_torch.cpu_kernels.launch"


def _exact(x: torch.Tensor, decoded: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    y = x.double() @ decoded.double().T
    return y if bias is None else y + bias.double()


# --- linear, exact activations


@pytest.mark.parametrize("fmt", PACKED)
def test_probe_products_are_exact_for_every_batch(fmt: str) -> None:
    """Every fp32 partial sum of a probe is exact, so any order of summation gives this number."""
    columns = get_format(fmt).block_size
    for batch in (1, 2, 16, 64):
        y = ops.linear(probe_vector(columns).expand(batch, -1), PROBES[fmt].rows(), fmt, columns)
        assert y.flatten().tolist() == [PROBES[fmt].dot] * batch


def test_only_float64_leaves_the_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow path that nobody sees would give the same numbers."""
    if cpu.kernels() is torch_kernels:
        pytest.skip("no compiled kernels on this path")
    used = []
    for name in ("matmul", "matmul_int8", "dequantize", "embedding", "quantize_activations"):
        monkeypatch.setattr(torch_kernels, name, lambda *_, name=name: used.append(name) or 1 / 0)
    weight, ids = random_blocks("Q4_K", 5, 256), torch.tensor([1, 2])
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for count in (1, 40):
            for activations in ("float", "int8"):
                x = torch.randn(count, 256).to(dtype)
                ops.linear(x, weight, "Q4_K", 256, activations=activations)
        ops.embedding(ids, weight, "Q4_K", 256, dtype=dtype)
        ops.dequantize(weight, "Q4_K", 256, dtype=dtype)
    assert used == []
    with pytest.raises(ZeroDivisionError):
        ops.linear(torch.randn(1, 256, dtype=torch.float64), weight, "Q4_K", 256)
    assert used == ["matmul"]


@pytest.mark.parametrize("fmt", PACKED)
def test_every_row_count_is_exact_and_written(fmt: str) -> None:
    columns = get_format(fmt).block_size
    for rows in ROWS:
        y = ops.linear(probe_vector(columns), scaled_probe_rows(fmt, rows), fmt, columns)
        assert y.tolist() == [(i % 7 + 1) * PROBES[fmt].dot for i in range(rows)]


@pytest.mark.parametrize("shape", MATMUL_SHAPES, ids=str)
@pytest.mark.parametrize("fmt", PACKED)
def test_linear_equals_the_oracle(fmt: str, shape: tuple[int, int, int]) -> None:
    batch, rows, columns = shape
    weight, x, bias = random_blocks(fmt, rows, columns), random_activations(batch, columns), torch.randn(rows)
    decoded = reference.dequantize(weight, fmt, columns)
    y = ops.linear(x, weight, fmt, columns, bias)
    # adding the bias rounds once more
    tolerance = float_tolerance(x, decoded) + 2**-23 * bias.double().abs()
    assert_within(y, _exact(x, decoded, bias), tolerance)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("fmt", ["Q4_1", "Q6_K"])
def test_output_has_the_input_dtype_and_bias_is_cast(fmt: str, dtype: torch.dtype) -> None:
    weight, x = random_blocks(fmt, 33, 512), random_activations(7, 512, dtype=dtype)
    bias = torch.randn(33, dtype=torch.bfloat16)
    y = ops.linear(x, weight, fmt, 512, bias)
    assert y.dtype == dtype
    decoded = reference.dequantize(weight, fmt, 512)
    tolerance = float_tolerance(x, decoded) + 2**-7 * bias.double().abs()
    assert_within(y, _exact(x, decoded, bias), tolerance)


def test_kernels_of_one_weight_agree_for_every_batch_split() -> None:
    weight, x = random_blocks("Q4_K", 96, 512), random_activations(64, 512)
    together = ops.linear(x, weight, "Q4_K", 512)
    tolerance = 2 * float_tolerance(x, reference.dequantize(weight, "Q4_K", 512))
    single = torch.cat([ops.linear(row, weight, "Q4_K", 512) for row in x.split(1)])
    parts = torch.cat([ops.linear(part, weight, "Q4_K", 512) for part in x.split([7, 57])])
    assert_within(single, together.double(), tolerance)
    assert_within(parts, together.double(), tolerance)


@pytest.mark.parametrize("activations", ["float", "int8"])
@pytest.mark.parametrize("lead", [(0,), (2, 0), (), (1, 1), (2, 3, 5), (4, 3)])
def test_any_leading_dimensions(lead: tuple[int, ...], activations: str) -> None:
    weight = random_blocks("Q5_0", 17, 96)
    x = random_activations(*lead, 96)
    y = ops.linear(x, weight, "Q5_0", 96, activations=activations)
    assert y.shape == (*lead, 17)
    rows = [ops.linear(row, weight, "Q5_0", 96, activations=activations) for row in x.reshape(-1, 96)]
    decoded = reference.dequantize(weight, "Q5_0", 96)
    if rows:
        tolerance = 2 * float_tolerance(x.reshape(-1, 96), decoded)
        assert_within(y.reshape(-1, 17), torch.stack(rows).double(), tolerance)


@pytest.mark.parametrize("activations", ["float", "int8"])
def test_strided_inputs_and_weights_equal_their_copies(activations: str) -> None:
    wide, rows = random_activations(6, 2 * 512), random_blocks("Q3_K", 20, 512)
    x, weight = wide[::2, ::2], rows[::3]
    assert not x.is_contiguous()
    y = ops.linear(x, weight, "Q3_K", 512, activations=activations)
    expected = ops.linear(x.contiguous(), weight.contiguous(), "Q3_K", 512, activations=activations)
    assert torch.equal(y, expected)


def test_inputs_are_left_as_they_were() -> None:
    weight, x, bias = random_blocks("Q4_0", 9, 64), random_activations(3, 64), torch.randn(9)
    copies = weight.clone(), x.clone(), bias.clone()
    for activations in ("float", "int8"):
        ops.linear(x, weight, "Q4_0", 64, bias, activations=activations)
    assert all(torch.equal(a, b) for a, b in zip((weight, x, bias), copies, strict=True))


# --- int8 activations


@pytest.mark.parametrize("shape", MATMUL_SHAPES, ids=str)
@pytest.mark.parametrize("fmt", PACKED)
def test_int8_linear_equals_the_int8_oracle(fmt: str, shape: tuple[int, int, int]) -> None:
    batch, rows, columns = shape
    weight, x = random_blocks(fmt, rows, columns), random_activations(batch, columns)
    decoded = reference.dequantize(weight, fmt, columns)
    qx = reference.quantize_activations(x, fmt)
    quantized = (qx.q.double() * qx.scale.double().repeat_interleave(32, -1))[:, :columns]
    y = ops.linear(x, weight, fmt, columns, activations="int8")
    assert_within(
        y, reference.linear_int8(qx, weight, fmt, columns), int8_kernel_tolerance(quantized, decoded)
    )


@pytest.mark.parametrize("fmt", PACKED)
def test_one_outlier_channel_spoils_only_its_own_block(fmt: str) -> None:
    weight = random_blocks(fmt, 512, 1024)
    x = torch.ones(1, 1024)
    x[0, 40], x[0, 41] = 26, -0.01
    decoded = reference.dequantize(weight, fmt)
    exact = _exact(x, decoded)
    assert_within(ops.linear(x, weight, fmt, 1024), exact, float_tolerance(x, decoded))
    tolerance = int8_tolerance(x, decoded) + float_tolerance(x, decoded)
    assert_within(ops.linear(x, weight, fmt, 1024, activations="int8"), exact, tolerance)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("fmt", PACKED)
def test_quantized_activations_equal_the_oracle_bit_for_bit(fmt: str, dtype: torch.dtype) -> None:
    x = random_activations(2, 3, 300, dtype=dtype)
    x[0, 1, 32:64] = 0
    actual, expected = ops.quantize_activations(x, fmt), reference.quantize_activations(x, fmt)
    assert torch.equal(actual.q, expected.q)
    assert torch.equal(actual.scale, expected.scale)
    assert torch.equal(actual.sums, expected.sums)
    assert actual.in_features == 300


@pytest.mark.parametrize("value", [1e-45, 1e-40, 3e-37, 1e38, 3.4e38, torch.nan, torch.inf, -torch.inf])
def test_extreme_activations_are_quantized_as_the_oracle_does(value: float) -> None:
    x = random_activations(3, 96)
    x[1, 32:64] = 0
    x[1, 40], x[2, 5] = value, value
    actual, expected = ops.quantize_activations(x, "Q8_0"), reference.quantize_activations(x, "Q8_0")
    assert torch.equal(actual.q, expected.q)
    torch.testing.assert_close(actual.scale, expected.scale, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(actual.sums, expected.sums, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("activations", ["float", "int8"])
def test_nan_and_infinity_stay_in_their_row(activations: str, poison: float) -> None:
    x = random_activations(3, 512)
    x[1, 300] = poison
    y = ops.linear(x, random_blocks("Q4_K", 5, 512), "Q4_K", 512, activations=activations)
    assert y.isfinite().all(1).tolist() == [True, False, True]


@pytest.mark.parametrize("fmt", ["Q4_1", "Q5_K"])
def test_shared_activations_equal_separate_calls_bit_for_bit(fmt: str) -> None:
    x = random_activations(2, 3, 512)
    qx = ops.quantize_activations(x, fmt)
    for seed in range(4):
        weight, bias = random_blocks(fmt, 65, 512, seed), torch.randn(65)
        shared = ops.linear(qx, weight, fmt, 512, bias)
        assert shared.dtype == torch.float32
        assert torch.equal(shared, ops.linear(x, weight, fmt, 512, bias, activations="int8"))


def test_activations_padded_for_another_format_are_refused() -> None:
    qx = ops.quantize_activations(random_activations(2, 96), "Q8_0")
    assert ops.linear(qx, random_blocks("Q4_0", 3, 96), "Q4_0", 96).shape == (2, 3)
    with pytest.raises(FormatError, match="padded to 96 values, but Q4_K needs 256"):
        ops.linear(qx, random_blocks("Q4_K", 3, 96), "Q4_K", 96)
    with pytest.raises(FormatError, match="activations have 96 features, the weight has 64"):
        ops.linear(qx, random_blocks("Q4_0", 3, 64), "Q4_0", 64)


# --- embedding and dequantize


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("fmt", PACKED)
def test_embedding_rows_are_the_decoded_rows(fmt: str, dtype: torch.dtype) -> None:
    weight = random_blocks(fmt, 65, 300)
    decoded = reference.dequantize(weight, fmt, 300, dtype)
    for ids in (torch.tensor([0, 1, 64]), torch.tensor([[5, 5], [64, 0]], dtype=torch.int32)):
        assert torch.equal(ops.embedding(ids, weight, fmt, 300, dtype=dtype), decoded[ids.long()])
    assert torch.equal(ops.embedding(torch.tensor(7), weight, fmt, 300, dtype=dtype), decoded[7])
    assert ops.embedding(torch.zeros(2, 0, dtype=torch.int64), weight, fmt, 300).shape == (2, 0, 300)


@pytest.mark.parametrize("bad", [-1, 65, 2**33])
def test_ids_outside_the_table_are_refused(bad: int) -> None:
    with pytest.raises(FormatError, match=f"id {bad} is outside the table of 65 rows"):
        ops.embedding(torch.tensor([3, bad, 4]), random_blocks("Q8_0", 65, 64), "Q8_0", 64)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("fmt", PACKED)
def test_dequantize_equals_the_oracle_bit_for_bit(fmt: str, dtype: torch.dtype) -> None:
    for rows, columns in ((1, 1), (7, 257), (65, 640)):
        weight = random_blocks(fmt, rows, columns)
        values = ops.dequantize(weight, fmt, columns, dtype=dtype)
        assert values.dtype == dtype
        assert torch.equal(values, reference.dequantize(weight, fmt, columns, dtype))


@pytest.mark.parametrize("limit", [1, 4 * 512, 3 * 4 * 512])
def test_slices_of_rows_do_not_change_results(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    weight, x = random_blocks("Q2_K", 8, 512), random_activations(2, 512, dtype=torch.float64)
    product, values = ops.linear(x, weight, "Q2_K", 512), ops.dequantize(weight, "Q2_K", 512)
    monkeypatch.setattr(torch_kernels, "CHUNK_BYTES", limit)
    torch.testing.assert_close(ops.linear(x, weight, "Q2_K", 512), product, rtol=1e-13, atol=1e-11)
    assert torch.equal(ops.dequantize(weight, "Q2_K", 512), values)


# --- norm_linear


def _normalized(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, kind: str, eps: float):
    x = x.double()
    if kind == "layernorm":
        x = x - x.mean(-1, keepdim=True)
    y = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    return y if bias is None else y + bias.double()


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("fmt", PACKED)
def test_norm_linear_equals_the_oracle(fmt: str, dtype: torch.dtype, kind: str) -> None:
    weight, x = random_blocks(fmt, 33, 770), random_activations(2, 3, 770, dtype=dtype)
    scale, shift, bias = torch.randn(770), torch.randn(770), torch.randn(33)
    y = ops.norm_linear(x, scale, shift, weight, fmt, 770, bias, normalization=kind, eps=1e-5)
    assert y.dtype == dtype
    normed = _normalized(x, scale, shift, kind, 1e-5)
    decoded = reference.dequantize(weight, fmt, 770)
    # the normalised row itself is off by a few float32 roundings
    tolerance = float_tolerance(normed, decoded, dtype) + float_tolerance(normed, decoded, torch.float32)
    tolerance += 2**-7 * bias.double().abs() if dtype in (torch.float16, torch.bfloat16) else 1e-6
    assert_within(y, _exact(normed, decoded, bias), tolerance)


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_norm_linear_with_int8_activations(kind: str) -> None:
    weight, x, scale = random_blocks("Q4_K", 33, 512), random_activations(5, 512), torch.randn(512)
    y = ops.norm_linear(x, scale, None, weight, "Q4_K", 512, normalization=kind, eps=1e-5, activations="int8")
    normed = _normalized(x, scale, None, kind, 1e-5)
    decoded = reference.dequantize(weight, "Q4_K", 512)
    assert_within(y, _exact(normed, decoded), int8_tolerance(normed, decoded) + float_tolerance(x, decoded))


@pytest.mark.parametrize("features", [3, 17, 96, 768, 770, 1000, 1025])
def test_statistics_of_odd_sizes_and_large_means(features: int) -> None:
    """x = 5 + 0.01 k: a kernel that lets padded lanes into the variance is off by a factor."""
    x = 5 + 0.01 * torch.arange(features).float().unsqueeze(0)
    weight, scale = torch.eye(features), torch.randn(features)
    y = ops.norm_linear(x, scale, None, weight, None, features, normalization="layernorm", eps=1e-5)
    # float32 x rounds the ramp by 2^-24 * max|x|, which the small deviation magnifies
    magnified = 2**-22 * x.max() / x.double().std(correction=0)
    error = (y - _normalized(x, scale, None, "layernorm", 1e-5)).abs()
    assert (error <= magnified * (1 + scale.abs())).all()


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_squares_that_overflow_fp16_do_not_zero_the_row(kind: str) -> None:
    x = torch.full((1, 2048), 8000.0, dtype=torch.float16)
    x[0, ::2] *= -1
    scale = torch.randn(2048)
    weight = torch.eye(2048)[:8].contiguous()
    y = ops.norm_linear(x, scale, None, weight, None, 2048, normalization=kind, eps=1e-5)
    torch.testing.assert_close(y[0].float(), scale[:8] * x[0, :8].sign(), rtol=2**-10, atol=0)
