"""Answers that go on from a last message: transformers' text, whatever the content is."""

from typing import Any

import pytest
from chat_templates import ALL
from text_samples import AWKWARD, SPECIAL_TEXTS

from roofline.common.errors import RequestError
from roofline.text.templates.begun_answer import render_begun
from roofline.text.templates.template import CHATML, ChatTemplate
from roofline.text.tokenizers.tokenizer import Tokenizer

GEMMA = (
    "{{ bos_token }}{% for m in messages %}{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
)
SPACES_KEPT = "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token + ' ' }}{% endfor %}"
SOURCES = {
    **{name: ALL[name] for name in ("llama3", "mistral", "phi", "qwen3")},
    "chatml": CHATML,
    "gemma": GEMMA,
    "spaces": SPACES_KEPT,
}
IN_MARKS = ["<", ">", "|", "e", "d", "end", "im", "im_end", "<|", "id", "s", "/", "</", "</s>", "of", "turn", "n", "\\"]
SPACED = ["```json\n", "1\n2\n3\n", "x ", "x\n\n", "\tx\t", "  x", "a \n b", "CONTINUE_FINAL_MESSAGE_TAG", "\U000f0000"]
CONTENTS = [*IN_MARKS, *SPACED, *filter(str.strip, AWKWARD), *SPECIAL_TEXTS]


def _begun(source: str, content: object, *, before: str = "Say it") -> tuple[str, bytes]:
    messages = [{"role": "user", "content": before}, {"role": "assistant", "content": content}]
    return render_begun(ChatTemplate(source, bos_token="<s>", eos_token="</s>"), messages, None, {})


@pytest.mark.parametrize("name", SOURCES)
def test_an_answer_goes_on_where_transformers_has_it_go_on(byte_bpe_hf: Any, name: str) -> None:
    for content in CONTENTS:
        messages = [{"role": "user", "content": "Say it"}, {"role": "assistant", "content": content}]
        expected = byte_bpe_hf.apply_chat_template(
            messages, tokenize=False, chat_template=SOURCES[name], continue_final_message=True
        )
        text, mask = _begun(SOURCES[name], content)
        assert text == expected, content
        assert len(mask) == len(text)
        assert not any(mask[text.rindex(content.strip()) :]), "nothing of the content counts as the template's"


def test_text_of_special_tokens_in_a_beginning_stays_text(byte_bpe: Tokenizer) -> None:
    text, mask = _begun(CHATML, "<|im_end|>")
    ids = byte_bpe.encode_marked(text, mask)
    assert byte_bpe.decode(ids, skip_special=False) == text
    assert ids.count(byte_bpe.token_id("<|im_end|>")) == 1, "the user's turn alone is ended"


@pytest.mark.parametrize("content", ["", None, "  "])
@pytest.mark.parametrize("name", ["chatml", "gemma", "llama3", "qwen3", "mistral"])
def test_an_empty_beginning_opens_the_answer(name: str, content: str | None) -> None:
    """transformers trims the template's own line breaks here where the content is trimmed; they belong to the turn."""
    text, _ = _begun(SOURCES[name], content)
    begun, _ = _begun(SOURCES[name], "Yes")
    kept = content if name in ("chatml", "qwen3") and content else ""
    assert text == begun.removesuffix("Yes") + kept


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}",
    ],
)
def test_content_that_the_template_does_not_write_as_it_stands_is_refused(byte_bpe_hf: Any, source: str) -> None:
    messages = [{"role": "user", "content": "Say it"}, {"role": "assistant", "content": "a</think>b"}]
    with pytest.raises(ValueError, match="continue_final_message"):
        byte_bpe_hf.apply_chat_template(messages, tokenize=False, chat_template=source, continue_final_message=True)
    with pytest.raises(RequestError, match="does not write the last message as it stands") as refused:
        _begun(source, "a</think>b")
    assert refused.value.param == "continue_final_message"


def test_the_mark_is_none_of_the_conversations_characters() -> None:
    """Each of these would be the mark if nobody had written it."""
    used = "\U000f0000\U000f0001 \U000f0002"
    source = "{% for m in messages %}{{ m.content }}\U000f0003{% endfor %}{{ messages[0].content }}"
    assert _begun(source, used, before=used)[0] == f"{used}\U000f0003{used}"
