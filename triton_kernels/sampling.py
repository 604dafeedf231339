"""The next token of every row by parameters of its own, in four launches and without sorting.

Every sum is one of integers, so a row's token depends on no order of programs and no neighbour.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from realizar_torch.errors import FormatError
from realizar_torch.triton_kernels.highest import ordered, ranked, token_of, unordered
from realizar_torch.triton_kernels.launch import on_device, same_device
from realizar_torch.triton_kernels.sampling_search import CUTS, bounds, least_kept, sums_at_cuts
from realizar_torch.triton_kernels.sampling_values import key_of_share, penalized, uniform, weights

# logits of a program; for more the counts of sums_at_cuts have no room
_CHUNK = 2048
# keys that a program gathers, and that one step of the search looks at
_GATHERED, _STEP = 4096, 1024


@dataclass(frozen=True)
class SamplingScratch:
    """What the launches of ``sample_rows`` hand on; each call writes before it reads.

    Of each chunk, ``[rows, chunks]``: peaks int64, the highest logit; means fp32, of the finite ones; masses
    int64, what it keeps. Of each row: cuts int32 ``[rows, CUTS]``; sums int64 ``[rows, 2, CUTS]``, counts and
    weights from each cut on; keys and some of them, int32 ``[rows, chunks * CHUNK]``; state int32 ``[rows,
    8]``: how many are some, programs that have gathered and programs that have weighed, the least key kept,
    whether the row draws.
    """

    peaks: torch.Tensor
    means: torch.Tensor
    masses: torch.Tensor
    cuts: torch.Tensor
    sums: torch.Tensor
    keys: torch.Tensor
    some: torch.Tensor
    state: torch.Tensor


@triton.jit
def _highest_of(peaks, row, chunks, CHUNKS: tl.constexpr):
    """The key of a row's highest logit: see ``ranked``."""
    chunk = tl.arange(0, CHUNKS)
    return tl.max(tl.load(peaks + row * chunks + chunk, mask=chunk < chunks, other=-(2**63)), 0)


@triton.jit
def _peaks_kernel(
    logits, seen, floats, peaks, means, sums, state, vocabulary, CHUNK: tl.constexpr, CUTS: tl.constexpr
):  # fmt: skip
    """Program (b, c): the highest and the mean logit of a chunk; that of chunk 0 clears the row's sums."""
    row, chunk, chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    value = penalized(logits, seen, row, index, vocabulary, tl.load(floats + row * 4 + 3).to(tl.float32))
    tl.store(peaks + row * chunks + chunk, tl.max(ranked(value, index), 0))
    finite = tl.abs(value) < float("inf")
    total = tl.sum(tl.where(finite, value, 0), 0)
    # 0 / 0 where there is none
    tl.store(means + row * chunks + chunk, total / tl.sum(finite.to(tl.float32), 0))
    if chunk == 0:
        tl.store(sums + row * 2 * CUTS + tl.arange(0, 2 * CUTS), tl.zeros([2 * CUTS], tl.int64))
        place = tl.arange(0, 8)
        least = key_of_share(tl.load(floats + row * 4 + 2))
        tl.store(state + row * 8 + place, tl.where(place == 3, least, 0))


@triton.jit
def _keys_kernel(
    logits, seen, floats, integers, peaks, means, cuts, sums, keys, state, vocabulary,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, CUTS: tl.constexpr,
):  # fmt: skip
    """Program (b, c), where row b draws: the keys of a chunk, and what they add to the sums from each cut."""
    row, chunk, chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    best = _highest_of(peaks, row, chunks, CHUNKS)
    temperature = tl.load(floats + row * 4).to(tl.float32)
    if (token_of(best) >= 0) & (temperature > 0):
        if chunk == 0:
            tl.store(state + row * 8 + 4, 1)
        highest = unordered((best >> 32).to(tl.int32))
        index = chunk * CHUNK + tl.arange(0, CHUNK)
        value = penalized(logits, seen, row, index, vocabulary, tl.load(floats + row * 4 + 3).to(tl.float32))
        # as torch rounds it
        scaled = tl.div_rn(value - highest, temperature)
        key = ordered(scaled)
        tl.store(keys + (row * chunks).to(tl.int64) * CHUNK + index, key)
        if (tl.load(integers + row * 3) > 0) | (tl.load(floats + row * 4 + 1) < 1):
            number = tl.arange(0, CHUNKS)
            mean = tl.load(means + row * chunks + number, mask=number < chunks, other=float("nan"))
            there = mean == mean
            mean = tl.sum(tl.where(there, mean, 0), 0) / tl.sum(there.to(tl.float32), 0)
            cut, counts, masses = sums_at_cuts(scaled, key, (mean - highest) / temperature)
            number = tl.arange(0, CUTS)
            if chunk == 0:
                tl.store(cuts + row * CUTS + number, cut)
            tl.atomic_add(sums + row * 2 * CUTS + number, counts, sem="relaxed")
            tl.atomic_add(sums + (row * 2 + 1) * CUTS + number, masses, sem="relaxed")


