"""Every Triton kernel against the oracle: tiny shapes under the interpreter in CI, the big ones on a GPU (-m
gpu).
"""

import hashlib

import pytest
import torch
from cases import (
    PACKED,
    PROBES,
    assert_within,
    float_tolerance,
    int8_kernel_tolerance,
    probe_vector,
    random_activations,
    random_blocks,
    scaled_probe_rows,
)

from realizar_torch import packing, reference
from realizar_torch.errors import FormatError
from realizar_torch.formats import get_packed_format

pytest.importorskip("triton")

from realizar_torch.triton_kernels.blocks import GGML_ONLY, units
from realizar_torch.triton_kernels.configs import Launch, choose
from realizar_torch.triton_kernels.dequantize import dequantize, embedding
from realizar_torch.triton_kernels.gate_up import gate_up
from realizar_torch.triton_kernels.matvec import matvec, matvec_int8
from realizar_torch.triton_kernels.quantize import norm_quantize, normalize, quantize_activations

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYOUTS = [
    (fmt, layout)
    for fmt in PACKED
    for layout in ("ggml", "planar")
    if layout == "ggml" or fmt not in GGML_ONLY
]


def width_of(fmt: str, in_features: int) -> int:
    spec = get_packed_format(fmt)
    return spec.blocks(in_features) * spec.block_size


