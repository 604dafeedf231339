"""Packed weights as module parameters: made, wrapped, and guarded where state dicts are saved and loaded.

A ``uint8`` parameter stays as it is under ``.to(dtype)`` and ``.half()``. Bytes do not tell Q4_0 from Q4_K,
and padding hides how long a row is, so format and columns travel in the state dict's metadata.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from realizar_torch.caller import warn_caller
from realizar_torch.errors import FormatError
from realizar_torch.formats import PACKED_FORMATS, get_packed_format
from realizar_torch.ops.checks import ACTIVATIONS, check_choice, check_weight

Formats = str | None | tuple[str | None, ...]


def zero_blocks(rows: int, in_features: int, fmt: str, device: torch.device | str | None) -> nn.Parameter:
    """A weight to load into: all bytes zero, which decodes to zeros in every format."""
    check_sizes(in_features, rows)
    row_bytes = get_packed_format(fmt).row_bytes(in_features)
    return nn.Parameter(torch.zeros(rows, row_bytes, dtype=torch.uint8, device=device), requires_grad=False)


def wrap_blocks(blocks: torch.Tensor, in_features: int, fmt: str) -> nn.Parameter:
    """``uint8 [rows, row_bytes]`` as a parameter that shares their memory."""
    check_weight(blocks, fmt, in_features, "ggml")
    return nn.Parameter(blocks, requires_grad=False)


def check_sizes(in_features: int, out_features: int) -> None:
    """FormatError unless both are integers of at least 1."""
    for name, size in (("in_features", in_features), ("out_features", out_features)):
        if isinstance(size, bool) or not isinstance(size, int | torch.SymInt):
            raise FormatError(f"{name} is {size!r}, a {type(size).__name__}; expected an int")
    if in_features < 1 or out_features < 1:
        raise FormatError(f"in_features={in_features}, out_features={out_features}; both must be at least 1")


def check_activations(activations: str) -> None:
    """FormatError unless they are "float" or "int8"."""
    check_choice("activations", activations, ACTIVATIONS)


def check_name(name: str, parameter: nn.Parameter | None) -> None:
    """FormatError for bytes under another name than ``weight``, which torch's pruning keeps and masks."""
    if parameter is not None and parameter.dtype == torch.uint8 and name != "weight":
        raise FormatError(
            f"packed bytes cannot be the parameter {name!r}: masks and the like of torch.nn.utils take them "
            "for numbers; use the dense weight (to_linear, dequantize) and quantize what comes of it"
        )


def save_form(destination: Mapping[str, torch.Tensor], prefix: str, fmt: Formats, columns: int) -> None:
    """Write what bytes do not tell into the metadata that ``Module.state_dict`` keeps per module."""
    metadata = getattr(destination, "_metadata", None)
    if metadata is not None:
        metadata[prefix[:-1]].update(fmt=fmt, columns=columns)


def check_state(
    state_dict: Mapping[str, Any], prefix: str, metadata: Mapping[str, Any], fmt: Formats, columns: int
) -> None:
    """Refuse a state dict of another format or width, or one that holds floats where packed bytes belong.

    Without metadata nobody knows the format; a UserWarning tells where bytes may be those of another.
    """
    stored = metadata.get("fmt", fmt)
    if stored != fmt:
        raise FormatError(
            f"{prefix}weight is stored as {stored}, but this module was made for {fmt}; "
            f"make the module with fmt={stored!r}"
        )
    if (width := metadata.get("columns", columns)) != columns:
        raise FormatError(
            f"{prefix}weight is stored as rows of {width} weights, but this module was made for {columns}; "
            f"make the module for {width}"
        )
    formats = {"weight": fmt} if not isinstance(fmt, tuple) else {f"weight.{i}": f for i, f in enumerate(fmt)}
    for key, name in formats.items():
        tensor = state_dict.get(prefix + key)
        if name is not None and tensor is not None and tensor.dtype != torch.uint8:
            raise FormatError(
                f"{prefix}{key} is {tensor.dtype}, expected torch.uint8 bytes of {name} blocks; "
                "a float weight has to be quantized first"
            )
        if name is not None and tensor is not None and "fmt" not in metadata:
            _warn_of_look_alikes(tensor, name, columns)


def _warn_of_look_alikes(blocks: torch.Tensor, fmt: str, columns: int) -> None:
    fitting = [other.name for other in PACKED_FORMATS if blocks.shape[-1:] == (other.row_bytes(columns),)]
    if fmt in fitting and len(fitting) > 1:
        others = " and ".join(name for name in fitting if name != fmt)
        # no key: modules of one format say the same, which Python shows once
        warn_caller(
            f"packed bytes without the metadata that tell their format were taken for {fmt}, for which the "
            f"module was made; rows of {others} have as many bytes. Load what state_dict() or torch.load "
            "gives, with its _metadata: a plain dict, a comprehension and safetensors lose them"
        )
