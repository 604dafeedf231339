"""Workspace and cache are allocated once and only grow: sizes, addresses, what a smaller request keeps."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from realizar_torch.errors import CacheFullError, FormatError
from realizar_torch.generation.gpu_state import GpuStates
from realizar_torch.generation.workspace import Workspace
from realizar_torch.nn.kv_cache import KVCache

CONFIG = SimpleNamespace(
    num_layers=2,
    num_kv_heads=3,
    head_dim=8,
    hidden_size=96,
    q_dim=288,
    kv_dim=24,
    intermediate_size=160,
    vocab_size=77,
)
BUFFERS = ("hidden", "narrow", "wide", "qkv", "logits", "quants", "scales", "sums")


def addresses(workspace):
    return [getattr(workspace, name).data_ptr() for name in BUFFERS]


def test_workspace_widths_are_padded_to_256():
    workspace = Workspace.for_model(CONFIG, 4)
    assert workspace.wide.shape == (4, 512) and workspace.quants.shape == (8, 1024)
    assert workspace.qkv.shape == (4, 512) and workspace.logits.shape == (4, 77)
    assert workspace.scales.shape == (8, 16) and workspace.sums.shape == (8, 32)
    assert workspace.stats.nbytes == sum(getattr(workspace, name).nbytes for name in BUFFERS)


def test_workspace_keeps_its_addresses_up_to_its_capacity():
    workspace = Workspace.for_model(CONFIG, 8)
    before = addresses(workspace)
    for batch_size in (1, 8, 3, 8):
        assert not workspace.ensure(batch_size)
        assert addresses(workspace) == before
    assert workspace.ensure(9) and workspace.stats.reallocations == 2 and workspace.stats.capacity == 9
    workspace.clear()
    assert workspace.stats.nbytes == 0
    assert workspace.ensure(1)


@pytest.mark.parametrize("batch_size", [0, 33])
def test_workspace_takes_1_to_32_sequences(batch_size):
    with pytest.raises(FormatError, match="1 to 32"):
        Workspace.for_model(CONFIG, batch_size)
    workspace = Workspace.for_model(CONFIG, 32)
    with pytest.raises(FormatError):
        workspace.ensure(batch_size)
    assert workspace.stats.capacity == 32


def test_a_workspace_that_cannot_grow_holds_nothing_and_may_try_again():
    workspace = Workspace.for_model(CONFIG, 4)
    workspace._config = SimpleNamespace(**vars(CONFIG) | {"vocab_size": 2**55})
    with pytest.raises(RuntimeError):
        workspace.ensure(8)
    assert (workspace.stats.capacity, workspace.stats.nbytes) == (0, 0)
    assert not any(hasattr(workspace, name) for name in BUFFERS)
    workspace._config = CONFIG
    assert workspace.ensure(4)
    assert workspace.stats.nbytes == sum(getattr(workspace, name).nbytes for name in BUFFERS) > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_a_cache_that_cannot_grow_is_empty_and_may_try_again(dtype):
    cache = KVCache(CONFIG, 2, 64, dtype=dtype)
    old = weakref.ref(cache._keys)
    with pytest.raises(RuntimeError):
        cache.ensure(1, 2**50)
    assert old() is None
    cache.reset(zero=True)
    assert (cache.memory_bytes, cache.length, cache.max_seq_len, cache.dtype) == (0, 0, 0, dtype)
    with pytest.raises(CacheFullError):
        cache.require(1)
    assert cache.ensure(1, 64) and not cache.ensure(1, 64)
    assert cache.memory_bytes == KVCache(CONFIG, 1, 64, dtype=dtype).memory_bytes > 0


def test_cache_moves_exactly_when_it_must():
    """Two hundred random requests: addresses change only beyond the high-water mark."""
    cache = KVCache(CONFIG, 2, 10)
    generator = torch.Generator().manual_seed(5)
    rows, positions, address = 2, 10, cache.keys.data_ptr()
    for _ in range(200):
        batch_size, length = (int(n) for n in torch.randint(1, 40, (2,), generator=generator))
        moved = cache.ensure(batch_size, length)
        assert moved == (batch_size > rows or length > positions)
        assert moved or cache.keys.data_ptr() == address
        rows, positions, address = max(rows, batch_size), max(positions, length), cache.keys.data_ptr()
        assert (cache.batch_size, cache.max_seq_len, cache.length) == (batch_size, positions, 0)
        assert not cache.padded and cache.starts.tolist() == [0] * batch_size

        key = torch.randn(batch_size, 3, 2 if positions > 1 else 1, 8, generator=generator)
        keys, values = cache.append(1, key, -key)
        assert torch.equal(keys, key) and torch.equal(values, -key)
        cache.advance(key.shape[2])
        cache.set_starts(torch.ones(batch_size, dtype=torch.int64))
    assert cache.memory_bytes == 2 * 2 * rows * 3 * positions * 8 * 4


def test_sequences_of_a_smaller_batch_are_the_first_rows():
    cache = KVCache(CONFIG, 3, 4)
    key = torch.randn(3, 3, 1, 8)
    cache.append(0, key, key)
    cache.ensure(1, 4)
    assert torch.equal(cache.keys[0, :, :, :1], key[:1])


@pytest.fixture
def model():
    return SimpleNamespace(
        config=CONFIG,
        device=torch.device("cpu"),
        dtype=torch.float32,
        cache_dtype=torch.float32,
        max_seq_len=8,
        new_cache=lambda *sizes: KVCache(CONFIG, *sizes),
    )


def test_idle_states_go_with_their_owner(model):
    """Without waiting for the cycle collector: a state holds the weights, a cache and graphs."""
    states = GpuStates()
    state = states.take(model, 1, 8)
    state.close()
    assert states.take(model, 1, 8) is state
    state.close()
    left = weakref.ref(state)
    gc.disable()
    try:
        del state, states
        assert left() is None
    finally:
        gc.enable()


def test_a_state_that_another_thread_was_quicker_to_take_is_none(model):
    class Raced(list):
        """What it holds is taken between a look and the pop."""

        def __len__(self):
            return 1

    states = GpuStates()
    states._idle = Raced()
    assert states.take(model, 1, 8).cache.max_seq_len == 8
