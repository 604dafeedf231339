"""Prompts that hold the text of control tokens, which is not read as most who write it mean: a warning."""

from collections.abc import Mapping, Sequence
from typing import Any

from realizar_torch.caller import warn_caller

_IN_PROMPT = (
    "the prompt holds {!r}, the text of a control token, and in a plain prompt that is read as ordinary "
    "characters; where the token is meant, pass messages, for the chat template, or give model.generate or "
    "BatchedGenerator the ids of tokenizer.encode(prompt, parse_special=True), with add_special_tokens=False "
    "if the prompt has its own beginning token"
)
_IN_MESSAGE = (
    "a user's message holds {!r}, the text of a control token, and the model gets the token, as if the chat "
    "template had written it: it may end the message, or begin another; where the text is meant, take it out "
    "or part it, as by a space"
)


def warn_of_control_tokens(tokenizer: Any, prompt: str | Sequence[Mapping[str, Any]]) -> None:
    """Of the first that conversations are made of in a plain prompt, where it stays text, and of the first of
    all in a user's message, where it becomes the token.
    """
    # a tokenizer of the caller's own need not know its special tokens
    if not hasattr(tokenizer, "special_tokens_in"):
        return
    if isinstance(prompt, str):
        texts, advice = [prompt], _IN_PROMPT
    else:
        told = [one.get("content") for one in prompt if one.get("role") == "user"]
        texts, advice = [text for content in told for text in _texts(content)], _IN_MESSAGE
    for text in texts:
        named = tokenizer.special_tokens_in(text)
        if isinstance(prompt, str):
            # "<filename>" in a sentence is text, and meant so
            named = [name for name, i in named.items() if _is_in_conversations(tokenizer, name, i)]
        if named:
            warn_caller(advice.format(min(named, key=text.find)))


def _is_in_conversations(tokenizer: Any, name: str, token: int) -> bool:
    """Whether the chat template writes the token, or it begins or ends texts."""
    ends = (tokenizer.bos_token_id, *tokenizer.eos_token_ids)
    return token in ends or name in (tokenizer.chat_template or "")


def _texts(content: Any) -> list[str]:
    """The texts of a message's content: itself, or those of its parts."""
    parts = content if isinstance(content, list | tuple) else [{"text": content}]
    texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
    return [text for text in texts if isinstance(text, str)]
