"""SentencePiece-style BPE ("llama" models): text to ids by the scores of tokens, bytes as the last resort.

Of all neighbouring symbols that together are a token, the pair with the highest score is merged first, of
equal scores the leftmost: the rule of sentencepiece and llama.cpp, which needs no list of merges.
`tokenizers` does: half a million ranked pairs for gemma-3, 1.6 s to derive and load, and no two of them can
rank equal.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import pairwise

from realizar_torch.checkpoint.vocabulary import Vocabulary

SPACE = "▁"
_LONGEST_WORD = 32


class SentencePiece:
    """Text to ids. `scores[i]` is the score of token i."""

    def __init__(self, vocabulary: Vocabulary, scores: Sequence[float]) -> None:
        self._ids = vocabulary.ids
        self._scores = scores
        self._add_space_prefix = vocabulary.add_space_prefix
        self._byte_ids = [_byte_id(vocabulary, byte) for byte in range(256)]
        # No merge joins x and a space if no token holds the two side by side, so the text may be cut there.
        spaced = (token for token in vocabulary.tokens if token.find(SPACE, 1) > 0)
        before_space = {x for token in spaced for x, y in pairwise(token) if y == SPACE != x}
        joined = "".join(map(re.escape, sorted(before_space)))
        self._cut = re.compile(f"(?<![{SPACE}{joined}])(?={SPACE})")
        self._remembered = lru_cache(maxsize=1 << 16)(self._merge)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, a whole text or what follows a special token; special tokens are not looked for."""
        if self._add_space_prefix:
            text = " " + text
        text = text.replace(" ", SPACE)
        result: list[int] = []
        for word in self._cut.split(text):
            # words come again, long stretches without a space hardly ever
            result += self._remembered(word) if len(word) <= _LONGEST_WORD else self._merge(word)
        return result

    def _merge(self, word: str) -> list[int]:
        ids, scores, size = self._ids, self._scores, len(word)
        # A symbol is named by its first character: it reaches up to end[first], where the next symbol begins.
        # A symbol that was merged into another has end 0.
        end = list(range(1, size + 1))
        before = list(range(-1, size - 1))
        heap = []
        for left in range(size - 1):
            token = ids.get(word[left : left + 2])
            if token is not None:
                heap.append((-scores[token], left, left + 1, left + 2))
        heapify(heap)

        while heap:
            _, left, right, stop = heappop(heap)
            if end[left] != right or end[right] != stop:
                continue
            end[left], end[right] = stop, 0
            if stop < size:
                before[stop] = left
                token = ids.get(word[left : end[stop]])
                if token is not None:
                    heappush(heap, (-scores[token], left, stop, end[stop]))
            if left > 0:
                first = before[left]
                token = ids.get(word[first:stop])
                if token is not None:
                    heappush(heap, (-scores[token], first, left, stop))

        result = []
        first = 0
        while first < size:
            symbol = word[first : end[first]]
            token = ids.get(symbol)
            if token is not None:
                result.append(token)
            else:
                result.extend(i for byte in symbol.encode() if (i := self._byte_ids[byte]) is not None)
            first = end[first]
        return result


def _byte_id(vocabulary: Vocabulary, byte: int) -> int | None:
    ids = vocabulary.ids
    name = f"<0x{byte:02X}>"
    if name in ids:
        return ids[name]
    return ids.get(chr(byte), vocabulary.unknown) if byte < 0x80 else vocabulary.unknown
