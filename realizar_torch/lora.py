"""LoRA with peft on packed layers: the adapters train in floats beside bytes that never change.

    config = LoraConfig(r=8, target_modules=["q_proj", "v_proj"])
    model = get_peft_model(base, rt.lora.packed(config))
    model.save_pretrained(folder)
    config = LoraConfig.from_pretrained(folder)
    model = PeftModel.from_pretrained(base, folder, config=rt.lora.packed(config))

peft learns of the layer through the config object alone, and does not store that: pass a loaded one through
``packed`` as well. Packed bytes take no update, so merging is refused until ``dequantize`` has replaced them.
For a model of ``rt.load`` leave ``task_type`` None: for "CAUSAL_LM" peft needs a model of transformers.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from realizar_torch.caller import warn_caller
from realizar_torch.errors import BackendUnavailableError, FormatError
from realizar_torch.nn.linear import QuantizedLinear

try:
    from peft import LoraConfig
    from peft.tuners.lora import Linear as LoraLinear
except ImportError as error:
    raise BackendUnavailableError(
        f"realizar_torch.lora needs the package peft, which cannot be imported ({error}); "
        "install it: pip install 'realizar-torch[hf]'"
    ) from error

# the others start from the float weight, which a packed layer does not have
_INITIAL = (True, False, "gaussian", "eva")


def packed(config: LoraConfig, model: nn.Module | None = None) -> LoraConfig:
    """``config`` itself, after which ``target_modules`` may name QuantizedLinear layers.

    model: the base model, which has to be given with ``modules_to_save`` or ``trainable_token_indices``:
        what these train is the weight itself, so they may name dense modules alone.

    Plain LoRA only: variants such as DoRA, and ``init_lora_weights`` that decompose the weight, are refused
    when a layer is wrapped; ``fan_in_fan_out=True``, of GPT-2's Conv1D layers, is then set to False with a
    warning, for packed weights are ``[out, in]`` in every model. FormatError for any other config, for
    "all-linear", by which peft means dense layers alone, and for packed modules whose weight is trained.
    """
    if not isinstance(config, LoraConfig):
        raise FormatError(f"config is a {type(config).__name__}, expected a peft.LoraConfig")
    if config.target_modules == "all-linear":
        raise FormatError(
            "target_modules='all-linear' finds dense layers only; name the packed ones, or give a regular "
            "expression such as r'.*_proj'"
        )
    _refuse_trained_bytes("modules_to_save", config.modules_to_save, model)
    tokens = config.trainable_token_indices
    # a list is about the embedding alone, which peft finds by itself
    tables = tokens.keys() if isinstance(tokens, dict) else tokens and _input_embeddings(model)
    _refuse_trained_bytes("trainable_token_indices", tables, model)
    config._register_custom_module({QuantizedLinear: QuantizedLoraLinear})
    return config


def _input_embeddings(model: Any) -> list[str]:
    if not hasattr(model, "get_input_embeddings"):
        return ["embed_tokens"]
    table = model.get_input_embeddings()
    return [name for name, module in model.named_modules() if module is table]


def _refuse_trained_bytes(argument: str, names: Iterable[str] | None, model: nn.Module | None) -> None:
    if not names:
        return
    if model is None:
        raise FormatError(
            f"{argument} trains whole modules, which must not be packed; pass the model too, as "
            "rt.lora.packed(config, model), so that this can be checked"
        )
    for name, module in model.named_modules():
        tensors = (*module.parameters(), *module.buffers())
        # peft compares the ends of names
        if name.endswith(tuple(names)) and any(tensor.dtype == torch.uint8 for tensor in tensors):
            raise FormatError(
                f"{argument} names {name}, which is packed, and packed bytes take no gradient; leave it out, "
                "or make that module dense"
            )


def dequantize(model: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    """Replaces the packed layers under adapters by dense ones, in place; ``merge_and_unload`` then works.

    Each takes ``dtype.itemsize`` bytes a weight from now on. FormatError where there are no adapters.
    """
    adapted = [module for module in model.modules() if isinstance(module, QuantizedLoraLinear)]
    if not adapted:
        raise FormatError(
            f"the {type(model).__name__} has no adapters on packed layers, and no other layers are made "
            "dense; pass what get_peft_model gave"
        )
    for module in adapted:
        if isinstance(module.base_layer, QuantizedLinear):
            module.base_layer = module.base_layer.to_linear(dtype).requires_grad_(False)


class QuantizedLoraLinear(LoraLinear):
    """``base(x) + scaling * B(A(dropout(x)))`` with a QuantizedLinear as base."""

    # peft's class knows DoRA and more, all of which compute with a float base weight
    lora_variants = property(lambda self: {(): None})

    def __init__(self, base_layer: QuantizedLinear, adapter_name: str, config: LoraConfig, **options: Any):
        if base_layer.layout != "ggml":
            raise FormatError(
                f"this {type(base_layer).__name__} is packed as {base_layer.layout!r}; call rt.unpack(model) "
                "before adding adapters (rt.prepack works on adapted models)"
            )
        if config.fan_in_fan_out:
            # as peft does for nn.Linear: deltas would be added transposed, and a square one without a word
            warn_caller(
                "fan_in_fan_out is True, but packed weights are [out_features, in_features]: set to False"
            )
            config.fan_in_fan_out = False
        super().__init__(base_layer, adapter_name, config, **options)

    def update_layer(self, adapter_name: str, *args: Any, config: LoraConfig, **options: Any) -> None:
        if config.init_lora_weights not in _INITIAL:
            raise FormatError(
                f"init_lora_weights={config.init_lora_weights!r} decomposes the float weight, which packed "
                f"layers do not have; expected one of {', '.join(map(repr, _INITIAL))}"
            )
        super().update_layer(adapter_name, *args, config=config, **options)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        if isinstance(self.base_layer, QuantizedLinear):
            raise FormatError(
                f"{self.base_layer.fmt} blocks take no update, so this adapter cannot be merged: keep it "
                "beside the layer, or call realizar_torch.lora.dequantize(model) first, which makes the "
                "layers dense"
            )
        super().merge(safe_merge, adapter_names)

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        # peft warns of layers it does not know
        assert isinstance(module, QuantizedLinear)
        return module.in_features, module.out_features
