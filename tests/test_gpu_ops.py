"""The CUDA bodies of the ops against the oracle: interpreted in CI, on the GPU itself where there is one."""

import pytest
import torch
from cases import (
    PACKED,
    assert_within,
    float_tolerance,
    int8_kernel_tolerance,
    random_activations,
    random_blocks,
)

from realizar_torch import ops, packing, reference
from realizar_torch.errors import FormatError
from realizar_torch.ops import cuda, torch_kernels
from realizar_torch.ops.normalization import normalize

pytest.importorskip("triton")

from realizar_torch.triton_kernels import configs, decoded
from realizar_torch.triton_kernels.blocks import GGML_ONLY
from realizar_torch.triton_kernels.launch import packed_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# unit roundoff of the output types
ROUNDOFF = {torch.float32: 0.0, torch.float16: 2**-10, torch.bfloat16: 2**-7, torch.float64: 0.0}


def case(fmt, batch, rows=5, columns=300, dtype=torch.float32, layout="ggml"):
    blocks = random_blocks(fmt, rows, columns).to(DEVICE)
    x = random_activations(batch, columns).to(DEVICE, dtype)
    decoded = reference.dequantize(blocks, fmt, columns, torch.float64)
    return x, packing.pack(blocks, fmt, layout), decoded


def rounded(tolerance, expected, dtype):
    return tolerance + ROUNDOFF[dtype] * expected.abs()


@pytest.mark.parametrize("fmt", PACKED)
@pytest.mark.parametrize("batch", [1, 11])
def test_linear_equals_the_oracle_in_every_format(fmt, batch):
    x, weight, decoded = case(fmt, batch)
    bias = torch.randn(5, device=DEVICE, dtype=torch.float64)
    expected = x.double() @ decoded.T + bias
    y = cuda.linear(x, weight, fmt, 300, bias)
    assert_within(y, expected, float_tolerance(x, decoded) + 1e-6 * bias.abs())


@pytest.mark.parametrize("fmt", ["Q4_K", "Q5_0"])
def test_int8_governs_two_rows_and_fp16_sixty_four(fmt):
    for batch in (1, 2, 3, 64, 65):
        x, weight, decoded = case(fmt, batch)
        seen, tolerance = x.double(), float_tolerance(x, decoded)
        if batch <= 2:
            q = reference.quantize_activations(x, fmt, torch.device(DEVICE))
            seen = (q.q.double().unflatten(-1, (-1, 32)) * q.scale.double()[..., None]).flatten(-2)[:, :300]
            tolerance = tolerance + int8_kernel_tolerance(seen, decoded)
        elif batch <= 64:
            # half a unit in the last of eleven bits of an activation and of a weight, or of the smallest fp16
            tolerance = tolerance + 2.1 * 2.0**-12 * (seen.abs() @ decoded.abs().T)
            if fmt == "Q5_0":
                tolerance = tolerance + 2.0**-14 * seen.abs().sum(1)[:, None] * decoded.abs().amax(1)
        y = cuda.linear(x, weight, fmt, 300, activations="int8")
        assert_within(y, seen @ decoded.T, tolerance)


@pytest.mark.parametrize("dtype", ROUNDOFF)
@pytest.mark.parametrize("batch", [2, 9])
def test_linear_keeps_the_dtype_and_leading_dimensions(dtype, batch):
    x, weight, decoded = case("Q8_0", batch, dtype=dtype)
    expected = x.double() @ decoded.T
    y = cuda.linear(x.view(1, batch, 300), weight, "Q8_0", 300)
    assert y.dtype == dtype and y.shape == (1, batch, 5)
    tolerance = float_tolerance(x, decoded)
    if batch > 8 and dtype in (torch.float16, torch.bfloat16):
        # the decoded weights are rounded too
        tolerance = tolerance + ROUNDOFF[dtype] * (x.double().abs() @ decoded.abs().T)
    assert_within(y[0], expected, rounded(tolerance, expected, dtype))


