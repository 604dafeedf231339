"""doctor: back ends, versions, threads, and a check of the kernels against the oracle on this machine."""

import argparse
import itertools
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from realizar_torch.checkpoint.hub import find_model
from realizar_torch.checkpoint.source import ModelSource
from realizar_torch.cli.session import EXIT_PROBLEMS
from realizar_torch.cli.streams import print_json
from realizar_torch.diagnosis.facts import machine_facts
from realizar_torch.diagnosis.op_checks import check_ops
from realizar_torch.diagnosis.parity import Parity
from realizar_torch.diagnosis.shapes import Shapes, shapes_of, small_shapes
from realizar_torch.diagnosis.step_check import check_step
from realizar_torch.models.sources import open_source
from realizar_torch.ops import cuda


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
        lines.append(
            "\nkernels against float64: number of vectors, largest error as a share of the tolerance"
        )
        names = [(c.device, c.kernel, c.fmt, c.shape) for c in self.parity]
        widths = [max(map(len, column)) for column in zip(*names, strict=True)]
        for name, group in itertools.groupby(self.parity, lambda c: (c.device, c.kernel, c.fmt, c.shape)):
            cells = (f"{c.batch:2}: {c.error:.0e}{'' if c.ok else ' WRONG'}" for c in group)
            row = (f"{text:{width}}" for text, width in zip(name, widths, strict=True))
            lines.append(f"  {'  '.join(row)}  {'  '.join(cells)}")
        lines.append(
            "all right" if self.ok else "some kernels are WRONG on this machine; please report this page"
        )
        return "\n".join(lines)


def run(args: argparse.Namespace) -> int:
    """The verb: prints the diagnosis; returns 1 if a kernel is wrong."""
    source = _opened(args.model)
    print("Checking kernels (up to minutes on a first run, which compiles them)", file=sys.stderr, flush=True)
    diagnosis = _diagnosis(args.model, source)
    if args.json:
        print_json(diagnosis.as_dict())
    else:
        print(diagnosis)
    return 0 if diagnosis.ok else EXIT_PROBLEMS


def doctor(model: str | os.PathLike[str] | None = None) -> Diagnosis:
    """Looks at this machine and checks its kernels on random weights, on every device there is.

    model: what ``rt.load`` takes; of its file only the header is read. Then every matrix product, fused
    kernel, choice of a token, and step of that model is checked in its own formats and widths, with at most
    1,024 rows of a weight; else the matrix products of every format in a small size. Raises what ``rt.load``
    would raise for the file.
    """
    return _diagnosis(model, _opened(model))


def _opened(model: str | os.PathLike[str] | None) -> ModelSource | None:
    return None if model is None else open_source(find_model(os.fspath(model)))


def _diagnosis(model: str | os.PathLike[str] | None, source: ModelSource | None) -> Diagnosis:
    shapes = small_shapes() if source is None else shapes_of(source)
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    checks = [check for name in devices for check in _checks(source, shapes, torch.device(name))]
    facts = machine_facts()
    if model is not None:
        facts["model"] = str(model)
    return Diagnosis(facts, tuple(checks))


def _checks(source: ModelSource | None, shapes: Shapes, device: torch.device) -> Iterator[Parity]:
    yield from check_ops(shapes, device)
    if source is None or shapes.config is None:
        return
    if device.type == "cuda" and cuda.problem() is None:
        from realizar_torch.diagnosis.attention_checks import check_attention
        from realizar_torch.diagnosis.choice_checks import check_choices
        from realizar_torch.diagnosis.prompt_checks import check_prompts
        from realizar_torch.diagnosis.triton_checks import check_kernels

        dtypes = [torch.float32, torch.bfloat16, torch.int8]
        if torch.cuda.get_device_capability(device) >= (8, 9):
            dtypes.append(torch.float8_e4m3fn)
        yield from check_kernels(shapes, device)
        yield from check_attention(shapes.config, device, dtypes)
        yield from check_prompts(shapes.config, device, dtypes)
        yield from check_choices(shapes.config.vocab_size, device)
    yield from check_step(source, device)
