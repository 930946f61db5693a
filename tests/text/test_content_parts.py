# ruff: noqa: E501 - templates are written in long lines
"""Chat templates of models that read pictures too: a text is written whether they want it as it is or as a part."""

from typing import Any

import pytest
from template_helpers import rendered, template

SELECTS = """{% for message in messages %}{{ message['role'].upper() + ': ' }}{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] + ' ' }}{% endfor %}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"""
ASKS_THE_FIRST = """{{ bos_token }}{% for message in messages %}{{ message.role | capitalize }}{% if message.content[0].type == 'image' %}:{% else %}: {% endif %}{% for line in message.content %}{% if line.type == 'text' %}{{ line.text }}{% elif line.type == 'image' %}<image>{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"""
TAKES_BOTH = """{{ bos_token }}{%- for message in messages -%}{{ '<start_of_turn>' + message['role'] + '\n' }}{%- if message['content'] is string -%}{{ message['content'] | trim }}{%- else -%}{%- for item in message['content'] -%}{%- if item['type'] == 'image' -%}<start_of_image>{%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}{%- endfor -%}{%- endif -%}{{ '<end_of_turn>\n' }}{%- endfor -%}{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"""
CHAT = [
    {"role": "user", "content": "What is <image> or </s>?"},
    {"role": "assistant", "content": "A mark"},
    {"role": "user", "content": ""},
]
PARTS = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in CHAT]


@pytest.mark.parametrize("source", [SELECTS, ASKS_THE_FIRST, TAKES_BOTH], ids=["selects", "first", "both"])
def test_texts_are_written_as_transformers_writes_parts(source: str, byte_bpe_hf: Any) -> None:
    for chat, parts in ((CHAT, PARTS), (CHAT[:1], PARTS[:1])):
        expected = byte_bpe_hf.apply_chat_template(
            parts, tokenize=False, chat_template=source, add_generation_prompt=True
        )
        assert rendered(source, chat) == expected
        assert rendered(source, parts) == expected
    written, mask = template(source).marked(CHAT)
    start = written.index("What is")
    assert set(mask[start : start + len("What is <image> or </s>?")]) == {0}  # the user's, whatever it is wrapped in


def test_calls_without_a_text_and_templates_that_fail_on_any_are_left_alone() -> None:
    calls = [*CHAT[:1], {"role": "assistant", "content": None, "tool_calls": []}]
    source = "{% for m in messages %}{% if m.content %}{% for line in m.content %}{{ line.text }}{% endfor %}{% endif %}{% endfor %}"
    assert rendered(source, calls) == CHAT[0]["content"]
    never = "{% for message in messages %}{% for part in message.content %}{% endfor %}{{ message.role }}{% endfor %}"
    assert rendered(never, CHAT, add_generation_prompt=False) == "userassistantuser"
