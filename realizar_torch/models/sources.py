"""Opening a model, whatever it is stored as: GGUF, a directory of rt.save, a Hugging Face directory."""

import os
from pathlib import Path
from typing import Any

from realizar_torch.checkpoint.gguf import open_gguf
from realizar_torch.checkpoint.gguf_errors import damaged, shown_path
from realizar_torch.checkpoint.hub import group_shards
from realizar_torch.checkpoint.paths import given_path
from realizar_torch.checkpoint.safetensors_files import INDEX_FILE, SINGLE_FILE
from realizar_torch.checkpoint.source import ModelSource
from realizar_torch.checkpoint.tokenizer_json import tokenizer_metadata, tokenizer_of
from realizar_torch.errors import CheckpointError, FormatError, GGUFError
from realizar_torch.models.hf_directory import CONFIG_FILE as HF_CONFIG
from realizar_torch.models.hf_directory import HFDirectory
from realizar_torch.models.saved_directory import SavedDirectory
from realizar_torch.models.saved_format import CONFIG_FILE as SAVED_CONFIG
from realizar_torch.models.stacked_experts import with_stacked_experts

_TOKENIZER_JSON = "tokenizer.json"


def open_source(path: str | os.PathLike[str]) -> ModelSource:
    """The model at ``path``, its headers read and checked, its weights not.

    A directory is what its config says: ``realizar.json`` (rt.save), ``config.json`` with safetensors
    (Hugging Face), else it must hold one GGUF model. Raises what the reader of each raises, and
    CheckpointError for safetensors without either config.
    """
    directory = Path(path)
    if directory.name in (SINGLE_FILE, INDEX_FILE):
        raise CheckpointError(f"{shown_path(directory)} is a part of a model: give the directory it is in")
    if (directory / SAVED_CONFIG).is_file():
        return SavedDirectory(directory)
    if is_directory_model(directory):
        return HFDirectory(directory)
    if any(directory.glob("*.safetensors")) and not any(directory.glob("*.gguf")):
        found = f"safetensors, but neither {HF_CONFIG} nor {SAVED_CONFIG}"
        expected = f"{HF_CONFIG} (Hugging Face) or {SAVED_CONFIG} (rt.save) beside them"
        raise damaged(shown_path(directory), "directory", found, expected, "Fetch all files of the model.")
    return with_stacked_experts(open_gguf(directory))


def is_directory_model(directory: Path) -> bool:
    """True for a directory that is a model itself and does not just hold GGUF files."""
    if (directory / SAVED_CONFIG).is_file():
        return True
    return (directory / HF_CONFIG).is_file() and not any(directory.glob("*.gguf"))


def models_under(path: Path) -> list[Path]:
    """Every model in a directory, at any depth; the path alone if it is none.

    GGUFError where there is none.
    """
    if not path.is_dir() or is_directory_model(path):
        return [path]
    names = [file.relative_to(path).as_posix() for file in path.rglob("*.gguf")]
    models = [path / shards[0] for shards in group_shards(names).values()]
    models += [config.parent for config in path.rglob("*.json") if is_directory_model(config.parent)]
    if not models:
        raise GGUFError(
            f"{shown_path(path)} holds no model: no GGUF file, and no {HF_CONFIG} or {SAVED_CONFIG}"
        )
    return sorted(set(models))


def open_tokenizer(source: ModelSource | str | os.PathLike[str] | Any, vocab_size: int = 0) -> Any:
    """The tokenizer of an open model, of the model or tokenizer.json at a path, or a Tokenizer as it is.

    vocab_size: of the model that it is for, as in ``tokenizer_of``.
    """
    if all(hasattr(source, name) for name in ("encode", "decode", "detokenizer", "eos_token_ids")):
        return source
    if isinstance(source, str | os.PathLike):
        path = given_path(source)
        directory = path.parent if path.name == _TOKENIZER_JSON else path
        if (directory / _TOKENIZER_JSON).is_file():
            return tokenizer_of(tokenizer_metadata(directory), shown_path(directory), vocab_size)
        source = open_source(path)
    if not hasattr(source, "metadata"):
        raise FormatError(f"tokenizer is {source!r:.80}; expected a path or a Tokenizer")
    return tokenizer_of(source.metadata, shown_path(source.path), vocab_size)
