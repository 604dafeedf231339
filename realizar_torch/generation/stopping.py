"""When a row ends: stop ids, and stop strings found in the text even where they cross token boundaries."""

from collections.abc import Iterable
from typing import Protocol


class Detokenizer(Protocol):
    """Turns a row's ids into text piece by piece; never yields half a character."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class HeldText:
    """Releases text as soon as it cannot become part of a stop string any more, and cuts at the first stop
    string.

    What ``push`` and ``flush`` return, joined, is the text before the stop string that is completed first.
    """

    def __init__(self, stop_strings: Iterable[str]) -> None:
        self._stop_strings = tuple(stop_strings)
        self._held = ""
        self.stopped = False

    def push(self, piece: str) -> str:
        if self.stopped:
            return ""
        text = self._held + piece
        found = [position for position in (text.find(stop) for stop in self._stop_strings) if position >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)]
        released = len(text) - self._longest_beginning_of_a_stop(text)
        self._held = text[released:]
        return text[:released]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _longest_beginning_of_a_stop(self, text: str) -> int:
        longest = max((len(stop) for stop in self._stop_strings), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop_strings):
                return length
        return 0


class RowStop:
    """Follows one row of a generation: tells why it ended and, given a detokenizer, what text it has
    released.

    reason: None while the row runs, then "eos" (a stop id, which adds no text), "stop_string" or "length".
    """

    def __init__(
        self,
        stop_ids: Iterable[int],
        stop_strings: Iterable[str] = (),
        detokenizer: Detokenizer | None = None,
    ) -> None:
        self._stop_ids = frozenset(stop_ids)
        self._text = HeldText(stop_strings)
        self._detokenizer = detokenizer
        self.reason: str | None = None

    def push(self, token_id: int) -> str:
        """Takes the row's next token; returns the text that is now certain to belong to the answer."""
        if token_id in self._stop_ids:
            return self.end("eos")
        if self._detokenizer is None:
            return ""
        released = self._text.push(self._detokenizer.push(token_id))
        if self._text.stopped:
            self.reason = "stop_string"
        return released

    def end(self, reason: str) -> str:
        """Ends the row from outside or by a stop id; returns the text that was still held back."""
        self.reason = reason
        if self._detokenizer is None:
            return ""
        released = self._text.push(self._detokenizer.flush())
        if self._text.stopped:
            self.reason = "stop_string"
        return released + self._text.flush()
