"""Dot products of BN packed rows with M float vectors: exact weights, fp32 accumulation."""

import triton
import triton.language as tl

from realizar_torch.triton_kernels.blocks import (
    block_size,
    group_of,
    groups_ahead,
    has_minimum,
    planes,
    planes_per_scale,
    run_units,
    units,
)
from realizar_torch.triton_kernels.decode import decode_unit, minimum_of, scale_of, word_quants
from realizar_torch.triton_kernels.primitives import split_words, wait_for_predecessor
from realizar_torch.triton_kernels.row_sums import lane_position, load_tile, replace, zeros


@triton.jit
def add_float(
    total, raw, first, blocks, x, in_features,
    FMT: tl.constexpr, M: tl.constexpr, CB: tl.constexpr, WHOLE: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """``total`` (groups × M) plus a tile times float activations ``x [M, in_features]``, all in fp32.

    The weights of one scale add  d * s / lift * Σ lift * (q - zero) * x - dmin * m * Σ x; quants are exact.
    RAGGED: in_features ends inside a block; activations past it count as 0.
    """
    SHARED: tl.constexpr = planes_per_scale(FMT)
    BN: tl.constexpr = total[0].shape[0]
    LANES: tl.constexpr = total[0].shape[1]
    block, unit = lane_position(first, FMT, CB)
    start = block * block_size(FMT) + 16 * group_of(unit, 0, FMT)
    decoded = ()
    for g in tl.static_range(len(raw)):
        decoded = decoded + (decode_unit(raw[g], unit, FMT),)
    for i in tl.static_range(planes(FMT) // SHARED):
        dots = zeros(len(raw) * M, BN, LANES)
        sums = zeros(M, 1, LANES)
        for word in tl.static_range(4 * SHARED):
            # the four activations of this word lie this far behind the unit's first
            ahead = 16 * groups_ahead(FMT, i * SHARED + word // 4) + 4 * (word % 4)
            column = tl.expand_dims(start, -1) + tl.arange(0, 4)
            for m in tl.static_range(M):
                pointer = x + (m * in_features + column) + ahead
                if RAGGED:
                    values = tl.load(pointer, mask=column + ahead < in_features, other=0)
                elif WHOLE:
                    values = tl.load(pointer)
                else:
                    values = tl.load(pointer, mask=tl.expand_dims(block < blocks, -1), other=0)
                values = values.to(tl.float32)
                if has_minimum(FMT):
                    sums = replace(sums, m, sums[m] + tl.sum(values, 2))
                for g in tl.static_range(len(raw)):
                    words, s, minimum, d, dmin = decoded[g]
                    quants = word_quants(
                        split_words(words[i * SHARED + word // 4])[word % 4], i * SHARED + word // 4, FMT
                    )
                    dots = replace(dots, g * M + m, dots[g * M + m] + tl.sum(quants * values, 2))
        for g in tl.static_range(len(raw)):
            words, s, minimum, d, dmin = decoded[g]
            scale = scale_of(s, d, i * SHARED, FMT)
            for m in tl.static_range(M):
                updated = total[g * M + m] + scale * dots[g * M + m]
                if has_minimum(FMT):
                    updated -= minimum_of(minimum, dmin, i * SHARED, FMT) * sums[m]
                total = replace(total, g * M + m, updated)
    return total


@triton.jit
def _load_plane(x, start, turn, COLUMNS: tl.constexpr):
    """The four words of 16 floats from column ``start [1, lanes]`` on: fp32 ``[1, lanes, 4]`` each.

    Neighbouring lanes, or pairs of them, whose floats lie 64 to 512 bytes apart, begin with another word each
    (``turn`` 0 to 3) and put them in order afterwards: the same word of all would come from the same banks.
    """
    loaded = ()
    for j in tl.static_range(4):
        column = tl.expand_dims(start + 4 * (j ^ turn), -1) + tl.arange(0, 4)
        loaded = loaded + (tl.load(x + column, mask=column < COLUMNS, other=0).to(tl.float32),)
    odd, late = tl.expand_dims(turn % 2 == 1, -1), tl.expand_dims(turn >= 2, -1)
    pairs = ()
    for j in tl.static_range(4):
        pairs = pairs + (tl.where(odd, loaded[j ^ 1], loaded[j]),)
    words = ()
    for j in tl.static_range(4):
        words = words + (tl.where(late, pairs[j ^ 2], pairs[j]),)
    return words


@triton.jit
def load_floats(x, COLUMNS: tl.constexpr, FMT: tl.constexpr, LANES: tl.constexpr):
    """What every row is multiplied with, one unit per lane: (words, sums), fp32 ``[1, LANES, 4]`` per word of
    the unit and ``[1, LANES]`` per scale (none without a minimum). Columns past x's COLUMNS are 0.
    """
    SHARED: tl.constexpr = planes_per_scale(FMT)
    block, unit = lane_position(0, FMT, LANES // units(FMT))
    start = block * block_size(FMT) + 16 * group_of(unit, 0, FMT)
    turn = tl.arange(0, LANES)[None, :] // run_units(FMT) % 4
    words, sums = (), ()
    for i in tl.static_range(planes(FMT) // SHARED):
        total = tl.zeros([1, LANES], tl.float32)
        for p in tl.static_range(i * SHARED, (i + 1) * SHARED):
            plane = _load_plane(x, start + 16 * groups_ahead(FMT, p), turn, COLUMNS)
            for j in tl.static_range(4):
                total += tl.sum(plane[j], 2)
            words = words + plane
        if has_minimum(FMT):
            sums = sums + (total,)
    return words, sums


@triton.jit
def add_floats(total, decoded, x, FMT: tl.constexpr):
    """``total`` (one per group) plus a decoded tile times what ``load_floats`` gave; see ``add_float``."""
    SHARED: tl.constexpr = planes_per_scale(FMT)
    vector, sums = x
    for g in tl.static_range(len(decoded)):
        words, s, minimum, d, dmin = decoded[g]
        updated = total[g]
        for i in tl.static_range(planes(FMT) // SHARED):
            # four sums, each of every fourth weight
            dots = tl.zeros([total[g].shape[0], total[g].shape[1], 4], tl.float32)
            for p in tl.static_range(i * SHARED, (i + 1) * SHARED):
                w = split_words(words[p])
                for j in tl.static_range(4):
                    dots += word_quants(w[j], p, FMT) * vector[4 * p + j]
            updated += scale_of(s, d, i * SHARED, FMT) * tl.sum(dots, 2)
            if has_minimum(FMT):
                updated -= minimum_of(minimum, dmin, i * SHARED, FMT) * sums[i]
        total = replace(total, g, updated)
    return total


@triton.jit
def float_sums(
    groups, blocks, x, in_features,
    FMT: tl.constexpr, PLANAR: tl.constexpr, ALIGN: tl.constexpr, M: tl.constexpr, CB: tl.constexpr,
    WHOLE: tl.constexpr, RAGGED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """As ``row_sums.int8_sums`` for float activations, each tile when its turn comes."""
    raw = load_tile(groups, 0, blocks, FMT, PLANAR, ALIGN, CB, WHOLE)
    wait_for_predecessor(DEPENDENT)
    total = zeros(len(groups) * M, groups[0].shape[0], CB * units(FMT))
    total = add_float(total, raw, 0, blocks, x, in_features, FMT, M, CB, WHOLE, RAGGED)
    for first in range(CB, blocks, CB):
        raw = load_tile(groups, first, blocks, FMT, PLANAR, ALIGN, CB, WHOLE)
        total = add_float(total, raw, first, blocks, x, in_features, FMT, M, CB, WHOLE, RAGGED)
    return total
