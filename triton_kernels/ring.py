"""Packed rows on their way through a ring in shared memory: far more bytes are asked for than registers hold.

A program does every ``programs``-th tile of R rows. Its first STAGES tiles are on their way while the
predecessor still runs, and when one is done another is asked for: memory never rests. A row is done by all
threads at once, one unit (blocks.py) of it each: the activations stay in registers for all rows. Rows lie one
after the other, BLOCKS blocks in a whole number of 16-byte chunks each; the first is aligned to 16 bytes. The
interpreter takes tiles from the weights themselves.
"""

import triton
import triton.language as tl

from realizar_torch.triton_kernels.blocks import block_bytes, units
from realizar_torch.triton_kernels.decode import load_unit
from realizar_torch.triton_kernels.float_sums import add_floats, load_floats
from realizar_torch.triton_kernels.primitives import INTERPRETED
from realizar_torch.triton_kernels.row_sums import add_int8, decode_tile, load_tile, load_vector, row_pointers
from realizar_torch.triton_kernels.shared_memory import (
    commit_copies,
    copy_16_bytes,
    shared_memory,
    wait_for_copies,
)


@triton.constexpr_function
def row_bytes(fmt, blocks):
    return blocks * block_bytes(fmt)


@triton.constexpr_function
def tile_bytes(weights, rows, fmt, blocks):
    return weights * rows * row_bytes(fmt, blocks)


