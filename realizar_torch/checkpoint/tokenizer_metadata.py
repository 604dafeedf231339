"""Typed access to the `tokenizer.ggml.*` entries of a GGUF header; what is malformed raises `GGUFError`, or
`FormatError` where the caller of `rt.load` gave it."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from realizar_torch.checkpoint.overridden import wrong_entry
from realizar_torch.errors import FormatError, GGUFError

CHAT_TEMPLATE = "tokenizer.chat_template"


class TokenizerMetadata:
    """`metadata` maps full keys to values, as `GGUFFile.metadata` does; arrays may be lazy."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata

    def get(self, name: str) -> Any:
        """The value of `tokenizer.ggml.<name>`, or None."""
        return self._metadata.get(f"tokenizer.ggml.{name}")

    def wrong(self, sentence: str, name: str) -> FormatError | GGUFError:
        """The error for what ``sentence`` says of ``tokenizer.ggml.<name>``."""
        key = f"tokenizer.ggml.{name}"
        return wrong_entry(self._metadata, f"{key}: {sentence}", key, advice=". Convert the file again.")

    def array(self, name: str, length: int = 1) -> Sequence[Any]:
        """An array of at least `length` elements."""
        value = self.get(name)
        if not isinstance(value, Sequence) or isinstance(value, str) or len(value) < length:
            raise self.wrong(f"found {value!r:.80}, expected an array of at least {length} elements", name)
        return value

    def texts(self, name: str) -> list[str]:
        """An array of at least one text."""
        values = list(self.array(name))
        if other := next((kind for kind in set(map(type, values)) if kind is not str), None):
            raise self.wrong(f"found an array with {other.__name__}, expected one of texts", name)
        return values

    def numbers(self, name: str, length: int) -> np.ndarray:
        """The first `length` elements of a numeric array."""
        value = self.array(name, length)
        result = value.numpy() if hasattr(value, "numpy") else np.asarray(value)
        if result.dtype.kind not in "iuf":
            raise self.wrong(f"found {result.dtype}, expected numbers", name)
        return result[:length]

    def flag(self, name: str, default: bool) -> bool:
        """A boolean, `default` when absent."""
        value = self._metadata.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, bool):
            raise self.wrong(f"found {value!r:.80}, expected true or false", name)
        return value

    def token_id(self, name: str, size: int, default: int | None = None) -> int | None:
        """`<name>_token_id` in a vocabulary of `size` tokens; an id outside it counts as absent, as in
        llama.cpp, and so does such a default."""
        for value in (self.get(f"{name}_token_id"), default):
            if isinstance(value, int) and 0 <= value < size:
                return value
        return None
