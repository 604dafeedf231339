"""A Hugging Face model directory presented as a GGUF file: the same names, shapes, values and metadata.

What llama.cpp's converter would write is computed tensor by tensor when it is read, so that everything above
this file knows one convention only.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from realizar_torch.checkpoint.gguf import TensorInfo
from realizar_torch.checkpoint.gguf_errors import damaged, shown, shown_path
from realizar_torch.checkpoint.json_files import read_json
from realizar_torch.checkpoint.mapped import stored_bytes
from realizar_torch.checkpoint.safetensors_files import SafetensorsFiles
from realizar_torch.checkpoint.tokenizer_json import tokenizer_metadata
from realizar_torch.errors import MissingTensorsError
from realizar_torch.formats import get_format
from realizar_torch.models.arch import get_arch
from realizar_torch.models.hf_config import find_hf_model, gguf_metadata, text_config
from realizar_torch.models.hf_rope import rope_divisors

CONFIG_FILE = "config.json"
# Buffers that checkpoints of some years hold and that every loader computes anew.
_BUFFERS = re.compile(r"rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$|\.attention\.(masked_)?bias$")
# Of a model that also sees or hears only the language part is loaded, as llama.cpp's converter does.
_OTHER_SENSES = re.compile(
    r"(model\.)?(vision_tower|vision_model|visual|multi_modal_projector|audio_tower)\."
)
_LANGUAGE_PREFIX = re.compile(r"(?<![^.])language_model\.")
# One norm for each head, one matrix for each expert, which GGUF stacks.
_NUMBERED = re.compile(r"(?:\.norms|(?<=\.experts))\.(?P<number>\d+)(?=\.)")
_FORMATS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_MAX_NAMES_SHOWN = 8


@dataclass(frozen=True)
class _Recipe:
    """How one GGUF tensor comes from stored ones."""

    parts: tuple[str, ...]
    convert: Callable[..., Tensor]


class HFDirectory:
    """``config.json``, ``model*.safetensors`` and ``tokenizer.json``, with the attributes of GGUFFile.

    Raises before any weight is read: CheckpointError for damaged or contradictory files, MissingTensorsError
    for tensors nobody would read, IncompleteShardsError, UnsupportedArchitectureError.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory
        source = shown_path(directory / CONFIG_FILE)
        config = text_config(read_json(directory / CONFIG_FILE))
        metadata = gguf_metadata(config, source) | tokenizer_metadata(directory)
        self.metadata: Mapping[str, Any] = MappingProxyType(metadata)
        self._files = SafetensorsFiles(directory)
        self.shards = self._files.paths
        self._recipes = _recipes(self._files, config, metadata, source)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(
            {name: self._describe(name, recipe) for name, recipe in self._recipes.items()}
        )

    @property
    def arch(self) -> str:
        """``general.architecture``."""
        return self.metadata["general.architecture"]

    def read(self, name: str) -> Tensor:
        """The tensor ``name`` in GGUF's form: a view of the file where it has that form, else a copy."""
        recipe = self._recipes[name]
        return recipe.convert(*map(self._files.read, recipe.parts)).contiguous()

    def release(self, name: str) -> None:
        """Gives back the memory of the stored tensors behind ``name``, once they are no longer used."""
        for part in self._recipes[name].parts:
            self._files.release(part)

    def _describe(self, name: str, recipe: _Recipe) -> TensorInfo:
        stored = [self._files.tensors[part] for part in recipe.parts]
        for tensor in stored:
            if tensor.dtype not in _FORMATS.values():
                raise damaged(
                    shown_path(self.shards[tensor.shard]),
                    f"tensor {shown(tensor.name)}",
                    f"dtype {tensor.dtype}",
                    f"one of {', '.join(_FORMATS.values())}",
                    "Take the model in one of these types.",
                )
        dtypes = {word: dtype for dtype, word in _FORMATS.items()}
        empty = [torch.empty(tensor.shape, dtype=dtypes[tensor.dtype], device="meta") for tensor in stored]
        try:
            result = recipe.convert(*empty)
        except (RuntimeError, ValueError) as error:
            found = f"shapes {[list(tensor.shape) for tensor in stored]}"
            where = f"tensor {shown(stored[0].name)}"
            expected = f"shapes that {shown_path(self.path / CONFIG_FILE)} implies"
            raise damaged(shown_path(self.path), where, found, expected) from error
        fmt, shape = get_format(_FORMATS[result.dtype]), tuple(result.shape)
        offset, shard = (stored[0].offset, stored[0].shard) if stored else (0, 0)
        return TensorInfo(name, fmt, shape, offset, stored_bytes(fmt, shape), shard)

    def __repr__(self) -> str:
        return f"HFDirectory({str(self.path)!r}, arch={self.arch!r}, tensors={len(self.tensors)})"


