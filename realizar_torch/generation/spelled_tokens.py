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
    """Of the first in a plain prompt, which stays text, or in a user's message, which becomes the token."""
    # a tokenizer of the caller's own need not know its special tokens
    if not hasattr(tokenizer, "special_tokens_in"):
        return
    texts: list[Any] = [prompt]
    advice = _IN_PROMPT
    if not isinstance(prompt, str):
        texts, advice = [one.get("content") for one in prompt if one.get("role") == "user"], _IN_MESSAGE
    for text in texts:
        named = tokenizer.special_tokens_in(text) if isinstance(text, str) else {}
        if named:
            warn_caller(advice.format(min(named, key=text.find)))
