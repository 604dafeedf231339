"""Typed access to the `tokenizer.ggml.*` entries of a GGUF header; what is malformed raises `GGUFError`."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from realizar_torch.errors import GGUFError


class TokenizerMetadata:
    """`metadata` maps full keys to values, as `GGUFFile.metadata` does; arrays may be lazy."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata

    def get(self, name: str) -> Any:
        """The value of `tokenizer.ggml.<name>`, or None."""
        return self._metadata.get(f"tokenizer.ggml.{name}")

    def array(self, name: str, length: int = 1) -> Sequence[Any]:
        """An array of at least `length` elements."""
        value = self.get(name)
        if not isinstance(value, Sequence) or isinstance(value, str) or len(value) < length:
            raise GGUFError(
                f"tokenizer.ggml.{name}: found {value!r:.80}, expected an array of at least {length} "
                "elements. Convert the file again."
            )
        return value

    def numbers(self, name: str, length: int) -> np.ndarray:
        """The first `length` elements of a numeric array."""
        value = self.array(name, length)
        result = value.numpy() if hasattr(value, "numpy") else np.asarray(value)
        if result.dtype.kind not in "iuf":
            raise GGUFError(
                f"tokenizer.ggml.{name}: found {result.dtype}, expected numbers. Convert the file again."
            )
        return result[:length]

    def flag(self, name: str, default: bool) -> bool:
        """A boolean, `default` when absent."""
        value = self._metadata.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, bool):
            raise GGUFError(f"tokenizer.ggml.{name}: found {value!r:.80}, expected true or false.")
        return value

    def token_id(self, name: str, size: int, default: int | None = None) -> int | None:
        """`<name>_token_id` in a vocabulary of `size` tokens; an id outside it counts as absent, as in
        llama.cpp, and so does such a default."""
        for value in (self.get(f"{name}_token_id"), default):
            if isinstance(value, int) and 0 <= value < size:
                return value
        return None
