"""transformers starts what no file holds in the shape of the weights that it finds: not in that of bytes."""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from realizar_torch.nn.layout import PackedModule


def hide_blocks(model: PreTrainedModel) -> None:
    """Until ``show_blocks``, weights of the model's packed modules are put aside while others are started.

    Some models compute a table anew, as large as the one that is there, and write it unless that was loaded.
    """

    def initialize_weights() -> None:
        blocks = {module: module.weight for module in model.modules() if isinstance(module, PackedModule)}
        for module in blocks:
            module.weight = _loaded_floats(module)
        type(model).initialize_weights(model)
        for module, weight in blocks.items():
            module.weight = weight

    model.initialize_weights = initialize_weights


def show_blocks(model: PreTrainedModel) -> None:
    """Undoes ``hide_blocks``."""
    del model.initialize_weights


def _loaded_floats(module: PackedModule) -> nn.Parameter:
    """Without memory, in the shape of the floats."""
    shape = len(module.weight), module.columns
    floats: Any = nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)
    floats._is_hf_initialized = True
    return floats
