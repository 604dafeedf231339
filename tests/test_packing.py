"""Layouts: permutations inside each row, byte-exact inverses, planes where the definition puts them."""

import pytest
import torch
from cases import COLUMNS, PACKED, random_blocks

from realizar_torch.errors import FormatError
from realizar_torch.formats import get_format
from realizar_torch.packing import LAYOUTS, pack, unpack


@pytest.mark.parametrize("rows", [0, 1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fmt", PACKED)
def test_round_trip_is_byte_exact(fmt: str, layout: str, rows: int) -> None:
    for columns in COLUMNS:
        weight = torch.randint(0, 256, (rows, get_format(fmt).row_bytes(columns)), dtype=torch.uint8)
        packed = pack(weight, fmt, layout)
        assert packed.shape == weight.shape
        assert packed.dtype == torch.uint8
        assert torch.equal(unpack(packed, fmt, layout), weight)
        assert torch.equal(pack(unpack(weight, fmt, layout), fmt, layout), weight)


@pytest.mark.parametrize("fmt", PACKED)
def test_planar_moves_bytes_inside_the_row_only(fmt: str) -> None:
    weight = random_blocks(fmt, 3, 512)
    packed = pack(weight, fmt, "planar")
    assert torch.equal(packed.sort(-1).values, weight.sort(-1).values)
    for row in range(3):
        assert torch.equal(pack(weight[row], fmt, "planar"), packed[row])


@pytest.mark.parametrize("fmt", PACKED)
def test_planar_is_one_plane_per_field_in_field_order(fmt: str) -> None:
    spec = get_format(fmt)
    weight = random_blocks(fmt, 2, 3 * spec.block_size)
    packed = pack(weight, fmt, "planar")
    start = 0
    for field in spec.fields:
        for block in range(3):
            source = block * spec.block_bytes + spec.offset(field.name)
            target = start + block * field.nbytes
            assert torch.equal(
                packed[:, target : target + field.nbytes], weight[:, source : source + field.nbytes]
            )
        start += 3 * field.nbytes
    assert start == weight.shape[1]


def test_ggml_is_the_weight_itself() -> None:
    weight = random_blocks("Q4_K", 2, 256)
    assert pack(weight, "Q4_K", "ggml") is weight
    assert unpack(weight, "Q4_K", "ggml") is weight


@pytest.mark.parametrize("function", [pack, unpack])
@pytest.mark.parametrize(
    ("weight", "fmt", "layout", "message"),
    [
        (
            torch.zeros(2, 288, dtype=torch.uint8),
            "Q4_K",
            "tiled",
            "unknown layout 'tiled'; known: ggml, planar",
        ),
        (torch.zeros(2, 288, dtype=torch.uint8), "F16", "planar", "F16 is a plain float format"),
        (torch.zeros(2, 288), "Q4_K", "planar", "torch.float32 of shape"),
        (
            torch.zeros(2, 287, dtype=torch.uint8),
            "Q4_K",
            "planar",
            r"\(2, 287\) is not uint8 rows of whole Q4_K",
        ),
    ],
)
def test_wrong_arguments_are_refused(function, weight, fmt, layout, message) -> None:
    with pytest.raises(FormatError, match=message):
        function(weight, fmt, layout)
