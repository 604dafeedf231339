"""The verbs ``info`` and ``check``: what a file holds, and everything that would keep it from loading."""

import argparse
from pathlib import Path
from typing import Any

from realizar_torch.checkpoint.gguf import GGUFFile
from realizar_torch.checkpoint.source import ModelSource
from realizar_torch.cli.session import EXIT_PROBLEMS, locate_model
from realizar_torch.cli.streams import print_json
from realizar_torch.errors import RealizarError
from realizar_torch.generation.causal_lm import DEFAULT_MAX_SEQ_LEN
from realizar_torch.generation.text import encode_prompt
from realizar_torch.models.config import ModelConfig
from realizar_torch.models.file_kinds import check_is_model
from realizar_torch.models.sources import models_under, open_source, open_tokenizer
from realizar_torch.models.stacked_experts import StackedExperts
from realizar_torch.models.tensors import LONG_DIVISORS, tensor_problems

_LONGEST_VALUE = 100
# a chat template is shown by --json, a whole tokenizer.json is not
_LONGEST_TEXT = 100_000
_MIB = 1 << 20
# the smallest window that released models of such architectures have (Mistral 7B v0.1, StarCoder2)
_SMALLEST_HIDDEN_WINDOW = 4096
# what any chat template takes: some know no system message
_CONVERSATION = [
    {"role": role, "content": text}
    for role, text in (("user", "Hello"), ("assistant", "Hello. What is it?"), ("user", "A question."))
]


def info(args: argparse.Namespace) -> int:
    """Prints metadata, tensors by format and memory."""
    file = open_source(locate_model(args.model))
    record = describe(file)
    if args.json:
        print_json(record)
        return 0
    print(
        f"{file.path}: {record['architecture']}, {record['parameters'] / 1e6:.2f} M parameters, "
        f"{record['file_bytes'] / _MIB:.2f} MiB in {len(file.shards)} file(s)"
    )
    print("\nmetadata")
    width = max(map(len, record["metadata"]), default=0)
    for key, value in record["metadata"].items():
        print(f"  {key:{width}}  {_shown(value)}")
    print("\ntensors by format")
    print("  format   tensors    parameters         MiB   bits/weight")
    for row in record["formats"]:
        print(
            f"  {row['format']:7}  {row['tensors']:7}  {row['parameters']:12}  {row['bytes'] / _MIB:10.2f}"
            f"   {row['bits_per_weight']:11.2f}"
        )
    print("\nmemory")
    print(f"  weights  {record['memory']['weights'] / _MIB:10.2f} MiB")
    if record["memory"]["kv_cache"] is not None:
        positions = record["memory"]["kv_cache_positions"]
        print(f"  KV cache {record['memory']['kv_cache'] / _MIB:10.2f} MiB for {positions} positions in fp32")
    return 0


def describe(file: ModelSource) -> dict[str, Any]:
    """All that ``info`` tells, as JSON-ready values; arrays and long texts in the metadata by length."""
    formats: dict[str, dict[str, Any]] = {}
    for tensor in file.tensors.values():
        row = formats.setdefault(
            tensor.fmt.name,
            {
                "format": tensor.fmt.name,
                "tensors": 0,
                "parameters": 0,
                "bytes": 0,
                "bits_per_weight": tensor.fmt.bits_per_weight,
            },
        )
        row["tensors"] += 1
        row["parameters"] += _count(tensor.shape)
        row["bytes"] += tensor.nbytes
    return {
        "file": str(file.path),
        "file_bytes": sum(shard.stat().st_size for shard in file.shards),
        "shards": len(file.shards),
        "architecture": file.metadata.get("general.architecture"),
        "parameters": sum(row["parameters"] for row in formats.values()),
        "metadata": {key: _summarized(value) for key, value in file.metadata.items()},
        "formats": sorted(formats.values(), key=lambda row: -row["bytes"]),
        "tensors": [
            {"name": name, "format": tensor.fmt.name, "shape": list(tensor.shape), "bytes": tensor.nbytes}
            for name, tensor in file.tensors.items()
        ],
        "memory": _memory(file),
    }


def check(args: argparse.Namespace) -> int:
    """Tells whether the model, or each in a directory of models, would load; returns 1 when one would not.

    With --json, one object a line for each.
    """
    code = 0
    for path in models_under(locate_model(args.model)):
        problems = find_problems(path)
        notes = [] if problems else find_notes(path)
        code = code or (EXIT_PROBLEMS if problems else 0)
        if args.json:
            record = {"file": str(path), "loads": not problems, "problems": problems, "notes": notes}
            print_json(record)
        else:
            print(f"{path} would not load:" if problems else f"{path} would load")
            for problem in problems:
                print(f"  - {problem}")
            for note in notes:
                print(f"  note: {note}")
    return code


def find_problems(path: Path) -> list[str]:
    """One line for each thing that keeps the model or its tokenizer from loading."""
    try:
        source = open_source(path)
        check_is_model(source)
    except RealizarError as error:
        return [str(error)]
    problems = []
    try:
        problems += tensor_problems(source.tensors, ModelConfig.from_gguf(source.metadata, str(path)))
    except RealizarError as error:
        problems.append(str(error))
    try:
        open_tokenizer(source)
    except RealizarError as error:
        problems.append(str(error))
    return problems


def find_notes(path: Path) -> list[str]:
    """What a user should know of a model that loads."""
    source = open_source(path)
    config = ModelConfig.from_gguf(source.metadata, str(path))
    arch, notes = config.arch.name, []
    told = config.sliding_window is not None or not isinstance(source, GGUFFile | StackedExperts)
    if config.arch.hidden_window and not told and config.context_length > _SMALLEST_HIDDEN_WINDOW:
        notes.append(
            f"some {arch} models have a sliding window, which GGUF files do not tell; if this one's "
            f'config.json does, load it with config={{"{arch}.attention.sliding_window": N}}'
        )
    if LONG_DIVISORS in source.tensors:
        length = config.rope_scaling.original_length
        notes.append(f"LongRoPE: loaded with max_seq_len above {length} it uses the factors of long texts")
    tokenizer = open_tokenizer(source)
    if tokenizer.chat_template is not None:
        try:
            encode_prompt(tokenizer, _CONVERSATION)
        except RealizarError as error:
            notes.append(f"no chat with it ({error}); continue texts, or set tokenizer.chat_template")
    return notes


def _memory(file: ModelSource) -> dict[str, int | None]:
    """Bytes that loading needs on the CPU: weights as they are, keys and values in fp32."""
    memory: dict[str, int | None] = {"weights": sum(tensor.nbytes for tensor in file.tensors.values())}
    try:
        config = ModelConfig.from_gguf(file.metadata, str(file.path))
    except RealizarError:
        return memory | {"kv_cache": None, "kv_cache_positions": None}
    positions = min(config.context_length, DEFAULT_MAX_SEQ_LEN)
    per_position = 2 * config.num_layers * config.kv_dim * 4
    return memory | {"kv_cache": positions * per_position, "kv_cache_positions": positions}


def _count(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def _summarized(value: Any) -> Any:
    if isinstance(value, str) and len(value) > _LONGEST_TEXT:
        return {"text_of": len(value)}
    return value if isinstance(value, str | int | float | bool) else {"array_of": len(value)}


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return f"[{value['array_of']} items]" if "array_of" in value else f"[{value['text_of']} characters]"
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 1] + "…"
