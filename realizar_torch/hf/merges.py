"""The merges of a SentencePiece vocabulary, which GGUF files do not hold: found by hashing, not by search."""

from collections.abc import Sequence

import numpy as np

_BASE = np.uint64(0x9E3779B97F4A7C15)


def merge_pairs(tokens: Sequence[str], scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ids (left, right) of every two tokens that together are a token, the best score of the whole first.

    Of equal scores the lower ids come first. A text's hash is its characters as digits of a number in base
    B, modulo 2**64, so hash(whole) = hash(left)·B**len(right) + hash(right): all tokens are cut behind
    their k-th character at once, and both hashes looked up among those of the tokens. Half a million pairs
    among 262,144 tokens take half a second.
    """
    count = len(tokens)
    digits = np.frombuffer("".join(tokens).encode("utf-32-le"), np.uint32).astype(np.uint64) + 1
    lengths = np.fromiter(map(len, tokens), np.int64, count)
    starts = np.cumsum(lengths) - lengths
    longest = int(lengths.max(initial=0))
    powers = _powers(longest)

    def grow(hashes: np.ndarray, owners: np.ndarray, position: int) -> None:
        hashes[owners] = hashes[owners] * _BASE + digits[starts[owners] + position]

    whole = np.zeros(count, np.uint64)
    for position in range(longest):
        grow(whole, np.flatnonzero(lengths > position), position)
    order = np.argsort(whole)
    known = whole[order]

    def find(wanted: np.ndarray) -> np.ndarray:
        at = np.minimum(np.searchsorted(known, wanted), count - 1)
        return np.where(known[at] == wanted, order[at], -1)

    found = []
    left_part = np.zeros(count, np.uint64)
    for cut in range(1, longest):
        owners = np.flatnonzero(lengths > cut)
        grow(left_part, owners, cut - 1)
        left = find(left_part[owners])
        owners, left = owners[left >= 0], left[left >= 0]
        right = find(whole[owners] - left_part[owners] * powers[lengths[owners] - cut])
        found.append(np.stack([owners, left, right])[:, right >= 0])
    owners, left, right = np.concatenate(found, axis=1) if found else np.zeros((3, 0), np.int64)
    rank = np.lexsort((right, left, -scores[owners]))
    return left[rank], right[rank]


def _powers(count: int) -> np.ndarray:
    """B**0 … B**count modulo 2**64."""
    factors = np.full(count + 1, _BASE)
    factors[0] = 1
    return np.cumprod(factors)
