"""Metadata with entries replaced by the caller, who is told of entries that nobody reads."""

import difflib
from collections.abc import Mapping
from typing import Any

from realizar_torch.checkpoint.overridden import OverriddenMetadata
from realizar_torch.checkpoint.source import ModelSource, SourceView
from realizar_torch.errors import FormatError


class OverriddenSource(SourceView):
    """The source with ``overrides`` (full keys, "llama.rope.freq_base") in front of its metadata."""

    def __init__(self, source: ModelSource, overrides: Mapping[str, Any]) -> None:
        super().__init__(source)
        if not isinstance(overrides, Mapping) or not all(isinstance(key, str) for key in overrides):
            raise FormatError(
                f"config is {overrides!r:.80}; expected a dict of metadata keys and their values"
            )
        self._merged = OverriddenMetadata(source.metadata, overrides)

    @property
    def arch(self) -> str:
        return self._merged["general.architecture"]

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self._merged

    def check_read(self) -> None:
        """FormatError for an override that nothing has asked for by now."""
        unread = sorted(self._merged.overrides.keys() - self._merged.read)
        if unread:
            near = difflib.get_close_matches(unread[0], self._merged.read, n=3, cutoff=0.5)
            hint = f"; keys that are read: {', '.join(near)}" if near else ""
            raise FormatError(f"config has {unread[0]!r}, which nothing reads for this model{hint}")
