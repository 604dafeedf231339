"""Compiles the int8 matvecs for Hopper, without a GPU, and prints the instructions of their loops as JSON.

TRITON_INTERPRET=0 python tests/sass_of_kernels.py Q4_K:ggml Q6_K:planar
"""

import collections
import json
import re
import sys

import torch
from cases import random_blocks
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from realizar_torch import packing
from realizar_torch.triton_kernels.matvec import matvec_int8

ROWS = 8


class NoDevice:
    """What Triton asks of a driver to compile, for an H100 that is not there."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def loop_of(sass: str) -> collections.Counter:
    """Opcodes between the most distant label and backward branch to it; none where there is no loop."""
    lines = sass.splitlines()
    labels = {line.strip()[:-1]: i for i, line in enumerate(lines) if re.fullmatch(r"\s*LBB\d+:", line)}
    branches = ((i, re.search(r"BRA (LBB\d+)", line)) for i, line in enumerate(lines))
    loops = [(i - labels[m[1]], labels[m[1]], i) for i, m in branches if m and labels[m[1]] < i - 1]
    _, start, end = max(loops, default=(0, 0, 0))
    opcode = re.compile(r"(?:@!?U?P\d+ )?([A-Z][A-Z0-9]+)")
    opcodes = (opcode.search(line.split("\t")[-1]) for line in lines[start:end])
    return collections.Counter(found[1] for found in opcodes if found)


def main() -> None:
    driver.set_active(NoDevice())
    compiled = []
    run = JITFunction.run

    def only_compile(self, *args, grid, warmup, **options):
        compiled.append(run(self, *args, grid=grid, warmup=True, **options))

    JITFunction.run = only_compile
    loops = {}
    for name in sys.argv[1:]:
        fmt, layout, columns = name.split(":")
        width = int(columns)
        q = torch.zeros(1, width, dtype=torch.int8)
        scales = torch.zeros(1, width // 32), torch.zeros(1, width // 16)
        weight = packing.pack(random_blocks(fmt, ROWS, width), fmt, layout).clone()
        matvec_int8(q, *scales, weight, fmt, width, layout=layout)
        loops[name] = loop_of(compiled[-1].asm["sass"])
    print(json.dumps(loops))


if __name__ == "__main__":
    main()
