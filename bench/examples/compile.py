"""Packed layers in a compile pipeline: one graph for any batch, the same numbers, an exported program.

python bench/examples/compile.py
"""

import shutil
import time
from collections.abc import Callable

import torch
from torch import nn
from torch._dynamo.utils import counters

import realizar_torch as rt


def pipeline(width: int = 512) -> nn.Module:
    """A norm fused with the layer it feeds, an activation, a second packed layer."""
    first = rt.QuantizedLinear.from_linear(nn.Linear(width, 2 * width), "Q4_K")
    second = rt.QuantizedLinear.from_linear(nn.Linear(2 * width, width), "Q6_K")
    return nn.Sequential(rt.FusedLayerNormLinear.fuse(nn.LayerNorm(width), first), nn.SiLU(), second)


def milliseconds(run: Callable[[], object], repeats: int = 20) -> float:
    run()
    started = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - started) / repeats * 1e3


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = pipeline().to(device)
    # inductor writes C++ for CPUs; without a compiler the graph is run as it was traced
    backend = "inductor" if device == "cuda" or shutil.which("g++") else "aot_eager"
    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=True)

    for batch in (2, 3, 17, 33):
        x = torch.randn(batch, 512, device=device)
        difference = (compiled(x) - model(x)).abs().max().item()
        print(f"batch {batch:2}: largest difference to eager {difference:.1e}")
    print(f"{counters['stats']['unique_graphs']} graph, by {backend}")

    x = torch.randn(4, 512, device=device)
    for name, run in (("eager", model), ("compiled", compiled)):
        print(f"{name}: {milliseconds(lambda run=run: run(x)):.2f} ms")

    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},))
    x = torch.randn(9, 512, device=device)
    assert torch.equal(program.module()(x), model(x))
    kinds = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    print("exported ops:", ", ".join(sorted(kind for kind in kinds if kind.startswith("realizar_torch"))))


if __name__ == "__main__":
    main()
