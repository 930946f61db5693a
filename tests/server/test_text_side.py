"""What a server leaves for later is built once it is ready, and a failure of that ends nothing."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest

from roofline.common.errors import ConfigError, RequestError
from roofline.server.complete_text import complete_text
from roofline.server.options import ServeOptions
from roofline.server.text_side import TextSide
from roofline.text.replies.reply_format import reply_format
from roofline.text.templates.simple_template_parser import make_outline
from roofline.text.templates.template import CHATML, ChatTemplate
from roofline.text.tokenizers.binary_file import to_bytes
from roofline.text.tokenizers.density import Density
from roofline.text.tokenizers.pretokenizers import byte_level_pipeline
from roofline.text.tokenizers.tokenizer import Tokenizer
from roofline.text.tokenizers.vocabulary import Vocabulary, byte_alphabet
from tests.server.text_sides import BOS, END, START, chatml

LARGE_TEXT = 65_536  # characters from which on a text is looked at before it is encoded


def test_the_libraries_take_over_with_the_same_answers() -> None:
    words = to_bytes(Vocabulary("BPE", sorted(byte_alphabet()), pipeline=byte_level_pipeline("gpt-2")))
    text = TextSide(Tokenizer.from_bytes(words), ChatTemplate(CHATML, outline=make_outline(CHATML)))
    chat = [{"role": "user", "content": "hello"}]
    before = text.encode("hello there"), text.encode_chat(chat)
    assert text.tokenizer.has_short_text_encoder
    complete_text(text, encoder=True)
    assert not text.tokenizer.has_short_text_encoder
    assert (text.encode("hello there"), text.encode_chat(chat)) == before


def test_both_parts_of_the_text_side_are_built() -> None:
    built: list[str] = []
    tokenizer = SimpleNamespace(eos_ids=[2], density=None, complete=lambda: built.append("tokenizer"))
    template = SimpleNamespace(complete=lambda: built.append("template"))
    text = TextSide(tokenizer, template)  # type: ignore[arg-type]
    text.complete()
    assert (built, text.eos_ids) == (["tokenizer", "template"], (2,))


def test_a_raw_prompt_has_the_special_ids_that_the_model_wants() -> None:
    tokenizer = SimpleNamespace(eos_ids=[2], encode=lambda text, add_special: [1, 9] if add_special else [9])
    assert TextSide(tokenizer, SimpleNamespace()).encode("x") == [1, 9]  # type: ignore[arg-type]


def test_a_form_of_replies_counts_as_chosen_where_it_is_not_the_templates_own() -> None:
    template = SimpleNamespace(source="tools <tool_call>")
    own = reply_format(template.source)
    for calls, chosen in (("auto", False), ("hermes", False), ("mistral", True)):
        form = ServeOptions(tool_call_parser=calls).reply_format
        text = TextSide(SimpleNamespace(eos_ids=[2]), template, form)  # type: ignore[arg-type]
        assert text.chosen_format == (replace(own, calls="mistral") if chosen else None)


def test_a_failure_is_only_said(caplog: pytest.LogCaptureFixture) -> None:
    def complete() -> None:
        raise ConfigError("the tables do not fit together")

    with caplog.at_level(logging.WARNING, logger="roofline"):
        complete_text(SimpleNamespace(complete=complete, chat_notice="", tools_notice=""), encoder=False)
    assert "do not fit" in caplog.text


def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    words = Vocabulary("BPE", sorted(byte_alphabet()), pipeline=byte_level_pipeline("gpt-2"))
    words = replace(words, tokens=[*words.tokens, "aaaa"])
    text = TextSide(Tokenizer(words), ChatTemplate(CHATML))
    assert len(text.encode("a" * 40, 10)) == 40  # 10 tokens of 4 bytes would do
    chat = [{"role": "user", "content": "a" * 40}]
    assert text.encode_chat(chat, 1000)

    def encode(*_args: object) -> list[int]:
        raise AssertionError("it was encoded")

    monkeypatch.setattr(text.tokenizer, "_encode", encode)
    for field, call in (
        ("prompt", lambda: text.encode("a" * 41, 10)),
        ("messages", lambda: text.encode_chat(chat, 10)),
    ):
        with pytest.raises(
            RequestError, match=r"has \d+ bytes, but this server's context of 10 tokens .* 40\."
        ) as refused:
            call()
        assert (refused.value.status, refused.value.code) == (400, "context_length_exceeded")
        assert refused.value.param == field
    with pytest.raises(RequestError, match="has 41 bytes"):
        text.encode("ä" * 20 + "a", 10)


def test_a_large_text_that_surely_has_too_many_tokens_is_refused_without_encoding_it() -> None:
    tokenizer = Tokenizer(Vocabulary("BPE", sorted(byte_alphabet()), pipeline=byte_level_pipeline("gpt-2")))
    text = TextSide(tokenizer, SimpleNamespace(), lambda source: None)  # type: ignore[arg-type, return-value]
    encoded: list[int] = []

    def encode(prompt: str, add_special: bool) -> list[int]:
        encoded.append(len(prompt))
        return [1]

    tokenizer.encode = encode  # type: ignore[method-assign, assignment]
    tokenizer.density = Density(4)  # as if a token of four bytes were among them
    assert text.encode("1" * (LARGE_TEXT - 1), LARGE_TEXT // 2) == [1], "encoding it costs little"
    assert text.encode("1" * LARGE_TEXT, LARGE_TEXT) == [1]
    with pytest.raises(RequestError, match=f"more tokens than this server's context of {LARGE_TEXT - 1}") as refused:
        text.encode("1" * LARGE_TEXT, LARGE_TEXT - 1)
    assert (refused.value.status, refused.value.code) == (400, "context_length_exceeded")
    assert refused.value.param == "prompt"
    assert encoded == [LARGE_TEXT - 1, LARGE_TEXT]


def test_a_model_without_a_template_and_its_marks_refuses_chats() -> None:
    words = Vocabulary("BPE", sorted(byte_alphabet()), pipeline=byte_level_pipeline("gpt-2"))
    text = TextSide(Tokenizer(words), ChatTemplate(None))
    with pytest.raises(RequestError, match="no chat template") as refusal:
        text.encode_chat([{"role": "user", "content": "hello"}])
    assert refusal.value.code == "no_chat_template"
    assert text.encode("hello")
    assert text.chat_notice.endswith("chats are refused, /v1/completions continues texts")


def test_the_template_that_stands_in_for_a_models_own_is_told() -> None:
    text = chatml()
    assert TextSide(text.tokenizer, ChatTemplate("{{ messages[0].content }}")).chat_notice == ""
    assert "chats are written in ChatML" in TextSide(text.tokenizer, ChatTemplate(None)).chat_notice


@pytest.mark.parametrize(("encoder", "told"), [(False, 1), (True, 0)])
def test_an_extra_model_without_a_template_is_told_by_its_name(encoder, told, caplog, monkeypatch) -> None:
    monkeypatch.setattr(logging.getLogger("roofline"), "propagate", True)
    complete_text(TextSide(chatml().tokenizer, ChatTemplate(None)), encoder, "model second: ")
    assert len(caplog.messages) == told
    assert all(line.startswith("model second: the model's files have no chat template") for line in caplog.messages)


def test_the_text_of_ids_has_their_special_tokens() -> None:
    text = chatml()
    assert text.decode([START, *text.encode("A", add_special=False), END]) == "<|im_start|>A<|im_end|>"
    assert text.special_ids() == {BOS, START, END}
    assert text.special_ids(["<|im_end|>", "A"]) == {END}


CONVERSATION = [
    {"role": "user", "content": "Hi"},
    {"role": "user", "content": "there"},
    {"role": "assistant", "content": " Once upon "},
]


@pytest.mark.parametrize(
    ("continues", "answer_begins", "end"),
    [
        (False, True, "Once upon<|im_end|>\n<|im_start|>assistant\n"),
        (False, False, "Once upon<|im_end|>\n"),
        (True, True, "<|im_start|>assistant\nOnce upon"),
        (True, False, "<|im_start|>assistant\nOnce upon"),
    ],
)
def test_a_conversation_ends_where_its_answer_begins_or_goes_on(continues: bool, answer_begins: bool, end: str) -> None:
    template = ChatTemplate(CHATML.replace("message['content']", "message['content'] | trim"))
    text = TextSide(chatml().tokenizer, template)
    rendered, mask = text.render(CONVERSATION, tools=(), variables={}, continues=continues, answer_begins=answer_begins)
    assert len(rendered) == len(mask)
    assert rendered.endswith(end)


def test_an_answer_goes_on_where_it_is_all_there_is_and_where_it_is_empty() -> None:
    text = TextSide(chatml().tokenizer, ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}"))
    assert text.render(CONVERSATION[2:], tools=(), variables={}, continues=True)[0] == " Once upon "
    begun = [{"role": "assistant", "content": "Once"}]
    assert text.render(begun, tools=(), variables={}, continues=True) == ("Once", bytes(4))
    for content, rendered in (("", ""), ("  ", "  "), (None, "")):
        message = {"role": "assistant", "content": content}
        assert text.render([message], tools=(), variables={}, continues=True)[0] == rendered


def test_an_answer_does_not_go_on_where_the_template_changes_what_is_there() -> None:
    text = TextSide(chatml().tokenizer, ChatTemplate("{% for m in messages %}{{ m.content | upper }}{% endfor %}"))
    with pytest.raises(RequestError, match="does not write the last message") as refused:
        text.render([{"role": "assistant", "content": "once"}], tools=(), variables={}, continues=True)
    assert (refused.value.status, refused.value.code) == (400, "invalid_value")
    assert refused.value.param == "continue_final_message"


@pytest.mark.parametrize(
    ("end", "opens"), [("<think>", True), ("<think>\n", True), ("<think>\n\n", False), ("x", False)]
)
def test_the_mark_of_reasoning_is_among_the_last_eight_tokens(end: str, opens: bool) -> None:
    """Tokens are bytes here, and blanks after the mark do not count."""
    text = TextSide(chatml().tokenizer, ChatTemplate("<think>"))
    assert text.reply_format.thinks
    assert text.ends_thinking(text.encode(f"a{end}")) == opens
    assert not chatml().ends_thinking(text.encode(f"a{end}")), "its template has no mark"
