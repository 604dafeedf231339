"""Small random models of every architecture row against transformers in fp32."""

import time

import pytest
import torch
from gguf_files import write_gguf
from hf_reference import reference_model
from random_models import CONTEXT, LAYERS, WINDOW, metadata, tensors, write_random_model

from realizar_torch.checkpoint.gguf import open_gguf
from realizar_torch.errors import (
    CacheFullError,
    FormatError,
    MissingTensorsError,
    UnsupportedArchitectureError,
)
from realizar_torch.models.config import ModelConfig
from realizar_torch.models.loading import load_transformer
from realizar_torch.models.transformer import Transformer
from realizar_torch.nn.kv_cache import KVCache

# fp32 on both sides; logits are of size 10, sums of up to 160 terms in other orders
TOLERANCE = 2e-4
VARIANTS = {
    "llama": {},
    "llama-untied": {"tied": False},
    "llama-biases": {"biases": True},
    "llama-divisors": {"divisors": True},
    "llama-q8_0": {"fmt": "Q8_0"},
    "llama-q4_1": {"fmt": "Q4_1", "tied": False},
    "gemma3": {},
    "gemma3-q5_0": {"fmt": "Q5_0"},
}


def _renamed(arch: str) -> dict:
    """The metadata of the llama model under another architecture's keys."""
    return {key.replace("llama", arch, 1): value for key, value in metadata("llama").items() if key[0] == "l"}


def load(path, activations="float") -> Transformer:
    return load_transformer(
        open_gguf(path), device=torch.device("cpu"), dtype=torch.float32, activations=activations
    )


@pytest.fixture(params=VARIANTS)
def path(request, tmp_path):
    arch = request.param.split("-")[0]
    return write_random_model(tmp_path / "model.gguf", arch, **VARIANTS[request.param])


@pytest.fixture
def ids():
    return torch.randint(0, 250, (2, 60), generator=torch.Generator().manual_seed(3))


def test_logits_equal_transformers_beyond_the_window(path, ids):
    with torch.inference_mode():
        ours, expected = load(path)(ids).logits, reference_model(path)(ids).logits
    assert ids.shape[1] > 2 * WINDOW
    assert expected.std() > 1
    assert (ours - expected).abs().max() <= TOLERANCE


def test_chunks_and_single_tokens_equal_one_pass(path, ids):
    model = load(path)
    cache = KVCache(model.config, 2, 60)
    with torch.inference_mode():
        whole = model(ids).logits
        pieces = [model(piece, cache=cache).logits for piece in ids.split([20, 25, *[1] * 15], dim=1)]
    assert (torch.cat(pieces, dim=1) - whole).abs().max() <= TOLERANCE


def test_left_padding_changes_nothing(path, ids):
    model = load(path)
    mask = torch.ones_like(ids)
    mask[1, :23] = 0
    with torch.inference_mode():
        padded = model(ids, mask).logits[1, 23:]
        alone = model(ids[1:, 23:]).logits[0]
        last = model(ids, mask, logits_to_keep=2).logits
    assert (padded - alone).abs().max() <= TOLERANCE
    assert last.shape[1] == 2 and (last[1] - alone[-2:]).abs().max() <= TOLERANCE


def test_sliding_layers_follow_the_period(tmp_path):
    config = ModelConfig.from_gguf(metadata("gemma3"))
    assert [config.window(layer) for layer in range(LAYERS)] == [WINDOW] * 5 + [None, WINDOW]
    llama = ModelConfig.from_gguf(metadata("llama") | {"llama.attention.sliding_window": 8})
    assert {llama.window(layer) for layer in range(LAYERS)} == {8}
    qwen3 = metadata("llama") | {"general.architecture": "qwen3", "qwen3.attention.sliding_window": 8}
    assert ModelConfig.from_gguf(qwen3 | _renamed("qwen3")).window(0) is None


def test_attention_scale_of_the_widest_gemma3():
    for layers, width in ((62, 96 / 12), (61, 24)):
        config = ModelConfig.from_gguf(metadata("gemma3") | {"gemma3.block_count": layers})
        assert config.attention_scale == pytest.approx(width**-0.5)


