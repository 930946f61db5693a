"""Chats whose last message is the beginning of an answer: rendered up to where the answer goes on.

The place is told by a mark behind the message's content, since any text of it may stand in the template too. A template
that trims the content leaves the mark without the space at its end: then the white space before it goes as well.
"""

import json
from collections.abc import Mapping

from roofline.common.errors import RequestError
from roofline.text.templates.template import ChatTemplate, Objects

FIRST_MARK = 0xF0000  # of Unicode's private use


def render_begun(
    template: ChatTemplate, messages: Objects, tools: Objects | None, variables: Mapping[str, object]
) -> tuple[str, bytes]:
    """The chat up to the end of its last message's content, and for each character 1 where the template wrote it.

    Raises RequestError as `ChatTemplate.render` does, and where the template does not write the content as it stands.
    """
    begun = str(messages[-1].get("content") or "")
    mark = _unused_mark(template.source, messages, tools, variables)
    marked = [*messages[:-1], {**messages[-1], "content": f"{begun}{mark} "}]
    text, trusted = template.marked(marked, tools, False, variables)
    at = text.rfind(mark)
    end = max(at, 0)
    if text[end + 1 : end + 2] != " ":
        while end and text[end - 1].isspace() and not trusted[end - 1]:
            end -= 1
    if at < 0 or not text[:at].rstrip().endswith(begun.strip()):
        problem = "the chat template does not write the last message as it stands, so no answer can go on from it"
        raise RequestError(400, "invalid_value", problem, param="continue_final_message")
    return text[:end], trusted[:end]


def _unused_mark(*values: object) -> str:
    """A character that is in none of these, which are of JSON."""
    text = json.dumps(values, ensure_ascii=False, default=str)
    return next(mark for mark in map(chr, range(FIRST_MARK, FIRST_MARK + len(text) + 1)) if mark not in text)
