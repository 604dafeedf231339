"""Typed, checked access to the metadata keys of one architecture."""

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from realizar_torch.checkpoint.overridden import wrong_entry
from realizar_torch.errors import FormatError, GGUFError

# Of models that rt.save wrote: rows stand in the order of the modules, not in that of GGUF converters.
MODULE_ROWS = "realizar_torch.module_rows"
# No size or length of a model comes near; kernels hold them, and products of two, in 64 bits.
LARGEST_INT = (1 << 31) - 1
# Nor this near; it bounds the lists that a hostile count of layers can make.
MOST_LAYERS = 1 << 16


class Keys:
    """The keys ``<architecture>.*``. GGUFError names a key that is missing or has an impossible value,
    FormatError one whose value the caller of ``rt.load`` gave."""

    def __init__(self, metadata: Mapping[str, Any], arch: str, source: str):
        self._metadata, self._arch, self.source = metadata, arch, source

    def wrong(self, sentence: str, *names: str) -> FormatError | GGUFError:
        """The error for what ``sentence`` says of the values of ``names``."""
        keys = (f"{self._arch}.{name}" for name in names)
        return wrong_entry(self._metadata, sentence, *keys, source=self.source)

    def optional(self, name: str, kind: type, default: Any) -> Any:
        """The value of a key, which must be of ``kind``; ``default`` where the file has none."""
        key = f"{self._arch}.{name}"
        return require(self._metadata, key, kind, self.source) if key in self._metadata else default

    def positive(self, name: str, default: float | None = None, kind: type = int) -> Any:
        """A number above 0, and finite; None as default: the file must have the key."""
        key = f"{self._arch}.{name}"
        if key not in self._metadata and default is not None:
            value = default
        else:
            value = require(self._metadata, key, kind, self.source)
        if not (value > 0 and math.isfinite(value)):
            raise self.wrong(f"{key} is {value}, expected a positive number", name)
        return value

    def factor(self, name: str, default: float = 1.0) -> float:
        """A finite number that multiplies something; 0 and a missing key mean ``default``."""
        value = self.optional(name, float, 0)
        if not math.isfinite(value):
            raise self.wrong(f"{self._arch}.{name} is {value}, expected a finite number", name)
        return float(value) or default

    def flags(self, name: str) -> tuple[bool, ...] | int | None:
        """An array of booleans, a positive number, or None where the key is missing."""
        key = f"{self._arch}.{name}"
        value = self._metadata.get(key)
        if isinstance(value, Sequence) and not isinstance(value, str):
            return tuple(bool(item) for item in value)
        return self.positive(name) if value is not None else None


def require(metadata: Mapping[str, Any], key: str, kind: type, source: str) -> Any:
    """The value of ``key``; GGUFError if it is missing, the error of ``wrong_entry`` if it is no ``kind``."""
    if key not in metadata:
        raise GGUFError(
            f"{source}: metadata key {key!r} is missing; the file cannot describe a model without it"
        )
    value = metadata[key]
    accepted = (int, float) if kind is float else kind
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        sentence = f"{key} is {type(value).__name__}, expected one {kind.__name__}"
        raise wrong_entry(metadata, sentence, key, source=source)
    largest = LARGEST_INT if kind is int else sys.float_info.max
    if isinstance(value, int) and abs(value) > largest:
        raise wrong_entry(metadata, f"{key} is {value}, expected at most {largest}", key, source=source)
    return kind(value)
