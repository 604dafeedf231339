"""Mixtures of experts in the fused decode step: only matrices of chosen experts are read, each once.

Several sequences may choose the same expert: whoever takes a tile of its rows multiplies it for all of them.
Products are added in the order of the shares, so that a sequence's result does not depend on its neighbours.
"""

import math

import numpy as np

from realizar_torch.cpu_kernels.int8_rows import MOST_ROWS, rows_of_tile
from realizar_torch.cpu_kernels.jit import jit
from realizar_torch.cpu_kernels.memory import fetch_add_i64, load_f32, load_i64, store_f32, store_i64
from realizar_torch.cpu_kernels.step_linears import gated_rows, rows_of
from realizar_torch.cpu_kernels.step_vectors import add_scaled, copy_row, exponentials, fill_row, scale_row

# In the place of a probability: this expert has been chosen.
_CHOSEN = np.float32(-1)


@jit(device=True)
def route(c, i, arena, batch):
    """Each sequence's experts and shares, from its scores at source."""
    for b in range(batch):
        chosen, shares = arena + c.chosen + 8 * i.used * b, arena + c.shares + 4 * (i.used + 1) * b
        choose(i, i.source + b * i.source_stride, arena + c.probabilities, chosen, shares)


@jit(device=True)
def choose(i, scores, probabilities, chosen, shares):
    """``chosen`` [used] of the experts, and the ``shares`` of their outputs, by fp32 scores [experts].

    The largest scores are chosen, the first of equals; with NaN among them, any experts, with shares of NaN.
    Shares are probabilities, the softmax of all scores; with ``normalized`` divided by their sum. The share
    of a shared expert is the sigmoid of the score behind the others.
    """
    copy_row(scores, i.experts, probabilities)
    total, picked = exponentials(probabilities, i.experts), np.float32(0)
    for place in range(i.used):
        expert = _best(scores, probabilities, i.experts)
        share = load_f32(probabilities, 4 * expert) / total
        store_f32(probabilities, _CHOSEN, 4 * expert)
        store_i64(chosen, expert, 8 * place)
        store_f32(shares, share, 4 * place)
        picked += share
    if i.normalized:
        scale_row(shares, i.used, np.float32(1) / picked)
    if i.shared:
        score = load_f32(scores, 4 * i.experts)
        store_f32(shares, np.float32(1) / (np.float32(1) + np.float32(math.exp(-score))), 4 * i.used)


@jit(device=True)
def _best(scores, probabilities, experts):
    """The first expert with the largest score of those that are not chosen, of whom there is one."""
    best = -1
    for expert in range(experts):
        if load_f32(probabilities, 4 * expert) == _CHOSEN:
            continue
        if best < 0 or load_f32(scores, 4 * expert) > load_f32(scores, 4 * best):
            best = expert
    return best


@jit(device=True)
def gated_experts(c, i, arena, counter, batch, n_threads):
    """``gated`` of every choice: target [batch * used][rows]."""
    chosen, count = arena + c.chosen, batch * i.used
    height = rows_of_tile(i.rows, i.row_bytes, n_threads)
    tiles = (i.rows + height - 1) // height
    while True:
        unit = fetch_add_i64(counter, 1)
        if unit >= count * tiles:
            return
        choice, first = unit // tiles, unit % tiles * height
        expert, last = load_i64(chosen, 8 * choice), min(first + height, i.rows)
        if _first_of(chosen, expert) < choice:
            continue
        weight = i.weight + expert * i.rows * i.row_bytes
        second = i.second_weight + expert * i.rows * i.second_row_bytes
        for other in range(choice, count):
            if load_i64(chosen, 8 * other) == expert:
                target = i.target + other * i.target_stride
                gated_rows(c, i, arena, other // i.used, weight, second, first, last, target)


@jit(device=True)
def _first_of(chosen, expert):
    """The first choice that is this expert; there must be one."""
    choice = 0
    while load_i64(chosen, 8 * choice) != expert:
        choice += 1
    return choice


@jit(device=True)
def mix_experts(c, i, arena, counter, batch, n_threads):
    """target = Σ share · (the expert's weight · its activations), plus a shared expert's share of target."""
    rows = rows_of_tile(i.rows, i.row_bytes, n_threads)
    while True:
        first = fetch_add_i64(counter, rows)
        if first >= i.rows:
            return
        last = min(first + rows, i.rows)
        _multiply_choices(c, i, arena, batch * i.used, first, last)
        for b in range(batch):
            target = i.target + b * i.target_stride + 4 * first
            shares = arena + c.shares + 4 * (i.used + 1) * b
            if i.shared:
                scale_row(target, last - first, load_f32(shares, 4 * i.used))
            else:
                fill_row(target, last - first, np.float32(0))
            for place in range(i.used):
                product = arena + c.products + 4 * MOST_ROWS * (b * i.used + place)
                add_scaled(target, product, last - first, load_f32(shares, 4 * place))


@jit(device=True)
def _multiply_choices(c, i, arena, count, first, last):
    """Rows first to last of each choice's product, into the thread's own memory."""
    chosen = arena + c.chosen
    for choice in range(count):
        expert = load_i64(chosen, 8 * choice)
        if _first_of(chosen, expert) < choice:
            continue
        weight = i.weight + expert * i.rows * i.row_bytes
        for other in range(choice, count):
            if load_i64(chosen, 8 * other) == expert:
                product = arena + c.products + 4 * (MOST_ROWS * other - first)
                rows_of(c, arena, other, i.kernel, i.int8, weight, i.row_bytes, i.width, first, last, product)
