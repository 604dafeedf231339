"""The disk cache of the CPU kernels: keyed by content, safe against damage, kills, races and bad homes."""

import itertools
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

pytest.importorskip("numba")

import realizar_torch
from realizar_torch import cpu_kernels
from realizar_torch.cpu_kernels import jit as jit_module
from realizar_torch.cpu_kernels.jit import cache_folder, jit
from realizar_torch.cpu_kernels.simd import shuffle
from realizar_torch.user_cache import user_cache

# a hang guard only
_PATIENCE = 300

# Decodes one row of each format named; prints the first weights and how many functions came from the cache.
_DECODE = textwrap.dedent(
    """
    import ctypes, sys
    import numpy as np
    from realizar_torch.cpu_kernels import jit, row_kernels
    from realizar_torch.formats import get_format

    loaded = []
    load = jit._ContentCache._load_overload
    def counted(self, *args):
        found = load(self, *args)
        loaded.append(found is not None)
        return found
    jit._ContentCache._load_overload = counted

    for name in sys.argv[1:]:
        fmt = get_format(name)
        block = np.arange(fmt.block_bytes, dtype=np.uint8)
        block[fmt.offset("d") : fmt.offset("d") + 2] = np.frombuffer(np.float16(0.5).tobytes(), np.uint8)
        out = np.full(fmt.block_size, np.nan, np.float32)
        decode = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(row_kernels.decode_row(name))
        decode(block.ctypes.data, fmt.block_size, out.ctypes.data)
        print(name, *out[:3])
    print("loaded", sum(loaded), "of", len(loaded))
    """
)
_EXPECTED = {"Q8_0": "Q8_0 1.0 1.5 2.0", "Q4_0": "Q4_0 -3.0 -2.5 -2.0"}


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    """A copy of the package, laid out as installed."""
    root = tmp_path_factory.mktemp("site")
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
    target = root / "realizar_torch"
    shutil.copytree(Path(realizar_torch.__file__).parent, target, ignore=ignore)
    # an installed package holds this folder already
    kernels = Path(cpu_kernels.__file__).parent
    shutil.copytree(kernels, target / "cpu_kernels", ignore=ignore, dirs_exist_ok=True)
    return root


@pytest.fixture(scope="module")
def warm_home(package, tmp_path_factory) -> Path:
    """A home whose cache holds the decoders of two formats."""
    home = tmp_path_factory.mktemp("warm")
    assert _loaded(_decode(package, home, "Q8_0", "Q4_0"))[0] == 0
    return home


def _environment(package: Path, home: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "XDG_CACHE_HOME"}
    return kept | {"HOME": str(home), "PYTHONPATH": str(package), "PYTHONDONTWRITEBYTECODE": "1"}


def _start(package: Path, home: Path, *formats: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _DECODE, *formats]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=_environment(package, home), cwd=package, **streams)


def _finish(process: subprocess.Popen[str]) -> list[str]:
    out, err = process.communicate(timeout=_PATIENCE)
    assert process.returncode == 0, err
    assert "Warning" not in err
    return out.splitlines()


def _decode(package: Path, home: Path, *formats: str) -> list[str]:
    """Output lines of a new process; checks the weights of an unedited package."""
    lines = _finish(_start(package, home, *formats))
    assert lines[:-1] == [_EXPECTED[name] for name in formats]
    return lines


def _loaded(lines: list[str]) -> tuple[int, int]:
    _, hits, _, lookups = lines[-1].split()
    return int(hits), int(lookups)


def _cached_files(home: Path) -> list[Path]:
    return sorted((home / ".cache" / "realizar_torch" / "kernels").glob("*/*.bin"))


def _copied(home: Path, tmp_path: Path) -> Path:
    return shutil.copytree(home, tmp_path / "home")


def test_a_second_process_compiles_nothing(package, warm_home):
    assert _loaded(_decode(package, warm_home, "Q8_0", "Q4_0")) == (2, 2)


def test_an_edited_decoder_is_compiled_anew(package, warm_home, tmp_path):
    """The decoder stands in another file than the kernel that is called."""
    edited = shutil.copytree(package, tmp_path / "edited")
    source = edited / "realizar_torch" / "cpu_kernels" / "block_decoders.py"
    before = source.read_text()
    after = before.replace(
        "store(q, load_u8x32(block, _Q8_0_QS))", "store(q, load_u8x32(block, _Q8_0_QS) ^ 3)"
    )
    assert after != before
    source.write_text(after)
    lines = _finish(_start(edited, warm_home, "Q8_0"))
    assert lines[0] == "Q8_0 0.5 0.0 3.5"
    assert _loaded(lines)[0] == 0
    assert _loaded(_decode(package, warm_home, "Q8_0")) == (1, 1)


def test_an_edited_format_is_compiled_anew(package, warm_home, tmp_path):
    edited = shutil.copytree(package, tmp_path / "edited")
    source = edited / "realizar_torch" / "formats.py"
    source.write_text(source.read_text() + "\n")
    assert _loaded(_decode(edited, warm_home, "Q8_0"))[0] == 0


def test_sources_edited_while_a_process_runs_are_not_cached_under_its_key(package, tmp_path):
    edited = shutil.copytree(package, tmp_path / "edited")
    program = "import realizar_torch.cpu_kernels.jit, pathlib\n" + _DECODE.replace(
        "for name in",
        f"pathlib.Path({str(edited)!r}, 'realizar_torch', 'formats.py').open('a').write('#')\nfor name in",
    )
    command = [sys.executable, "-c", program, "Q8_0"]
    subprocess.run(command, env=_environment(edited, tmp_path), cwd=edited, check=True)
    assert _cached_files(tmp_path) == []


