"""The CPU kernel launchers against the oracle: formats, numerics, probes, odd shapes, bad arguments."""

import dataclasses
import mmap
from functools import partial

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
    probe_vector,
    random_activations,
    random_blocks,
    scaled_probe_rows,
)
from torch.nn import functional

pytest.importorskip("numba")

from realizar_torch import reference
from realizar_torch.cpu_kernels import launch
from realizar_torch.errors import FormatError
from realizar_torch.formats import get_packed_format
from realizar_torch.reference import QuantizedActivations

_GUARD = 16


@pytest.fixture(params=[1, 2, 5], ids=lambda n: f"{n}-threads")
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def shared_work(monkeypatch):
    """Small cases, too, are shared among threads."""
    monkeypatch.setattr(launch, "SERIAL_WORK", 0)


def _guarded(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An output of NaN inside a larger buffer, and the buffer."""
    buffer = torch.full((rows * columns + 2 * _GUARD,), torch.nan)
    return buffer[_GUARD : _GUARD + rows * columns].view(rows, columns), buffer


def _assert_guards_intact(buffer: torch.Tensor) -> None:
    assert buffer[:_GUARD].isnan().all()
    assert buffer[-_GUARD:].isnan().all()


def _exact(qx: QuantizedActivations) -> torch.Tensor:
    return (qx.q.double() * qx.scale.double().repeat_interleave(32, -1))[..., : qx.in_features]


def _assert_equal_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    integer = {1: torch.int8, 4: torch.int32}[actual.element_size()]
    torch.testing.assert_close(actual.view(integer), expected.view(integer), rtol=0, atol=0)


@pytest.mark.parametrize("fmt", PACKED)
@pytest.mark.parametrize("columns", [1, 31, 32, 255, 257, 640])
def test_dequantize_equals_the_oracle_bit_for_bit(fmt, columns):
    weight = random_blocks(fmt, 7, columns)
    _assert_equal_bits(launch.dequantize(weight, fmt, columns), reference.dequantize(weight, fmt, columns))


@pytest.mark.parametrize("fmt", PACKED)
def test_embedding_picks_rows(fmt, threads, shared_work):
    weight = random_blocks(fmt, 50, 300)
    ids = torch.tensor([49, 0, 7, 7, 31] * 9)
    expected = reference.dequantize(weight, fmt, 300)[ids]
    _assert_equal_bits(launch.embedding(ids, weight, fmt, 300), expected)
    _assert_equal_bits(launch.embedding(ids.repeat_interleave(2)[::2], weight, fmt, 300), expected)
    assert launch.embedding(ids[:0], weight, fmt, 300).shape == (0, 300)


@pytest.mark.parametrize("fmt", PACKED)
@pytest.mark.parametrize("shape", MATMUL_SHAPES, ids=str)
def test_both_numerics_equal_the_oracle(fmt, shape, shared_work):
    count, rows, columns = shape
    weight, x = random_blocks(fmt, rows, columns), random_activations(count, columns)
    decoded = reference.dequantize(weight, fmt, columns)
    y = launch.matmul(x, weight, fmt, columns)
    assert_within(y, x.double() @ decoded.double().T, float_tolerance(x, decoded))
    qx = launch.quantize_activations(x, fmt)
    expected = reference.linear_int8(qx, weight, fmt, columns)
    assert_within(launch.matmul_int8(qx, weight, fmt), expected, int8_kernel_tolerance(_exact(qx), decoded))


@pytest.mark.parametrize("fmt", PACKED)
def test_a_vector_is_multiplied_alike_in_every_company(fmt, shared_work):
    """Same fp32 kernel arithmetic for every M, row range and thread."""
    weight, x = random_blocks(fmt, 67, 288), random_activations(11, 288)
    together = launch.matmul(x, weight, fmt, 288)
    for count in (1, 2, 3, 4, 7):
        assert torch.equal(launch.matmul(x[:count], weight, fmt, 288), together[:count])
    assert torch.equal(launch.matmul(x[10:], weight[60:].contiguous(), fmt, 288), together[10:, 60:])


@pytest.mark.parametrize("fmt", PACKED)
@pytest.mark.parametrize("count", [1, 6])
def test_results_do_not_depend_on_the_number_of_threads(fmt, count, shared_work):
    weight, x = random_blocks(fmt, 257, 512), random_activations(count, 512)
    before, results = torch.get_num_threads(), []
    try:
        for n_threads in (1, 2, 3, 7):
            torch.set_num_threads(n_threads)
            qx = launch.quantize_activations(x, fmt)
            results.append((launch.matmul(x, weight, fmt, 512), launch.matmul_int8(qx, weight, fmt)))
    finally:
        torch.set_num_threads(before)
    for floats, ints in results[1:]:
        assert torch.equal(floats, results[0][0])
        assert torch.equal(ints, results[0][1])


@pytest.mark.parametrize("fmt", PACKED)
@pytest.mark.parametrize("count", [1, 2, 16])
def test_probe_sums_are_exact_in_fp32(fmt, count):
    probe, columns = PROBES[fmt], get_packed_format(fmt).block_size
    for rows in ROWS:
        out, buffer = _guarded(count, rows)
        x = probe_vector(columns).repeat(count, 1)
        launch.matvec_into(out, x, scaled_probe_rows(fmt, rows), fmt, columns)
        expected = probe.dot * (torch.arange(rows) % 7 + 1)
        assert torch.equal(out, expected.expand(count, rows))
        _assert_guards_intact(buffer)


@pytest.mark.parametrize("fmt", PACKED)
@pytest.mark.parametrize("count", [1, 2, 16])
def test_probe_sums_are_exact_in_int8(fmt, count):
    """Integers with one 127 in each block quantize to themselves with scale 1: the exact product is known."""
    columns = 256
    x = probe_vector(columns)
    x[::32] = 127
    x = x.repeat(count, 1)
    for rows in (1, 7, 33, 65):
        weight = scaled_probe_rows(fmt, rows).repeat(1, columns // get_packed_format(fmt).block_size)
        expected = x.double() @ reference.dequantize(weight, fmt).double().T
        out, buffer = _guarded(count, rows)
        launch.matvec_into(out, launch.quantize_activations(x, fmt), weight, fmt, columns)
        # all terms are multiples of 1/16 and all sums stay below 2^20: exact in any order
        assert torch.equal(out.double(), expected)
        _assert_guards_intact(buffer)


@pytest.mark.parametrize("fmt", ["Q4_0", "Q5_0", "Q6_K"])
def test_every_pair_of_nibbles_decodes(fmt):
    """F-10: all 256 byte values in the quants."""
    spec = get_packed_format(fmt)
    blocks = random_blocks(fmt, 16, spec.block_size)
    start = spec.offset("ql" if fmt == "Q6_K" else "qs")
    blocks[:, start : start + 16] = torch.arange(256, dtype=torch.uint8).view(16, 16)
    _assert_equal_bits(launch.dequantize(blocks, fmt, spec.block_size), reference.dequantize(blocks, fmt))


@pytest.mark.parametrize("fmt", PACKED)
@pytest.mark.parametrize("columns", [1, 33, 300, 896])
def test_quantize_activations_equals_the_oracle(fmt, columns, threads, shared_work):
    x = random_activations(5, columns)
    x[1] = 0
    x[2, 0] = torch.inf
    x[3, -1] = torch.nan
    x[4] *= 1e-40
    ours, oracle = launch.quantize_activations(x, fmt), reference.quantize_activations(x, fmt)
    assert torch.equal(ours.q, oracle.q)
    for name in ("scale", "sums"):
        a, b = getattr(ours, name), getattr(oracle, name)
        assert torch.equal(a.isnan(), b.isnan())
        _assert_equal_bits(a.nan_to_num(0), b.nan_to_num(0))
    assert ours.in_features == columns


def test_nan_and_infinity_reach_the_output():
    weight, x = random_blocks("Q4_K", 9, 512), random_activations(4, 512)
    x[1, 3], x[2, 300] = torch.nan, torch.inf
    qx = launch.quantize_activations(x, "Q4_K")
    for y in (launch.matmul(x, weight, "Q4_K", 512), launch.matmul_int8(qx, weight, "Q4_K")):
        assert y[[0, 3]].isfinite().all()
        assert not y[[1, 2]].isfinite().any()
    one = launch.quantize_activations(x[1:2], "Q4_K")
    assert launch.matmul_int8(one, weight, "Q4_K").isnan().all()


def test_four_consumers_share_one_quantized_vector(monkeypatch):
    x = random_activations(1, 1024)
    weights = [random_blocks("Q4_K", rows, 1024, seed=rows) for rows in (5, 64, 130, 257)]
    separate = [
        launch.matmul_int8(launch.quantize_activations(x, "Q4_K"), weight, "Q4_K") for weight in weights
    ]
    calls = []
    run = launch.pool.run
    monkeypatch.setattr(launch.pool, "run", lambda kernel, *rest: (calls.append(kernel), run(kernel, *rest)))
    qx = launch.quantize_activations(x, "Q4_K")
    shared = [launch.matmul_int8(qx, weight, "Q4_K") for weight in weights]
    assert calls.count(launch.quantize_vectors) == 1
    for a, b in zip(shared, separate, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("formats", [("Q4_K", "Q4_K"), ("Q5_0", "Q8_0"), ("Q6_K", "Q3_K")])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_gate_up_is_one_pass_over_two_weights(formats, activation, threads, shared_work, monkeypatch):
    columns, rows = 512, 77
    gate, up = (random_blocks(fmt, rows, columns, seed=i) for i, fmt in enumerate(formats))
    x = random_activations(1, columns) / 8
    for vector in (x, launch.quantize_activations(x, formats[0])):
        product = launch.matmul if isinstance(vector, torch.Tensor) else _int8
        g = product(vector, gate, formats[0], columns).double()
        u = product(vector, up, formats[1], columns).double()
        act = {
            "silu": functional.silu,
            "gelu": functional.gelu,
            "gelu_tanh": partial(functional.gelu, approximate="tanh"),
        }[activation](g)
        y = launch.gate_up(vector, gate, formats[0], up, formats[1], columns, activation)
        # the fp32 exponential is good to a few units in the last place, erfc to 1.5e-7
        assert_within(y, act * u, 2e-6 * (g.abs() * u.abs()) + 1e-30)


def _int8(qx, weight, fmt, columns):
    return launch.matmul_int8(qx, weight, fmt)


def test_read_only_and_non_contiguous_inputs(tmp_path):
    weight, x = random_blocks("Q5_K", 20, 512), random_activations(3, 512)
    expected = launch.matmul(x, weight, "Q5_K", 512)
    path = tmp_path / "weight"
    path.write_bytes(weight.numpy().tobytes())
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        view = torch.frombuffer(mapped, dtype=torch.uint8).view(20, -1)
        assert torch.equal(launch.matmul(x, view, "Q5_K", 512), expected)
        assert torch.equal(launch.matmul(x[:1], view, "Q5_K", 512), expected[:1])
        del view
    strided = torch.stack([x, -x], -1)[..., 0]
    assert not strided.is_contiguous()
    assert torch.equal(launch.matmul(strided, weight, "Q5_K", 512), expected)
    ours = launch.quantize_activations(strided, "Q5_K")
    assert torch.equal(ours.q, launch.quantize_activations(x, "Q5_K").q)


@pytest.mark.parametrize("count", [1, 3])
def test_matvec_into_adds_the_bias_in_the_callers_buffer(count, threads, shared_work):
    weight, x, bias = random_blocks("Q4_1", 131, 320), random_activations(count, 320), torch.randn(131)
    for vectors in (x, launch.quantize_activations(x, "Q4_1")):
        out, buffer = _guarded(count, 131)
        assert launch.matvec_into(out, vectors, weight, "Q4_1", 320, bias) is out
        plain = torch.full((count, 131), torch.nan)
        launch.matvec_into(plain, vectors, weight, "Q4_1", 320)
        assert_within(out, plain.double() + bias.double(), 2.0**-23 * (plain.abs() + bias.abs()).double())
        _assert_guards_intact(buffer)


def test_matvec_into_refuses_wrong_buffers():
    weight, x = random_blocks("Q4_0", 8, 64), random_activations(2, 64)
    memory = torch.zeros(400)
    inside = memory[:128].view(2, 64)
    for out, said in (
        (torch.empty(2, 7), r"out has shape \[2, 7\], expected \[2, 8\]"),
        (torch.empty(1, 8), r"out has shape \[1, 8\], expected \[2, 8\]"),
        (torch.empty(16), r"out has shape \[16\]"),
        (torch.empty(8, 2).T, "strides"),
        (torch.empty(2, 8, dtype=torch.float64), "float64, expected torch.float32"),
        (torch.empty(2, 8, device="meta"), "on meta, expected a CPU tensor"),
        (torch.empty(2, 8, requires_grad=True), "requires grad"),
    ):
        with pytest.raises(FormatError, match=said):
            launch.matvec_into(out, x, weight, "Q4_0", 64)
    for out in (memory[120:136].view(2, 8), memory[:16].view(2, 8), memory[100:116].view(2, 8)):
        with pytest.raises(FormatError, match="overlaps"):
            launch.matvec_into(out, inside, weight, "Q4_0", 64)
    launch.matvec_into(memory[128:144].view(2, 8), inside, weight, "Q4_0", 64)
    with pytest.raises(FormatError, match=r"bias has shape \[7\], expected \[8\]"):
        launch.matvec_into(torch.empty(2, 8), x, weight, "Q4_0", 64, torch.zeros(7))
    bias = torch.zeros(24)
    with pytest.raises(FormatError, match="overlaps"):
        launch.matvec_into(bias[4:20].view(2, 8), x, weight, "Q4_0", 64, bias[:8])


def test_launchers_refuse_wrong_arguments():
    weight, x = random_blocks("Q4_K", 8, 512), random_activations(2, 512)
    qx = launch.quantize_activations(x, "Q4_K")
    with pytest.raises(FormatError, match=r"x has shape \[2, 511\], expected \[any, 512\]"):
        launch.matmul(x[:, :511], weight, "Q4_K", 512)
    with pytest.raises(FormatError, match=r"float64, expected torch\.float32"):
        launch.matmul(x.double(), weight, "Q4_K", 512)
    with pytest.raises(FormatError, match="weight has shape"):
        launch.matmul(x, weight, "Q4_1", 512)
    with pytest.raises(FormatError, match=r"expected torch\.uint8"):
        launch.matmul(x, weight.to(torch.int32), "Q4_K", 512)
    with pytest.raises(FormatError, match="unknown format"):
        launch.matmul(x, weight, "Q4_Z", 512)
    with pytest.raises(FormatError, match="strides"):
        launch.matmul(x, weight.T.contiguous().T, "Q4_K", 512)
    with pytest.raises(FormatError, match="q has shape"):
        launch.matmul_int8(
            launch.quantize_activations(x[:, :300], "Q4_0"), random_blocks("Q4_K", 8, 300), "Q4_K"
        )
    with pytest.raises(FormatError, match="scale has shape"):
        launch.matmul_int8(dataclasses.replace(qx, scale=qx.scale[:, :5].contiguous()), weight, "Q4_K")
    with pytest.raises(FormatError, match="in_features is 0"):
        launch.dequantize(weight, "Q4_K", 0)
    for ids in ([0, 8], [-1]):
        with pytest.raises(FormatError, match="exceed a table of 8 rows"):
            launch.embedding(torch.tensor(ids), weight, "Q4_K", 512)
    with pytest.raises(FormatError, match="unknown activation 'relu'"):
        launch.gate_up(x[:1], weight, "Q4_K", weight, "Q4_K", 512, "relu")
    with pytest.raises(FormatError, match="2 vectors, expected 1"):
        launch.gate_up(x, weight, "Q4_K", weight, "Q4_K", 512, "silu")


def test_no_rows_and_no_vectors():
    weight, x = random_blocks("Q8_0", 5, 64), random_activations(3, 64)
    none = launch.quantize_activations(x[:0], "Q8_0")
    assert none.q.shape == (0, 64)
    assert launch.matmul(x[:0], weight, "Q8_0", 64).shape == (0, 5)
    assert launch.matmul_int8(none, weight, "Q8_0").shape == (0, 5)
    assert launch.matmul(x, weight[:0], "Q8_0", 64).shape == (3, 0)
    assert launch.dequantize(weight[:0], "Q8_0", 64).shape == (0, 64)


def test_addresses_are_64_bit():
    """F-09: row times stride beyond 2^31, without the memory: the kernel's own address arithmetic."""
    import numpy as np

    from realizar_torch.cpu_kernels.jit import jit
    from realizar_torch.cpu_kernels.memory import load_f32, store_f32

    cells = np.arange(4, dtype=np.float32)

    @jit
    def copy(base, row, stride, target):
        store_f32(target, load_f32(base, row * stride))

    out = np.zeros(1, np.float32)
    row, stride = 262271, 8192
    copy(cells.ctypes.data + 8 - row * stride, row, stride, out.ctypes.data)
    assert row * stride > 2**31
    assert out[0] == 2.0
