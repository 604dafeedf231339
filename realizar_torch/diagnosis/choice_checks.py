"""The kernels that choose a GPU's next tokens against float64: the highest logit, and draws."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from realizar_torch.diagnosis.parity import Parity, share
from realizar_torch.generation.sampling import SamplingParams, penalize_repetition, uniforms
from realizar_torch.triton_kernels.highest import highest_scratch, take_highest
from realizar_torch.triton_kernels.sampling import sample_rows, sampling_scratch

# each filter by itself, and all of them
_PARAMS = {
    "temperature": SamplingParams(True),
    "top_k": SamplingParams(True, 0.8, top_k=40),
    "top_p": SamplingParams(True, 0.9, top_p=0.9),
    "min_p": SamplingParams(True, 0.7, min_p=0.05),
    "penalty": SamplingParams(True, repetition_penalty=1.7),
    "all": SamplingParams(True, 1.3, 900, 0.95, 1e-4, 1.2),
}
_ROWS, _SEED, _STEP = 32, 100, 3


def check_choices(vocabulary: int, device: torch.device) -> Iterator[Parity]:
    """From logits of ``vocabulary`` tokens."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = 3 * torch.randn(_ROWS, vocabulary, generator=generator, dtype=torch.float32, device="cpu")
    seen = torch.rand(_ROWS, vocabulary, generator=generator, dtype=torch.float32, device="cpu") < 0.1
    logits, seen = logits.to(device), seen.to(device)
    shape = f"{vocabulary} tokens"
    tokens = torch.zeros(_ROWS, dtype=torch.int64, device=device)
    take_highest(logits, tokens, highest_scratch(_ROWS, device))
    yield Parity(device.type, "take_highest", "", shape, _ROWS, share(tokens, logits.argmax(-1), 0))
    for name, params in _PARAMS.items():
        error = _draw(logits, seen, params)
        yield Parity(device.type, f"sample_rows {name}", "", shape, _ROWS, error)


def _draw(logits: Tensor, seen: Tensor, params: SamplingParams) -> float:
    """How far the numbers drawn are from the drawn tokens' part of the distribution."""
    rows, device = len(logits), logits.device
    tokens = torch.zeros(rows, dtype=torch.int64, device=device)
    numbers = (params.temperature, params.top_p, params.min_p, params.repetition_penalty)
    floats = torch.tensor([numbers] * rows, dtype=torch.float64, device=device)
    integers = torch.tensor([(params.top_k, _SEED + n, _STEP) for n in range(rows)], device=device)
    drawn = uniforms(integers[:, 1], integers[:, 2])
    marks, scratch = seen.clone(), sampling_scratch(rows, logits.shape[1], device)
    sample_rows(logits, marks, floats, integers, tokens, scratch)
    weights = _weights(logits, seen, params, floats)
    upper = weights.cumsum(-1) / weights.sum(-1, keepdim=True)
    own = tokens[:, None].clamp_min(0)
    lower = (upper - weights / weights.sum(-1, keepdim=True)).gather(1, own)
    missed = torch.maximum(lower - drawn, drawn - upper.gather(1, own)).clamp_min(0)
    missed = missed.masked_fill(tokens[:, None] < 0, torch.inf)
    # see sample_rows, for the sum that top-p ends at, for all that it keeps and for the draw
    vocabulary = logits.shape[1]
    allowed = 4 * ((2 * math.log(vocabulary) + 4) * 2.0**-23 + vocabulary * 2.0**-39) / params.top_p
    expected = seen.scatter(1, own, True)
    return max(share(missed, torch.zeros_like(missed), allowed), share(marks, expected, 0))


def _weights(logits: Tensor, seen: Tensor, params: SamplingParams, floats: Tensor) -> Tensor:
    """exp of the scaled logits that the filters keep, else 0: float64 ``[rows, vocabulary]``."""
    temperature, _, _, penalty = floats.float().split(1, dim=1)
    penalized = penalize_repetition(logits, seen, penalty)
    # in fp32, as a step has them: which tokens top-k and min-p keep is exact
    scaled = (penalized - penalized.amax(-1, keepdim=True)) / temperature
    weights = scaled.double().exp()
    ranked, order = scaled.sort(-1, descending=True)
    kept = weights.gather(1, order)
    if params.top_k:
        kept = kept.masked_fill(ranked < ranked[:, [min(params.top_k, kept.shape[1]) - 1]], 0.0)
    above = (kept.cumsum(-1) - kept) / kept.sum(-1, keepdim=True)
    kept = kept.masked_fill((above >= params.top_p) & (above > 0), 0.0)
    kept = kept.masked_fill(kept < params.min_p, 0.0)
    return torch.zeros_like(weights).scatter(1, order, kept)
