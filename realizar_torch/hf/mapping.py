"""Which tensor of a GGUF file each parameter of a transformers model is, and what has to be done to it."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from realizar_torch.checkpoint.gguf_errors import shown_path
from realizar_torch.checkpoint.source import ModelSource
from realizar_torch.errors import MissingTensorsError, UnsupportedArchitectureError
from realizar_torch.hf.architectures import Architecture
from realizar_torch.hf.config import ROPE_TENSORS
from realizar_torch.hf.modules import weight_shape

_MAX_SHOWN = 8
# StableLM has a norm for each head; the converter stacks them
_OF_HEAD = re.compile(r"\.norms\.(\d+)(?=\.weight$)")


@dataclass(frozen=True)
class Source:
    """Where a parameter comes from: the tensor's name, its format, what is done to its rows or values."""

    tensor: str
    fmt: str
    packed: bool
    change: Callable[[Tensor], Tensor] | None

    def read(self, file: ModelSource) -> Tensor:
        """The parameter on the CPU; a view of the file where nothing has to be changed."""
        tensor = file.read(self.tensor)
        if self.change is None:
            return tensor
        changed = self.change(tensor)
        file.release(self.tensor)
        return changed


def map_parameters(file: ModelSource, model: PreTrainedModel, row: Architecture) -> dict[str, Source]:
    """Parameter name -> its source, for every parameter that is not tied to another.

    ``model`` is on meta. MissingTensorsError unless each parameter finds a tensor of its shape and each
    tensor of the file a parameter; UnsupportedArchitectureError for a packed tensor where floats belong.
    """
    source = shown_path(file.path)
    names = _tensor_names(row.name, model.config.num_hidden_layers)
    parameters = dict(model.named_parameters())
    found: dict[str, Source] = {}
    problems = []
    for parameter, value in parameters.items():
        tensor = names(parameter)
        if tensor is None or tensor not in file.tensors:
            problems.append(f"missing {tensor or 'a tensor'} for {parameter} {list(value.shape)}")
            continue
        info = file.tensors[tensor]
        module_name, _, kind = parameter.rpartition(".")
        module = model.get_submodule(module_name)
        matrix = weight_shape(module) if kind == "weight" else None
        expected = matrix or (*_stack(parameter, model), *value.shape)
        if info.shape != expected:
            problems.append(f"{tensor} has shape {list(info.shape)}, expected {list(expected)}")
        if info.fmt.packed and matrix is None:
            raise UnsupportedArchitectureError(
                f"{source}: {tensor} is {info.fmt.name}, but {parameter} must be plain floats"
            )
        heads = model.config.num_attention_heads + 2 * _key_heads(model.config)
        if row.grouped_qkv and "query_key_value" in parameter and info.shape[0] % heads:
            problems.append(f"{tensor} has {info.shape[0]} rows, which are no {heads} heads of q, k and v")
        change = _change(parameter, module, info.fmt.packed, model, row)
        found[parameter] = Source(tensor, info.fmt.name, info.fmt.packed, change)
    used = {item.tensor for item in found.values()} | set(ROPE_TENSORS)
    problems += [f"unexpected {tensor}" for tensor in file.tensors if tensor not in used]
    refuse_incomplete(source, model, problems)
    return found


def refuse_incomplete(source: str, model: PreTrainedModel, problems: list[str]) -> None:
    """MissingTensorsError names the first problems, if there are any, and counts the rest."""
    if problems:
        rest = f"; and {len(problems) - _MAX_SHOWN} more" if len(problems) > _MAX_SHOWN else ""
        raise MissingTensorsError(
            f"{source} is no complete {type(model).__name__}: {'; '.join(problems[:_MAX_SHOWN])}{rest}"
        )


def packed_formats(sources: Mapping[str, Source], model: PreTrainedModel) -> dict[str, str]:
    """Module name -> format of every module whose weight stays packed, tied ones included."""
    packed = {name: item.fmt for name, item in sources.items() if item.packed}
    tied = {name: packed[of] for name, of in model.all_tied_weights_keys.items() if of in packed}
    return {name.removesuffix(".weight"): fmt for name, fmt in (packed | tied).items()}


def _tensor_names(arch: str, layers: int) -> Callable[[str], str | None]:
    import gguf

    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    table = gguf.get_tensor_name_map(number, layers)
    return lambda parameter: table.get_name(_OF_HEAD.sub("", parameter), try_suffixes=(".weight", ".bias"))


def _stack(parameter: str, model: PreTrainedModel) -> tuple[int, ...]:
    """(heads,) of the tensor that ``parameter`` is one row of, else ()."""
    head = _OF_HEAD.search(parameter)
    return () if head is None else (len(model.get_submodule(f"{parameter[: head.start()]}.norms")),)


def _change(
    parameter: str, module: nn.Module, packed: bool, model: PreTrainedModel, row: Architecture
) -> Callable[[Tensor], Tensor] | None:
    config = model.config
    heads = {"q_proj": config.num_attention_heads, "k_proj": getattr(config, "num_key_value_heads", 0)}
    owner, kind = parameter.split(".")[-2:]
    if _OF_HEAD.search(parameter):
        return lambda tensor: tensor[int(owner)].clone()
    if row.interleaved_qk and owner in heads:
        return lambda tensor: tensor[_halves_apart(len(tensor), heads[owner])]
    if row.grouped_qkv and owner == "query_key_value":
        return lambda tensor: tensor[_group_by_group(len(tensor), config)]
    if row.norm_offset and owner.endswith("norm") and kind == "weight":
        return lambda tensor: tensor - row.norm_offset
    if isinstance(module, Conv1D) and kind == "weight" and not packed:
        return lambda tensor: tensor.T.contiguous()
    return None


def _halves_apart(rows: int, heads: int) -> Tensor:
    """Row order that undoes the interleaving: GGUF row 2i+h of a head was row h·(D/2)+i."""
    return torch.arange(rows, device="cpu").view(heads, -1, 2).transpose(1, 2).reshape(rows)


def _key_heads(config: PreTrainedConfig) -> int:
    """Key heads, and as many value heads, of fused q, k and v."""
    return getattr(config, "num_kv_heads", config.num_attention_heads)


def _group_by_group(rows: int, config: PreTrainedConfig) -> Tensor:
    """Row order that puts each key and value head behind the query heads that share it, as Falcon's."""
    groups = _key_heads(config)
    order = torch.arange(rows, device="cpu").view(config.num_attention_heads + 2 * groups, -1)
    query, key, value = order.split([config.num_attention_heads, groups, groups])
    query = query.reshape(groups, -1, order.shape[1])
    return torch.cat([query, key[:, None], value[:, None]], dim=1).reshape(rows)
