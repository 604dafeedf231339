"""CausalLM: a Transformer that generates, and load(), which makes one from a file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from realizar_torch.checkpoint.gguf import open_gguf
from realizar_torch.checkpoint.gguf_errors import shown_path
from realizar_torch.checkpoint.hub import find_model
from realizar_torch.errors import BackendUnavailableError, FormatError
from realizar_torch.generation.gpu_state import GpuStates
from realizar_torch.generation.loop import generate_ids
from realizar_torch.models.config import ModelConfig
from realizar_torch.models.loading import load_transformer
from realizar_torch.models.transformer import Transformer
from realizar_torch.ops.checks import ACTIVATIONS, FLOATS, check_choice
from realizar_torch.surgery import prepack

DEFAULT_MAX_SEQ_LEN = 4096


class CausalLM(Transformer):
    """What ``rt.load`` returns.

    max_seq_len: positions a request may use, prompt included. eos_token_ids: ids that end a sequence unless
    the caller names others. pad_token_id: fills rows that end early.
    """

    def __init__(self, config: ModelConfig, *modules: Any, **options: Any):
        super().__init__(config, *modules, **options)
        self.max_seq_len = min(config.context_length, DEFAULT_MAX_SEQ_LEN)
        self.eos_token_ids: tuple[int, ...] = ()
        self.pad_token_id: int | None = None
        self.gpu_states = GpuStates()

    generate = generate_ids


def load(
    path_or_ref: str | Path,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str = "auto",
    max_seq_len: int | None = None,
    activations: str = "int8",
    progress: Callable[[int, int], None] | None = None,
) -> tuple[CausalLM, Any]:
    """(model, tokenizer) of a GGUF file, any shard of a split one, a directory that holds one, or
    ``owner/name:QUANT`` on the Hugging Face Hub.

    device: None is a GPU if torch sees one, else the CPU. dtype: of activations, norms and KV cache; "auto"
    is bfloat16 on a GPU and float32 elsewhere. max_seq_len: positions a request may use; None is min(the
    file's context length, 4096). activations: "int8" or "float", the numerics of packed linears. progress:
    called with (layers loaded, layers in all).

    GGUFError, UnsupportedArchitectureError, MissingTensorsError and IncompleteShardsError say what is wrong
    with the file, FormatError what is wrong with an argument, before any weight is read.
    """
    from realizar_torch.checkpoint.tokenizer import Tokenizer

    if not isinstance(path_or_ref, str | Path) or not str(path_or_ref):
        raise FormatError(f"path_or_ref is {path_or_ref!r}, expected a path or a Hub reference")
    check_choice("activations", activations, ACTIVATIONS)
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    target = _usable_device(device)
    if dtype == "auto":
        dtype = torch.bfloat16 if target.type == "cuda" else torch.float32
    if dtype not in FLOATS:
        raise FormatError(f"dtype is {dtype!r}, expected 'auto' or one of {', '.join(map(str, FLOATS))}")
    file = open_gguf(find_model(path_or_ref))
    config = ModelConfig.from_gguf(file.metadata, shown_path(file.path))
    longest = config.context_length
    if max_seq_len is not None and (type(max_seq_len) is not int or not 1 <= max_seq_len <= longest):
        raise FormatError(
            f"max_seq_len is {max_seq_len!r}, but the file was made for 1 to {longest} positions"
        )
    tokenizer = Tokenizer.from_gguf(file.metadata)
    positions = min(longest, DEFAULT_MAX_SEQ_LEN) if max_seq_len is None else max_seq_len
    model = load_transformer(
        file,
        device=target,
        dtype=dtype,
        activations=activations,
        max_seq_len=positions,
        model_class=CausalLM,
        progress=progress,
    )
    assert isinstance(model, CausalLM)
    prepack(model)
    model.max_seq_len = positions
    model.eos_token_ids, model.pad_token_id = tokenizer.eos_token_ids, tokenizer.pad_token_id
    return model, tokenizer


def _usable_device(device: torch.device | str) -> torch.device:
    """The device, if a tensor can be made there."""
    try:
        return torch.empty(0, device=device).device
    except (AssertionError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise BackendUnavailableError(f"device {str(device)!r} cannot be used: {reason}") from None
