"""Sampling without sorting: kept sets and tokens against the definitions in float64, rows of every kind."""

import dataclasses
import math

import pytest
import torch
from test_row_sampling import PARAMS as FEW_TOKENS

from realizar_torch.errors import FormatError
from realizar_torch.generation.row_sampling import RowSampling
from realizar_torch.generation.sampling import SamplingParams, penalize_repetition, uniforms

pytest.importorskip("triton")

from realizar_torch.triton_kernels.sampling import SamplingScratch, sample_rows, sampling_scratch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PARAMS = [
    SamplingParams(True),
    SamplingParams(True, 0.8, top_k=40),
    SamplingParams(True, 0.9, top_p=0.9),
    SamplingParams(True, 0.7, min_p=0.05),
    SamplingParams(True, 2.0, top_p=0.97, repetition_penalty=1.2),
    SamplingParams(True, 1.3, top_k=900, top_p=0.5, min_p=1e-4),
]
# kind: a row made of normal random numbers
KINDS = {
    "normal": lambda x: 3 * x,
    "flat": lambda x: x / 30,
    "heavy tails": lambda x: torch.tan(x / 2),
    "all equal": lambda x: torch.full_like(x, -2.5),
    "one huge": lambda x: torch.where(torch.arange(len(x), device=x.device) == 77, 1e4, x),
    "masked": lambda x: torch.where(x < 1, -math.inf, x),
    "ties": lambda x: (4 * x).round() / 2,
    "tiny": lambda x: x * 1e-42,
}


class Rows:
    """``RowSampling`` whose tokens the kernels choose, on a CPU in the interpreter."""

    def __init__(self, params: list[SamplingParams], vocabulary: int, seeds: list[int]) -> None:
        self.state = RowSampling(len(params), vocabulary, DEVICE)
        marked = torch.arange(0, vocabulary, 7, device=DEVICE)
        for row, (one, seed) in enumerate(zip(params, seeds, strict=True)):
            self.state.set_row(row, one, seed, row, marked)
        self.scratch: SamplingScratch = sampling_scratch(len(params), vocabulary, DEVICE)

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        state, tokens = self.state, torch.full((len(logits),), -7, device=DEVICE)
        sample_rows(logits, state._seen, state._floats, state._integers, tokens, self.scratch)
        return tokens


def keys(scaled: torch.Tensor) -> torch.Tensor:
    """int32 that order like float32."""
    bits = (scaled + 0.0).view(torch.int32)
    return torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


def assert_follows(logits, seen, params, number, least, token):
    """Of one row: tokens from key ``least`` on are what the definitions keep in float64, and ``token`` is
    where their distribution function passes ``number``; but for the derived difference of weights."""
    vocabulary = len(logits)
    # tensors, because torch multiplies by the reciprocal of a number on a GPU
    penalty, temperature = torch.tensor([params.repetition_penalty, params.temperature], device=logits.device)
    logits = penalize_repetition(logits, seen, penalty)
    scaled = (logits - logits.max()) / temperature
    weights = scaled.double().exp()
    # see sample_rows: twice the error of a sum of weights
    difference = (2 * math.log(vocabulary) + 4) * 2.0**-23 + vocabulary * 2.0**-39
    left = scaled
    if params.top_k:
        left = scaled[scaled >= scaled.topk(min(params.top_k, vocabulary)).values[-1]]
    left = left.sort(descending=True).values
    shares = left.double().exp()
    above = (shares.cumsum(0) - shares) / shares.sum()

    def nucleus(top_p: float) -> torch.Tensor:
        inside = above < top_p
        inside[0] = True
        return scaled >= left[inside].min()

    # what weighs nothing in integers may be kept or not: it cannot be drawn
    possible = (scaled.double() >= math.log(params.min_p or 1e-300)) & (weights >= 2.0**-39)
    kept = (keys(scaled) >= least) & possible
    if params.top_p == 1:
        assert torch.equal(kept, (scaled >= left[-1]) & possible)
    else:
        assert not (nucleus(params.top_p - difference) & possible & ~kept).any()
        assert not (kept & ~nucleus(params.top_p + difference)).any()
    running = (
        torch.where(keys(scaled) >= least, weights, 0.0).cumsum(0) / weights[keys(scaled) >= least].sum()
    )
    first, last = ((running <= number + d).sum() for d in (-difference, difference))
    assert first <= token <= last


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocabulary", [4200, pytest.param(128256, marks=pytest.mark.gpu)])
def test_rows_follow_the_definitions(kind, vocabulary):
    rows = Rows(PARAMS, vocabulary, list(range(50, 50 + len(PARAMS))))
    logits = torch.stack([KINDS[kind](torch.randn(vocabulary, device=DEVICE)) for _ in PARAMS])
    seen = rows.state._seen.clone()
    tokens = rows.choose(logits)
    numbers = uniforms(torch.arange(50, 50 + len(PARAMS)), torch.arange(len(PARAMS))).flatten().tolist()
    for row, params in enumerate(PARAMS):
        least = rows.scratch.state[row, 3]
        assert_follows(logits[row], seen[row], params, numbers[row], least, tokens[row])
    # a token counts as chosen and seen
    assert rows.state._integers[:, 2].tolist() == [row + 1 for row in range(len(PARAMS))]
    seen[torch.arange(len(PARAMS)), tokens] = True
    assert torch.equal(rows.state._seen, seen)


