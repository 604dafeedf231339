"""The encoders against ggml's quantizer: equal bytes for every format, weight and importance."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import PACKED, assert_within, float_tolerance
from encode_cases import COLUMNS, ROWS, ggml_blocks, importances, weights
from torch import nn

import realizar_torch as rt
from realizar_torch.encode import encode, k_quants
from realizar_torch.encode.search import positive_scale
from realizar_torch.errors import FormatError
from realizar_torch.formats import get_format
from realizar_torch.ops import cpu, torch_kernels

WEIGHTS, IMPORTANCES = dict(weights()), dict(importances())
ALL_WEIGHTS = torch.cat(list(WEIGHTS.values()))


def assert_ggml_blocks(found: torch.Tensor, fmt: str, importance: torch.Tensor | None) -> None:
    """``found`` are the blocks of ALL_WEIGHTS."""
    wrong = (found != ggml_blocks(ALL_WEIGHTS, fmt, importance)).any(1).nonzero().flatten().tolist()
    assert not wrong, {list(WEIGHTS)[row // ROWS] for row in wrong}


@pytest.mark.parametrize("importance", IMPORTANCES)
@pytest.mark.parametrize("fmt", PACKED)
def test_definition_equals_ggml(fmt: str, importance: str) -> None:
    weights_of_columns = IMPORTANCES[importance]
    assert_ggml_blocks(encode(ALL_WEIGHTS, fmt, weights_of_columns), fmt, weights_of_columns)


@pytest.mark.gpu
@pytest.mark.parametrize("importance", IMPORTANCES)
@pytest.mark.parametrize("fmt", PACKED)
def test_gpu_equals_the_definition_on_the_cpu(fmt: str, importance: str) -> None:
    weights_of_columns = IMPORTANCES[importance]
    on_gpu = None if weights_of_columns is None else weights_of_columns.cuda()
    found = encode(ALL_WEIGHTS.cuda(), fmt, on_gpu)
    assert found.is_cuda
    wrong = (found.cpu() != encode(ALL_WEIGHTS, fmt, weights_of_columns)).any(1).nonzero().flatten().tolist()
    assert not wrong, {list(WEIGHTS)[row // ROWS] for row in wrong}


@pytest.mark.parametrize("importance", IMPORTANCES)
@pytest.mark.parametrize("fmt", PACKED)
def test_compiled_equals_ggml(fmt: str, importance: str) -> None:
    from realizar_torch.cpu_kernels.encode import encode as compiled

    weights_of_columns = IMPORTANCES[importance]
    assert_ggml_blocks(compiled(ALL_WEIGHTS, fmt, weights_of_columns), fmt, weights_of_columns)


@pytest.mark.parametrize("importance", IMPORTANCES)
@pytest.mark.parametrize("fmt", PACKED)
def test_op_equals_ggml_for_what_blocks_can_hold(fmt: str, importance: str) -> None:
    weights_of_columns = IMPORTANCES[importance]
    blocks = ggml_blocks(ALL_WEIGHTS, fmt, weights_of_columns)
    finite = rt.dequantize(blocks, fmt, COLUMNS).isfinite().all(1)
    # far beyond every format ggml may store zeros; those near the end of a reach are tested elsewhere
    largest = ALL_WEIGHTS.abs().amax(1)
    held, beyond = finite & (largest < 1e6), ~finite | (largest > 1e12)
    assert held.sum() > 90 and beyond.sum() > 10
    found = rt.quantize(ALL_WEIGHTS[held], fmt, importance=weights_of_columns)
    assert found.equal(blocks[held])
    for row in ALL_WEIGHTS[beyond]:
        with pytest.raises(FormatError, match=f"which {fmt} cannot hold"):
            rt.quantize(row[None], fmt, importance=weights_of_columns)


@pytest.mark.parametrize("mask", ["2 % of the columns", "10 % of the columns"])
@pytest.mark.parametrize(("fmt", "top"), [("Q2_K", 15), ("Q4_K", 63), ("Q5_K", 63)])
def test_masks_wrap_levels_below_zero(fmt: str, top: int, mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One weight in a sub-block can give a scale below zero, whose level ggml keeps as a byte above ``top``.

    Without such levels the tests above would not try what ggml does with the bits that do not fit.
    """
    found = []

    def recorded(x: torch.Tensor, weights: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor]:
        scale, levels = positive_scale(x, weights, top)
        found.append(levels)
        return scale, levels

    monkeypatch.setattr(k_quants, "positive_scale", recorded)
    encode(WEIGHTS["mostly negative"], fmt, IMPORTANCES[mask])
    assert found and max(levels.max() for levels in found) > top


