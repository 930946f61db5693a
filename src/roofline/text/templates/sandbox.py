"""Jinja made safe for untrusted templates: tracked strings, and a bound on what any one operation may make.

What limits what:

* time: each turn of a loop, call, filter and operator checks the deadline (`budget.tick`); the longest single
  operation in between works on at most 4 Mi characters or 100,000 items.
* strings: a `tracked_string.TrackedText` is charged by its length, before it is made, to the rendering's budget.
* containers: `tracked_string.admit` weighs what literals, calls, filters and ``+`` make, as printed, and limits depth.
* numbers: `+ - * / // % **` go through `call_binop`.
* reach: only the attributes listed here exist; there is no loader, so no include, import or extends.
"""

import operator
from collections.abc import Callable, Iterable
from typing import TypeVar

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.ext import loopcontrols as LoopControls
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner, Namespace, pass_context
from jinja2.visitor import NodeTransformer

from roofline.text.templates.budget import MAX_BITS, check_items, over_budget, tick, ticking
from roofline.text.templates.filters import FILTERS, FUNCTIONS
from roofline.text.templates.tracked_string import METHODS, TrackedText, admit, joined, literal, text, weight

N = TypeVar("N", bound=nodes.Expr)

_ATTRIBUTES: tuple[tuple[type | tuple[type, ...], frozenset[str]], ...] = (
    (str, METHODS),
    (dict, frozenset({"get", "items", "keys", "values", "copy"})),
    ((list, tuple), frozenset({"index", "count", "copy"})),
    (
        LoopContext,
        frozenset({"index", "index0", "revindex", "revindex0", "first", "last", "length", "depth", "depth0"})
        | {"previtem", "nextitem", "changed", "cycle"},
    ),
    (Macro, frozenset({"name", "arguments", "catch_kwargs", "catch_varargs", "caller"})),
    (Cycler, frozenset({"next", "current", "reset"})),
    (Joiner, frozenset()),
)
_OPERATORS: dict[str, Callable[[object, object], object]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
    "**": operator.pow,
}


class _Generation(Extension):
    """``{% generation %}``, which marks the assistant's part for training; here it prints its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own form

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Rewriter(NodeTransformer):
    """Makes loops check the deadline, and refuses statements that reach outside the template."""

    def visit_For(self, node: nodes.For, *args: object, **kwargs: object) -> nodes.Node:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "ticking", [], [], None, None).set_lineno(node.lineno)
        return node

    def _refuse(self, node: nodes.Node, *args: object, **kwargs: object) -> nodes.Node:
        raise TemplateSyntaxError(f"a chat template has no {type(node).__name__.lower()}", node.lineno)

    visit_Include = visit_Import = visit_FromImport = visit_Extends = visit_Block = _refuse


class _Generator(CodeGenerator):
    """Python code in which strings of the template are `TrackedText` and containers are weighed."""

    environment: "ChatEnvironment"

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        if isinstance(node.value, str):
            self.write(self._literal(node.value))
        else:
            super().visit_Const(node, frame)

    def visit_TemplateData(self, node: nodes.TemplateData, frame: Frame) -> None:
        self.write(self._literal(node.data))

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concatenate((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._weighed(super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self._weighed(super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "load":
            self._weighed(super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def _weighed(self, visit: Callable[[N, Frame], None], node: N, frame: Frame) -> None:
        self.write("environment.admit(")
        visit(node, frame)
        self.write(")")

    def _output_const_repr(self, group: Iterable[object]) -> str:
        return self._literal("".join(map(str, group)))

    def _literal(self, value: str) -> str:
        self.environment.literals.append(literal(value))
        return f"environment.literals[{len(self.environment.literals) - 1}]"


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The environment of one chat template."""

    code_generator_class = _Generator
    intercepted_binops = frozenset(_OPERATORS)
    concat = staticmethod(joined)  # type: ignore[assignment]
    admit = staticmethod(admit)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[LoopControls, _Generation],
            optimized=False,  # folding constants would run operations before there is a meter
            finalize=pass_context(lambda context, value: text(value)),
            autoescape=False,
        )
        self.literals: list[TrackedText] = []
        self.filters = {**FILTERS, "ticking": pass_context(lambda context, items: ticking(items))}
        self.globals = dict(FUNCTIONS)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Rewriter().visit(super()._parse(source, name, filename))
        return tree

    @staticmethod
    def concatenate(values: Iterable[object]) -> TrackedText:
        """The operator ``~``."""
        return joined([text(value) for value in values])

    def getattr(self, obj: object, attribute: str) -> object:
        if isinstance(obj, Undefined):
            return super().getattr(obj, attribute)  # raises, saying what is undefined
        if isinstance(obj, Namespace):
            is_there = not attribute.startswith("_") and hasattr(obj, attribute)
            return getattr(obj, attribute) if is_there else self.undefined(obj=obj, name=attribute)
        obj = admit(obj) if isinstance(obj, str) else obj
        for kind, names in _ATTRIBUTES:
            if isinstance(obj, kind):
                if attribute in names:
                    return getattr(obj, attribute)
                if hasattr(kind if isinstance(kind, type) else kind[0], attribute):
                    return self.unsafe_undefined(obj, attribute)
        if isinstance(obj, dict) and attribute in obj:
            return obj[attribute]
        return self.undefined(obj=obj, name=attribute)

    def getitem(self, obj: object, argument: object) -> object:
        if isinstance(obj, (str, list, tuple, dict)):
            try:
                return admit(obj[argument]) if isinstance(obj, str) else obj[argument]  # type: ignore[call-overload, index]
            except (TypeError, LookupError):
                pass
        if isinstance(argument, str) and (not isinstance(obj, dict) or argument in ("get", "items", "keys", "values")):
            return self.getattr(obj, str.__str__(argument))
        return self.undefined(obj=obj, name=argument)  # type: ignore[arg-type]

    def call(self, context: Context, obj: object, /, *args: object, **kwargs: object) -> object:  # type: ignore[override]
        tick()
        if isinstance(obj, LoopContext):
            args = (ticking(args[0]), *args[1:])  # type: ignore[arg-type]  # a recursive loop over its argument
        return admit(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        tick()
        if operator == "*":
            self._check_product(left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            if right > MAX_BITS or left.bit_length() * right > MAX_BITS:
                raise over_budget(f"makes a number of more than {MAX_BITS} bits")
        elif isinstance(left, str) and not isinstance(right, Undefined):
            left = admit(left)
        return admit(_OPERATORS[operator](left, right))

    def _check_product(self, one: object, other: object) -> None:
        for sequence, count in ((one, other), (other, one)):
            if isinstance(sequence, (list, tuple)) and isinstance(count, int):
                check_items(len(sequence) * count)
                weight(sequence)
