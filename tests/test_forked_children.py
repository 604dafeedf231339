"""Processes forked from one that has used torch's threads, and none of our kernels yet."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")

_FORKING = """
import os, signal, sys
import realizar_torch
import torch

torch.set_num_threads(4)
assert torch.randn(1 << 20).sin().isfinite().all()
assert "numba" not in sys.modules
child = os.fork()
if child == 0:
    # ends a child that hangs
    signal.alarm(20)
    # large enough for threads, which a forked child does not have
    os._exit(int(not torch.zeros(1 << 22).add_(1).sum() == 1 << 22) + 2 * (torch.get_num_threads() != 1))
_, status = os.waitpid(child, 0)
assert torch.get_num_threads() == 4
sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_a_child_forked_before_the_first_kernel_computes_with_one_thread():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", _FORKING], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
