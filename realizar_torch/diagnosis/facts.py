"""What a bug report should tell of the machine: versions, threads, back ends, devices."""

import importlib.metadata
import os
import platform

import torch

from realizar_torch import __version__

_PACKAGES = ("torch", "numpy", "numba", "triton", "tokenizers", "jinja2", "gguf", "safetensors")
_OPTIONAL_PACKAGES = ("transformers", "huggingface_hub", "peft")


def machine_facts() -> dict[str, str]:
    """Name and value of each thing worth a line."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    facts = {
        "realizar_torch": __version__,
        "python": f"{platform.python_version()} on {platform.platform()}",
        "cpu": f"{torch.backends.cpu.get_cpu_capability()}, {usable} of {os.cpu_count()} cores usable",
        "threads": f"{torch.get_num_threads()} (torch.set_num_threads or --threads)",
    }
    facts |= {package: _version(package) for package in (*_PACKAGES, *_OPTIONAL_PACKAGES)}
    facts["cpu kernels"] = _cpu_kernels()
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            memory = properties.total_memory / (1 << 30)
            capability = f"{properties.major}.{properties.minor}"
            facts[f"cuda:{index}"] = f"{properties.name}, {memory:.1f} GiB, compute capability {capability}"
    else:
        facts["cuda"] = (
            "no device (torch is built without CUDA)" if torch.version.cuda is None else "no device"
        )
    return facts


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _cpu_kernels() -> str:
    """Which instructions the CPU kernels use and where their compiled form is kept."""
    try:
        from realizar_torch.cpu_kernels.jit import cache_folder
        from realizar_torch.cpu_kernels.targets import best_target
    except ImportError as error:
        return f"not used, torch operations instead: {error}"
    return f"{best_target().name}, compiled code in {cache_folder() or 'memory only: no folder is writable'}"
