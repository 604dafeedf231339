"""What kind of token a token is, corrected by its text, and which tokens end a generation.

The rules are those of llama.cpp's `llama_vocab::load`. Files are converted by many hands: end-of-turn tokens
come as ordinary ones, and the one `eos_token_id` of a chat model is rarely all that ends an answer.
"""

from collections.abc import Mapping
from enum import IntEnum

from realizar_torch.checkpoint.tokenizer_metadata import TokenizerMetadata


class Kind(IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Fill-in-the-middle tokens: metadata name, its older name, and the texts that stand in for a missing id.
_FILL_IN_THE_MIDDLE = (
    (
        "fim_pre",
        "prefix",
        "<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|> <|prefix|>",
    ),
    (
        "fim_suf",
        "suffix",
        "<|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|> <|suffix|>",
    ),
    (
        "fim_mid",
        "middle",
        "<|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> <|code_middle|> <|middle|>",
    ),
    ("fim_pad", "fim_pad", "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]"),
    ("fim_rep", "fim_rep", "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>"),
    ("fim_sep", "fim_sep", "<|file_sep|>"),
)
_FIM_THAT_ENDS = ("fim_pad", "fim_rep", "fim_sep")

_END_OF_GENERATION = (
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> "
    "<|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> "
    "<｜end▁of▁sentence｜> [e~["
)

# gpt-oss writes these inside an answer: text to show, not control tokens to hide.
_ALWAYS_SHOWN = "<|channel|> <|message|> <|start|> <|constrain|>"


def correct_kinds(
    kinds: bytearray, ids: Mapping[str, int], metadata: TokenizerMetadata, eos: int | None
) -> tuple[int, ...]:
    """Correct `kinds` by token text, in place, and return the ids that end a generation, ascending.

    `ids` maps the text of every token to its id; `eos` is the id of the end of text, if there is one.
    """
    size = len(kinds)
    ending = {eos, metadata.token_id("eot", size), metadata.token_id("eom", size)}
    for name, older_name, texts in _FILL_IN_THE_MIDDLE:
        token = metadata.token_id(older_name, size, metadata.token_id(name, size))
        if token is None:
            # llama.cpp takes the first in the order of a hash map; the lowest id can be repeated
            token = min((ids[text] for text in texts.split() if text in ids), default=None)
            if token is not None:
                kinds[token] = Kind.CONTROL
        if name in _FIM_THAT_ENDS:
            ending.add(token)
    for text in _END_OF_GENERATION.split():
        if text in ids:
            kinds[ids[text]] = Kind.CONTROL
            ending.add(ids[text])
    for text in _ALWAYS_SHOWN.split():
        if text in ids:
            kinds[ids[text]] = Kind.USER_DEFINED

    def ends(*texts: str) -> bool:
        return any(ids.get(text, -1) in ending for text in texts)

    # Some families use a text of the list in the middle of an answer.
    if ends("<|call|>", "<|calls|>") and ends("<|return|>", "<|flush|>") and ends("<|end|>"):
        kinds[ids["<|end|>"]] = Kind.USER_DEFINED
        ending.remove(ids["<|end|>"])
    if ends("<|tool_response>", "<|plamo:eos|>") and ends("</s>"):
        kinds[ids["</s>"]] = Kind.NORMAL
        ending.remove(ids["</s>"])
    return tuple(sorted(token for token in ending if token is not None))
