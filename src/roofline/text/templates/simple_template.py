"""Renders simple chat templates without importing Jinja, from an outline: their syntax tree as plain data.

The outline is made once (`simple_template_parser.py`) and kept in a bundle. `render` returns what the sandbox would
return, or None where it is not certain of that: for a chat or a value of another kind. Tests compare the two.

An expression is ["text", str], ["name", str], ["item", message, key], ["+", left, right...], ["==", left, right],
["!=", ...], ["not", e], ["and", l, r], ["or", l, r], ["if", test, then, else], ["int", number] or ["none"].
A statement is ["out", expressions], ["if", [[test, body]...], else body] or ["for", name, body] over the messages.
"""

from collections.abc import Mapping, Sequence
from typing import Any

MAX_RENDERED = 1 << 20  # characters; longer chats have Jinja's budgets
MAX_CHAT = 1 << 16  # characters of all messages; with more, work has to be counted as the sandbox does
NAMES = ("messages", "add_generation_prompt", "bos_token", "eos_token", "tools")
# Some templates build a special token from the role ("<|" + role + "|>"), so the known roles count as the template's.
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "ipython", "model"})
KEYS = frozenset({"role", "content"})

Outline = list[Any]  # nested lists of strings, numbers and None, as above


class Unsure(Exception):
    """Something that only Jinja can decide."""


def render(
    body: Outline, messages: Sequence[Mapping[str, object]], tokens: Mapping[str, str], prompt: bool
) -> list[tuple[str, bool]] | None:
    """The stretches of a rendered chat, None where only Jinja can render it.

    tokens: bos_token, eos_token; prompt: add_generation_prompt.
    """
    chat = []
    if type(messages) is not list and type(messages) is not tuple:
        return None
    for message in messages:
        if not isinstance(message, Mapping) or message.keys() != KEYS:
            return None
        role, content = message["role"], message["content"]
        if type(role) is not str or type(content) is not str:
            return None
        chat.append({"role": ((role, role in ROLES),), "content": ((content, False),)})
    if sum(len(m["role"]) + len(m["content"]) + 16 for m in messages) > MAX_CHAT:
        return None
    variables: dict[str, object] = {"messages": chat, "tools": None, "add_generation_prompt": prompt}
    variables |= {name: ((value, True),) for name, value in tokens.items()}
    parts: list[tuple[str, bool]] = []
    try:
        _run(body, variables, parts)
    except (Unsure, RecursionError, LookupError, TypeError, ValueError, AssertionError):  # or it is no outline
        return None
    return parts if sum(len(text) for text, _ in parts) <= MAX_RENDERED else None


def _run(body: Outline, variables: Mapping[str, object], parts: list[tuple[str, bool]]) -> None:
    for kind, *rest in body:
        if kind == "out":
            for expression in rest[0]:
                parts += _text(expression, variables)
        elif kind == "if":
            for test, inner in rest[0]:
                if _truth(_value(test, variables)):
                    _run(inner, variables, parts)
                    break
            else:
                _run(rest[1], variables, parts)
        else:
            name, inner = rest
            chat = variables["messages"]
            assert isinstance(chat, list), "the parser lets no template set it"
            for at, message in enumerate(chat):
                loop = {"first": at == 0, "last": at == len(chat) - 1, "index": at + 1, "index0": at}
                _run(inner, {**variables, name: message, "loop": loop}, parts)


def _text(expression: Outline, variables: Mapping[str, object]) -> tuple[tuple[str, bool], ...]:
    """A text: its stretches, and whether the template wrote each."""
    value = _value(expression, variables)
    if not isinstance(value, tuple):
        raise Unsure
    return value


def _value(expression: Outline, variables: Mapping[str, object]) -> object:
    kind, *rest = expression
    if kind in ("text", "int"):
        constant = rest[0]
        if type(constant) is not (str if kind == "text" else int):  # a bundle may hold anything
            raise Unsure
        return ((constant, True),) if kind == "text" else constant
    if kind == "none":
        return None
    if kind == "name":
        return variables[rest[0]]
    if kind == "item":
        container, key = _value(rest[0], variables), rest[1]
        if isinstance(container, list) and -len(container) <= key < len(container):
            return container[key]
        if isinstance(container, dict):
            return container[key]
        raise Unsure
    if kind == "+":
        return tuple(part for inner in rest for part in _text(inner, variables))
    if kind in ("==", "!="):
        first, second = (_plain(_value(part, variables)) for part in rest)
        return (first == second) is (kind == "==")
    if kind == "not":
        return not _truth(_value(rest[0], variables))
    if kind in ("and", "or"):
        first = _value(rest[0], variables)
        return first if _truth(first) is (kind == "or") else _value(rest[1], variables)
    test, then, other = rest
    return _value(then if _truth(_value(test, variables)) else other, variables)


def _truth(value: object) -> bool:
    return bool(_plain(value))


def _plain(value: object) -> object:
    """A value as Python compares it; texts are joined."""
    if isinstance(value, tuple):
        return "".join(text for text, _ in value)
    if value is None or isinstance(value, bool | int | list):
        return value
    raise Unsure
