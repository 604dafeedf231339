"""What every architecture asks of the GPU step: interpreted kernels around products that torch computes.

The products have tests of their own, and take the interpreter minutes.
"""

import dataclasses

import pytest
import torch
from arch_fixtures import TOLERANCE, golden, load
from fixture_models import MODELS, has_experts
from torch.nn import functional

import realizar_torch as rt
from realizar_torch import reference
from realizar_torch.generation.fusable import obstacle
from realizar_torch.nn.kv_cache import KVCache

pytest.importorskip("triton")

from realizar_torch.generation.gpu_step import GpuStep
from realizar_torch.generation.workspace import Workspace
from realizar_torch.triton_kernels import gate_up as gate_ups
from realizar_torch.triton_kernels import matvec as matvecs
from realizar_torch.triton_kernels import qkv as qkvs
from realizar_torch.triton_kernels.head_norms import norm_heads

DENSE = [name for name in MODELS if not has_experts(name)]
# fixtures with a fact that int8 activations meet: ragged rows, activations without a gate, norms behind
INT8 = ["llama", "gemma2", "gpt2", "olmo2", "phi2", "gptneox", "granite", "command-r-norms"]
PROMPT = 38

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="test_arch_gpu.py runs these on a GPU")


def _matvec(x, weight, fmt, in_features, bias=None, *, residual=None, out, layout, dependent):
    assert layout == "ggml" and not dependent
    y = x[:, :in_features] @ reference.dequantize(weight, fmt, in_features).T
    y = y if bias is None else y + bias
    return out.copy_(y if residual is None else y + residual)


def _matvec_int8(q, scale, sums, *operands, **options):
    return _matvec(q * scale.repeat_interleave(32, dim=1), *operands, **options)


def _gate_up(x, gate, up, fmt, in_features, *, activation, out, layout, dependent):
    products = [x[:, :in_features] @ reference.dequantize(w, fmt, in_features).T for w in (gate, up)]
    act = {
        "silu": functional.silu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda g: functional.gelu(g, approximate="tanh"),
    }
    return out.copy_(act[activation](products[0]) * products[1])


def _gate_up_int8(q, scale, sums, *operands, **options):
    return _gate_up(q * scale.repeat_interleave(32, dim=1), *operands, **options)


def _qkv_int8(q, scale, sums, weights, fmts, in_features, bias, *, layouts, out, dependent):
    rows = torch.cat([reference.dequantize(w, f, in_features) for w, f in zip(weights, fmts, strict=True)])
    y = (q * scale.repeat_interleave(32, dim=1))[:, :in_features] @ rows.T
    return out.copy_(y if bias is None else y + bias)


@pytest.fixture(autouse=True)
def _plain_products(monkeypatch):
    monkeypatch.setattr(matvecs, "matvec", _matvec)
    monkeypatch.setattr(matvecs, "matvec_int8", _matvec_int8)
    monkeypatch.setattr(gate_ups, "gate_up", _gate_up)
    monkeypatch.setattr(gate_ups, "gate_up_int8", _gate_up_int8)
    monkeypatch.setattr(qkvs, "qkv_int8", _qkv_int8)


def packed(name, activations="float"):
    model = load(name)
    rt.quantize_model(model, "Q8_0", exclude=(), activations=activations)
    return model


def inputs(name, steps):
    """Two texts, one of them padded, with ``steps`` tokens behind the prompt, and their mask."""
    ids, _ = golden(name)
    batch = torch.cat((ids, ids.roll(-5)))[:, : PROMPT + steps]
    mask = torch.ones_like(batch)
    batch[1, :13], mask[1, :13] = 0, 0
    return batch, mask


def modules_logits(model, name, steps=1):
    batch, mask = inputs(name, steps)
    with torch.inference_mode():
        return model(batch, mask).logits[:, PROMPT:]


def step_logits(model, name, steps=1, change=lambda model: None):
    """Behind a prompt that the modules have read; ``change`` is made to the model in between."""
    batch, mask = inputs(name, steps)
    with torch.inference_mode():
        cache = KVCache(model.config, 2, 64)
        model(batch[:, :PROMPT], mask[:, :PROMPT], cache=cache)
        change(model)
        assert obstacle(model) is None
        step = GpuStep(model, cache, Workspace.for_model(model.config, 2))
        return torch.stack([step.run(tokens).clone() for tokens in batch[:, PROMPT:].T], dim=1)


