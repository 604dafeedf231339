"""The safetensors of a checkpoint against the model they are meant for, before any weight is loaded.

transformers would start what is missing at random, bytes of blocks not at all, with a warning only.
"""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from realizar_torch.hf.heads import placed
from realizar_torch.hf.mapping import refuse_incomplete


def check_complete(model: PreTrainedModel, saved: PreTrainedModel | None, files: Sequence[str]) -> None:
    """MissingTensorsError unless ``files`` hold all that ``model`` shares with the model that was saved.

    Where the two are one, nothing else may be in the files. saved None: some model with the same body.
    """
    stored = _shapes(files)
    body: Any = model.base_model
    prefix = model.base_model_prefix
    # mixtures are written expert by expert, unless save_original_format=False
    forms = zip(_written(model), _written(saved or body), strict=True)
    state, theirs = max(forms, key=lambda form: len(placed(stored, prefix, form[0])))
    found = {name: stored[of] for of, name in placed(stored, prefix, state).items()}
    shared = set(placed(theirs, prefix, state).values())
    packed = {name for name, value in state.items() if value.dtype == torch.uint8}
    unasked = stored.keys() - state.keys() - model.all_tied_weights_keys.keys()
    keys: Any = SimpleNamespace(
        missing_keys=shared - packed - found.keys(), unexpected_keys=unasked if model is saved else set()
    )
    model._adjust_missing_and_unexpected_keys(keys)
    missing = keys.missing_keys | packed - found.keys()
    shapes = {name: list(value.shape) for name, value in state.items()}
    problems = [f"missing {name} {shape}" for name, shape in shapes.items() if name in missing]
    problems += [f"unexpected {name}" for name in sorted(keys.unexpected_keys)]
    # those of floats are compared by transformers, which can be told to ignore a difference
    problems += [
        f"{name} has shape {found[name]}, expected {shapes[name]}"
        for name in shapes
        if name in packed & found.keys() and found[name] != shapes[name]
    ]
    refuse_incomplete("the checkpoint", model, problems)


def _shapes(files: Sequence[str]) -> dict[str, list[int]]:
    shapes: dict[str, list[int]] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            shapes |= {name: file.get_slice(name).get_shape() for name in names}
    return shapes


def _written(model: PreTrainedModel) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
    """What ``save_pretrained`` writes of a model: as it is, and in the form of its published checkpoints."""
    unwritten = model.all_tied_weights_keys.keys() | (model._keys_to_ignore_on_save or set())
    own = {name: value for name, value in model.state_dict().items() if name not in unwritten}
    return own, revert_weight_conversion(model, own)
