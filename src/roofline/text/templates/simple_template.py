"""Simple chat templates without Jinja: an outline of the syntax tree as plain data, and a small interpreter of it.

`outline` is made once, by Jinja's own parser, and kept in a bundle; `render` then gives what the sandbox would give, or
None where it is not certain of that: a chat it does not expect, a value it does not know. Tests compare the two.

An expression is ["text", str], ["name", str], ["item", message, key], ["+", left, right...], ["==", left, right],
["!=", ...], ["not", e], ["and", l, r], ["or", l, r], ["if", test, then, else], ["int", number] or ["none"].
A statement is ["out", expressions], ["if", [[test, body]...], else body] or ["for", name, body] over the messages.
"""

from collections.abc import Mapping, Sequence
from typing import Any

MAX_RENDERED = 1 << 20  # characters; longer chats have Jinja's budgets
MAX_SOURCE = 8192  # characters of a template
MAX_DEPTH = 40  # of lists in an outline: readers of JSON have limits
MAX_CHAT = 1 << 16  # characters of all messages; with more, work has to be counted as the sandbox does
NAMES = ("messages", "add_generation_prompt", "bos_token", "eos_token", "tools")
_LOOP = ("first", "last", "index", "index0")
_KEYS = frozenset({"role", "content"})

Parts = tuple[tuple[str, bool], ...]  # stretches of a text, and whether the template wrote them


class _Unsure(Exception):
    """Something that only Jinja can decide."""


def outline(source: str) -> list[Any] | None:
    """The outline of a template, None for one that uses more than there is here."""
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError

    from roofline.text.templates.sandbox import ChatEnvironment

    if len(source) > MAX_SOURCE:
        return None
    try:
        tree = ChatEnvironment()._parse(source, None, None)
        body = [_statement(node, nodes, NAMES) for node in tree.body]
        return body if _depth(body) <= MAX_DEPTH else None
    except (_Unsure, TemplateError, RecursionError):
        return None


def render(
    body: Sequence[Any],
    messages: Sequence[Mapping[str, Any]],
    tokens: Mapping[str, str],
    prompt: bool,
    roles: frozenset[str],
) -> list[tuple[str, bool]] | None:
    """The stretches of a rendered chat, None where Jinja must say.

    Args:
        tokens: bos_token, eos_token.
        prompt: add_generation_prompt.
        roles: those that count as the template's own words.
    """
    chat = []
    if type(messages) is not list and type(messages) is not tuple:
        return None
    for message in messages:
        if not isinstance(message, Mapping) or message.keys() != _KEYS:
            return None
        role, content = message["role"], message["content"]
        if type(role) is not str or type(content) is not str:
            return None
        chat.append({"role": ((role, role in roles),), "content": ((content, False),)})
    if sum(len(m["role"]) + len(m["content"]) + 16 for m in messages) > MAX_CHAT:
        return None
    known: dict[str, Any] = {"messages": chat, "tools": None, "add_generation_prompt": prompt}
    for name, value in tokens.items():
        known[name] = ((value, True),)
    parts: list[tuple[str, bool]] = []
    try:
        _run(body, known, parts)
    except (_Unsure, RecursionError):
        return None
    return parts if sum(len(text) for text, _ in parts) <= MAX_RENDERED else None


def _depth(value: Any) -> int:
    return 1 + max(map(_depth, value), default=0) if isinstance(value, list) else 0


def _run(body: Sequence[Any], known: dict[str, Any], parts: list[tuple[str, bool]]) -> None:
    for kind, *rest in body:
        if kind == "out":
            for expression in rest[0]:
                value = _value(expression, known)
                if not isinstance(value, tuple):
                    raise _Unsure
                parts += value
        elif kind == "if":
            for test, inner in rest[0]:
                if _truth(_value(test, known)):
                    _run(inner, known, parts)
                    break
            else:
                _run(rest[1], known, parts)
        else:
            name, inner = rest
            last = len(known["messages"]) - 1
            for at, message in enumerate(known["messages"]):
                loop = {"first": at == 0, "last": at == last, "index": at + 1, "index0": at}
                _run(inner, {**known, name: message, "loop": loop}, parts)


