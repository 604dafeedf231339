"""The linear layers and embeddings of a transformers model, replaced by packed ones while it is on meta."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.pytorch_utils import Conv1D

from realizar_torch.errors import UnsupportedArchitectureError
from realizar_torch.nn.embedding import QuantizedEmbedding, ScaledEmbedding
from realizar_torch.nn.linear import QuantizedLinear
from realizar_torch.quantization import row_scale

# Linear layers that compute x·Wᵀ + b; of Conv1D, whose W is transposed, GGUF files hold Wᵀ.
_LINEARS = (nn.Linear, FalconLinear, Conv1D)


def weight_shape(module: Any) -> tuple[int, int] | None:
    """(rows, columns) that GGUF holds for a module that can be packed, None for every other module."""
    if type(module) in _LINEARS:
        rows, columns = module.weight.shape
        return (columns, rows) if isinstance(module, Conv1D) else (rows, columns)
    if type(module).forward is nn.Embedding.forward or row_scale(module) is not None:
        return (module.num_embeddings, module.embedding_dim)
    return None


def pack_modules(
    model: PreTrainedModel, formats: Mapping[str, str], *, dtype: torch.dtype, activations: str
) -> None:
    """Puts packed modules, on meta, in the place of those that ``formats`` names (module -> format)."""
    for name, fmt in formats.items():
        model.set_submodule(name, _packed(name, model.get_submodule(name), fmt, dtype, activations))


def _packed(name: str, module: Any, fmt: str, dtype: torch.dtype, activations: str) -> nn.Module:
    shape = weight_shape(module)
    if shape is None:
        raise UnsupportedArchitectureError(
            f"{name} is a {type(module).__name__}, which cannot hold {fmt} blocks; packed can be linear "
            "layers and embeddings"
        )
    rows, columns = shape
    if type(module) in _LINEARS:
        return QuantizedLinear(
            columns,
            rows,
            bias=module.bias is not None,
            fmt=fmt,
            activations=activations,
            device="meta",
            dtype=dtype,
        )
    settings: dict[str, Any] = {"fmt": fmt, "dtype": dtype, "device": "meta"}
    scale = row_scale(module)
    if scale is None:
        return QuantizedEmbedding(rows, columns, module.padding_idx, **settings)
    embedding = ScaledEmbedding(rows, columns, module.padding_idx, **settings)
    embedding.scale = scale
    return embedding