@pytest.mark.parametrize("fmt", [f for f in ("Q6_K", "Q8_0", "Q3_K") if f not in GGML_ONLY])
def test_planar_weights_give_the_same_bits_where_only_bytes_are_moved(fmt):
    for batch in (1, 9):
        x, weight, _ = case(fmt, batch)
        planar = packing.pack(weight, fmt, "planar")
        for activations in ("float", "int8"):
            found = cuda.linear(x, planar, fmt, 300, activations=activations, layout="planar")
            assert torch.equal(found, cuda.linear(x, weight, fmt, 300, activations=activations))
        ids = torch.tensor([3, 0], device=DEVICE)
        rows = cuda.embedding(ids, planar, fmt, 300, dtype=torch.float32, layout="planar")
        assert torch.equal(rows, reference.dequantize(weight, fmt, 300)[ids])


def test_large_products_go_in_chunks(monkeypatch):
    """As many chunks as the bound asks for, and every row of the result written."""
    calls = []
    own = decoded.decode_rows
    monkeypatch.setattr(configs, "CHUNK_BYTES", 4 * 300 * 4)
    monkeypatch.setattr(
        decoded, "decode_rows", lambda w, first, count, out: calls.append(count) or own(w, first, count, out)
    )
    x, weight, dense = case("Q4_0", 10, rows=11)
    y = cuda.linear(x, weight, "Q4_0", 300)
    assert calls == [4, 4, 3]
    assert_within(y, x.double() @ dense.T, float_tolerance(x, dense))


def test_chunks_of_several_weights_cross_from_one_to_the_next(monkeypatch):
    """Formats and layouts of their own, one product; chunk bounds that lie inside the weights."""
    monkeypatch.setattr(configs, "CHUNK_BYTES", 4 * 256 * 4)
    x, first, dense = case("Q4_K", 9, rows=5, columns=256)
    _, second, dense_too = case("Q6_K", 9, rows=6, columns=256)
    weights = [
        packed_rows(first, "Q4_K", 256),
        packed_rows(packing.pack(second, "Q6_K", "planar"), "Q6_K", 256, "planar"),
    ]
    y = decoded.decoded_matmul(x, weights, torch.full((9, 11), torch.nan, device=DEVICE))
    stack = torch.cat([dense, dense_too])
    assert_within(y, x.double() @ stack.T, float_tolerance(x, stack))


