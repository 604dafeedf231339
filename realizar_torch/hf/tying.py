"""tie_weights of transformers models that rt.prepack has rearranged: it looks for parameters."""

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from realizar_torch.hf.extended import Extended, extend
from realizar_torch.nn.layout import PackedModule
from realizar_torch.surgery import prepack, unpack


def tie_prepacked(model: PreTrainedModel) -> None:
    """Extends the class of a model with tied weights, so that they can be tied in every layout."""
    if model.all_tied_weights_keys and not isinstance(model, Extended):
        extend(model, _Tied)


class _Tied(Extended):
    def tie_weights(self, *args: Any, **kwargs: Any) -> None:
        """As of transformers; those of the tied modules that are prepacked are canonical meanwhile."""
        keys: Any = self.all_tied_weights_keys
        names = {key.rpartition(".")[0] for pair in keys.items() for key in pair}
        layouts = {
            module: module.layout
            for name, module in self.named_modules(remove_duplicate=False)
            if name in names and isinstance(module, PackedModule)
        }
        transformers_own: Any = super()
        try:
            unpack(nn.ModuleList(layouts))
            transformers_own.tie_weights(*args, **kwargs)
        finally:
            for layout in set(layouts.values()):
                prepack(nn.ModuleList(module for module, of in layouts.items() if of == layout), layout)
