"""What chat templates are told of how much to think: their own variables, in their own words."""

from types import SimpleNamespace

import pytest

from roofline.common.errors import RequestError
from roofline.server.conversation import effort_variables
from roofline.server.efforts import EFFORTS, effort_words, template_effort, thinking_switch
from roofline.server.text_side import TextSide
from roofline.text.templates.template import ChatTemplate
from tools.real_tokenizers import FOLDER

COMPARES = "{% if reasoning_effort is defined and reasoning_effort == 'max' %}Think.{% endif %}"
LISTS = """{% if not reasoning_effort is defined %}{% set reasoning_effort = 'no_think' %}\
{% elif reasoning_effort not in ['high', 'low', 'no_think'] %}{{ raise_exception('no') }}{% endif %}"""
WRITES = '{% if not reasoning_effort %}{% set reasoning_effort = "medium" %}{% endif %}{{ reasoning_effort }}'


@pytest.mark.parametrize(
    ("template", "switch"),
    [
        ("{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}", "enable_thinking"),
        ("{% if not thinking is defined %}{% set thinking = false %}{% endif %}", "thinking"),
        ("{%- if thinking %}<think>{% endif %}", "thinking"),
        ("{% if message.thinking is defined %}{{ message.thinking }}{% endif %}", None),
        ("Think, as thinking is good. {{ messages }}", None),
    ],
)
def test_the_switch_is_the_variable_that_the_template_reads(template, switch):
    assert thinking_switch(template) == switch


@pytest.mark.parametrize(
    ("template", "told"),
    [
        (COMPARES, {"none": None, "low": "low", "high": "high", "max": "max"}),
        (LISTS, {"none": "no_think", "minimal": "low", "medium": "low", "max": "high"}),
        (WRITES, {"none": None, "minimal": "low", "medium": "medium", "xhigh": "high"}),
        ("{% if reasoning_effort | lower == 'none' %}{% endif %}", {"none": "none", "high": "high"}),
        ("{{ messages }}", {"none": None, "high": None}),
    ],
)
def test_the_word_is_one_that_the_template_takes(template, told):
    assert {effort: template_effort(template, effort) for effort in told} == told


def test_a_degree_of_none_turns_the_switch_off_and_others_on():
    for name in ("enable_thinking", "thinking"):
        source = f"{{%- if {name} %}}{{% endif %}}"
        text = TextSide(SimpleNamespace(eos_ids=[2]), ChatTemplate(source))  # type: ignore[arg-type]
        assert effort_variables("reasoning_effort", "none", text) == {name: False}
        assert effort_variables("reasoning_effort", "low", text) == {name: True}
        assert effort_variables("reasoning_effort", "low", text, switches=False) == {}
    with pytest.raises(RequestError, match="must be one of"):
        effort_variables("reasoning_effort", "much", text)


@pytest.mark.parametrize("name", ["tencent-Hy3", "openai-gpt-oss-120b", "deepseek-ai-DeepSeek-V4"])
def test_a_real_template_takes_every_degree(name):
    path = FOLDER / "templates" / f"{name}.jinja"
    if not path.is_file():
        pytest.skip(f"{path} is not here: python -m tools.real_tokenizers")
    template = ChatTemplate(path.read_text())
    assert effort_words(template.source)[1] == (name == "tencent-Hy3")
    for effort in EFFORTS:
        text = TextSide(SimpleNamespace(eos_ids=[2]), template)  # type: ignore[arg-type]
        variables = effort_variables("reasoning_effort", effort, text)
        assert template.render([{"role": "user", "content": "Hi"}], **variables)
