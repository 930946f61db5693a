"""Parses simple chat templates into the outlines that simple_template.py renders, with Jinja's own parser."""

from collections.abc import Iterable

from jinja2 import nodes
from jinja2.exceptions import TemplateError

from roofline.text.templates.sandbox import ChatEnvironment
from roofline.text.templates.simple_template import KEYS, NAMES, Outline, Unsure

MAX_SOURCE = 8192  # characters of a template
MAX_DEPTH = 40  # of lists in an outline: readers of JSON have limits
_LOOP = ("first", "last", "index", "index0")


def make_outline(source: str) -> Outline | None:
    """The outline of a template, None for one that is not so simple."""
    if len(source) > MAX_SOURCE:
        return None
    try:
        tree = ChatEnvironment()._parse(source, None, None)
        body = [_statement(node, NAMES) for node in tree.body]
        return body if _depth(body) <= MAX_DEPTH else None
    except (Unsure, TemplateError, RecursionError):
        return None


def _depth(value: object) -> int:
    return 1 + max(map(_depth, value), default=0) if isinstance(value, list) else 0


def _statement(node: nodes.Node, names: tuple[str, ...]) -> Outline:
    def body(inner: Iterable[nodes.Node], names: tuple[str, ...] = names) -> Outline:
        return [_statement(n, names) for n in inner]

    match node:
        case nodes.Output():
            return ["out", [_expression(part, names) for part in node.nodes]]
        case nodes.If():
            branches = [(node.test, node.body), *((branch.test, branch.body) for branch in node.elif_)]
            return ["if", [[_expression(test, names), body(inner)] for test, inner in branches], body(node.else_)]
        case nodes.For(target=nodes.Name(name=str(own)), else_=[], test=None, recursive=False):
            over = node.iter.node if isinstance(node.iter, nodes.Filter) and node.iter.name == "ticking" else node.iter
            if not (isinstance(over, nodes.Name) and over.name == "messages") or own in names or "loop" in names:
                raise Unsure
            return ["for", own, body(node.body, (*names, own, "loop"))]
    raise Unsure


def _expression(node: nodes.Node, names: tuple[str, ...]) -> Outline:
    def inner(*parts: nodes.Node) -> list[Outline]:
        return [_expression(part, names) for part in parts]

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
        case nodes.Getattr() if node.attr in KEYS:
            return ["item", _message(node.node, names), node.attr]
        case nodes.Getitem(arg=nodes.Const(value=str(key))) if key in KEYS:
            return ["item", _message(node.node, names), key]
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
        case nodes.Test(name="none" | "defined", node=nodes.Name(name=str(name))) if name in names:
            return ["==", ["name", name], ["none"]] if node.name == "none" else ["==", ["int", 0], ["int", 0]]
    raise Unsure


def _message(node: nodes.Node, names: tuple[str, ...]) -> Outline:
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
    raise Unsure
