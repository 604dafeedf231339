"""Compiles matvecs for Hopper, without a GPU, and prints the instructions of their loops as JSON.

TRITON_INTERPRET=0 python tests/sass_of_kernels.py Q4_K:ggml:4096 Q6_K:planar:4096:ring Q4_K:ggml:4096:float
"""

import collections
import itertools
import json
import re
import sys

import torch
from cases import random_blocks
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from realizar_torch import packing
from realizar_torch.triton_kernels.matvec import matvec, matvec_int8

ROWS, MANY_ROWS = 8, 1 << 15


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


def steps_of(ptx: str) -> list[str]:
    """What a ring's loop does first, in turns: waits for copies, barriers, loads and further copies."""
    steps = re.findall(r"cp\.async\.wait_group \d+|bar\.sync|barrier\.sync|ld\.shared|cp\.async\.cg", ptx)
    first = next(i for i, step in enumerate(steps) if "wait_group" in step)
    return [step for step, _ in itertools.groupby(steps[first:])][:4]


def main() -> None:
    driver.set_active(NoDevice())
    compiled = []
    run = JITFunction.run

    def only_compile(self, *args, grid, warmup, **options):
        compiled.append(run(self, *args, grid=grid, warmup=True, **options))

    JITFunction.run = only_compile
    loops, rings = {}, {}
    for name in sys.argv[1:]:
        fmt, layout, columns, *kind = name.split(":")
        width = int(columns)
        q = torch.zeros(1, width, dtype=torch.int8)
        scales = torch.zeros(1, width // 32), torch.zeros(1, width // 16)
        weight = packing.pack(random_blocks(fmt, ROWS, width), fmt, layout).clone()
        if kind:
            # nobody reads them, and a program has as many tiles as its ring
            weight = torch.empty(MANY_ROWS, weight.shape[1], dtype=torch.uint8)
        if kind == ["float"]:
            matvec(q.float(), weight, fmt, width, layout=layout)
        else:
            matvec_int8(q, *scales, weight, fmt, width, layout=layout, dependent=bool(kind))
        loops[name] = loop_of(compiled[-1].asm["sass"])
        if kind:
            rings[name] = steps_of(compiled[-1].asm["ptx"])
    print(json.dumps({"loops": loops, "rings": rings}))


if __name__ == "__main__":
    main()