@pytest.mark.parametrize("name", DENSE)
def test_equals_the_modules(name):
    model = packed(name)
    expected = modules_logits(model, name)
    assert (step_logits(model, name) - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", INT8)
def test_int8_is_as_near_to_the_exact_logits_as_the_modules(name):
    exact, model = modules_logits(packed(name), name, 2), packed(name, "int8")
    modules = modules_logits(model, name, 2)
    assert rms(step_logits(model, name, 2) - exact) <= 1.5 * rms(modules - exact)


def rms(x):
    return x.square().mean().sqrt()


def config(**changes):
    def change(model):
        model.config = dataclasses.replace(model.config, **changes)

    return change


def layers(**changes):
    """Attributes of each layer, ``a__b`` of its parts."""

    def change(model):
        for layer in model.layers:
            for path, value in changes.items():
                *parts, attribute = path.split("__")
                owner = layer
                for part in parts:
                    owner = getattr(owner, part)
                setattr(owner, attribute, value)

    return change


def without_learned_positions(model):
    model.embed_positions = None


def without_magnitude(model):
    model.rope.magnitude = 1.0


def without_norm_biases(model):
    model.norm.bias = None


def rms_norms(model):
    model.norm.normalization = "rmsnorm"


def zero_centered(model):
    model.norm.zero_centered = True


MUTANTS = [
    ("gptneox", layers(parallel=False)),
    ("llama", layers(parallel=True)),
    ("granite", layers(residual_scale=1.0)),
    ("gemma2", layers(post_attn_norm=None)),
    ("olmo2", layers(post_mlp_norm=None)),
    ("gptneox", layers(mlp__activation="gelu_tanh")),
    ("gpt2", layers(mlp__activation="gelu")),
    ("gemma", layers(mlp__activation="silu")),
    ("smollm3", layers(self_attn__rotary=True)),
    ("llama", layers(self_attn__rotary=False)),
    ("gemma2", layers(self_attn__softcap=0.0)),
    ("granite", layers(self_attn__scale=8**-0.5)),
    ("olmo2", layers(self_attn__q_norm=None, self_attn__k_norm=None)),
    ("qwen3", layers(self_attn__q_norm=None, self_attn__k_norm=None)),
    (
        "stablelm-parallel",
        layers(self_attn__q_norm__normalization="rmsnorm", self_attn__k_norm__normalization="rmsnorm"),
    ),
    ("gemma2", config(final_softcap=0.0)),
    ("granite", config(logit_scale=1.0)),
    ("command-r", config(logit_scale=1.0)),
    ("granite", config(embedding_scale=1.0)),
    ("mistral3", config(temperature=0.0)),
    ("mistral", config(sliding_window=None)),
    ("gpt2", without_learned_positions),
    ("qwen2", without_magnitude),
    ("phi3-long", without_magnitude),
    ("gpt2", without_norm_biases),
    ("command-r", rms_norms),
    ("llama", zero_centered),
]


@pytest.mark.parametrize(("name", "change"), MUTANTS)
def test_a_lost_fact_is_noticed(name, change):
    model = packed(name)
    expected = modules_logits(model, name)
    assert (step_logits(model, name, change=change) - expected).abs().max() > 2 * TOLERANCE


@pytest.mark.parametrize("normalization", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize(("heads", "size"), [(1, 96), (3, 24), (5, 7)])
def test_norms_of_heads(normalization, heads, size):
    rows, first = torch.randn(2, 130) + 0.5, 9
    weight = torch.randn(heads * size)
    expected = rows.clone()
    part = expected[:, first : first + heads * size].view(2, heads, size).double()
    if normalization == "layernorm":
        part = functional.layer_norm(part, (size,), eps=1e-5)
    else:
        part = functional.rms_norm(part, (size,), eps=1e-5)
    expected[:, first : first + heads * size] = (part * weight.view(heads, size)).view(2, -1)
    norm_heads(rows, first, size, weight, normalization=normalization, eps=1e-5)
    # fp32 sums of up to 96 terms
    assert (rows - expected).abs().max() <= 1e-5
    assert torch.equal(rows[:, :first], expected[:, :first])
    with pytest.raises(rt.FormatError, match="weight of"):
        norm_heads(rows, 130 - size, size, torch.ones(2 * size), normalization=normalization, eps=1e-5)
