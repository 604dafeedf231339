"""Modules whose class is extended after they were made, under its own name: nothing else of them changes."""

import functools
from typing import Any

from torch import nn


class Extended(nn.Module):
    """Copied and pickled as the class that it extends, which, unlike itself, can be imported."""

    # the class that is extended, and the forward that it had when it first was
    extended_class: Any
    own_forward: Any

    def __reduce_ex__(self, protocol: Any) -> Any:
        if "own_forward" not in vars(type(self)):
            # somebody has extended it once more
            return super().__reduce_ex__(protocol)
        kind, base = type(self).__bases__
        return _new, (kind, base), self.__getstate__()


def extend(module: nn.Module, kind: type) -> None:
    """Gives ``module`` a class that extends its own by what ``kind`` has."""
    base: Any = type(module)
    module.__class__ = _extended(kind, base)


@functools.cache
def _extended(kind: type, base: Any) -> Any:
    described = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(
        base.__name__,
        (kind, base),
        {**described, "extended_class": base, "own_forward": staticmethod(base.forward)},
    )


def _new(kind: type, base: Any) -> nn.Module:
    extended = _extended(kind, base)
    return extended.__new__(extended)
