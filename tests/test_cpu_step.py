"""The fused CPU step against the modules it replaces: every architecture, batches, threads, allocations."""

import sys
import threading
import tracemalloc

import pytest
import torch
from random_models import write_random_model
from torch import nn

from realizar_torch.checkpoint.gguf import open_gguf
from realizar_torch.errors import CacheFullError, FormatError
from realizar_torch.generation.cpu_step import why_not
from realizar_torch.generation.step import decode_step, new_state, prefill
from realizar_torch.models.loading import load_transformer
from realizar_torch.nn.linear import QuantizedLinear
from realizar_torch.nn.norm import LayerNorm, RMSNorm

pytest.importorskip("numba")

# fp32 on both sides, logits of size 10 from sums of up to 288 terms in other orders
TOLERANCE = 2e-4
VARIANTS = {
    "llama": {"fmt": "Q8_0", "tied": False, "biases": True},
    "llama-divisors": {"fmt": "Q4_1", "divisors": True},
    "gemma3": {"fmt": "Q5_0"},
}
PROMPT, STEPS = 21, 30


def load(path, activations="float"):
    return load_transformer(
        open_gguf(path), device=torch.device("cpu"), dtype=torch.float32, activations=activations
    )


@pytest.fixture(params=VARIANTS)
def path(request, tmp_path):
    return write_random_model(tmp_path / "m.gguf", request.param.split("-")[0], **VARIANTS[request.param])


@pytest.fixture
def ids():
    return torch.randint(0, 250, (3, PROMPT + STEPS), generator=torch.Generator().manual_seed(5))


def decode(model, ids, mask=None, only=None):
    """Logits [B, STEPS, V] of the last STEPS tokens, fed one at a time; ``only``: by one row's cache. The
    modules fill the cache."""
    with torch.inference_mode():
        state = new_state(model, len(ids), ids.shape[1])
        state.prepare(model)
        model(ids[:, :-STEPS], mask, cache=state.cache)
        assert state.fused is not None
        if only is not None:
            batched, ids = state.cache, ids[only : only + 1]
            state = new_state(model, 1, ids.shape[1])
            prefill(model, ids[:, :-STEPS], None, state)
            state.cache.keys.copy_(batched.keys[:, only : only + 1])
            state.cache.values.copy_(batched.values[:, only : only + 1])
        return torch.stack(
            [decode_step(model, ids[:, -STEPS + s], state).clone() for s in range(STEPS)], dim=1
        )


def test_equals_the_modules_beyond_the_window(path, ids):
    model = load(path)
    with torch.inference_mode():
        expected = model(ids, logits_to_keep=STEPS).logits
    assert (decode(model, ids) - expected).abs().max() <= TOLERANCE


def test_padded_rows_equal_the_modules(path, ids):
    model = load(path)
    mask = torch.ones_like(ids)
    mask[0, :9], mask[2, : PROMPT - 1] = 0, 0
    with torch.inference_mode():
        expected = model(ids, mask, logits_to_keep=STEPS).logits
    assert (decode(model, ids, mask[:, :-STEPS]) - expected).abs().max() <= TOLERANCE


def test_int8_is_as_near_to_the_exact_logits_as_the_modules(path, ids):
    """A sum rounded otherwise may move a quant by a step, and later layers carry that on: so the two int8
    paths agree closely at first and are equally far from the exact logits throughout."""
    model = load(path, "int8")
    with torch.inference_mode():
        modules = model(ids, logits_to_keep=STEPS).logits
        exact = load(path)(ids, logits_to_keep=STEPS).logits
    fused = decode(model, ids)
    assert rms(fused[:, 0] - modules[:, 0]) <= 0.3 * rms(modules - exact)
    assert rms(fused - exact) <= 1.2 * rms(modules - exact)


def rms(x):
    return x.square().mean().sqrt()