@pytest.mark.parametrize("fmt", PACKED)
def test_op_runs_the_definition_without_numba(fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "kernels", lambda: torch_kernels)
    monkeypatch.setitem(sys.modules, "realizar_torch.cpu_kernels.encode", None)
    weight = WEIGHTS["uneven runs of 32"]
    assert rt.quantize(weight, fmt).equal(ggml_blocks(weight, fmt))


@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 33])
def test_every_row_is_encoded_once_on_any_number_of_threads(rows: int) -> None:
    weight, threads = torch.randn(rows, COLUMNS), torch.get_num_threads()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            assert rt.quantize(weight, "Q5_0").equal(ggml_blocks(weight, "Q5_0")), count
    finally:
        torch.set_num_threads(threads)


@pytest.mark.real_model
@pytest.mark.parametrize("fmt", PACKED)
def test_real_weights(fmt: str, smollm2_path: Path) -> None:
    """Rows of 576 and 1536: also rows that are no multiple of 256."""
    file = rt.open_gguf(smollm2_path)
    for name in ("blk.3.attn_q.weight", "blk.17.ffn_down.weight"):
        stored = file.tensors[name]
        weight = rt.dequantize(file.read(name), stored.fmt.name)[:256]
        weight = weight[:, : weight.shape[1] // 256 * 256].contiguous()
        importance = weight.square().mean(0)
        assert rt.quantize(weight, fmt).equal(ggml_blocks(weight, fmt)), name
        found = rt.quantize(weight, fmt, importance=importance)
        assert found.equal(ggml_blocks(weight, fmt, importance)), name


@pytest.mark.parametrize("columns", [1, 31, 33, 257, 300, 576])
@pytest.mark.parametrize("fmt", PACKED)
def test_rows_are_padded_with_zeros_of_no_importance(fmt: str, columns: int) -> None:
    weight, importance = WEIGHTS["normal"][:, :columns], IMPORTANCES["importance"][:columns]
    width = get_format(fmt).blocks(columns) * get_format(fmt).block_size
    padded, padding = torch.zeros(ROWS, width), torch.zeros(width)
    padded[:, :columns], padding[:columns] = weight, importance
    assert rt.quantize(weight, fmt).equal(ggml_blocks(padded, fmt))
    assert rt.quantize(weight, fmt, importance=importance).equal(ggml_blocks(padded, fmt, padding))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_float_types_and_strides(dtype: torch.dtype) -> None:
    weight = WEIGHTS["normal"].to(dtype)
    expected = ggml_blocks(weight.float(), "Q4_K")
    assert rt.quantize(weight, "Q4_K").equal(expected)
    assert rt.quantize(weight.T.contiguous().T, "Q4_K").equal(expected)
    assert rt.quantize(weight.requires_grad_(), "Q4_K").equal(expected)


def test_large_weights_are_encoded_slice_by_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realizar_torch.ops.torch_kernels.CHUNK_BYTES", 2 * 4 * COLUMNS)
    weight = torch.cat([WEIGHTS["normal"], WEIGHTS["sparse"]])[:11]
    assert rt.quantize(weight, "Q6_K").equal(ggml_blocks(weight, "Q6_K"))
    weight[7, 3] = torch.nan
    with pytest.raises(FormatError, match=r"weight\[7, 3\] is nan"):
        rt.quantize(weight, "Q6_K")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fmt": "Q4_X"}, "unknown format 'Q4_X'"),
        ({"fmt": "F16"}, "F16 is a plain float format"),
        (
            {"weight": torch.ones(4, 32, dtype=torch.uint8)},
            "weight is torch.uint8, expected one of torch.float16",
        ),
        ({"weight": torch.ones(32)}, r"weight has shape \[32\], expected \[rows, columns\]"),
        ({"weight": torch.ones(0, 32)}, r"weight has shape \[0, 32\]"),
        ({"weight": torch.full((4, 32), torch.inf)}, r"weight\[0, 0\] is inf in float32"),
        ({"weight": torch.full((4, 32), 1e300, dtype=torch.float64)}, r"weight\[0, 0\] is inf in float32"),
        ({"importance": torch.ones(31)}, r"importance is torch.float32 \[31\], expected .* shape \[32\]"),
        ({"importance": torch.ones(4, 32)}, r"importance is torch.float32 \[4, 32\]"),
        ({"importance": -torch.ones(32)}, "importance holds negative"),
        ({"importance": [1.0] * 32}, "importance is a list, expected a torch.Tensor"),
        ({"weight": np.ones((4, 32), np.float32)}, "weight is a ndarray, expected a torch.Tensor"),
        ({"weight": None}, "weight is a NoneType"),
        ({"weight": torch.ones(4, 32).to_sparse()}, "weight is a torch.sparse_coo tensor"),
        ({"fmt": None}, "fmt is None, expected one of Q4_0"),
        ({"fmt": 8}, "fmt is 8, expected one of Q4_0"),
        ({"importance": torch.full((32,), torch.nan)}, "importance holds negative or non-finite"),
        ({"importance": torch.ones(32, device="meta")}, "weight is on cpu, importance is on meta"),
    ],
)
def test_wrong_arguments(change: dict, message: str) -> None:
    arguments = {"weight": torch.ones(4, 32), "fmt": "Q4_0", "importance": None} | change
    with pytest.raises(FormatError, match=message):
        rt.quantize(arguments["weight"], arguments["fmt"], importance=arguments["importance"])


