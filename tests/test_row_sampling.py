"""Rows with parameters of their own: what each gives alone, counter-based numbers, drawn frequencies."""

import math

import pytest
import torch

from realizar_torch.generation.row_sampling import RowSampling
from realizar_torch.generation.sampling import SamplingParams, new_seeds, sample, uniforms

VOCAB = 211
MASK = 2**64 - 1
PARAMS = [
    SamplingParams(),
    SamplingParams(repetition_penalty=1.7),
    SamplingParams(True),
    SamplingParams(True, 0.6, top_k=1),
    SamplingParams(True, 1.3, top_k=9),
    SamplingParams(True, 0.8, top_p=0.7),
    SamplingParams(True, 2.0, min_p=0.2),
    SamplingParams(True, 0.9, top_p=0.0),
    SamplingParams(True, 1e-6, top_k=2**70, top_p=0.99),
    SamplingParams(True, 0.9, 40, 0.9, 0.02, 1.2),
]

# each filter by itself, and all of them
FILTERS = [
    SamplingParams(True),
    SamplingParams(True, 0.8, top_k=20),
    SamplingParams(True, 0.9, top_p=0.9),
    SamplingParams(True, 0.7, min_p=0.05),
    SamplingParams(True, 1.0, repetition_penalty=1.7),
    SamplingParams(True, 1.3, top_k=25, top_p=0.95, min_p=1e-4, repetition_penalty=1.2),
]
DRAWS = 50_000
# few tokens, and logits near each other: quick, and most of what is kept is drawn often enough to be counted
DRAWN_VOCAB = 64


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return torch.device(request.param)


def split_mix(seed, step):
    """Output ``step`` of SplitMix64 from mix(seed), in Python's integers."""

    def mix(z):
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)

    return (mix((mix(seed & MASK) + (step + 1) * 0x9E3779B97F4A7C15) & MASK) >> 11) * 2.0**-53


def random_logits(rows, generator, device):
    return (3 * torch.randn(rows, VOCAB, generator=generator)).to(device)


def filled(params, seeds, device):
    sampling = RowSampling(len(params), VOCAB, device)
    for row, (one, seed) in enumerate(zip(params, seeds, strict=True)):
        sampling.set_row(row, one, seed, 0)
    return sampling


def test_uniforms_are_split_mix(device):
    seeds = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 12345], device=device)
    for step in (0, 1, 77, 10**6):
        found = uniforms(seeds, torch.full_like(seeds, step))
        assert found.squeeze(1).tolist() == [split_mix(seed, step) for seed in seeds.tolist()]


@pytest.mark.parametrize("seed", [0, 2**40])
def test_uniforms_of_neighbouring_seeds_and_steps_are_independent(device, seed):
    """Each of 64 cells of (this number, a neighbour's) gets its share: 63 degrees of freedom, p = 1e-6."""
    seeds = (seed + torch.arange(400, device=device)).repeat_interleave(100)
    steps = torch.arange(100, device=device).repeat(400)
    here = uniforms(seeds, steps)
    for there in (uniforms(seeds, steps + 1), uniforms(seeds + 1, steps)):
        cells = ((8 * here).floor() * 8 + (8 * there).floor()).long().squeeze(1)
        counts = cells.bincount(minlength=64).double()
        expected = len(cells) / 64
        assert float(((counts - expected) ** 2 / expected).sum()) < 133.5


def test_rows_together_choose_what_each_chooses_alone(device):
    """Thirty steps; every row by ``sample`` with its own parameters, seed and history."""
    generator = torch.Generator().manual_seed(5)
    seeds = list(range(100, 100 + len(PARAMS)))
    together = filled(PARAMS, seeds, device)
    seen = torch.zeros(len(PARAMS), VOCAB, dtype=torch.bool, device=device)
    for step in range(30):
        logits = random_logits(len(PARAMS), generator, device)
        found = together.choose(logits)
        for row, params in enumerate(PARAMS):
            uniform = uniforms(*(torch.tensor([n], device=device) for n in (seeds[row], step)))
            alone = sample(logits[row : row + 1], params, seen[row : row + 1], uniform)
            assert alone.tolist() == found[row : row + 1].tolist(), (step, params)
        seen.scatter_(1, found[:, None], True)