def dequantized_activations(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (q.double().unflatten(-1, (-1, 32)) * scale.double().unsqueeze(-1)).flatten(-2)


def check_matvec(
    fmt: str,
    layout: str,
    rows: int,
    in_features: int,
    batch: int,
    seed: int = 0,
    numerics: tuple[str, ...] = ("float", "int8"),
) -> None:
    """Products of random blocks with bias and residual, against float64."""
    blocks = random_blocks(fmt, rows, in_features, seed).to(DEVICE)
    decoded = reference.dequantize(blocks, fmt, in_features, torch.float64)
    weight = packing.pack(blocks, fmt, layout)
    x = random_activations(batch, in_features, seed=seed).to(DEVICE)
    bias, residual = torch.randn(rows, device=DEVICE), torch.randn(batch, rows, device=DEVICE)
    extra = bias.double() + residual.double()
    slack = 1e-6 * (bias.abs() + residual.abs()).double()

    y = matvec(x, weight, fmt, in_features, bias, residual=residual, layout=layout)
    assert_within(y, x.double() @ decoded.T + extra, float_tolerance(x, decoded) + slack)

    if "int8" not in numerics:
        return
    quantized = quantize_activations(x, width_of(fmt, in_features))
    seen = dequantized_activations(*quantized[:2])[:, :in_features]
    y = matvec_int8(*quantized, weight, fmt, in_features, bias, residual=residual, layout=layout)
    assert_within(y, seen @ decoded.T + extra, int8_kernel_tolerance(seen, decoded) + slack)


@pytest.mark.parametrize("fmt", PACKED)
def test_decoding_the_probe_is_bit_exact(fmt: str) -> None:
    probe = PROBES[fmt]
    values = dequantize(probe.rows(2).to(DEVICE), fmt, get_packed_format(fmt).block_size).cpu()
    assert hashlib.sha1(values[1].numpy().tobytes()).hexdigest().startswith(probe.sha1)


@pytest.mark.parametrize(("fmt", "layout"), LAYOUTS)
@pytest.mark.parametrize("in_features", [1, 300])
def test_decoding_random_blocks_is_bit_exact(fmt: str, layout: str, in_features: int) -> None:
    blocks = random_blocks(fmt, 3, in_features).to(DEVICE)
    expected = reference.dequantize(blocks, fmt, in_features)
    decoded = dequantize(packing.pack(blocks, fmt, layout), fmt, in_features, layout=layout)
    assert torch.equal(decoded.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("fmt", PACKED)
def test_decoding_at_a_two_byte_aligned_address_and_strided_rows(fmt: str) -> None:
    spec = get_packed_format(fmt)
    blocks = random_blocks(fmt, 4, 2 * spec.block_size).to(DEVICE)
    raw = torch.full((4, blocks.shape[1] + 6), 255, dtype=torch.uint8, device=DEVICE)
    weight = raw[:, 2:-4]
    weight.copy_(blocks)
    assert weight.data_ptr() % 4 == 2
    expected = reference.dequantize(blocks, fmt)
    assert torch.equal(dequantize(weight, fmt, 2 * spec.block_size), expected)
    x = random_activations(1, 2 * spec.block_size).to(DEVICE)
    y = matvec(x, weight[1::2], fmt, 2 * spec.block_size)
    assert_within(y, x.double() @ expected[1::2].double().T, float_tolerance(x, expected[1::2]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_decoding_rounds_once_to_the_output_type(dtype: torch.dtype) -> None:
    blocks = random_blocks("Q4_K", 2, 256).to(DEVICE)
    assert torch.equal(
        dequantize(blocks, "Q4_K", 256, dtype), reference.dequantize(blocks, "Q4_K", 256, dtype)
    )


def test_embedding_picks_rows_and_marks_unknown_ids() -> None:
    table = random_blocks("Q6_K", 5, 300).to(DEVICE)
    ids = torch.tensor([[4, 0], [2, 4]], device=DEVICE)
    expected = reference.dequantize(table, "Q6_K", 300)[ids]
    assert torch.equal(embedding(ids, table, "Q6_K", 300), expected)
    assert torch.equal(embedding(ids.int(), table, "Q6_K", 300, torch.bfloat16), expected.bfloat16())
    outside = embedding(torch.tensor([5, -1, 1], device=DEVICE), table, "Q6_K", 300)
    assert outside[:2].isnan().all() and not outside[2].isnan().any()


@pytest.mark.parametrize(("fmt", "layout"), LAYOUTS)
def test_matvec_of_the_probe_is_exact(fmt: str, layout: str) -> None:
    size = get_packed_format(fmt).block_size
    weight = packing.pack(scaled_probe_rows(fmt, 9).to(DEVICE), fmt, layout)
    expected = PROBES[fmt].dot * (torch.arange(9, device=DEVICE) % 7 + 1)
    x = probe_vector(size).to(DEVICE)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert torch.equal(matvec(x.to(dtype), weight, fmt, size, layout=layout), expected.to(dtype))


@pytest.mark.parametrize(("fmt", "layout"), LAYOUTS)
def test_matvec_of_random_blocks(fmt: str, layout: str) -> None:
    check_matvec(fmt, layout, 7, 300, 1)
    check_matvec(fmt, layout, 3, 2 * get_packed_format(fmt).block_size, 3)


@pytest.mark.parametrize("fmt", ["Q4_K", "Q8_0"])
def test_matvec_takes_strided_activations_and_keeps_their_shape(fmt: str) -> None:
    blocks = random_blocks(fmt, 5, 256).to(DEVICE)
    x = random_activations(256, 2, 2).to(DEVICE).movedim(0, -1)
    decoded = reference.dequantize(blocks, fmt)
    y = matvec(x, blocks, fmt, 256)
    assert y.shape == (2, 2, 5)
    assert_within(y, x.double() @ decoded.double().T, float_tolerance(x, decoded))
    assert matvec(x[:0], blocks, fmt, 256).shape == (0, 2, 5)


def test_rows_of_a_batch_do_not_depend_on_their_neighbours() -> None:
    blocks = random_blocks("Q4_K", 5, 512).to(DEVICE)
    x = random_activations(3, 512).to(DEVICE)
    poisoned = x.clone()
    poisoned[1] = torch.nan
    for quantize in (False, True):
        if quantize:
            first = matvec_int8(*quantize_activations(x, 512), blocks, "Q4_K", 512)
            second = matvec_int8(*quantize_activations(poisoned, 512), blocks, "Q4_K", 512)
        else:
            first, second = matvec(x, blocks, "Q4_K", 512), matvec(poisoned, blocks, "Q4_K", 512)
        assert torch.equal(first[[0, 2]], second[[0, 2]])
        assert second[1].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantized_activations_equal_the_oracle_bit_for_bit(dtype: torch.dtype) -> None:
    x = random_activations(4, 300, dtype=dtype).to(DEVICE)
    x[1, :40] = 0
    x[2, 100] = torch.inf
    x[2, 200] = torch.nan
    x[3] *= 1e-38
    # on the CPU: torch divides by a number on CUDA as a product with its reciprocal
    expected = reference.quantize_activations(x.cpu(), "Q4_K")
    q, scale, sums = (t.cpu() for t in quantize_activations(x, 512))
    assert torch.equal(q, expected.q)
    torch.testing.assert_close(scale, expected.scale, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(sums, expected.sums, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("normalization", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("features", [3, 300, 768])
def test_norm_with_residual(normalization: str, features: int) -> None:
    x = 5 + 0.01 * torch.arange(2 * features, device=DEVICE).view(2, features).float()
    residual = torch.randn(2, features, device=DEVICE)
    gain, shift = torch.randn(features, device=DEVICE), torch.randn(features, device=DEVICE)
    total = torch.empty_like(x)
    options = {"normalization": normalization, "eps": 1e-5, "residual": residual, "total": total}
    y = normalize(x, gain, shift, **options)
    wide = (x + residual).double()
    if normalization == "layernorm":
        wide = wide - wide.mean(-1, keepdim=True)
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain.double() + shift.double()
    assert torch.equal(total, x + residual)
    # the mean of up to 768 values near 10 carries a few fp32 roundings
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=2e-5)
    q, scale, _ = norm_quantize(x, gain, shift, width=768, **options)
    step = scale.double().repeat_interleave(32, -1)[:, :features]
    error = (dequantized_activations(q, scale)[:, :features] - expected).abs()
    assert (error <= 0.501 * step + 3e-5).all()
    assert (q[:, features:] == 0).all()


def test_norm_statistics_are_fp32_and_zero_centered_adds_one() -> None:
    x = torch.full((1, 64), 8000.0, dtype=torch.float16, device=DEVICE)
    gain = torch.randn(64, device=DEVICE)
    y = normalize(x, gain, normalization="rmsnorm", eps=1e-6, zero_centered=True)
    torch.testing.assert_close(y[0], gain + 1, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("fmt", "layout"), LAYOUTS)
@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_steps_that_are_fetched_ahead_change_no_bit(fmt: str, layout: str, blocks: int) -> None:
    """Of three blocks: three steps, two of which the last is half empty, and one."""
    columns = 3 * get_packed_format(fmt).block_size
    weight = packing.pack(random_blocks(fmt, 5, columns), fmt, layout).to(DEVICE)
    quantized = quantize_activations(random_activations(1, columns).to(DEVICE), columns)
    once, ahead = (
        matvec_int8(*quantized, weight, fmt, columns, layout=layout, launch=Launch(2, blocks, 1, ahead))
        for ahead in (False, True)
    )
    assert once.abs().min() > 0 and torch.equal(once, ahead)


def test_long_rows_of_few_programs_are_fetched_ahead() -> None:
    """Down projections of 8B and 1B models; not what has a program for every multiprocessor's every warp."""
    for shape in ((4096, 14336), (2048, 8192), (8192, 28672)):
        assert choose("Q4_K", *shape).ahead and choose("Q6_K", *shape).ahead
        assert not choose("Q4_K", *shape, 2).ahead and not choose("Q4_K", *shape, 1, "float").ahead
    for shape in ((28672, 4096), (128256, 4096), (4096, 4096), (16384, 14336)):
        assert not choose("Q4_K", *shape).ahead


@pytest.mark.parametrize("fmt", PACKED)
def test_choose_never_asks_for_more_lanes_than_a_row_has(fmt: str) -> None:
    for rows in (1, 3, 10, 4096, 128256):
        for in_features in (1, 576, 4096, 14336, 75 * 256, 1 << 20):
            for batch in range(1, 9):
                for activations, several in (("int8", False), ("int8", True), ("float", False)):
                    launch = choose(fmt, rows, in_features, batch, activations, several=several)
                    lanes = launch.blocks * units(fmt)
                    assert launch.blocks < 2 * get_packed_format(fmt).blocks(in_features)
                    assert launch.warps == 1 or (launch.warps <= 8 and lanes >= 32 * launch.warps)
                    assert launch.rows < 2 * rows and not (several and launch.ahead)


def test_wrong_arguments_are_named() -> None:
    weight = random_blocks("Q4_K", 3, 256).to(DEVICE)
    x = torch.randn(1, 256, device=DEVICE)
    with pytest.raises(FormatError, match="288 bytes"):
        matvec(x, weight, "Q4_K", 512)
    with pytest.raises(FormatError, match="last dimension 256"):
        matvec(x[:, :255], weight, "Q4_K", 256)
    with pytest.raises(FormatError, match="at most 8"):
        matvec(x.expand(9, -1), weight, "Q4_K", 256)
    with pytest.raises(FormatError, match="int64"):
        matvec(x.long(), weight, "Q4_K", 256)
    with pytest.raises(FormatError, match="layout"):
        matvec(x, weight, "Q4_K", 256, layout="planar")
    with pytest.raises(FormatError, match="even row addresses"):
        odd = torch.empty(145, dtype=torch.uint8, device=DEVICE)[1:].view(1, 144)
        matvec(x, odd, "Q4_K", 256)


# (rows, blocks of a row, M) of every format: one block, tails of tiles and of loop steps
SHAPES = ((1, 1, 1), (129, 3, 1), (33, 56, 1), (257, 75, 1), (63, 3, 2))
# M beyond of int8: each is a kernel of its own, so formats share them; 5 and more are for tensor cores
BATCHES = {fmt: 3 + index % 2 for index, fmt in enumerate(PACKED)}


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "blocks", "batch"), SHAPES)
@pytest.mark.parametrize(("fmt", "layout"), LAYOUTS)
def test_matvec_on_many_shapes(fmt: str, layout: str, rows: int, blocks: int, batch: int) -> None:
    check_matvec(fmt, layout, rows, blocks * get_packed_format(fmt).block_size, batch, seed=blocks)


@pytest.mark.gpu
@pytest.mark.parametrize(("fmt", "layout"), LAYOUTS)
def test_matvec_of_a_ragged_row(fmt: str, layout: str) -> None:
    check_matvec(fmt, layout, 15, 576 + 1, 1)


@pytest.mark.gpu
@pytest.mark.parametrize(("fmt", "layout"), LAYOUTS)
def test_matvec_of_larger_batches(fmt: str, layout: str) -> None:
    """All of float run one kernel."""
    columns = 16 * get_packed_format(fmt).block_size
    check_matvec(fmt, layout, 31, columns, BATCHES[fmt], seed=3)
    for batch in range(3, 9):
        check_matvec(fmt, layout, 31, columns, batch, seed=batch, numerics=("float",))


@pytest.mark.parametrize(("fmt", "batch"), [("Q4_1", 3), ("Q4_1", 8), ("Q6_K", 5)])
def test_vectors_of_several_programs_equal_pairs(fmt: str, batch: int) -> None:
    """The last program computes a vector again where their number is odd: it must not be added twice."""
    columns = get_packed_format(fmt).block_size + 3
    weight = random_blocks(fmt, 3, columns).to(DEVICE)
    x, stream = random_activations(batch, columns).to(DEVICE), torch.randn(batch, 3, device=DEVICE)
    pairs = [matvec(x[i : i + 2], weight, fmt, columns, residual=stream[i : i + 2]) for i in range(batch - 1)]
    matvec(x, weight, fmt, columns, residual=stream, out=stream)
    for row in range(batch):
        assert torch.equal(stream[row], pairs[0][0] if row == 0 else pairs[row - 1][1])
    together = gate_up(x, weight, weight.flip(0), fmt, columns)
    for i in (0, batch - 2):
        assert torch.equal(together[i : i + 2], gate_up(x[i : i + 2], weight, weight.flip(0), fmt, columns))


@pytest.mark.gpu
def test_rows_past_two_to_the_31_bytes() -> None:
    spec = get_packed_format("Q8_0")
    rows = 262272
    weight = torch.zeros(rows, spec.row_bytes(8192), dtype=torch.uint8, device=DEVICE)
    assert weight.nbytes > 2**31
    weight[-1:] = random_blocks("Q8_0", 1, 8192).to(DEVICE)
    x = random_activations(1, 8192).to(DEVICE)
    decoded = reference.dequantize(weight[-1:], "Q8_0")
    y = matvec(x, weight, "Q8_0", 8192)
    assert_within(y[:, -1:], x.double() @ decoded.double().T, float_tolerance(x, decoded))
    assert (y[:, :-1] == 0).all()
    assert torch.equal(embedding(torch.tensor([rows - 1], device=DEVICE), weight, "Q8_0", 8192), decoded)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_kernels_run_on_the_tensors_own_device() -> None:
    weight = random_blocks("Q4_K", 5, 256).to("cuda:1")
    x = random_activations(1, 256).to("cuda:1")
    decoded = reference.dequantize(weight, "Q4_K")
    with torch.cuda.device(0):
        y = matvec(x, weight, "Q4_K", 256)
        assert torch.cuda.current_device() == 0
    assert y.device == weight.device
    assert_within(y, x.double() @ decoded.double().T, float_tolerance(x, decoded))
    with pytest.raises(FormatError, match="cuda:0"):
        matvec(x.to("cuda:0"), weight, "Q4_K", 256)
