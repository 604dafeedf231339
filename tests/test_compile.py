"""torch.compile with its own compiler: one graph, equal to eager, at most two graphs over batch sizes."""

import re
import shutil
from collections.abc import Callable, Iterator

import pytest
import torch
from cases import PACKED, random_activations, random_blocks
from tiny_models import TINY, write_tiny_llama
from torch import Tensor, nn
from torch._dynamo.utils import counters

import realizar_torch as rt
from realizar_torch.nn.mlp import GatedMLP
from realizar_torch.nn.norm import RMSNorm

COLUMNS = 300
# relative to the largest output: float sums in another order; int8 values between two steps may round away
CLOSE = {"float": 1e-5, "int8": 1e-2}
GPU = [
    pytest.param("cuda", {"mode": "default"}, id="cuda", marks=pytest.mark.gpu),
    pytest.param("cuda", {"mode": "reduce-overhead"}, id="cuda-graphs", marks=pytest.mark.gpu),
]
# what is a graph is settled before a backend compiles it, and C++ takes seconds a graph
TRACED = [pytest.param("cpu", {"backend": "aot_eager"}, id="cpu"), *GPU]
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
COMPILED = [
    pytest.param("cpu", {"mode": "default", "dynamic": True}, id="cpu", marks=needs_compiler),
    *GPU,
]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def _graphs() -> int:
    return counters["stats"]["unique_graphs"]


def _assert_close(y: Tensor, expected: Tensor, activations: str) -> None:
    assert (y - expected).abs().max() <= CLOSE[activations] * expected.abs().max()


class Pipeline(nn.Module):
    """Every packed module: table, a norm that feeds two weights, gated MLP, tied head."""

    def __init__(self, fmt: str, activations: str):
        super().__init__()

        def linear(rows: int, columns: int, seed: int) -> rt.QuantizedLinear:
            blocks, bias = random_blocks(fmt, rows, columns, seed), torch.randn(rows)
            return rt.QuantizedLinear.from_blocks(blocks, columns, fmt, bias, activations=activations)

        self.table = rt.QuantizedEmbedding.from_blocks(random_blocks(fmt, 20, COLUMNS), COLUMNS, fmt)
        parts = [linear(COLUMNS, COLUMNS, seed) for seed in (1, 2)]
        self.fused = rt.FusedLayerNormLinear.fuse(nn.LayerNorm(COLUMNS), *parts)
        sides = [linear(64, COLUMNS, seed) for seed in (3, 4)]
        self.mlp = GatedMLP(*sides, linear(COLUMNS, 64, 5), activation="silu")
        self.norm = RMSNorm(COLUMNS)
        self.head = rt.QuantizedLinear(COLUMNS, 20, bias=False, fmt=fmt, activations=activations)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        a, b = self.fused(self.table(ids))
        x = torch.tanh(a) + torch.sigmoid(b)
        return self.head(self.norm(x + torch.tanh(self.mlp(self.norm(x)))))


@pytest.mark.parametrize(("device", "options"), TRACED)
@pytest.mark.parametrize(("fmt", "activations"), [("Q4_K", "float"), ("Q5_0", "int8")])
def test_two_graphs_are_enough_for_every_batch(
    fmt: str, activations: str, device: str, options: dict
) -> None:
    module = Pipeline(fmt, activations).to(device)
    compiled = torch.compile(module, fullgraph=True, **options)
    with torch.no_grad():
        for batch in range(1, 34):
            ids = torch.arange(batch, device=device) % 20
            _assert_close(compiled(ids), module(ids), activations)
    assert _graphs() <= 2


@needs_compiler
def test_two_graphs_of_machine_code_are_enough_for_every_batch() -> None:
    """Not of int8 activations: a tanh one last place off moves a value to the next quant."""
    test_two_graphs_are_enough_for_every_batch("Q4_K", "float", "cpu", {"mode": "default"})


@torch.no_grad()
def test_a_compiled_call_looks_nothing_of_packed_modules_up_in_classes() -> None:
    """Guards on properties and class attributes copy the dict of the class, in every call and module."""
    module = Pipeline("Q4_K", "int8")
    torch.compile(module, backend="eager", fullgraph=True)(torch.arange(3))
    (entry,) = torch._dynamo.eval_frame._debug_get_cache_entry_list(Pipeline.forward.__code__)
    guards = str(entry.guard_manager)
    assert "_modules['head']._parameters['weight']" in guards
    assert set(re.findall(r"type\(L\['self'\]\._modules\['(\w+)'\]", guards)) <= {"norm"}


@pytest.mark.parametrize(("device", "options"), COMPILED)
@pytest.mark.parametrize(
    ("fmt", "activations"), [*((fmt, "float") for fmt in PACKED), ("Q5_0", "int8"), ("Q4_K", "int8")]
)
def test_every_format_compiles(fmt: str, activations: str, device: str, options: dict) -> None:
    blocks, bias = random_blocks(fmt, COLUMNS, COLUMNS), torch.randn(COLUMNS)
    linear = rt.QuantizedLinear.from_blocks(blocks, COLUMNS, fmt, bias, activations=activations).to(device)
    module = nn.Sequential(linear, nn.ReLU(), linear)
    rt.prepack(module)
    x = random_activations(2, COLUMNS).to(device)
    with torch.no_grad():
        # nothing is fused into an op of ours, and a maximum is exact
        assert torch.equal(torch.compile(module, fullgraph=True, **options)(x), module(x))


@pytest.mark.parametrize(("device", "options"), COMPILED)
def test_compiled_training_gives_the_gradients_of_eager(device: str, options: dict) -> None:
    module = Pipeline("Q4_K", "float").to(device)
    trained = [p for p in module.parameters() if p.is_floating_point()]
    gradients = []
    for run in (module, torch.compile(module, fullgraph=True, **options)):
        loss = run(torch.arange(5, device=device)).square().mean()
        gradients.append([g.clone() for g in torch.autograd.grad(loss, trained)])
    for ours, eager in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-3, atol=1e-4 * eager.abs().max().item())


@pytest.fixture(params=["float", "int8"])
def load(request: pytest.FixtureRequest, tmp_path) -> Callable[[str], rt.Transformer]:
    path = write_tiny_llama(tmp_path / "tiny.gguf", sizes=TINY._replace(layers=1))
    return lambda device: rt.load(path, device=device, dtype=torch.float32, activations=request.param)[0]


@pytest.mark.parametrize(("device", "options"), TRACED)
def test_the_transformer_is_one_graph_for_prompts_and_one_for_steps(load, device: str, options: dict) -> None:
    model = load(device)
    activations = model.layers[0].mlp.gate_proj.activations
    compiled = torch.compile(model, fullgraph=True, **options)
    with torch.no_grad():
        for batch in (1, 2, 3, 5, 33):
            ids = torch.randint(0, 20, (batch, 7), device=device)
            _assert_close(compiled(ids).logits, model(ids).logits, activations)
        assert _graphs() <= 2

        caches = [rt.KVCache(model.config, 2, 64, device=device) for _ in range(2)]
        for step in range(6):
            ids = torch.randint(0, 20, (2, 1 if step else 5), device=device)
            run = compiled if step else model
            logits = run(ids, cache=caches[0]).logits
            _assert_close(logits, model(ids, cache=caches[1]).logits, activations)
        assert caches[0].length == caches[1].length == 10
    # a step at one length, then one for every length
    assert _graphs() <= 4
