"""Chat templates render as transformers renders them, and cannot leave their sandbox."""

import datetime
import enum
from pathlib import Path
from typing import Any

import pytest
from chat_conversations import CONVERSATIONS, our_text, transformers_text

from realizar_torch.checkpoint.chat_template import ChatTemplate
from realizar_torch.errors import FormatError

MESSAGES = [{"role": "user", "content": "Grüße <b>"}, {"role": "assistant", "content": "你好"}]


TEMPLATES = sorted((Path(__file__).parent / "data" / "templates").glob("*.jinja"))


def render(source: str, **variables: Any) -> str:
    return ChatTemplate(source).render(MESSAGES, **variables)


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_models_templates_render_as_in_transformers(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    rendered = set()
    for name, conversation in CONVERSATIONS.items():
        text = our_text(source, conversation)
        assert text == transformers_text(source, conversation), name
        rendered.add(text)
    assert len(rendered - {None}) > 5


@pytest.mark.parametrize(
    "source",
    [
        "{%- generation -%} {{ messages[0].content }} {% set x = 1 %}{%- endgeneration %}\n{{ x }}",
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m }}{% break %}{% endfor %}",
        "{{ messages | tojson(indent=1, separators=(';', '='), sort_keys=true, ensure_ascii=true) }}",
        "{{ strftime_now('%d %b %Y') }}{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}",
        "{% set n = namespace(x=0) %}{% for m in messages %}{% set n.x = n.x + 1 %}{% endfor %}{{ n.x }}",
        "{{ messages[-1]['reasoning_content'] }}{{ messages[1].content is defined }}{{ bos_token }}{{ unk }}",
    ],
)
def test_what_templates_may_use_is_as_in_transformers(source: str) -> None:
    for name, conversation in CONVERSATIONS.items():
        assert our_text(source, conversation) == transformers_text(source, conversation), name


def test_templates_see_copies_of_json_types(tmp_path: Path) -> None:
    class Role(str, enum.Enum):  # noqa: UP042
        USER = "user"

    target = tmp_path / "x"
    messages = [{"role": Role.USER, "image": target, "content": ("a", 1, 2.5, True, None)}]
    source = "{{ messages[0].role }} {{ messages[0].image }} {{ messages[0].content[3:] | tojson }}"
    assert ChatTemplate(source).render(messages) == f"user <{type(target).__name__}> [true, null]"
    with pytest.raises(FormatError, match="no attribute 'touch'"):
        ChatTemplate("{{ messages[0].image.touch() }}").render(messages)
    assert not target.exists()


def test_tools_must_be_schemas() -> None:
    with pytest.raises(FormatError, match="JSON schemas"):
        render("x", tools=[print])


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


@pytest.mark.parametrize(
    "source",
    ["{{ " + "[" * 9000, "{{ 1" + "0" * 5000 + " }}", "{% for a in x %}" * 25 + "{% endfor %}" * 25],
    ids=["deep", "a long number", "nested loops"],
)
def test_templates_that_fail_in_the_compiler_are_our_errors(source: str) -> None:
    with pytest.raises(FormatError, match=r"chat template is not valid jinja2: .+"):
        ChatTemplate(source)


@pytest.mark.parametrize("messages", ["Hi", {"role": "user", "content": "Hi"}, ["Hi"]])
def test_messages_must_be_a_list_of_mappings(messages: Any) -> None:
    with pytest.raises(FormatError, match="messages must be a list"):
        ChatTemplate("x").render(messages)


@pytest.mark.parametrize(
    "product",
    [
        "'a' * 10**10",
        "10**10 * 'a'",
        "[1, 2] * 10**9",
        "(1, 2) * 2000000",
        "2 ** 3000000",
        "(2 ** 600000) * (2 ** 600000)",
    ],
)
def test_products_that_would_take_all_memory_are_refused(product: str) -> None:
    with pytest.raises(FormatError, match="larger than any prompt"):
        render("{{ (" + product + ") | length }}")


def test_products_that_prompts_have_are_made() -> None:
    source = "{{ '-' * 5 }}{{ 2 * [3] }}{{ 3 * 4 }}{{ 2 ** 10 }}{{ 2 ** -1 }}{{ 1.5 * 2 }}{{ 'a' * -1 }}"
    assert render(source) == "-----[3, 3]1210240.53.0"
