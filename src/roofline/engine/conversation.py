"""Messages as programs give them -> messages as chat templates read them."""

from collections.abc import Iterable, Mapping
from typing import NoReturn

from roofline.common.errors import RequestError
from roofline.common.fields import describe
from roofline.text.templates.simple_template import ROLES


def plain_messages(messages: object) -> list[Mapping[str, object]]:
    """The messages, with contents that are given as parts joined to one text, as OpenAI's clients write them.

    Raises RequestError: it is no list of messages, a message has no known role, or a content is not text.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        remedy = 'give [{"role": "user", "content": "..."}], or a prompt to generate'
        _refuse(f"messages: {type(messages).__name__} is no list of messages; {remedy}")
    plain = [_plain(f"messages[{number}]", message) for number, message in enumerate(messages)]
    return plain or _refuse('messages: the list is empty; give at least [{"role": "user", "content": "..."}]')


def _plain(name: str, message: object) -> Mapping[str, object]:
    if not isinstance(message, Mapping):
        _refuse(f"{name}: {type(message).__name__} has no role and content")
    role, content = message.get("role"), message.get("content")
    if role is None:
        _refuse(f"{name}.role is missing; choose one of {', '.join(sorted(ROLES))}")
    if not isinstance(role, str) or role not in ROLES:
        _refuse(f"{name}.role is {describe(role)}; choose one of {', '.join(sorted(ROLES))}")
    if isinstance(content, list | tuple):
        return {**message, "content": "\n".join(_text(name, part) for part in content)}
    if content is None and message.keys() <= {"role", "content"}:  # with calls of tools it may be
        _refuse(f"{name}.content is missing; give text")
    if content is not None and not isinstance(content, str):
        _refuse(f"{name}.content is {describe(content)}; give text")
    return message


def _text(name: str, part: object) -> str:
    kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(text, str):
        return text
    problem = f"a part of type {kind!r} is not supported" if kind != "text" else "a part has no text"
    _refuse(f"{name}.content: {problem}; give text")


def _refuse(problem: str) -> NoReturn:
    raise RequestError(400, "invalid_value", problem, "messages")
