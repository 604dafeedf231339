"""Launch shapes are pure functions whose promises hold for every head, cache, batch and width."""

import itertools

import pytest

pytest.importorskip("triton")

from realizar_torch.triton_kernels.configs import (
    CHUNK_BYTES,
    choose_attention,
    choose_chunk,
    choose_norm_warps,
    choose_prompt_attention,
    choose_splits,
)

# what a program may have on an H100 or H200, K and V of all stages together
SHARED_BYTES = 227 << 10
LANES, ITEMSIZES = (16, 32, 64, 128, 256), (1, 2, 4)


@pytest.mark.parametrize(("lanes", "itemsize"), list(itertools.product(LANES, ITEMSIZES)))
def test_attention_keeps_its_steps_in_shared_memory(lanes, itemsize):
    for rows in (1, 4, 16):
        launch = choose_attention(lanes, itemsize, rows)
        step = launch.warps * launch.tile
        assert 2 * step * lanes * itemsize * launch.stages <= SHARED_BYTES
        assert launch.minimum * step >= 256 and launch.merge >= 4
    prompt = choose_prompt_attention(lanes, itemsize)
    assert (prompt.rows + 2 * prompt.step * prompt.stages) * lanes * itemsize <= SHARED_BYTES


def test_splits_fill_the_processors_and_leave_none_without_positions():
    for batch, kv_heads, capacity in itertools.product((1, 2, 8, 32), (1, 2, 8, 32), (1, 65, 8192, 131072)):
        splits = choose_splits(batch, kv_heads, capacity)
        assert 1 <= splits <= 64 and (splits - 1) * 64 < capacity
        assert splits == 1 or splits * batch * kv_heads <= 2 * 132
    assert choose_splits(1, 8, 8192) == 33 and choose_splits(1, 8, 64) == 1


def test_norms_have_eight_blocks_a_warp():
    assert [choose_norm_warps(blocks) for blocks in (1, 8, 16, 64, 128, 512)] == [1, 1, 2, 8, 16, 16]


@pytest.mark.parametrize("itemsize", [2, 4])
def test_chunks_are_bounded_and_even(itemsize):
    for rows, columns in itertools.product((1, 127, 4096, 128256), (64, 4096, 14336, 53248)):
        chunk = choose_chunk(rows, columns, itemsize)
        assert chunk >= 1 and chunk * columns * itemsize <= CHUNK_BYTES
        count = -(-rows // chunk)
        # no more chunks than the bound asks for, and one more for whole tiles
        assert count <= -(-rows * columns * itemsize // CHUNK_BYTES) + 1
    assert choose_chunk(9, 1 << 30, itemsize) == 1
