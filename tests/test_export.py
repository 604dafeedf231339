"""torch.export and AOTInductor: a module, the whole transformer, and its decode step, equal to eager."""

import io
import shutil
from pathlib import Path

import pytest
import torch
from cases import PACKED, assert_within, float_tolerance, random_activations, random_blocks
from tiny_models import TINY, write_tiny_llama
from torch import Tensor, nn

import realizar_torch as rt

COLUMNS = 300
BATCH = torch.export.Dim("batch", min=1, max=64)
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs a C++ compiler")


# relative to the largest number: compiled arithmetic rounds otherwise, and int8 values between two steps may
# then round away; a wrong position moves logits by whole units
CLOSE = {"float": 5e-6, "int8": 1e-2}


@pytest.fixture(scope="module", params=CLOSE)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> rt.Transformer:
    path = write_tiny_llama(tmp_path_factory.mktemp("tiny") / "m.gguf", sizes=TINY._replace(layers=1))
    return rt.load(path, device="cpu", activations=request.param)[0]


def _activations(model: rt.Transformer) -> str:
    return model.layers[0].mlp.down_proj.activations


def _assert_close(model: rt.Transformer, y: Tensor, expected: Tensor) -> None:
    limit = CLOSE[_activations(model)]
    assert (y - expected).abs().max() <= limit * expected.abs().max()


def _ops(program: torch.export.ExportedProgram) -> set[str]:
    """The ops of this package that the program calls."""
    called = {str(node.target) for node in program.graph.nodes}
    return {name.split(".")[1] for name in called if name.startswith("realizar_torch.")}


def _layers(fmt: str, activations: str = "float") -> nn.Module:
    first, second = random_blocks(fmt, COLUMNS, COLUMNS), random_blocks(fmt, 7, COLUMNS)
    linear = rt.QuantizedLinear.from_blocks
    first = linear(first, COLUMNS, fmt, torch.randn(COLUMNS), activations=activations)
    second = linear(second, COLUMNS, fmt, activations=activations)
    return nn.Sequential(first, rt.FusedLayerNormLinear.fuse(nn.LayerNorm(COLUMNS), second))


@pytest.mark.parametrize("activations", ["float", "int8"])
@pytest.mark.parametrize("fmt", PACKED)
def test_exported_modules_equal_eager_for_other_batches(fmt: str, activations: str) -> None:
    module = _layers(fmt, activations)
    exported = torch.export.export(module, (torch.randn(2, COLUMNS),), dynamic_shapes=({0: BATCH},))
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for batch in (1, 5):
        x = random_activations(batch, COLUMNS)
        assert torch.equal(loaded(x), module(x))


def test_one_norm_for_weights_of_three_formats_is_exported() -> None:
    linear = rt.QuantizedLinear.from_blocks
    parts = [linear(random_blocks(fmt, 7, COLUMNS), COLUMNS, fmt) for fmt in ("Q4_K", "Q6_K")]
    module = rt.FusedLayerNormLinear.fuse(nn.RMSNorm(COLUMNS, eps=1e-6), *parts, nn.Linear(COLUMNS, 3))
    program = torch.export.export(module, (torch.randn(2, COLUMNS),), dynamic_shapes=({0: BATCH},))
    x = random_activations(5, COLUMNS)
    for y, expected in zip(program.module()(x), module(x), strict=True):
        assert torch.equal(y, expected)


@needs_compiler
def test_a_compiled_package_of_a_module_equals_eager(tmp_path: Path) -> None:
    table = rt.QuantizedEmbedding.from_blocks(random_blocks("Q6_K", 9, COLUMNS), COLUMNS, "Q6_K")
    linear = rt.QuantizedLinear.from_blocks(
        random_blocks("Q4_K", 7, COLUMNS), COLUMNS, "Q4_K", torch.randn(7)
    )
    module = nn.Sequential(table, nn.GELU(), linear)
    ids = torch.tensor([[3], [8]])
    run = _package(torch.export.export(module, (ids,), dynamic_shapes=({0: BATCH},)), tmp_path)
    for ids in (torch.tensor([[1]]), torch.tensor([[0], [8], [5]])):
        hidden = nn.functional.gelu(table(ids))
        # GELU compiled may differ in a few last places
        tolerance = 2 * float_tolerance(hidden, linear.dequantize()) + 1e-6
        assert_within(run(ids), module(ids).double(), tolerance)


def test_the_exported_transformer_equals_eager(model: rt.Transformer) -> None:
    tokens = torch.export.Dim("tokens", min=2, max=TINY.context)
    ids = torch.randint(0, 20, (2, 7))
    program = torch.export.export(model, (ids,), dynamic_shapes=({0: BATCH, 1: tokens},))
    # int8 activations are quantized once for all projections of an input
    joined = {"linears"} if _activations(model) == "int8" else set()
    assert _ops(program) == {"embedding", "linear", "gated_linear"} | joined
    exported = program.module()
    for shape in ((1, 3), (3, 11)):
        ids = torch.randint(0, 20, shape)
        assert torch.equal(exported(ids).logits, model(ids).logits)


class Step(nn.Module):
    """A decode step whose memory are its arguments; ``filled [length, 0]`` tells how far they are filled."""

    def __init__(self, model: rt.Transformer):
        super().__init__()
        self.model = model

    def forward(self, token_ids: Tensor, keys: Tensor, values: Tensor, filled: Tensor) -> Tensor:
        cache = rt.KVCache.over(keys, values, filled.shape[0])
        return self.model(token_ids[:, None], cache=cache).logits[:, -1]


@needs_compiler
def test_exported_and_compiled_steps_decode_as_eager_ones(model: rt.Transformer, tmp_path: Path) -> None:
    with torch.no_grad():
        caches = [rt.KVCache(model.config, 2, 32) for _ in range(3)]
        prompt = torch.randint(0, 20, (2, 5))
        for cache in caches:
            model(prompt, cache=cache)
        dynamic = (None, None, None, {0: torch.export.Dim.DYNAMIC})
        arguments = (torch.tensor([1, 2]), caches[0].keys, caches[0].values, torch.empty(5, 0))
        program = torch.export.export(Step(model), arguments, dynamic_shapes=dynamic)
        steps = (Step(model), program.module(), _package(program, tmp_path))
        for _ in range(4):
            tokens = torch.randint(0, 20, (2,))
            filled = torch.empty(caches[0].length, 0)
            eager, exported, compiled = (
                step(tokens, cache.keys, cache.values, filled)
                for step, cache in zip(steps, caches, strict=True)
            )
            assert torch.equal(exported, eager)
            _assert_close(model, compiled, eager)
            for cache in caches:
                cache.advance(1)
        assert torch.equal(caches[1].keys, caches[0].keys)
        _assert_close(model, caches[2].values, caches[0].values)


def _package(program: torch.export.ExportedProgram, folder: Path):
    """Compiled, written and loaded again."""
    options = {"aot_inductor.compile_wrapper_opt_level": "O0"}
    path = torch._inductor.aoti_compile_and_package(
        program, package_path=str(folder / "m.pt2"), inductor_configs=options
    )
    return torch._inductor.aoti_load_package(path)
