"""CausalLM: a Transformer that generates, and load(), which makes one from a file."""

import operator
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from realizar_torch.checkpoint.gguf_errors import shown_path
from realizar_torch.checkpoint.hub import find_model
from realizar_torch.checkpoint.source import ModelSource
from realizar_torch.errors import BackendUnavailableError, FormatError
from realizar_torch.generation.arguments import check_stop_ids, integer
from realizar_torch.generation.gpu_state import GpuStates
from realizar_torch.generation.loop import generate_ids
from realizar_torch.generation.workspace import MAX_BATCH
from realizar_torch.models.config import ModelConfig
from realizar_torch.models.encoding import EncodedSource
from realizar_torch.models.file_kinds import check_is_model
from realizar_torch.models.loading import load_transformer
from realizar_torch.models.overrides import OverriddenSource
from realizar_torch.models.saved_format import Origin
from realizar_torch.models.sources import open_source, open_tokenizer
from realizar_torch.models.transformer import Transformer
from realizar_torch.nn.kv_cache import CACHE_DTYPES
from realizar_torch.ops.checks import ACTIVATIONS, FLOATS, check_callable, check_choice
from realizar_torch.surgery import prepack

DEFAULT_MAX_SEQ_LEN = 4096


class CausalLM(Transformer):
    """What ``rt.load`` returns.

    max_seq_len: positions a request may use, prompt included. eos_token_ids: a tuple of the ids that end a
    sequence unless the caller names others. pad_token_id: fills rows that end early. origin: what rt.save
    writes beside the weights.
    """

    def __init__(self, config: ModelConfig, *modules: Any, **options: Any):
        super().__init__(config, *modules, **options)
        self.max_seq_len = min(config.context_length, DEFAULT_MAX_SEQ_LEN)
        self.eos_token_ids: tuple[int, ...] = ()
        self.pad_token_id: int | None = None
        self.origin: Origin | None = None
        self.gpu_states = GpuStates()

    generate = generate_ids

    def __getattr__(self, name: str) -> torch.Tensor | torch.nn.Module:
        # a property would lose its message: Python comes here when one raises AttributeError
        if name == "prepare_inputs_for_generation":
            raise AttributeError(
                f"a {type(self).__name__} has no {name}, as transformers' models have, which peft asks for "
                'where LoraConfig has the task_type "CAUSAL_LM" or "SEQ_2_SEQ_LM": load the model again, '
                "since peft has added adapters to this one, and leave task_type None, or take rt.hf.from_gguf"
            )
        return super().__getattr__(name)


