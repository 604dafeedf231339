"""The format table: sizes and type numbers equal ggml's, everything else is derived from the fields."""

import gguf
import pytest

from realizar_torch import formats
from realizar_torch.errors import FormatError


@pytest.mark.parametrize("fmt", formats.FORMATS.values(), ids=lambda f: f.name)
def test_sizes_and_type_number_equal_gguf(fmt: formats.BlockFormat) -> None:
    kind = gguf.GGMLQuantizationType[fmt.name]
    assert fmt.ggml_type == kind.value
    assert (fmt.block_size, fmt.block_bytes) == gguf.GGML_QUANT_SIZES[kind]
    assert formats.FORMATS_BY_GGML_TYPE[kind.value] is fmt


@pytest.mark.parametrize("fmt", formats.FORMATS.values(), ids=lambda f: f.name)
def test_fields_follow_each_other_without_gaps(fmt: formats.BlockFormat) -> None:
    ends = [fmt.offset(field.name) + field.nbytes for field in fmt.fields]
    assert [0, *ends] == [*(fmt.offset(field.name) for field in fmt.fields), fmt.block_bytes]


def test_types_that_are_no_weights_are_unknown() -> None:
    # Q8_1 and Q8_K hold activations
    assert 9 not in formats.FORMATS_BY_GGML_TYPE
    assert 15 not in formats.FORMATS_BY_GGML_TYPE


def test_same_byte_count_does_not_mean_same_format() -> None:
    columns = formats.Q4_K.block_size
    assert formats.Q4_0.row_bytes(columns) == formats.Q4_K.row_bytes(columns)
    assert formats.Q5_0.row_bytes(columns) == formats.Q5_K.row_bytes(columns)
    assert len(set(formats.FORMATS.values())) == len(formats.FORMATS)


@pytest.mark.parametrize(("columns", "blocks"), [(1, 1), (255, 1), (256, 1), (257, 2), (300, 2), (512, 2)])
def test_rows_are_padded_to_whole_blocks(columns: int, blocks: int) -> None:
    assert formats.Q6_K.blocks(columns) == blocks
    assert formats.Q6_K.row_bytes(columns) == blocks * formats.Q6_K.block_bytes


def test_bits_per_weight() -> None:
    assert formats.Q4_K.bits_per_weight == 4.5
    assert formats.Q8_0.bits_per_weight == 8.5
    assert formats.BF16.bits_per_weight == 16


def test_packed_and_plain() -> None:
    assert formats.supported_formats() == tuple(f.name for f in formats.FORMATS.values() if f.packed)
    assert {f.name for f in formats.FORMATS.values() if not f.packed} == {"F32", "F16", "BF16"}


@pytest.mark.parametrize("name", ["Q4_k", "Q8_1", "", None, 12, ["Q4_K"]])
def test_unknown_name_is_refused_with_the_known_ones(name: object) -> None:
    with pytest.raises(FormatError, match=r"known: F32, .*Q6_K") as caught:
        formats.get_format(name)
    assert repr(name) in str(caught.value)


def test_plain_format_is_refused_where_packed_is_needed() -> None:
    with pytest.raises(FormatError, match="BF16 is a plain float format; packed formats: Q4_0"):
        formats.get_packed_format("BF16")


def test_unknown_field_is_refused() -> None:
    with pytest.raises(FormatError, match="Q4_0 has no field 'dmin'"):
        formats.Q4_0.offset("dmin")
