"""The GPU's prompt pass against the modules and the decode step: interpreted in CI, real sizes on a GPU."""

import pytest
import random_models
import torch
from module_linears import ModuleLinears
from random_models import write_random_model

from realizar_torch.checkpoint.gguf import open_gguf
from realizar_torch.models.loading import load_transformer
from realizar_torch.nn.kv_cache import KVCache

pytest.importorskip("triton")

from realizar_torch.errors import BackendUnavailableError
from realizar_torch.generation import gpu_product, gpu_prompt, gpu_step, prompt_graph
from realizar_torch.generation.gpu_prompt import GpuPrompt
from realizar_torch.generation.graph import GraphStats
from realizar_torch.generation.prompt_rows import FixedRows, Piece, passes, rows_of
from realizar_torch.generation.workspace import Workspace

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# fp32 on both sides, logits of size 10 from sums of up to 288 terms in other orders
TOLERANCE = 2e-4
# tokens of a prompt, and of its padding: windows are 5 in the interpreter, 16 on a GPU
TOKENS, PADDING = (12, 3) if DEVICE.type == "cpu" else (45, 9)
VARIANTS = {
    "llama": {"fmt": "Q8_0", "tied": False, "biases": True},
    "llama-divisors": {"fmt": "Q4_1", "divisors": True},
    "gemma3": {"fmt": "Q5_0"},
}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Sizes that the interpreter runs in seconds; products are the modules' but in one test."""
    if DEVICE.type == "cpu":
        sizes = {"LAYERS": 2, "HIDDEN": 32, "INNER": 64, "HEADS": 4, "KV_HEADS": 2, "HEAD_DIM": 24}
        for name, size in (sizes | {"WINDOW": 5}).items():
            monkeypatch.setattr(random_models, name, size)
        monkeypatch.setattr(gpu_product, "MATVEC_ROWS", 10**6)
        # surplus rows wherever a pass has a bucket; three sequences have none
        monkeypatch.setattr(prompt_graph, "ROWS", (8, 14, 26))


def load(tmp_path, variant, activations="float", dtype=torch.float32):
    path = tmp_path / "m.gguf"
    if not path.exists():
        write_random_model(path, variant.split("-")[0], **VARIANTS[variant])
    return load_transformer(open_gguf(path), device=DEVICE, dtype=dtype, activations=activations)


def ids_of(batch, count):
    return torch.randint(0, 250, (batch, count), generator=torch.Generator().manual_seed(5)).to(DEVICE)


def padded_mask(ids, padding):
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    return mask


def fresh_cache(model, batch, capacity=96):
    cache = KVCache(model.config, batch, capacity, device=DEVICE, dtype=model.dtype)
    # what nobody has written must not matter
    cache.keys.fill_(torch.nan)
    cache.values.fill_(torch.nan)
    return cache


def run(model, ids, mask=None, cache=None):
    with torch.inference_mode():
        return GpuPrompt(model).run(
            model, ids, mask, fresh_cache(model, len(ids)) if cache is None else cache
        )


@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_the_modules_with_left_padding_and_beyond_the_window(tmp_path, variant):
    model, ids = load(tmp_path, variant), ids_of(2, TOKENS)
    mask = padded_mask(ids, PADDING)
    cache, expected_cache = fresh_cache(model, 2), fresh_cache(model, 2)
    with torch.inference_mode():
        # modules multiply what lies under the mask by zero
        expected_cache.values.zero_()
        expected = model(ids, mask, cache=expected_cache, logits_to_keep=1).logits[:, -1]
    found = run(model, ids, mask, cache)
    assert (found - expected).abs().max() <= TOLERANCE
    assert cache.length == TOKENS
    for row, start in ((0, PADDING), (1, 0)):
        for mine, theirs in ((cache.keys, expected_cache.keys), (cache.values, expected_cache.values)):
            difference = (mine - theirs)[:, row, :, start:TOKENS]
            assert difference.abs().max() <= TOLERANCE
            assert mine[:, row, :, :start].isnan().all() and mine[:, row, :, TOKENS:].isnan().all()


