"""The public ops on one device against float64: whatever kernels they run there."""

from collections.abc import Iterator

import torch

from realizar_torch import ops, reference
from realizar_torch.diagnosis.parity import (
    TOLERANCE,
    Matrix,
    Parity,
    int8_values,
    product_share,
    random_vectors,
    share,
)
from realizar_torch.diagnosis.shapes import Shapes
from realizar_torch.ops.normalization import normalize

_NUMERICS = ("float", "int8")
# one vector runs the matrix-vector kernels, several run others; on GPUs int8 holds for a few vectors only
_BATCHES = {
    ("cpu", "float"): (1, 2, 5, 16),
    ("cpu", "int8"): (1, 2, 5, 16),
    ("cuda", "float"): (1, 16),
    ("cuda", "int8"): (1, 5),
}
_EPS = 1e-5
_USED_EXPERTS = 2


def check_ops(shapes: Shapes, device: torch.device) -> Iterator[Parity]:
    """``linear`` and ``dequantize`` of every matrix; the other ops of those that a model uses with them."""
    for matrix in shapes.matrices:
        yield from _linear(matrix, device)
    for table in shapes.tables:
        yield _embedding(table, device)
    for matrix in shapes.normed:
        yield from _norm_linear(matrix, shapes, device)
    for matrix, count in shapes.experts:
        yield from _experts(matrix, count, device)


def _linear(matrix: Matrix, device: torch.device) -> Iterator[Parity]:
    weight, decoded = matrix.sample(device)
    columns, where = matrix.in_features, (matrix.fmt, str(matrix))
    for activations in _NUMERICS:
        for batch in _BATCHES[device.type, activations]:
            x = random_vectors(device, batch, columns, seed=batch)
            seen = x.double()
            if activations == "int8":
                exact = reference.quantize_activations(x.cpu(), matrix.fmt)
                seen = int8_values(exact.q, exact.scale, columns).to(device)
            found = ops.linear(x, weight, matrix.fmt, columns, activations=activations)
            error = product_share(found, seen, decoded)
            yield Parity(device.type, f"linear {activations}", *where, batch, error)
    found = ops.dequantize(weight, matrix.fmt, columns, dtype=torch.float32)
    yield Parity(device.type, "dequantize", *where, 1, share(found, decoded, 0))


def _embedding(table: Matrix, device: torch.device) -> Parity:
    weight, decoded = table.sample(device)
    ids = torch.randint(len(weight), (16,), generator=torch.Generator().manual_seed(0)).to(device)
    found = ops.embedding(ids, weight, table.fmt, table.in_features, dtype=torch.float32)
    return Parity(device.type, "embedding", table.fmt, str(table), 16, share(found, decoded[ids], 0))


def _norm_linear(matrix: Matrix, shapes: Shapes, device: torch.device) -> Iterator[Parity]:
    """Two vectors; a value of the norm that differs in its last bit may round to the next quant."""
    assert shapes.config is not None
    normalization, columns = shapes.config.arch.normalization, matrix.in_features
    weight, decoded = matrix.sample(device)
    x = random_vectors(device, 2, columns)
    gain = 1 + 0.1 * random_vectors(device, columns, seed=1)
    normed = normalize(x.double(), gain.double(), None, normalization, _EPS)
    size = normed.abs() @ decoded.abs().T
    for activations in _NUMERICS:
        found = ops.norm_linear(
            x, gain, None, weight, matrix.fmt, columns,
            normalization=normalization, eps=_EPS, activations=activations,
        )  # fmt: skip
        step = normed.abs().amax(-1, keepdim=True) / 127 if activations == "int8" else 0.0
        allowed = TOLERANCE * size + 0.51 * step * decoded.abs().sum(-1)
        error = share(found, normed @ decoded.T, allowed)
        yield Parity(device.type, f"norm_linear {activations}", matrix.fmt, str(matrix), 2, error)


def _experts(matrix: Matrix, count: int, device: torch.device) -> Iterator[Parity]:
    """Two vectors for two of three experts each."""
    samples = [matrix.sample(device, seed) for seed in range(3)]
    weight = torch.stack([blocks for blocks, _ in samples])
    experts = torch.tensor([[2, 0], [0, 1]], device=device)
    x = random_vectors(device, 2, 1, matrix.in_features)
    for activations in _NUMERICS:
        seen = x.double()
        if activations == "int8":
            exact = reference.quantize_activations(x.cpu(), matrix.fmt)
            seen = int8_values(exact.q, exact.scale, matrix.in_features).to(device)
        found = ops.expert_linear(x, experts, weight, matrix.fmt, matrix.in_features, activations=activations)
        error = max(
            product_share(found[row, used, None], seen[row], samples[int(experts[row, used])][1])
            for row in range(len(x))
            for used in range(_USED_EXPERTS)
        )
        shape = f"{count} x {matrix}"
        yield Parity(device.type, f"expert_linear {activations}", matrix.fmt, shape, 2, error)
