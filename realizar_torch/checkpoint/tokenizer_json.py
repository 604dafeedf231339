"""The tokenizer of a Hugging Face directory: tokenizer.json, run by the ``tokenizers`` library."""

import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from realizar_torch.checkpoint.gguf_errors import damaged
from realizar_torch.checkpoint.json_files import read_json, read_text
from realizar_torch.checkpoint.token_checks import check_ids, check_text, checked_id
from realizar_torch.checkpoint.token_kinds import Kind, correct_kinds
from realizar_torch.checkpoint.tokenizer import Tokenizer
from realizar_torch.checkpoint.tokenizer_metadata import CHAT_TEMPLATE, TokenizerMetadata
from realizar_torch.checkpoint.turn_end import find_turn_end
from realizar_torch.errors import CheckpointError, FormatError, UnsupportedArchitectureError

if TYPE_CHECKING:
    from realizar_torch.checkpoint.chat_template import ChatTemplate

# The first key is of the GGUF specification; the others carry what stands in the files beside tokenizer.json.
TOKENIZER_JSON = "tokenizer.huggingface.json"
SPECIAL_TOKENS = "tokenizer.huggingface.special_tokens"
END_IDS = "tokenizer.huggingface.eos_token_ids"
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")
# many times what the largest vocabularies have; bounds the memory that a hostile id can cost
_MOST_IDS = 1 << 24


