"""CausalLM: a Transformer that generates, and load(), which makes one from a file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from realizar_torch.checkpoint.gguf import open_gguf
from realizar_torch.checkpoint.hub import find_model
from realizar_torch.errors import FormatError
from realizar_torch.generation.loop import generate_ids
from realizar_torch.models.loading import load_transformer
from realizar_torch.models.transformer import Transformer

DEFAULT_MAX_SEQ_LEN = 4096


class CausalLM(Transformer):
    """What ``rt.load`` returns.

    max_seq_len: positions a request may use, prompt included. eos_token_ids: ids that end a sequence unless
    the caller names others. pad_token_id: fills rows that end early.
    """

    max_seq_len: int
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    generate = generate_ids


def load(
    path: str | Path,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str = "auto",
    max_seq_len: int | None = None,
    activations: str = "int8",
    progress: Callable[[int, int], None] | None = None,
) -> tuple[CausalLM, Any]:
    """(model, tokenizer) of a GGUF file, of any shard of a split one, or of a directory that holds one.

    device: None is the CPU. dtype: of activations, norms and KV cache; "auto" is float32. max_seq_len:
    positions a request may use; None is min(the file's context length, 4096). activations: "int8" or "float",
    the numerics of packed linears. progress: called with (layers loaded, layers in all).

    GGUFError, UnsupportedArchitectureError, MissingTensorsError and IncompleteShardsError say what is wrong
    with the file before any weight is read.
    """
    from realizar_torch.checkpoint.tokenizer import Tokenizer

    if activations not in ("int8", "float"):
        raise FormatError(f"activations is {activations!r}, expected 'int8' or 'float'")
    if dtype == "auto":
        dtype = torch.float32
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise FormatError(f"dtype is {dtype!r}, expected 'auto' or a floating point torch.dtype")
    file = open_gguf(find_model(path))
    model = load_transformer(
        file,
        device=torch.device("cpu" if device is None else device),
        dtype=dtype,
        activations=activations,
        model_class=CausalLM,
        progress=progress,
    )
    assert isinstance(model, CausalLM)
    longest = model.config.context_length
    model.max_seq_len = min(longest, DEFAULT_MAX_SEQ_LEN) if max_seq_len is None else max_seq_len
    if not 1 <= model.max_seq_len <= longest:
        raise FormatError(f"max_seq_len is {max_seq_len}, but {path} was made for 1 to {longest} positions")
    tokenizer = Tokenizer.from_gguf(file.metadata)
    model.eos_token_ids, model.pad_token_id = tokenizer.eos_token_ids, tokenizer.pad_token_id
    return model, tokenizer
