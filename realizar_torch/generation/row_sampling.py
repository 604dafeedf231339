"""RowSampling: sampling parameters of every row as tensors, so that one captured step serves them all."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from realizar_torch.generation.sampling import SamplingParams, draw, penalize_repetition, uniforms


class RowSampling:
    """For each of ``rows`` rows: parameters, seed, number of tokens chosen, and the tokens it has seen.

    ``choose`` takes what ``sampling.sample`` would take for every row by itself, but for rounding: on a GPU
    by kernels that do not sort, elsewhere by torch. All that it reads are tensors on ``device`` that stay
    where they are, and nothing in it waits for the device.
    """

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        # temperature (0: greedy), top_p, min_p, repetition_penalty; top_k, seed, tokens chosen
        self._floats = torch.zeros(rows, 4, dtype=torch.float64, device=device)
        self._integers = torch.zeros(rows, 3, dtype=torch.int64, device=device)
        self._seen = torch.zeros(rows, vocab_size, dtype=torch.bool, device=device)
        self._plain = [True] * rows
        # made when a GPU chooses first: greedy rows need none
        self._scratch: Any = None
        self.fill(SamplingParams(), None, None)

    @property
    def plain(self) -> bool:
        """True if every row takes the highest logit as it is."""
        return all(self._plain)

    @property
    def state(self) -> tuple[Tensor, ...]:
        """What ``choose`` writes to."""
        return self._integers, self._seen

    def fill(self, params: SamplingParams, seeds: Tensor | None, seen: Tensor | None) -> None:
        """The same parameters for all rows. seeds: int64 [B]. seen: bool [B, V], what the penalty acts on."""
        rows = len(self._plain)
        self._plain[:] = [_is_plain(params)] * rows
        _write(self._floats, [_floats(params)] * rows)
        _write(self._integers, [(self._top_k(params), 0, 0)] * rows)
        if seeds is not None:
            self._integers[:, 1] = seeds
        if seen is None:
            self._seen.zero_()
        else:
            self._seen.copy_(seen)

    def set_row(
        self, row: int, params: SamplingParams, seed: int, chosen: int, seen: Tensor | None = None
    ) -> None:
        """Parameters of one row, which has ``chosen`` tokens already; seen: int64 [n], what the penalty acts
        on."""
        self._plain[row] = _is_plain(params)
        _write(self._floats[row], _floats(params))
        _write(self._integers[row], (self._top_k(params), seed, chosen))
        self._seen[row].zero_()
        if seen is not None:
            self._seen[row].index_fill_(0, seen, True)

    def choose(self, logits: Tensor, out: Tensor | None = None) -> Tensor:
        """fp32 [B, V] -> the next tokens, int64 [B] (``out``, if given), -1 in a row whose highest logit is
        NaN or infinite; they count as chosen and seen."""
        tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device) if out is None else out
        if logits.device.type == "cuda":
            from realizar_torch.triton_kernels.sampling import sample_rows, sampling_scratch

            if self._scratch is None:
                self._scratch = sampling_scratch(*self._seen.shape, logits.device)
            sample_rows(logits, self._seen, self._floats, self._integers, tokens, self._scratch)
            return tokens
        return tokens.copy_(self._choose_by_torch(logits))

    def _choose_by_torch(self, logits: Tensor) -> Tensor:
        temperature, top_p, min_p, penalty = self._floats.split(1, dim=1)
        top_k, seed, chosen = self._integers.split(1, dim=1)
        logits = penalize_repetition(logits, self._seen, penalty.float())
        highest, likeliest = logits.max(-1, keepdim=True)
        greedy = temperature == 0
        scaled = (logits - highest) / torch.where(greedy, 1.0, temperature).float()
        removed = (scaled < _lowest_kept(scaled, top_k, top_p)) | (scaled.exp() < min_p)
        drawn = draw(scaled.masked_fill(removed, -math.inf), uniforms(seed.squeeze(1), chosen.squeeze(1)))
        token = torch.where(greedy, likeliest, drawn.unsqueeze(1))
        token = torch.where(highest.isfinite(), token, -1)
        chosen.add_(1)
        self._seen.scatter_(1, token.clamp_min(0), True)
        return token.squeeze(1)

    def _top_k(self, params: SamplingParams) -> int:
        """All that is more than the vocabulary is as much; an int64 need not hold it."""
        return min(params.top_k, self._seen.shape[1])


def _lowest_kept(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The least of the scaled logits that top-k and, of what it leaves, top-p keep: fp32 [B, 1]."""
    ranked = scaled.sort(-1, descending=True).values
    last = ranked.gather(1, (top_k - 1).clamp(0, ranked.shape[1] - 1))
    last = torch.where(top_k == 0, -math.inf, last)
    shares = torch.where(ranked >= last, ranked.exp(), 0.0).double()
    sums = shares.cumsum(-1)
    kept = (ranked >= last) & (sums - shares < top_p * sums[:, -1:])
    kept[:, 0] = True
    return ranked.masked_fill(~kept, math.inf).amin(-1, keepdim=True)


def _is_plain(params: SamplingParams) -> bool:
    return params.greedy and params.repetition_penalty == 1


def _floats(params: SamplingParams) -> tuple[float, ...]:
    temperature = 0.0 if params.greedy else params.temperature
    return temperature, params.top_p, params.min_p, params.repetition_penalty


def _write(target: Tensor, values: Sequence) -> None:
    # the values are on their way when the call returns: nobody has to wait for the device
    target.copy_(torch.tensor(values, dtype=target.dtype, device="cpu"), non_blocking=True)