def test_linear_rope_scaling_divides_positions(tmp_path, ids):
    scaled = metadata("llama") | {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    entries = tensors("llama", "F32", True, False, False)
    path = write_gguf(tmp_path / "scaled.gguf", scaled, entries)
    divided = dict(entries)
    divided["rope_freqs.weight"] = ("F32", (12,), torch.full((12,), 4.0).numpy().tobytes())
    twin = write_gguf(tmp_path / "divided.gguf", metadata("llama"), divided)
    with torch.inference_mode():
        assert torch.allclose(load(path)(ids).logits, load(twin)(ids).logits, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"general.architecture": "mamba"}, UnsupportedArchitectureError, "mamba"),
        ({"llama.attention.value_length": 12}, UnsupportedArchitectureError, "value_length"),
        ({"llama.rope.dimension_count": 13}, ValueError, "13 of the 24"),
        ({"llama.rope.dimension_count": 26}, ValueError, "26 of the 24"),
        ({"llama.expert_count": 8}, ValueError, "expert_used_count"),
        (
            {"llama.rope.scaling.type": "ntk", "llama.rope.scaling.factor": 2.0},
            UnsupportedArchitectureError,
            "ntk",
        ),
        (
            {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0},
            ValueError,
            "original_context",
        ),
        ({"llama.attention.head_count_kv": 5}, ValueError, "evenly"),
        ({"llama.rope.scaling.factor": -1.0}, ValueError, "factor"),
        ({"llama.embedding_length": 0}, ValueError, "embedding_length"),
        ({"llama.block_count": "7"}, ValueError, "block_count"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, ValueError, "epsilon"),
    ],
)
def test_impossible_metadata_is_named(change, error, words):
    with pytest.raises(error, match=words):
        ModelConfig.from_gguf(metadata("llama") | change)


