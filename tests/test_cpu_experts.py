"""Mixtures of experts in the fused CPU step and prompt pass: routes, formats, batches, threads, obstacles."""

import numpy as np
import pytest
import torch
from arch_fixtures import FIXTURES, TOLERANCE, golden, load, write_resized
from cases import PACKED
from torch import nn

import realizar_torch as rt
from realizar_torch.formats import get_format
from realizar_torch.generation import cpu_prompt
from realizar_torch.generation.cpu_step import why_not
from realizar_torch.generation.step import decode_step, new_state, prefill
from realizar_torch.nn.experts import QuantizedExperts, choose_experts

pytest.importorskip("numba")

from realizar_torch.cpu_kernels import matrix_tiles
from realizar_torch.cpu_kernels.jit import jit
from realizar_torch.cpu_kernels.program import CONTEXT, INSTRUCTION
from realizar_torch.cpu_kernels.step_experts import route

PROMPT, STEPS = 20, 6


@jit
def _route(instructions, context, batch):
    route(context[0], instructions[0], context[0].arena, batch)


def routes(scores, used, normalized, shared=False):
    """Experts and shares of every row of scores by the kernel."""
    batch, experts = len(scores), scores.shape[1] - shared
    chosen = torch.full((batch, used), -7)
    shares, probabilities = torch.full((batch, used + 1), -7.0), torch.full((experts,), -7.0)
    context, instructions = np.zeros(1, CONTEXT), np.zeros(1, INSTRUCTION)
    for name, tensor in {"chosen": chosen, "shares": shares, "probabilities": probabilities}.items():
        context[name] = tensor.data_ptr()
    operands = {"experts": experts, "used": used, "normalized": normalized, "shared": shared}
    operands |= {"source": scores.data_ptr(), "source_stride": 4 * scores.shape[1]}
    for name, value in operands.items():
        instructions[name] = value
    _route(instructions, context, batch)
    return chosen, shares


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize(("experts", "used"), [(1, 1), (5, 3), (16, 16), (33, 4), (128, 8)])
def test_routes_are_those_of_the_modules(experts, used, normalized):
    """Scores in steps of 1/2, so that most are equal to others; shares to the rounding of their softmax."""
    scores = torch.randn(7, experts, generator=torch.Generator().manual_seed(experts))
    scores = (8 * scores).round() / 2
    chosen, shares = routes(scores, used, normalized)
    exact, wanted = choose_experts(scores.double(), used, normalized)
    assert torch.equal(chosen, wanted) and torch.equal(chosen, choose_experts(scores, used, normalized)[1])
    # e^x of a rounded x, an error of 2 ulp, a sum of as many terms as there are experts, and a quotient
    spread = scores.amax(-1, keepdim=True) - scores.gather(-1, chosen)
    assert ((shares[:, :used] - exact).abs() <= 2**-24 * (spread + experts + 8) * exact).all()
    assert (shares[:, used] == -7).all()


def test_the_share_of_a_shared_expert_is_a_sigmoid():
    scores = torch.tensor([[1.0, 2.0, -200.0], [1.0, 2.0, 0.5], [2.0, 1.0, 200.0]])
    chosen, shares = routes(scores, 1, False, shared=True)
    assert chosen.tolist() == [[1], [1], [0]]
    assert (shares[:, 1] - scores[:, 2].double().sigmoid()).abs().max() <= 2**-23


def test_scores_that_are_no_numbers_choose_experts_that_exist():
    """NaN and two infinities have no softmax; where few scores are finite, others follow in their order."""
    nothing, least = float("nan"), -float("inf")
    rows = [[0.0, nothing, 3.0, 1.0, 2.0], [nothing] * 5, [-least, 0.0, -least, 1.0, 2.0], [least] * 5]
    chosen, shares = routes(torch.tensor(rows), 3, True)
    assert shares[:, :3].isnan().all()
    assert chosen.min() >= 0 and chosen.max() < 5
    assert all(len(set(row)) == 3 for row in chosen.tolist())
    chosen, shares = routes(torch.tensor([[least, least, 3.0, least, 2.0]]), 4, False)
    assert chosen.tolist() == [[2, 4, 0, 1]]
    assert shares[0, 2:4].tolist() == [0.0, 0.0]


def packed(name, fmt, activations="float"):
    """The fixture's model, whose rows are no whole blocks."""
    model = load(name)
    rt.quantize_model(model, fmt, exclude=(), activations=activations)
    return model


def texts(name):
    """Three texts; two end alike, so that they go to the same experts."""
    ids = golden(name)[0][0, : PROMPT + STEPS]
    return torch.stack((ids, ids.roll(3), torch.cat((ids[:5].flip(0), ids[5:]))))


