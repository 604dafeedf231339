"""Two GPUs: everything runs on the tensors' own device while the other is current, and moves between them."""

import pytest
import torch
from cases import random_activations, random_blocks
from hf_reference import GREEDY, TEXT
from packed_model import digest
from random_models import write_random_model

import realizar_torch as rt
from realizar_torch import ops
from realizar_torch.generation.loop import Decoding
from realizar_torch.generation.request import make_request
from realizar_torch.metrics import DispatchMetrics
from realizar_torch.ops.recording import observe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

# the first is the current one throughout
FIRST, SECOND = torch.device("cuda:0"), torch.device("cuda:1")
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.1}
COLUMNS, ROWS = 300, 7


@pytest.fixture(autouse=True)
def first_stays_current():
    torch.cuda.set_device(FIRST)
    yield
    assert torch.cuda.current_device() == FIRST.index


def test_every_kernel_gives_the_same_bits():
    from kernel_tour import tour

    results = []
    for device in (FIRST, SECOND):
        torch.manual_seed(5)
        written = list(tour(device, [("Q4_K", "ggml"), ("Q5_0", "ggml")]))
        assert {tensor.device for tensor in written} == {device}
        results.append([tensor.cpu() for tensor in written])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def operands(device, fmt="Q4_K", batch=3):
    """x, a weight, a second one, and vectors of their rows and columns."""
    weights = (random_blocks(fmt, ROWS, COLUMNS, seed).to(device) for seed in (1, 2))
    return (
        random_activations(batch, COLUMNS).to(device),
        *weights,
        torch.linspace(-1, 1, ROWS, device=device),
        torch.linspace(0.5, 1.5, COLUMNS, device=device),
    )


@pytest.mark.parametrize("activations", ["float", "int8"])
@pytest.mark.parametrize("batch", [1, 7, 70])
def test_every_op_gives_the_same_bits(activations, batch):
    """Of matvecs, tensor cores, and decoded weights."""
    results = []
    for device in (FIRST, SECOND):
        x, weight, up, bias, gain = operands(device, batch=batch)
        x.requires_grad_()
        one, numerics = (weight, "Q4_K", COLUMNS), {"activations": activations}
        norm = {"normalization": "layernorm", "eps": 1e-5}
        ids = torch.arange(batch, device=device)[:, None] % 2
        found = [
            ops.linear(x, *one, bias, **numerics),
            ops.linears(x, [weight] * 3, ["Q4_K"] * 3, COLUMNS, [bias] * 3, **numerics),
            ops.gated_linear(x, weight, up, "Q4_K", COLUMNS, activation="silu", **numerics),
            ops.norm_linear(x, gain, gain, *one, bias, **norm, **numerics),
            ops.expert_linear(x[:, None], ids, torch.stack([weight, up]), "Q4_K", COLUMNS, **numerics),
        ]
        torch.cat([part.flatten() for part in found]).square().mean().backward()
        found += [x.grad, ops.embedding(ids, *one), ops.dequantize(*one)]
        found.append(ops.quantize(x.detach(), "Q6_K", importance=gain))
        found.append(ops.linear(ops.quantize_activations(x.detach(), "Q4_K"), *one))
        assert {tensor.device for tensor in found} == {device}
        results.append([tensor.detach().cpu() for tensor in found])
    assert [torch.equal(*pair) for pair in zip(*results, strict=True)] == [True] * len(results[0])


def test_an_op_is_timed_by_its_own_gpu():
    def work():
        with torch.cuda.device(SECOND):
            # some milliseconds at 2 GHz
            torch.cuda._sleep(10_000_000)

    metrics = DispatchMetrics()
    observe(metrics, "linear", SECOND, work)
    assert metrics.summary("linear", "cuda").total > 1000


def test_tensors_on_two_gpus_are_refused():
    x, weight, up, bias, gain = operands(FIRST)
    other = {name: part.to(SECOND) for name, part in (("w", weight), ("up", up), ("b", bias), ("g", gain))}
    ids, stack = torch.zeros(3, 1, dtype=torch.int64, device=FIRST), torch.stack([weight, up]).to(SECOND)
    norm = {"normalization": "rmsnorm", "eps": 1e-5}
    for call in (
        lambda: ops.linear(x, other["w"], "Q4_K", COLUMNS),
        lambda: ops.linear(x, weight, "Q4_K", COLUMNS, other["b"]),
        lambda: ops.linears(x, [weight, other["up"]], ["Q4_K"] * 2, COLUMNS),
        lambda: ops.gated_linear(x, weight, other["up"], "Q4_K", COLUMNS, activation="silu"),
        lambda: ops.norm_linear(x, other["g"], None, weight, "Q4_K", COLUMNS, **norm),
        lambda: ops.expert_linear(x[:, None], ids, stack, "Q4_K", COLUMNS),
        lambda: ops.embedding(ids, other["w"], "Q4_K", COLUMNS),
        lambda: ops.quantize(x, "Q6_K", importance=other["g"]),
        lambda: ops.linear(ops.quantize_activations(x, "Q4_K"), other["w"], "Q4_K", COLUMNS),
    ):
        with pytest.raises(rt.FormatError, match=f"{FIRST}.*{SECOND}|{SECOND}.*{FIRST}"):
            call()


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def path(request, tmp_path_factory):
    return write_random_model(tmp_path_factory.mktemp("two") / "m.gguf", request.param, fmt="Q8_0")


