"""Decode graphs against the same launches one by one: positions, capacity, aliasing, failures, leaks."""

import gc
import threading
import warnings

import pytest
import torch
from random_models import write_random_model

from realizar_torch.checkpoint.gguf import open_gguf
from realizar_torch.errors import CacheFullError
from realizar_torch.generation.causal_lm import CausalLM
from realizar_torch.generation.sampling import SamplingParams
from realizar_torch.models.loading import load_transformer

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.1}


def load(tmp_path, arch="llama", activations="float", dtype=torch.float32):
    path = tmp_path / f"{arch}.gguf"
    if not path.exists():
        write_random_model(path, arch, fmt="Q8_0")
    model = load_transformer(
        open_gguf(path), device=DEVICE, dtype=dtype, activations=activations, model_class=CausalLM
    )
    return model


def prompt(length, batch=1, seed=3):
    return torch.randint(3, 250, (batch, length), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def generate(model, ids, count=40, **options):
    return model.generate(ids, max_new_tokens=count, eos_token_id=[], pad_token_id=0, **options)


def stats_of(model):
    """Of the graphs of the model's one idle state."""
    (state,) = model.gpu_states._idle
    return {size: decoder.stats for size, decoder in state._decoders.items()}


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
@pytest.mark.parametrize("activations", ["float", "int8"])
@pytest.mark.parametrize("options", [{}, SAMPLED])
def test_graph_equals_eager_at_every_step(tmp_path, arch, activations, options):
    """F-50: a second prompt of another length replays the same graph."""
    model = load(tmp_path, arch, activations)
    for length in (5, 33):
        runs = []
        for cuda_graph in (False, True):
            generator = torch.Generator(DEVICE).manual_seed(7) if options else None
            runs.append(
                generate(model, prompt(length), 80, generator=generator, cuda_graph=cuda_graph, **options)
            )
        assert torch.equal(*runs)
    (stats,) = stats_of(model).values()
    assert (stats.captures, stats.graph_replays, stats.eager_steps) == (1, 158, 158)
    assert stats.fallback is None


def test_float_ids_equal_the_modules_where_the_margin_allows(tmp_path):
    model = load(tmp_path)
    ids = generate(model, prompt(9), 60)
    with torch.inference_mode():
        logits = model(ids[:, :-1]).logits[0, 8:]
    top = logits.topk(2).values
    agree = logits.argmax(-1) == ids[0, 9:]
    assert bool((agree | (top[:, 0] - top[:, 1] < 4e-4)).all()) and agree.float().mean() > 0.9


def test_batch_sizes_keep_their_graphs_and_capacity_changes_drop_them(tmp_path):
    """F-51: batch 1, 4, 1 with junk allocated and the allocator's cache emptied in between."""
    model = load(tmp_path)
    expected = {size: generate(model, prompt(6, size), cuda_graph=False) for size in (1, 4)}
    model.gpu_states.clear()
    for size in (4, 1, 4, 1):
        assert torch.equal(generate(model, prompt(6, size)), expected[size])
        torch.cuda.empty_cache()
        torch.full((1000, 1000), torch.nan, device=DEVICE)
    assert {size: stats.captures for size, stats in stats_of(model).items()} == {4: 1, 1: 1}
    # eight rows do not fit: everything moves
    generate(model, prompt(6, 8))
    assert set(stats_of(model)) == {8}
    assert torch.equal(generate(model, prompt(6, 1)), expected[1])


def test_changed_weights_dtypes_and_layouts_are_noticed(tmp_path):
    model = load(tmp_path)
    first = generate(model, prompt(6))
    layer = model.layers[0].mlp.down_proj
    layer.weight = torch.nn.Parameter(layer.weight.roll(1, 0).contiguous(), requires_grad=False)
    changed = generate(model, prompt(6))
    assert torch.equal(changed, generate(model, prompt(6), cuda_graph=False))
    assert not torch.equal(first, changed)
    model.to(torch.bfloat16)
    assert torch.equal(generate(model, prompt(6)), generate(model, prompt(6), cuda_graph=False))


def test_two_generations_at_once_have_a_state_each(tmp_path):
    from realizar_torch.generation.loop import Decoding
    from realizar_torch.generation.request import make_request

    model = load(tmp_path)
    prompts = [prompt(5, seed=1), prompt(17, seed=2)]
    expected = [generate(model, ids, 20)[0, ids.shape[1] :].tolist() for ids in prompts]
    running = [
        iter(Decoding(model, make_request(model, ids, max_new_tokens=20, eos_token_id=[]))) for ids in prompts
    ]
    found = [[], []]
    for _ in range(20):
        for index in range(2):
            found[index] += next(running[index])
    assert found == expected


def test_returned_ids_and_logits_do_not_alias_static_buffers(tmp_path):
    """F-52."""
    model = load(tmp_path)
    first = generate(model, prompt(6))
    kept = first.clone()
    with torch.inference_mode():
        logits = model(prompt(6)).logits
    kept_logits = logits.clone()
    generate(model, prompt(7, seed=9))
    assert torch.equal(first, kept) and torch.equal(logits, kept_logits)


def test_frequencies_written_to_are_those_of_the_next_generation(tmp_path):
    """Of all of it: prompts compute their angles, and a step has a table of them."""
    model, ids = load(tmp_path), prompt(9)
    before = generate(model, ids)
    model.rope.inv_freq.mul_(0.25)
    found = generate(model, ids)
    model.gpu_states.clear()
    assert torch.equal(found, generate(model, ids)) and not torch.equal(found, before)


def test_a_failed_capture_falls_back_with_one_warning(tmp_path, monkeypatch):
    """F-53: and the allocator and the stream stay usable."""
    from realizar_torch.generation import graph

    model = load(tmp_path)
    expected = generate(model, prompt(6), cuda_graph=False)
    model.gpu_states.clear()
    work = graph.DecodeGraph._work

    def broken(self):
        work(self)
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("injected inside the capture")

    monkeypatch.setattr(graph.DecodeGraph, "_work", broken)
    with pytest.warns(UserWarning, match="injected inside the capture") as caught:
        assert torch.equal(generate(model, prompt(6)), expected)
        assert torch.equal(generate(model, prompt(6)), expected)
    assert len(caught) == 1
    assert "injected" in stats_of(model)[1].fallback
    assert float(torch.ones(10, device=DEVICE).sum()) == 10


def test_garbage_does_not_end_a_capture(tmp_path, monkeypatch):
    """A graph among cyclic garbage, which is there by the time of the capture."""
    from realizar_torch.generation.gpu_step import GpuStep

    launch, graphs, threshold = GpuStep.launch, [], gc.get_threshold()
    for _ in range(20):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            torch.zeros(1, device=DEVICE)

    def littering(step):
        if graphs and torch.cuda.is_current_stream_capturing():
            ring = [graphs.pop()]
            ring.append(ring)
            del ring
            # enough for many collections
            assert len([[] for _ in range(10_000)]) == 10_000
        return launch(step)

    monkeypatch.setattr(GpuStep, "launch", littering)
    gc.set_threshold(10)
    try:
        model = load(tmp_path)
        ids = generate(model, prompt(6), cuda_graph=True)
    finally:
        gc.set_threshold(*threshold)
    assert len(graphs) == 19 and stats_of(model)[1].fallback is None
    assert torch.equal(ids, generate(model, prompt(6), cuda_graph=False))


def test_other_threads_may_allocate_during_a_capture(tmp_path):
    """F-53."""
    model, stop = load(tmp_path), threading.Event()

    def allocate():
        while not stop.is_set():
            torch.randn(1000, 100, device=DEVICE)

    worker = threading.Thread(target=allocate)
    worker.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ids = generate(model, prompt(6))
    finally:
        stop.set()
        worker.join()
    assert torch.equal(ids, generate(model, prompt(6), cuda_graph=False))


def test_memory_plateaus_and_a_deleted_model_frees_its_memory(tmp_path):
    """F-54."""
    gc.collect()
    torch.cuda.empty_cache()
    before, reserved = torch.cuda.memory_allocated(), []
    for _ in range(8):
        model = load(tmp_path)
        generate(model, prompt(6), 5)
        del model
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    assert len(set(reserved[3:])) == 1
    gc.collect()
    assert torch.cuda.memory_allocated() - before <= 1 << 20


@pytest.mark.parametrize(
    ("activations", "batch", "sampled", "cuda_graph"),
    [
        ("float", 1, False, True),
        ("int8", 1, True, True),
        ("int8", 4, False, True),
        ("int8", 4, True, True),
        ("float", 4, True, False),
        ("int8", 1, False, False),
        ("int8", 4, True, False),
    ],
)
def test_a_step_allocates_nothing_and_never_waits(tmp_path, activations, batch, sampled, cuda_graph):
    """Launched one by one too; but a mixture's experts are modules, which allocate where no graph does."""
    from realizar_torch.generation.graph import DecodeGraph

    model = load(tmp_path, activations=activations)
    graph, sampling = DecodeGraph(model, batch), SamplingParams(True, 0.8, 40, 0.9, 0.01, 1.1)
    with torch.inference_mode():
        logits = model(prompt(6, batch), cache=graph.cache, logits_to_keep=1).logits[:, -1]
        graph.begin(logits, sampling if sampled else None, cuda_graph=cuda_graph)
        graph.issue()
        graph.finish()
        count = torch.cuda.memory_stats()["allocation.all.allocated"]
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(10):
                graph.issue()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == count
    assert graph.stats.graph_replays == 11 * cuda_graph and graph.stats.eager_steps == 11 * (not cuda_graph)


def test_a_full_cache_takes_no_step(tmp_path):
    from realizar_torch.generation.graph import DecodeGraph

    graph = DecodeGraph(load(tmp_path), 1)
    graph.cache.advance(graph.cache.max_seq_len)
    with pytest.raises(CacheFullError):
        graph.issue()


def test_torch_compile_runs_the_same_step(tmp_path):
    from realizar_torch.generation.step import decode_step, new_state, prefill

    model = load(tmp_path)

    def greedy(step):
        with torch.inference_mode():
            state = new_state(model, 1, 64)
            token, ids = prefill(model, prompt(6), None, state).argmax(-1), []
            for _ in range(20):
                token = step(model, token, state).argmax(-1)
                ids.append(int(token))
            state.close()
        return ids

    assert greedy(torch.compile(decode_step)) == greedy(decode_step)
