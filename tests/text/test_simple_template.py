"""Outlines render what the sandbox renders, character by character and origin by origin, or nothing."""

from collections.abc import Callable
from typing import Any

import pytest
from chat_templates import ALL, PHI
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline.common.errors import RequestError
from roofline.text.templates.simple_template import ROLES, render
from roofline.text.templates.simple_template_parser import make_outline
from roofline.text.templates.template import CHATML, ChatTemplate

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nHi"
    "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' "
    "+ '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ZEPHYR = """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\n' ~ message.content ~ eos_token }}
{% elif message.role == 'assistant' %}
{{ '<|assistant|>\n'  + message['content'] + eos_token }}
{% else %}
 odd {{ message.role }} {# a comment #}
{% endif %}
{%- if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}
"""
EDGES = """{{ bos_token }}{% if not tools and tools is none and messages is defined %}x{% else %}y{% endif %}
{%- for m in messages -%}
  {{ m.content if loop.index == 1 or loop.index0 == 3 else (m.role or 'nobody') }}
  {{- (m.content and '|') or '(empty)' }}{{ messages[-1].content }}
{%- endfor %}"""
QUICK = {"chatml": CHATML, "smollm2": SMOLLM2, "zephyr": ZEPHYR, "phi": PHI, "edges": EDGES}
TEXTS = st.one_of(st.text(max_size=12), st.sampled_from(["<|im_end|>", "", "0", "é\n", "assistant"]))
CHATS = st.lists(
    st.fixed_dictionaries({"role": st.one_of(st.sampled_from(sorted(ROLES)), TEXTS), "content": TEXTS}), max_size=4
)


@pytest.mark.parametrize("name", QUICK)
def test_equal_to_the_sandbox(name: str) -> None:
    source = QUICK[name]
    made = make_outline(source)
    assert made is not None
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    slow, quick = ChatTemplate(source, **tokens), ChatTemplate(source, outline=made, **tokens)

    @settings(max_examples=100, deadline=None)
    @given(CHATS, st.booleans())
    def same(chat: list[dict[str, Any]], prompt: bool) -> None:
        def result(template: ChatTemplate) -> Any:
            try:
                return template.render(chat, add_generation_prompt=prompt)
            except Exception as error:
                return str(error)

        assert result(quick) == result(slow)

    same()
    quick = ChatTemplate(source, outline=made, **tokens)
    everyone = [{"role": role, "content": "hi"} for role in ("system", "user", "assistant", "tool", "nobody")]
    for prompt in (False, True):
        assert quick.render(everyone, add_generation_prompt=prompt) == slow.render(
            everyone, add_generation_prompt=prompt
        )
    assert "_rendering" not in quick.__dict__


def test_complete_compiles_the_template() -> None:
    template = ChatTemplate(SMOLLM2, outline=make_outline(SMOLLM2))
    assert "_rendering" not in template.__dict__
    template.complete()
    assert "_rendering" in template.__dict__


def test_unusual_chats_are_left_to_jinja() -> None:
    patient = {"seconds": 60.0}  # what is compared here takes long on a busy machine
    quick, slow = ChatTemplate(SMOLLM2, outline=make_outline(SMOLLM2), **patient), ChatTemplate(SMOLLM2, **patient)
    for chat in (
        [{"role": "user", "content": "x", "name": "y"}],
        [{"role": "user", "content": "x", "thinking": None}],
        [{"role": "user", "content": "x" * (1 << 21)}],
        [{"role": "user", "content": "x"}] * 9000,
        ({"role": "user", "content": "x"},),
        [{"content": "x", "role": "user", "extra": [1]}],
    ):
        assert quick.render(chat) == slow.render(chat)
    assert quick.render([{"role": "user", "content": "x"}], tools=[{}], thinking=True) == slow.render(
        [{"role": "user", "content": "x"}], tools=[{}], thinking=True
    )
    chats = (message for message in [{"role": "user", "content": "x"}])
    assert quick.render(chats) == slow.render([{"role": "user", "content": "x"}])  # type: ignore[arg-type]
    edges = [ChatTemplate(EDGES, bos_token="<s>", outline=each) for each in (make_outline(EDGES), None)]
    for each in edges:
        assert "".join(part.text for part in each.render([{"role": "user", "content": "x"}], tools=[{}])) == "<s>yx|x"
        with pytest.raises(RequestError, match="'bos_token' cannot be set"):
            each.render([{"role": "user", "content": "x"}], bos_token="<b>")
    for prompt in ("", "yes", 1, 0, None):
        chat = [{"role": "user", "content": "x"}]
        made = [t.render(chat, add_generation_prompt=prompt) for t in (quick, slow)]  # type: ignore[arg-type]
        assert made[0] == made[1]
    for bad in ([{"role": "user"}], ["x"], [{"role": "user", "content": ["x"]}]):
        errors = []
        for template in (quick, slow):
            with pytest.raises(Exception) as caught:
                template.render(bad)  # type: ignore[arg-type]
            errors.append((type(caught.value), str(caught.value)))
        assert errors[0] == errors[1]


@pytest.mark.parametrize("name", sorted(set(ALL) - {"phi"}))
def test_templates_with_more_have_no_outline(name: str) -> None:
    assert make_outline(ALL[name]) is None


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages | length }}",
        "{% set x = 1 %}",
        "{{ unknown }}",
        "{% for m in messages %}{% for n in messages %}{% endfor %}{% endfor %}",
        "{% for m in messages[1:] %}{% endfor %}",
        "{% for m in messages if m.role %}{% endfor %}",
        "{% for m in messages %}{% else %}x{% endfor %}",
        "{% for m in messages %}{{ m.name }}{% endfor %}",
        "{{ messages[0].content.upper() }}",
        "{{ 'a' if tools }}",
        "{{ 1 < 2 }}",
        "{{ messages[true].content }}",
        "{% for tools in messages %}{% endfor %}",
        "{% bad",
        "{{ " + "+".join(["'a'"] * 1500) + " }}",
        "{{ " + "+".join(["'a'"] * 45) + " }}",
        "{{ '" + "a" * 9000 + "' }}",
    ],
)
def test_what_has_no_outline(source: str) -> None:
    assert make_outline(source) is None


def test_jinja_is_not_even_imported(run_python: Callable[..., str]) -> None:
    code = (
        "import sys; from roofline.text.templates.template import ChatTemplate\n"
        f"t = ChatTemplate({SMOLLM2!r}, outline={make_outline(SMOLLM2)!r})\n"
        "assert t.render([{'role': 'user', 'content': 'hi'}])[-1].text.endswith('assistant\\n')\n"
        "print('jinja2' in sys.modules)"
    )
    assert run_python(code).strip() == "False"


@pytest.mark.parametrize("constant", [["text", 5], ["text", ["a"]], ["text", None], ["int", "1"], ["int", 0.5]])
def test_constants_of_another_type_are_left_to_jinja(constant: list[Any]) -> None:
    """An outline comes from a bundle, which may hold anything."""
    same = ["if", [[["==", constant, constant], [["out", [["text", "equal"]]]]]], []]
    for body in ([["out", [constant]]], [same]):
        assert render(body, [{"role": "user", "content": "Hi"}], {}, True) is None
