"""One call of every CPU launcher, in a module of its own: spawned children import it by name."""

import torch
from cases import PACKED, random_activations, random_blocks

from realizar_torch.cpu_kernels import launch


def everything(seed: int) -> list[torch.Tensor]:
    """The results for one format, large enough to be shared among threads."""
    fmt = PACKED[seed % len(PACKED)]
    weight, x = random_blocks(fmt, 300, 1024, seed), random_activations(3, 1024, seed=seed)
    qx = launch.quantize_activations(x, fmt)
    one = launch.quantize_activations(x[:1], fmt)
    return [
        launch.matmul(x, weight, fmt, 1024),
        launch.matmul(x[:1], weight, fmt, 1024),
        launch.matmul_int8(qx, weight, fmt),
        launch.matmul_int8(one, weight, fmt),
        launch.gate_up(one, weight, fmt, weight, fmt, 1024, "silu"),
        launch.dequantize(weight, fmt, 1024),
        launch.embedding(torch.arange(0, 300, 2), weight, fmt, 1024),
    ]


def first_numbers(seed: int) -> list[list[float]]:
    """The beginning of every result, as a child can send it."""
    return [tensor.flatten()[:50].tolist() for tensor in everything(seed)]