@pytest.mark.parametrize(
    "damage", [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: data[:-1] + b"?"]
)
def test_a_damaged_file_is_compiled_anew_and_replaced(package, warm_home, tmp_path, damage):
    home = _copied(warm_home, tmp_path)
    for file in _cached_files(home):
        file.write_bytes(damage(file.read_bytes()))
    assert _loaded(_decode(package, home, "Q8_0"))[0] == 0
    assert _loaded(_decode(package, home, "Q8_0")) == (1, 1)


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
@pytest.mark.parametrize("files", [1, 3])
def test_a_killed_process_leaves_a_loadable_cache(package, tmp_path, files):
    process = _start(package, tmp_path, "Q8_0", "Q4_0")
    deadline = time.monotonic() + _PATIENCE
    while len(_cached_files(tmp_path)) < files and time.monotonic() < deadline:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    _decode(package, tmp_path, "Q8_0", "Q4_0")
    assert _loaded(_decode(package, tmp_path, "Q8_0", "Q4_0")) == (2, 2)


def test_two_processes_warm_at_once(package, tmp_path):
    both = [_start(package, tmp_path, *formats) for formats in (("Q8_0", "Q4_0"), ("Q4_0", "Q8_0"))]
    for process in both:
        assert set(_finish(process)[:-1]) == set(_EXPECTED.values())
    assert _loaded(_decode(package, tmp_path, "Q8_0", "Q4_0")) == (2, 2)


def test_files_written_by_different_processes_work_together(package, tmp_path):
    """Numba numbers functions per process; sibling kernels of one factory must not share a symbol."""
    homes = [tmp_path / name for name in ("first", "second")]
    for home, fmt in zip(homes, ("Q8_0", "Q4_0"), strict=True):
        _decode(package, home, fmt)
    for file in _cached_files(homes[1]):
        shutil.copy(file, _cached_files(homes[0])[0].parent)
    lines = _decode(package, homes[0], "Q8_0", "Q4_0")
    assert _loaded(lines) == (2, 2)


def test_an_unwritable_home_runs_uncached(package, tmp_path):
    home = tmp_path / "not a folder"
    home.write_text("")
    before = sorted(package.rglob("*"))
    for _ in range(2):
        assert _loaded(_decode(package, home, "Q8_0"))[0] == 0
    assert sorted(package.rglob("*")) == before
    assert home.read_text() == ""


def test_a_missing_or_foreign_folder_is_not_used(monkeypatch, tmp_path):
    def home(path):
        monkeypatch.setattr(jit_module, "user_cache", lambda: path)

    home(None)
    assert cache_folder() is None
    home(tmp_path / "mine")
    assert cache_folder().is_dir()
    home(tmp_path / "theirs")
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1, raising=False)
    assert cache_folder() is None


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="XDG is a convention of other systems")
@pytest.mark.parametrize("value", ["", "relative/folder"])
def test_an_empty_or_relative_cache_variable_counts_as_unset(monkeypatch, tmp_path, value):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    assert user_cache() == tmp_path / ".cache" / "realizar_torch"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    assert user_cache() == tmp_path / "elsewhere" / "realizar_torch"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "not/absolute")
    assert user_cache() is None


def test_old_folders_are_pruned(monkeypatch, tmp_path):
    root = tmp_path / "kernels"
    for age in range(9):
        folder = root / str(age)
        folder.mkdir(parents=True)
        (folder / "kernel.bin").write_text("")
        os.utime(folder, (1e9 - age, 1e9 - age))
    monkeypatch.setattr(jit_module, "user_cache", lambda: tmp_path)
    assert cache_folder().is_dir()
    assert {folder.name for folder in root.iterdir()} == {cache_folder().name, "0", "1", "2"}


def test_environment_and_numba_config_stay_untouched():
    program = """
    import os, numba
    def state():
        return dict(os.environ), {n: repr(v) for n, v in vars(numba.config).items() if n.isupper()}
    before = state()
    from realizar_torch.cpu_kernels import pool, row_kernels
    row_kernels.decode_row("Q8_0")
    assert state() == before
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=_PATIENCE)


def _adder(held):
    @jit
    def add(x):
        return x + 1 if held is None else x

    return add


def test_functions_of_a_factory_are_named_by_what_they_hold():
    function = jit_module._unique_name

    def make(held):
        def kernel():
            return held

        return kernel

    helds = [1, 2, "a", (1, 2), shuffle(0, 1), shuffle(1, 0), _adder(1), _adder(2), make(1), make(2)]
    names = [function(make(held)) for held in helds]
    assert len(set(names)) == len(names)
    assert [function(make(held)) for held in (1, (1, 2), shuffle(1, 0), _adder(2), make(2))] == [
        names[i] for i in (0, 3, 5, 7, 9)
    ]
    with pytest.raises(TypeError, match="differs from process to process"):
        function(make(object()))


def test_every_decoder_has_a_name_of_its_own():
    from realizar_torch.cpu_kernels import decode, float_rows, row_kernels

    functions = itertools.chain(
        decode.ROW_DECODERS.values(), float_rows.ROWS.values(), row_kernels._INT8_ROWS.values()
    )
    names = [(f.py_func.__module__, f.py_func.__qualname__) for f in functions]
    assert len(set(names)) == len(names) == 30
