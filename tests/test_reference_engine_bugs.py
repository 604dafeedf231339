"""The thirteen defects found in the engine that this package re-creates, one test each, in its order."""

import gguf
import numpy as np
import pytest
import torch
from arch_fixtures import TOLERANCE, deviation, golden, load
from cases import assert_within, random_activations, random_blocks
from random_models import write_random_model
from tiny_models import write_tiny_llama
from torch import nn

import realizar_torch as rt
from realizar_torch import reference
from realizar_torch.checkpoint.gguf import open_gguf
from realizar_torch.errors import CacheFullError, FormatError, RealizarError
from realizar_torch.generation.loop import generate_ids
from realizar_torch.generation.step import DecodeState, decode_step, prefill
from realizar_torch.models.loading import load_transformer
from realizar_torch.nn.linear import QuantizedLinear
from realizar_torch.nn.mlp import MLP, GatedMLP
from realizar_torch.nn.projection import project


def quantized(fmt: str, rows: int, columns: int, seed: int, activations: str) -> QuantizedLinear:
    linear = QuantizedLinear.from_blocks(random_blocks(fmt, rows, columns, seed), columns, fmt)
    linear.activations = activations
    return linear.requires_grad_(False)


def load_file(path, activations: str = "float"):
    choice = {"device": torch.device("cpu"), "dtype": torch.float32, "activations": activations}
    return load_transformer(open_gguf(path), **choice)


def decoded(model, ids: torch.Tensor, prompt: int) -> torch.Tensor:
    """Logits [B, T - prompt, V] of the tokens behind the prompt, fed one at a time."""
    state = DecodeState(model, len(ids), ids.shape[1])
    with torch.inference_mode():
        prefill(model, ids[:, :prompt], None, state)
        steps = [decode_step(model, ids[:, i], state).clone() for i in range(prompt, ids.shape[1])]
    return torch.stack(steps, dim=1)


def test_01_int8_gate_and_up_do_not_mix_sub_blocks():
    """Scale and minimum of each Q4_K sub-block meet its own activations, in gate and in up."""
    x = random_activations(1, 512)
    # half a step of each value's block of 256, the K-quants' on the CPU, 5 % to spare
    steps = x.double().unflatten(-1, (-1, 256)).abs().amax(-1).repeat_interleave(256, -1) * 1.05 / 254
    gate_and_up = [quantized("Q4_K", 96, 512, seed, "int8") for seed in (1, 2)]
    for linear, y in zip(gate_and_up, project(x, gate_and_up), strict=True):
        weight = linear.dequantize(torch.float64)
        assert_within(y, x.double() @ weight.T, steps @ weight.abs().T)


@pytest.mark.parametrize("fmt", ["Q2_K", "Q5_K"])
def test_02_decoded_values_are_those_of_the_file_format(fmt):
    blocks = random_blocks(fmt, 5, 512)
    expected = gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[fmt])
    assert np.array_equal(rt.dequantize(blocks, fmt).numpy(), expected)


@pytest.mark.parametrize("fmt", ["Q4_K", "Q5_K", "Q4_0", "Q6_K"])
def test_03_the_oracle_itself_is_right(fmt):
    blocks = random_blocks(fmt, 5, 512)
    expected = gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[fmt])
    assert np.array_equal(reference.dequantize(blocks, fmt).numpy(), expected)


def test_04_an_ungated_mlp_quantizes_its_own_input():
    """Not what happens to lie in the buffer of quantized activations from the attention before it."""
    mlp = MLP(*(quantized("Q4_K", 256, 256, seed, "int8") for seed in (1, 2)), activation="gelu_tanh")
    attention, x = random_activations(1, 256, seed=5), random_activations(1, 256, seed=6)
    other = quantized("Q4_K", 256, 256, 3, "int8")
    other(attention)
    exact = nn.functional.gelu(x @ mlp.up_proj.dequantize(torch.float32).T, approximate="tanh")
    exact = exact @ mlp.down_proj.dequantize(torch.float32).T
    assert torch.nn.functional.cosine_similarity(mlp(x), exact).item() > 0.999


def test_05_gemma_is_computed_as_gemma():
    """GELU in the gated MLP, scaled embeddings, soft caps, norms behind, sliding windows."""
    parts = [nn.Linear(8, 8, bias=False) for _ in range(3)]
    x = torch.randn(2, 8)
    gate, up, down = (part.weight for part in parts)
    expected = (nn.functional.gelu(x @ gate.T, approximate="tanh") * (x @ up.T)) @ down.T
    assert torch.allclose(GatedMLP(*parts, activation="gelu_tanh")(x), expected, atol=1e-6)
    for name in ("gemma", "gemma2", "gemma3"):
        assert deviation(load(name), name).max() <= TOLERANCE