@pytest.mark.parametrize("normalization", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("activations", ["float", "int8"])
@pytest.mark.parametrize("batch", [1, 9])
def test_norm_linear_equals_norm_then_linear(normalization, activations, batch):
    x, weight, decoded = case("Q4_K", batch, columns=256)
    gain, shift, bias = (torch.randn(n, device=DEVICE) for n in (256, 256, 5))
    normed = normalize(x, gain, shift, normalization, 1e-5)
    y = cuda.norm_linear(
        x, gain, shift, weight, "Q4_K", 256, bias,
        normalization=normalization, eps=1e-5, activations=activations,
    )  # fmt: skip
    # a value of the norm that differs in its last bit may round to the next quant
    step = normed.abs().amax(-1, keepdim=True) / 127 if activations == "int8" else 0
    moved = 0.51 * step * decoded.abs().sum(-1) + 1e-5 * (normed.double().abs() @ decoded.abs().T)
    assert_within(y, normed.double() @ decoded.T + bias.double(), moved + 1e-5)


def test_shared_quantized_activations_equal_separate_calls():
    for batch in (3, 9):
        x, weight, _ = case("Q4_K", batch)
        q, scale, sums = cuda.quantize_activations(x, "Q4_K")
        expected = reference.quantize_activations(x, "Q4_K", torch.device(DEVICE))
        assert torch.equal(q, expected.q)
        y = cuda.linear_quantized(q, scale, sums, weight, "Q4_K", 300)
        reference_y = reference.linear_int8(expected, weight, "Q4_K", 300).double()
        seen = (q.double().unflatten(-1, (-1, 32)) * scale.double()[..., None]).flatten(-2)[:, :300]
        decoded = reference.dequantize(weight, "Q4_K", 300, torch.float64)
        tolerance = int8_kernel_tolerance(seen, decoded) + float_tolerance(seen.float(), decoded)
        assert_within(y, reference_y, tolerance)


def test_odd_addresses_and_strides_are_taken():
    x, weight, decoded = case("Q8_0", 2)
    raw = torch.empty(weight.numel() + 1, dtype=torch.uint8, device=DEVICE)
    odd = raw[1:].view_as(weight)
    odd.copy_(weight)
    strided = torch.stack([x, x], -1)[..., 0]
    y = cuda.linear(strided, odd, "Q8_0", 300)
    assert_within(y, x.double() @ decoded.T, float_tolerance(x, decoded))


def test_embedding_dtypes_and_unknown_ids():
    _, table, decoded = case("Q6_K", 1)
    ids = torch.tensor([[4, 1], [0, 7]], device=DEVICE)
    rows = cuda.embedding(ids, table, "Q6_K", 300, dtype=torch.float64)
    assert torch.equal(rows[0], decoded[[4, 1]])
    assert rows[1, 1].isnan().all() and rows.dtype == torch.float64


def test_without_triton_torch_ops_answer_with_one_warning(monkeypatch):
    monkeypatch.setattr(cuda, "problem", lambda: "no module named triton")
    cuda._warn_of_torch_ops.cache_clear()
    x, weight, _ = case("Q4_K", 2)
    run = cuda.with_kernels(cuda.linear, lambda kernels, *a, **k: kernels.matmul(*a, **k))
    with pytest.warns(UserWarning, match="no module named triton"):
        y = run(x, weight, "Q4_K", 300)
    assert torch.equal(y, torch_kernels.matmul(x, weight, "Q4_K", 300))
    run(x, weight, "Q4_K", 300)
    cuda._warn_of_torch_ops.cache_clear()


def test_wrong_arguments_are_our_errors():
    x, weight, _ = case("Q4_K", 1)
    with pytest.raises(FormatError, match="last dimension"):
        cuda.linear(x[:, :200], weight, "Q4_K", 300)
    with pytest.raises(FormatError, match="planar"):
        cuda.linear(x, weight, "Q4_K", 300, layout="planar")


@pytest.mark.gpu
def test_mixed_devices_are_named():
    x, weight, _ = case("Q4_K", 1)
    with pytest.raises(FormatError, match=r"x is on cpu, weight is on cuda"):
        torch.ops.realizar_torch.linear(x.cpu(), weight, "Q4_K", 300)


@pytest.mark.gpu
def test_gradients_equal_the_dense_layer():
    x, weight, decoded = case("Q4_K", 3)
    for batch in (3, 20):
        x = random_activations(batch, 300).to(DEVICE).requires_grad_()
        y = torch.ops.realizar_torch.linear(x, weight, "Q4_K", 300)
        upstream = torch.randn_like(y)
        y.backward(upstream)
        expected = upstream.double() @ decoded
        assert_within(x.grad, expected, 1e-6 * (upstream.double().abs() @ decoded.abs()))


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [3, 20])
def test_autocast_and_shared_activations_through_the_public_ops(batch):
    x, weight, decoded = case("Q4_K", batch)
    with torch.autocast("cuda", torch.bfloat16):
        y = ops.linear(x, weight, "Q4_K", 300)
    assert y.dtype == torch.bfloat16
    rounded_x = x.bfloat16().double()
    slack = float_tolerance(x, decoded) + 2**-7 * (rounded_x.abs() @ decoded.abs().T)
    assert_within(y, rounded_x @ decoded.T, slack)
    compiled = torch.compile(
        lambda x: ops.linear(ops.quantize_activations(x, "Q4_K"), weight, "Q4_K", 300),
        backend="aot_eager",
        fullgraph=True,
    )
    q, scale, sums = cuda.quantize_activations(x, "Q4_K")
    assert torch.equal(compiled(x), cuda.linear_quantized(q, scale, sums, weight, "Q4_K", 300))


@pytest.mark.gpu
def test_a_thousand_mixed_calls_keep_memory_flat():
    weights = [random_blocks("Q4_K", rows, 512).to(DEVICE) for rows in (7, 129, 2000)]
    inputs = [torch.randn(batch, 512, device=DEVICE) for batch in (1, 3, 8, 40)]

    def mixed(count):
        for i in range(count):
            torch.ops.realizar_torch.linear(inputs[i % 4], weights[i % 3], "Q4_K", 512)

    mixed(12)
    before = torch.cuda.memory_reserved()
    mixed(1000)
    assert torch.cuda.memory_reserved() == before