def load(
    path_or_ref: str | Path,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str = "auto",
    kv_dtype: torch.dtype | str | None = None,
    max_seq_len: int | None = None,
    batch_size: int = 1,
    activations: str = "int8",
    quantize: str | Mapping[str, str] | None = None,
    config: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[CausalLM, Any]:
    """(model, tokenizer) of a GGUF file, any shard of a split one, a directory that holds one, that rt.save
    wrote or that is a Hugging Face one (config.json, safetensors, tokenizer.json), or ``owner/name:QUANT`` on
    the Hugging Face Hub.

    device: None is a GPU if torch sees one, else the CPU. dtype: of activations, norms and dense weights, a
    torch dtype or its name; "auto" is bfloat16 on a GPU and float32 elsewhere. kv_dtype: of the KV cache,
    None is ``dtype``; "fp8" (e4m3) or "int8" keep a byte per element and a scale per position and head, which
    halves the memory that a long context takes and that its steps read (``KVCache``). max_seq_len: positions
    a request may use; None is min(the file's context length, 4096). batch_size: sequences, 1 to 32, that a
    GPU's KV cache is made for at once; a larger request makes it grow. activations: "int8" or "float", the
    numerics of packed linears. quantize: a packed format, or patterns on GGUF names and their formats, for
    the dense matrices of the file, encoded one by one while they are read (``models.encoding``). config:
    metadata keys that replace the file's, {"llama.rope.freq_base": 1e6}. tokenizer: in place of the file's
    own, a Tokenizer or the path of a model or a tokenizer.json, of no more tokens than the model knows.
    progress: called with (layers loaded, layers in all).

    CheckpointError (GGUFError for GGUF), UnsupportedArchitectureError, MissingTensorsError and
    IncompleteShardsError say what is wrong with the file, FormatError what is wrong with an argument, before
    any weight is read.
    """
    check_choice("activations", activations, ACTIVATIONS)
    check_callable("progress", progress)
    target = _usable_device(device)
    number_type = _float_type(dtype, target)
    cache_type = _cache_type(kv_dtype)
    batch_size = integer(batch_size, "batch_size")
    if not 1 <= batch_size <= MAX_BATCH:
        raise FormatError(f"batch_size is {batch_size}; expected 1 to {MAX_BATCH}")

    source: ModelSource = open_source(find_model(path_or_ref))
    check_is_model(source)
    overridden = OverriddenSource(source, {} if config is None else config)
    source = overridden if quantize is None else EncodedSource(overridden, quantize)
    sizes = ModelConfig.from_gguf(source.metadata, shown_path(source.path))
    positions = _positions(max_seq_len, sizes.context_length)
    opened = open_tokenizer(source if tokenizer is None else tokenizer, sizes.vocab_size)
    if tokenizer is not None:
        _check_fit(opened, sizes.vocab_size)
        check_stop_ids(opened.eos_token_ids, "tokenizer.eos_token_ids")
    overridden.check_read()
    model = load_transformer(
        source,
        device=target,
        dtype=number_type,
        activations=activations,
        max_seq_len=positions,
        model_class=CausalLM,
        progress=progress,
    )
    assert isinstance(model, CausalLM)
    prepack(model)
    model.origin = Origin.of(source, None if tokenizer is None else opened)
    model.max_seq_len, model.kv_dtype = positions, cache_type
    model.eos_token_ids, model.pad_token_id = opened.eos_token_ids, opened.pad_token_id
    if target.type == "cuda" and batch_size > 1:
        model.gpu_states.take(model, batch_size, positions).close()
    return model, opened


def _check_fit(tokenizer: Any, vocab_size: int) -> None:
    """FormatError for a tokenizer of another model. Fewer tokens are common: vocabularies are padded."""
    # a tokenizer of the caller's own need not tell
    count = getattr(tokenizer, "vocab_size", 0)
    if count > vocab_size:
        raise FormatError(
            f"the tokenizer has {count} tokens, the model's vocabulary {vocab_size}: it belongs to another "
            "model; give the one that this model was trained with, or none for the file's own"
        )


def _usable_device(device: torch.device | str | None) -> torch.device:
    """The device, if a tensor can be made there; None: a GPU if there is one."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if not isinstance(device, torch.device | str | int):
        raise FormatError(f"device is {device!r:.80}; expected 'cpu', 'cuda', or a torch.device")
    try:
        target = torch.empty(0, device=device).device
    except (AssertionError, RuntimeError) as error:
        # torch's first sentence; behind it come pages about its own back ends
        reason = str(error).splitlines()[0].partition(". ")[0]
        raise BackendUnavailableError(
            f"device {str(device)!r} cannot be used: {reason}; expected 'cpu', or 'cuda' where PyTorch "
            "sees a GPU"
        ) from None
    if target.type == "meta":
        raise FormatError("device is 'meta', where tensors have no values; load to 'cpu' or 'cuda'")
    return target


def _float_type(dtype: torch.dtype | str, device: torch.device) -> torch.dtype:
    names = {str(known).removeprefix("torch."): known for known in FLOATS}
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    found = names.get(dtype) if isinstance(dtype, str) else dtype
    if found not in FLOATS:
        raise FormatError(f"dtype is {dtype!r}, expected 'auto' or one of {', '.join(names)}")
    return found


def _cache_type(kv_dtype: torch.dtype | str | None) -> torch.dtype | None:
    names = {str(known).removeprefix("torch."): known for known in CACHE_DTYPES}
    names["fp8"] = torch.float8_e4m3fn
    found = names.get(kv_dtype) if isinstance(kv_dtype, str) else kv_dtype
    if kv_dtype is not None and found not in CACHE_DTYPES:
        raise FormatError(f"kv_dtype is {kv_dtype!r}, expected None or one of {', '.join(names)}")
    return found


def _positions(max_seq_len: int | None, longest: int) -> int:
    if max_seq_len is None:
        return min(longest, DEFAULT_MAX_SEQ_LEN)
    try:
        positions = operator.index(max_seq_len)
    except TypeError:
        positions = 0
    if isinstance(max_seq_len, bool) or not 1 <= positions <= longest:
        raise FormatError(
            f"max_seq_len is {max_seq_len!r}, but the file was made for 1 to {longest} positions"
        )
    return positions