@pytest.mark.parametrize("fmt", PACKED)
def test_opcheck(fmt: str) -> None:
    weight = WEIGHTS["normal"][:3, :300]
    for arguments in ((weight, fmt), (weight.half(), fmt, torch.rand(300)), (weight.T.contiguous().T, fmt)):
        torch.library.opcheck(torch.ops.realizar_torch.quantize.default, arguments)


@pytest.mark.parametrize("fmt", PACKED)
def test_from_linear(fmt: str) -> None:
    linear = nn.Linear(300, 7).eval()
    module = rt.QuantizedLinear.from_linear(linear, fmt)
    assert module.weight.equal(rt.quantize(linear.weight, fmt))
    assert module.bias is linear.bias and not module.training
    assert (module.fmt, module.in_features, module.out_features) == (fmt, 300, 7)
    x = torch.randn(2, 300)
    decoded = module.dequantize()
    assert_within(module(x), nn.functional.linear(x, decoded, linear.bias), 2 * float_tolerance(x, decoded))


def test_from_linear_minds_importance_and_keeps_no_bias() -> None:
    linear, importance = nn.Linear(256, 4, bias=False, dtype=torch.bfloat16), torch.rand(256)
    module = rt.QuantizedLinear.from_linear(linear, "Q4_K", importance=importance)
    assert module.weight.equal(ggml_blocks(linear.weight.detach().float(), "Q4_K", importance))
    assert module.bias is None and module.training


def test_from_linear_on_meta_needs_no_numbers() -> None:
    module = rt.QuantizedLinear.from_linear(nn.Linear(300, 7, device="meta"), "Q4_K")
    assert module.weight.is_meta and module.weight.shape == (7, get_format("Q4_K").row_bytes(300))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_from_embedding(dtype: torch.dtype) -> None:
    embedding = nn.Embedding(11, 96, padding_idx=2, dtype=dtype).eval()
    module = rt.QuantizedEmbedding.from_embedding(embedding, "Q8_0")
    assert module.weight.equal(ggml_blocks(embedding.weight.detach().float(), "Q8_0"))
    assert (module.padding_idx, module.dtype, module.training) == (2, dtype, False)
    rows = module(torch.tensor([10, 2]))
    assert rows.equal(rt.dequantize(module.weight, "Q8_0", dtype=dtype)[[10, 2]])


def test_embedding_that_rescales_its_rows_is_refused() -> None:
    with pytest.raises(FormatError, match=r"max_norm=1\.0"):
        rt.QuantizedEmbedding.from_embedding(nn.Embedding(4, 32, max_norm=1.0), "Q8_0")
