"""The fused prompt pass: attention against torch, models against their modules, and what must not matter."""

import numpy as np
import pytest
import torch
from random_models import write_random_model
from torch.nn import functional

from realizar_torch.checkpoint.gguf import open_gguf
from realizar_torch.errors import CacheFullError, FormatError
from realizar_torch.generation import cpu_prompt
from realizar_torch.generation.step import decode_step, new_state, prefill
from realizar_torch.models.loading import load_transformer
from realizar_torch.nn.attention import attention_mask

pytest.importorskip("numba")

from realizar_torch.cpu_kernels import matrix_tiles
from realizar_torch.cpu_kernels.jit import jit
from realizar_torch.cpu_kernels.program import INSTRUCTION, PROMPT_CONTEXT
from realizar_torch.cpu_kernels.prompt_attention import KEYS, QUERIES, attend_block

VARIANTS = {
    "llama": {"fmt": "Q8_0", "tied": False, "biases": True},
    "llama-divisors": {"fmt": "Q4_1", "divisors": True},
    "gemma3": {"fmt": "Q5_0"},
}
LENGTH = 50


@jit
def _attend(instructions, context):
    c, i = context[0], instructions[0]
    for block in range(c.n_blocks):
        for kv_head in range(c.kv_heads):
            attend_block(c, i, c.arena, block, kv_head)


