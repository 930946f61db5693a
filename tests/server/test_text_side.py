"""What a server leaves for later is built once it is ready, and a failure of that ends nothing."""

import logging

import pytest

from roofline.common.errors import ConfigError
from roofline.server.serve import _later
from roofline.server.text_side import TextSide
from roofline.text.templates.simple_template_parser import make_outline
from roofline.text.templates.template import CHATML, ChatTemplate
from roofline.text.tokenizers.binary_file import to_bytes
from roofline.text.tokenizers.pretokenizers import byte_level_pipeline
from roofline.text.tokenizers.tokenizer import Tokenizer
from roofline.text.tokenizers.vocabulary import Vocabulary, byte_alphabet


def test_the_libraries_take_over_with_the_same_answers() -> None:
    words = to_bytes(Vocabulary("BPE", sorted(byte_alphabet()), pipeline=byte_level_pipeline("gpt-2")))
    text = TextSide(Tokenizer.from_bytes(words), ChatTemplate(CHATML, outline=make_outline(CHATML)))
    chat = [{"role": "user", "content": "hello"}]
    before = text.encode("hello there"), text.encode_chat(chat)
    assert text.tokenizer.has_short_text_encoder
    _later(text.complete)
    assert not text.tokenizer.has_short_text_encoder
    assert (text.encode("hello there"), text.encode_chat(chat)) == before


def test_a_failure_is_only_said(caplog: pytest.LogCaptureFixture) -> None:
    def complete() -> None:
        raise ConfigError("the tables do not fit together")

    with caplog.at_level(logging.WARNING, logger="roofline"):
        _later(complete)
    assert "do not fit" in caplog.text