def decode(model, ids, only=slice(None)):
    """Logits [B, STEPS, V] of the last tokens of some rows by the fused step; the modules have read all."""
    state = new_state(model, len(ids), ids.shape[1])
    with torch.inference_mode():
        model(ids[:, :-STEPS], cache=state.cache)
        read, ids = state.cache, ids[only]
        state = new_state(model, len(ids), ids.shape[1])
        model(ids[:, :-STEPS], cache=state.cache)
        state.cache.keys.copy_(read.keys[:, only])
        state.cache.values.copy_(read.values[:, only])
        state.prepare(model)
        assert state.fused is not None
        return torch.stack([decode_step(model, token, state).clone() for token in ids[:, -STEPS:].T], dim=1)


def modules(model, ids):
    with torch.inference_mode():
        return model(ids, logits_to_keep=STEPS).logits


def rms(x):
    return x.square().mean().sqrt()


def check_both_numerics(model, ids):
    """Float decoding against the modules, then int8, where a sum rounded otherwise may move a quant by a step
    (see test_cpu_step.py)."""
    matrices = [module for module in model.modules() if hasattr(module, "activations")]
    assert any(isinstance(module, QuantizedExperts) for module in matrices)
    exact = modules(model, ids)
    assert (decode(model, ids) - exact).abs().max() <= TOLERANCE
    for module in matrices:
        module.activations = "int8"
    rounded = modules(model, ids)
    assert rms(decode(model, ids) - rounded) <= 0.3 * rms(rounded - exact)


@pytest.mark.parametrize("fmt", [fmt for fmt in PACKED if get_format(fmt).block_size == 32])
def test_packed_experts_decode_as_the_modules_do(fmt):
    check_both_numerics(packed("qwen2moe", fmt), texts("qwen2moe"))


@pytest.mark.parametrize(
    ("name", "fmt"),
    [
        ("qwen3moe", "Q2_K"),
        ("qwen3moe", "Q3_K"),
        ("qwen2moe", "Q4_K"),
        ("mixtral", "Q5_K"),
        ("qwen2moe", "Q6_K"),
    ],
)
def test_experts_of_whole_blocks(tmp_path, name, fmt):
    """Rows of three blocks of 256, in tiles for two threads."""
    path = write_resized(tmp_path, name, fmt)[0]
    model, _ = rt.load(path, activations="float", tokenizer=FIXTURES / f"{name}.gguf")
    check_both_numerics(model, texts(name))


@pytest.mark.usefixtures("threads_kept")
@pytest.mark.parametrize("activations", ["float", "int8"])
def test_a_row_does_not_depend_on_its_neighbours_or_on_threads(activations):
    model, ids = packed("qwen2moe", "Q5_0", activations), texts("qwen2moe")
    together = decode(model, ids)
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        assert torch.equal(decode(model, ids), together)
    for row in range(3):
        assert torch.equal(decode(model, ids, slice(row, row + 1))[0], together[row])


@pytest.fixture(params=[True, False], ids=["bf16", "int8"])
def numerics(request, monkeypatch):
    """Both products of a prompt: the host's best one, and what hosts without matrix tiles use."""
    if request.param and not matrix_tiles.available():
        pytest.skip("this CPU has no matrix tiles")
    monkeypatch.setattr(matrix_tiles, "available", lambda: request.param)


def fill(model, ids, *cuts):
    """A state behind a prompt that was given in parts, and the last logits."""
    state = new_state(model, len(ids), ids.shape[1])
    with torch.inference_mode():
        for first, last in zip((0, *cuts), (*cuts, ids.shape[1]), strict=True):
            logits = prefill(model, ids[:, first:last], None, state).clone()
    assert state.prompt is not None
    return state.cache, logits


@pytest.mark.usefixtures("numerics", "threads_kept")
@pytest.mark.parametrize(("name", "fmt"), [("qwen2moe", "Q8_0"), ("mixtral", "Q4_1"), ("qwen3moe", "Q5_0")])
def test_prompts_are_as_near_to_the_exact_logits_as_the_modules(name, fmt, monkeypatch):
    """And neither threads nor passes nor neighbours matter: the second layer's values tell."""
    exact_model, model, ids = packed(name, fmt), packed(name, fmt, "int8"), texts(name)
    with torch.inference_mode():
        exact, rounded = (m(ids, logits_to_keep=1).logits[:, 0] for m in (exact_model, model))
    cache, whole = fill(model, ids)
    assert rms(whole - exact) <= 1.3 * rms(rounded - exact)
    for count in (1, 3):
        torch.set_num_threads(count)
        assert torch.equal(fill(model, ids)[1], whole)
    assert torch.equal(fill(model, ids, 7, 20)[1], whole)
    for row in range(3):
        assert torch.equal(fill(model, ids[row : row + 1])[0].values[:, 0], cache.values[:, row])
    # the passes cut sequences anywhere
    monkeypatch.setattr(cpu_prompt, "_COLUMNS_OF_MIXTURES", 32)
    assert torch.equal(fill(model, ids)[1], whole)


