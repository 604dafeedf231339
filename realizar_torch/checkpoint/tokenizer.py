"""The tokenizer of a GGUF file: text to ids as llama.cpp does it, ids to text, the file's chat template."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from realizar_torch.checkpoint.byte_level_bpe import ByteLevelBPE
from realizar_torch.checkpoint.detokenizer import Detokenizer, Pieces
from realizar_torch.checkpoint.sentence_piece import SentencePiece
from realizar_torch.checkpoint.special_tokens import SpecialTokens
from realizar_torch.checkpoint.token_checks import check_ids, check_text
from realizar_torch.checkpoint.token_kinds import Kind
from realizar_torch.checkpoint.tokenizer_metadata import CHAT_TEMPLATE, TokenizerMetadata
from realizar_torch.checkpoint.turn_end import find_turn_end
from realizar_torch.checkpoint.vocabulary import BYTE_LEVEL, Vocabulary
from realizar_torch.errors import UnsupportedArchitectureError

if TYPE_CHECKING:
    from realizar_torch.checkpoint.chat_template import ChatTemplate

# the name of the model whose tokenizer it is, in metadata of a model that has another name
_MADE_FOR = "tokenizer.made_for"


class Tokenizer:
    """Made by `Tokenizer.from_gguf(metadata)`. `chat_template`, the template's text or None, may be set."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        model: ByteLevelBPE | SentencePiece,
        special_tokens: SpecialTokens,
        metadata: Mapping[str, Any],
    ) -> None:
        self.vocabulary = vocabulary
        self.chat_template: str | None = metadata.get(CHAT_TEMPLATE)
        self._metadata = metadata
        self._model = model
        self._special_tokens = special_tokens
        self._pieces = Pieces(vocabulary)
        self._compiled_template: ChatTemplate | None = None

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        """Build from `tokenizer.*` of a GGUF header.

        Raises `UnsupportedArchitectureError` for a tokenizer model or pre-tokenizer this package does not
        know, `GGUFError` for entries that are missing or contradict each other.
        """
        vocabulary = Vocabulary.from_gguf(metadata)
        entries = TokenizerMetadata(metadata)
        model: ByteLevelBPE | SentencePiece
        if vocabulary.model == BYTE_LEVEL:
            model = ByteLevelBPE(vocabulary, entries.texts("merges"))
        else:
            model = SentencePiece(vocabulary, entries.numbers("scores", vocabulary.size).tolist())
        # Phi-3's tokens swallow the spaces behind them; no key says so, and llama.cpp goes by the name, too
        name = _made_for(metadata).lower()
        special_tokens = SpecialTokens(vocabulary, strip_right="phi-3" in name or "phi3" in name)
        return cls(vocabulary, model, special_tokens, metadata)

    @property
    def metadata(self) -> dict[str, Any]:
        """The entries from which `from_gguf` makes the same tokenizer; arrays may lie in the file."""
        entries = {key: value for key, value in self._metadata.items() if key.startswith("tokenizer.")}
        entries.pop(CHAT_TEMPLATE, None)
        if self.chat_template is not None:
            entries[CHAT_TEMPLATE] = self.chat_template
        return {**entries, _MADE_FOR: _made_for(self._metadata)}

    def __getstate__(self) -> dict[str, Any]:
        # of a file's metadata only what is needed: its mapping is no value, nor is a compiled template
        return {**self.__dict__, "_metadata": self.metadata, "_compiled_template": None}

    @property
    def vocab_size(self) -> int:
        """Number of tokens; the model's logits may have more columns."""
        return self.vocabulary.size

    @property
    def bos_token_id(self) -> int | None:
        """The beginning-of-text id, or None."""
        return self.vocabulary.bos

    @property
    def eos_token_id(self) -> int | None:
        """The end-of-text id, or None. Generation stops at any of `eos_token_ids`."""
        return self.vocabulary.eos

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every id that the file ends generations by, ascending: end of text, end of turn and their like."""
        return self.vocabulary.end_of_generation

    @property
    def turn_end_ids(self) -> tuple[int, ...]:
        """The control token by which the chat template ends an answer, unless one of `eos_token_ids` does."""
        return find_turn_end(self, lambda token: self.vocabulary.kinds[token] == Kind.CONTROL)

    @property
    def pad_token_id(self) -> int | None:
        """The padding id, or None when the file names none."""
        return self.vocabulary.padding

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        """Ids of `text`.

        `add_special_tokens` puts BOS in front and EOS behind if the file asks for them. `parse_special` takes
        the text of control tokens (such as "<|im_end|>") for the tokens: leave it off for text from users.
        Raises `FormatError` for text with lone surrogates, which no UTF-8 can hold.
        """
        vocabulary = self.vocabulary
        check_text(text)
        ids = []
        if add_special_tokens and vocabulary.add_bos and vocabulary.bos is not None:
            ids.append(vocabulary.bos)
        for fragment in self._special_tokens.split(text, parse_special=parse_special):
            ids += [fragment] if isinstance(fragment, int) else self._model.encode(fragment)
        if add_special_tokens and vocabulary.add_eos and vocabulary.eos is not None:
            ids.append(vocabulary.eos)
        return ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`, an iterable of ints or a 1-D tensor.

        Bytes that are no UTF-8 become U+FFFD; nothing is tidied up, spaces before punctuation stay.
        Raises `FormatError` for ids outside the vocabulary.
        """
        check_ids(ids)
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return "".join([*map(detokenizer.push, ids), detokenizer.flush()])

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """A fresh incremental decoder with `push(id)` and `flush()`, for text that is shown as it grows."""
        return Detokenizer(self._pieces, skip_special_tokens=skip_special_tokens)

    def special_tokens_in(self, text: str) -> dict[str, int]:
        """Text and id of each token that `decode` skips and whose text is in `text`, the longest first."""
        return self._special_tokens.named_in(text)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tokenize: bool = True,
        chat_template: str | None = None,
        **variables: Any,
    ) -> list[int] | str:
        """The prompt for a conversation: ids, or text with `tokenize=False`.

        `chat_template` replaces the file's; `variables` (`tools=`, …) reach the template. The ids begin with
        exactly one BOS if the template or the file wants one, and no EOS is put behind them.
        Raises `UnsupportedArchitectureError` without a template, `FormatError` when the template refuses.
        """
        from realizar_torch.checkpoint.chat_template import ChatTemplate

        source = chat_template if chat_template is not None else self.chat_template
        if source is None:
            raise UnsupportedArchitectureError(
                "the file has no chat template, as is usual for base models: generate from a plain prompt, "
                "or set tokenizer.chat_template to the text of a jinja2 template"
            )
        if self._compiled_template is None or self._compiled_template.source != source:
            self._compiled_template = ChatTemplate(source)
        vocabulary = self.vocabulary
        special = {"bos": vocabulary.bos, "eos": vocabulary.eos}
        special |= {"pad": vocabulary.padding, "unk": vocabulary.unknown}
        texts = {f"{name}_token": vocabulary.tokens[i] for name, i in special.items() if i is not None}
        prompt = self._compiled_template.render(
            messages, add_generation_prompt=add_generation_prompt, **(texts | variables)
        )
        if not tokenize:
            return prompt
        ids = self.encode(prompt, add_special_tokens=False, parse_special=True)
        if vocabulary.add_bos and vocabulary.bos is not None and ids[:1] != [vocabulary.bos]:
            ids.insert(0, vocabulary.bos)
        return ids


def _made_for(metadata: Mapping[str, Any]) -> str:
    return str(metadata.get(_MADE_FOR, metadata.get("general.name", "")))
