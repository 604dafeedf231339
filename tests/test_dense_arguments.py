"""Sparse and nested tensors are refused by every op, module and model, in words that name the argument."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import random_blocks
from torch import Tensor

import realizar_torch as rt
from realizar_torch import ops

ROWS, COLUMNS = 4, 256
WEIGHT = random_blocks("Q4_K", ROWS, COLUMNS)
EXPERTS = torch.stack([WEIGHT, WEIGHT])
X = torch.ones(2, COLUMNS)
IDS = torch.ones(2, 3, dtype=torch.int64)
NORM = {"norm_weight": torch.ones(COLUMNS), "norm_bias": torch.zeros(COLUMNS), "bias": torch.ones(ROWS)}
PACKED = {"fmt": "Q4_K", "in_features": COLUMNS}

# torch has two nested kinds, and warns of what is new in one of them and in sparse_csr
pytestmark = pytest.mark.filterwarnings("ignore:.*(beta|prototype):UserWarning")
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "torch.sparse_coo": Tensor.to_sparse,
    "torch.sparse_csr": lambda x: torch.atleast_2d(x).to_sparse_csr(dense_dim=max(x.dim() - 2, 0)),
    "nested": lambda x: torch.nested.nested_tensor([x, x[:1]]),
    "nested ": lambda x: torch.nested.nested_tensor([x, x[:1]], layout=torch.jagged),
}
OPS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "linear": (ops.linear, {"x": X, "weight": WEIGHT, "bias": torch.ones(ROWS), **PACKED}),
    "gated_linear": (
        ops.gated_linear,
        {"x": X, "gate": WEIGHT, "up": WEIGHT, "activation": "silu", **PACKED},
    ),
    "expert_linear": (
        ops.expert_linear,
        {"x": X[:, None], "experts": IDS[:, :2], "weight": EXPERTS, **PACKED},
    ),
    "embedding": (
        ops.embedding,
        {"ids": IDS, "weight": WEIGHT, "fmt": "Q4_K", "embedding_dim": COLUMNS},
    ),
    "dequantize": (ops.dequantize, {"weight": WEIGHT, **PACKED}),
    "quantize_activations": (ops.quantize_activations, {"x": X, "fmt": "Q4_K"}),
    "quantize": (ops.quantize, {"weight": X, "importance": torch.ones(COLUMNS), "fmt": "Q4_K"}),
    "norm_linear": (
        ops.norm_linear,
        {"x": X, "weight": WEIGHT, "normalization": "layernorm", "eps": 1e-5, **NORM, **PACKED},
    ),
}


def _tensors() -> Iterator[tuple[str, str]]:
    for op, (_, arguments) in OPS.items():
        yield from ((op, name) for name, value in arguments.items() if isinstance(value, Tensor))


def refused(name: str, kind: str) -> Any:
    return pytest.raises(rt.FormatError, match=f"^{name} is a {kind.strip()} tensor, expected a dense one")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("op", "name"), [*_tensors()])
def test_ops(op: str, name: str, kind: str) -> None:
    function, arguments = OPS[op]
    function(**arguments)
    with refused(name, kind):
        function(**arguments | {name: KINDS[kind](arguments[name])})


@pytest.mark.parametrize("kind", KINDS)
def test_linears_and_quantized_activations(kind: str) -> None:
    change = KINDS[kind]
    with refused("x", kind):
        ops.linears(change(X), [WEIGHT, WEIGHT], ["Q4_K"] * 2, COLUMNS)
    with refused("weight", kind):
        ops.linears(X, [WEIGHT, change(WEIGHT)], ["Q4_K"] * 2, COLUMNS)
    with refused("bias", kind):
        ops.linears(X, [WEIGHT, WEIGHT], ["Q4_K"] * 2, COLUMNS, [None, change(torch.ones(ROWS))])
    quantized = ops.quantize_activations(X, "Q4_K")
    with refused("scale", kind):
        ops.linear(dataclasses.replace(quantized, scale=change(quantized.scale)), WEIGHT, **PACKED)


MODULES: dict[str, tuple[Callable[[], torch.nn.Module], Tensor, str]] = {
    "linear": (lambda: rt.QuantizedLinear.from_blocks(WEIGHT, COLUMNS, "Q4_K"), X, "x"),
    "int8": (lambda: rt.QuantizedLinear(COLUMNS, 4, fmt="Q8_0", activations="int8"), X, "x"),
    "embedding": (lambda: rt.QuantizedEmbedding.from_blocks(WEIGHT, COLUMNS, "Q4_K"), IDS, "ids"),
    "norm": (lambda: rt.FusedLayerNormLinear(COLUMNS, 4, fmt="Q4_K"), X, "x"),
    "dense norm": (lambda: rt.FusedLayerNormLinear(COLUMNS, 4), X, "x"),
    "several": (lambda: rt.FusedLayerNormLinear(COLUMNS, (4, 4), fmt=("Q4_K", "Q8_0")), X, "x"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("module", MODULES)
def test_modules(module: str, kind: str) -> None:
    make, x, name = MODULES[module]
    with refused(name, kind):
        make()(KINDS[kind](x))
    with refused(name, kind), torch.autocast("cpu", dtype=torch.bfloat16):
        make()(KINDS[kind](x))


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_is_not_made_of_such_a_weight(kind: str) -> None:
    for module in (rt.QuantizedLinear, rt.QuantizedEmbedding):
        with refused("weight", kind):
            module.from_blocks(KINDS[kind](WEIGHT), COLUMNS, "Q4_K")


@pytest.mark.parametrize("kind", KINDS)
def test_models(kind: str) -> None:
    model, _ = rt.load(Path(__file__).parent / "fixtures" / "llama.gguf")
    with refused("input_ids", kind):
        model(KINDS[kind](IDS))
    with refused("attention_mask", kind):
        model(IDS, KINDS[kind](IDS))
