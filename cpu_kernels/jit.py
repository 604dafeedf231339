"""The one way to compile: ``@jit``, with a disk cache keyed by the content of every kernel source.

Numba's own cache is keyed by the file of the outermost function, so an edited decoder in another file
would keep running its old code. Here one folder stands for one state of all sources, package versions
and CPU; a folder of another state is never read.
"""

import contextlib
import functools
import hashlib
import os
import pickle
import platform
import tempfile
from importlib.resources import files
from pathlib import Path
from types import FunctionType

import llvmlite
import numba
from numba.core.caching import FunctionCache
from numba.core.compiler import CompileResult
from numba.core.dispatcher import Dispatcher
from numba.core.extending import _Intrinsic
from numba.core.registry import cpu_target
from numba.core.serialize import dumps

from realizar_torch.interrupts import interrupts_deferred
from realizar_torch.user_cache import user_cache

_KEPT_FOLDERS = 4
_DIGEST_BYTES = hashlib.sha256().digest_size


def jit(function=None, *, device: bool = False):
    """Compile a kernel: no GIL, NumPy error model, strict floating point, cached on disk where possible.

    ``device=True`` is for functions that only other kernels call: no Python entry point is built.
    Functions of other packages (a test's, say) are compiled the same way but not cached on disk.
    """
    if function is None:
        return functools.partial(jit, device=device)
    function.__qualname__ = _unique_name(function)
    options = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True} if device else {}
    dispatcher = numba.njit(nogil=True, error_model="numpy", **options)(function)
    # an exception while LLVM calls back into Python is lost, or ends the process
    dispatcher.compile = interrupts_deferred()(dispatcher.compile)
    # the key covers this package's sources only
    if function.__module__.startswith(f"{__package__}."):
        dispatcher._cache = _ContentCache(function)
    return dispatcher


def target_features() -> frozenset[str]:
    """Names of the CPU features (LLVM spelling: "avx2", "f16c" …) that Numba compiles for."""
    _, _, features = cpu_target.target_context.codegen().magic_tuple()
    return frozenset(name[1:] for name in features.split(",") if name.startswith("+"))


def cache_folder() -> Path | None:
    """The folder of the present sources, versions and CPU; None when nothing may be written there."""
    root = user_cache()
    return None if root is None else _usable_folder(root / "kernels" / _SOURCES_AT_IMPORT)


@functools.cache
def _usable_folder(folder: Path) -> Path | None:
    """``folder``, created if need be; None if it cannot be written or is another user's (it holds code)."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder):
            pass
        if hasattr(os, "geteuid") and folder.stat().st_uid != os.geteuid():
            return None
        os.utime(folder)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        _prune(folder.parent)
    return folder


def _prune(root: Path) -> None:
    """Delete all but the most recently used folders; a process that still uses one recompiles."""
    folders = sorted(root.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    for folder in folders[_KEPT_FOLDERS:]:
        with contextlib.suppress(OSError):
            for file in folder.iterdir():
                file.unlink(missing_ok=True)
            folder.rmdir()


def _source_key() -> str:
    """Hash of every kernel source, formats.py, the versions of the compiler and the CPU it compiles for."""
    state = hashlib.sha256()
    package = files("realizar_torch")
    sources = [package / "formats.py"]
    sources += [path for path in files(__package__).iterdir() if path.name.endswith(".py")]
    for path in sorted(sources, key=lambda path: path.name):
        content = path.read_bytes()
        state.update(f"{path.name} {len(content)}\n".encode() + content)
    target = cpu_target.target_context.codegen().magic_tuple()
    versions = (platform.python_version(), platform.python_implementation())
    state.update(repr((numba.__version__, llvmlite.__version__, versions, target)).encode())
    return state.hexdigest()[:32]


# Taken before any kernel module is imported: a save is refused if the sources have changed since.
_SOURCES_AT_IMPORT = _source_key()


def _unique_name(function: FunctionType) -> str:
    """The qualified name; that of a function made by a factory also says, by hash, what its closure holds.

    Numba tells such siblings apart by a number counted up in each process, in symbols too: files written by
    two processes would bring the same symbol for different code.
    """
    if not function.__closure__:
        return function.__qualname__
    return f"{function.__qualname__}_{hashlib.sha256(repr(_identity(function)).encode()).hexdigest()[:16]}"


def _identity(value) -> object:
    """What ``value`` is, the same in every process with the same sources; TypeError where that is unknown."""
    if isinstance(value, Dispatcher):
        return value.py_func.__module__, value.py_func.__qualname__
    if isinstance(value, _Intrinsic):
        return _identity(value._defn)
    if isinstance(value, (tuple, list)):
        return [_identity(item) for item in value]
    if isinstance(value, FunctionType):
        code = value.__code__
        held = [cell.cell_contents for cell in value.__closure__ or ()]
        place = (value.__module__, value.__qualname__, code.co_firstlineno, code.co_code, code.co_names)
        return [*place, _identity(value.__defaults__ or ()), _identity(held)]
    description = repr(value)
    if " at 0x" in description:
        raise TypeError(f"a kernel's closure holds {description}, which differs from process to process")
    return description


class _ContentCache(FunctionCache):
    """One file per function and signature: a SHA-256 digest, then Numba's pickled compile result.

    Files are written under a temporary name and moved into place, so a reader sees all or nothing;
    one that fails its digest is compiled again and replaced.
    """

    def __init__(self, function):
        self._function = function
        self._enabled = True

    @property
    def cache_path(self) -> str:
        return str(cache_folder() or "")

    def flush(self) -> None:
        """Nothing to flush: a file is never stale."""

    def _load_overload(self, signature, target_context):
        folder = cache_folder()
        if folder is None:
            return None
        try:
            data = self._file(folder, signature).read_bytes()
            digest, payload = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
            if hashlib.sha256(payload).digest() != digest:
                return None
        except OSError:
            return None
        return CompileResult._rebuild(target_context, *pickle.loads(payload))

    def _save_overload(self, signature, result: CompileResult) -> None:
        folder = cache_folder()
        if folder is None or _source_key() != _SOURCES_AT_IMPORT:
            return
        payload = dumps(result._reduce())
        with contextlib.suppress(OSError):
            _write_whole(self._file(folder, signature), hashlib.sha256(payload).digest() + payload)

    def _file(self, folder: Path, signature) -> Path:
        name = hashlib.sha256(
            repr((self._function.__module__, self._function.__qualname__, signature)).encode()
        ).hexdigest()[:24]
        return folder / f"{self._function.__name__}-{name}.bin"


def _write_whole(path: Path, data: bytes) -> None:
    """Write a file that other processes see complete or not at all."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        temporary = Path(file.name)
        try:
            file.write(data)
            file.flush()
            file.close()
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
