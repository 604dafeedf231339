"""Rotary frequencies of every scaling at distant positions, against transformers' own functions."""

import math
from types import SimpleNamespace

import pytest
import torch
from gguf_files import plain, write_gguf
from random_models import metadata, tensors

from realizar_torch.checkpoint.gguf import open_gguf
from realizar_torch.errors import MissingTensorsError
from realizar_torch.models.config import ModelConfig
from realizar_torch.models.loading import load_transformer
from realizar_torch.nn.rope import RotaryEmbedding, rotate

POSITIONS = torch.tensor([[0, 1, 100, 8192, 20000]])
# Llama 3.2 1B: 64 elements a head, base 500000, factor 32
LLAMA32 = [1.0] * 15 + [1.6512, 3.2923, 9.6667] + [32.0] * 14
LLAMA31 = [1.0] * 29 + [1.2075, 1.5534, 2.0263, 2.6945, 3.6843, 5.2573] + [8.0] * 29


def transformers_rope(kind: str, head_dim: int, theta: float, **parameters):
    """Frequencies and factor on cos and sin."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": kind, "rope_theta": theta, **parameters}
    config = SimpleNamespace(
        rope_parameters=rope,
        head_dim=head_dim,
        hidden_size=head_dim,
        num_attention_heads=1,
        max_position_embeddings=131072,
        standardize_rope_params=lambda: None,
    )
    return ROPE_INIT_FUNCTIONS[kind](config, device="cpu")


def assert_same_angles(rope: RotaryEmbedding, frequencies: torch.Tensor, magnitude: float) -> None:
    """cos and sin at all POSITIONS; the frequencies may differ by one fp32 rounding."""
    angle = POSITIONS[:, None, :, None].double() * frequencies.double()
    # the last bit of a frequency, and that of the angle itself, at the distance of the position
    tolerance = (angle.abs() * 2**-22 + 1e-6) * magnitude
    for ours, expected in zip(rope(POSITIONS), (angle.cos(), angle.sin()), strict=True):
        assert ((ours - expected * magnitude).abs() <= tolerance).all()


@pytest.mark.parametrize(("head_dim", "factor", "divisors"), [(64, 32.0, LLAMA32), (128, 8.0, LLAMA31)])
def test_llama3_divisors(head_dim, factor, divisors):
    """The divisors that the converter stores for Llama 3.1 8B and 3.2 1B are transformers' llama3 scaling."""
    frequencies, _ = transformers_rope(
        "llama3",
        head_dim,
        500_000.0,
        factor=factor,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    plain_rope = RotaryEmbedding(head_dim, 500_000.0)
    exact = (plain_rope.inv_freq / frequencies).tolist()
    assert exact == pytest.approx(divisors, rel=2e-4)
    assert_same_angles(RotaryEmbedding(head_dim, 500_000.0, divisors=exact), frequencies, 1.0)


@pytest.mark.parametrize("betas", [{}, {"beta_fast": 16.0, "beta_slow": 2.0}])
@pytest.mark.parametrize("factor", [4.0, 40.0])
def test_yarn_as_a_file_tells_it(factor, betas):
    keys = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": factor,
        "llama.rope.scaling.original_context_length": 4096,
        "llama.rope.freq_base": 10000.0,
    } | {f"llama.rope.scaling.yarn_{name}": value for name, value in betas.items()}
    config = ModelConfig.from_gguf(metadata("llama") | keys)
    frequencies, magnitude = transformers_rope(
        "yarn", 24, 10000.0, factor=factor, original_max_position_embeddings=4096, **betas
    )
    scaling = config.rope_scaling
    rope = RotaryEmbedding(24, 10000.0, divisors=scaling.divisors(24, 10000.0), magnitude=scaling.magnitude)
    assert scaling.magnitude == pytest.approx(magnitude)
    assert len({*scaling.divisors(24, 10000.0)}) > 3
    assert_same_angles(rope, frequencies, magnitude)


def test_an_explicit_attention_factor_replaces_yarns_own():
    keys = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 4096,
        "llama.rope.scaling.yarn_attn_factor": 1.25,
    }
    assert ModelConfig.from_gguf(metadata("llama") | keys).rope_scaling.magnitude == pytest.approx(1.25)


@pytest.mark.parametrize("kind", ["yarn", "linear"])
def test_a_factor_of_any_scaling_multiplies_what_the_scaling_gives(kind):
    """llama-context.cpp: yarn_attn_factor *= rope_attn_factor."""
    keys = {
        "llama.rope.scaling.type": kind,
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 4096,
        "llama.rope.scaling.attn_factor": 0.75,
    }
    own = 0.1 * math.log(4.0) + 1.0 if kind == "yarn" else 1.0
    assert ModelConfig.from_gguf(metadata("llama") | keys).rope_scaling.magnitude == pytest.approx(0.75 * own)


def test_linear_scaling_divides_all_frequencies():
    keys = {
        "llama.rope.scaling.type": "linear",
        "llama.rope.scaling.factor": 8.0,
        "llama.rope.freq_base": 1e4,
    }
    scaling = ModelConfig.from_gguf(metadata("llama") | keys).rope_scaling
    frequencies, _ = transformers_rope("linear", 24, 10000.0, factor=8.0)
    assert_same_angles(RotaryEmbedding(24, 10000.0, divisors=scaling.divisors(24, 1e4)), frequencies, 1.0)


@pytest.mark.parametrize("count", [11, 24])
def test_divisors_of_another_length_are_refused(count, tmp_path):
    entries = tensors("llama", "Q8_0", True, False, False)
    entries["rope_freqs.weight"] = plain(torch.ones(count))
    file = open_gguf(write_gguf(tmp_path / "m.gguf", metadata("llama"), entries))
    with pytest.raises(
        MissingTensorsError, match=rf"rope_freqs\.weight has shape \[{count}\], expected \[12\]"
    ):
        load_transformer(file, device=torch.device("cpu"), dtype=torch.float32, activations="float")


def test_a_part_of_a_head_is_rotated_and_the_rest_stays():
    x = torch.randn(1, 2, 5, 10)
    cos, sin = RotaryEmbedding(6, 100.0)(POSITIONS)
    turned = rotate(x, cos, sin)
    assert torch.equal(turned[..., 6:], x[..., 6:])
    first, second = x[..., :3], x[..., 3:6]
    assert torch.allclose(turned[..., :3], first * cos - second * sin)
    assert torch.allclose(turned[..., 3:6], second * cos + first * sin)
