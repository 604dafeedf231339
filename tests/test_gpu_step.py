"""The GPU step against the modules it replaces: interpreted in CI, every architecture on a GPU."""

import pytest
import random_models
import torch
from random_models import write_random_model

from realizar_torch.checkpoint.gguf import open_gguf
from realizar_torch.models.loading import load_transformer
from realizar_torch.nn.kv_cache import KVCache
from realizar_torch.ops.cuda import INT8_MATVEC_ROWS

pytest.importorskip("triton")

from realizar_torch.generation.gpu_step import GpuStep
from realizar_torch.generation.workspace import Workspace

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# fp32 on both sides, logits of size 10 from sums of up to 288 terms in other orders
TOLERANCE = 2e-4
VARIANTS = {
    "llama": {"fmt": "Q8_0", "tied": False, "biases": True},
    "llama-divisors": {"fmt": "Q4_1", "divisors": True},
    "gemma3": {"fmt": "Q5_0"},
}


def load(tmp_path, variant, activations="float", dtype=torch.float32):
    path = tmp_path / "m.gguf"
    if not path.exists():
        write_random_model(path, variant.split("-")[0], **VARIANTS[variant])
    return load_transformer(open_gguf(path), device=DEVICE, dtype=dtype, activations=activations)


@pytest.fixture
def small(monkeypatch):
    """Sizes that the interpreter runs in seconds: one layer, heads 2:1."""
    if DEVICE.type == "cpu":
        sizes = {"LAYERS": 1, "HIDDEN": 32, "INNER": 32, "HEADS": 4, "KV_HEADS": 2, "HEAD_DIM": 8}
        for name, size in sizes.items():
            monkeypatch.setattr(random_models, name, size)


def ids_of(batch, count):
    return torch.randint(0, 250, (batch, count), generator=torch.Generator().manual_seed(5)).to(DEVICE)


def decode(model, ids, steps, mask=None, capacity=128):
    """Logits [B, steps, V] of the last tokens, fed one at a time."""
    with torch.inference_mode():
        cache = KVCache(model.config, len(ids), capacity, device=DEVICE, dtype=model.dtype)
        model(ids[:, :-steps], mask, cache=cache)
        step = GpuStep(model, cache, Workspace.for_model(model.config, len(ids), device=DEVICE))
        return torch.stack([step.run(ids[:, s - steps]).clone() for s in range(steps)], dim=1)


def test_equals_the_modules_with_left_padding(small, tmp_path):
    model, ids = load(tmp_path, "gemma3"), ids_of(2, 19)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with torch.inference_mode():
        expected = model(ids, mask, logits_to_keep=1).logits
    assert (decode(model, ids, 1, mask[:, :-1]) - expected).abs().max() <= TOLERANCE


def test_int8_is_as_near_to_the_exact_logits_as_the_modules(small, tmp_path):
    ids = ids_of(1, 12)
    with torch.inference_mode():
        exact = load(tmp_path, "llama")(ids, logits_to_keep=1).logits
        modules = load(tmp_path, "llama", "int8").cpu()(ids.cpu(), logits_to_keep=1).logits.to(DEVICE)
    fused = decode(load(tmp_path, "llama", "int8"), ids, 1)
    assert rms(modules - exact) > 0
    assert rms(fused - exact) <= 1.5 * rms(modules - exact)


def test_many_vectors_are_far_nearer_to_the_exact_logits_than_int8(small, tmp_path):
    ids = ids_of(INT8_MATVEC_ROWS + 1, 2)
    with torch.inference_mode():
        exact_model, model = load(tmp_path, "llama"), load(tmp_path, "llama", "int8")
        exact = exact_model(ids, logits_to_keep=1).logits[:, -1]
        modules = load(tmp_path, "llama", "int8").cpu()(ids.cpu(), logits_to_keep=1).logits[:, -1].to(DEVICE)
        cache = KVCache(model.config, len(ids), 64, device=DEVICE)
        exact_model(ids[:, :1], cache=cache)
        step = GpuStep(model, cache, Workspace.for_model(model.config, len(ids), device=DEVICE))
        fused = step.run(ids[:, 1])
    # fp16 has eleven bits where int8 has seven of the largest in a block
    assert 0 < rms(fused - exact) <= rms(modules - exact) / 8


def rms(x):
    return x.square().mean().sqrt()


@pytest.mark.parametrize("activations", ["int8", "float"])
def test_biases_written_to_in_place_are_taken_over(small, tmp_path, activations):
    model = load(tmp_path, "llama", activations)
    attention, config = model.layers[0].self_attn, model.config
    x = torch.randn(1, config.hidden_size, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    with torch.inference_mode():
        cache = KVCache(config, 1, 64, device=DEVICE)
        step = GpuStep(model, cache, Workspace.for_model(config, 1, device=DEVICE))

    def qkv():
        out = x.new_empty(1, config.q_dim + 2 * config.kv_dim)
        with torch.inference_mode():
            step._linears.qkv(attention, step._linears.quantized(x, attention.q_proj), out)
        return out

    before = qkv()
    # without inference mode, as an optimizer or load_state_dict writes
    attention.v_proj.bias.data.add_(3.0)
    step.refresh()
    difference = qkv() - before
    assert (difference[:, : -config.kv_dim] == 0).all()
    assert (difference[:, -config.kv_dim :] - 3.0).abs().max() <= 1e-5
    if activations == "float":
        with torch.inference_mode():
            parts = [part(x) for part in (attention.q_proj, attention.k_proj, attention.v_proj)]
        assert (qkv() - torch.cat(parts, 1)).abs().max() <= 1e-5


@pytest.mark.gpu
def test_positions_follow_the_cache_after_rollback_and_reset(tmp_path):
    model, ids = load(tmp_path, "llama"), ids_of(1, 6)
    with torch.inference_mode():
        cache = KVCache(model.config, 1, 64, device=DEVICE)
        step = GpuStep(model, cache, Workspace.for_model(model.config, 1, device=DEVICE))
        first = [step.run(ids[:, i]).clone() for i in range(3)]
        cache.rollback(1)
        assert torch.equal(step.run(ids[:, 1]), first[1])
        cache.reset()
        assert torch.equal(step.run(ids[:, 0]), first[0])


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("batch", [1, 3, 8, 11])
def test_equals_the_modules_beyond_the_window(tmp_path, variant, batch):
    model, ids = load(tmp_path, variant), ids_of(batch, 51)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    with torch.inference_mode():
        expected = model(ids, mask, logits_to_keep=30).logits
    found = decode(model, ids, 30, mask[:, :-30])
    assert (found - expected).abs().max() <= TOLERANCE
    if batch > 1:
        # bit for bit whatever the neighbours: other ids in the other rows
        other = ids.clone()
        other[1:] = ids[1:].flip(1)
        assert torch.equal(decode(model, other, 30, mask[:, :-30])[0], found[0])


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
def test_bf16_and_int8_stay_near_float32(tmp_path, variant):
    ids = ids_of(2, 40)
    with torch.inference_mode():
        exact = load(tmp_path, variant)(ids, logits_to_keep=10).logits
        modules = load(tmp_path, variant, dtype=torch.bfloat16)(ids, logits_to_keep=10).logits
    fused = decode(load(tmp_path, variant, dtype=torch.bfloat16), ids, 10)
    # the step keeps its residual stream in fp32, the modules do not
    assert rms(fused - exact) <= 1.2 * rms(modules - exact)
    both = decode(load(tmp_path, variant, "int8", torch.bfloat16), ids, 10)
    assert rms(both - exact) <= 0.1 * rms(exact)
