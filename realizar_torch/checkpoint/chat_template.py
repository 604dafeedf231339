"""Chat templates: the jinja2 text of `tokenizer.chat_template`, rendered in a sandbox as transformers does.

A template comes with the model file, from anybody: it runs in jinja2's immutable sandbox, without access to
attributes that lead to Python's internals (as CVE-2024-34359 did in an unsandboxed loader).
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from realizar_torch.errors import FormatError

# Names that the reasoning of a message goes by; templates read the first, that of gpt-oss the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")
# Elements of a sequence or bits of a number: far beyond what a prompt needs.
_LARGEST_PRODUCT = 1 << 20


class ChatTemplate:
    """A compiled template. `FormatError` when `source` is not a template."""

    def __init__(self, source: str) -> None:
        if not isinstance(source, str):
            raise FormatError(f"the chat template is {source!r:.80}, expected the text of a jinja2 template")
        self.source = source
        environment = _Sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except Exception as error:
            # a template of any depth or length may fail in Python's compiler, too
            raise FormatError(f"the chat template is not valid jinja2: {error}") from error

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The prompt for `messages`, a sequence of {"role": …, "content": …}. `FormatError` when the template
        refuses them or fails."""
        if isinstance(messages, str | Mapping) or not all(isinstance(m, Mapping) for m in messages):
            raise FormatError(
                f'messages must be a list of {{"role": …, "content": …}}, found {messages!r:.80}'
            )
        if any(not isinstance(tool, Mapping) for tool in variables.get("tools") or ()):
            raise FormatError(
                "tools must be JSON schemas (mappings); transformers.utils.get_json_schema makes them of "
                "functions"
            )
        # templates tell "no tools" by None, as transformers passes it
        variables = {"tools": None, "documents": None} | _plain(variables)
        try:
            return self._template.render(messages=[_message(m) for m in messages], **variables)
        except Exception as error:
            # the template is code from the file: it may fail in any way
            raise FormatError(f"the chat template failed: {type(error).__name__}: {error}") from error


class _Sandbox(ImmutableSandboxedEnvironment):
    """Bounds products and powers, which could take all memory; jinja2 bounds ranges only."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if _size(operator, left, right) > _LARGEST_PRODUCT:
            raise SecurityError(f"the result of {operator!r} would be larger than any prompt")
        return super().call_binop(context, operator, left, right)


def _size(operator: str, left: Any, right: Any) -> int:
    """Bits of a product or power of integers, elements of a repeated sequence; 0 for other operands."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length()
        return bits + right.bit_length() if operator == "*" else bits * right
    for sequence, count in ((left, right), (right, left)):
        if isinstance(sequence, str | list | tuple) and isinstance(count, int):
            return len(sequence) * count
    return 0


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """What the template sees of a message: as in transformers, nothing that is None, and every name of its
    reasoning that some template reads."""
    plain = {key: value for key, value in _plain(message).items() if value is not None}
    reasoning = next((plain[name] for name in _REASONING if name in plain), None)
    if reasoning is None:
        return plain
    return {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """A copy that holds JSON types only: the sandbox cannot know which methods of other objects do harm.

    An image or an array becomes "<its type>", since templates look for it and not into it.
    """
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        # not str(value), which for an enum is its name
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    return f"<{type(value).__name__}>"


class _GenerationTag(Extension):
    """`{% generation %}`, by which templates mark the model's own words: renders what it encloses."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes for HTML, which a prompt must not be
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
