"""Changes of a whole model in place: packed weights into a device layout and back."""

import torch
from torch import nn

from realizar_torch import packing
from realizar_torch.formats import get_packed_format
from realizar_torch.nn.layout import PackedModule

# What a kernel loads at once.
_VECTOR_BYTES = 16


def prepack(model: nn.Module, layout: str = "auto") -> None:
    """Rearranges the bytes of every QuantizedLinear and QuantizedEmbedding for the kernels of its device.

    layout: one of ``packing.LAYOUTS``, or "auto": "planar" on CUDA where blocks are no multiple of 16 bytes,
    "ggml" elsewhere. ``weight`` becomes the non-persistent buffer ``packed``; modules that share a weight go
    on sharing. State dicts stay canonical. FormatError for an unknown layout.

    ``parameters()``, and what counts them as ``num_parameters()`` does, hold a packed weight's bytes before
    and leave it out afterwards, where its layout is not "ggml"; memory is the same.
    """
    if layout != "auto":
        packing.check_layout(layout)
    done: dict[int, PackedModule] = {}
    with torch.inference_mode(False), torch.no_grad():
        for module in _packed_modules(model):
            target = _best_layout(module) if layout == "auto" else layout
            if module.layout != target:
                _move(module, target, done)


def unpack(model: nn.Module) -> None:
    """Undoes ``prepack``: canonical bytes in ``weight`` again."""
    done: dict[int, PackedModule] = {}
    with torch.inference_mode(False), torch.no_grad():
        for module in _packed_modules(model):
            if module.layout != "ggml":
                _move(module, "ggml", done)


def _move(module: PackedModule, layout: str, done: dict[int, PackedModule]) -> None:
    # by identity: a later module that shares the tensor still holds it, so the number is not reused
    stored = module.stored
    if id(stored) in done:
        module.share(done[id(stored)])
        return
    blocks = packing.unpack(stored.detach(), module.fmt, module.layout)
    module.adopt(packing.pack(blocks, module.fmt, layout), layout)
    done[id(stored)] = module


def _packed_modules(model: nn.Module) -> list[PackedModule]:
    return [module for module in model.modules() if isinstance(module, PackedModule)]


def _best_layout(module: PackedModule) -> str:
    whole_vectors = get_packed_format(module.fmt).block_bytes % _VECTOR_BYTES == 0
    return "planar" if module.stored.is_cuda and not whole_vectors else "ggml"
