"""The quantization method "realizar" of transformers: packed models are saved and loaded like any other."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from realizar_torch.errors import FormatError
from realizar_torch.hf.forwards import share_inputs
from realizar_torch.hf.mapping import refuse_incomplete
from realizar_torch.hf.modules import pack_modules
from realizar_torch.nn.layout import PackedModule
from realizar_torch.nn.linear import QuantizedLinear

METHOD = "realizar"
_VERSION = 1


@register_quantization_config(METHOD)
class RealizarConfig(QuantizationConfigMixin):
    """What ``config.json`` says about packed modules.

    formats: module name -> name of its block format. activations: "float" or "int8", of all of them.
    FormatError for a version of this entry that is not known here.

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
            raise FormatError(
                f"quantization_config of method {METHOD!r} has version {version!r}, expected {_VERSION}; "
                "update realizar_torch, or save the model again"
            )
        self.formats = dict(formats)
        self.activations = activations
        self.version = version

    @classmethod
    def from_model(cls, model: nn.Module) -> Self:
        """The entry of a model's packed modules; FormatError if it has none, or activations of both kinds."""
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
        return cls(formats, activations=kinds.pop() if kinds else "float")


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
        saved = type(model).__name__ in (model.config.architectures or ())
        formats = self.quantization_config.formats
        if not saved:
            formats = _of_another_head(formats, model)
        pack_modules(
            model,
            formats,
            dtype=dtype or torch.get_default_dtype(),
            activations=self.quantization_config.activations,
        )
        share_inputs(model)
        if checkpoint_files and saved:
            _check_complete(model, checkpoint_files)

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[None, dict[str, str]]:
        """Asked before a model is written; its config then names what is packed now, not once was."""
        if any(isinstance(module, PackedModule) for module in model.modules()):
            model.config.quantization_config = RealizarConfig.from_model(model)
        elif hasattr(model.config, "quantization_config"):
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


def _of_another_head(formats: Mapping[str, str], model: PreTrainedModel) -> dict[str, str]:
    """What a model with another head, or without one, shares with the model that was saved."""
    prefix = f"{model.base_model_prefix}."
    if not hasattr(model, model.base_model_prefix):
        formats = {name.removeprefix(prefix): fmt for name, fmt in formats.items() if name.startswith(prefix)}
    modules = dict(model.named_modules())
    return {name: fmt for name, fmt in formats.items() if name in modules}


def _check_complete(model: PreTrainedModel, files: Sequence[str]) -> None:
    """transformers would start what a checkpoint lacks at random, with a warning only."""
    stored: dict[str, list[int]] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            stored |= {name: file.get_slice(name).get_shape() for name in names}
    tied = model.all_tied_weights_keys
    own = {name: value for name, value in model.state_dict().items() if name not in tied}
    # mixtures are written expert by expert, unless save_original_format=False
    forms = (own, revert_weight_conversion(model, own))
    written = max(forms, key=lambda form: len(form.keys() & stored.keys()))
    state = {name: list(value.shape) for name, value in written.items()}
    problems = [f"missing {name} {shape}" for name, shape in state.items() if name not in stored]
    problems += [f"unexpected {name}" for name in stored.keys() - state.keys() - tied.keys()]
    problems += [
        f"{name} has shape {stored[name]}, expected {shape}"
        for name, shape in state.items()
        if name in stored and stored[name] != shape
    ]
    refuse_incomplete("the checkpoint", model, problems)