# head sizes of whole vectors, in pairs and single, and one that is not; ranges of one key to three key tiles
@pytest.mark.parametrize("head_dim", [24, 32, 80, 256])
@pytest.mark.parametrize(("past", "count", "window"), [(0, 1, 0), (0, 37, 0), (120, 50, 0), (120, 50, 33)])
def test_attention_equals_torch(head_dim: int, past: int, count: int, window: int) -> None:
    batch, heads, kv_heads, room, scale = 2, 6, 2, 200, 0.4
    generator = torch.Generator().manual_seed(head_dim + count)
    keys, values = (torch.full((batch, kv_heads, room, head_dim), torch.nan) for _ in range(2))
    total = past + count
    for cache in (keys, values):
        cache[:, :, :total] = torch.randn(batch, kv_heads, total, head_dim, generator=generator)
    starts = torch.tensor([0, past // 2])
    qkv = torch.randn(batch * count, (heads + 2 * kv_heads) * head_dim, generator=generator)
    out = torch.full((batch * count, heads * head_dim), torch.nan)
    sequences = torch.arange(batch).repeat_interleave(count)
    slots = torch.arange(past, total).repeat(batch)
    blocks = torch.tensor(list(cpu_prompt._blocks(sequences.tolist(), QUERIES)))
    sizes = {
        "scores": 4 * QUERIES * (heads // kv_heads) * (room + KEYS),
        "transposed": 4 * head_dim * KEYS,
        "last_rows": 4 * head_dim * KEYS,
    }
    arena = torch.full((sum(sizes.values()) // 4,), torch.nan)
    context, instructions = np.zeros(1, PROMPT_CONTEXT), np.zeros(1, INSTRUCTION)
    offsets = dict(zip(sizes, np.cumsum([0, *sizes.values()]), strict=False))
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "max_positions": room}
    places = {"sequences": sequences, "slots": slots, "blocks": blocks, "starts": starts, "arena": arena}
    addresses = {name: tensor.data_ptr() for name, tensor in places.items()}
    for name, value in {**offsets, **shape, **addresses, "n_blocks": len(blocks)}.items():
        context[name] = value
    operands = {
        "source": qkv.data_ptr(),
        "source_stride": 4 * qkv.shape[1],
        "target": out.data_ptr(),
        "target_stride": 4 * out.shape[1],
        "keys": keys.data_ptr(),
        "values": values.data_ptr(),
        "window": window,
        "scale": scale,
    }
    for name, value in operands.items():
        instructions[name] = value
    _attend(instructions, context)

    q = qkv.view(batch, count, -1, head_dim)[:, :, :heads].transpose(1, 2)
    k, v = (cache[:, :, :total].repeat_interleave(heads // kv_heads, 1) for cache in (keys, values))
    # torch's own rule starts at the first key, ours at the cached ones
    mask = attention_mask(starts, past, count, window or None, torch.device("cpu"))
    expected = functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), attn_mask=mask, scale=scale
    )
    # scores up to 30 with fp32 errors of 2e-6 relative, weights that sum to one, values up to 4
    assert (out.view(batch, count, heads, head_dim).transpose(1, 2) - expected).abs().max() < 5e-5


@pytest.fixture(params=[True, False], ids=["bf16", "int8"])
def numerics(request, monkeypatch):
    """Both products: the host's best one, and what hosts without matrix tiles use."""
    if request.param and not matrix_tiles.available():
        pytest.skip("this CPU has no matrix tiles")
    monkeypatch.setattr(matrix_tiles, "available", lambda: request.param)


@pytest.fixture(params=VARIANTS)
def path(request, tmp_path):
    return write_random_model(tmp_path / "m.gguf", request.param.split("-")[0], **VARIANTS[request.param])


@pytest.fixture
def ids():
    return torch.randint(0, 250, (3, LENGTH), generator=torch.Generator().manual_seed(5))


def load(path, activations="int8"):
    return load_transformer(
        open_gguf(path), device=torch.device("cpu"), dtype=torch.float32, activations=activations
    )


def fill(model, ids, mask=None, cuts=()):
    """A state behind a prompt that was given in parts, and the last logits."""
    with torch.inference_mode():
        state = new_state(model, len(ids), ids.shape[1])
        for first, last in zip((0, *cuts), (*cuts, ids.shape[1]), strict=True):
            logits = prefill(model, ids[:, first:last], mask if first == 0 else None, state).clone()
        assert state.prompt is not None
    return state, logits


def rms(x):
    return x.square().mean().sqrt()


@pytest.mark.usefixtures("numerics")
def test_is_as_near_to_the_exact_logits_and_cache_as_the_modules(path, ids):
    model, exact_model = load(path), load(path, "float")
    mask = torch.ones_like(ids)
    mask[0, :9], mask[2, : LENGTH - 1] = 0, 0
    for given in (None, mask):
        state, logits = fill(model, ids, given)
        with torch.inference_mode():
            exact_state, modules_state = (new_state(m, 3, LENGTH) for m in (exact_model, model))
            exact = exact_model(ids, given, cache=exact_state.cache, logits_to_keep=1).logits[:, -1]
            modules = model(ids, given, cache=modules_state.cache, logits_to_keep=1).logits[:, -1]
        assert rms(logits - exact) <= 1.3 * rms(modules - exact)
        assert state.cache.length == LENGTH and torch.equal(state.cache.starts, exact_state.cache.starts)
        real = mask.bool() if given is not None else torch.ones_like(ids).bool()
        for name in ("keys", "values"):
            caches = [s.cache for s in (state, exact_state, modules_state)]
            found, wanted, other = (getattr(c, name).permute(1, 3, 0, 2, 4)[real] for c in caches)
            assert rms(found - wanted) <= 1.1 * rms(other - wanted)


@pytest.mark.usefixtures("numerics", "threads_kept")
def test_neither_threads_nor_parts_nor_neighbours_matter(path, ids, monkeypatch):
    model = load(path)
    state, whole = fill(model, ids)
    for count in (1, 3):
        torch.set_num_threads(count)
        assert torch.equal(fill(model, ids)[1], whole)
    in_parts, logits = fill(model, ids, cuts=(7, 31))
    assert torch.equal(logits, whole) and torch.equal(in_parts.cache.keys, state.cache.keys)
    # the passes cut sequences anywhere
    monkeypatch.setattr(cpu_prompt, "_COLUMNS", 32)
    assert torch.equal(fill(model, ids)[1], whole)
    for row in range(3):
        alone, logits = fill(model, ids[row : row + 1])
        assert torch.equal(alone.cache.values[:, 0], state.cache.values[:, row])
        # the head of one row is another product than that of three; a quant may move
        assert rms(logits[0] - whole[row]) <= 1e-3 * whole[row].std()
    padded = torch.nn.functional.pad(ids, (6, 0))
    mask = (torch.arange(LENGTH + 6) >= 6).long().expand(3, -1)
    assert torch.equal(fill(model, padded, mask)[1], whole)


@pytest.mark.usefixtures("numerics")
def test_decoding_goes_on_behind_it(path, ids):
    """The step's logits are as near to the exact ones behind this pass as behind the modules."""
    model, exact_model = load(path), load(path, "float")
    with torch.inference_mode():
        exact = exact_model(ids, logits_to_keep=1).logits[:, -1]
        modules = model(ids, logits_to_keep=1).logits[:, -1]
        state = new_state(model, 3, LENGTH)
        prefill(model, ids[:, :-1], None, state)
        assert rms(decode_step(model, ids[:, -1], state) - exact) <= 1.3 * rms(modules - exact)


def test_one_token_is_a_decode_step(path, ids):
    model = load(path)
    state, _ = fill(model, ids[:, :1])
    with torch.inference_mode():
        other = new_state(model, 3, LENGTH)
        other.prepare(model)
        assert torch.equal(fill(model, ids[:, :1])[1], decode_step(model, ids[:, 0], other))
    assert torch.equal(state.cache.keys, other.cache.keys[..., :1, :]) and state.cache.length == 1


def test_modules_run_where_the_pass_would_compute_something_else(path, ids):
    with torch.inference_mode():
        model = load(path, "float")
        state = new_state(model, 3, LENGTH)
        logits = prefill(model, ids, None, state)
        assert state.prompt is None
        assert torch.equal(logits, model(ids, logits_to_keep=1).logits[:, -1])


def test_impossible_prompts_are_refused(path, ids):
    model = load(path)
    with torch.inference_mode():
        state = new_state(model, 3, LENGTH)
        for wrong in (-1, model.config.vocab_size):
            bad = ids.clone()
            bad[1, 4] = wrong
            with pytest.raises(FormatError, match=f"id {wrong}"):
                prefill(model, bad, None, state)
        with pytest.raises(FormatError, match="left padding"):
            prefill(model, ids, torch.ones_like(ids).flip(0).tril(), state)
        with pytest.raises(FormatError, match="2 sequences"):
            prefill(model, ids[:2], None, state)
        prefill(model, ids, None, state)
        with pytest.raises(CacheFullError):
            prefill(model, ids[:, :1], None, state)
        with pytest.raises(FormatError, match="already filled"):
            prefill(model, ids[:, :1], torch.ones(3, 1), state)