@pytest.mark.parametrize("vocabulary", [1, 5, 2049])
def test_kernels_choose_what_torch_chooses(vocabulary):
    """Three steps: the probability that a uniform number is within 1e-5 of a boundary is below 1e-3."""
    seeds = list(range(300, 300 + len(FEW_TOKENS)))
    kernels, torch_rows = Rows(FEW_TOKENS, vocabulary, seeds), Rows(FEW_TOKENS, vocabulary, seeds).state
    for _ in range(3):
        logits = 3 * torch.randn(len(FEW_TOKENS), vocabulary, device=DEVICE)
        found = kernels.choose(logits)
        assert torch.equal(found, torch_rows._choose_by_torch(logits))
    assert torch.equal(kernels.state._seen, torch_rows._seen)
    assert torch.equal(kernels.state._integers, torch_rows._integers)


def test_rows_without_a_distribution_are_marked_and_no_other():
    params = [SamplingParams(True, 0.9, 9, 0.9)] * 5 + [SamplingParams(repetition_penalty=1.5)] * 3
    logits = torch.randn(8, 2100, device=DEVICE)
    logits[0], logits[1, 2099], logits[2], logits[3, 5] = math.nan, math.nan, -math.inf, math.inf
    logits[5, 3] = math.inf
    # of equal maxima the first that is not penalized
    logits[6, 7:10] = 90.0
    tokens = Rows(params, 2100, list(range(8))).choose(logits)
    assert tokens[[0, 1, 2, 3, 5]].tolist() == [-1] * 5
    assert tokens[6] == 8 and (tokens[[4, 7]] >= 0).all()


def test_a_row_is_the_same_alone_and_in_every_slot():
    params = [PARAMS[i] for i in (5, 4, 2)]
    logits = 3 * torch.randn(3, 2100, device=DEVICE)
    for order in ([0, 1, 2], [2, 0, 1], [0], [1], [2]):
        rows = Rows([params[i] for i in order], 2100, [10] * len(order))
        rows.state._integers[:, 2] = 4
        tokens = rows.choose(logits[order])
        least = rows.scratch.state[:, 3]
        if len(order) == 3 and order[0] == 0:
            expected = tokens.tolist(), least.tolist()
        assert tokens.tolist() == [expected[0][i] for i in order]
        assert least.tolist() == [expected[1][i] for i in order]


def test_wrong_arguments_are_named():
    rows = Rows(PARAMS[:2], 9, [1, 2])
    logits = torch.randn(2, 9, device=DEVICE)
    for name, wrong in (
        ("logits", logits.double()),
        ("logits", logits.T.contiguous().T),
        ("seen", logits[:1]),
    ):
        with pytest.raises(FormatError, match=name):
            rows.choose(wrong)


@pytest.mark.parametrize("part", [field.name for field in dataclasses.fields(SamplingScratch)])
def test_scratch_of_another_size_is_named(part: str):
    rows = Rows(PARAMS[:2], 9, [1, 2])
    rows.scratch = dataclasses.replace(rows.scratch, **{part: getattr(rows.scratch, part)[:1]})
    with pytest.raises(FormatError, match=f"^{part} is"):
        rows.choose(torch.randn(2, 9, device=DEVICE))
