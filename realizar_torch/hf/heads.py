"""One checkpoint, several classes: what a model has in common with the one that was saved, by name.

A body without a head calls its parts without the prefix that they have in a model with one.
"""

import copy
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from realizar_torch.errors import FormatError


def saved_model(model: PreTrainedModel) -> PreTrainedModel | None:
    """What ``model.config`` says was saved: ``model`` itself, or one of another class, on meta.

    None where that class is neither one of transformers nor a neighbour of the model's own. FormatError for
    a config whose ``architectures`` are no names.
    """
    names = model.config.architectures or [type(model).__name__]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise FormatError(
            f"config.json has architectures {names!r:.80}, expected a list of names of classes; save the "
            "model again"
        )
    if type(model).__name__ in names:
        return model
    places = (sys.modules[type(model).__module__], transformers)
    kind: Any = next((getattr(place, names[0]) for place in places if hasattr(place, names[0])), None)
    is_model = isinstance(kind, type) and issubclass(kind, PreTrainedModel)
    if not is_model or not isinstance(model.config, kind.config_class or ()):
        return None
    with torch.device("meta"):
        return kind(copy.deepcopy(model.config))


def placed(names: Iterable[str], prefix: str, known: Iterable[str]) -> dict[str, str]:
    """Name in a checkpoint -> name in a model that has those ``known``; without those that have none.

    As transformers looks for it: without the prefix of the body, with it, or as it is.
    """
    known = set(known)
    found = {}
    for name in names:
        candidates = (name.removeprefix(f"{prefix}."), f"{prefix}.{name}", name)
        if counterpart := next((candidate for candidate in candidates if candidate in known), None):
            found[name] = counterpart
    return found


def formats_in(
    model: PreTrainedModel, formats: Mapping[str, str], saved: PreTrainedModel | None
) -> dict[str, str]:
    """``formats`` of the saved modules by their names in ``model``: of those that it has and what is tied.

    FormatError for a name that the saved model did not have either.
    """
    if saved is not None:
        modules = _module_names(saved)
        if unknown := [name for name in formats if name not in modules]:
            raise FormatError(
                f"quantization_config gives a format to {unknown[0]!r:.80}, expected names of modules of "
                f"{type(saved).__name__}; save the model again"
            )
    names = placed(formats, model.base_model_prefix, _module_names(model))
    found = {name: formats[of] for of, name in names.items()}
    tied = {
        target.removesuffix(".weight"): source.removesuffix(".weight")
        for target, source in model.all_tied_weights_keys.items()
    }
    return {target: found[source] for target, source in tied.items() if source in found} | found


def _module_names(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_modules(remove_duplicate=False)}
