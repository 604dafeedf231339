"""Shared by every test: poisoned uninitialised memory, fixed random numbers, real model files."""

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from real_models import GEMMA3, SMOLLM2, RealModel, UnobtainableError, obtain
from tiny_models import write_tiny_llama

import realizar_torch as rt


def pytest_configure(config: pytest.Config) -> None:
    """Only ``-m gpu`` sees a GPU. Other runs test what CPUs do and interpret kernels, wherever they run."""
    if not re.search(r"(?<!not )\bgpu\b", config.option.markexpr):
        # read when CUDA is first asked for
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if not torch.cuda.is_available():
        # read when triton is imported, so it has to be set before any test does
        os.environ["TRITON_INTERPRET"] = "1"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not torch.cuda.is_available():
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
        # tests of kernels, which are compiled there
        elif str(getattr(getattr(item, "module", None), "DEVICE", "cpu")).startswith("cuda"):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True)
def fixed_random_numbers() -> None:
    torch.manual_seed(20)


@pytest.fixture
def threads_kept() -> Iterator[None]:
    """torch's threads are as many after the test as before."""
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


@pytest.fixture(scope="session")
def sharded_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory of several safetensors files that nobody changes."""
    from hf_directories import write_hf_directory

    path = tmp_path_factory.mktemp("hf") / "llama"
    write_hf_directory(path, shard="100KB")
    return path


@pytest.fixture
def directory(sharded_llama: Path, tmp_path: Path) -> Path:
    """A copy of it to change."""
    return Path(shutil.copytree(sharded_llama, tmp_path / "copy"))


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Uninitialised memory of realizar_torch holds NaN (integers: all bits set), so a missed write shows."""
    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
    ):
        monkeypatch.setattr(owner, name, _poisoned(getattr(owner, name)))
    yield


def _poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def allocate_and_poison(*args: object, **kwargs: object) -> torch.Tensor:
        tensor = allocate(*args, **kwargs)
        if torch.compiler.is_compiling() or tensor.is_meta:
            return tensor
        if sys._getframe(1).f_globals.get("__name__", "").startswith("realizar_torch"):
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)
            elif tensor.dtype != torch.bool:
                tensor.fill_(-1 if tensor.dtype.is_signed else torch.iinfo(tensor.dtype).max)
        return tensor

    return allocate_and_poison


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of ``write_tiny_llama``."""
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="module")
def tiny_hf(tiny_path: Path) -> tuple[Any, Any]:
    """That file as a transformers model, and its tokenizer."""
    return rt.hf.from_gguf(tiny_path)


def _path_or_skip(model: RealModel) -> Path:
    try:
        return obtain(model)
    except (UnobtainableError, OSError) as error:
        pytest.skip(f"could not obtain {model.filename}: {error}")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct, Q4_1 (Apache-2.0)."""
    return _path_or_skip(SMOLLM2)


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """gemma-3-270m, Q4_K_M (Gemma terms; used by tests only)."""
    return _path_or_skip(GEMMA3)
