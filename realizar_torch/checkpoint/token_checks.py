"""What every tokenizer refuses: text that no UTF-8 can hold, and ids of another model."""

import operator
from collections.abc import Iterable

from realizar_torch.errors import FormatError


def check_text(text: str) -> None:
    """FormatError for what is no text, and for text with lone surrogates."""
    if not isinstance(text, str):
        raise FormatError(f"the text is a {type(text).__name__}, expected a str; encode one text at a time")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise FormatError(
            f"the text holds the lone surrogate U+{ord(text[error.start]):04X} at {error.start}, "
            "expected text that UTF-8 can hold; decode its source with errors='replace'"
        ) from error


def check_ids(ids: Iterable[int]) -> None:
    """FormatError for what is not several ids; each of them is judged by ``checked_id``."""
    try:
        iter(ids)
    except TypeError:
        raise FormatError(f"the ids are {ids!r:.80}, expected a list of ids or a 1-D tensor") from None


def checked_id(token_id: int, size: int) -> int:
    """The id as an int; FormatError for what is none, or outside a vocabulary of ``size`` ids."""
    try:
        token_id = operator.index(token_id)
    except TypeError:
        raise FormatError(
            f"a token id is {token_id!r:.80}, expected an integer; of a batch decode a row at a time, ids[0]"
        ) from None
    if not 0 <= token_id < size:
        raise FormatError(
            f"token id {token_id} is outside the vocabulary of {size} tokens; "
            "was it made by another model's tokenizer?"
        )
    return token_id
