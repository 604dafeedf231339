"""What is made in inference mode serves outside of it: caches, states, batches, evaluated modules."""

import contextlib

import pytest
import torch
from cases import random_blocks
from random_models import write_random_model

import realizar_torch as rt
from realizar_torch.generation.step import decode_step, new_state, prefill
from realizar_torch.nn.kv_cache import KVCache

PROMPT = torch.randint(3, 250, (1, 9), generator=torch.Generator().manual_seed(3))
# the penalty: without it such a model says one token again and again
OPTIONS = {"max_new_tokens": 12, "eos_token_id": [], "repetition_penalty": 2.0}
MODES = [torch.inference_mode, contextlib.nullcontext, torch.inference_mode, torch.no_grad]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], scope="module")
def model(request, tmp_path_factory):
    path = write_random_model(tmp_path_factory.mktemp("models") / "m.gguf", "llama", fmt="Q8_0")
    return rt.load(path, device=request.param, activations="float", dtype=torch.float32)[0]


@pytest.fixture
def ids(model):
    return PROMPT.to(model.device)


def generate(model, ids, **options):
    return model.generate(ids, **OPTIONS, **options).tolist()


def test_requests_in_and_out_of_it_take_turns(model, ids):
    found = []
    for mode in MODES:
        with mode():
            found.append(generate(model, ids))
    assert found == [found[0]] * len(MODES)


def test_a_prefix_cache_outlives_it(model, ids):
    expected, cache = generate(model, ids), rt.PrefixCache(model)
    for mode in MODES:
        with mode():
            assert generate(model, ids, prefix_cache=cache) == expected
            assert len(cache.token_ids) >= ids.shape[1]


@pytest.mark.parametrize("first, second", [MODES[:2], MODES[1:3]])
def test_rows_of_a_batch_join_on_both_sides(model, ids, first, second):
    expected = tuple(generate(model, ids)[0][ids.shape[1] :])
    with first():
        batch = rt.BatchedGenerator(model, max_batch=2)
        batch.add(ids[0], **OPTIONS)
        batch.step()
    with second():
        batch.add(ids[0], **OPTIONS)
        assert [completion.token_ids for completion in batch] == [expected] * 2


@pytest.mark.parametrize("first, second", [MODES[:2], MODES[1:3], MODES[2:4]])
def test_steps_go_on_behind_it(model, ids, first, second):
    def logits(first, second):
        with torch.no_grad(), first():
            state = new_state(model, 1, 64)
            found = [prefill(model, ids, None, state).clone()]
        with torch.no_grad(), second():
            for token in range(20, 30):
                found.append(decode_step(model, ids.new_tensor([token]), state).clone())
            state.close()
        return torch.cat(found)

    assert torch.equal(logits(first, second), logits(torch.no_grad, torch.no_grad))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_a_cache_takes_rows_on_both_sides(model, ids, dtype):
    """Whose keys may carry a gradient, as those of a model in training do."""
    with torch.inference_mode():
        cache = KVCache(model.config, 1, 32, device=model.device, dtype=dtype)
        inside = model(ids, cache=cache).logits
        cache.reset(zero=True)
    with torch.no_grad():
        outside = model(ids, cache=cache).logits
    assert torch.equal(inside, outside)
    assert not cache.ensure(1, 16) and cache.length == 0
    rows = torch.randn(1, model.config.num_kv_heads, 3, model.config.head_dim, device=model.device)
    keys, _ = cache.append(0, rows, rows)
    torch.testing.assert_close(keys, rows, rtol=0, atol=0 if dtype.is_floating_point else 0.02)


def test_a_module_that_was_evaluated_trains(model):
    """In the layout of its device."""
    device = model.device
    linear = rt.QuantizedLinear.from_blocks(random_blocks("Q6_K", 8, 256).to(device), 256, "Q6_K")
    rt.prepack(linear)
    x = torch.randn(3, 256, device=device)
    with torch.inference_mode():
        expected = linear(x)
    x.requires_grad_(True)
    found = linear(x)
    assert torch.equal(found.detach(), expected)
    found.sum().backward()
    dense = linear.dequantize(torch.float32)
    torch.testing.assert_close(
        x.grad, dense.sum(0).expand(3, -1), rtol=1e-5, atol=1e-5 * float(dense.abs().sum(0).max())
    )
