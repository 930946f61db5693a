"""The filters and functions that a chat template may use: those of Jinja that published templates need, each bounded.

Filters are not run while a template is compiled (they take the context), so each use has a rendering's budget.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import wraps
from typing import Any

from jinja2 import filters as jinja_filters
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.runtime import Context
from jinja2.sandbox import safe_range
from jinja2.utils import Cycler, Joiner, Namespace, _PassArg, pass_context

from roofline.text.templates.budget import bounded, check_items, check_width, tick, ticking
from roofline.text.templates.safe_string import SafeText, escape, text_as_it_is
from roofline.text.templates.tracked_string import TrackedText, admit, joined, literal, text, weight

_AS_IN_JINJA = (
    *("abs", "attr", "count", "d", "default", "dictsort", "first", "float", "groupby", "int", "items", "last"),
    *("length", "map", "max", "min", "reject", "rejectattr", "reverse", "select", "selectattr", "sort", "sum"),
    *("truncate", "unique"),
)


def tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: Sequence[str] | None = None,
    sort_keys: bool = False,
) -> TrackedText:
    """JSON without HTML escapes, as transformers defines the filter for chat templates."""
    weight(value)
    for part in (indent, *(separators or ())):
        check_width(part if isinstance(part, int) else len(part or ""))
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators and tuple(separators),  # type: ignore[arg-type]
        sort_keys=sort_keys,
    )
    if indent is None:
        return TrackedText(encoder.encode(value))
    return joined(
        map(TrackedText, ticking(encoder.iterencode(value)))
    )  # indentation multiplies with depth: watch it grow


def join(value: Iterable[object], d: str = "", attribute: object = None) -> TrackedText:
    items = bounded(value)
    if attribute is not None:
        raise SecurityError("join by attribute: use map(attribute=...) before join")
    return text(d).join(items)


def indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> TrackedText:
    check_width(width if isinstance(width, int) else len(width))
    margin = literal(" " * width) if isinstance(width, int) else text(width)
    newline = literal("\n")
    lines = (text(s) + newline).splitlines()
    parts = [line if at == 0 or not (line or blank) else margin + line for at, line in enumerate(lines)]
    return (margin if first else literal("")) + newline.join(parts)


def round_number(value: float, precision: int = 0, method: str = "common") -> float:
    check_width(abs(precision) * 10)
    return jinja_filters.do_round(value, precision, method)  # type: ignore[arg-type]


def batch(value: Iterable[object], linecount: int, fill_with: object = None) -> Iterator[list[object]]:
    check_items(linecount)
    return jinja_filters.do_batch(value, linecount, fill_with)  # type: ignore[arg-type]


def slices(value: Iterable[object], slices: int, fill_with: object = None) -> Iterator[list[object]]:
    check_items(slices)
    return jinja_filters.sync_do_slice(value, slices, fill_with)  # type: ignore[arg-type]


# Filters among these that would split a string into its characters
_BY_ITEM = frozenset(
    {"batch", "do_groupby", "do_map", "do_max", "do_min", "do_reject", "do_rejectattr", "do_select", "do_selectattr"}
    | {"do_sort", "do_sum", "do_unique", "slices"}
    | {f"sync_do_{name}" for name in ("groupby", "map", "reject", "rejectattr", "select", "selectattr", "sum")}
)

_OWN: dict[str, Callable[..., object]] = {
    "tojson": tojson,
    "join": join,
    "indent": indent,
    "escape": escape,
    "e": escape,
    "round": round_number,
    "batch": batch,
    "slice": slices,
    "list": bounded,
    "string": text_as_it_is,
    "safe": lambda value: SafeText(text(value)),
    "trim": lambda value, chars=None: text_as_it_is(value).strip(chars),
    "replace": lambda value, old, new, count=-1: text(value).replace(
        text(old), text(new), -1 if count is None else count
    ),
    "upper": lambda value: text_as_it_is(value).upper(),
    "lower": lambda value: text_as_it_is(value).lower(),
    "capitalize": lambda value: text_as_it_is(value).capitalize(),
    "title": lambda value: text_as_it_is(value).title(),
    "center": lambda value, width=80: text(value).center(width),
    "format": lambda value, *args, **kwargs: text(value) % (kwargs or args),
}


def _guard(function: Callable[..., object]) -> Callable[..., object]:
    """The filter, which checks the deadline, bounds an iterator that it reads, and weighs its result."""
    passed = _PassArg.from_obj(function)  # what Jinja passes to the filter before the value

    @wraps(function)
    def run(context: Context, value: object, *args: object, **kwargs: object) -> object:
        tick()
        first: tuple[object, ...] = ()
        if passed is not None:
            by_kind: dict[_PassArg, object] = {_PassArg.context: context, _PassArg.environment: context.environment}
            first = (by_kind.get(passed, context.eval_ctx),)
        if isinstance(value, str) and function.__name__ in _BY_ITEM:
            check_items(len(value))
        if isinstance(value, Iterator):
            value = ticking(value)
        return admit(function(*first, value, *args, **kwargs))

    for mark in ("jinja_pass_arg", "jinja_async_variant"):
        run.__dict__.pop(mark, None)
    return pass_context(run)


FILTERS = {
    **{name: _guard(jinja_filters.FILTERS[name]) for name in _AS_IN_JINJA},
    **{name: _guard(function) for name, function in _OWN.items()},
}


class TemplateNamespace(Namespace):
    """`namespace()` of chat templates: no names with a leading underscore, and nothing inside is printed."""

    def __init__(*args: Any, **kwargs: object) -> None:  # namespace(self=...) works
        self, rest = args[0], args[1:]
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            TemplateNamespace._check(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: object) -> None:
        TemplateNamespace._check(name)
        Namespace.__setitem__(self, name, value)

    def __repr__(self) -> str:
        return "<Namespace>"

    @staticmethod
    def _check(name: str) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace has no attribute {name!r}: names must not begin with an underscore")


def raise_exception(message: object) -> None:
    """Lets a template refuse its input."""
    raise TemplateError(str(text(message)[:1000]))


def strftime_now(pattern: str) -> str:
    """The time now, in the form of `pattern`."""
    check_width(len(pattern))
    return datetime.now().strftime(str.__str__(pattern))


def make_dict(*args: Any, **kwargs: object) -> dict[object, object]:
    """`dict()`."""
    pairs = [arg if isinstance(arg, Mapping) else bounded(arg) for arg in args]
    return dict(*pairs, **kwargs)


FUNCTIONS: dict[str, Callable[..., object]] = {
    "range": safe_range,
    "dict": make_dict,
    "namespace": TemplateNamespace,
    "cycler": Cycler,
    "joiner": Joiner,
    "raise_exception": raise_exception,
    "strftime_now": strftime_now,
}
