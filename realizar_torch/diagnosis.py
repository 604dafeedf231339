"""doctor: back ends, versions, threads, and a check of the kernels against the oracle on this machine."""

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
from dataclasses import asdict, dataclass
from typing import Any

import torch

from realizar_torch import __version__, ops, reference
from realizar_torch.cli.session import EXIT_PROBLEMS
from realizar_torch.formats import PACKED_FORMATS, BlockFormat

_PACKAGES = ("torch", "numpy", "numba", "triton", "tokenizers", "jinja2", "gguf", "safetensors")
_OPTIONAL_PACKAGES = ("transformers", "huggingface_hub", "peft")
# one row runs the matrix-vector kernels, several run the matrix kernels
_BATCHES = (1, 5)
_ROWS, _COLUMNS = 96, 512
# of sum|w x|: what every kernel promises against the float64 product of its own inputs
_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Parity:
    """One kernel path against the oracle. error: largest |difference| / sum|w x|, NaN counted as infinite."""

    device: str
    fmt: str
    activations: str
    error: float

    @property
    def ok(self) -> bool:
        return self.error <= _TOLERANCE


@dataclass(frozen=True)
class Diagnosis:
    """What ``doctor`` found. facts: name and value of each thing worth a line in a bug report."""

    facts: dict[str, str]
    parity: tuple[Parity, ...]

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.parity)

    def as_dict(self) -> dict[str, Any]:
        checks = [asdict(check) | {"ok": check.ok} for check in self.parity]
        return {"ok": self.ok, "facts": self.facts, "parity": checks}

    def __str__(self) -> str:
        width = max(map(len, self.facts))
        lines = [f"{name:{width}}  {value}" for name, value in self.facts.items()]
        lines.append(f"\nkernels against the oracle, largest error of sum|w x| (tolerance {_TOLERANCE:g})")
        for device in dict.fromkeys(check.device for check in self.parity):
            for fmt in PACKED_FORMATS:
                checks = [check for check in self.parity if (check.device, check.fmt) == (device, fmt.name)]
                cells = [
                    f"{check.activations} {check.error:.1e}{'' if check.ok else ' WRONG'}" for check in checks
                ]
                lines.append(f"  {device:5} {fmt.name:5} {'   '.join(cells)}")
        lines.append(
            "all right" if self.ok else "some kernels are WRONG on this machine; please report this page"
        )
        return "\n".join(lines)


def run(args: argparse.Namespace) -> int:
    """The verb: prints the diagnosis; returns 1 if a kernel is wrong."""
    diagnosis = doctor()
    print(json.dumps(diagnosis.as_dict()) if args.json else diagnosis)
    return 0 if diagnosis.ok else EXIT_PROBLEMS


def doctor() -> Diagnosis:
    """Looks at this machine and runs every packed format, in both numerics, on every device there is."""
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    checks = [
        Parity(device, fmt.name, activations, _largest_error(fmt, activations, torch.device(device)))
        for device in devices
        for fmt in PACKED_FORMATS
        for activations in ("float", "int8")
    ]
    return Diagnosis(_facts(), tuple(checks))


def _facts() -> dict[str, str]:
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


def _largest_error(fmt: BlockFormat, activations: str, device: torch.device) -> float:
    weight = random_blocks(fmt, _ROWS, _COLUMNS)
    decoded = reference.dequantize(weight, fmt, _COLUMNS).double()
    generator = torch.Generator().manual_seed(1)
    largest = 0.0
    for batch in _BATCHES:
        x = torch.randn(batch, _COLUMNS, generator=generator)
        exact = x.double()
        if activations == "int8":
            quantized = reference.quantize_activations(x, fmt, device)
            exact = (
                quantized.q.double().unflatten(-1, (-1, reference.ACTIVATION_BLOCK))
                * quantized.scale.double()[..., None]
            ).flatten(-2)
        found = ops.linear(x.to(device), weight.to(device), fmt.name, _COLUMNS, activations=activations)
        error = (found.cpu().double() - exact @ decoded.T).abs() / (exact.abs() @ decoded.abs().T)
        largest = max(largest, float(error.nan_to_num(torch.inf).max()))
    return largest


def random_blocks(fmt: BlockFormat, rows: int, columns: int) -> torch.Tensor:
    """Random bytes, uint8 [rows, row_bytes], except that scales are finite numbers from 2^-9 to 2^-5."""
    generator = torch.Generator().manual_seed(fmt.ggml_type)
    count = rows * fmt.blocks(columns)
    blocks = torch.randint(0, 256, (count, fmt.block_bytes), dtype=torch.uint8, generator=generator)
    for field in fmt.fields:
        if field.kind == "f16":
            scales = torch.exp2(4 * torch.rand(count, field.count, generator=generator) - 9).half()
            start = fmt.offset(field.name)
            blocks[:, start : start + field.nbytes] = scales.view(torch.uint8)
    return blocks.view(rows, fmt.row_bytes(columns))