@triton.jit
def _search_kernel(
    floats, integers, cuts, sums, keys, some, state, width,
    GATHERED: tl.constexpr, CUTS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Program (b, c) gathers those of GATHERED keys that are between the cuts around both thresholds; the one
    that arrives last finds the thresholds among them.
    """
    row = tl.program_id(0)
    top_k, top_p = tl.load(integers + row * 3), tl.load(floats + row * 4 + 1)
    if (tl.load(state + row * 8 + 4) != 0) & ((top_k > 0) | (top_p < 1)):
        number = tl.arange(0, CUTS)
        masses = tl.load(sums + (row * 2 + 1) * CUTS + number)
        low, high, count_above, mass_above = bounds(
            tl.load(cuts + row * CUTS + number), tl.load(sums + row * 2 * CUTS + number), masses, top_k, top_p
        )
        keys += row.to(tl.int64) * width
        some += row.to(tl.int64) * width
        # threads have columns: the places of all that are between are sums inside a thread but for one scan
        column = tl.arange(0, STEP)
        index = tl.program_id(1) * GATHERED + STEP * tl.arange(0, GATHERED // STEP)[:, None] + column[None, :]
        key = tl.load(keys + index, mask=index < width, other=1)
        between = ((key >= low) & (key < high)).to(tl.int32)
        in_column = tl.sum(between, 0)
        ends = tl.cumsum(in_column, 0)
        first = tl.atomic_add(state + row * 8, tl.max(ends, 0), sem="relaxed")
        place = first + (ends - in_column)[None, :] + tl.cumsum(between, 0) - 1
        tl.store(some + place, key, mask=between != 0)
        # every thread's stores come before the counter, and the counter before the search's loads
        tl.debug_barrier()
        if tl.atomic_add(state + row * 8 + 1, 1, sem="acq_rel") == tl.num_programs(1) - 1:
            count = tl.load(state + row * 8)
            mass = tl.max(masses, 0)
            least = least_kept(some, count, low, high, count_above, mass_above, mass, top_k, top_p, STEP)
            tl.atomic_max(state + row * 8 + 3, least, sem="relaxed")


@triton.jit
def _draw_kernel(
    seen, integers, peaks, masses, keys, state, tokens, vocabulary,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Program (b, c) weighs what a chunk keeps; the one that arrives last draws the token: the first whose
    running sum of weights is above the row's uniform number times their sum. Without a draw, the highest.
    """
    row, chunk, chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    done = chunk == 0
    token = token_of(_highest_of(peaks, row, chunks, CHUNKS))
    if tl.load(state + row * 8 + 4) != 0:
        least = tl.load(state + row * 8 + 3)
        inner = tl.arange(0, CHUNK)
        keys += (row * chunks).to(tl.int64) * CHUNK
        key = tl.load(keys + chunk * CHUNK + inner)
        tl.store(masses + row * chunks + chunk, tl.sum(tl.where(key >= least, weights(unordered(key)), 0), 0))
        tl.debug_barrier()
        done = tl.atomic_add(state + row * 8 + 2, 1, sem="acq_rel") == chunks - 1
        if done:
            number = tl.arange(0, CHUNKS)
            running = tl.cumsum(tl.load(masses + row * chunks + number, mask=number < chunks, other=0), 0)
            total = tl.max(running, 0)
            drawn = uniform(tl.load(integers + row * 3 + 1), tl.load(integers + row * 3 + 2))
            # rounding may reach the sum
            target = tl.minimum((drawn * total.to(tl.float64)).to(tl.int64), total - 1)
            first = tl.sum((running <= target).to(tl.int32), 0) * CHUNK
            key = tl.load(keys + first + inner)
            kept = tl.where(key >= least, weights(unordered(key)), 0)
            running = tl.max(tl.where(running <= target, running, 0), 0) + tl.cumsum(kept, 0)
            token = (first + tl.sum((running <= target).to(tl.int32), 0)).to(tl.int64)
    if done:
        tl.store(tokens + row, token)
        chosen = integers + row * 3 + 2
        tl.store(chosen, tl.load(chosen) + 1)
        tl.store(seen + row.to(tl.int64) * vocabulary + tl.maximum(token, 0), 1)


def _scratch_of_a_row(vocabulary: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Type and shape of each part of SamplingScratch, for one row."""
    chunks, cuts = triton.cdiv(vocabulary, _CHUNK), CUTS.value
    return {
        "peaks": (torch.int64, (chunks,)),
        "means": (torch.float32, (chunks,)),
        "masses": (torch.int64, (chunks,)),
        "cuts": (torch.int32, (cuts,)),
        "sums": (torch.int64, (2, cuts)),
        "keys": (torch.int32, (chunks * _CHUNK,)),
        "some": (torch.int32, (chunks * _CHUNK,)),
        "state": (torch.int32, (8,)),
    }


def sampling_scratch(rows: int, vocabulary: int, device: torch.device) -> SamplingScratch:
    """For ``sample_rows`` of logits ``[rows, vocabulary]``."""
    parts = _scratch_of_a_row(vocabulary).items()
    return SamplingScratch(
        **{name: torch.zeros(rows, *shape, dtype=dtype, device=device) for name, (dtype, shape) in parts}
    )


def sample_rows(
    logits: torch.Tensor,
    seen: torch.Tensor,
    floats: torch.Tensor,
    integers: torch.Tensor,
    tokens: torch.Tensor,
    scratch: SamplingScratch,
) -> None:
    """tokens[b] = what ``generation.sampling.sample`` takes of logits[b], with the row's own parameters.

    logits fp32, seen bool ``[rows, vocabulary]``; floats fp64 ``[rows, 4]``: temperature (0 is greedy),
    top_p, min_p, repetition penalty; integers int64 ``[rows, 3]``: top_k, seed, tokens chosen so far; tokens
    int64 ``[rows]``; all contiguous. A token counts as chosen and seen (-1, without usable logits, as 0).

    Scaled logits are those of torch, bit for bit: top-k and min-p keep the same tokens. Weights are not:
    top-p and the draw do what exact ones do for a top_p and a uniform number at most (2 ln V + 4) 2^-23 +
    V 2^-39 away, V being the vocabulary. That is twice the error of a sum, relative to that of all weights,
    which is at least that of the highest: rounding down costs 2^-40 each, exp(x) is off by at most (|x| + 2)
    2^-23 of itself, and the weighted mean of |x| is at most the entropy, ln V. What is 2^40 times
    less likely than the highest is never drawn.
    """
    rows, vocabulary = logits.shape
    expected = [
        ("logits", logits, torch.float32, (rows, vocabulary)),
        ("seen", seen, torch.bool, (rows, vocabulary)),
        ("floats", floats, torch.float64, (rows, 4)),
        ("integers", integers, torch.int64, (rows, 3)),
        ("tokens", tokens, torch.int64, (rows,)),
    ]
    for name, (dtype, shape) in _scratch_of_a_row(vocabulary).items():
        expected.append((name, getattr(scratch, name), dtype, (rows, *shape)))
    for name, tensor, dtype, shape in expected:
        if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
            raise FormatError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}; expected contiguous {dtype} {shape}"
            )
    chunks, width = scratch.peaks.shape[1], scratch.keys.shape[1]
    grid = (rows, chunks)
    # what torch rounds twice is rounded twice
    options = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False}
    sizes = {"CHUNK": _CHUNK, "CHUNKS": triton.next_power_of_2(chunks)}
    marks, s = seen.view(torch.uint8), scratch
    with on_device(same_device(*(tensor for _, tensor, _, _ in expected))):
        _peaks_kernel[grid](
            logits, marks, floats, s.peaks, s.means, s.sums, s.state, vocabulary,
            CHUNK=_CHUNK, CUTS=CUTS, **options,
        )  # fmt: skip
        _keys_kernel[grid](
            logits, marks, floats, integers, s.peaks, s.means, s.cuts, s.sums, s.keys, s.state, vocabulary,
            CUTS=CUTS, **sizes, **options,
        )  # fmt: skip
        _search_kernel[(rows, triton.cdiv(width, _GATHERED))](
            floats, integers, s.cuts, s.sums, s.keys, s.some, s.state, width,
            GATHERED=_GATHERED, CUTS=CUTS, STEP=_STEP, **options | {"num_warps": 8},
        )  # fmt: skip
        _draw_kernel[grid](
            marks, integers, s.peaks, s.masses, s.keys, s.state, tokens, vocabulary, **sizes, **options
        )