def test_products_of_many_rows_add_their_biases(tmp_path, monkeypatch):
    """One layer's products by decoding, against its modules."""
    monkeypatch.setattr(gpu_product, "MATVEC_ROWS", 8)
    attention = load(tmp_path, "llama").layers[0].self_attn
    linears = (attention.q_proj, attention.k_proj)
    x = torch.randn(9, linears[0].in_features, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    with torch.inference_mode():
        product = gpu_product.GpuProduct(*linears)
        found = product(x, x.new_empty(9, product.out_features))
        expected = torch.cat([linear(x) for linear in linears], 1)
    assert (found - expected).abs().max() <= TOLERANCE


def smaller(monkeypatch):
    """For products of few rows: the interpreter takes a second for every 16 rows of weights."""
    if DEVICE.type == "cpu":
        for name, size in {"HEADS": 2, "KV_HEADS": 1, "HEAD_DIM": 16, "INNER": 32}.items():
            monkeypatch.setattr(random_models, name, size)


def rms(x):
    return float(x.square().mean().sqrt())


def test_few_rows_are_far_nearer_to_exact_keys_and_values_than_int8(tmp_path, monkeypatch):
    """Products of 9 to 64 rows for linears of int8 activations multiply packed weights with fp16."""
    monkeypatch.setattr(gpu_product, "MATVEC_ROWS", 8)
    smaller(monkeypatch)
    write_random_model(tmp_path / "m.gguf", "llama", fmt="Q4_1")
    # what a rehearsal launches where there is a compiler would be counted too
    monkeypatch.setattr(prompt_graph, "rehearse", lambda *works: None)
    ids, model, products = ids_of(1, 9), load(tmp_path, "llama", "int8"), []
    exact_model, on_cpu = load(tmp_path, "llama"), load(tmp_path, "llama", "int8").cpu()
    multiply = gpu_product.GpuProduct._in_groups
    monkeypatch.setattr(
        gpu_product.GpuProduct, "_in_groups", lambda self, x: products.append(x) or multiply(self, x)
    )
    cache, exact = (fresh_cache(model, 1) for _ in range(2))
    modules = KVCache(model.config, 1, 96, device="cpu")
    with torch.inference_mode():
        exact_model(ids, cache=exact)
        on_cpu(ids.cpu(), cache=modules)
        run(model, ids, None, cache)
    # four products of every layer but the last, which follows one row
    assert len(products) == 4 * (len(model.layers) - 1) + 1
    for name in ("keys", "values"):
        found, nearby, right = (getattr(one, name)[-1, :, :, :9].cpu() for one in (cache, modules, exact))
        # fp16 has eleven bits where int8 has seven of the largest in a block
        assert 0 < rms(found - right) <= rms(nearby - right) / 8


def test_biases_of_few_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_product, "MATVEC_ROWS", 8)
    smaller(monkeypatch)
    attention = load(tmp_path, "llama", "int8").layers[0].self_attn
    linears = (attention.q_proj, attention.k_proj, attention.v_proj)
    x = torch.randn(9, linears[0].in_features, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    with torch.inference_mode():
        product = gpu_product.GpuProduct(*linears)
        found = product(x, x.new_empty(9, product.out_features)).cpu()
        weights = torch.cat([linear.dequantize(torch.float64).cpu() for linear in linears])
        biases = torch.cat([linear.bias for linear in linears]).cpu()
        # activations and weights in fp16: half a unit in the last of eleven bits each
        rounding = 2.1 * 2.0**-12 * (x.cpu().double().abs() @ weights.abs().T)
        exact = x.cpu().double() @ weights.T + biases
        assert ((found - exact).abs() <= rounding + 1e-6).all()


def test_a_long_prompt_in_passes_equals_the_whole(tmp_path, monkeypatch):
    model, ids = load(tmp_path, "gemma3"), ids_of(2, TOKENS)
    whole = run(model, ids)
    # bounds that lie inside sequences
    monkeypatch.setattr(gpu_prompt, "_TOKENS", TOKENS - 5)
    assert (run(model, ids) - whole).abs().max() <= TOLERANCE


def test_goes_on_behind_a_filled_cache(tmp_path):
    model, ids = load(tmp_path, "gemma3"), ids_of(2, TOKENS)
    cache, mask = fresh_cache(model, 2), padded_mask(ids, PADDING)
    # every row has begun
    first = PADDING + 2
    run(model, ids[:, :first], mask[:, :first], cache)
    found = run(model, ids[:, first:], None, cache)
    assert (found - run(model, ids, mask)).abs().max() <= TOLERANCE


def test_a_row_is_the_same_alone_and_beside_not_a_number(tmp_path):
    model, ids = load(tmp_path, "llama"), ids_of(3, TOKENS)
    together = run(model, ids, padded_mask(ids, PADDING))
    alone = run(model, ids[:1, PADDING:])
    assert (alone[0] - together[0]).abs().max() <= TOLERANCE
    # outside the table: a row of NaN
    ids[1] = 10**6
    beside = run(model, ids, padded_mask(ids, PADDING))
    assert beside[1].isnan().all()
    assert torch.equal(beside[[0, 2]], together[[0, 2]])


def poison(prompt):
    """What an earlier prompt may have left: no number anywhere, tokens outside the table."""
    graphs = prompt._graphs
    for part in vars(graphs._memory).values():
        part.fill_(torch.nan)
    for bucket in graphs._buckets.values():
        bucket.tokens.fill_(10**6)
        bucket.rows._memory.random_()


def test_surplus_rows_and_what_was_there_before_change_nothing(tmp_path):
    model, ids = load(tmp_path, "gemma3"), ids_of(2, TOKENS)
    prompt, caches = GpuPrompt(model), [fresh_cache(model, 2) for _ in range(2)]
    with torch.inference_mode():
        first = prompt.run(model, ids, None, caches[0])
        poison(prompt)
        caches[0].keys[:, :, :, TOKENS:] = caches[0].values[:, :, :, TOKENS:] = torch.nan
        caches[1].keys.copy_(caches[0].keys)
        caches[1].values.copy_(caches[0].values)
        caches[0].reset()
        assert torch.equal(prompt.run(model, ids, None, caches[0]), first)
    assert prompt.stats.eager_steps + prompt.stats.graph_replays == 2
    # the same slots as before, to the bit, and no others
    for mine, theirs in zip(
        (caches[0].keys, caches[0].values), (caches[1].keys, caches[1].values), strict=True
    ):
        assert torch.equal(mine.nan_to_num(7.0), theirs.nan_to_num(7.0))


def test_a_cache_that_has_moved_is_noticed(tmp_path):
    model, ids = load(tmp_path, "llama"), ids_of(1, TOKENS)
    prompt, caches = GpuPrompt(model), [fresh_cache(model, 1) for _ in range(2)]
    with torch.inference_mode():
        found = [prompt.run(model, ids, None, cache) for cache in caches]
        assert torch.equal(*found)
        assert torch.equal(caches[0].keys[..., :TOKENS, :], caches[1].keys[..., :TOKENS, :])
        assert len(prompt._graphs._buckets) == 1
        caches[1].ensure(1, 200)
        caches[1].values.fill_(torch.nan)
        assert torch.equal(prompt.run(model, ids, None, caches[1]), found[0])


@pytest.mark.gpu
def test_a_graph_equals_the_launches_one_by_one(tmp_path):
    """Bit for bit, in every bucket, at every start, and after the cache has grown."""
    model = load(tmp_path, "gemma3", "int8", torch.bfloat16)
    prompt, caches = GpuPrompt(model), [fresh_cache(model, 2, 700) for _ in range(2)]

    def both(ids, mask=None):
        with torch.inference_mode():
            graph, eager = (
                prompt.run(model, ids, mask, cache, cuda_graph=wanted)
                for cache, wanted in zip(caches, ("auto", False), strict=True)
            )
        assert torch.equal(graph, eager)
        for name in ("keys", "values"):
            mine, theirs = (getattr(cache, name)[..., : cache.length, :] for cache in caches)
            assert torch.equal(mine.nan_to_num(7.0), theirs.nan_to_num(7.0))

    for count in (3, 20, 300):
        for seed in range(3):
            ids = torch.randint(0, 250, (2, count), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
            for cache in caches:
                cache.reset()
            both(ids, padded_mask(ids, 2))
            both(ids)


@pytest.mark.gpu
def test_graphs_are_captured_once_and_dropped_with_the_cache(tmp_path):
    model, ids = load(tmp_path, "llama"), ids_of(1, 40)
    prompt, cache = GpuPrompt(model), fresh_cache(model, 1)

    def times(count):
        with torch.inference_mode():
            for _ in range(count):
                cache.reset()
                found.append(prompt.run(model, ids, None, cache))

    found: list = []
    times(4)
    assert prompt.stats == GraphStats(captures=1, graph_replays=3, eager_steps=1, fallback=None)
    cache.ensure(1, 300)
    torch.cuda.empty_cache()
    times(3)
    assert prompt.stats == GraphStats(captures=2, graph_replays=5, eager_steps=2, fallback=None)
    assert all(torch.equal(found[0], other) for other in found)


@pytest.mark.gpu
def test_a_failed_capture_falls_back_with_one_warning(tmp_path, monkeypatch):
    model, ids = load(tmp_path, "llama"), ids_of(1, 40)
    expected = run(model, ids)
    work = prompt_graph._Bucket.work

    def broken(self):
        work(self)
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("injected inside the capture")

    monkeypatch.setattr(prompt_graph._Bucket, "work", broken)
    prompt, cache = GpuPrompt(model), fresh_cache(model, 1)
    with torch.inference_mode(), pytest.warns(UserWarning, match="injected inside the capture") as caught:
        for _ in range(3):
            cache.reset()
            assert torch.equal(prompt.run(model, ids, None, cache), expected)
        with pytest.raises(BackendUnavailableError, match="injected"):
            cache.reset()
            prompt.run(model, ids, None, cache, cuda_graph=True)
    assert len(caught) == 1 and "injected" in prompt.stats.fallback


def test_decoding_goes_on_where_the_prompt_ends(tmp_path, monkeypatch):
    if DEVICE.type == "cpu":
        monkeypatch.setattr(gpu_step, "GpuLinears", ModuleLinears)
    model, ids = load(tmp_path, "llama"), ids_of(1, TOKENS)
    with torch.inference_mode():
        expected = model(ids, logits_to_keep=1).logits[:, -1]
        cache = fresh_cache(model, 1)
        run(model, ids[:, :-1], None, cache)
        work = Workspace.for_model(model.config, 1, device=DEVICE)
        found = gpu_step.GpuStep(model, cache, work).run(ids[:, -1])
    assert (found - expected).abs().max() <= TOLERANCE


def test_passes_hold_what_they_may_and_lose_nothing():
    pieces = [Piece(0, 3, 10, 3), Piece(1, 0, 4), Piece(2, 7, 6, 1, wanted=False)]
    found = list(passes(pieces, 8))
    assert [sum(piece.count for piece in part) for part in found] == [8, 8, 4]
    assert [[(p.sequence, p.slot, p.count, p.wanted) for p in part] for part in found] == [
        [(0, 3, 8, False)],
        [(0, 11, 2, True), (1, 0, 4, True), (2, 7, 2, False)],
        [(2, 9, 4, False)],
    ]
    rows = rows_of(found[1], 3, torch.device("cpu"))
    assert rows.places.tolist() == [[0, 11], [0, 12], [1, 0], [1, 1], [1, 2], [1, 3], [2, 7], [2, 8]]
    assert rows.positions.tolist() == [8, 9, 0, 1, 2, 3, 6, 7]
    assert rows.blocks.tolist() == [[0, 0, 11, 2], [2, 1, 0, 3], [5, 1, 3, 1], [6, 2, 7, 2]]
    assert rows.ends.tolist() == [1, 5]
    assert rows.end_blocks.tolist() == [[0, 0, 12, 1], [1, 1, 3, 1]]


def test_fixed_tables_are_the_rows_and_nothing_else():
    pieces = [Piece(2, 11, 2, 3), Piece(0, 0, 4), Piece(1, 7, 5, 1, wanted=False)]
    fixed = FixedRows(16, 3, 3, torch.device("cpu"))
    fixed._memory.fill_(99)
    # of another use
    fixed.fill([Piece(1, 5, 16, 2)])
    assert fixed.fill(pieces) == 2
    exact, found = rows_of(pieces, 3, torch.device("cpu")), fixed.tables
    for name, surplus in (("blocks", 0), ("end_blocks", 0), ("places", -1), ("positions", 0), ("ends", 0)):
        mine, theirs = getattr(found, name), getattr(exact, name)
        assert torch.equal(mine[: len(theirs)], theirs)
        assert len(mine) > len(theirs) and (mine[len(theirs) :] == surplus).all()


def test_fixed_tables_have_room_for_any_pieces():
    choose = torch.Generator().manual_seed(2)
    fixed = FixedRows(24, 4, 5, torch.device("cpu"))
    for _ in range(60):
        counts = (torch.rand(4, generator=choose) * 7).int().tolist()
        pieces = [Piece(row, 0, count) for row, count in enumerate(counts) if count]
        if pieces:
            assert fixed.fill(pieces) == len(pieces)
