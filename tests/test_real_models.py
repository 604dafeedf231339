"""Two real models against transformers in fp32: logits, decode, batches, int8 error, perplexity."""

import math
from functools import cache
from pathlib import Path

import pytest
import torch
from hf_reference import reference_model

import realizar_torch as rt
from realizar_torch.generation.step import decode_step, new_state, prefill

pytestmark = pytest.mark.real_model

# transformers in fp32 is itself 4e-5 from fp64; the rest is headroom for other summation orders
TOLERANCE = 3e-4
GPL3 = (Path(__file__).parent / "data" / "gpl-3.txt").read_text()
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. 東京は日本の首都です。 1234567890",
    GPL3[:900],
    GPL3[2000:8000],
)
MODELS = ("smollm2", "gemma3")
# positions at the end of a prompt whose logits are looked at
KEPT = 48
# root mean square of what int8 activations move the top 20 logits by
INT8_ERROR = {"smollm2": 0.3, "gemma3": 0.5}


@pytest.fixture(params=MODELS)
def name(request):
    return request.param


@pytest.fixture
def path(name, request):
    return request.getfixturevalue(f"{name}_path")


@cache
def load(path: Path, activations: str):
    return rt.load(path, activations=activations)


@cache
def reference(path: Path):
    return reference_model(path)


def encode(tokenizer, text):
    return torch.tensor([tokenizer.encode(text)])


@cache
def reference_logits(path: Path, prompt: int) -> torch.Tensor:
    """The reference's logits [KEPT, V] at the last positions of a prompt (all of them if it is shorter)."""
    ids = encode(load(path, "float")[1], PROMPTS[prompt])
    with torch.inference_mode():
        return reference(path)(ids, logits_to_keep=KEPT).logits[0]


def test_prompts_cross_the_sliding_window(gemma3_path):
    lengths = [len(load(gemma3_path, "float")[1].encode(text)) for text in PROMPTS]
    assert min(lengths) <= 7 and max(lengths) >= 1100


@pytest.mark.parametrize("prompt", range(len(PROMPTS)))
def test_logits_equal_transformers(path, prompt):
    """The whole vocabulary; every position of the shorter prompts, the last ones of the others."""
    model, tokenizer = load(path, "float")
    with torch.inference_mode():
        logits = model(encode(tokenizer, PROMPTS[prompt]), logits_to_keep=KEPT).logits[0]
    assert (logits - reference_logits(path, prompt)).abs().max() <= TOLERANCE


@pytest.mark.parametrize("prompt", (0, 4))
def test_decode_equals_prefill(path, prompt):
    model, tokenizer = load(path, "float")
    ids = encode(tokenizer, PROMPTS[prompt])
    steps = min(8, ids.shape[1] - 1)
    with torch.inference_mode():
        whole = model(ids, logits_to_keep=steps).logits[0]
        state = new_state(model, 1, ids.shape[1])
        prefill(model, ids[:, :-steps], None, state)
        for step in range(steps):
            logits = decode_step(model, ids[:, -steps + step], state)
            assert (logits[0] - whole[step]).abs().max() <= TOLERANCE, step


def test_batch_of_padded_prompts_equals_single_prompts(path):
    """Teacher-forced: every step's logits agree, and ids wherever the margin allows a decision."""
    model, tokenizer = load(path, "float")
    prompts = [tokenizer.encode(text) for text in PROMPTS[:3]]
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    steps = 6
    with torch.inference_mode():
        state = new_state(model, len(prompts), longest + steps)
        batched = [prefill(model, ids, mask, state).clone()]
        forced = []
        for _ in range(steps):
            forced.append(batched[-1].argmax(-1))
            batched.append(decode_step(model, forced[-1], state).clone())
        for row, prompt in enumerate(prompts):
            state = new_state(model, 1, len(prompt) + steps)
            single = prefill(model, torch.tensor([prompt]), None, state)[0]
            for step in range(steps + 1):
                assert (batched[step][row] - single).abs().max() <= TOLERANCE, (row, step)
                first, second = single.topk(2).values
                if first - second > 2 * TOLERANCE:
                    assert batched[step][row].argmax() == single.argmax()
                if step < steps:
                    single = decode_step(model, forced[step][row : row + 1], state)[0].clone()


@pytest.mark.parametrize("prompt", range(len(PROMPTS)))
def test_int8_error_on_the_top_logits(path, name, prompt):
    """Root mean square over the reference's top 20 at the last positions; single ones scatter."""
    model, tokenizer = load(path, "int8")
    ids = encode(tokenizer, PROMPTS[prompt])
    expected = reference_logits(path, prompt)
    top = expected.topk(20).indices
    steps = min(KEPT, ids.shape[1] - 1)
    with torch.inference_mode():
        prefilled = model(ids, logits_to_keep=KEPT).logits[0]
        state = new_state(model, 1, ids.shape[1])
        prefill(model, ids[:, :-steps], None, state)
        decoded = torch.cat([decode_step(model, ids[:, -steps + s], state).clone() for s in range(steps)])
    for logits in (prefilled, decoded):
        error = (logits - expected[-len(logits) :]).gather(-1, top[-len(logits) :])
        assert error.square().mean().sqrt() <= INT8_ERROR[name]


def test_int8_perplexity_is_near_llama_cpp(path, name):
    """Context 512, 8 chunks, second half of each scored, BOS first: as llama-perplexity does."""
    from realizar_torch.evaluation import perplexity

    model, tokenizer = load(path, "int8")
    measured = perplexity(model, tokenizer, GPL3, context=512, chunks=8)
    llama_cpp = {"smollm2": 18.380, "gemma3": 14.950}[name]
    assert measured.value <= 1.01 * llama_cpp
    # far below would mean that something else was scored
    assert measured.value >= 0.97 * llama_cpp
    assert math.isfinite(measured.value)
