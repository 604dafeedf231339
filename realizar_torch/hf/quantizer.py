"""The quantization method "realizar" of transformers: packed models are saved and loaded like any other."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from realizar_torch.errors import FormatError
from realizar_torch.formats import supported_formats
from realizar_torch.hf.checkpoint import Header, check_complete, check_formats, told_formats
from realizar_torch.hf.forwards import share_inputs
from realizar_torch.hf.heads import formats_in, saved_model
from realizar_torch.hf.modules import pack_modules
from realizar_torch.hf.starting import hide_blocks, show_blocks
from realizar_torch.hf.tying import tie_prepacked
from realizar_torch.nn.layout import PackedModule
from realizar_torch.nn.linear import QuantizedLinear
from realizar_torch.nn.packed import check_activations

METHOD = "realizar"
_VERSION = 1


@register_quantization_config(METHOD)
class RealizarConfig(QuantizationConfigMixin):
    """What ``config.json`` says about packed modules.

    formats: module name -> name of its block format. activations: "float" or "int8", of all of them.
    FormatError for a version, format or kind of activations that is not known here.

    ``from_gguf`` sets it. A transformers model that ``rt.quantize_model`` packed is saved with it, too:

        rt.quantize_model(model, "Q8_0")
        model.config.quantization_config = rt.hf.RealizarConfig.from_model(model)
        model.save_pretrained(folder)
    """

    def __init__(
        self, formats: Mapping[str, str], activations: str = "float", version: int = _VERSION, **_: Any
    ) -> None:
        self.quant_method = METHOD
        if version != _VERSION:
            raise _unknown(f"version {version!r}, expected {_VERSION}")
        if not isinstance(formats, Mapping):
            raise _unknown(f"formats {formats!r:.80}, expected the format of each packed module by its name")
        for name, fmt in formats.items():
            if fmt not in supported_formats():
                found = f"{name} has the format {fmt!r:.80}, expected one of {', '.join(supported_formats())}"
                raise _unknown(f"formats where {found}")
        check_activations(activations)
        self.formats = dict(formats)
        self.activations = activations
        self.version = version

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """The entry in ``config.json``, which has to say its version and formats."""
        return super().from_dict({"version": None, "formats": None, **config_dict}, *args, **kwargs)

    @classmethod
    def from_model(cls, model: nn.Module) -> Self:
        """The entry of a model's packed modules, which also changes a transformers ``model``: it gets an
        ``hf_quantizer``, so that its ``save_pretrained`` writes their formats beside the tensors, too.

        FormatError if it has no packed modules, or activations of both kinds.
        """
        modules = {
            name: module
            for name, module in model.named_modules(remove_duplicate=False)
            if isinstance(module, PackedModule)
        }
        if not modules:
            raise FormatError(
                f"the {type(model).__name__} has no packed modules; call rt.quantize_model on it"
            )
        kinds = {module.activations for module in modules.values() if isinstance(module, QuantizedLinear)}
        if len(kinds) > 1:
            raise FormatError(f"the model has linears of activations {sorted(kinds)}, expected one kind")
        formats = {name: module.fmt for name, module in modules.items()}
        entry = cls(formats, activations=kinds.pop() if kinds else "float")
        if isinstance(model, PreTrainedModel):
            model.hf_quantizer = RealizarHfQuantizer(entry)
        return entry


def _unknown(found: str) -> FormatError:
    return FormatError(
        f"quantization_config of {METHOD!r} has {found}; update realizar_torch, or save the model again"
    )


@register_quantizer(METHOD)
class RealizarHfQuantizer(HfQuantizer):
    """Makes the packed modules before weights are loaded, and refuses incomplete checkpoints."""

    quantization_config: RealizarConfig

    def _process_model_before_weight_loading(
        self,
        model: PreTrainedModel,
        dtype: torch.dtype | None = None,
        checkpoint_files: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        saved, formats = saved_model(model), self.quantization_config.formats
        header = Header.of(checkpoint_files) if checkpoint_files else None
        if header:
            check_formats(formats, header)
        pack_modules(
            model,
            formats_in(model, formats, saved),
            dtype=dtype or torch.get_default_dtype(),
            activations=self.quantization_config.activations,
        )
        share_inputs(model)
        tie_prepacked(model)
        hide_blocks(model)
        if header:
            check_complete(model, saved, header)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        show_blocks(model)

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[None, dict[str, str]]:
        """Asked before a model is written; config and files then name what is packed now, not once was."""
        if any(isinstance(module, PackedModule) for module in model.modules()):
            entry = model.config.quantization_config = RealizarConfig.from_model(model)
            return None, told_formats(entry.formats)
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        return None, {}

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return True
