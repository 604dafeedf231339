"""The tokenizer of a GGUF file as transformers' PreTrainedTokenizerFast."""

import ctypes
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from realizar_torch.checkpoint.sentence_piece import SPACE
from realizar_torch.checkpoint.token_kinds import Kind
from realizar_torch.checkpoint.tokenizer_metadata import TokenizerMetadata
from realizar_torch.checkpoint.vocabulary import BYTE_LEVEL, Vocabulary
from realizar_torch.hf.merges import merge_pairs

# Tokens that never take the spaces behind them.
_PLAIN = frozenset(["<unk>", "<s>", "<|endoftext|>"])
_FOUND_WHOLE = (Kind.UNKNOWN, Kind.CONTROL, Kind.USER_DEFINED)


def build_tokenizer(vocabulary: Vocabulary, metadata: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """The tokenizer that ``vocabulary``, read from ``metadata``, describes.

    As transformers' tokenizers do, it finds the text of special tokens in every text. Batches are padded on
    the left, for generation, with the file's padding token or else its end of text.
    """
    build = _byte_level if vocabulary.model == BYTE_LEVEL else _sentence_piece
    backend = build(vocabulary, metadata)
    # as in checkpoint.tokenizer: Phi-3's tokens swallow the spaces behind them, and no key says so
    name = str(metadata.get("general.name", "")).lower()
    swallows = "phi-3" in name or "phi3" in name
    backend.add_tokens(
        [
            AddedToken(
                vocabulary.tokens[i],
                normalized=False,
                special=kind != Kind.USER_DEFINED,
                rstrip=swallows and vocabulary.tokens[i] not in _PLAIN,
            )
            for i, kind in enumerate(vocabulary.kinds)
            if kind in _FOUND_WHOLE
        ]
    )
    _return_freed_memory()
    padding = vocabulary.eos if vocabulary.padding is None else vocabulary.padding
    special = {"bos": vocabulary.bos, "eos": vocabulary.eos, "unk": vocabulary.unknown, "pad": padding}
    return PreTrainedTokenizerFast(
        tokenizer_object=_Finished(backend),
        **{f"{name}_token": vocabulary.tokens[i] for name, i in special.items() if i is not None},
        add_bos_token=vocabulary.add_bos,
        add_eos_token=vocabulary.add_eos,
        chat_template=metadata.get("tokenizer.chat_template"),
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def _return_freed_memory() -> None:
    """Half a million short-lived strings leave holes that glibc would keep: 80 MiB after gemma-3's merges."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def _byte_level(vocabulary: Vocabulary, metadata: Mapping[str, Any]) -> Tokenizer:
    rules = vocabulary.pretokenizer
    assert rules is not None
    ids: Any = vocabulary.ids
    merges = _Merges(ids, TokenizerMetadata(metadata).texts("merges"))
    backend = Tokenizer(models.BPE(ids, merges, ignore_merges=rules.ignore_merges))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rules.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentence_piece(vocabulary: Vocabulary, metadata: Mapping[str, Any]) -> Tokenizer:
    scores = TokenizerMetadata(metadata).numbers("scores", vocabulary.size)
    left, right = merge_pairs(vocabulary.tokens, scores)
    ids: Any = vocabulary.ids
    backend = Tokenizer(
        models.BPE(
            ids,
            _Pairs(vocabulary.tokens, left, right),
            byte_fallback=True,
            fuse_unk=True,
            unk_token=None if vocabulary.unknown is None else vocabulary.tokens[vocabulary.unknown],
        )
    )
    prefix = [normalizers.Prepend(SPACE)] if vocabulary.add_space_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if vocabulary.add_space_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


class _Merges(Sequence[tuple[str, str]]):
    """Merges "left right" as pairs, made while they are read, without those that pass through no token."""

    def __init__(self, ids: Mapping[str, int], merges: Sequence[str]) -> None:
        self._merges = [merge for merge in dict.fromkeys(merges) if _reaches_tokens(merge, ids)]

    def __len__(self) -> int:
        return len(self._merges)

    # tokenizers reads one pair at a time, so that slices are not needed
    def __getitem__(self, index: int) -> tuple[str, str]:  # type: ignore[override]
        left, _, right = self._merges[index].partition(" ")
        return left, right


def _reaches_tokens(merge: str, ids: Mapping[str, int]) -> bool:
    left, _, right = merge.partition(" ")
    return left in ids and right in ids and left + right in ids


class _Pairs(Sequence[tuple[str, str]]):
    """Pairs of tokens that are given by their ids, made while they are read."""

    def __init__(self, tokens: Sequence[str], left: np.ndarray, right: np.ndarray) -> None:
        self._tokens, self._left, self._right = tokens, left, right

    def __len__(self) -> int:
        return len(self._left)

    # tokenizers reads one pair at a time, so that slices are not needed
    def __getitem__(self, index: int) -> tuple[str, str]:  # type: ignore[override]
        return self._tokens[self._left[index]], self._tokens[self._right[index]]

    def __iter__(self) -> Iterator[tuple[str, str]]:
        tokens = self._tokens
        return (
            (tokens[i], tokens[j]) for i, j in zip(self._left.tolist(), self._right.tolist(), strict=True)
        )


class _Finished:
    """A tokenizer to hand over: transformers deep-copies what it gets, which takes seconds."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend

    def __deepcopy__(self, memo: dict[int, Any]) -> Tokenizer:
        return self._backend
