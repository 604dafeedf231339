"""Ids to text, one token at a time: bytes of a token, and UTF-8 that never breaks inside a character."""

import codecs
from collections.abc import Mapping

from realizar_torch.checkpoint.byte_level_bpe import byte_alphabet
from realizar_torch.checkpoint.sentence_piece import SPACE
from realizar_torch.checkpoint.token_checks import checked_id
from realizar_torch.checkpoint.token_kinds import Kind
from realizar_torch.checkpoint.vocabulary import BYTE_LEVEL, Vocabulary


class Pieces:
    """The bytes that each token stands for."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokens, self._kinds = vocabulary.tokens, vocabulary.kinds
        self._bytes: Mapping[str, bytes] | None = None
        if vocabulary.model == BYTE_LEVEL:
            self._bytes = {character: bytes([byte]) for byte, character in enumerate(byte_alphabet())}
        # A space that the encoder put in front of the text is no part of it.
        self.leading_space = vocabulary.add_space_prefix

    def piece(self, token_id: int, *, skip_special_tokens: bool) -> bytes:
        """Bytes of one token; unused tokens have none. `FormatError` for an id outside the vocabulary."""
        token_id = checked_id(token_id, len(self._tokens))
        text, kind = self._tokens[token_id], self._kinds[token_id]
        if kind in (Kind.CONTROL, Kind.UNKNOWN):
            return b"" if skip_special_tokens else text.encode()
        if kind == Kind.BYTE:
            return bytes.fromhex(text[3:5])
        if kind == Kind.USER_DEFINED:
            return text.replace(SPACE, " ").encode() if self._bytes is None else text.encode()
        if kind != Kind.NORMAL:
            return b""
        if self._bytes is None:
            return text.replace(SPACE, " ").encode()
        decode = self._bytes
        return b"".join(decode.get(character) or character.encode() for character in text)


class Detokenizer:
    """Turns a growing sequence of ids into text: `push` each id, then `flush` once.

    The pieces put together are exactly `Tokenizer.decode` of all ids. A piece may be empty: bytes wait until
    their character is whole; bytes that never become one turn into U+FFFD. Every push costs the same. To
    continue a prompt, push its ids first and drop what comes out: so the first new word keeps its space.
    """

    def __init__(self, pieces: Pieces, *, skip_special_tokens: bool = True) -> None:
        self._pieces, self._skip = pieces, skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = pieces.leading_space

    def push(self, token_id: int) -> str:
        """The text that this id completes."""
        piece = self._pieces.piece(token_id, skip_special_tokens=self._skip)
        if self._at_start and piece:
            piece = piece.removeprefix(b" ")
            self._at_start = False
        return self._decoder.decode(piece)

    def flush(self) -> str:
        """What is left of an unfinished character, as U+FFFD."""
        return self._decoder.decode(b"", final=True)
