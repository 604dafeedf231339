"""Values that a format's fp16 scales do not reach: refused by name, up to there they are encoded."""

import re

import pytest
import torch
from cases import PACKED
from encode_cases import ggml_blocks
from gguf_files import plain, write_gguf
from tiny_models import tiny_metadata, tiny_tensors
from torch import nn

import realizar_torch as rt
from realizar_torch.errors import FormatError
from realizar_torch.formats import get_format

# the lowest and the highest number of a block whose scales are fp16's largest number, as multiples of it
REACH = {
    "Q4_0": (-8, 8),
    "Q4_1": (-1, 16),
    "Q5_0": (-16, 16),
    "Q5_1": (-1, 32),
    "Q8_0": (-127, 127),
    "Q2_K": (-15, 45),
    "Q3_K": (-128, 128),
    "Q4_K": (-63, 945),
    "Q5_K": (-63, 1953),
    "Q6_K": (-4096, 4096),
}


def ramp(low: float, high: float) -> torch.Tensor:
    """``[3, 512]``, small but for the last block of the second row, which goes from low to high."""
    weight = torch.linspace(-1, 1, 3 * 512).reshape(3, 512)
    weight[1, 256:] = torch.linspace(low, high, 32).repeat(8)
    return weight


@pytest.mark.parametrize("importance", [None, torch.ones(512)], ids=["no importance", "importance"])
@pytest.mark.parametrize("end", [0, 1])
@pytest.mark.parametrize("fmt", PACKED)
def test_values_are_encoded_up_to_the_reach_and_refused_beyond(
    fmt: str, end: int, importance: torch.Tensor | None
) -> None:
    reach = torch.finfo(torch.float16).max * REACH[fmt][end]
    # a minimum above zero is a part of the highest; searches stray from the largest scale by some per cent
    other = torch.finfo(torch.float16).max * 0.9 if fmt in ("Q4_1", "Q5_1") and end else 0.0
    near = ramp(*sorted((0.9 * reach, other)))
    blocks = rt.quantize(near, fmt, importance=importance)
    assert blocks.equal(ggml_blocks(near, fmt, importance))
    error = (rt.dequantize(blocks, fmt, 512) - near).abs().amax()
    # half a step of two bits, and of the levels of scales
    assert error <= 0.25 * abs(reach)
    far = ramp(*sorted((1.2 * reach, other)))
    size = get_format(fmt).block_size
    words = rf"weight\[1, 256:{256 + size}\] holds .*{1.2 * reach:.3g}.* {fmt} cannot hold: .* {reach:.3g} "
    with pytest.raises(FormatError, match=words.replace("+", r"\+")):
        rt.quantize(far, fmt, importance=importance)


def test_columns_that_a_row_does_not_have_are_no_values() -> None:
    with pytest.raises(FormatError, match=r"weight\[0, 32:41\] holds 1 to 1e\+30, which Q8_0"):
        rt.quantize(torch.tensor([[1.0] * 40 + [1e30]]), "Q8_0")


@pytest.mark.parametrize("magnitude", [1e9, 1e13, 1e20, 3e38])
@pytest.mark.parametrize("fmt", PACKED)
def test_values_far_beyond_are_refused_where_ggml_stores_zeros(fmt: str, magnitude: float) -> None:
    """Its sums overflow, and the scale may be zero then; rows that are no whole blocks have their own end."""
    weight = magnitude * torch.rand(2, 300).clamp(0.1)
    with pytest.raises(FormatError, match=rf"weight\[0, 0:\d+\] holds .*, which {fmt} cannot hold"):
        rt.quantize(weight, fmt)
    weight[0, :256] = weight[0, 256:] = 0
    weight[1, :290] = 0
    with pytest.raises(FormatError, match=rf"weight\[1, (256|288):300\] holds 0 to .*, which {fmt} cannot"):
        rt.quantize(weight, fmt)


def test_slices_name_the_row_in_the_whole_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realizar_torch.ops.torch_kernels.CHUNK_BYTES", 2 * 4 * 64)
    weight = torch.randn(11, 64)
    weight[7, 40] = 1e7
    with pytest.raises(FormatError, match=r"weight\[7, 32:64\] holds -\d.* to 1e\+07"):
        rt.quantize(weight, "Q8_0")


def test_whoever_encodes_names_the_weight(tmp_path) -> None:
    linear = nn.Linear(64, 4)
    linear.weight.data[2, 3] = -1e7
    words = r"weight\[2, 0:32\] holds -1e\+07 to .*, which Q8_0 cannot hold"
    with pytest.raises(FormatError, match=words):
        rt.QuantizedLinear.from_linear(linear, "Q8_0")
    with pytest.raises(FormatError, match=f"^a: {words}"):
        rt.quantize_model(nn.ModuleDict({"a": linear}), "Q8_0")
    tensors = tiny_tensors()
    name = "blk.1.attn_v.weight"
    values = torch.randn(tensors[name][1])
    values[2, 3] = -1e7
    path = write_gguf(tmp_path / "model.gguf", tiny_metadata(), tensors | {name: plain(values)})
    with pytest.raises(FormatError, match=f"^{re.escape(str(path))}: {name}: {words}"):
        rt.load(path, quantize="Q8_0")