def _value(expression: Sequence[Any], known: Mapping[str, Any]) -> Any:
    kind, *rest = expression
    if kind == "text":
        return ((rest[0], True),)
    if kind == "int":
        return rest[0]
    if kind == "none":
        return None
    if kind == "name":
        return known[rest[0]]
    if kind == "item":
        holder, key = _value(rest[0], known), rest[1]
        if isinstance(holder, list) and not -len(holder) <= key < len(holder):
            raise _Unsure
        return holder[key]
    if kind == "+":
        values = [_value(part, known) for part in rest]
        if not all(isinstance(value, tuple) for value in values):
            raise _Unsure
        return tuple(part for value in values for part in value)
    if kind in ("==", "!="):
        left, right = (_plain(_value(part, known)) for part in rest)
        return (left == right) is (kind == "==")
    if kind == "not":
        return not _truth(_value(rest[0], known))
    if kind in ("and", "or"):
        left = _value(rest[0], known)
        return left if _truth(left) is (kind == "or") else _value(rest[1], known)
    test, then, other = rest
    return _value(then if _truth(_value(test, known)) else other, known)


def _truth(value: Any) -> bool:
    return bool(_plain(value))


def _plain(value: Any) -> Any:
    """A value as Python compares it; texts are joined."""
    if isinstance(value, tuple):
        return "".join(text for text, _ in value)
    if value is None or isinstance(value, bool | int | list):
        return value
    raise _Unsure


def _statement(node: Any, nodes: Any, names: tuple[str, ...]) -> list[Any]:
    def body(inner: Sequence[Any], names: tuple[str, ...] = names) -> list[Any]:
        return [_statement(n, nodes, names) for n in inner]

    match node:
        case nodes.Output():
            return ["out", [_expression(part, nodes, names) for part in node.nodes]]
        case nodes.If():
            branches = [(node.test, node.body), *((branch.test, branch.body) for branch in node.elif_)]
            return [
                "if",
                [[_expression(test, nodes, names), body(inner)] for test, inner in branches],
                body(node.else_),
            ]
        case nodes.For(target=nodes.Name(), else_=[], test=None, recursive=False):
            over = node.iter.node if isinstance(node.iter, nodes.Filter) and node.iter.name == "ticking" else node.iter
            own = node.target.name
            if not (isinstance(over, nodes.Name) and over.name == "messages") or own in names or "loop" in names:
                raise _Unsure
            return ["for", own, body(node.body, (*names, own, "loop"))]
    raise _Unsure


def _expression(node: Any, nodes: Any, names: tuple[str, ...]) -> list[Any]:
    def inner(*parts: Any) -> list[list[Any]]:
        return [_expression(part, nodes, names) for part in parts]

    match node:
        case nodes.TemplateData():
            return ["text", node.data]
        case nodes.Const(value=None):
            return ["none"]
        case nodes.Const(value=str()):
            return ["text", node.value]
        case nodes.Const(value=int()) if not isinstance(node.value, bool):
            return ["int", node.value]
        case nodes.Name() if node.name in names:
            return ["name", node.name]
        case nodes.Getattr(node=nodes.Name(name="loop")) if "loop" in names and node.attr in _LOOP:
            return ["item", ["name", "loop"], node.attr]
        case nodes.Getattr() if node.attr in _KEYS:
            return ["item", _message(node.node, nodes, names), node.attr]
        case nodes.Getitem(arg=nodes.Const(value=str(key))) if key in _KEYS:
            return ["item", _message(node.node, nodes, names), key]
        case nodes.Add():
            return ["+", *inner(node.left, node.right)]
        case nodes.Concat():
            return ["+", *inner(*node.nodes)]
        case nodes.Compare(ops=[nodes.Operand(op=("eq" | "ne") as op)]):
            return ["==" if op == "eq" else "!=", *inner(node.expr, node.ops[0].expr)]
        case nodes.Not():
            return ["not", *inner(node.node)]
        case nodes.And() | nodes.Or():
            return ["and" if isinstance(node, nodes.And) else "or", *inner(node.left, node.right)]
        case nodes.CondExpr() if node.expr2 is not None:
            return ["if", *inner(node.test, node.expr1, node.expr2)]
        case nodes.Test(name="none" | "defined", node=nodes.Name()) if node.node.name in names:
            known = inner(node.node)[0]
            return ["==", known, ["none"]] if node.name == "none" else ["==", ["int", 0], ["int", 0]]
    raise _Unsure


def _message(node: Any, nodes: Any, names: tuple[str, ...]) -> list[Any]:
    """One message: the loop's, or one by its number."""
    match node:
        case nodes.Name() if node.name in names and node.name not in (*NAMES, "loop"):
            return ["name", node.name]
        case nodes.Getitem(node=nodes.Name(name="messages"), arg=nodes.Const(value=int(at))) if type(at) is int:
            return ["item", ["name", "messages"], at]
        case nodes.Getitem(node=nodes.Name(name="messages"), arg=nodes.Neg(node=nodes.Const(value=int(at)))) if (
            type(at) is int
        ):
            return ["item", ["name", "messages"], -at]
    raise _Unsure
