"""Warnings that point at the code of whoever called this package, however many frames lie between."""

import sys
import warnings

_BETWEEN = ("realizar_torch", "torch")


def warn_caller(message: str) -> None:
    """A UserWarning at the nearest line outside this package and torch, or at the outermost one."""
    depth, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _BETWEEN:
        depth, frame = depth + 1, frame.f_back
    warnings.warn(message, stacklevel=depth)
