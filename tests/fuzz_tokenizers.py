"""Random and nasty strings through our tokenizer and llama.cpp's: every id must agree. Run by hand.

    pip install llama-cpp-python
    python tests/fuzz_tokenizers.py 20000 llama.cpp/models/ggml-vocab-*.gguf SmolLM2.gguf gemma-3.gguf

For each file whose tokenizer is supported, then for every pre-tokenizer and every SentencePiece variant over
the small vocabularies of the goldens. Each string is encoded bare, and with special tokens added and parsed;
the bare ids must decode to the string again where the vocabulary has every byte.
"""

import random
import sys
import time
import unicodedata
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from make_tokenizer_goldens import TEXTS, Oracle, oracle_of
from tiny_tokenizers import PRE, SENTENCE_PIECE

from realizar_torch.checkpoint.byte_level_bpe import byte_alphabet
from realizar_torch.checkpoint.gguf import open_gguf
from realizar_torch.checkpoint.pretokenizers import PRE_TOKENIZERS
from realizar_torch.checkpoint.sentence_piece import SPACE
from realizar_torch.checkpoint.tokenizer import Tokenizer
from realizar_torch.checkpoint.vocabulary import BYTE_LEVEL

SUPPORTED = ("gpt2", "llama")
_ASCII = [chr(code) for code in range(32, 127)]
_SPACES = [" ", " ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u2009", "\u3000", "\x0b", "\x1c", "\x85", " " * 7]
_GLUE = [
    "'s",
    "'LL",
    "'ſ",
    "’t",
    "▁",
    "Ġ",
    "\u200d",
    "\ufe0f",
    "\u0301",
    "\0",
    "<|",
    "|>",
    "<0x0A>",
    "_",
    "123",
    "٣",
]


class Nasty:
    """Strings of 1 to 40 parts: characters that Unicode assigns, spaces, glue, words, tokens."""

    def __init__(self, tokens: list[str], seed: int) -> None:
        self._random = random.Random(seed)
        unassigned = ("Cn", "Cs", "Co")
        self._any = [c for c in map(chr, range(1, 0x110000)) if unicodedata.category(c) not in unassigned]
        self._common = [c for c in self._any if ord(c) < 0x3000]
        self._words = [word for text in TEXTS for word in text.split(" ") if word]
        self._tokens = [token for token in tokens if len(token) > 2]

    def __iter__(self) -> Iterator[str]:
        choose = self._random.choice
        kinds: list[Callable[[], str]] = [
            lambda: choose(_ASCII),
            lambda: choose(_SPACES),
            lambda: choose(_GLUE),
            lambda: choose(self._any),
            lambda: choose(self._common),
            lambda: choose(self._words),
            lambda: choose(self._tokens),
            lambda: choose(self._tokens)[1:],
            lambda: choose(self._any) * self._random.randint(2, 9),
        ]
        while True:
            # few kinds at a time, so that runs of one kind come about
            some = self._random.sample(kinds, self._random.randint(1, 4))
            yield "".join(choose(some)() for _ in range(self._random.randint(1, 40)))


def compare(name: str, metadata: Mapping[str, Any], oracle: Oracle, count: int) -> int:
    """Prints how many of ``count`` strings differ, and the first that does; returns the number."""
    started = time.perf_counter()
    with warnings.catch_warnings():
        # some vocabularies name no pre-tokenizer
        warnings.simplefilter("ignore", UserWarning)
        tokenizer = Tokenizer.from_gguf(metadata)
    vocabulary, alphabet = tokenizer.vocabulary, byte_alphabet()

    def can_come_back(text: str) -> bool:
        # SentencePiece writes a space as U+2581, some byte-level vocabularies lack bytes
        if vocabulary.model != BYTE_LEVEL:
            return SPACE not in text
        return all(alphabet[byte] in vocabulary.ids for byte in text.encode())

    wrong, lost = [], []
    for _, text in zip(range(count), Nasty(list(metadata["tokenizer.ggml.tokens"]), seed=6), strict=False):
        bare = tokenizer.encode(text, add_special_tokens=False)
        full = tokenizer.encode(text, parse_special=True)
        if [bare, full] != oracle.both(text):
            wrong.append(text)
        if can_come_back(text) and tokenizer.decode(bare) != text:
            lost.append(text)
    seconds = time.perf_counter() - started
    print(
        f"{name}: {count} strings in {seconds:.0f} s; {len(wrong)} differ {wrong[:1]!a}, "
        f"{len(lost)} do not come back {lost[:1]!a}",
        flush=True,
    )
    return len(wrong)


def main() -> None:
    count = int(sys.argv[1])
    differing = 0
    for path in map(Path, sys.argv[2:]):
        metadata = open_gguf(path).metadata
        if metadata["tokenizer.ggml.model"] in SUPPORTED:
            differing += compare(path.stem, metadata, Oracle(path), count)
    names = {row: name for name, row in reversed(PRE_TOKENIZERS.items())}
    for name in names.values():
        metadata = PRE["metadata"] | {"tokenizer.ggml.pre": name}
        differing += compare(f"pre-tokenizer {name}", metadata, oracle_of(metadata), count)
    for variant in SENTENCE_PIECE["variants"]:
        metadata = SENTENCE_PIECE["metadata"] | variant["metadata"]
        differing += compare(f"SentencePiece {variant['metadata']}", metadata, oracle_of(metadata), count)
    sys.exit(bool(differing))


if __name__ == "__main__":
    main()
