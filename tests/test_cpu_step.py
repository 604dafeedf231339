"""The fused CPU step against the modules it replaces: every architecture, batches, threads, allocations."""

import sys
import threading
import tracemalloc

import pytest
import torch
from random_models import write_random_model

from realizar_torch.checkpoint.gguf import open_gguf
from realizar_torch.generation.cpu_step import can_fuse
from realizar_torch.generation.step import decode_step, new_state, prefill
from realizar_torch.models.loading import load_transformer

pytest.importorskip("numba")

# fp32 on both sides, logits of size 10 from sums of up to 288 terms in other orders
TOLERANCE = 2e-4
VARIANTS = {
    "llama": {"fmt": "Q8_0", "tied": False, "biases": True},
    "llama-divisors": {"fmt": "Q4_1", "divisors": True},
    "gemma3": {"fmt": "Q5_0"},
}
PROMPT, STEPS = 21, 30


def load(path, activations="float"):
    return load_transformer(
        open_gguf(path), device=torch.device("cpu"), dtype=torch.float32, activations=activations
    )


@pytest.fixture(params=VARIANTS)
def path(request, tmp_path):
    return write_random_model(tmp_path / "m.gguf", request.param.split("-")[0], **VARIANTS[request.param])


@pytest.fixture
def ids():
    return torch.randint(0, 250, (3, PROMPT + STEPS), generator=torch.Generator().manual_seed(5))


def decode(model, ids, mask=None, only=None):
    """Logits [B, STEPS, V] of the last STEPS tokens, fed one at a time; ``only``: by one row's cache."""
    with torch.inference_mode():
        state = new_state(model, len(ids), ids.shape[1])
        prefill(model, ids[:, :-STEPS], mask, state)
        assert state.fused is not None
        if only is not None:
            batched, ids = state.cache, ids[only : only + 1]
            state = new_state(model, 1, ids.shape[1])
            prefill(model, ids[:, :-STEPS], None, state)
            state.cache.keys.copy_(batched.keys[:, only : only + 1])
            state.cache.values.copy_(batched.values[:, only : only + 1])
        return torch.stack(
            [decode_step(model, ids[:, -STEPS + s], state).clone() for s in range(STEPS)], dim=1
        )


def test_equals_the_modules_beyond_the_window(path, ids):
    model = load(path)
    with torch.inference_mode():
        expected = model(ids, logits_to_keep=STEPS).logits
    assert (decode(model, ids) - expected).abs().max() <= TOLERANCE


def test_padded_rows_equal_the_modules(path, ids):
    model = load(path)
    mask = torch.ones_like(ids)
    mask[0, :9], mask[2, : PROMPT - 1] = 0, 0
    with torch.inference_mode():
        expected = model(ids, mask, logits_to_keep=STEPS).logits
    assert (decode(model, ids, mask[:, :-STEPS]) - expected).abs().max() <= TOLERANCE


def test_int8_is_as_near_to_the_exact_logits_as_the_modules(path, ids):
    """A sum rounded otherwise may move a quant by a step, and later layers carry that on: so the two int8
    paths agree closely at first and are equally far from the exact logits throughout."""
    model = load(path, "int8")
    with torch.inference_mode():
        modules = model(ids, logits_to_keep=STEPS).logits
        exact = load(path)(ids, logits_to_keep=STEPS).logits
    fused = decode(model, ids)
    assert rms(fused[:, 0] - modules[:, 0]) <= 0.3 * rms(modules - exact)
    assert rms(fused - exact) <= 1.2 * rms(modules - exact)


def rms(x):
    return x.square().mean().sqrt()


@pytest.mark.parametrize("activations", ["float", "int8"])
def test_a_row_does_not_depend_on_its_neighbours_or_on_threads(path, ids, activations):
    model = load(path, activations)
    together = decode(model, ids)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert torch.equal(decode(model, ids), together)
    finally:
        torch.set_num_threads(threads)
    for row in range(3):
        assert torch.equal(decode(model, ids, only=row)[0], together[row])


def test_modules_take_over_where_something_was_changed(path, ids):
    model = load(path)
    cache = new_state(model, 1, 8).cache
    assert can_fuse(model, cache)
    handle = model.layers[0].mlp.register_forward_hook(lambda *_: None)
    assert not can_fuse(model, cache)
    handle.remove()
    assert can_fuse(model, cache)
    model.layers[1].mlp.down_proj = model.layers[1].mlp.down_proj.to_linear()
    assert not can_fuse(model, cache)


def test_a_step_allocates_nothing(path, ids):
    model = load(path, "int8")
    with torch.inference_mode():
        state = new_state(model, 1, 256)
        prefill(model, ids[:1, :4], None, state)
        token = ids[0, :1]
        for _ in range(20):
            decode_step(model, token, state)
        tracemalloc.start()
        before, blocks = tracemalloc.get_traced_memory()[0], sys.getallocatedblocks()
        for _ in range(100):
            decode_step(model, token, state)
        after, blocks = tracemalloc.get_traced_memory()[0], sys.getallocatedblocks() - blocks
        tracemalloc.stop()
    # less than one small object per step
    assert after - before < 2000 and blocks < 50


def test_two_models_in_two_threads(tmp_path, ids):
    models = [
        load(write_random_model(tmp_path / f"{arch}.gguf", arch, fmt="Q8_0"), "int8")
        for arch in ("llama", "gemma3")
    ]
    expected = [decode(model, ids) for model in models]
    found = [None, None]

    def work(index):
        for _ in range(3):
            found[index] = decode(models[index], ids)

    workers = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
