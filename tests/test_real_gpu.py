"""Two real models on a GPU against the CPU's float logits of the same files, and 200 tokens three ways."""

from functools import cache
from pathlib import Path

import pytest
import torch
from test_real_models import GPL3, INT8_ERROR, KEPT, MODELS

import realizar_torch as rt
from realizar_torch.generation.step import decode_step, new_state, prefill

pytestmark = [pytest.mark.gpu, pytest.mark.real_model]

DEVICE = torch.device("cuda")
# past gemma3's sliding window, and 1,000 tokens
TEXT = GPL3[2000:8000]
TOKENS = 200
NUMERICS = {"float": torch.float32, "int8": torch.bfloat16}


# a worker of pytest-xdist per model: what the CPU computes is computed once
@pytest.fixture(scope="module", params=[pytest.param(m, marks=pytest.mark.xdist_group(m)) for m in MODELS])
def name(request):
    return request.param


@pytest.fixture(scope="module")
def path(name, request):
    return request.getfixturevalue(f"{name}_path")


@pytest.fixture(scope="module")
def exact(path):
    """The prompt's ids [1, T], and the CPU's fp32 logits behind every one of them [T, V]."""
    model, tokenizer = rt.load(path, device="cpu", activations="float")
    ids = torch.tensor([tokenizer.encode(TEXT)])
    assert ids.shape[1] > 1000
    with torch.inference_mode():
        return ids.to(DEVICE), model(ids).logits[0].to(DEVICE)


@cache
def load(path: Path, activations: str, dtype: torch.dtype) -> rt.CausalLM:
    return rt.load(path, device=DEVICE, activations=activations, dtype=dtype)[0]


def by_modules(model, ids):
    with torch.inference_mode():
        return model(ids).logits[0]


def by_steps(model, ids, first):
    """Logits behind ids[first - 1] and all later ones: a prompt's pass, and a step for each."""
    logits = torch.empty(ids.shape[1] - first + 1, model.config.vocab_size, device=DEVICE)
    with torch.inference_mode():
        state = new_state(model, *ids.shape)
        logits[0] = prefill(model, ids[:, :first], None, state)[0]
        for row, token in zip(logits[1:], ids[0, first:], strict=True):
            row.copy_(decode_step(model, token[None], state)[0])
        state.close()
    return logits


def error_of_the_top(found, expected):
    """Root mean square over the 20 highest of ``expected`` at every position."""
    expected = expected[-len(found) :]
    top = expected.topk(20).indices
    return float((found - expected).gather(-1, top).square().mean().sqrt())


def test_float_logits_are_those_of_the_cpu_at_every_position(path, exact):
    """By modules, by steps, and behind prompts of several lengths."""
    (ids, expected), model = exact, load(path, "float", torch.float32)
    assert (by_modules(model, ids) - expected).abs().max() <= 1e-3
    first = 5
    assert (by_steps(model, ids, first) - expected[first - 1 :]).abs().max() <= 1e-3
    for length in (1, 30, 600, ids.shape[1]):
        behind = by_steps(model, ids[:, :length], length)
        assert (behind - expected[length - 1]).abs().max() <= 1e-3, length


def test_bfloat16_logits_are_near_at_every_position(path, exact):
    """By a pass of the prompt and steps, whose residual stream is fp32."""
    (ids, expected), model = exact, load(path, "float", torch.bfloat16)
    for first in (5, ids.shape[1] // 2):
        error = by_steps(model, ids, first) - expected[first - 1 :]
        assert error.square().mean().sqrt() <= 0.1, first


def test_int8_logits_are_as_near_as_on_the_cpu(path, name, exact):
    (ids, expected), model = exact, load(path, "int8", torch.float32)
    assert error_of_the_top(by_modules(model, ids)[-KEPT:], expected) <= INT8_ERROR[name]
    # the last prompt is short enough for tensor cores that take packed weights
    for first, length in ((ids.shape[1] - KEPT, ids.shape[1]), (1, KEPT), (KEPT, KEPT)):
        found = by_steps(model, ids[:, :length], first)
        assert error_of_the_top(found, expected[:length]) <= INT8_ERROR[name], (first, length)


@pytest.mark.parametrize("activations", NUMERICS)
def test_greedy_tokens_of_launches_graph_and_compiled_step_are_equal(path, exact, activations):
    model, ids = load(path, activations, NUMERICS[activations]), exact[0][:, :30]
    options = {"max_new_tokens": TOKENS, "eos_token_id": []}
    eager, graph = (
        model.generate(ids, cuda_graph=wanted, **options)[0, ids.shape[1] :].tolist()
        for wanted in (False, True)
    )
    step, compiled = torch.compile(decode_step), []
    with torch.inference_mode():
        state = new_state(model, 1, ids.shape[1] + TOKENS)
        logits = prefill(model, ids, None, state)
        for _ in range(TOKENS):
            token = logits.argmax(-1)
            compiled.append(int(token))
            logits = step(model, token, state)
        stats = state.decoder.stats
        state.close()
    assert eager == graph == compiled
    assert stats.captures == 1 and stats.graph_replays == TOKENS - 1 and stats.fallback is None
