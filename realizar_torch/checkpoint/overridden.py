"""Metadata with entries of the caller in front of the file's, and whom to blame for a wrong one."""

from collections.abc import Iterator, Mapping
from typing import Any

from realizar_torch.errors import FormatError, GGUFError


class OverriddenMetadata(Mapping[str, Any]):
    """The file's metadata behind ``overrides``. read: keys that somebody asked for."""

    def __init__(self, metadata: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
        self._metadata, self.overrides = metadata, dict(overrides)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return self.overrides[key] if key in self.overrides else self._metadata[key]

    def __iter__(self) -> Iterator[str]:
        return iter({**self._metadata, **self.overrides})

    def __len__(self) -> int:
        return len(self._metadata.keys() | self.overrides.keys())


def wrong_entry(
    metadata: Mapping[str, Any], sentence: str, *keys: str, source: str | None = None, advice: str = ""
) -> FormatError | GGUFError:
    """The error for what ``sentence`` says of the values of ``keys``.

    A FormatError about ``config`` where the caller gave one of them, else a GGUFError about the file
    ``source``, with ``advice`` on what to do with it.
    """
    overrides = metadata.overrides if isinstance(metadata, OverriddenMetadata) else {}
    for key in keys:
        if key in overrides:
            return FormatError(f"config[{key!r}] is {overrides[key]!r:.80}: {sentence}")
    return GGUFError(f"{'' if source is None else f'{source}: '}{sentence}{advice}")