@pytest.mark.parametrize(
    "damage", ["missing norm", "missing output norm", "renamed", "extra", "shape", "packed norm"]
)
def test_incomplete_models_are_refused(tmp_path, damage):
    entries = tensors("llama", "Q8_0", True, False, False)
    culprit = "blk.3.ffn_norm.weight"
    if damage == "missing norm":
        del entries[culprit]
    elif damage == "renamed":
        entries["blk.3.ffn_nrom.weight"] = entries.pop(culprit)
    elif damage == "extra":
        culprit = "blk.9.attn_q.weight"
        entries[culprit] = entries["blk.3.attn_q.weight"]
    elif damage == "shape":
        culprit = "blk.3.ffn_down.weight"
        entries[culprit] = entries["blk.3.ffn_up.weight"]
    elif damage == "packed norm":
        fmt, _, data = entries["blk.3.attn_q.weight"]
        entries[culprit] = (fmt, (96,), data[: len(data) // 288])
    else:
        culprit = "output_norm.weight"
        del entries[culprit]
    path = write_gguf(tmp_path / "broken.gguf", metadata("llama"), entries)
    with pytest.raises(MissingTensorsError, match=culprit.replace(".", r"\.")):
        load(path)


def test_rope_divisors_must_be_positive(tmp_path):
    entries = tensors("llama", "F32", True, False, True)
    entries["rope_freqs.weight"] = ("F32", (12,), torch.zeros(12).numpy().tobytes())
    with pytest.raises(MissingTensorsError, match="rope_freqs"):
        load(write_gguf(tmp_path / "m.gguf", metadata("llama"), entries))


def test_tied_head_shares_memory(tmp_path):
    model = load(write_random_model(tmp_path / "m.gguf", "llama", fmt="Q8_0"))
    assert model.lm_head.weight is model.embed_tokens.weight


def test_cache_refuses_the_position_behind_its_end(path, ids):
    model = load(path)
    cache = KVCache(model.config, 2, 16)
    with torch.inference_mode():
        model(ids[:, :16], cache=cache)
        with pytest.raises(CacheFullError, match="16 positions are cached and 1 more"):
            model(ids[:, 16:17], cache=cache)
    cache.rollback(10)
    assert cache.length == 10
    with pytest.raises(FormatError):
        cache.rollback(11)


@pytest.mark.parametrize("mask", [[[1, 1, 0]], [[0, 1, 0]], [[0, 0, 0]], [[1, 1]]])
def test_masks_that_are_not_left_padding_are_refused(tmp_path, mask):
    model = load(write_random_model(tmp_path / "m.gguf", "llama"))
    with pytest.raises(FormatError, match="attention_mask"):
        model(torch.tensor([[5, 6, 7]]), torch.tensor(mask))


def test_frequencies_survive_half_precision(tmp_path):
    model = load(write_random_model(tmp_path / "m.gguf", "llama", divisors=True))
    before = model.rope.inv_freq.clone()
    model.half().float()
    assert model.rope.inv_freq.dtype == torch.float32 and torch.equal(model.rope.inv_freq, before)
    assert model.config.context_length == CONTEXT


@pytest.mark.parametrize("key", ["rope.scaling.factor", "rope.scale_linear"])
def test_a_rope_factor_without_a_type_is_linear(key):
    assert ModelConfig.from_gguf(metadata("llama") | {f"llama.{key}": 4.0}).rope_scaling.factor == 4.0
    off = {f"llama.{key}": 4.0, "llama.rope.scaling.type": "none"}
    assert ModelConfig.from_gguf(metadata("llama") | off).rope_scaling.factor == 1.0


def test_gemma3_reads_pattern_and_local_base_and_does_without_a_window():
    keys = {"gemma3.attention.sliding_window_pattern": 3, "gemma3.rope.freq_base_swa": 777.0}
    config = ModelConfig.from_gguf(metadata("gemma3") | keys)
    assert [config.is_sliding(layer) for layer in range(6)] == [True, True, False] * 2
    assert config.local_rope_theta == 777.0
    windowless = {k: v for k, v in metadata("gemma3").items() if "sliding" not in k}
    assert ModelConfig.from_gguf(windowless).window(0) is None


@pytest.mark.parametrize("key", ["logit_scale", "attention.max_alibi_bias"])
def test_mathematics_that_nobody_computes_is_refused(key):
    assert ModelConfig.from_gguf(metadata("llama") | {f"llama.{key}": 0.0})
    with pytest.raises(UnsupportedArchitectureError, match=key.split(".")[-1]):
        ModelConfig.from_gguf(metadata("llama") | {f"llama.{key}": 30.0})
    with pytest.raises(UnsupportedArchitectureError, match="causal"):
        ModelConfig.from_gguf(metadata("llama") | {"llama.attention.causal": False})


@pytest.mark.parametrize("value", [-1.0, float("inf"), float("nan")])
@pytest.mark.parametrize("key", ["attn_logit_softcapping", "final_logit_softcapping"])
def test_impossible_caps_are_refused(key, value):
    with pytest.raises(ValueError, match=key):
        ModelConfig.from_gguf(metadata("llama") | {f"llama.{key}": value})


def test_a_huge_layer_count_is_refused_at_once(tmp_path):
    keys = metadata("llama") | {"llama.block_count": 2_000_000_000}
    path = write_gguf(tmp_path / "m.gguf", keys, tensors("llama", "Q8_0", True, False, False))
    started = time.perf_counter()
    with pytest.raises(MissingTensorsError, match="block_count is 2000000000"):
        load(path)
    assert time.perf_counter() - started < 1
    with pytest.raises(UnsupportedArchitectureError) as error:
        ModelConfig.from_gguf({"general.architecture": "x" * 1_000_000})
    assert len(str(error.value)) < 1000
    with pytest.raises(ValueError, match="tokens is int"):
        ModelConfig.from_gguf(metadata("llama") | {"tokenizer.ggml.tokens": 5})


def test_gradients_reach_the_input_and_the_norms_with_int8_activations(tmp_path, ids):
    """The rounding is passed straight through, so int8 gradients point where float ones do."""
    path = write_random_model(tmp_path / "m.gguf", "llama", fmt="Q8_0", biases=True)
    gradients = []
    for activations in ("float", "int8"):
        model = load(path, activations)
        assert not model(ids).logits.requires_grad
        norm = model.layers[1].attn_norm.weight.requires_grad_(True)
        model(ids).logits.square().mean().backward()
        gradients.append(norm.grad)
    assert torch.cosine_similarity(*gradients, dim=0) > 0.99


def test_the_cache_and_the_logits_asked_for_must_fit(path, ids):
    model = load(path)
    with pytest.raises(FormatError, match="the cache is for 3"):
        model(ids, cache=KVCache(model.config, 3, 80))
    with pytest.raises(FormatError, match="logits_to_keep is -3"):
        model(ids, logits_to_keep=-3)
