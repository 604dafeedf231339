"""The wheel: exactly the tracked files, one top-level name; kernel folders cannot be imported bare."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {
    "realizar_torch": "realizar_torch",
    "triton_kernels": "realizar_torch/triton_kernels",
    "cpu_kernels": "realizar_torch/cpu_kernels",
}


def _tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built without network from a copy of the tracked files, so that the tree stays clean."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in _tracked():
        target = folder / "tree" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target)
    options = ["--no-build-isolation", "--no-deps", "--no-index", "--quiet", "-w", str(folder / "out")]
    command = [sys.executable, "-m", "pip", "wheel", *options, str(folder / "tree")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = (folder / "out").glob("*.whl")
    return built


def test_wheel_holds_the_tracked_files_and_nothing_else(wheel: Path) -> None:
    expected = {
        f"{FOLDERS[top]}/{rest}"
        for top, _, rest in (name.partition("/") for name in _tracked())
        if top in FOLDERS
    }
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == expected
    assert "realizar_torch/py.typed" in packed


def test_wheel_has_one_top_level_name(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert {n.split("/")[0] for n in names if ".dist-info/" not in n} == {"realizar_torch"}
        (top_level,) = (n for n in names if n.endswith("top_level.txt"))
        assert archive.read(top_level).split() == [b"realizar_torch"]


def test_wheel_states_licence_and_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert any(n.endswith("licenses/LICENSE") for n in names)
        (entry_points,) = (n for n in names if n.endswith("entry_points.txt"))
        assert b"realizar-torch = realizar_torch.cli:main" in archive.read(entry_points)


@pytest.mark.parametrize("folder", ["triton_kernels", "cpu_kernels"])
def test_kernel_folders_refuse_their_bare_names(folder: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import {folder}"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert f"import realizar_torch.{folder}, not {folder}" in done.stderr
