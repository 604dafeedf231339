"""Chat templates render as transformers renders them, and cannot leave their sandbox."""

import datetime
from typing import Any

import pytest

from realizar_torch.checkpoint.chat_template import ChatTemplate
from realizar_torch.errors import FormatError

MESSAGES = [{"role": "user", "content": "Grüße <b>"}, {"role": "assistant", "content": "你好"}]


def render(source: str, **variables: Any) -> str:
    return ChatTemplate(source).render(MESSAGES, **variables)


def test_blocks_leave_no_lines_behind() -> None:
    body = "    {% if true %}\n{{ m.role }}:{{ m['content'] }}\n    {% endif %}\n"
    source = "{% for m in messages %}\n" + body + "{% endfor %}\n"
    assert render(source) == "user:Grüße <b>\nassistant:你好\n"


def test_tojson_escapes_nothing_and_keeps_the_order() -> None:
    assert render("{{ messages[0] | tojson }}") == '{"role": "user", "content": "Grüße <b>"}'
    assert render("{{ {'b': 1, 'a': [2]} | tojson(indent=2) }}") == '{\n  "b": 1,\n  "a": [\n    2\n  ]\n}'


def test_loop_controls() -> None:
    assert render("{% for m in messages %}{{ m.role }}{% break %}{% endfor %}") == "user"


def test_generation_blocks_are_rendered() -> None:
    assert render("a{% generation %}{{ messages[1].content }}{% endgeneration %}b") == "a你好b"


def test_today() -> None:
    assert render("{{ strftime_now('%Y') }}") == str(datetime.datetime.now().year)


def test_tools_are_none_unless_given() -> None:
    source = "{% if tools is not none %}{{ tools[0].name }}{% else %}no tools{% endif %}"
    assert render(source) == "no tools"
    assert render(source, tools=[{"name": "clock"}]) == "clock"


def test_a_template_may_refuse() -> None:
    with pytest.raises(FormatError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        # CVE-2024-34359: the way out that an unsandboxed loader left open
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% for c in ().__class__.__base__.__subclasses__() %}{{ c }}{% endfor %}",
        "{{ raise_exception.__globals__['__builtins__'] }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ lipsum.__globals__['os'].system('id') }}",
        # CVE-2024-56326 and CVE-2025-27516: the same through str.format
        "{% set f = '{0.__class__.__init__.__globals__}'.format %}{{ f(messages) }}",
        "{{ ('{0.__class__.__mro__}' | attr('format'))(messages) }}",
        # the caller's own objects stay as they are
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ range(10000000) | list }}",
    ],
)
def test_attacks_are_refused(source: str) -> None:
    with pytest.raises(FormatError, match=r"failed: (SecurityError|UndefinedError|OverflowError)"):
        render(source)
    assert MESSAGES[0] == {"role": "user", "content": "Grüße <b>"} and len(MESSAGES) == 2


@pytest.mark.parametrize(
    "source", ["{% for %}", "{{ 1 / 0 }}", "{{ messages[0].content + 1 }}", "{{ x.y.z }}"]
)
def test_broken_templates_are_our_errors(source: str) -> None:
    with pytest.raises(FormatError, match="chat template"):
        render(source)


@pytest.mark.parametrize("messages", ["Hi", {"role": "user", "content": "Hi"}, ["Hi"]])
def test_messages_must_be_a_list_of_mappings(messages: Any) -> None:
    with pytest.raises(FormatError, match="messages must be a list"):
        ChatTemplate("x").render(messages)
