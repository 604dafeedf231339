"""A batch on a DecodeGraph that runs ahead: with a table in place of the GPU's step, and with its kernels."""

from types import SimpleNamespace

import pytest
import random_models
import torch
from scripted_model import EOS, VOCAB, MarkovModel
from test_decode_ahead import TableStep, put_table_in_place_of_the_step

import realizar_torch as rt
from realizar_torch.generation import batch as batch_module
from realizar_torch.generation import batch_rows, graph
from realizar_torch.nn.kv_cache import KVCache


class RowStep(TableStep):
    """Logits by the last token and its position: a row that is a step off goes wrong at once."""

    def launch(self):
        self.logits.copy_(self.model.table[(7 * self.tokens + self.positions) % VOCAB])
        self.logits[self.tokens < 0] = torch.nan
        self.positions.add_(self.moving)


def chain(model, prompt, count, stop=EOS):
    """Greedy ids behind the prompt; the stop id ends them."""
    ids = list(prompt)
    while len(ids) < len(prompt) + count and (len(ids) == len(prompt) or ids[-1] != stop):
        ids.append(int(model.table[(7 * ids[-1] + len(ids) - 1) % VOCAB].argmax()))
    return tuple(ids[len(prompt) :])


@pytest.fixture
def model(monkeypatch):
    """``filled``: (row, ids, slot) of every placement; ``decoder``: the latest graph."""
    put_table_in_place_of_the_step(monkeypatch)
    monkeypatch.setattr(graph, "GpuStep", RowStep)
    model = MarkovModel()
    model.filled = []
    model.table[:, EOS] += 20.5

    def new_state(model, batch_size, max_positions, pooled):
        assert not pooled
        cache = KVCache(SimpleNamespace(num_layers=1, num_kv_heads=1, head_dim=1), batch_size, max_positions)
        model.decoder = graph.DecodeGraph(model, batch_size, cache=cache, workspace=object())
        return SimpleNamespace(cache=cache, decoder=model.decoder, prepare=lambda model: None)

    def fill_row(model, state, row, ids, slot, cuda_graph):
        model.filled.append((row, list(ids), slot))

    monkeypatch.setattr(batch_module, "new_state", new_state)
    monkeypatch.setattr(batch_rows, "fill_row", fill_row)
    return model


def prompts(count):
    generator = torch.Generator().manual_seed(9)
    for length in torch.randint(1, 20, (count,), generator=generator).tolist():
        yield torch.randint(3, VOCAB, (length,), generator=generator).tolist()


def test_rows_of_any_length_follow_the_table(model):
    batch = rt.BatchedGenerator(model, max_batch=3, cuda_graph=False)
    asked = {
        batch.add(prompt, max_new_tokens=1 + i % 9): (prompt, 1 + i % 9)
        for i, prompt in enumerate(prompts(40))
    }
    found = {done.id: done.token_ids for done in batch}
    assert found == {number: chain(model, *request) for number, request in asked.items()}
    assert any(tokens[-1] == EOS for tokens in found.values())
    # every prompt but its last token, once, from the first slot of its row on
    assert sorted(ids for _, ids, _ in model.filled) == sorted(prompt[:-1] for prompt, _ in asked.values())
    assert {slot for _, _, slot in model.filled} == {0} and {row for row, _, _ in model.filled} == {0, 1, 2}


def test_a_step_is_issued_before_the_one_before_is_read(model):
    batch = rt.BatchedGenerator(model, max_batch=2, cuda_graph=False)
    batch.add([5, 6], max_new_tokens=6, eos_token_id=[])
    for issued in range(1, 7):
        assert batch.step()
        assert model.decoder.stats.eager_steps == issued and model.decoder._read == issued - 1
    assert not batch.step()
    # one step is wasted at the end
    assert model.decoder.stats.eager_steps == 7
    (done,) = batch.collect()
    assert done.token_ids == chain(model, [5, 6], 6, stop=None)


def test_a_row_without_logits_is_an_error_of_its_own(model):
    batch = rt.BatchedGenerator(model, max_batch=2, cuda_graph=False)
    model.table[(7 * 9 + 0) % VOCAB] = torch.nan
    bad, good = batch.add([9], max_new_tokens=5), batch.add([5, 9], max_new_tokens=8, eos_token_id=[])
    done = {one.id: one for one in batch}
    assert done[bad].reason == "error" and done[bad].token_ids == ()
    assert len(done[good].token_ids) == 8


def test_idle_rows_stand_still_and_placed_ones_move(model):
    batch = rt.BatchedGenerator(model, max_batch=3, cuda_graph=False)
    batch.add([5] * 9, max_new_tokens=9, eos_token_id=[])
    for _ in range(4):
        batch.step()
    assert model.decoder.step.positions.tolist() == [12, 0, 0]
    assert model.decoder.step.moving.tolist() == [1, 0, 0]
    list(batch)
    assert model.decoder.step.moving.tolist() == [0, 0, 0]


def test_an_interrupt_between_issue_and_read_repeats_the_step(model, monkeypatch):
    """Every third read is broken off, and sampled rows draw the same numbers again."""
    reads, read = 0, graph.DecodeGraph.read

    def broken(self):
        nonlocal reads
        reads += 1
        if reads % 3 == 0:
            raise KeyboardInterrupt
        return read(self)

    def tokens(interrupts):
        monkeypatch.setattr(graph.DecodeGraph, "read", broken if interrupts else read)
        batch = rt.BatchedGenerator(model, max_batch=2, cuda_graph=False)
        for i, prompt in enumerate(prompts(9)):
            options = {"do_sample": True, "temperature": 2.0, "repetition_penalty": 1.3} if i % 2 else {}
            generator = torch.Generator().manual_seed(i)
            batch.add(prompt, max_new_tokens=12, eos_token_id=[], generator=generator, **options)
        while batch.pending:
            try:
                batch.step()
            except KeyboardInterrupt:
                continue
        return {done.id: done.token_ids for done in batch.collect()}

    assert tokens(True) == tokens(False)
    assert reads > 20


@pytest.mark.gpu
def test_the_kernels_of_the_gpu_step_take_rows_of_other_lengths(tmp_path):
    """One step of a row behind six tokens and of one behind none, against the modules."""
    from realizar_torch.generation.gpu_step import GpuStep

    random_models.write_random_model(tmp_path / "m.gguf", "llama", fmt="Q8_0", tied=False)
    device = torch.device("cuda")
    model, _ = rt.load(tmp_path / "m.gguf", device=device, dtype="float32", activations="float")
    texts = [[5, 9, 77, 3, 8, 100, 41], [8]]
    with torch.inference_mode():
        cache = KVCache(model.config, 2, 32, device=device)
        batch_rows.fill_row(model, SimpleNamespace(cache=cache, prompt=None), 0, texts[0][:-1], 0)
        step = GpuStep(model, cache, rt.Workspace.for_model(model.config, 2, device=device))
        step.tokens.copy_(torch.tensor([text[-1] for text in texts]))
        step.positions.copy_(torch.tensor([len(text) - 1 for text in texts]))
        step.moving[1] = 0
        step.launch()
        for row, text in enumerate(texts):
            expected = model(torch.tensor([text], device=device)).logits[0, -1]
            # fp32 on both sides, logits of size 10 from sums of up to 288 terms in other orders
            assert (step.logits[row] - expected).abs().max() <= 2e-4
    assert step.positions.tolist() == [7, 0]