def test_many_experts_take_int8_where_there_are_matrix_tiles(monkeypatch):
    model, ids = packed("qwen3moe", "Q8_0", "int8"), texts("qwen3moe")
    with monkeypatch.context() as patch:
        patch.setattr(matrix_tiles, "available", lambda: False)
        expected = fill(model, ids)[1]
    # 6 experts, of which 2 are used
    monkeypatch.setattr(cpu_prompt, "_MOST_EXPERTS_IN_BF16", 2)
    assert torch.equal(fill(model, ids)[1], expected)
    monkeypatch.setattr(cpu_prompt, "_MOST_EXPERTS_IN_BF16", 3)
    assert torch.equal(fill(model, ids)[1], expected) is not matrix_tiles.available()


def test_a_request_gives_the_same_tokens_in_a_batch_as_alone(tmp_path):
    """Prompts of other lengths that join and leave, one of them of nothing but NaN."""
    path = write_resized(tmp_path, "qwen2moe", "Q8_0")[0]
    model, _ = rt.load(path, device="cpu", tokenizer=FIXTURES / "qwen2moe.gguf")
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone(), requires_grad=False)
    poison, ids = 98, texts("qwen2moe")[0].clamp(max=97).tolist()
    # the scale of the first block: NaN in fp16
    model.embed_tokens.weight[poison, :2] = torch.tensor([0, 126], dtype=torch.uint8)

    def run(numbers):
        batch = rt.BatchedGenerator(model, max_batch=3)
        options = {"do_sample": True, "temperature": 1.5, "eos_token_id": []}
        added = {}
        for number in numbers:
            prompt = [5, poison, 7] if number < 0 else ids[number : 9 + 3 * number]
            seed = torch.Generator().manual_seed(number)
            added[batch.add(prompt, max_new_tokens=4 + len(prompt), generator=seed, **options)] = number
        return {added[done.id]: done.token_ids for done in batch if added[done.id] >= 0}

    alone = {number: run([number])[number] for number in range(6)}
    assert len(set(alone.values())) == 6
    assert run(range(6)) == run([0, 1, -1, 2, 3, 4, 5]) == alone


def test_routers_that_are_no_scores_leave_prompts_to_the_modules():
    model, ids = packed("mixtral", "Q8_0", "int8"), texts("mixtral")
    linear = nn.Linear(36, 5, bias=False)
    linear.weight = model.layers[0].mlp.router.weight
    model.layers[0].mlp.router = linear
    state = new_state(model, 3, ids.shape[1])
    with torch.inference_mode():
        prefill(model, ids, None, state)
    assert state.fused is not None and state.prompt is None


@pytest.mark.parametrize("used", [1, 5])
def test_equal_scores_choose_the_first_experts(used):
    """All scores are twice one element of the norm: sums that nothing can round otherwise."""
    model, ids = load("qwen2moe"), texts("qwen2moe")
    for layer in model.layers:
        layer.mlp.used = used
        layer.mlp.router.weight = nn.Parameter(torch.eye(1, 48).expand(5, -1) * 2, requires_grad=False)
    expected = modules(model, ids)
    assert (decode(model, ids) - expected).abs().max() <= TOLERANCE
    for layer in model.layers:
        for part in layer.mlp.experts.children():
            part.weight.data = part.weight.data.roll(1, 0)
    moved = (modules(model, ids) - expected).abs().max()
    assert (moved > 10 * TOLERANCE) if used == 1 else (moved <= TOLERANCE)


def test_a_router_may_have_a_dtype_of_its_own():
    model, ids = load("qwen3moe"), texts("qwen3moe")
    for layer in model.layers:
        layer.mlp.router.bfloat16()
    assert (decode(model, ids) - modules(model, ids)).abs().max() <= TOLERANCE


def test_a_router_of_nothing_gives_nothing():
    model, ids = load("mixtral"), texts("mixtral")
    model.layers[1].mlp.router.weight.data.fill_(float("nan"))
    assert decode(model, ids).isnan().all()


def one_expert_too_few(mixture):
    weight = mixture.experts.up_proj.weight
    mixture.experts.up_proj.weight = nn.Parameter(weight[:-1], requires_grad=False)


def more_than_there_are(mixture):
    mixture.used = 6


def none_at_all(mixture):
    mixture.used = 0


@pytest.mark.parametrize("change", [one_expert_too_few, more_than_there_are, none_at_all])
def test_modules_take_over_where_a_route_leads_nowhere(change):
    """Memory behind the last expert is never read."""
    model = load("mixtral")
    state = new_state(model, 1, 8)
    assert why_not(model, state.cache) is None
    change(model.layers[0].mlp)
    assert why_not(model, state.cache) == "layers.0.mlp has other experts than its router names"
