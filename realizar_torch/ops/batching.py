"""The ops under ``torch.vmap``: batched inputs are one more leading dimension, batched weights more rows.

What neither describes, such as a batch of weights for one input or of biases, runs one element at a time.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import register_vmap
from torch.utils._pytree import tree_leaves

from realizar_torch.ops.library import LIBRARY

Output = Tensor | tuple[Tensor, ...]
# of a list of tensors, a list
Dims = tuple[Any, ...]


def _leading(count: int, op: Callable[..., Output], dims: Dims, args: tuple, options: dict) -> Output | None:
    """The first ``count`` arguments take any leading dimensions; None if others are batched."""
    if None in dims[:count] or any(dim is not None for dim in tree_leaves(dims[count:])):
        return None
    inputs = (arg.movedim(dim, 0) for arg, dim in zip(args[:count], dims, strict=False))
    return op(*inputs, *args[count:], **options)


def _rows(op: Callable[..., Tensor], dims: Dims, args: tuple, options: dict) -> Tensor | None:
    """The first argument is rows that do not know of each other; None if another one is batched."""
    if any(dim is not None for dim in dims[1:]):
        return None
    weights = args[0].movedim(dims[0], 0)
    return op(weights.flatten(0, 1), *args[1:], **options).unflatten(0, weights.shape[:2])


def _one_by_one(count: int, op: Callable[..., Output], dims: Dims, args: tuple, options: dict) -> Output:
    """Every element of the batch by a call of its own."""

    def element(index: int) -> Output:
        def pick(arg: Any, dim: Any) -> Any:
            if isinstance(dim, list | tuple):
                return [pick(*pair) for pair in zip(arg, dim, strict=True)]
            return arg if dim is None else arg.select(dim, index)

        picked = (pick(*pair) for pair in zip(args, dims, strict=True))
        return op(*picked, **options)

    results: list[Any] = [element(index) for index in range(count)]
    if isinstance(results[0], Tensor):
        return torch.stack(results)
    return tuple(torch.stack(parts) for parts in zip(*results, strict=True))


def _register(name: str, rule: Callable[..., Output | None]) -> None:
    op = getattr(torch.ops.realizar_torch, name).default

    def run(info: Any, dims: Dims, *args: Any, **options: Any) -> tuple[Output, int | tuple[int, ...]]:
        result = rule(op, dims, args, options)
        if result is None:
            result = _one_by_one(info.batch_size, op, dims, args, options)
        return result, 0 if isinstance(result, Tensor) else (0,) * len(result)

    register_vmap(f"realizar_torch::{name}", run, lib=LIBRARY)


for _name, _count in (
    ("linear", 1),
    ("linears", 1),
    ("gated_linear", 1),
    ("embedding", 1),
    ("norm_linear", 1),
    ("quantize_activations", 1),
    ("linear_quantized", 3),
    ("expert_linear", 2),
    ("expert_linear_transposed", 2),
):
    _register(_name, lambda *call, count=_count: _leading(count, *call))
for _name in ("dequantize", "quantize"):
    _register(_name, _rows)
