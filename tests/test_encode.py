"""The encoders against ggml's quantizer: equal bytes for every format, weight and importance."""

import pytest
import torch
from cases import PACKED
from encode_cases import COLUMNS, ROWS, ggml_blocks, importances, weights

import realizar_torch as rt
from realizar_torch.encode import encode
from realizar_torch.errors import FormatError
from realizar_torch.formats import get_format

WEIGHTS, IMPORTANCES = dict(weights()), dict(importances())


@pytest.mark.parametrize("importance", IMPORTANCES)
@pytest.mark.parametrize("fmt", PACKED)
def test_definition_equals_ggml(fmt: str, importance: str) -> None:
    for name, weight in WEIGHTS.items():
        found = encode(weight, fmt, IMPORTANCES[importance])
        assert found.equal(ggml_blocks(weight, fmt, IMPORTANCES[importance])), name


@pytest.mark.parametrize("importance", IMPORTANCES)
@pytest.mark.parametrize("fmt", PACKED)
def test_op_equals_ggml(fmt: str, importance: str) -> None:
    weight, importance = torch.cat(list(WEIGHTS.values())), IMPORTANCES[importance]
    assert rt.quantize(weight, fmt, importance=importance).equal(ggml_blocks(weight, fmt, importance))


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
