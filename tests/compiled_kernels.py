"""Runs a script of this folder in a process of its own, where Triton compiles what tests interpret."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def printed_by(script: str, *arguments: str) -> Any:
    """What the script prints, which is JSON."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(script)), *arguments],
        env=os.environ | {"TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)
