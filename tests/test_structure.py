"""The rules of the layout, executed: one-way imports, light import, short files, one home for block sizes."""

import ast
import importlib
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import realizar_torch
from realizar_torch.formats import PACKED_FORMATS

ROOT = Path(__file__).resolve().parent.parent
# each room may import from the rooms above it and from itself
LEVELS = (
    {"errors", "user_cache", "caller", "forked_children", "interrupts"},
    {"formats", "metrics"},
    {"reference", "encode", "format_plan", "packing", "checkpoint"},
    {"triton_kernels", "cpu_kernels"},
    {"ops"},
    {"nn"},
    {"models", "quantization", "surgery"},
    {"generation"},
    {"hf", "lora", "cli", "diagnosis", "evaluation"},
)
HEAVY = ("triton", "numba", "llvmlite", "transformers", "tokenizers", "jinja2", "safetensors", "gguf")
# the only environment a program of ours looks at: where the user's cache directory is
CACHE_VARIABLES = {"XDG_CACHE_HOME", "LOCALAPPDATA"}


def _sources() -> Iterator[tuple[str, Path]]:
    """Every module of the package: its name, and where its file is in the tree."""
    for top, package in (
        ("realizar_torch", "realizar_torch"),
        ("triton_kernels", "realizar_torch.triton_kernels"),
        ("cpu_kernels", "realizar_torch.cpu_kernels"),
    ):
        for path in sorted((ROOT / top).rglob("*.py")):
            inner = path.relative_to(ROOT / top).with_suffix("").parts
            yield ".".join((package, *(part for part in inner if part != "__init__"))), path


SOURCES = dict(_sources())


def _level(module: str) -> int:
    room = module.split(".")[1]
    for level, rooms in enumerate(LEVELS):
        if room in rooms:
            return level
    raise AssertionError(f"{module}: no level is known for {room!r}; add it to LEVELS")


def _imports(path: Path) -> Iterator[str]:
    """Modules of this package that a file imports, at any depth of its code."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("realizar_torch"))
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if node.module == "realizar_torch":
                yield from (
                    f"realizar_torch.{alias.name}" for alias in node.names if alias.name != "__version__"
                )
            elif (node.module or "").startswith("realizar_torch."):
                yield node.module


@pytest.mark.parametrize("module", [name for name in SOURCES if "." in name])
def test_imports_go_one_way(module: str) -> None:
    for target in _imports(SOURCES[module]):
        same_room = target.split(".")[1] == module.split(".")[1]
        rim = _level(module) == _level(target) == len(LEVELS) - 1
        assert same_room or rim or _level(target) < _level(module), f"{module} imports {target}"


def test_kernel_folders_import_nothing_but_formats_and_the_like() -> None:
    allowed = {"errors", "formats", "reference", "packing", "user_cache", "interrupts"}
    for name, path in SOURCES.items():
        folder = name.split(".")[1] if "." in name else ""
        if folder in ("triton_kernels", "cpu_kernels"):
            assert {t.split(".")[1] for t in _imports(path)} <= allowed | {folder}, name


@pytest.mark.parametrize(
    "statement", ["import realizar_torch", "from realizar_torch import QuantizedLinear, ops"]
)
def test_import_is_light(statement: str) -> None:
    script = f"""
import sys
{statement}
heavy = [name for name in {HEAVY} if name in sys.modules]
assert not heavy, heavy
if "torch" in sys.modules:
    assert not sys.modules["torch"].cuda.is_initialized()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_bare_import_does_not_even_load_torch() -> None:
    script = "import sys, realizar_torch; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_public_names_survive_the_import_of_every_submodule() -> None:
    """A submodule called like a public function would replace it."""
    for info in pkgutil.walk_packages(realizar_torch.__path__, "realizar_torch."):
        try:
            importlib.import_module(info.name)
        except ModuleNotFoundError as error:
            assert not (error.name or "").startswith("realizar_torch"), error
    for name in realizar_torch.__all__:
        value = getattr(realizar_torch, name)
        assert callable(value) or name in ("__version__", "hf", "lora", "ops"), name
    submodules = {info.name for info in pkgutil.iter_modules(realizar_torch.__path__)}
    assert set(realizar_torch.__all__) & submodules <= {"hf", "lora", "ops"}


def test_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        _ = realizar_torch.no_such_name
    assert set(realizar_torch.__all__) <= set(dir(realizar_torch))


def test_files_are_short() -> None:
    folders = ("realizar_torch", "triton_kernels", "cpu_kernels", "tests", "bench")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    lengths = {str(p.relative_to(ROOT)): len(p.read_text(encoding="utf-8").splitlines()) for p in files}
    assert {name: length for name, length in lengths.items() if length > 400} == {}


def test_first_line_states_the_idea() -> None:
    for name, path in SOURCES.items():
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        assert docstring, f"{name} has no module docstring"


def test_block_sizes_in_bytes_are_in_formats_only() -> None:
    # sizes below 34 bytes are too common as numbers to be told apart
    sizes = {fmt.block_bytes for fmt in PACKED_FORMATS if fmt.block_bytes >= 34}
    assert len(sizes) == 6
    for name, path in SOURCES.items():
        if name != "realizar_torch.formats":
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and type(node.value) is int:
                    assert node.value not in sizes, f"{path}:{node.lineno} states {node.value}"


def test_no_environment_variable_steers_the_package() -> None:
    for path in SOURCES.values():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute | ast.Name):
                word = node.attr if isinstance(node, ast.Attribute) else node.id
                if word in ("environ", "getenv"):
                    line = path.read_text(encoding="utf-8").splitlines()[node.lineno - 1]
                    assert any(f'"{variable}"' in line for variable in CACHE_VARIABLES), (
                        f"{path}:{node.lineno}: {line}"
                    )


def test_loading_a_model_does_not_wait_for_the_compiler() -> None:
    """torch._dynamo takes 1.5 s to import, more than a model takes to load."""
    program = "import sys, realizar_torch.generation.causal_lm; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
