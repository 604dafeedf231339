"""Prompts and steps of GPU kernels over caches of 8 bits against the modules over such caches."""

import pytest
import random_models
import torch
from module_linears import ModuleLinears
from random_models import write_random_model

from realizar_torch.checkpoint.gguf import open_gguf
from realizar_torch.models.loading import load_transformer
from realizar_torch.nn.kv_cache import KVCache

pytest.importorskip("triton")

from realizar_torch.generation import gpu_product, gpu_step, prompt_graph
from realizar_torch.generation.gpu_prompt import GpuPrompt
from realizar_torch.generation.gpu_step import GpuStep
from realizar_torch.generation.workspace import Workspace

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KINDS = [torch.int8, torch.float8_e4m3fn]
# tokens of a prompt, its padding, and steps behind it; the window of gemma3 is 5 or 16
TOKENS, PADDING, STEPS = (9, 2, 2) if DEVICE.type == "cpu" else (45, 9, 12)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Sizes that the interpreter runs in seconds, products by the modules."""
    if DEVICE.type == "cpu":
        sizes = {"HIDDEN": 32, "INNER": 64, "HEADS": 4, "KV_HEADS": 2, "HEAD_DIM": 24}
        for name, size in (sizes | {"WINDOW": 5}).items():
            monkeypatch.setattr(random_models, name, size)
        monkeypatch.setattr(gpu_product, "MATVEC_ROWS", 10**6)
        monkeypatch.setattr(gpu_step, "GpuLinears", ModuleLinears)
        monkeypatch.setattr(prompt_graph, "ROWS", (8, 20))


def load(path, arch, dtype=torch.float32):
    if not path.exists():
        write_random_model(path, arch, fmt="Q8_0", tied=False)
    return load_transformer(open_gguf(path), device=DEVICE, dtype=dtype, activations="float")


def new_cache(model, dtype, rows, poisoned=True):
    cache = KVCache(model.config, rows, 64, device=DEVICE, dtype=dtype)
    if poisoned and cache.scales is not None:
        # what nobody has written must not matter
        cache.scales.fill_(torch.nan)
    return cache


def by_modules(model, ids, mask, dtype):
    """Logits [B, STEPS + 1, V] of a prompt and the steps behind it."""
    # modules multiply what lies under the mask by zero
    cache = new_cache(model, dtype, len(ids), poisoned=False)
    found = [model(ids[:, :TOKENS], mask, cache=cache).logits[:, -1]]
    for step in range(TOKENS, ids.shape[1]):
        found.append(model(ids[:, step : step + 1], cache=cache).logits[:, -1])
    return torch.stack(found, 1)


def by_kernels(model, ids, mask, dtype):
    cache = new_cache(model, dtype, len(ids))
    found = [GpuPrompt(model).run(model, ids[:, :TOKENS], mask, cache).clone()]
    step = GpuStep(model, cache, Workspace.for_model(model.config, len(ids), device=DEVICE))
    for at in range(TOKENS, ids.shape[1]):
        found.append(step.run(ids[:, at]).clone())
    return torch.stack(found, 1)


def rms(x):
    return float(x.double().square().mean().sqrt())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_equals_the_modules_with_left_padding(tmp_path, monkeypatch, arch, kind):
    # an element that a last bit moves, moves by a step, where rounding errs by 1/sqrt(12) of one: 0.3 for one
    # in 130, and every layer moves some behind it
    monkeypatch.setattr(random_models, "LAYERS", 2)
    model = load(tmp_path / "m.gguf", arch)
    ids = torch.randint(3, 250, (2, TOKENS + STEPS), generator=torch.Generator().manual_seed(5)).to(DEVICE)
    mask = torch.ones_like(ids[:, :TOKENS])
    mask[0, :PADDING] = 0
    with torch.inference_mode():
        exact = by_modules(model, ids, mask, torch.float32)
        expected = by_modules(model, ids, mask, kind)
        found = by_kernels(model, ids, mask, kind)
    assert 0 < rms(found - expected) <= 0.3 * rms(expected - exact)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [*KINDS, torch.float16])
def test_a_bf16_model_stays_as_near_as_its_modules(tmp_path, kind):
    exact_model, model = (
        load(tmp_path / "m.gguf", "llama", dtype) for dtype in (torch.float32, torch.bfloat16)
    )
    ids = torch.randint(3, 250, (2, TOKENS + STEPS), generator=torch.Generator().manual_seed(5)).to(DEVICE)
    with torch.inference_mode():
        exact = by_modules(exact_model, ids, None, torch.float32)
        modules = by_modules(model, ids, None, kind)
        found = by_kernels(model, ids, None, kind)
        again = by_kernels(model, ids, None, kind)
    # the kernels keep the residual stream in fp32, the modules do not
    assert rms(found - exact) <= 1.2 * rms(modules - exact)
    assert torch.equal(found, again)