@pytest.mark.parametrize(
    "name", ["phi2", "stablelm", "gptneox", "llama", "llama-linear", "qwen2", "phi3-long"]
)
def test_06_partial_rotation_parallel_residuals_and_scaled_positions(name):
    """And Phi-3's norms are RMSNorms."""
    assert deviation(load(name), name).max() <= TOLERANCE


def test_07_grouped_heads_after_many_positions():
    """Decoding with three query heads to a key head equals prefill, also far behind 64 positions."""
    model = load("qwen3")
    ids = torch.randint(3, 99, (1, 100), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        whole = model(ids).logits
    assert (decoded(model, ids, 60) - whole[:, 60:]).abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "mixed formats"])
@pytest.mark.filterwarnings("ignore:decoding runs module by module")
def test_08_batches_have_biases_qk_norms_and_each_tensors_own_format(name, tmp_path):
    model = load_file(write_tiny_llama(tmp_path / "m.gguf")) if " " in name else load(name)
    ids = torch.randint(3, 99, (5, 24), generator=torch.Generator().manual_seed(2))
    batch = decoded(model, ids, 12)
    for row in range(5):
        with torch.inference_mode():
            alone = model(ids[row : row + 1]).logits[0, 12:]
        assert (batch[row] - alone).abs().max() <= TOLERANCE


def test_09_head_size_and_fused_rows_come_from_the_file():
    """Heads of 16 in a model of 36 / 6; fused q, k, v have as many rows as the heads say, not 3·hidden."""
    model = load("qwen3")
    assert (model.config.head_dim, model.config.q_dim, model.config.hidden_size) == (16, 96, 36)
    assert DecodeState(model, 1, 8).cache.keys.shape[-1] == 16
    attention = load("phi3").layers[0].self_attn
    rows = [linear.weight.shape[0] for linear in (attention.q_proj, attention.k_proj, attention.v_proj)]
    assert rows == [48, 16, 16]
    assert deviation(model, "qwen3").max() <= TOLERANCE


def test_10_buffers_fit_after_any_order_of_batch_sizes(tmp_path):
    """Widths that are no multiple of 256, a batch first, then one row, then a larger batch, in int8."""
    model = load_file(write_random_model(tmp_path / "m.gguf", "llama", fmt="Q8_0"), "int8")
    ids = torch.randint(3, 99, (7, 20), generator=torch.Generator().manual_seed(3))
    alone = torch.cat([decoded(model, ids[row : row + 1], 10) for row in range(7)])
    for count in (3, 1, 7):
        assert (decoded(model, ids[:count], 10) - alone[:count]).abs().max() <= TOLERANCE


def test_11_a_reused_prompt_holds_each_token_once(tmp_path):
    model, tokenizer = rt.load(write_tiny_llama(tmp_path / "m.gguf"), activations="float")
    cache = rt.PrefixCache(model)
    fresh = rt.generate(model, tokenizer, "the cat and the hat", max_new_tokens=12)
    answers = [
        rt.generate(model, tokenizer, "the cat and the hat", max_new_tokens=12, prefix_cache=cache)
        for _ in range(2)
    ]
    assert answers == [fresh, fresh]
    assert len(cache.token_ids) <= len(tokenizer.encode("the cat and the hat")) + 12


def test_12_no_step_loses_the_context():
    """The distribution of every step depends on the first token, however far back it is."""
    model, (ids, expected) = load("llama"), golden("llama")
    assert (decoded(model, ids, 10) - expected[:, 10:]).abs().max() <= TOLERANCE
    other = ids.clone()
    other[0, 0] += 1
    assert ((decoded(model, other, 10) - expected[:, 10:]).abs().amax(-1) > TOLERANCE).all()


def test_13_nothing_that_fails_becomes_a_zero():
    """A position too many, an id too large, wrong sizes and NaN are errors, not silence."""
    model, ids = load("llama"), torch.tensor([[5, 6, 7]])
    model.eos_token_ids, model.pad_token_id, model.max_seq_len = (), 0, 8
    with pytest.raises(CacheFullError):
        decoded_state = DecodeState(model, 1, 3)
        prefill(model, ids, None, decoded_state)
        decode_step(model, ids[:, 0], decoded_state)
    with torch.inference_mode(), pytest.raises(CacheFullError):
        load("gpt2")(torch.zeros(1, 65, dtype=torch.int64))
    with pytest.raises(FormatError, match="99"):
        state = DecodeState(model, 1, 8)
        prefill(model, ids, None, state)
        decode_step(model, torch.tensor([99]), state)
    with pytest.raises(FormatError, match="300"):
        quantized("Q4_K", 4, 256, 0, "int8")(torch.zeros(1, 300))
    model.lm_head.weight.data.fill_(torch.nan)
    with pytest.raises(RealizarError, match="NaN"):
        generate_ids(model, ids, max_new_tokens=2)
