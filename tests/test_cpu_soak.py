"""Loading and generating again and again on the CPU: what a model took is given back."""

import gc
import os
from pathlib import Path

import pytest
import torch
from random_models import write_random_model

import realizar_torch as rt

pytest.importorskip("numba")

_STATM, _MAPS = Path("/proc/self/statm"), Path("/proc/self/maps")
ROUNDS, PROMPT, NEW = 60, 40, 12


def resident() -> int:
    """Bytes of this process in memory."""
    gc.collect()
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not _STATM.exists(), reason="needs Linux's /proc")
def test_loads_and_generations_leave_no_memory_behind(tmp_path: Path) -> None:
    path = write_random_model(tmp_path / "soak.gguf", "gemma3", fmt="Q5_0")
    ids = torch.randint(0, 250, (2, PROMPT), generator=torch.Generator().manual_seed(1))

    def once() -> int:
        model, _ = rt.load(path, device="cpu")
        model.generate(ids, max_new_tokens=NEW, eos_token_id=[], pad_token_id=0)
        config = model.config
        return 8 * config.num_layers * len(ids) * config.kv_dim * (PROMPT + NEW)

    for _ in range(10):
        cache_bytes = once()
    before = resident()
    for _ in range(ROUNDS):
        once()
    # a kept cache alone would be ROUNDS times its size; pages of the allocator come and go
    assert resident() - before < ROUNDS * cache_bytes / 4
    assert path.name not in _MAPS.read_text()