def tokenizer_metadata(directory: Path) -> dict[str, Any]:
    """What the files of ``directory`` say about the tokenizer, as metadata; empty without a tokenizer.json.

    config.json and generation_config.json name the ids that end a generation.
    """
    if not (directory / "tokenizer.json").is_file():
        return {}
    metadata: dict[str, Any] = {TOKENIZER_JSON: read_text(directory / "tokenizer.json")}
    settings = _optional(directory / "tokenizer_config.json")
    tokens = {name: settings.get(name) for name in _SPECIAL}
    # a token is a text, or an object that holds it
    texts = {
        name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()
    }
    metadata[SPECIAL_TOKENS] = {name: text for name, text in texts.items() if isinstance(text, str)}
    metadata[END_IDS] = [
        identifier
        for name in ("config.json", "generation_config.json")
        for identifier in _as_list(_optional(directory / name).get("eos_token_id"))
        if type(identifier) is int
    ]
    template = settings.get("chat_template")
    if isinstance(template, list):
        # several by name
        named = (entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default")
        template = next((entry.get("template") for entry in named), None)
    if (directory / "chat_template.jinja").is_file():
        template = read_text(directory / "chat_template.jinja")
    if template is not None:
        metadata[CHAT_TEMPLATE] = template
    return metadata


def tokenizer_of(
    metadata: Mapping[str, Any], source: str, vocab_size: int = 0
) -> "Tokenizer | JsonTokenizer":
    """The tokenizer that a model's metadata describe, in whichever of the two forms.

    vocab_size: of the model, which may be padded beyond the ids that tokenizer.json has.

    CheckpointError where there is none; else as Tokenizer.from_gguf and JsonTokenizer.from_metadata.
    """
    if TOKENIZER_JSON in metadata:
        return JsonTokenizer.from_metadata(metadata, source, vocab_size)
    if not any(key.startswith("tokenizer.") for key in metadata):
        raise CheckpointError(
            f"{source} has no tokenizer (tokenizer.json); pass tokenizer=, the path of one or a Tokenizer"
        )
    return Tokenizer.from_gguf(metadata)


class JsonTokenizer:
    """The interface of ``Tokenizer`` over tokenizer.json. `chat_template`, its text or None, may be set.

    model_vocab_size: rows of the model's embedding. Ids behind the tokenizer's own up to there are padding,
    as llama.cpp's converter says: special, and no text.
    """

    def __init__(
        self,
        text: str,
        special_tokens: Mapping[str, str],
        end_ids: Iterable[int] = (),
        chat_template: str | None = None,
        source: str = "tokenizer.json",
        model_vocab_size: int = 0,
    ) -> None:
        self._text = text
        self._plain = _parse(text, source)
        # the texts of special tokens are text, unless asked otherwise
        self._plain.encode_special_tokens = True
        self._special_tokens = dict(special_tokens)
        self.chat_template = chat_template
        vocabulary = self._plain.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocabulary.values(), default=-1) + 1
        if not 1 <= self.vocab_size <= _MOST_IDS:
            found, expected = f"{self.vocab_size} ids", f"1 to {_MOST_IDS}"
            raise damaged(source, "vocabulary", found, expected)
        self._known_ids = max(self.vocab_size, model_vocab_size)
        self.bos_token_id, self.eos_token_id, self.pad_token_id = (
            vocabulary.get(special_tokens.get(name)) for name in ("bos_token", "eos_token", "pad_token")
        )
        kinds = bytearray([Kind.NORMAL]) * self.vocab_size
        known = correct_kinds(kinds, vocabulary, TokenizerMetadata({}), self.eos_token_id)
        stated = (identifier for identifier in end_ids if 0 <= identifier < self.vocab_size)
        self.eos_token_ids: tuple[int, ...] = tuple(sorted({*known, *stated}))

    @property
    def turn_end_ids(self) -> tuple[int, ...]:
        """The special token by which the chat template ends an answer, unless one of `eos_token_ids` does."""
        return find_turn_end(self, self.is_special)

    @classmethod
    def from_metadata(
        cls, metadata: Mapping[str, Any], source: str = "tokenizer.json", model_vocab_size: int = 0
    ) -> "JsonTokenizer":
        """Made from what ``tokenizer_metadata`` found."""
        return cls(
            metadata[TOKENIZER_JSON],
            metadata.get(SPECIAL_TOKENS, {}),
            metadata.get(END_IDS, ()),
            metadata.get(CHAT_TEMPLATE),
            source,
            model_vocab_size,
        )

    @functools.cached_property
    def _parsing(self) -> Any:
        """The same, taking the text of special tokens for the tokens."""
        return _parse(self._text, "tokenizer.json")

    @property
    def metadata(self) -> dict[str, Any]:
        """The entries from which `from_metadata` makes the same tokenizer."""
        template = {} if self.chat_template is None else {CHAT_TEMPLATE: self.chat_template}
        return {
            TOKENIZER_JSON: self._text,
            SPECIAL_TOKENS: self._special_tokens,
            END_IDS: list(self.eos_token_ids),
            **template,
        }

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        """Ids of `text`, as `Tokenizer.encode`; `add_special_tokens` adds what tokenizer.json says."""
        check_text(text)
        tokenizer = self._parsing if parse_special else self._plain
        try:
            return tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except Exception as error:
            # the library has no class of its own
            raise FormatError(f"tokenizer.json cannot encode the text: {error}") from error

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`, an iterable of ints or a 1-D tensor. FormatError for foreign ids."""
        check_ids(ids)
        checked = [checked_id(token_id, self._known_ids) for token_id in ids]
        return self._plain.decode(checked, skip_special_tokens=skip_special_tokens)

    def detokenizer(self, *, skip_special_tokens: bool = True) -> "JsonDetokenizer":
        """A fresh incremental decoder with `push(id)` and `flush()`, for text that is shown as it grows."""
        return JsonDetokenizer(self, skip_special_tokens=skip_special_tokens)

    def special_tokens_in(self, text: str) -> dict[str, int]:
        """Text and id of each token that `decode` skips and whose text is in `text`, the longest first."""
        specials = self._special_texts.items()
        # few beginnings, for what may be thousands of tokens and a long text
        begun = {start for start in {special[:2] for _, special in specials} if start in text}
        return {
            special: token_id for token_id, special in specials if special[:2] in begun and special in text
        }

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tokenize: bool = True,
        chat_template: str | None = None,
        **variables: Any,
    ) -> list[int] | str:
        """The prompt for a conversation, as `Tokenizer.apply_chat_template`; the template writes the BOS."""
        source = chat_template if chat_template is not None else self.chat_template
        if source is None:
            raise UnsupportedArchitectureError(
                "the directory has no chat template, as is usual for base models: generate from a plain "
                "prompt, or set tokenizer.chat_template to the text of a jinja2 template"
            )
        # what is no text is refused, and may have no hash
        compiled = _compiled if isinstance(source, str) else _compiled.__wrapped__
        prompt = compiled(source).render(
            messages, add_generation_prompt=add_generation_prompt, **(self._special_tokens | variables)
        )
        return self.encode(prompt, add_special_tokens=False, parse_special=True) if tokenize else prompt

    def is_special(self, token_id: int) -> bool:
        """True for tokens that stand for no text."""
        return token_id in self._special_texts or self.vocab_size <= token_id < self._known_ids

    @functools.cached_property
    def _special_texts(self) -> dict[int, str]:
        """Id -> text, the longest first."""
        added = self._plain.get_added_tokens_decoder()
        texts = {token_id: token.content for token_id, token in added.items() if token.special}
        return dict(sorted(texts.items(), key=lambda item: -len(item[1])))

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_parsing"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # which the library's copies forget
        self._plain.encode_special_tokens = True


class JsonDetokenizer:
    """`push` each id, then `flush` once: the pieces put together are `JsonTokenizer.decode` of all ids.

    Decoders look at neighbours (a space in front of a text, bytes of one character), so each push decodes the
    tokens since the last piece behind those of the last piece, and gives what has come to it. What was shown
    stays, even where the ``ByteFallback`` decoder takes back good bytes of a run that goes bad later.
    """

    def __init__(self, tokenizer: JsonTokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._shown: list[int] = []
        self._waiting: list[int] = []

    def push(self, token_id: int) -> str:
        """The text that this id completes."""
        if self._skip and self._tokenizer.is_special(token_id):
            return ""
        self._waiting.append(operator.index(token_id))
        piece = self._new_text()
        # an unfinished character shows as U+FFFD at the end; it may also be the text's own
        return "" if piece.endswith("�") else self._show(piece)

    def flush(self) -> str:
        """What is left of an unfinished character, as U+FFFD."""
        return self._show(self._new_text())

    def _new_text(self) -> str:
        decode = functools.partial(self._tokenizer.decode, skip_special_tokens=self._skip)
        return decode(self._shown + self._waiting)[len(decode(self._shown)) :]

    def _show(self, piece: str) -> str:
        if piece:
            self._shown, self._waiting = self._waiting, []
        return piece


@functools.lru_cache(maxsize=4)
def _compiled(source: str) -> "ChatTemplate":
    from realizar_torch.checkpoint.chat_template import ChatTemplate

    return ChatTemplate(source)


def _parse(text: str, source: str) -> Any:
    from tokenizers import Tokenizer as Library

    try:
        return Library.from_str(text)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        # the library raises bare Exceptions, and panics, which are none
        raise damaged(source, "tokenizer.json", str(error), "a tokenizer") from None


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
