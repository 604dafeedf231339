"""The safetensors of a checkpoint against what is said of them and the model they are meant for.

All before any weight is loaded: transformers would start what is missing at random, bytes of blocks not at
all, and cast what has another dtype, with a warning at most.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from realizar_torch.checkpoint.gguf_errors import damaged, shown, shown_path
from realizar_torch.hf.heads import placed
from realizar_torch.hf.mapping import refuse_incomplete
from realizar_torch.models.saved_format import FORMATS_KEY

_BYTES = "U8"


@dataclass(frozen=True)
class Header:
    """What the files say of their tensors: name -> dtype and shape; name -> block format, of packed ones.

    source: a file to name in errors. Directories of older versions tell no formats.
    """

    source: str
    tensors: Mapping[str, tuple[str, list[int]]]
    formats: Mapping[str, str]

    @classmethod
    def of(cls, files: Sequence[str]) -> "Header":
        """Of all ``files`` together; CheckpointError for formats that cannot be read."""
        tensors: dict[str, tuple[str, list[int]]] = {}
        formats: dict[str, str] = {}
        for path in files:
            with safe_open(path, framework="pt") as file:
                names = file.keys()
                slices = {name: file.get_slice(name) for name in names}
                tensors |= {name: (part.get_dtype(), part.get_shape()) for name, part in slices.items()}
                text = (file.metadata() or {}).get(FORMATS_KEY, "{}")
            try:
                formats |= json.loads(text)
            except (ValueError, TypeError, RecursionError):
                raise damaged(
                    shown_path(Path(path)), f"metadata {FORMATS_KEY!r}", shown(text), "formats of tensors"
                ) from None
        return cls(shown_path(Path(files[0])), tensors, formats)


def told_formats(formats: Mapping[str, str]) -> dict[str, str]:
    """What the files are to say of modules with these ``formats``, since bytes do not tell Q4_0 from Q4_K."""
    return {FORMATS_KEY: json.dumps({f"{module}.weight": fmt for module, fmt in formats.items()})}


def check_formats(stated: Mapping[str, str], header: Header) -> None:
    """CheckpointError where the files say something else than ``stated``: module -> format."""
    expected = {f"{module}.weight": fmt for module, fmt in stated.items()}
    for name in header.formats and sorted(header.formats.keys() | expected.keys()):
        found, wanted = header.formats.get(name), expected.get(name)
        if found != wanted:
            where, wants = f"format of {shown(name)}", f"{wanted!r}, as config.json says"
            raise damaged(header.source, where, repr(found), wants)


def check_complete(model: PreTrainedModel, saved: PreTrainedModel | None, header: Header) -> None:
    """MissingTensorsError unless the files hold all that ``model`` shares with the model that was saved.

    Where the two are one, nothing else may be in the files. saved None: some model with the same body.
    """
    stored = header.tensors
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
    problems = [f"missing {name} {list(state[name].shape)}" for name in state if name in missing]
    problems += [f"unexpected {name}" for name in sorted(keys.unexpected_keys)]
    for name, (dtype, shape) in found.items():
        expected = list(state[name].shape)
        if (dtype == _BYTES) != (name in packed):
            problems.append(f"{name} is {dtype}, expected {_BYTES if name in packed else 'floats'}")
        elif name in packed and shape != expected:
            # those of floats are compared by transformers, which can be told to ignore a difference
            problems.append(f"{name} has shape {shape}, expected {expected}")
    refuse_incomplete("the checkpoint", model, problems)


def _written(model: PreTrainedModel) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
    """What ``save_pretrained`` writes of a model: as it is, and in the form of its published checkpoints."""
    unwritten = model.all_tied_weights_keys.keys() | (model._keys_to_ignore_on_save or set())
    own = {name: value for name, value in model.state_dict().items() if name not in unwritten}
    return own, revert_weight_conversion(model, own)
