"""torch.vmap over the ops: the numbers of a loop, in one call where the batch is one more dimension."""

from collections.abc import Callable

import pytest
import torch
from cases import random_activations, random_blocks
from torch import Tensor

import realizar_torch as rt
from realizar_torch import ops

BATCH, ROWS, COLUMNS = 4, 5, 300
WEIGHT = random_blocks("Q5_K", ROWS, COLUMNS)
WEIGHTS = torch.stack([random_blocks("Q5_K", ROWS, COLUMNS, seed) for seed in range(BATCH)])
X = random_activations(BATCH, 2, COLUMNS)
IDS = torch.randint(0, ROWS, (BATCH, 3), generator=torch.Generator().manual_seed(0))
SCALE = torch.linspace(0.5, 2, COLUMNS)


def _norm_linear(x: Tensor, scale: Tensor = SCALE) -> Tensor:
    return ops.norm_linear(x, scale, None, WEIGHT, "Q5_K", COLUMNS, normalization="rmsnorm", eps=1e-5)


def _quantized(x: Tensor) -> tuple[Tensor, ...]:
    qx = ops.quantize_activations(x, "Q5_K")
    return qx.q, qx.scale, qx.sums


def _shared(x: Tensor) -> Tensor:
    return ops.linear(ops.quantize_activations(x, "Q5_K"), WEIGHT, "Q5_K", COLUMNS)


# function, batched arguments, dispatches of ops for the whole batch
CASES: dict[str, tuple[Callable, tuple[Tensor, ...], int]] = {
    "linear": (lambda x: ops.linear(x, WEIGHT, "Q5_K", COLUMNS), (X,), 1),
    "linear, int8": (lambda x: ops.linear(x, WEIGHT, "Q5_K", COLUMNS, activations="int8"), (X,), 1),
    "linear, weights": (lambda w: ops.linear(X[0], w, "Q5_K", COLUMNS), (WEIGHTS,), BATCH),
    "linear, pairs": (lambda x, w: ops.linear(x, w, "Q5_K", COLUMNS), (X, WEIGHTS), BATCH),
    "linear, biases": (lambda b: ops.linear(X[0], WEIGHT, "Q5_K", COLUMNS, b), (X[:, 0, :ROWS],), BATCH),
    "linears": (lambda x: ops.linears(x, list(WEIGHTS[:2]), ["Q5_K"] * 2, COLUMNS), (X,), 1),
    "linears, weights": (lambda w: ops.linears(X[0], [w, WEIGHT], ["Q5_K"] * 2, COLUMNS), (WEIGHTS,), BATCH),
    "linears, biases": (
        lambda b: ops.linears(X[0], [WEIGHT], ["Q5_K"], COLUMNS, [b]),
        (X[:, 0, :ROWS],),
        BATCH,
    ),
    "gated_linear": (
        lambda x: ops.gated_linear(x, WEIGHT, WEIGHTS[1], "Q5_K", COLUMNS, activation="silu"),
        (X,),
        1,
    ),
    "embedding": (lambda ids: ops.embedding(ids, WEIGHT, "Q5_K", COLUMNS), (IDS,), 1),
    "embedding, tables": (lambda w: ops.embedding(IDS[0], w, "Q5_K", COLUMNS), (WEIGHTS,), BATCH),
    "dequantize": (lambda w: ops.dequantize(w, "Q5_K", COLUMNS), (WEIGHTS,), 1),
    "norm_linear": (_norm_linear, (X,), 1),
    "norm_linear, scales": (_norm_linear, (X, X[:, 0]), BATCH),
    "quantize_activations": (_quantized, (X,), 1),
    "linear_quantized": (_shared, (X,), 2),
    "quantize": (lambda w: ops.quantize(w, "Q8_0"), (X,), 1),
    "quantize, importance": (lambda w, i: ops.quantize(w, "Q4_0", importance=i), (X, X[:, 0].abs()), BATCH),
}


def _stack(results: list) -> tuple[Tensor, ...]:
    parts = [(result,) if isinstance(result, Tensor) else result for result in results]
    return tuple(torch.stack(tensors) for tensors in zip(*parts, strict=True))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(("function", "batched", "dispatches"), CASES.values(), ids=CASES)
def test_vmap_equals_a_loop(
    function: Callable, batched: tuple[Tensor, ...], dispatches: int, dim: int
) -> None:
    expected = _stack([function(*elements) for elements in zip(*batched, strict=True)])
    inputs = [tensor.movedim(0, dim) for tensor in batched]
    with rt.record_dispatch() as metrics:
        found = torch.vmap(function, in_dims=dim)(*inputs)
    assert metrics.summary().count == dispatches
    for y, right in zip((found,) if isinstance(found, Tensor) else found, expected, strict=True):
        # matrices of other sizes sum in another order
        torch.testing.assert_close(y, right, rtol=1e-5, atol=1e-5 * right.abs().max().item())


def test_two_levels_and_gradients() -> None:
    x = X.double()[:, None].expand(-1, 3, -1, -1) * torch.arange(1, 4)[:, None, None]

    def loss(row: Tensor) -> Tensor:
        return ops.linear(row, WEIGHT, "Q5_K", COLUMNS).square().sum()

    found = torch.vmap(torch.vmap(torch.func.grad(loss)))(x)
    decoded = ops.dequantize(WEIGHT, "Q5_K", COLUMNS, dtype=torch.float64)
    torch.testing.assert_close(found, 2 * x @ decoded.T @ decoded, rtol=1e-9, atol=1e-6)
    leaf = x.clone().requires_grad_()
    torch.vmap(loss)(leaf).sum().backward()
    torch.testing.assert_close(leaf.grad, found, rtol=1e-9, atol=1e-6)


def test_autocast_reaches_batched_inputs() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        y = torch.vmap(_norm_linear)(X)
        assert y.dtype == torch.bfloat16 and torch.equal(y, _norm_linear(X))
