"""When a row ends: stop ids, and stop strings found in the text even where they cross token boundaries."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from realizar_torch.checkpoint.token_checks import check_text

_SYMBOLS = re.compile("[\ud800-\udfff]+")


class Detokenizer(Protocol):
    """Turns a row's ids into text piece by piece; never yields half a character."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


@dataclass(frozen=True)
class StopStrings:
    """texts: what is searched for. symbols: id -> what stands in them for a special token, which has no text.

    A string with the text of special tokens, "<|im_end|>", is there with symbols for them, and as it is, for
    a model that spells it. What is on both sides of such a token is not read as one text.
    """

    texts: tuple[str, ...]
    symbols: Mapping[int, str]

    @classmethod
    def of(cls, strings: Iterable[str], tokenizer: Any) -> "StopStrings":
        """``tokenizer``: one of the caller's own need not know its special tokens."""
        texts: list[str] = []
        symbols: dict[int, str] = {}
        for text in strings:
            check_text(text)
            texts.append(text)
            ids = tokenizer.special_tokens_in(text) if hasattr(tokenizer, "special_tokens_in") else {}
            named = {name: symbols.setdefault(i, _symbol(len(symbols))) for name, i in ids.items()}
            if named:
                texts.append(_replaced(text, named))
        return cls(tuple(texts), symbols)


def _symbol(number: int) -> str:
    """Two lone surrogates, which no text has."""
    return chr(0xD800 + (number >> 10)) + chr(0xDC00 + (number & 0x3FF))


def _replaced(text: str, symbols: Mapping[str, str]) -> str:
    return re.sub("|".join(map(re.escape, symbols)), lambda name: symbols[name[0]], text)


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
        stop_strings: StopStrings,
        detokenizer: Detokenizer | None = None,
    ) -> None:
        self._stop_ids = frozenset(stop_ids)
        self._text, self._symbols = HeldText(stop_strings.texts), stop_strings.symbols
        self._detokenizer = detokenizer
        self.reason: str | None = None

    def push(self, token_id: int) -> str:
        """Takes the row's next token; returns the text that is now certain to belong to the answer."""
        symbol = self._symbols.get(token_id, "")
        if token_id in self._stop_ids:
            return self.end("eos", symbol)
        if self._detokenizer is None:
            return ""
        released = self._text.push(self._detokenizer.push(token_id) + symbol)
        if self._text.stopped:
            self.reason = "stop_string"
        return self._shown(released)

    def end(self, reason: str, symbol: str = "") -> str:
        """Ends the row from outside or by a stop id; returns the text that was still held back."""
        self.reason = reason
        if self._detokenizer is None:
            return ""
        released = self._text.push(self._detokenizer.flush() + symbol)
        if self._text.stopped:
            self.reason = "stop_string"
        return self._shown(released + self._text.flush())

    def _shown(self, text: str) -> str:
        return _SYMBOLS.sub("", text) if self._symbols else text
