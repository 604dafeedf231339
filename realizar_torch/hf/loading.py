"""from_gguf: a GGUF file as a transformers model and its tokenizer, the weights as packed as in the file."""

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from realizar_torch.checkpoint.gguf import open_gguf
from realizar_torch.checkpoint.gguf_errors import shown_path
from realizar_torch.checkpoint.hub import find_model
from realizar_torch.checkpoint.source import ModelSource
from realizar_torch.checkpoint.vocabulary import Vocabulary
from realizar_torch.errors import FormatError
from realizar_torch.hf.architectures import get_architecture
from realizar_torch.hf.config import read_config, refusals
from realizar_torch.hf.mapping import map_parameters, packed_formats
from realizar_torch.hf.quantizer import RealizarConfig
from realizar_torch.hf.tokenizer import build_tokenizer
from realizar_torch.models.sources import is_directory_model
from realizar_torch.nn.packed import check_activations
from realizar_torch.ops.checks import FLOATS


def from_gguf(
    path: str | os.PathLike[str],
    *,
    device_map: str | int | torch.device | Mapping[str, Any] | None = None,
    dtype: str | torch.dtype = "auto",
    attn_implementation: str | None = None,
    activations: str = "float",
    config: PreTrainedConfig | Mapping[str, Any] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_memory: Mapping[int | str, int | str] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and tokenizer of a GGUF file, of any shard of a split one, or of ``owner/name:QUANT``.

    device_map, attn_implementation, max_memory, offload_folder: as ``from_pretrained`` takes them.
        device_map None is the CPU, where weights stay views of the file's mapping. attn_implementation None
        is "sdpa" where the model has it, "eager" where not or where scores are capped (gemma2).
    dtype: of everything that is not packed, and of activations. "auto": bfloat16 where ``device_map`` may
        mean a GPU and there is one, float32 otherwise.
    activations: "float", exact, or "int8", which quantizes the input of every packed product in blocks.
    config: fields that replace what the file says ({"sliding_window": 4096}), or a whole config.
    tokenizer: used in the place of the file's own, which then is not read.

    Modules are transformers' own; MLPs and attentions are of classes that extend those, under the same name,
    to multiply what shares an input together, and so is a model with tied weights, to tie them in every
    layout. On a GPU ``rt.prepack(model)`` afterwards rearranges the weights for its kernels. What
    ``save_pretrained`` writes is loaded by ``from_pretrained`` once ``realizar_torch.hf`` is imported.
    Raises what ``rt.open_gguf`` raises; FormatError for a directory of another kind, for a dtype that is not
    of floats, a tokenizer that is not of transformers, and a config or an attention that transformers
    refuses; UnsupportedArchitectureError for an architecture, feature or tokenizer that has no row here;
    MissingTensorsError unless file and model agree on every tensor.
    """
    check_activations(activations)
    dtype = _choose_dtype(dtype, device_map)
    if not isinstance(tokenizer, PreTrainedTokenizerBase | None):
        raise FormatError(
            f"tokenizer is {tokenizer!r:.80}, expected one of transformers; leave it out for the file's own"
        )
    found = find_model(path)
    if is_directory_model(found):
        raise FormatError(
            f"{shown_path(found)} is a directory that is a model itself, expected a GGUF file: load it with "
            "rt.load or, one of Hugging Face's, with AutoModelForCausalLM.from_pretrained"
        )
    file = open_gguf(found)
    vocabulary = Vocabulary.from_gguf(file.metadata) if tokenizer is None else None
    model = load_model(
        file,
        special_ids=_special_ids(tokenizer if vocabulary is None else vocabulary),
        device_map=device_map,
        dtype=dtype,
        attn_implementation=attn_implementation,
        activations=activations,
        config=config,
        max_memory=max_memory,
        offload_folder=offload_folder,
    )
    if vocabulary is not None:
        tokenizer = build_tokenizer(vocabulary, file.metadata)
    assert tokenizer is not None
    tokenizer.model_max_length = model.config.max_position_embeddings
    padding = tokenizer.pad_token_id
    model.generation_config.pad_token_id = tokenizer.eos_token_id if padding is None else padding
    return model, tokenizer


def load_model(
    file: ModelSource,
    *,
    special_ids: Mapping[str, Any] = MappingProxyType({}),
    device_map: Any = None,
    dtype: torch.dtype,
    attn_implementation: str | None = None,
    activations: str = "float",
    config: PreTrainedConfig | Mapping[str, Any] | None = None,
    max_memory: Mapping[int | str, int | str] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
) -> PreTrainedModel:
    """The model of an open file, as by ``from_gguf``; ``special_ids`` as in ``read_config``."""
    source = shown_path(file.path)
    row = get_architecture(file.arch, source)
    if isinstance(config, PreTrainedConfig):
        settings = config
    elif config is None or isinstance(config, Mapping):
        settings = read_config(file, row, special_ids, config or {})
    else:
        raise FormatError(f"config is {config!r:.80}, expected a dict of fields or a config of transformers")
    if cap := getattr(settings, "attn_logit_softcapping", None):
        attn_implementation = _capping(attn_implementation, cap, source)
    attention = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    with refusals(source, config=config, **attention), torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(settings, **attention)
    sources = map_parameters(file, skeleton, row)
    formats = packed_formats(sources, skeleton)
    if formats:
        settings.quantization_config = RealizarConfig(formats, activations).to_dict()
    # transformers places, ties and dispatches: the parameters come as a state dict instead of as files
    return type(skeleton).from_pretrained(
        None,
        config=settings,
        state_dict={name: source.read(file) for name, source in sources.items()},
        dtype=dtype,
        device_map=device_map,
        max_memory=max_memory,
        offload_folder=offload_folder,
    )


def _capping(attention: str | None, cap: float, source: str) -> str:
    """An attention that caps scores: "eager" where none is asked for. Older transformers chose "sdpa" for
    such models, and left the cap out without a word."""
    if attention == "sdpa":
        raise FormatError(
            f"{source}: attn_implementation='sdpa' does not cap attention scores, which this model needs "
            f"(attn_logit_softcapping = {cap:g}); leave it out, or use 'eager'"
        )
    return attention or "eager"


def _special_ids(source: Vocabulary | PreTrainedTokenizerBase) -> dict[str, Any]:
    if isinstance(source, Vocabulary):
        ids = (source.bos, list(source.end_of_generation) or None, source.padding)
    else:
        ids = (source.bos_token_id, source.eos_token_id, source.pad_token_id)
    return dict(zip(("bos_token_id", "eos_token_id", "pad_token_id"), ids, strict=True))


def _choose_dtype(dtype: str | torch.dtype, device_map: Any) -> torch.dtype:
    if dtype != "auto":
        found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
        if found not in FLOATS:
            names = ", ".join(str(float_dtype).removeprefix("torch.") for float_dtype in FLOATS)
            raise FormatError(f"dtype is {dtype!r}, expected 'auto' or one of {names}, by name or of torch")
        return found
    places = device_map.values() if isinstance(device_map, Mapping) else [device_map]
    on_cpu = all(place is None or str(place) in ("cpu", "disk") for place in places)
    return torch.float32 if on_cpu or not torch.cuda.is_available() else torch.bfloat16
