"""Decoding a step ahead of the host, with a table in place of the GPU step: ids, stops, resources."""

from types import SimpleNamespace

import pytest
import torch
from scripted_model import EOS, VOCAB, MarkovModel

from realizar_torch.errors import BackendUnavailableError, FormatError, RealizarError
from realizar_torch.generation import graph, loop
from realizar_torch.generation.sampling import SamplingParams, new_seeds, sample, uniforms
from realizar_torch.nn.kv_cache import KVCache


class TableStep:
    """Logits by the last token, as MarkovModel has them; counts like GpuStep."""

    def __init__(self, model, cache, workspace):
        self.model, self.cache = model, cache
        self.tokens = torch.zeros(cache.batch_size, dtype=torch.int64)
        self.positions = torch.zeros(cache.batch_size, dtype=torch.int32)
        self.moving = torch.ones(cache.batch_size, dtype=torch.int32)
        self.logits = torch.zeros(cache.batch_size, VOCAB)
        self._position = -1

    def refresh(self):
        pass

    def place(self):
        if self._position != self.cache.length:
            self.positions.fill_(self.cache.length)

    def launch(self):
        assert self.positions.tolist() == [self.cache.length] * len(self.tokens)
        self.logits.copy_(self.model.table[self.tokens])
        self.positions.add_(self.moving)

    def advance(self):
        self.cache.advance(1)
        self._position = self.cache.length


def put_table_in_place_of_the_step(monkeypatch):
    """DecodeGraph without a GPU: ``TableStep`` steps, events that nobody waits for."""
    if torch.cuda.is_available():
        pytest.skip("compiled kernels cannot read the table's tensors")
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(graph, "why_not", lambda *_: None)
    monkeypatch.setattr(graph, "GpuStep", TableStep)


@pytest.fixture
def model(monkeypatch):
    """A model whose ``generate`` runs ahead; ``decoder``: the latest one; ``closed``: how many ended."""
    put_table_in_place_of_the_step(monkeypatch)
    model = MarkovModel()
    model.closed = 0

    def new_state(model, batch_size, max_positions):
        shape = SimpleNamespace(num_layers=1, num_kv_heads=1, head_dim=1)
        cache = KVCache(shape, batch_size, max_positions)
        model.decoder = graph.DecodeGraph(model, batch_size, cache=cache, workspace=object())

        def close():
            model.closed += 1

        return SimpleNamespace(cache=cache, decoder=model.decoder, close=close)

    def prefill(model, input_ids, attention_mask, state, *, cuda_graph):
        state.cache.advance(input_ids.shape[1])
        return model.table[input_ids[:, -1]]

    monkeypatch.setattr(loop, "new_state", new_state)
    monkeypatch.setattr(loop, "prefill", prefill)
    return model


def generate(model, ids, count, **options):
    return loop.generate_ids(model, ids, max_new_tokens=count, cuda_graph=False, **options)


def test_greedy_follows_the_table_and_issues_no_step_too_many(model):
    ids = generate(model, torch.tensor([[5], [9]]), 12, eos_token_id=[])
    assert ids[:, 1:].tolist() == [model.chain(5, 12), model.chain(9, 12)]
    assert model.decoder.stats.eager_steps == 11 and model.closed == 1


def test_a_sequence_begins_after_rows_that_were_placed(model):
    generate(model, torch.tensor([[5]]), 4, eos_token_id=[])
    decoder, start = model.decoder, model.decoder.cache.length
    decoder.begin_rows(cuda_graph=False)
    decoder.begin(model.table[[9]], cuda_graph=False)
    decoder.issue()
    assert decoder.read() + decoder.read() == model.chain(9, 2)
    assert decoder.step.positions.tolist() == [start + 1]


def test_a_stop_wastes_one_step(model):
    model.follow([5, 7, 8, EOS])
    ids = generate(model, torch.tensor([[5]]), 12)
    assert ids.tolist() == [[5, 7, 8, EOS]]
    assert model.decoder.stats.eager_steps == 3 and model.closed == 1