def _recipes(
    files: SafetensorsFiles, config: Mapping[str, Any], metadata: Mapping[str, Any], source: str
) -> dict[str, _Recipe]:
    """GGUF name -> recipe, for every stored tensor and the ones a converter would add."""
    model = find_hf_model(config, source)
    layers, partial = metadata[f"{model.arch}.block_count"], "text_config" in config
    names = _gguf_names(files, model.arch, layers, partial)
    _settle_head(names, files, config.get("tie_word_embeddings", model.tied), source)
    heads = metadata[f"{model.arch}.attention.head_count"]
    kv_heads = metadata.get(f"{model.arch}.attention.head_count_kv", heads)
    recipes = {}
    for name, parts in names.items():
        stem = name.rsplit(".", 1)[0].rsplit(".", 1)[-1]
        convert: Callable[..., Tensor] = _same if len(parts) == 1 else _stack
        if model.permuted_qk and stem in ("attn_q", "attn_k"):
            convert = _Interleave(heads if stem == "attn_q" else kv_heads)
        elif model.norm_offset and stem.endswith("norm"):
            convert = _Add(model.norm_offset)
        elif stem in model.transposed and name.endswith(".weight"):
            convert = torch.t
        elif model.grouped_qkv and stem == "attn_qkv":
            convert = _SortQKV(kv_heads, heads // kv_heads)
        recipes[name] = _Recipe(parts, convert)
    rotary_dim = metadata.get(f"{model.arch}.rope.dimension_count", 0)
    for name, divisors in rope_divisors(model.complete(config), rotary_dim, source).items():
        recipes[name] = _Recipe((), _Constant(divisors))
    return recipes


def _gguf_names(files: SafetensorsFiles, arch: str, layers: int, partial: bool) -> dict[str, tuple[str, ...]]:
    """GGUF name -> stored names, several where GGUF stacks numbered tensors.

    partial: the language model is a part of what is stored. MissingTensorsError for names that GGUF has no
    word for.
    """
    import gguf

    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    if layers > len(files.tensors):
        raise MissingTensorsError(
            f"{shown_path(files.paths[0])}: {len(files.tensors)} tensors cannot make up {layers} layers"
        )
    tables = [gguf.get_tensor_name_map(numbers[arch], layers)]
    if get_arch(arch).experts is not None:
        # the table of a mixture of experts leaves out the MLPs of dense layers
        tables.append(gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers))
    names: dict[str, dict[int, str]] = {}
    unknown = []
    for stored in files.tensors:
        if _BUFFERS.search(stored) or (partial and _OTHER_SENSES.match(stored)):
            continue
        numbered = _NUMBERED.search(stored)
        plain = _NUMBERED.sub("", _LANGUAGE_PREFIX.sub("", stored) if partial else stored)
        found = (table.get_name(plain, try_suffixes=(".weight", ".bias")) for table in tables)
        name = next(filter(None, found), None)
        parts = names.setdefault(name or "", {})
        number = int(numbered["number"]) if numbered else 0
        if name is None or number in parts:
            unknown.append(shown(stored))
        else:
            parts[number] = stored
    names.pop("", None)
    if unknown:
        more = f" and {len(unknown) - _MAX_NAMES_SHOWN} more" if len(unknown) > _MAX_NAMES_SHOWN else ""
        raise MissingTensorsError(
            f"{shown_path(files.paths[0])}: nobody would read {', '.join(unknown[:_MAX_NAMES_SHOWN])}{more}; "
            f"they do not belong to a {arch} model of {layers} layers"
        )
    return {name: tuple(parts[number] for number in sorted(parts)) for name, parts in names.items()}


def _settle_head(names: dict[str, tuple[str, ...]], files: SafetensorsFiles, tied: bool, source: str) -> None:
    """A head that is stored counts, as in transformers; a copy of the embedding is left out."""
    embedding, head = names.get("token_embd.weight"), names.get("output.weight")
    if head is None and not tied:
        raise MissingTensorsError(
            f"{source} says tie_word_embeddings is false, but no output head is stored; "
            "set it to true if the head is the embedding"
        )
    if tied and head and embedding and _equal(files, *head, *embedding):
        del names["output.weight"]


def _equal(files: SafetensorsFiles, *names: str) -> bool:
    first, second = (files.tensors[name] for name in names)
    if first.dtype not in _FORMATS.values() or (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    return torch.equal(*map(files.read, names))


def _same(stored: Tensor) -> Tensor:
    return stored


def _stack(*stored: Tensor) -> Tensor:
    return torch.stack(stored)


@dataclass(frozen=True)
class _Interleave:
    """Row 2i+h of each head is row h·(D/2)+i of transformers (the converter's ``permute``)."""

    heads: int

    def __call__(self, stored: Tensor) -> Tensor:
        halves = stored.reshape(self.heads, 2, stored.shape[0] // self.heads // 2, *stored.shape[1:])
        return halves.transpose(1, 2).reshape(stored.shape)


@dataclass(frozen=True)
class _Add:
    """In float32, as bfloat16 would round a small weight away."""

    offset: float

    def __call__(self, stored: Tensor) -> Tensor:
        return stored.float() + self.offset


@dataclass(frozen=True)
class _SortQKV:
    """Rows stored as [key head, (its queries, k, v), D] to all of q, then k, then v."""

    kv_heads: int
    queries: int

    def __call__(self, stored: Tensor) -> Tensor:
        rows = stored.reshape(self.kv_heads, self.queries + 2, -1, *stored.shape[1:])
        parts = rows[:, :-2], rows[:, -2:-1], rows[:, -1:]
        return torch.cat([part.flatten(0, 2) for part in parts])


@dataclass(frozen=True)
class _Constant:
    values: list[float]

    def __call__(self) -> Tensor:
        return torch.tensor(self.values, dtype=torch.float32)
