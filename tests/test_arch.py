"""Every architecture row against transformers: files by llama.cpp's converter, logits stored beside them."""

import math

import pytest
import torch
from arch_fixtures import FIXTURES, TOLERANCE, deviation, golden, golden_short, load, write_resized
from fixture_models import MODELS, VOCAB, WINDOW, has_experts, is_long
from gguf_files import plain, write_gguf
from torch import nn

from realizar_torch.checkpoint.gguf import open_gguf
from realizar_torch.errors import CacheFullError, UnsupportedArchitectureError
from realizar_torch.generation.cpu_step import why_not
from realizar_torch.generation.step import DecodeState, decode_step, prefill
from realizar_torch.models.arch import ARCHITECTURES
from realizar_torch.models.config import ModelConfig
from realizar_torch.models.loading import load_transformer
from realizar_torch.models.tensors import tensor_problems
from realizar_torch.nn import experts
from realizar_torch.nn.attention import attend
from realizar_torch.nn.kv_cache import KVCache


def test_every_row_has_a_fixture():
    assert {open_gguf(FIXTURES / f"{name}.gguf").arch for name in MODELS} == set(ARCHITECTURES)


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name):
    worst = deviation(load(name), name)
    assert len(worst) > 3 * WINDOW
    assert worst.max() <= TOLERANCE


@pytest.mark.parametrize("name", [name for name in MODELS if is_long(name)])
def test_short_texts_have_factors_of_their_own(name):
    """A model loaded for no more than the original length; one loaded for more uses the long factors."""
    ids, expected = golden(name)
    short = golden_short(name)
    with torch.inference_mode():
        ours = load(name, max_seq_len=WINDOW)(ids[:, :WINDOW]).logits
        longer = load(name, max_seq_len=WINDOW + 1)(ids[:, :WINDOW]).logits
    assert (ours - short).abs().max() <= TOLERANCE
    assert (longer - expected[:, :WINDOW]).abs().max() <= TOLERANCE
    assert (short - expected[:, :WINDOW]).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("name", MODELS)
def test_chunks_and_single_tokens_equal_one_pass(name):
    model, (ids, expected) = load(name), golden(name)
    cache = KVCache(model.config, 1, ids.shape[1])
    with torch.inference_mode():
        pieces = [model(piece, cache=cache).logits for piece in ids.split([20, 25, *[1] * 15], dim=1)]
    assert (torch.cat(pieces, dim=1) - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", MODELS)
def test_decoding_a_padded_batch_equals_prefill(name):
    """Row 0 is the prompt, row 1 its end alone, behind padding; the last tokens are decoded one by one."""
    model, (ids, expected) = load(name), golden(name)
    count, pad, end = ids.shape[1], 13, 50
    batch = torch.cat((ids, ids.roll(-5)))
    mask = torch.ones_like(batch)
    batch[1, :pad], mask[1, :pad] = 0, 0
    state = DecodeState(model, 2, count)
    with torch.inference_mode():
        alone = model(batch[1:, pad:]).logits[0]
        steps = [prefill(model, batch[:, :end], mask[:, :end], state)]
        assert why_not(model, state.cache) is None
        # a fused step's logits are valid until the next step
        steps += [decode_step(model, batch[:, i], state).clone() for i in range(end, count)]
    ours = torch.stack(steps, dim=1)
    assert (ours[0] - expected[0, end - 1 :]).abs().max() <= TOLERANCE
    assert (ours[1] - alone[end - pad - 1 :]).abs().max() <= TOLERANCE


# rows of 96 or of 768 columns, so that every matrix is whole blocks
PACKED = [(name, "Q8_0") for name in MODELS] + [
    (name, "Q4_K") for name in ("llama", "phi3", "falcon", "gemma2")
]


@pytest.mark.parametrize(("name", "fmt"), PACKED)
def test_packed_weights_equal_their_values(name, fmt, tmp_path):
    """The packed model equals the dense model of its dequantized weights, in the fixture's architecture."""
    ids, logits = golden(name)[0], []
    for path in write_resized(tmp_path, name, fmt):
        choice = {"device": torch.device("cpu"), "dtype": torch.float32, "activations": "float"}
        with torch.inference_mode():
            logits.append(load_transformer(open_gguf(path), **choice)(ids).logits)
    assert logits[1].std() > 0.1
    assert (logits[0] - logits[1]).abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", ["phi3", "falcon", "gpt2"])
def test_parts_of_a_tensor_are_views_of_the_file(name):
    """Fused q, k, v and gate, up are split without a copy of their bytes (of packed weights; see above)."""
    file = open_gguf(FIXTURES / f"{name}.gguf")
    choice = {"device": torch.device("cpu"), "dtype": torch.float16, "activations": "float"}
    layer = load_transformer(file, **choice).layers[0]
    attention, whole = layer.self_attn, file.read("blk.0.attn_qkv.weight")
    parts = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    assert torch.equal(torch.cat([part.detach() for part in parts]), whole)
    starts = [part.data_ptr() - whole.data_ptr() for part in parts]
    assert starts == [0, parts[0].nbytes, parts[0].nbytes + parts[1].nbytes]
    if name == "phi3":
        gate, up, fused = (
            layer.mlp.gate_proj.weight,
            layer.mlp.up_proj.weight,
            file.read("blk.0.ffn_up.weight"),
        )
        assert (gate.data_ptr(), up.data_ptr()) == (fused.data_ptr(), fused.data_ptr() + gate.nbytes)


def test_positions_that_were_not_learned_are_refused():
    model, (ids, _) = load("gpt2"), golden("gpt2")
    with (
        torch.inference_mode(),
        pytest.raises(CacheFullError, match="65 positions, but the model has learned 64"),
    ):
        model(torch.cat((ids, ids[:, :5]), dim=1))


@pytest.mark.parametrize("name", ["llama", "qwen2", "internlm2"])
def test_fused_and_separate_rows_mean_the_same(name, tmp_path):
    """q, k and v as one tensor in the file of an architecture that usually has three."""
    file = open_gguf(FIXTURES / f"{name}.gguf")
    tensors = {key: plain(file.read(key).clone()) for key in file.tensors}
    for layer in range(2):
        for kind in ("weight", "bias"):
            stems = [f"blk.{layer}.attn_{part}.{kind}" for part in "qkv"]
            if stems[0] in tensors:
                tensors[f"blk.{layer}.attn_qkv.{kind}"] = plain(torch.cat([file.read(s) for s in stems]))
                for stem in stems:
                    del tensors[stem]
    keys = {key: value for key, value in file.metadata.items() if key.startswith((file.arch, "general.arch"))}
    path = write_gguf(tmp_path / "m.gguf", keys | {f"{file.arch}.vocab_size": VOCAB}, tensors)
    choice = {"device": torch.device("cpu"), "dtype": torch.float32, "activations": "float"}
    assert deviation(load_transformer(open_gguf(path), **choice), name).max() <= TOLERANCE


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("qwen2", "blk.1.attn_k.bias"),
        ("qwen3", "blk.1.attn_q_norm.weight"),
        ("command-r-norms", "blk.0.attn_k_norm.weight"),
        ("gemma2", "blk.1.post_ffw_norm.weight"),
        ("gpt2", "position_embd.weight"),
        ("gpt2", "output_norm.bias"),
        ("phi2", "output.bias"),
        ("falcon-groups", "blk.1.attn_norm.bias"),
        ("stablelm", "blk.1.ffn_norm.bias"),
        ("phi3", "blk.1.attn_qkv.weight"),
    ],
)
def test_a_lost_tensor_is_named(name, lost):
    file = open_gguf(FIXTURES / f"{name}.gguf")
    config = ModelConfig.from_gguf(file.metadata)
    assert tensor_problems(file.tensors, config) == []
    rest = {key: info for key, info in file.tensors.items() if key != lost}
    problems = tensor_problems(rest, config)
    expected = "missing blk.1.attn_q.weight" if "qkv" in lost else f"missing {lost}"
    assert any(problem.startswith(expected) for problem in problems), problems


