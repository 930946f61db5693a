"""Contents that are None, and strings that are safe: transformers' text where it has one."""

from typing import Any

import jinja2
import pytest
from template_helpers import rendered, template

from roofline.common.errors import RequestError

# In the manner of DeepSeek-R1-Distill, which asks for None, and of gpt-oss, which looks inside what is there.
DEEPSEEK = (
    "{% for m in messages %}{% if m['role'] == 'assistant' and m['content'] is none %}"
    "{% for t in m['tool_calls'] %}<call>{{ t['function']['name'] }}{% endfor %}"
    "{% elif m['content'] is not none %}{{ '<' + m['role'] + '>' + m['content'] }}{% endif %}{% endfor %}"
)
LOOKS_INSIDE = (
    "{% for m in messages %}{% if '<think>' in m.content %}thinks{% endif %}{{ m.content }}"
    "{% for t in m.tool_calls %}<call>{{ t.function.name }}{% endfor %}{% endfor %}"
)
CALLS = [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": None, "tool_calls": CALLS},
    {"role": "tool", "content": "3"},
]


def test_a_content_of_none_is_left_out_as_transformers_does(byte_bpe_hf: Any) -> None:
    expected = byte_bpe_hf.apply_chat_template(CHAT, tokenize=False, chat_template=LOOKS_INSIDE)
    assert rendered(LOOKS_INSIDE, CHAT) == expected == "x<call>f3"


def test_it_is_there_where_the_template_fails_without(byte_bpe_hf: Any) -> None:
    """The judge is Jinja with the message as it stands, as transformers rendered it in the time of such templates."""
    jinja = pytest.importorskip("transformers.utils.chat_template_utils")._compile_jinja_template(DEEPSEEK)
    with pytest.raises(jinja2.UndefinedError):
        byte_bpe_hf.apply_chat_template(CHAT, tokenize=False, chat_template=DEEPSEEK)
    assert rendered(DEEPSEEK, CHAT) == jinja.render(messages=CHAT) == "<user>x<call>f<tool>3"


def test_where_both_fail_the_error_is_that_without_it() -> None:
    source = (
        "{% for m in messages %}{% if m.tool_calls %}{{ raise_exception(m.content is none) }}{% endif %}{% endfor %}"
    )
    with pytest.raises(RequestError, match=r"the chat template: False$"):
        rendered(source, CHAT)


A = "messages[0].content"
SAFE = [
    f"'a'|safe + {A}", f"{A} + 'x<'|safe", f"'a<'|safe ~ {A}", f"({A}|safe) + ({A}|safe)", f"({A}|e) + {A}",
    f"({A}|e)|e", f"{A}|safe|length", f"({A}|safe)|tojson", f"[{A}|safe, {A}]|join(',')", f"'%s' % ({A}|safe)",
    f"('%s<'|safe) % {A}", f"('%(a)s<'|safe) % {{'a': {A}}}", "('a<'|safe).strip() + '<'", "('a<'|safe)|trim + '<'",
    f"({A}|safe)[1:] + '<'", f"({A}|safe) * 2 + '<'", f"('{{}}<'|safe).format({A})", f"('<'|safe).join([{A}, 'x'])",
    "('<'|safe)|upper + '<'", "('<'|safe)|string + '<'", "('<'|safe)|replace('x', 'y') + '<'",
    f"(messages|tojson|safe) + {A}", f"({A}|safe).split(' ')[0] + '<'", "['<'|safe]|first + '<'", "5|string|safe + '<'",
]  # fmt: skip


@pytest.mark.parametrize("expression", SAFE)
def test_what_is_added_to_a_safe_string_is_escaped_as_jinja_does(byte_bpe_hf: Any, expression: str) -> None:
    messages = [{"role": "user", "content": 'it\'s <b> & "q"'}]
    source = "{{ " + expression + " }}"
    expected = byte_bpe_hf.apply_chat_template(messages, tokenize=False, chat_template=source)
    assert rendered(source, messages) == expected


def test_a_safe_string_stays_the_users() -> None:
    (part,) = template("{{ messages[0].content|safe }}").render([{"role": "user", "content": "</s>"}])
    assert (part.text, part.trusted) == ("</s>", False)
