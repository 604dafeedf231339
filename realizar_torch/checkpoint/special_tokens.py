"""Finding the text of special tokens inside a text, as llama.cpp does: everywhere the longest token first."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from realizar_torch.checkpoint.token_kinds import Kind
from realizar_torch.checkpoint.vocabulary import Vocabulary

# What C's isspace takes, which is what llama.cpp strips.
_C_SPACES = frozenset(" \t\n\v\f\r")
# Tokens that never take the spaces behind them, whatever the model.
_PLAIN = frozenset(["<unk>", "<s>", "<|endoftext|>"])


class _Special(NamedTuple):
    rank: int
    id: int
    text: str
    strip_right: bool


class SpecialTokens:
    """Splits text at special tokens.

    Tokens marked user-defined are found in every text, control and unknown tokens only when asked for. It is
    not a leftmost search: a longer token takes its occurrences before a shorter one is looked for.
    """

    def __init__(self, vocabulary: Vocabulary, *, strip_right: bool = False) -> None:
        """`strip_right`: spaces behind a special token belong to it, as in Phi-3."""
        kinds = np.frombuffer(vocabulary.kinds, np.uint8)
        found = np.flatnonzero(np.isin(kinds, [Kind.UNKNOWN, Kind.CONTROL, Kind.USER_DEFINED])).tolist()
        found.sort(key=lambda i: -len(vocabulary.tokens[i].encode()))
        # Tokens by their first two characters: a vocabulary has thousands of special tokens, a text has few.
        self._always: dict[str, list[_Special]] = defaultdict(list)
        self._when_parsed: dict[str, list[_Special]] = defaultdict(list)
        for rank, i in enumerate(found):
            text = vocabulary.tokens[i]
            group = self._always if kinds[i] == Kind.USER_DEFINED else self._when_parsed
            group[text[:2]].append(_Special(rank, i, text, strip_right and text not in _PLAIN))

    def split(self, text: str, *, parse_special: bool) -> list[str | int]:
        """Cut `text` into stretches of plain text (str, never empty) and special tokens (their ids)."""
        fragments: list[str | int] = [text] if text else []
        groups = (self._always, self._when_parsed) if parse_special else (self._always,)
        for special in _present(text, *groups):
            fragments = [part for fragment in fragments for part in _cut(fragment, special)]
        return fragments

    def named_in(self, text: str) -> dict[str, int]:
        """Text and id of each control or unknown token whose text is in `text`, the longest first."""
        return {special.text: special.id for special in _present(text, self._when_parsed)}


def _present(text: str, *groups: Mapping[str, list[_Special]]) -> list[_Special]:
    return sorted(
        special
        for group in groups
        for prefix, specials in group.items()
        if prefix in text
        for special in specials
        if special.text in text
    )


def _cut(fragment: str | int, special: _Special) -> Iterator[str | int]:
    if isinstance(fragment, int):
        yield fragment
        return
    position = 0
    while (found := fragment.find(special.text, position)) >= 0:
        if found > position:
            yield fragment[position:found]
        yield special.id
        position = found + len(special.text)
        while special.strip_right and fragment[position : position + 1] in _C_SPACES:
            position += 1
    if position < len(fragment):
        yield fragment[position:]
