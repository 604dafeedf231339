"""The verb ``quantize``: a dense model in, a directory with packed weights out."""

import argparse
import sys
from typing import Any

import torch

from realizar_torch.cli.session import locate_model
from realizar_torch.cli.streams import print_json
from realizar_torch.generation.causal_lm import CausalLM
from realizar_torch.models.encoding import EncodedSource
from realizar_torch.models.file_kinds import check_is_model
from realizar_torch.models.loading import load_transformer
from realizar_torch.models.saved_format import Origin
from realizar_torch.models.saving import check_target, save
from realizar_torch.models.sources import open_source

_MIB = 1 << 20


def quantize(args: argparse.Namespace) -> int:
    """Encodes the dense matrices of ``source`` and saves the model; prints sizes before and after.

    What is not encoded keeps the type it has, so that no tensor grows.
    """
    check_target(args.directory)
    path = locate_model(args.source)
    before = open_source(path)
    check_is_model(before)
    shown = None if args.json or not sys.stderr.isatty() else _show_progress
    source = EncodedSource(before, args.format)
    cpu = torch.device("cpu")
    model = load_transformer(
        source, device=cpu, dtype=None, activations="float", model_class=CausalLM, progress=shown
    )
    assert isinstance(model, CausalLM)
    model.origin = Origin.of(source)
    save(model, args.directory, max_shard_size=args.max_shard_size)
    after = open_source(args.directory)
    if args.json:
        print_json(_record(path, args, before, after))
        return 0
    sizes = {name: sum(info.nbytes for info in s.tensors.values()) for name, s in _both(before, after)}
    for name, source in _both(before, after):
        formats = ", ".join(f"{count} {fmt}" for fmt, count in _formats(source).items())
        print(f"{name:6}  {sizes[name] / _MIB:10.2f} MiB  tensors: {formats}")
    print(f"saved to {args.directory}, {sizes['after'] / sizes['before']:.1%} of the size")
    return 0


def _show_progress(done: int, count: int) -> None:
    print(f"\rlayer {done} of {count}", end="\n" if done == count else "", file=sys.stderr, flush=True)


def _both(before: Any, after: Any) -> tuple[tuple[str, Any], ...]:
    return ("before", before), ("after", after)


def _formats(source: Any) -> dict[str, int]:
    """Format -> number of tensors, the most frequent first."""
    counts: dict[str, int] = {}
    for info in source.tensors.values():
        counts[info.fmt.name] = counts.get(info.fmt.name, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def _record(path: Any, args: argparse.Namespace, before: Any, after: Any) -> dict[str, Any]:
    return {
        "source": str(path),
        "directory": str(args.directory),
        "format": args.format,
        **{f"bytes_{k}": sum(info.nbytes for info in s.tensors.values()) for k, s in _both(before, after)},
        "files": [shard.name for shard in after.shards],
        "tensors": [
            {
                "name": name,
                "format_before": before.tensors[name].fmt.name if name in before.tensors else None,
                "format": info.fmt.name,
                "shape": list(info.shape),
                "bytes": info.nbytes,
            }
            for name, info in after.tensors.items()
        ],
    }