@pytest.mark.usefixtures("threads_kept")
@pytest.mark.parametrize("activations", ["float", "int8"])
def test_a_row_does_not_depend_on_its_neighbours_or_on_threads(path, ids, activations):
    model = load(path, activations)
    together = decode(model, ids)
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        assert torch.equal(decode(model, ids), together)
    for row in range(3):
        assert torch.equal(decode(model, ids, only=row)[0], together[row])


@pytest.mark.parametrize("activations", ["float", "int8"])
def test_rows_at_positions_of_their_own_equal_rows_alone(path, ids, activations):
    """Three texts of other lengths, decoded together: bit for bit what each gives by itself."""
    model, ends = load(path, activations), [PROMPT, 5, PROMPT + 13]
    together = new_state(model, 3, ids.shape[1])
    together.prepare(model)
    with torch.inference_mode():
        alone = [new_state(model, 1, ids.shape[1]) for _ in ends]
        for row, (state, end) in enumerate(zip(alone, ends, strict=True)):
            prefill(model, ids[row : row + 1, :end], None, state)
            together.cache.keys[:, row] = state.cache.keys[:, 0]
            together.cache.values[:, row] = state.cache.values[:, 0]
        for s in range(3):
            tokens = torch.stack([ids[row, end + s] for row, end in enumerate(ends)])
            found = together.fused.run_at(tokens, torch.tensor(ends) + s)
            for row, state in enumerate(alone):
                assert torch.equal(found[row], decode_step(model, tokens[row : row + 1], state)[0])
        assert together.cache.length == 0
        with pytest.raises(CacheFullError, match="position -1"):
            together.fused.run_at(tokens, torch.tensor([0, -1, 0]))
        with pytest.raises(CacheFullError, match=f"position {ids.shape[1]}"):
            together.fused.run_at(tokens, torch.tensor([0, 0, ids.shape[1]]))


def test_dense_weights_and_mixed_numerics_are_fused_too(path, ids):
    model = load(path)
    model.layers[1].mlp.down_proj = model.layers[1].mlp.down_proj.to_linear()
    model.layers[2].self_attn.q_proj = model.layers[2].self_attn.q_proj.to_linear()
    table = nn.Embedding.from_pretrained(model.embed_tokens.dequantize())
    model.embed_tokens = table
    with torch.inference_mode():
        expected = model(ids, logits_to_keep=STEPS).logits
    together = decode(model, ids)
    assert (together - expected).abs().max() <= TOLERANCE

    model.layers[0].mlp.gate_proj.activations = "int8"
    with torch.inference_mode():
        rounded = model(ids, logits_to_keep=STEPS).logits
    fused = decode(model, ids)
    assert rms(rounded - expected) > 10 * rms(together - expected)
    assert rms(fused[:, 0] - rounded[:, 0]) <= 0.3 * rms(rounded - expected)


def hooked(model):
    model.layers[0].mlp.register_forward_hook(lambda *_: None)


def subclassed(model):
    linear = model.layers[0].mlp.up_proj
    linear.__class__ = type("Adapted", (QuantizedLinear,), {"forward": lambda self, x: 0 * x})


def with_a_forward_of_its_own(model):
    model.layers[0].mlp.forward = lambda x: x


def zero_centered(model):
    model.norm.zero_centered = True


def other_epsilon(model):
    model.layers[1].mlp_norm.eps = 1.0


def layer_norm(model):
    model.layers[1].attn_norm = LayerNorm(96)
    nn.init.normal_(model.layers[1].attn_norm.bias)


def exact_gelu(model):
    model.layers[0].mlp.activation = "gelu"


@pytest.mark.parametrize("change", [zero_centered, other_epsilon, layer_norm, exact_gelu])
def test_one_layer_of_another_kind_is_fused_too(path, ids, change):
    model = load(path)
    with torch.inference_mode():
        before = model(ids, logits_to_keep=STEPS).logits
        change(model)
        expected = model(ids, logits_to_keep=STEPS).logits
    assert (expected - before).abs().max() > 10 * TOLERANCE
    assert (decode(model, ids) - expected).abs().max() <= TOLERANCE