@triton.jit
def _copy_rows(to, weight, first_row, n_rows, FMT: tl.constexpr, BLOCKS: tl.constexpr, R: tl.constexpr,
               EVEN: tl.constexpr, THREADS: tl.constexpr):  # fmt: skip
    """Ask for R rows of ``weight`` from ``first_row``, none past the last, at the shared address ``to``."""
    CHUNKS: tl.constexpr = R * row_bytes(FMT, BLOCKS) // 16
    start = weight + first_row.to(tl.int64) * row_bytes(FMT, BLOCKS)
    for i in tl.static_range((CHUNKS + THREADS - 1) // THREADS):
        chunk = i * THREADS + tl.arange(0, THREADS)
        if EVEN and (i + 1) * THREADS <= CHUNKS:
            copy_16_bytes(to + chunk * 16, start + chunk * 16, None)
        else:
            present = min(CHUNKS, (n_rows - first_row) * (CHUNKS // R))
            copy_16_bytes(to + chunk * 16, start + chunk * 16, chunk < present)


@triton.jit
def ask_for_tile(
    slot, weights, tile, n_rows,
    FMT: tl.constexpr, BLOCKS: tl.constexpr, R: tl.constexpr, EVEN: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Ask for the bytes of one tile, R rows of each weight; past the last tile for nothing."""
    if not INTERPRETED:
        if tile * R < n_rows:
            for i in tl.static_range(len(weights)):
                to = slot + tile_bytes(i, R, FMT, BLOCKS)
                _copy_rows(to, weights[i], tile * R, n_rows, FMT, BLOCKS, R, EVEN, THREADS)
        commit_copies()


@triton.jit
def open_ring(BYTES: tl.constexpr):
    """The address of an empty ring."""
    ring = 0
    if not INTERPRETED:
        ring = shared_memory(BYTES)
    return ring


@triton.jit
def fill_ring(
    ring, weights, tile, programs, n_rows,
    FMT: tl.constexpr, BLOCKS: tl.constexpr, R: tl.constexpr, EVEN: tl.constexpr, THREADS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Ask for a program's first STAGES tiles, from ``tile``."""
    for i in tl.static_range(STAGES):
        slot = ring + i * tile_bytes(len(weights), R, FMT, BLOCKS)
        ask_for_tile(slot, weights, tile + i * programs, n_rows, FMT, BLOCKS, R, EVEN, THREADS)


@triton.jit
def load_row_vector(
    x, scale, sums, COLUMNS: tl.constexpr, FMT: tl.constexpr, BLOCKS: tl.constexpr, THREADS: tl.constexpr
):  # fmt: skip
    """What every row is multiplied with, one unit per thread: int8 activations as ``row_sums.load_vector``
    gives them; floats, which have no scale, as ``float_sums.load_floats`` does.
    """
    CB: tl.constexpr = THREADS // units(FMT)
    if scale is None:
        return load_floats(x, COLUMNS, FMT, THREADS)
    else:
        return load_vector(0, 0, BLOCKS, x, scale, sums, FMT, CB, CB == BLOCKS)


@triton.jit
def take_tile(
    slot, weights, tile, n_rows,
    FMT: tl.constexpr, PLANAR: tl.constexpr, BLOCKS: tl.constexpr, R: tl.constexpr, THREADS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The bytes of the tile at ``slot``, the oldest asked for: what ``load_unit`` returns, per weight.

    The slot is free afterwards. What threads past the row's last block get is of no use.
    """
    CB: tl.constexpr = THREADS // units(FMT)
    raw = ()
    if INTERPRETED:
        for i in tl.static_range(len(weights)):
            rows = row_pointers(weights[i], row_bytes(FMT, BLOCKS), tile * R, n_rows, 16, R)
            raw = raw + load_tile((rows,), 0, BLOCKS, FMT, PLANAR, 16, CB, CB == BLOCKS)
    else:
        wait_for_copies(STAGES - 1)
        # what every thread has copied is there for all
        tl.debug_barrier()
        thread = tl.arange(0, THREADS)[None, :]
        block = tl.minimum(thread // units(FMT), BLOCKS - 1)
        for i in tl.static_range(len(weights)):
            rows = slot + (i * R + tl.arange(0, R)[:, None]) * row_bytes(FMT, BLOCKS)
            raw = raw + (load_unit(rows, block, thread % units(FMT), BLOCKS, None, FMT, PLANAR, 16),)
        # and is read by all before the next tile comes there
        tl.debug_barrier()
    return raw


@triton.jit
def next_sums(
    slot, weights, tile, programs, n_rows, x,
    FMT: tl.constexpr, PLANAR: tl.constexpr, BLOCKS: tl.constexpr, R: tl.constexpr, EVEN: tl.constexpr,
    THREADS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """What a tile adds up to per weight and thread, ``[R, THREADS]``; its slot is filled again."""
    raw = take_tile(slot, weights, tile, n_rows, FMT, PLANAR, BLOCKS, R, THREADS, STAGES)
    ask_for_tile(slot, weights, tile + STAGES * programs, n_rows, FMT, BLOCKS, R, EVEN, THREADS)
    return tile_sums(raw, x, FMT, BLOCKS, R, THREADS)


@triton.jit
def next_slot(slot, ring, WEIGHTS: tl.constexpr, FMT: tl.constexpr, BLOCKS: tl.constexpr, R: tl.constexpr,
              STAGES: tl.constexpr):  # fmt: skip
    """The slot behind ``slot``, the first behind the last."""
    TILE: tl.constexpr = tile_bytes(WEIGHTS, R, FMT, BLOCKS)
    return tl.where(slot == ring + (STAGES - 1) * TILE, ring, slot + TILE)


@triton.jit
def tile_sums(raw, x, FMT: tl.constexpr, BLOCKS: tl.constexpr, R: tl.constexpr, THREADS: tl.constexpr):
    """rows · vector of a tile, not summed over threads: a tensor ``[R, THREADS]`` fp32 per weight."""
    CB: tl.constexpr = THREADS // units(FMT)
    total = ()
    for _ in tl.static_range(len(raw)):
        total = total + (tl.zeros([R, THREADS], tl.float32),)
    decoded = decode_tile(raw, 0, FMT, CB)
    # int8 activations are words, scales and sums; floats words and sums
    if len(x) == 3:
        total = add_int8(total, decoded, x, 0, 1, FMT)
    else:
        total = add_floats(total, decoded, x, FMT)
    if CB != BLOCKS:
        live = tl.arange(0, THREADS)[None, :] < BLOCKS * units(FMT)
        masked = ()
        for i in tl.static_range(len(raw)):
            masked = masked + (tl.where(live, total[i], 0.0),)
        total = masked
    return total