def test_sampling_equals_the_loop_that_waits(model):
    params = {"do_sample": True, "temperature": 0.9, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.3}
    prompt = torch.tensor([[4, 5], [6, 9]])
    found = generate(model, prompt, 15, eos_token_id=[], generator=torch.Generator().manual_seed(2), **params)
    params.pop("do_sample")
    seeds, ids = new_seeds(2, torch.Generator().manual_seed(2), prompt.device), prompt
    for step in range(15):
        seen = torch.zeros(2, VOCAB, dtype=torch.bool).scatter_(1, ids, True)
        uniform = uniforms(seeds, torch.full_like(seeds, step))
        token = sample(model.table[ids[:, -1]], SamplingParams(True, **params), seen, uniform)
        ids = torch.cat([ids, token[:, None]], 1)
    assert torch.equal(found, ids)


def test_logits_that_are_not_finite_are_an_error_and_the_state_is_given_back(model):
    model.follow([5, 7])
    model.table[7] = torch.nan
    with pytest.raises(RealizarError, match="step 1"):
        generate(model, torch.tensor([[5]]), 6, do_sample=True, repetition_penalty=1.2, top_k=1)
    assert model.closed == 1


ERRORS = {
    "RuntimeError: an illegal access": RuntimeError("an illegal access\nCompile with TORCH_USE_CUDA_DSA"),
    "RuntimeError": RuntimeError(""),
    "MemoryError": MemoryError(),
    "realizar_torch.errors.FormatError: wrong": FormatError("wrong"),
}


@pytest.fixture
def failing(model, monkeypatch):
    """Captures raise ``failing.error`` after their first run of the step; ``attempts`` counts them."""
    state = SimpleNamespace(error=RuntimeError("boom"), attempts=0)

    def capture(decoder):
        state.attempts += 1
        with decoder._rows_kept():
            decoder._work()
        raise state.error

    monkeypatch.setattr(graph.DecodeGraph, "_capture", capture)
    return state


@pytest.mark.parametrize("reason", ERRORS)
def test_whatever_ends_a_capture_is_told_once_and_steps_go_on(model, failing, reason):
    failing.error = ERRORS[reason]
    with pytest.warns(UserWarning, match=f"step by step: {reason}$") as caught:
        ids = loop.generate_ids(model, torch.tensor([[5]]), max_new_tokens=9, eos_token_id=[])
    assert len(caught) == 1 and failing.attempts == 1
    assert ids[0, 1:].tolist() == model.chain(5, 9)
    assert model.decoder.stats == graph.GraphStats(0, 0, 8, reason)


def test_a_failed_capture_is_an_error_where_a_graph_was_asked_for(model, failing):
    loop.new_state(model, 1, 16)
    for _ in range(2):
        model.decoder.begin(model.table[[5]], cuda_graph=True)
        with pytest.raises(BackendUnavailableError, match="RuntimeError: boom"):
            model.decoder.issue()
    assert failing.attempts == 1


def test_an_interrupt_in_a_capture_is_no_failure_of_it(model, failing):
    failing.error = KeyboardInterrupt()
    loop.new_state(model, 1, 16)
    model.decoder.begin(model.table[[5]])
    with pytest.raises(KeyboardInterrupt):
        model.decoder.issue()
    assert model.decoder.stats.fallback is None


def test_a_generation_begins_without_the_marks_of_the_one_before(model):
    generate(model, torch.tensor([[4]]), 5, eos_token_id=[], repetition_penalty=1.3)
    logits = torch.randn(1, VOCAB)
    model.decoder.begin(logits, SamplingParams(repetition_penalty=1.3), cuda_graph=False)
    assert model.decoder.read() == [int(logits.argmax())]
    assert model.decoder._sampling._seen.sum() == 1