def one_norm_of_two(model):
    model.layers[0].self_attn.q_norm = RMSNorm(24)
    model.layers[0].self_attn.k_norm = None


def norms_that_differ(model):
    model.layers[0].self_attn.q_norm = RMSNorm(24, eps=1.0)
    model.layers[0].self_attn.k_norm = RMSNorm(24)


def double_norm(model):
    model.norm.double()


def with_gaps(model):
    weight = model.layers[0].mlp.up_proj.weight
    wide = torch.cat([weight, weight], dim=1)
    model.layers[0].mlp.up_proj.weight = nn.Parameter(wide[:, : weight.shape[1]], requires_grad=False)


@pytest.mark.parametrize(
    "change",
    [
        hooked,
        subclassed,
        with_a_forward_of_its_own,
        one_norm_of_two,
        norms_that_differ,
        double_norm,
        with_gaps,
    ],
    ids=lambda change: change.__name__,
)
def test_modules_take_over_where_something_was_changed(path, ids, change):
    model = load(path)
    state = new_state(model, 1, 8)
    assert why_not(model, state.cache) is None
    change(model)
    assert why_not(model, state.cache) is not None


def test_the_slower_way_is_announced_with_its_reason(path, ids):
    model = load(path)
    hooked(model)
    state = new_state(model, 1, 8)
    with torch.inference_mode():
        with pytest.warns(UserWarning, match=r"layers\.0\.mlp has a forward hook"):
            prefill(model, ids[:1, :4], None, state)
        assert decode_step(model, ids[:1, 4], state).isfinite().all()


def test_a_global_hook_is_an_obstacle(path):
    model = load(path)
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert "hook" in why_not(model, new_state(model, 1, 8).cache)
    finally:
        handle.remove()


@pytest.mark.parametrize("token", [-1, 10**10])
def test_a_token_outside_the_table_is_refused(path, ids, token):
    model = load(path)
    with torch.inference_mode():
        state = new_state(model, 1, 8)
        prefill(model, ids[:1, :4], None, state)
        with pytest.raises(FormatError, match=str(token)):
            decode_step(model, torch.tensor([token]), state)


def test_a_cast_in_mid_stream_reads_no_freed_memory(path, ids):
    """The program keeps the weights it was built from until the next prefill."""
    model = load(path)
    with torch.inference_mode():
        states = [new_state(model, 1, 8) for _ in range(2)]
        for state in states:
            prefill(model, ids[:1, :4], None, state)
        expected = decode_step(model, ids[:1, 4], states[0]).clone()
        model.half()
        model.float()
        junk = [torch.full((4096,), float("nan")) for _ in range(200)]
        assert torch.equal(decode_step(model, ids[:1, 4], states[1]), expected)
        assert len(junk) == 200


def test_a_step_allocates_nothing(path, ids):
    model = load(path, "int8")
    with torch.inference_mode():
        state = new_state(model, 1, 256)
        prefill(model, ids[:1, :4], None, state)
        token = ids[0, :1]
        for _ in range(20):
            decode_step(model, token, state)
        tracemalloc.start()
        before, blocks = tracemalloc.get_traced_memory()[0], sys.getallocatedblocks()
        for _ in range(100):
            decode_step(model, token, state)
        after, blocks = tracemalloc.get_traced_memory()[0], sys.getallocatedblocks() - blocks
        tracemalloc.stop()
    # less than one small object per step
    assert after - before < 2000 and blocks < 50


def test_two_models_in_two_threads(tmp_path, ids):
    models = [
        load(write_random_model(tmp_path / f"{arch}.gguf", arch, fmt="Q8_0"), "int8")
        for arch in ("llama", "gemma3")
    ]
    expected = [decode(model, ids) for model in models]
    found = [None, None]

    def work(index):
        for _ in range(3):
            found[index] = decode(models[index], ids)

    workers = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
