"""Byte-level BPE ("gpt2" models): text to ids with the `tokenizers` library, equal to llama.cpp.

The characters that stand for bytes are GPT-2's: printable Latin-1 for itself, the other 68 bytes from U+0100
upward.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from realizar_torch.checkpoint.vocabulary import Vocabulary
from realizar_torch.errors import GGUFError


def byte_alphabet() -> str:
    """256 characters; the one at index b stands for byte b."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return "".join(chr(byte if byte in printable else next(others)) for byte in range(256))


class ByteLevelBPE:
    """Text to ids. `merges` are the strings "left right" of `tokenizer.ggml.merges`, most important first."""

    def __init__(self, vocabulary: Vocabulary, merges: Iterable[str]) -> None:
        from tokenizers import Regex, Tokenizer, models, pre_tokenizers

        assert vocabulary.pretokenizer is not None, "only byte-level vocabularies have a pre-tokenizer"
        pairs = _Pairs(merges)
        stand_ins = _stand_ins(pairs, vocabulary.ids)
        self._size = vocabulary.size
        self._expansions = list(stand_ins.values())
        ids = dict(vocabulary.ids) | {text: self._size + i for i, text in enumerate(stand_ins)}
        self._tokenizer = Tokenizer(
            models.BPE(ids, pairs, ignore_merges=vocabulary.pretokenizer.ignore_merges)
        )
        patterns = map(Regex, vocabulary.pretokenizer.patterns)
        splits = [pre_tokenizers.Split(pattern, "isolated") for pattern in patterns]
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, in which special tokens are not looked for."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        if not self._expansions:
            return ids
        expansions, size = self._expansions, self._size
        return [i for token in ids for i in (expansions[token - size] if token >= size else (token,))]


class _Pairs(Sequence[tuple[str, str]]):
    """Merges as pairs that live only while they are read: tens of thousands of tuples at once would set off a
    full garbage collection, which takes longer than everything else here."""

    def __init__(self, merges: Iterable[str]) -> None:
        # the first of equal merges counts
        self._merges = list(dict.fromkeys(merges))

    def __len__(self) -> int:
        return len(self._merges)

    def __getitem__(self, index: int) -> tuple[str, str]:  # type: ignore[override]
        return _pair(self._merges[index])

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return map(_pair, self._merges)


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not left or not right:
        raise GGUFError(
            f"tokenizer.ggml.merges holds {merge!r}; expected two parts and a space between them. "
            "Convert the file again."
        )
    return left, right


def _stand_ins(pairs: Iterable[tuple[str, str]], ids: Mapping[str, int]) -> dict[str, list[int]]:
    """Texts that merging passes through although they are no tokens, and the ids that come out for them.

    Real vocabularies lack bytes (SmolLM2 has no 0xF1). llama.cpp merges them like any other symbol; if no
    token comes of it, it writes the single characters that are tokens. `tokenizers` needs an id for each.
    """
    needed = set(byte_alphabet())
    for left, right in pairs:
        needed.update((left, right, left + right))
    return {
        text: [ids[character] for character in text if character.isascii() and character in ids]
        for text in sorted(needed - ids.keys())
    }
