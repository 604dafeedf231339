"""Arguments as callers give them: numbers of NumPy as Python's, and things of the wrong kind named."""

import operator
from typing import Any

import numpy as np
import torch

from realizar_torch.errors import FormatError


def integer(value: Any, name: str) -> int:
    """An int of anything that is one, NumPy's and a tensor's integers included; bool is none."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise FormatError(f"{name} is {value!r}; expected an integer")


def plain(value: Any) -> Any:
    """A number of NumPy as Python's; anything else as it is."""
    return value.item() if isinstance(value, np.generic) else value


def check_model(model: Any) -> None:
    """FormatError unless ``model`` has what a generation asks of it."""
    if not all(hasattr(model, name) for name in ("config", "max_seq_len", "eos_token_ids")):
        advice = ""
        if hasattr(model, "generation_config"):
            advice = "; a model of transformers generates by its own generate"
        raise FormatError(f"model is a {type(model).__name__}; expected what rt.load returns first{advice}")
    check_stop_ids(model.eos_token_ids, "model.eos_token_ids")


def check_stop_ids(ids: Any, name: str) -> None:
    """FormatError unless ``ids`` is a tuple of ints."""
    if not isinstance(ids, tuple) or any(type(stop_id) is not int for stop_id in ids):
        raise FormatError(f"{name} is {ids!r:.80}; expected a tuple of ints, such as (2,), or () for none")


def check_tokenizer(tokenizer: Any) -> None:
    """FormatError unless ``tokenizer`` turns text into ids and ids into text as they come."""
    if not all(hasattr(tokenizer, name) for name in ("encode", "detokenizer")):
        raise FormatError(
            f"tokenizer is a {type(tokenizer).__name__}; expected what rt.load returns second, a Tokenizer"
        )


def check_values(tensor: torch.Tensor, name: str) -> None:
    """FormatError for a tensor whose values cannot be looked at one by one."""
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta:
        kind = "nested" if tensor.is_nested else "meta" if tensor.is_meta else str(tensor.layout)
        raise FormatError(f"{name} is a {kind} tensor; expected a dense one with values")
