"""A program that checks the int8 kernels as Numba compiles them for the CPU that its own variables name.

    NUMBA_CPU_NAME=haswell NUMBA_CPU_FEATURES=+avx2,+fma,… python tests/other_cpu.py TARGET FORMAT …

Exit status 0: the target is TARGET, and products of one and of several vectors are those of the oracle.
"""

import sys

import torch
from cases import assert_within, int8_kernel_tolerance, random_activations, random_blocks

from realizar_torch import reference
from realizar_torch.cpu_kernels import launch
from realizar_torch.cpu_kernels.targets import best_target
from realizar_torch.formats import FORMATS


def main() -> None:
    target, *formats = sys.argv[1:]
    assert best_target().name == target, best_target()
    for fmt in formats:
        width = 3 * FORMATS[fmt].block_size
        weight = random_blocks(fmt, 37, width)
        qx = launch.quantize_activations(random_activations(5, width), fmt)
        expected = reference.linear_int8(qx, weight, fmt, width)
        exact = qx.q.double() * qx.scale.double().repeat_interleave(32, -1)
        tolerance = int8_kernel_tolerance(exact, reference.dequantize(weight, fmt, dtype=torch.float64))
        assert_within(launch.matmul_int8(qx, weight, fmt), expected, tolerance)
        for row in range(len(qx.q)):
            own = slice(row, row + 1)
            one = reference.QuantizedActivations(qx.q[own], qx.scale[own], qx.sums[own], width)
            assert_within(launch.matmul_int8(one, weight, fmt), expected[own], tolerance[own])


if __name__ == "__main__":
    main()
