"""Shorthands of the template tests."""

from typing import Any

from text_samples import MESSAGES

from roofline.text.templates.template import ChatTemplate


def template(source: str | None, **options: Any) -> ChatTemplate:
    """A template with the tiny tokenizer's BOS and EOS."""
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>", **options)


def rendered(source: str, messages: Any = MESSAGES[0], **options: Any) -> str:
    """The text of a rendered template."""
    return "".join(part.text for part in template(source).render(messages, **options))
