"""A model's GPU state through requests and changes of every kind: always what a new state gives."""

from types import SimpleNamespace

import pytest
import random_models
import torch
from module_linears import ModuleLinears

from realizar_torch.checkpoint.gguf import open_gguf
from realizar_torch.generation import gpu_product, gpu_state, gpu_step, graph, loop, prompt_graph
from realizar_torch.generation.causal_lm import CausalLM
from realizar_torch.generation.fusable import obstacle
from realizar_torch.generation.workspace import Workspace
from realizar_torch.models.loading import load_transformer
from realizar_torch.nn.norm import RMSNorm

pytest.importorskip("triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.1}


def write_to(weights: torch.nn.Module) -> None:
    """Other weights at another address."""
    weights.weight = torch.nn.Parameter(weights.weight.roll(1, 0).contiguous(), requires_grad=False)


CHANGES = {
    "none": lambda model: None,
    "longer": lambda model: setattr(model, "max_seq_len", 128),
    "shorter": lambda model: setattr(model, "max_seq_len", 64),
    "int8 cache": lambda model: setattr(model, "kv_dtype", torch.int8),
    "float cache": lambda model: setattr(model, "kv_dtype", None),
    "float16": lambda model: model.to(torch.float16),
    "bfloat16": lambda model: model.to(torch.bfloat16),
    "weight": lambda model: write_to(model.layers[0].mlp.down_proj),
    "frequencies": lambda model: model.rope.inv_freq.mul_(0.5),
    "cleared": lambda model: model.gpu_states.clear(),
}


def load(folder):
    path = random_models.write_random_model(folder / "m.gguf", "llama", fmt="Q8_0")
    model = load_transformer(
        open_gguf(path),
        device=DEVICE,
        dtype=torch.float16,
        activations="float",
        model_class=CausalLM,
    )
    model.max_seq_len = 64
    return model


def generate(model, length, batch, count, sampled, cuda_graph):
    """The ids, and the logits of the last step: a small model may say one token again and again."""
    ids = torch.randint(3, 250, (batch, length), generator=torch.Generator().manual_seed(length))
    options = SAMPLED | {"generator": torch.Generator(DEVICE).manual_seed(3)} if sampled else {}
    options |= {"eos_token_id": [], "pad_token_id": 0, "cuda_graph": cuda_graph}
    found = model.generate(ids.to(DEVICE), max_new_tokens=count, **options)
    return found, model.gpu_states._idle[-1].workspace.logits[:batch].clone()


def assert_as_from_a_new_state(model, *request, cuda_graph):
    found, asked = generate(model, *request, cuda_graph), model.max_seq_len
    idle, model.gpu_states._idle = model.gpu_states._idle, []
    # as long as the other, which may have grown: attention is split by the length of a cache
    model.max_seq_len = idle[-1].cache.max_seq_len
    expected = generate(model, *request, False)
    model.gpu_states._idle, model.max_seq_len = idle, asked
    assert all(map(torch.equal, found, expected)), request


class FakeGraph:
    """Launches the step as it is, but only while all that it reads and writes is where it was."""

    def __init__(self, decoder):
        self.decoder, self.captured = decoder, addresses(decoder)

    def replay(self):
        assert addresses(self.decoder) == self.captured
        self.decoder._work()


def addresses(decoder):
    step, cache = decoder.step, decoder.cache
    modules = torch.nn.ModuleList([*step._layers, step._table, step._final_norm, step._head])
    owned = [part for part in (*vars(step).values(), *step._angles) if isinstance(part, torch.Tensor)]
    tensors = [*owned, cache.keys, cache.values, cache.starts, *modules.parameters(), *modules.buffers()]
    return [tensor.data_ptr() for tensor in tensors]


@pytest.fixture
def interpreted(monkeypatch):
    """States of a GPU on this CPU: its kernels in the interpreter, products by the modules."""
    sizes = {"LAYERS": 1, "HIDDEN": 32, "INNER": 32, "HEADS": 2, "KV_HEADS": 1, "HEAD_DIM": 16}
    for name, size in sizes.items():
        monkeypatch.setattr(random_models, name, size)
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(graph.DecodeGraph, "_capture", lambda self: FakeGraph(self))
    for module in (graph, gpu_state):
        monkeypatch.setattr(module, "why_not", lambda *_: None)
    monkeypatch.setattr(gpu_step, "GpuLinears", ModuleLinears)
    monkeypatch.setattr(gpu_product, "MATVEC_ROWS", 10**6)
    monkeypatch.setattr(prompt_graph, "ROWS", (4,))
    monkeypatch.setattr(loop, "new_state", lambda model, *sizes: model.gpu_states.take(model, *sizes))


@pytest.mark.filterwarnings("error")
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled")
def test_each_change_is_noticed(interpreted, tmp_path):
    model = load(tmp_path)
    for change, batch in [("none", 1), ("none", 2), *((name, 1) for name in CHANGES)]:
        CHANGES[change](model)
        assert_as_from_a_new_state(model, 2, batch, 2, False, cuda_graph="auto")


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled")
def test_what_is_made_in_inference_mode_serves_outside_of_it(interpreted, tmp_path):
    model = load(tmp_path)
    with torch.inference_mode():
        workspace = Workspace.for_model(model.config, 1)
        decoders = [graph.DecodeGraph(model, 1, max_seq_len=8, workspace=w) for w in (workspace, None)]
    expected = torch.tensor([[3, 5, 7]])
    for decoder in decoders:
        with torch.no_grad():
            logits = model(expected, cache=decoder.cache).logits[:, -1]
            decoder.begin(logits, cuda_graph=False)
            decoder.issue()
            found = [decoder.read(), decoder.read()]
        decoder.finish()
        assert found == model.generate(expected, max_new_tokens=2, eos_token_id=[])[0, 3:, None].tolist()


@pytest.mark.filterwarnings("error")
@pytest.mark.gpu
def test_two_hundred_random_requests(tmp_path):
    """Lengths, batches, sampling and changes in any order, by graphs that are never stale."""
    model, choose = load(tmp_path), torch.Generator().manual_seed(11)

    def pick(*options):
        return options[int(torch.randint(len(options), (1,), generator=choose))]

    for _ in range(200):
        CHANGES[pick("none", pick(*CHANGES))](model)
        request = pick(1, 4, 21, 50), pick(1, 2, 5), pick(2, 3, 9), pick(True, False)
        assert_as_from_a_new_state(model, *request, cuda_graph=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled")
def test_a_patched_class_is_called_between_requests_that_are_fused(interpreted, tmp_path, monkeypatch):
    for module in (graph, gpu_state):
        monkeypatch.setattr(module, "why_not", lambda model, _: obstacle(model))
    model, calls, own = load(tmp_path), [], RMSNorm.forward

    def counted(self, x):
        calls.append(self)
        return own(self, x)

    def ask():
        return model.generate(torch.tensor([[3, 5, 7]]), max_new_tokens=2, eos_token_id=[])

    expected = ask()
    with monkeypatch.context() as patch:
        patch.setattr(RMSNorm, "forward", counted)
        with pytest.warns(UserWarning, match=r"slower: RMSNorm\.forward was replaced"):
            ask()
        assert model.gpu_states._idle[-1].decoder is None
    assert model.layers[0].mlp_norm in calls
    count = len(calls)
    assert torch.equal(ask(), expected) and len(calls) == count
    assert model.gpu_states._idle[-1].decoder is not None