def load(path, device, activations="float"):
    return rt.load(path, device=device, dtype="float32", activations=activations)[0]


def prompt(length, batch=1):
    return torch.randint(3, 250, (batch, length), generator=torch.Generator().manual_seed(length))


def generate(model, ids, count=40, **options):
    generator = torch.Generator(model.device).manual_seed(7) if options else None
    out = model.generate(
        ids, max_new_tokens=count, eos_token_id=[], pad_token_id=0, generator=generator, **options
    )
    assert out.device == model.device
    return out.cpu()


def graph_stats(model):
    """Of the steps and the prompts of the model's one idle state."""
    (state,) = model.gpu_states._idle
    return [decoder.stats for decoder in (*state._decoders.values(), state.prompt)]


@pytest.mark.parametrize("activations", ["float", "int8"])
@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_tokens_are_those_of_the_first_gpu(path, activations, options):
    """Prompts of one bucket twice, so that the second is replayed, and steps of two batch sizes."""
    models = [load(path, device, activations) for device in (FIRST, SECOND)]
    for ids in (prompt(5), prompt(6), prompt(33, 3), prompt(5)):
        expected, found = (generate(model, ids, **options) for model in models)
        assert torch.equal(found, expected)
    for stats in graph_stats(models[1]):
        assert stats.captures and stats.graph_replays and stats.fallback is None


def test_two_generations_take_turns_on_the_two_gpus(path):
    models = [load(path, device) for device in (FIRST, SECOND)]
    prompts = [prompt(5), prompt(17)]
    expected = [generate(models[0], ids, 30)[0, ids.shape[1] :].tolist() for ids in prompts]
    running = [
        iter(Decoding(model, make_request(model, ids, max_new_tokens=30, eos_token_id=[])))
        for model, ids in zip(models, prompts, strict=True)
    ]
    found = [[], []]
    for _ in range(30):
        for tokens, steps in zip(found, running, strict=True):
            tokens += next(steps)
    assert found == expected


def test_batches_are_those_of_the_first_gpu(path):
    results = []
    for device in (FIRST, SECOND):
        batch = rt.BatchedGenerator(load(path, device), max_batch=2)
        for length in (5, 21, 9):
            batch.add(prompt(length)[0], max_new_tokens=20, eos_token_id=[])
        results.append({completion.id: completion.token_ids for completion in batch})
    assert results[0] == results[1] and len(results[0]) == 3


def test_the_compiled_step_is_that_of_the_first_gpu(path):
    from realizar_torch.generation.step import decode_step, new_state, prefill

    results = []
    for device, step in ((FIRST, decode_step), (SECOND, torch.compile(decode_step))):
        model = load(path, device)
        with torch.inference_mode():
            state = new_state(model, 1, 64)
            token, ids = prefill(model, prompt(6).to(device), None, state).argmax(-1), []
            for _ in range(20):
                token = step(model, token, state).argmax(-1)
                ids.append(int(token))
            state.close()
        results.append(ids)
    assert results[0] == results[1]


def test_a_model_moves_between_devices_and_keeps_its_bytes(path):
    model = load(path, FIRST)
    bytes_of_file, expected = digest(model), generate(model, prompt(9))
    assert bytes_of_file
    with torch.inference_mode():
        logits = model(prompt(9).to(FIRST)).logits.cpu()
    for device in (SECOND, FIRST, SECOND):
        model.to(device)
        assert torch.equal(generate(model, prompt(9)), expected)
        # a new state: no graph of the other device is replayed
        assert next(stats.captures for stats in graph_stats(model)) == 1
        assert digest(model) == bytes_of_file
    rt.unpack(model)
    model.cpu()
    assert digest(model) == bytes_of_file
    with torch.inference_mode():
        # sums of up to 288 terms in other orders, logits of size 10, as in test_batch_graph.py
        assert (model(prompt(9)).logits - logits).abs().max() <= 2e-4


@pytest.mark.parametrize("activations", ["float", "int8"])
def test_layers_of_a_transformers_model_on_two_gpus(tiny_path, activations):
    places = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.layers.0": 0, "model.layers.1": 1}
    places |= {"model.norm": 1, "lm_head": 1}
    results = []
    for device_map in ({"": 0}, places):
        model, tokenizer = rt.hf.from_gguf(tiny_path, device_map=device_map, activations=activations)
        ids = tokenizer(TEXT, return_tensors="pt").to(FIRST)
        results.append(model.generate(**ids, **GREEDY))
        rt.prepack(model)
        results.append(model.generate(**ids, **GREEDY))
    assert model.model.layers[1].mlp.up_proj.stored.device == SECOND
    assert all(torch.equal(result, results[0]) for result in results)
