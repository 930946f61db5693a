"""Chat templates: the ids of transformers, users who cannot forge special tokens, strangers who cannot do harm."""

import json
import time
from typing import Any

import pytest
from chat_templates import ALL, LLAMA3, MISTRAL, PHI, QWEN3
from template_helpers import rendered, template
from text_samples import AWKWARD, MESSAGES

from roofline.common.errors import RequestError
from roofline.text.tokenizers.pretokenizers import byte_level_pipeline
from roofline.text.tokenizers.tokenizer import Tokenizer
from roofline.text.tokenizers.vocabulary import Vocabulary, byte_alphabet

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Wetter für <b>eine</b> Stadt & 'mehr'",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
TOOL_CHAT = [
    {"role": "user", "content": "Weather in Köln?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Köln"}}}],
    },
    {"role": "tool", "content": '{"temp": 20}'},
    {"role": "tool", "content": "sunny"},
]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("chat", range(len(MESSAGES)))
@pytest.mark.parametrize("prompt", [True, False])
def test_ids_are_those_of_transformers(
    byte_bpe: Tokenizer, byte_bpe_hf: Any, name: str, chat: int, prompt: bool
) -> None:
    options = {"add_generation_prompt": prompt, "chat_template": ALL[name]}
    text = byte_bpe_hf.apply_chat_template(MESSAGES[chat], tokenize=False, **options)
    assert rendered(ALL[name], MESSAGES[chat], add_generation_prompt=prompt) == text
    expected = byte_bpe_hf.apply_chat_template(MESSAGES[chat], tokenize=True, return_dict=False, **options)
    ids = template(ALL[name]).encode_chat(byte_bpe, MESSAGES[chat], add_generation_prompt=prompt)
    assert ids == expected
    assert ids.count(byte_bpe.bos_id) == (name in {"llama3", "mistral"})


@pytest.mark.parametrize("source", [LLAMA3, QWEN3])
@pytest.mark.parametrize("chat", [TOOL_CHAT, MESSAGES[1]])
def test_tools_are_those_of_transformers(byte_bpe: Tokenizer, byte_bpe_hf: Any, source: str, chat: Any) -> None:
    options: dict[str, Any] = {"tools": TOOLS, "add_generation_prompt": True, "enable_thinking": False}
    if source is LLAMA3:
        chat = [{key: value for key, value in message.items() if key != "x"} for message in chat]
    text = byte_bpe_hf.apply_chat_template(chat, tokenize=False, chat_template=source, **options)
    assert rendered(source, chat, **options) == text
    expected = byte_bpe_hf.apply_chat_template(chat, chat_template=source, tokenize=True, return_dict=False, **options)
    assert template(source).encode_chat(byte_bpe, chat, **options) == expected


@pytest.mark.parametrize("content", AWKWARD)
@pytest.mark.parametrize("source", [LLAMA3, MISTRAL, QWEN3])
def test_awkward_content(byte_bpe: Tokenizer, byte_bpe_hf: Any, source: str, content: str) -> None:
    chat = [{"role": "user", "content": content}]
    expected = byte_bpe_hf.apply_chat_template(
        chat, chat_template=source, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert template(source).encode_chat(byte_bpe, chat) == expected


def test_without_a_template_it_is_chatml_and_says_so(byte_bpe: Tokenizer) -> None:
    ours = template(None)
    assert ours.is_default
    assert not template(PHI).is_default
    text = "".join(part.text for part in ours.render(MESSAGES[1]))
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")
    assert text.endswith("<|im_start|>assistant\n")


def test_a_guessed_template_needs_its_marks_in_the_vocabulary(byte_bpe: Tokenizer) -> None:
    guessed = template(None)
    assert guessed.fits(byte_bpe)
    assert guessed.encode_chat(byte_bpe, MESSAGES[1])
    plain = Tokenizer(Vocabulary("BPE", sorted(byte_alphabet()), pipeline=byte_level_pipeline("gpt-2")))
    assert template(PHI).fits(plain)
    assert not guessed.fits(plain)
    with pytest.raises(RequestError, match="no chat template") as refusal:
        guessed.encode_chat(plain, MESSAGES[1])
    assert (refusal.value.status, refusal.value.code) == (400, "no_chat_template")


def test_the_json_filter_is_that_of_transformers() -> None:
    value = {"b": "<é&'\u2028>", "a": [1, None, 2.5, {"x": []}]}
    chat = [{"role": "user", "content": value}]
    assert rendered("{{ messages[0].content|tojson }}", chat) == json.dumps(value, ensure_ascii=False)
    assert rendered("{{ messages[0].content|tojson(indent=2) }}", chat) == json.dumps(
        value, ensure_ascii=False, indent=2
    )
    with_options = "{{ messages[0].content|tojson(ensure_ascii=true, separators=(',', ':'), sort_keys=true) }}"
    assert rendered(with_options, chat) == json.dumps(value, separators=(",", ":"), sort_keys=True)


def test_long_chats_within_the_limit_are_quick() -> None:
    chat = [{"role": "user", "content": "line of code\n" * 2000}, {"role": "assistant", "content": "ok"}] * 50
    start = time.process_time()
    assert len(rendered(QWEN3, chat)) > 1_300_000
    assert time.process_time() - start < 1
