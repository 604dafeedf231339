"""Conversations of every kind, rendered by our chat templates and by transformers: the two must agree.

    python tests/chat_conversations.py llama.cpp/models/templates

compares every template of a directory; the tests take those of tests/data/templates (Apache-2.0 and MIT).
"""

import sys
from functools import cache
from pathlib import Path
from typing import Any

from realizar_torch.checkpoint.chat_template import ChatTemplate
from realizar_torch.errors import FormatError

Conversation = tuple[list[dict[str, Any]], dict[str, Any]]

_SYSTEM = {"role": "system", "content": "Be <brief>."}
_USER = {"role": "user", "content": '  Grüße <b> & "you"\n'}
_ASSISTANT = {"role": "assistant", "content": "\n你好 "}
_PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "Größe & <name>"},
        "unit": {"type": "string", "enum": ["C", "F"]},
    },
    "required": ["city"],
}
_TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": 'What it is "like"', "parameters": _PARAMETERS},
}


def _calls(arguments: Any) -> list[dict[str, Any]]:
    """A question, the call of a tool, and what the tool said."""
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [
        _USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "name": "weather", "tool_call_id": "abcdefghi", "content": "12 °C"},
    ]


def _reasoned(name: str, content: str) -> list[dict[str, Any]]:
    return [_USER, {"role": "assistant", "content": content, name: "2 + 2"}, _USER]


CONVERSATIONS: dict[str, Conversation] = {
    "one question": ([_USER], {}),
    "a system message": ([_SYSTEM, _USER], {}),
    "several turns": ([_SYSTEM, _USER, _ASSISTANT, _USER, _ASSISTANT, _USER], {}),
    "no generation prompt": ([_SYSTEM, _USER, _ASSISTANT], {"add_generation_prompt": False}),
    "tools": ([_SYSTEM, _USER], {"tools": [_TOOL, _TOOL]}),
    "a tool was called": ([*_calls({"city": "Köln", "unit": "C"}), _ASSISTANT, _USER], {"tools": [_TOOL]}),
    "arguments as text": (_calls('{"city": "Köln"}'), {"tools": [_TOOL]}),
    "reasoning_content": (_reasoned("reasoning_content", "4"), {}),
    "thinking": (_reasoned("thinking", "<think>\nhm\n</think>\n\n4"), {}),
    "reasoning": (_reasoned("reasoning", "4")[:2], {"add_generation_prompt": False}),
    "no thinking, please": ([_USER], {"enable_thinking": False}),
    "think hard": ([_USER], {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}),
    "content in parts": (
        [{"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]}],
        {},
    ),
    "documents": ([_USER], {"documents": [{"title": "T", "text": "x"}]}),
    "a date": ([_SYSTEM, _USER], {"date_string": "26 Jul 2024"}),
    "the model begins": ([_ASSISTANT, _ASSISTANT], {}),
    "two questions": ([_USER, _USER], {}),
    "a role of its own": ([{"role": "alien", "content": "x"}], {}),
    "a system message alone": ([_SYSTEM], {}),
}


def our_text(source: str, conversation: Conversation) -> str | None:
    """What we render; None where the template refuses or fails."""
    messages, variables = conversation
    special = {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": True}
    try:
        return ChatTemplate(source).render(messages, **(special | variables))
    except FormatError:
        return None


def transformers_text(source: str, conversation: Conversation) -> str | None:
    """What transformers renders; None where the template refuses or fails."""
    messages, variables = conversation
    options = {"add_generation_prompt": True} | variables
    tokenizer = _transformers_tokenizer()
    try:
        return tokenizer.apply_chat_template(messages, chat_template=source, tokenize=False, **options)
    except Exception:
        return None


@cache
def _transformers_tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE()), bos_token="<s>", eos_token="</s>"
    )


def main() -> None:
    (directory,) = sys.argv[1:]
    compared = rendered = differing = 0
    for path in sorted(Path(directory).glob("*.jinja")):
        source = path.read_text(encoding="utf-8")
        for name, conversation in CONVERSATIONS.items():
            ours, theirs = our_text(source, conversation), transformers_text(source, conversation)
            compared, rendered = compared + 1, rendered + (theirs is not None)
            if ours != theirs:
                differing += 1
                print(f"{path.name}, {name}:\n  transformers {theirs!r}\n  ours {ours!r}")
    print(f"{compared} compared, {rendered} rendered, {differing} differ")
    sys.exit(bool(differing))


if __name__ == "__main__":
    main()
