"""The vocabulary of a GGUF file: token texts and kinds, special ids, and what is added to a text.

As in llama.cpp, which is the oracle for ids, with one exception: BPE files that name no BOS or EOS have none,
where llama.cpp takes token 11, which was Falcon's.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from realizar_torch.caller import warn_caller
from realizar_torch.checkpoint.pretokenizers import DEFAULT_PRE, PreTokenizer, get_pretokenizer
from realizar_torch.checkpoint.token_kinds import Kind, correct_kinds
from realizar_torch.checkpoint.tokenizer_metadata import TokenizerMetadata
from realizar_torch.errors import GGUFError, UnsupportedArchitectureError

BYTE_LEVEL = "gpt2"
SENTENCE_PIECE = "llama"


@dataclass(frozen=True)
class Vocabulary:
    """Everything about tokens that both directions need, text to ids and ids to text.

    `kinds[i]` is the `Kind` of token i, `ids` the inverse of `tokens`; "llama" models have no `pretokenizer`.
    """

    model: str
    pretokenizer: PreTokenizer | None
    tokens: Sequence[str]
    ids: Mapping[str, int]
    kinds: bytes
    bos: int | None
    eos: int | None
    unknown: int | None
    padding: int | None
    end_of_generation: tuple[int, ...]
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool

    @property
    def size(self) -> int:
        """Number of tokens."""
        return len(self.tokens)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> "Vocabulary":
        """Read `tokenizer.ggml.*`. Raises `GGUFError` for a vocabulary that contradicts itself and
        `UnsupportedArchitectureError` for a tokenizer model or pre-tokenizer this package does not know."""
        entries = TokenizerMetadata(metadata)
        model = entries.get("model")
        if model not in (BYTE_LEVEL, SENTENCE_PIECE):
            raise UnsupportedArchitectureError(
                f"tokenizer.ggml.model is {model!r}; supported are {BYTE_LEVEL!r} (byte-level BPE) and "
                f"{SENTENCE_PIECE!r} (SentencePiece). Pass a tokenizer of your own to load this file."
            )
        sentence_piece = model == SENTENCE_PIECE
        pretokenizer = None if sentence_piece else _pretokenizer(entries)
        tokens, ids = _tokens(entries)
        size = len(tokens)
        bos = entries.token_id("bos", size, 1 if sentence_piece else None)
        eos = entries.token_id("eos", size, 2 if sentence_piece else None)
        kinds = bytearray(_kinds(entries, tokens))
        end_of_generation = correct_kinds(kinds, ids, entries, eos)
        wants_bos = sentence_piece or (pretokenizer is not None and pretokenizer.add_bos)
        return cls(
            model=model,
            pretokenizer=pretokenizer,
            tokens=tokens,
            ids=ids,
            kinds=bytes(kinds),
            bos=bos,
            eos=eos,
            unknown=entries.token_id("unknown", size, 0 if sentence_piece else None),
            padding=entries.token_id("padding", size),
            end_of_generation=end_of_generation,
            add_bos=_adds(entries, "bos", wants_bos, bos),
            add_eos=_adds(entries, "eos", False, eos),
            add_space_prefix=sentence_piece and entries.flag("add_space_prefix", True),
        )


def _pretokenizer(entries: TokenizerMetadata) -> PreTokenizer:
    name = entries.get("pre")
    if name is None:
        warn_caller(
            f"the file names no pre-tokenizer (tokenizer.ggml.pre), so {DEFAULT_PRE!r} is used, as in "
            "llama.cpp: text may be cut where it was not in training; convert the file again"
        )
        name = DEFAULT_PRE
    return get_pretokenizer(name)


def _tokens(entries: TokenizerMetadata) -> tuple[list[str], dict[str, int]]:
    # llama.cpp names an empty token by its position, so that texts stay distinct
    tokens = [text or f"[EMPTY_{i}]" for i, text in enumerate(entries.texts("tokens"))]
    ids = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(ids) != len(tokens):
        first = next(i for i, text in enumerate(tokens) if ids[text] != i)
        raise GGUFError(
            f"tokenizer.ggml.tokens: {tokens[first]!r} is token {first} and token {ids[tokens[first]]}, "
            "expected distinct texts. Convert the file again."
        )
    return tokens, ids


def _kinds(entries: TokenizerMetadata, tokens: Sequence[str]) -> bytes:
    if entries.get("token_type") is None:
        return bytes([Kind.NORMAL]) * len(tokens)
    kinds = entries.numbers("token_type", len(tokens))
    for i in np.flatnonzero(kinds == Kind.BYTE).tolist():
        if not re.fullmatch("<0x[0-9A-Fa-f]{2}>", tokens[i]):
            raise GGUFError(
                f"tokenizer.ggml.tokens: token {i} is {tokens[i]!r}, but tokenizer.ggml.token_type calls it "
                "a byte, expected '<0x00>' to '<0xFF>'. Convert the file again."
            )
    known = (kinds >= Kind.UNDEFINED) & (kinds <= Kind.BYTE)
    return np.where(known, kinds, Kind.UNDEFINED).astype(np.uint8).tobytes()


def _adds(entries: TokenizerMetadata, name: str, default: bool, token: int | None) -> bool:
    wanted = entries.flag(f"add_{name}_token", default)
    if wanted and token is None:
        raise GGUFError(
            f"the tokenizer adds {name.upper()} to every text, but tokenizer.ggml.{name}_token_id is missing "
            f"or outside the vocabulary. Set it, or set tokenizer.ggml.add_{name}_token to false."
        )
    return wanted
