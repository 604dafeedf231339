"""Choosing the next token: a frozen parameter set and a chain of small pure functions over logits.

The filters act in the order of transformers' processors (repetition penalty, temperature, top-k, top-p,
min-p) and remove the same tokens; a removed token has logit -inf. All of them take and return float32 [B,
V].
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from realizar_torch.errors import FormatError

# Below the smallest normal float32 a division by the temperature could be 0/0; the limit is greedy anyway.
_COLDEST = torch.finfo(torch.float32).tiny
# A nucleus is nearly always smaller than this; sorting a 262k vocabulary on the CPU takes as long as a
# decode step.
_NUCLEUS_GUESS = 2048


@dataclass(frozen=True)
class SamplingParams:
    """How a token is chosen; FormatError names the first value out of range.

    do_sample: False means greedy, and only ``repetition_penalty`` acts. temperature: >= 0, 0 is greedy.
    top_k: >= 0, 0 is off. top_p, min_p: in [0, 1]; off at 1 and 0. repetition_penalty: > 0, off at 1.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.do_sample, bool):
            raise FormatError(f"do_sample is {self.do_sample!r}; expected True or False")
        if not isinstance(self.top_k, int) or isinstance(self.top_k, bool) or self.top_k < 0:
            raise FormatError(f"top_k is {self.top_k!r}; expected an integer >= 0 (0 switches it off)")
        _require(self.temperature, "temperature", "a float32 >= 0 (0 is greedy)", lambda v: v >= 0)
        _require(self.top_p, "top_p", "a number from 0 to 1 (1 switches it off)", lambda v: 0 <= v <= 1)
        _require(self.min_p, "min_p", "a number from 0 to 1 (0 switches it off)", lambda v: 0 <= v <= 1)
        _require(self.repetition_penalty, "repetition_penalty", "a float32 > 0 (1 is off)", lambda v: v > 0)

    @property
    def greedy(self) -> bool:
        return not self.do_sample or self.temperature < _COLDEST


def _require(value: Any, name: str, expected: str, holds: Callable[[float], bool]) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # what a float32 cannot hold would be an infinity in the product with logits
    if not is_number or not abs(value) <= torch.finfo(torch.float32).max or not holds(value):
        raise FormatError(f"{name} is {value!r}; expected {expected}")


def penalize_repetition(logits: torch.Tensor, seen: torch.Tensor, penalty: float) -> torch.Tensor:
    """Divides positive and multiplies negative logits of the tokens marked in ``seen`` (bool [B, V]) by
    ``penalty``.

    Formula: Keskar et al. 2019, arXiv:1909.05858, section 4.1, with transformers' sign rule.
    """
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def keep_top_k(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """Removes every token below the ``top_k``-th highest logit; ties with that one stay."""
    smallest_kept = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
    return logits.masked_fill(logits < smallest_kept, -math.inf)


def keep_top_p(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """Removes every token above which the more likely ones already hold a probability of ``top_p`` or more;
    ties with the least likely one that stays stay.

    The most likely token always stays. Holtzman et al. 2019, arXiv:1904.09751, section 3.1.
    """
    vocab_size = logits.shape[-1]
    # The guess is checked with a host read, which costs nothing on the CPU and a stall elsewhere.
    width = min(_NUCLEUS_GUESS, vocab_size) if logits.device.type == "cpu" else vocab_size
    log_total = logits.logsumexp(-1, keepdim=True)
    while True:
        candidates = logits.topk(width).values
        probabilities = (candidates - log_total).exp()
        mass_above = probabilities.cumsum(-1) - probabilities
        if width == vocab_size or bool((mass_above[:, -1] >= top_p).all()):
            break
        width = vocab_size
    removed = mass_above >= top_p
    removed[:, 0] = False
    smallest_kept = candidates.masked_fill(removed, math.inf).amin(-1, keepdim=True)
    return logits.masked_fill(logits < smallest_kept, -math.inf)


def keep_min_p(logits: torch.Tensor, min_p: float) -> torch.Tensor:
    """Removes every token less likely than ``min_p`` times the most likely one (arXiv:2407.01082)."""
    probabilities = logits.softmax(-1)
    return logits.masked_fill(probabilities < min_p * probabilities.amax(-1, keepdim=True), -math.inf)


def new_seeds(rows: int, generator: torch.Generator | None, device: torch.device) -> torch.Tensor:
    """A seed per row, int64 [rows] on ``device``, from the generator or torch's default one there."""
    return torch.randint(2**63 - 1, (rows,), generator=generator, device=device)


def uniforms(seeds: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """The random number of each row's step 0, 1 …, float64 [B, 1] in [0, 1), of seed and step alone.

    Output ``step`` of SplitMix64 (Steele, Lea, Flood 2014, doi:10.1145/2660193.2660195) from the state
    mix(seed): neighbouring seeds give unrelated sequences. seeds, steps: int64 [B].
    """
    bits = _mixed(_mixed(seeds) + (steps + 1) * _signed(0x9E3779B97F4A7C15))
    return (_shifted(bits, 11).double() * 2.0**-53).unsqueeze(1)


def _mixed(z: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finalizer on the 64 bits of each int64."""
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shifted(z, 31)


def _shifted(z: torch.Tensor, bits: int) -> torch.Tensor:
    """z >> bits without the sign, which torch's shift of int64 would copy."""
    return (z >> bits) & (2 ** (64 - bits) - 1)


def _signed(value: int) -> int:
    """The int64 of the same 64 bits."""
    return (value + 2**63) % 2**64 - 2**63


def draw(logits: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """One token per row, int64 [B], with probability softmax(logits): inverse transform of ``uniform``,
    float64 [B, 1] in [0, 1).

    The distribution function is summed in float64, so that even a token of probability 1e-12 gets its share;
    a removed token adds nothing to it and cannot be drawn.
    """
    distribution = (logits - logits.amax(-1, keepdim=True)).exp().double().cumsum(-1)
    token = torch.searchsorted(distribution, uniform * distribution[:, -1:], right=True).squeeze(1)
    return token.clamp_max(logits.shape[-1] - 1)


def sample(
    logits: torch.Tensor,
    params: SamplingParams,
    seen: torch.Tensor | None,
    uniform: torch.Tensor | None,
) -> torch.Tensor:
    """The next token of every row, int64 [B], or -1 where the row's highest logit is NaN or infinite.

    logits: float32 [B, V], left as they are. seen: bool [B, V], the tokens that ``repetition_penalty`` acts
    on; may be None when the penalty is 1. uniform: see ``draw``; may be None when greedy, which takes the
    first of equal maxima. Nothing here waits for a GPU, which is why a row without a usable distribution is
    marked and not raised: the caller reads the tokens anyway.
    """
    if params.repetition_penalty != 1 and seen is not None:
        logits = penalize_repetition(logits, seen, params.repetition_penalty)
    highest, token = logits.max(-1, keepdim=True)
    if not params.greedy:
        assert uniform is not None
        # Shifting by the maximum changes no probability and keeps tiny temperatures finite.
        logits = (logits - highest) / params.temperature
        if params.top_k:
            logits = keep_top_k(logits, params.top_k)
        if params.top_p < 1:
            logits = keep_top_p(logits, params.top_p)
        if params.min_p:
            logits = keep_min_p(logits, params.min_p)
        token = draw(logits, uniform).unsqueeze(1)
    return torch.where(highest.isfinite(), token, -1).squeeze(1)
