"""What the compiler makes of the matvec loops, read without a GPU: other versions choose other layouts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

KERNELS = ["Q4_K:ggml", "Q6_K:planar", "Q8_0:planar", "Q4_0:planar"]


def test_nothing_moves_between_threads_inside_a_loop() -> None:
    script = Path(__file__).with_name("sass_of_kernels.py")
    found = subprocess.run(
        [sys.executable, str(script), *KERNELS],
        env=os.environ | {"TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    for name, loop in json.loads(found.stdout).items():
        assert not loop.keys() & {"BAR", "SHFL", "LDS", "STS"}, (name, loop)
        # one dp4a for four weights
        assert loop["IDP"] >= 16, (name, loop)
        # 2.1 instructions per weight as measured, and some room for other compilers
        assert sum(loop.values()) <= 3 * 4 * loop["IDP"], (name, sum(loop.values()), loop["IDP"])
