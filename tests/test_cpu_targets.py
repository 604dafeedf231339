"""The kernels as they are compiled for other CPUs: run where this one can, else compiled only."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cases import PACKED

pytest.importorskip("numba")

from llvmlite import binding

HERE = Path(__file__).parent
_BASE = ("sse3", "ssse3", "sse4.1", "sse4.2", "popcnt", "cx16")
_AVX2 = (*_BASE, "avx", "avx2", "fma", "f16c", "bmi", "bmi2", "lzcnt", "movbe")
CPUS = {
    "generic": ("x86-64", _BASE),
    "avx2": ("haswell", _AVX2),
    "vnni-256": ("alderlake", (*_AVX2, "avxvnni")),
}
# one of every way to scale and to unpack
FORMATS = ("Q5_0", "Q8_0", "Q4_K", "Q6_K")


def run(program: str, *arguments: str, **variables: str) -> str:
    command = [sys.executable, str(HERE / program), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ | variables, timeout=600)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


@pytest.mark.parametrize("target", CPUS)
def test_other_x86_cpus(target: str, tmp_path: Path) -> None:
    name, features = CPUS[target]
    present = binding.get_host_cpu_features()
    if not all(present.get(feature) for feature in features):
        pytest.skip("this CPU cannot run it")
    wanted = ",".join(f"+{feature}" for feature in features)
    variables = {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": wanted, "XDG_CACHE_HOME": str(tmp_path)}
    run("other_cpu.py", target, *FORMATS, **variables)


def test_arm_kernels_multiply_bytes_in_one_instruction() -> None:
    """Four 128-bit products per 64 weights of a row; a matmul step has four of them for each column."""
    counts = json.loads(run("arm_kernels.py", *PACKED))
    for fmt in PACKED:
        rows, tile = counts[fmt]
        assert rows["sdot"] >= 8 and rows["fmla"] > 0, fmt
        # eight steps of four weights, or four for scales of 16, two columns
        assert tile["sdot"] >= 32 and tile["fmla"] > 0, fmt