def test_a_mixture_of_experts_is_named_and_not_taken_for_dense():
    with pytest.raises(
        UnsupportedArchitectureError, match="'deepseek2' is not supported; supported: llama, "
    ):
        ModelConfig.from_gguf({"general.architecture": "deepseek2"})
    with pytest.raises(UnsupportedArchitectureError, match="phi3 with 16 experts is not supported"):
        load("phi3", {"phi3.expert_count": 16})


def test_caps_of_scores_and_logits():
    """A score of 200 capped at 50 is 49.96646, a logit of 100 capped at 30 is 29.92374; 0 is no cap."""
    q, k = torch.tensor([[[[200.0]]]]), torch.tensor([[[[1.0], [0.0]]]])
    v = torch.tensor([[[[1.0], [0.0]]]])
    for cap, score in ((50.0, 49.96646), (0.0, 200.0)):
        odds = attend(q.double(), k.double(), v.double(), None, 0.05, cap and cap * 0.05)
        assert odds.item() == pytest.approx(1 / (1 + math.exp(-score * 0.05)), rel=1e-6)
    for cap, logit in ((30.0, 29.92374), (0.0, 100.0)):
        model = load("gemma2", {"gemma2.final_logit_softcapping": cap})
        model.lm_head = nn.Threshold(1e9, 100.0)
        assert model(torch.tensor([[5]])).logits[0, 0, 0].item() == pytest.approx(logit, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MODELS)
def test_half_precision_keeps_the_direction(name, dtype, monkeypatch):
    """No step changes the dtype on the way; logits are rounded, not different."""
    ids, expected = golden(name)
    with torch.inference_mode():
        if has_experts(name):
            # scores that are nearly equal would send a token elsewhere
            keep_routes(load(name), ids, monkeypatch)
        ours = load(name, dtype=dtype)(ids).logits
    assert torch.cosine_similarity(ours, expected, dim=-1).min() > 0.98


def keep_routes(model, ids, monkeypatch):
    """From now on tokens go to the experts that ``model`` chooses, with weights by the scores at hand."""
    routes, choose = [], experts.choose_experts

    def record(scores, used, normalized):
        routes.append(choose(scores, used, normalized)[1])
        return choose(scores, used, normalized)

    def replay(scores, used, normalized):
        weights = scores.softmax(-1).gather(-1, routes[0])
        return weights / weights.sum(-1, keepdim=True) if normalized else weights, routes.pop(0)

    monkeypatch.setattr(experts, "choose_experts", record)
    model(ids)
    monkeypatch.setattr(experts, "choose_experts", replay)
