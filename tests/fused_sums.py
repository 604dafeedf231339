"""Compiles a part of the kernel tour for Hopper, without a GPU, and prints which sums over lanes are fused.

TRITON_INTERPRET=0 python tests/fused_sums.py

JSON: how often each kernel adds what another lane holds to a product of its own, in one instruction.
"""

import json
import re

import torch
from kernel_tour import parts
from sass_of_kernels import NoDevice
from triton.runtime import driver
from triton.runtime.jit import JITFunction


def fused_sums(ptx: str) -> int:
    """Fused products whose addend is a register that a shuffle has written."""
    shuffled = set(re.findall(r"shfl\.sync\.\S+\s+(%\w+)", ptx))
    addends = re.findall(r"fma\.rn\.\S+\s+%\w+, %\w+, \S+, (%\w+);", ptx)
    return sum(addend in shuffled for addend in addends)


def main() -> None:
    driver.set_active(NoDevice())
    found: dict[str, int] = {}
    run = JITFunction.run

    def only_compile(self, *args, grid, warmup, **options):
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        name = self.fn.__name__
        found[name] = found.get(name, 0) + fused_sums(kernel.asm["ptx"])

    JITFunction.run = only_compile
    tour = parts(torch.device("cpu"))
    for part in ("rmsnorm", "layernorm", "bfloat16"):
        list(tour[part])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
