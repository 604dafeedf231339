"""Sampling: filters against transformers' processors, drawn frequencies, degenerate arguments (F-46)."""

import math

import pytest
import torch
from transformers.generation import logits_process as hf

from realizar_torch.errors import FormatError
from realizar_torch.generation import sampling
from realizar_torch.generation.sampling import (
    SamplingParams,
    draw,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    penalize_repetition,
    sample,
)


def random_logits(rows: int = 3, vocab_size: int = 101, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed))


def uniform(rows: int, seed: int) -> torch.Tensor:
    return torch.rand(rows, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def with_ties(logits: torch.Tensor) -> torch.Tensor:
    """Rounded to halves, so that most values occur several times."""
    return (2 * logits).round() / 2


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("top_k", [1, 2, 7, 100, 101, 5000])
def test_top_k_is_transformers(top_k, seed):
    logits = with_ties(random_logits(seed=seed))
    assert torch.equal(keep_top_k(logits, top_k), hf.TopKLogitsWarper(top_k)(None, logits))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("top_p", [0.0, 1e-6, 0.1, 0.5, 0.9, 0.999])
def test_top_p_is_transformers(top_p, seed):
    logits = random_logits(seed=seed)
    assert torch.equal(keep_top_p(logits, top_p), hf.TopPLogitsWarper(top_p)(None, logits))


@pytest.mark.parametrize("width", [1, 3])
def test_top_p_is_right_when_the_nucleus_exceeds_the_first_guess(monkeypatch, width):
    logits = random_logits()
    expected = hf.TopPLogitsWarper(0.97)(None, logits)
    assert (expected > -math.inf).sum() > 3 * width
    monkeypatch.setattr(sampling, "_NUCLEUS_GUESS", width)
    assert torch.equal(keep_top_p(logits, 0.97), expected)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("min_p", [1e-6, 0.05, 0.5, 1.0])
def test_min_p_is_transformers(min_p, seed):
    logits = with_ties(random_logits(seed=seed))
    # with ties, transformers restores one of several maxima that were never removed: the same set
    assert torch.equal(keep_min_p(logits, min_p), hf.MinPLogitsWarper(min_p)(None, logits))


@pytest.mark.parametrize("penalty", [0.5, 1.3, 10.0])
def test_repetition_penalty_is_transformers(penalty):
    logits = random_logits()
    history = torch.randint(0, 101, (3, 20), generator=torch.Generator().manual_seed(1))
    seen = torch.zeros(3, 101, dtype=torch.bool).scatter_(1, history, True)
    expected = hf.RepetitionPenaltyLogitsProcessor(penalty)(history, logits)
    assert torch.equal(penalize_repetition(logits, seen, penalty), expected)


def test_the_chain_has_transformers_order():
    logits = random_logits(rows=1, vocab_size=40, seed=5)
    history = torch.tensor([[3, 3, 17, 20]])
    params = SamplingParams(True, 0.7, 12, 0.9, 0.04, 1.4)
    chain = hf.LogitsProcessorList(
        [
            hf.RepetitionPenaltyLogitsProcessor(1.4),
            hf.TemperatureLogitsWarper(0.7),
            hf.TopKLogitsWarper(12),
            hf.TopPLogitsWarper(0.9),
            hf.MinPLogitsWarper(0.04),
        ]
    )
    expected = chain(history, logits).softmax(-1)[0]
    seen = torch.zeros(1, 40, dtype=torch.bool).scatter_(1, history, True)
    draws = 20_000
    tokens = sample(logits.expand(draws, -1), params, seen.expand(draws, -1), uniform(draws, 0))
    counts = tokens.bincount(minlength=40)
    assert torch.equal(counts > 0, expected > 0)
    # five standard deviations of a binomial count
    assert torch.all(
        (counts - draws * expected).abs() <= 5 * (draws * expected * (1 - expected)).sqrt() + 1e-3
    )


def test_draw_follows_the_distribution_and_the_seed():
    logits = random_logits(rows=1, vocab_size=10)
    draws = 20_000
    tokens = draw(logits.expand(draws, -1), uniform(draws, 3))
    expected = logits.softmax(-1)[0]
    deviation = (draws * expected * (1 - expected)).sqrt()
    assert torch.all((tokens.bincount(minlength=10) - draws * expected).abs() <= 5 * deviation)
    again = draw(logits.expand(draws, -1), uniform(draws, 3))
    other = draw(logits.expand(draws, -1), uniform(draws, 4))
    assert torch.equal(tokens, again)
    assert not torch.equal(tokens, other)


def test_draw_never_takes_a_removed_token():
    logits = torch.full((5000, 9), -math.inf)
    logits[:, 4], logits[:, 6] = 0.0, -1.0
    tokens = draw(logits, uniform(5000, 0))
    assert set(tokens.tolist()) == {4, 6}


@pytest.mark.parametrize(("number", "token"), [(0.0, 1), (0.5, 3), (1 - 2**-53, 3)])
def test_draw_at_the_ends_of_the_interval(number, token):
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]])
    assert draw(logits, torch.tensor([[number]], dtype=torch.float64)).tolist() == [token]


def test_greedy_takes_the_first_maximum_and_leaves_the_logits_alone():
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [5.0, 5.0, -1.0, 5.0]])
    before = logits.clone()
    seen = torch.zeros(2, 4, dtype=torch.bool)
    seen[:, 1] = True
    assert sample(logits, SamplingParams(), None, None).tolist() == [1, 0]
    assert sample(logits, SamplingParams(repetition_penalty=2.0), seen, None).tolist() == [2, 0]
    assert torch.equal(logits, before)


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-45, 2e-38, 1e-6])
def test_cold_sampling_is_greedy_without_nan(temperature):
    logits = random_logits(rows=50, seed=9) * 100
    tokens = sample(logits, SamplingParams(True, temperature), None, uniform(50, 0))
    assert torch.equal(tokens, logits.argmax(-1))


@pytest.mark.parametrize("do_sample", [False, True])
def test_rows_without_a_distribution_are_marked_and_no_other(do_sample):
    logits = random_logits(rows=6)
    expected = logits[4:].argmax(-1).tolist()
    logits[0] = math.nan
    logits[1, 7] = math.nan
    logits[2] = -math.inf
    logits[3, 5] = math.inf
    params = SamplingParams(do_sample, top_k=1, top_p=0.9, min_p=0.1)
    assert sample(logits, params, None, uniform(6, 0)).tolist() == [-1] * 4 + expected


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": 1e39},
        {"temperature": 10**400},
        {"repetition_penalty": 1e39},
        {"temperature": "1"},
        {"top_k": -1},
        {"top_k": 2.5},
        {"top_k": True},
        {"top_p": 1.5},
        {"top_p": -0.1},
        {"min_p": 1.01},
        {"min_p": math.nan},
        {"repetition_penalty": 0},
        {"repetition_penalty": -2.0},
        {"do_sample": 1},
    ],
)
def test_values_out_of_range_are_refused_by_name(wrong):
    name, value = next(iter(wrong.items()))
    with pytest.raises(FormatError, match=name) as caught:
        SamplingParams(**wrong)
    assert repr(value) in str(caught.value)
