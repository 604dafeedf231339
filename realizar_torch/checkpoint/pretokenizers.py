"""How a byte-level BPE tokenizer cuts text into words before merging: a row for each `tokenizer.ggml.pre`.

The patterns are those of llama.cpp's llama-vocab.cpp, written for Oniguruma. Several patterns apply one after
the other, each to the pieces that the one before it left; what matches becomes a piece and so does what lies
between. Characters newer than Unicode 15.0 belong to the classes that the installed `tokenizers` gives them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from realizar_torch.errors import UnsupportedArchitectureError

DEFAULT_PRE = "default"


@dataclass(frozen=True)
class PreTokenizer:
    """`patterns` in order of use; `ignore_merges`: a word that is a token is not built from its merges;
    `add_bos`: what holds when the file has no `add_bos_token`."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_UP_TO_THREE_DIGITS = r"\p{N}{1,3}"
_THREE_ASCII_DIGITS = r"[0-9][0-9][0-9]"

# Only ASCII letters: a case-insensitive group would also take U+017F for an s.
_CONTRACTION = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"

_LLAMA3 = f"{_CONTRACTION}|{_WORD}|{_UP_TO_THREE_DIGITS}|{_SYMBOLS}|{_SPACES}"
_QWEN2 = f"{_CONTRACTION}|{_WORD}|{_DIGIT}|{_SYMBOLS}|{_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|{_DIGIT}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_NO_CONTRACTION = f"{_WORD}|{_DIGIT}|{_SYMBOLS}|{_SPACES}"
_SEED_CODER = rf"{_CONTRACTION}|{_WORD}|{_DIGIT}| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}"
_MINICPM5 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}+|{_SYMBOLS}|{_SPACES}"
_EXAONE_MOE = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|{_DIGIT}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|{_SPACES}"
)
_JAIS2 = (
    rf"{_CONTRACTION}|{_WORD}|{_UP_TO_THREE_DIGITS}|{_SYMBOLS}|\s*[\r\n]+|\s{{512}}(?!\S)|\s{{256}}(?!\S)"
    r"|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}"
)

# "Upper" and "lower" are what llama.cpp can tell apart: every letter but a-z, every letter but A-Z.
_UPPER, _LOWER = r"[\p{L}&&[^a-z]]", r"[\p{L}&&[^A-Z]]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_CASED_SYMBOLS = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_TEKKEN = f"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|{_DIGIT}|{_CASED_SYMBOLS}"
_GPT4O = (
    f"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTION}?|{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTION}?"
    f"|{_UP_TO_THREE_DIGITS}|{_CASED_SYMBOLS}"
)

_NEWLINE = r"[\r\n]"
# llama.cpp sees every space beyond ASCII as \v, so no space falls into a written-out range.
_EAST_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff&&[^\\s]]+"
# Letters that have case. Escaped, since some of them have a twin that an editor may put in their place.
_CASED_LETTERS = (
    "\\s?[A-Za-z"
    "\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481"
    "\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf"
    "\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d"
    "\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4"
    "\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107"
    "\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17"
    "\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb"
    "\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
    "]+"
)
_DEEPSEEK_PUNCTUATION = "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3001\u3002]+"
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_ASCII_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_MARKED_WORD = (
    rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+"
)
_DEEPSEEK3 = rf"{_MARKED_WORD}[\r\n]*|{_SPACES}"
_SPARK = rf"{_MARKED_WORD}|{_NEWLINE}|\s+(?!\S)|\s+"
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"

# Names and settings as in llama_vocab::load. Left out on purpose: pre-tokenizers that are more than a list of
# patterns (kimi-k2, afmoe, tiny_aya, cohere2moe, superbpe, youtu), that are not byte-level (gemma4,
# sarvam-moe, whitespace), whose pattern does not compile (chameleon), and those of embedding models.
_ROWS = (
    (DEFAULT_PRE, PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", _THREE_ASCII_DIGITS))),
    (
        "gpt-2 phi-2 gigachat a.x-4.0 mellum exaone4 mpt olmo jais trillion granite-docling",
        PreTokenizer((_GPT2,)),
    ),
    (
        "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
        PreTokenizer((_DIGIT, _GPT2)),
    ),
    ("falcon", PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, _THREE_ASCII_DIGITS))),
    (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
        PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True),
    ),
    ("glm4 glm5", PreTokenizer((_LLAMA3,), ignore_merges=True)),
    ("dbrx smaug-bpe chatglm-bpe", PreTokenizer((_LLAMA3,))),
    (
        "qwen2 deepseek-r1-qwen kormo megrez stablelm2 hunyuan solar-open grok-2 bailingmoe bailingmoe2 "
        "llada-moe",
        PreTokenizer((_QWEN2,)),
    ),
    ("qwen35", PreTokenizer((_QWEN35,))),
    ("laguna", PreTokenizer((r"[^\n]+|[\n]+", _QWEN2))),
    ("ufakzeka", PreTokenizer((_NO_CONTRACTION,))),
    ("tekken", PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True)),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", PreTokenizer((_GPT4O,))),
    (
        "deepseek-llm",
        PreTokenizer((_NEWLINE, _CASED_LETTERS, _DEEPSEEK_PUNCTUATION, r"\s+\z", _EAST_ASIAN, r"\p{N}+")),
    ),
    ("deepseek-coder", PreTokenizer((_NEWLINE, r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, _DIGIT))),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", PreTokenizer((_UP_TO_THREE_DIGITS, _CJK, _DEEPSEEK3))),
    ("spark2_5", PreTokenizer((_UP_TO_THREE_DIGITS, _CJK, _SPARK, _DIGIT))),
    ("bloom gpt3-finnish poro-chat", PreTokenizer((_BLOOM,))),
    ("viking", PreTokenizer((_BLOOM, _DIGIT))),
    ("jais-2", PreTokenizer((_JAIS2,))),
    ("seed-coder", PreTokenizer((_SEED_CODER,))),
    ("minicpm5", PreTokenizer((_UP_TO_THREE_DIGITS, _MINICPM5), ignore_merges=True)),
    ("exaone-moe", PreTokenizer((_EXAONE_MOE,))),
)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = MappingProxyType(
    {name: row for names, row in _ROWS for name in names.split()}
)


def get_pretokenizer(name: Any) -> PreTokenizer:
    """The row for a value of `tokenizer.ggml.pre`; `UnsupportedArchitectureError` when there is none."""
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise UnsupportedArchitectureError(
            f"tokenizer.ggml.pre is {name!r:.80}, which this package does not know; known are "
            f"{', '.join(PRE_TOKENIZERS)}. Pass a tokenizer of your own to load this file."
        )
    return PRE_TOKENIZERS[name]