def test_a_row_depends_on_no_slot_and_no_neighbour(device):
    """The same request in every slot, among others in any order; one neighbour without usable logits."""
    generator = torch.Generator().manual_seed(8)
    steps = [random_logits(len(PARAMS), generator, device) for _ in range(12)]
    own = PARAMS[-1]

    def tokens(slot, order):
        sampling = filled([PARAMS[i] for i in order], [900 + i for i in order], device)
        sampling.set_row(slot, own, 77, 3, torch.tensor([4, 9], device=device))
        chosen = []
        for logits in steps:
            shuffled = logits[order]
            shuffled[slot], shuffled[slot - 1] = logits[0], math.nan
            found = sampling.choose(shuffled).tolist()
            assert found[slot - 1] == -1
            chosen.append(found[slot])
        return chosen

    orders = [torch.randperm(len(PARAMS), generator=generator).tolist() for _ in PARAMS]
    runs = [tokens(slot, order) for slot, order in enumerate(orders)]
    assert all(run == runs[0] for run in runs) and len(set(runs[0])) > 5


def test_all_rows_alike_and_the_seeds_of_a_generator(device):
    params = SamplingParams(True, 0.9)
    logits = random_logits(4, torch.Generator().manual_seed(1), device)
    runs = []
    for seed in (3, 3, 4):
        seeds = new_seeds(4, torch.Generator(device).manual_seed(seed), device)
        sampling = RowSampling(4, VOCAB, device)
        sampling.fill(params, seeds, None)
        runs.append([sampling.choose(logits).tolist() for _ in range(9)])
    assert runs[0] == runs[1] != runs[2]
    rows = list(zip(*runs[0], strict=True))
    assert len(set(rows)) == 4


@pytest.mark.parametrize("params", FILTERS)
@pytest.mark.parametrize("choose", ["rows", "sample"])
def test_frequencies_of_fifty_thousand_draws(device, params, choose):
    """Chi-squared over the kept tokens of one distribution, p = 1e-6; no other token is ever drawn."""
    logits = (2 * torch.randn(1, DRAWN_VOCAB, generator=torch.Generator().manual_seed(2))).to(device)
    marked = torch.arange(0, DRAWN_VOCAB, 7, device=device)
    expected = DRAWS * filtered(logits, params, marked)
    seeds = torch.arange(DRAWS, device=device)
    rows = logits.repeat(DRAWS, 1)
    seen = torch.zeros_like(rows, dtype=torch.bool).index_fill_(1, marked, True)
    if choose == "rows":
        sampling = RowSampling(DRAWS, DRAWN_VOCAB, device)
        sampling.fill(params, seeds, seen)
        drawn = sampling.choose(rows)
    else:
        drawn = sample(rows, params, seen, uniforms(seeds, torch.zeros_like(seeds)))
    counts = drawn.bincount(minlength=DRAWN_VOCAB)
    assert counts.sum() == DRAWS and not counts[expected == 0].any()
    # cells of few counts are joined
    large = expected >= 5
    found = torch.cat([counts[large], counts[~large].sum()[None]]).double()
    wanted = torch.cat([expected[large], expected[~large].sum()[None]])
    found, wanted = found[wanted > 0], wanted[wanted > 0]
    freedom = max(len(found) - 1, 1)
    statistic = float(((found - wanted) ** 2 / wanted).sum())
    # Wilson and Hilferty's approximation of the quantile, 4.753 deviations for p = 1e-6
    spread = 2 / (9 * freedom)
    assert statistic <= freedom * (1 - spread + 4.753 * math.sqrt(spread)) ** 3


def filtered(logits, params, seen):
    """Probabilities in float64 by the definitions, one token at a time."""
    values = logits[0].double().tolist()
    for token in seen.tolist():
        penalty = params.repetition_penalty
        values[token] = values[token] * penalty if values[token] < 0 else values[token] / penalty
    values = [value / params.temperature for value in values]
    order = sorted(range(len(values)), key=lambda token: -values[token])
    kept = order[: params.top_k or None]
    weights = {token: math.exp(values[token] - values[order[0]]) for token in kept}
    total, above, nucleus = sum(weights.values()), 0.0, []
    for token in kept:
        if above < params.top_p * total or token == order[0] or params.top_p == 1:
            nucleus.append(token)
        above += weights[token]
    kept = [token for token in nucleus if weights[token] >= params.min_p]
    result = torch.zeros(len(values), dtype=torch.float64, device=logits.device)
    for token in kept:
        result[token] = weights[token] / sum(weights[t] for t in kept)
    return result
