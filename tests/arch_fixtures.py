"""Loads the files of tests/fixtures and the logits that transformers computes for them."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fixture_models import VOCAB, WINDOW
from gguf_files import plain, write_gguf
from tiny_models import weight

from realizar_torch import reference
from realizar_torch.checkpoint.gguf import open_gguf
from realizar_torch.checkpoint.source import ModelSource, SourceView
from realizar_torch.formats import get_format
from realizar_torch.models.config import ModelConfig
from realizar_torch.models.loading import load_transformer
from realizar_torch.models.tensors import expected_shapes
from realizar_torch.models.transformer import Transformer

FIXTURES = Path(__file__).parent / "fixtures"
# fp32 on both sides; logits are of size 10, sums of up to 190 terms in other orders
TOLERANCE = 2e-4
# what a file does not tell, so that its reader must
UNTOLD: dict[str, dict[str, Any]] = {"mistral": {"llama.attention.sliding_window": WINDOW}}


def load(name: str, metadata: Mapping[str, Any] | None = None, **options: Any) -> Transformer:
    """The fixture's model in fp32; ``metadata`` replaces keys, or removes those that are None."""
    source = _Edited(open_gguf(FIXTURES / f"{name}.gguf"), UNTOLD.get(name, {}) | dict(metadata or {}))
    choice = {"device": torch.device("cpu"), "dtype": torch.float32, "activations": "float"}
    return load_transformer(source, **choice | options)


class _Edited(SourceView):
    def __init__(self, source: ModelSource, changes: Mapping[str, Any]) -> None:
        super().__init__(source)
        self._changes = changes

    @property
    def metadata(self) -> Mapping[str, Any]:
        keys = {**self._source.metadata, **self._changes}
        return {key: value for key, value in keys.items() if value is not None}


def golden(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A prompt, int64 [1, T], and transformers' logits for it, fp32 [1, T, V]."""
    with np.load(FIXTURES / f"{name}.npz") as arrays:
        return torch.from_numpy(arrays["ids"]), torch.from_numpy(arrays["logits"])


def golden_short(name: str) -> torch.Tensor:
    """Logits of a text that ends before LongRoPE's long frequencies begin."""
    with np.load(FIXTURES / f"{name}.npz") as arrays:
        return torch.from_numpy(arrays["short"])


def deviation(model: Transformer, name: str) -> torch.Tensor:
    """Largest difference from transformers' logits at each position, [T]."""
    ids, expected = golden(name)
    with torch.inference_mode():
        return (model(ids).logits - expected).abs().amax(-1)[0]


def write_resized(folder: Path, name: str, fmt: str) -> tuple[Path, Path]:
    """A random model of one layer in the fixture's architecture, packed, and the dense one of its values.

    Hidden, inner and q sizes are 96, or 768 for blocks of 256, so that every row is whole blocks.
    """
    file = open_gguf(FIXTURES / f"{name}.gguf")
    width, head_dim = (96, 16) if get_format(fmt).block_size == 32 else (768, 128)
    keys = _resized(file.metadata, file.arch, width, head_dim)
    required, _ = expected_shapes(ModelConfig.from_gguf(keys), file.tensors)
    packed, dense = {}, {}
    for seed, (tensor, shape) in enumerate(required.items()):
        if len(shape) == 1 or "_norm" in tensor:
            values = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.5
            packed[tensor] = dense[tensor] = plain(values)
            continue
        *rows, columns = shape
        blocks = weight(fmt, math.prod(rows), columns, seed)[2]
        packed[tensor] = (fmt, shape, blocks)
        values = torch.frombuffer(bytearray(blocks), dtype=torch.uint8).view(math.prod(rows), -1)
        dense[tensor] = plain(reference.dequantize(values, fmt).view(shape))
    return (
        write_gguf(folder / f"{name}-{fmt}.gguf", keys, packed),
        write_gguf(folder / f"{name}-dense.gguf", keys, dense),
    )


def _resized(metadata: Mapping[str, Any], arch: str, width: int, head_dim: int) -> dict[str, Any]:
    heads = width // head_dim
    kv_heads = 1 if metadata.get(f"{arch}.attention.head_count_kv") == 1 else heads // 3
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "embedding_length": width,
        "feed_forward_length": width,
        "block_count": 1,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
    }
    if f"{arch}.rope.dimension_count" in metadata:
        full = metadata[f"{arch}.rope.dimension_count"] == metadata.get(f"{arch}.attention.key_length", 8)
        sizes["rope.dimension_count"] = head_dim if full else head_dim // 2
    if f"{arch}.attention.sliding_window_pattern" in metadata:
        sizes["attention.sliding_window_pattern"] = [True]
    for key in ("expert_feed_forward_length", "expert_shared_feed_forward_length"):
        if f"{arch}.{key}" in metadata:
            sizes[key] = width
    kept = {key: value for key, value in metadata.items() if key.startswith((f"{arch}.", "general.arch"))}
    return kept | {f"{arch}.{key}": value for key, value in sizes.items()}
