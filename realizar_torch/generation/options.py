"""The keywords that every way to generate has in common: their names, and who complains about a wrong one."""

from collections.abc import Iterable, Sequence
from typing import Required, TypedDict

import torch

from realizar_torch.generation.prefix import PrefixCache


class Options(TypedDict, total=False):
    """Keywords of ``rt.generate``, ``rt.stream`` and ``model.generate``, which describes them. Their defaults
    are those of ``make_request``."""

    max_new_tokens: Required[int]
    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    eos_token_id: int | Sequence[int] | None
    pad_token_id: int | None
    stop_strings: str | Sequence[str] | None
    generator: torch.Generator | None
    prefix_cache: PrefixCache | None
    cuda_graph: bool | str


def check_keywords(function: str, names: Iterable[str]) -> None:
    """Python's own TypeErrors, with the name of the ``function`` that the user has called."""
    for name in names:
        if name not in Options.__annotations__:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
    if "max_new_tokens" not in names:
        raise TypeError(f"{function}() missing 1 required keyword-only argument: 'max_new_tokens'")
