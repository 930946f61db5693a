"""`TrackedText`: a string that records, for each character, whether the chat template wrote it or a user did."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from string import Formatter
from typing import SupportsIndex

from jinja2.runtime import LoopContext, Undefined

from roofline.common.errors import RequestError
from roofline.text.templates import budget
from roofline.text.templates.budget import charge, check_items, check_width, over_budget

_PERCENT = re.compile(r"%(?:\((?P<name>[^)]*)\))?(?P<flags>[-+ #0]*)(?P<size>[\d.*]*)(?P<kind>[a-zA-Z%])")


def _case_change(change: Callable[[str], str]) -> Callable[["TrackedText"], "TrackedText"]:
    """A method of `TrackedText` that changes each character by itself."""

    def method(text: "TrackedText") -> "TrackedText":
        charge(3 * len(text))  # no mapping of Unicode makes more than three of one
        changed = change(text)
        return TrackedText(changed, text.mask) if len(changed) == len(text) else text._same_origin(changed)

    return method


def _padding(pad: Callable[..., str]) -> Callable[..., "TrackedText"]:
    """A method of `TrackedText` that fills a text up to a width."""

    def method(text: "TrackedText", width: SupportsIndex, *fillchar: str) -> "TrackedText":
        check_width(width.__index__())
        return text._same_origin(pad(text, width, *fillchar))

    return method


def _splitting(split: Callable[..., list[str]]) -> Callable[..., list["TrackedText"]]:
    """A method of `TrackedText` that cuts a text at a separator, or at white space."""

    def method(text: "TrackedText", sep: str | None = None, maxsplit: SupportsIndex = -1) -> list["TrackedText"]:
        limit = maxsplit.__index__()
        pieces = split(text, sep, budget.MAX_ITEMS if limit < 0 else min(limit, budget.MAX_ITEMS))
        check_items(len(pieces))
        texts = []
        at = 0
        for piece in pieces:
            if sep is None:
                at = text.find(piece, at)  # only white space lies between, so the first find is the piece
            texts.append(text[at : at + len(piece)])
            at += len(piece) + len(sep or "")
        return texts

    return method


class TrackedText(str):
    """A `str` with an origin for each character. Every operation is charged to the budget and keeps the origins.

    mask: one byte a character, 1: the template's own, 0: a user's or of unknown origin.
    """

    __slots__ = ("mask",)
    mask: bytes

    def __new__(cls, value: str, mask: bytes | None = None) -> "TrackedText":
        """Charges `value` to the budget; without a mask every character is a user's."""
        charge(len(value))
        return _make(value, bytes(len(value)) if mask is None else mask)

    def __str__(self) -> "TrackedText":
        return self

    def __hash__(self) -> int:
        return str.__hash__(self)

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __getitem__(self, key: SupportsIndex | slice) -> "TrackedText":
        if isinstance(key, slice):
            return TrackedText(str.__getitem__(self, key), self.mask[key])
        at = key.__index__()
        return TrackedText(str.__getitem__(self, at), bytes((self.mask[at],)))

    def __iter__(self) -> Iterator[str]:
        for at, character in enumerate(str.__iter__(self)):
            yield TrackedText(character, self.mask[at : at + 1])

    def __add__(self, other: str) -> "TrackedText":
        if not isinstance(other, str):
            raise TypeError(f"a string and a {type(other).__name__} cannot be added")
        return joined((self, other))

    def __radd__(self, other: str) -> "TrackedText":
        return text(other) + self

    def __mul__(self, count: SupportsIndex) -> "TrackedText":
        times = max(count.__index__(), 0)
        charge(len(self) * times)
        return TrackedText(str.__mul__(self, times), self.mask * times)

    __rmul__ = __mul__

    def __mod__(self, values: object) -> "TrackedText":
        """printf-style formatting, one conversion at a time."""
        if not isinstance(values, (tuple, Mapping)):
            values = (values,)
        rest = iter(values) if isinstance(values, tuple) else iter(())
        parts: list[str] = []
        at = 0
        for match in _PERCENT.finditer(self):
            parts.append(self[at : match.start()])
            at = match.end()
            if match["kind"] == "%":
                parts.append(self[at - 1 : at])
                continue
            check_width(match["size"])
            if match["name"] is None:
                value = next(rest)
            elif isinstance(values, Mapping):
                value = values[match["name"]]
            else:
                raise TypeError("format requires a mapping")
            if match["kind"] in "ra":
                charge(10 * weight(value, printed=True))
                parts.append(text(str.__mod__(f"%{match['flags']}{match['size']}{match['kind']}", (value,))))
            elif match["kind"] == "s" and not match["size"]:
                parts.append(text(value))
            else:
                parts.append(text(str.__mod__(f"%{match['flags']}{match['size']}{match['kind']}", (plain(value),))))
        if next(rest, None) is not None:
            raise TypeError("not all arguments converted during string formatting")
        parts.append(self[at:])
        return joined(parts)

    def __rmod__(self, other: str) -> "TrackedText":
        return text(other) % self

    def format(self, *args: object, **kwargs: object) -> "TrackedText":
        """`str.format` of fields by name or number; attributes and items of a value cannot be reached."""
        return joined(_format(self, args, kwargs))

    def format_map(self, mapping: Mapping[str, object]) -> "TrackedText":  # type: ignore[override]
        return joined(_format(self, (), mapping))

    def join(self, items: Iterable[object]) -> "TrackedText":
        parts = [text(item) for item in budget.bounded(items)]
        if not self:
            return joined(parts)
        between: list[str] = [self] * (2 * len(parts) - 1) if parts else []
        between[::2] = parts
        return joined(between)

    def strip(self, chars: str | None = None) -> "TrackedText":
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None) -> "TrackedText":
        return self[len(self) - len(str.lstrip(self, chars)) :]

    def rstrip(self, chars: str | None = None) -> "TrackedText":
        return self[: len(str.rstrip(self, chars))]

    def removeprefix(self, prefix: str) -> "TrackedText":
        return self[len(prefix) :] if str.startswith(self, prefix) else self

    def removesuffix(self, suffix: str) -> "TrackedText":
        return self[: len(self) - len(suffix)] if suffix and str.endswith(self, suffix) else self

    def splitlines(self, keepends: bool = False) -> list["TrackedText"]:  # type: ignore[override]
        check_items(sum(map(self.count, "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029")))
        lines = []
        at = 0
        for full in str.splitlines(self, True):
            length = len(full) if keepends else len(str.splitlines(full)[0])
            lines.append(self[at : at + length])
            at += len(full)
        return lines

    def partition(self, sep: str) -> tuple["TrackedText", "TrackedText", "TrackedText"]:
        at = self.find(sep)
        if at < 0:
            return self, self[:0], self[:0]
        return self[:at], self[at : at + len(sep)], self[at + len(sep) :]

    def rpartition(self, sep: str) -> tuple["TrackedText", "TrackedText", "TrackedText"]:
        at = self.rfind(sep)
        if at < 0:
            return self[:0], self[:0], self
        return self[:at], self[at : at + len(sep)], self[at + len(sep) :]

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> "TrackedText":
        if not old:
            check_items(len(self))
            return joined(_between([self[:0], *self, self[:0]], new, count.__index__()))  # type: ignore[list-item]
        return text(new).join(self.split(old, count))

    def expandtabs(self, tabsize: SupportsIndex = 8) -> "TrackedText":
        check_width(tabsize.__index__())
        charge(len(self) + self.count("\t") * tabsize.__index__())
        return self._same_origin(str.expandtabs(self, tabsize))

    upper = _case_change(str.upper)
    lower = _case_change(str.lower)
    capitalize = _case_change(str.capitalize)
    title = _case_change(str.title)
    swapcase = _case_change(str.swapcase)
    casefold = _case_change(str.casefold)
    center, ljust, rjust, zfill = map(_padding, (str.center, str.ljust, str.rjust, str.zfill))
    split, rsplit = _splitting(str.split), _splitting(str.rsplit)  # type: ignore[assignment]

    def _same_origin(self, changed: str) -> "TrackedText":
        """A text made from this one: it counts as the template's only if all of this one does."""
        return TrackedText(changed, b"\1" * len(changed) if 0 not in self.mask else None)


# Methods of `str` a template may use: those above, and those that make no text.
METHODS = frozenset(
    (
        *("capitalize", "casefold", "center", "count", "endswith", "expandtabs", "find", "format", "format_map"),
        *("index", "isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric"),
        *("isprintable", "isspace", "istitle", "isupper", "join", "ljust", "lower", "lstrip", "partition"),
        *("removeprefix", "removesuffix", "replace", "rfind", "rindex", "rjust", "rpartition", "rsplit", "rstrip"),
        *("split", "splitlines", "startswith", "strip", "swapcase", "title", "upper", "zfill"),
    )
)


def literal(value: str) -> TrackedText:
    """A text of the template itself. Free of charge: its length is bounded by the template's."""
    return _make(value, b"\1" * len(value))


def joined(parts: Iterable[str]) -> TrackedText:
    """The concatenation of texts; a plain `str` among them counts as a user's."""
    parts = list(parts)
    charge(sum(map(len, parts)))
    mask = b"".join([part.mask if isinstance(part, TrackedText) else bytes(len(part)) for part in parts])
    return TrackedText("".join(parts), mask)


def text(value: object) -> TrackedText:
    """What a template prints for a value, as Jinja would. Raises RequestError for an object that is not data."""
    if isinstance(value, TrackedText):
        return value if type(value) is TrackedText else _make(str.__str__(value), value.mask)
    if isinstance(value, str):
        return TrackedText(str.__str__(value))
    if value is None or isinstance(value, (bool, int, float)):
        return TrackedText(str(value))
    charge(10 * weight(value, printed=True))  # an escaped character is up to ten long
    return TrackedText(str(value))


def plain(value: object) -> object:
    """A value for a C-level operation: texts as they are, anything but scalars printed."""
    return value if value is None or isinstance(value, (str, int, float)) else text(value)


def weight(value: object, *, printed: bool = False) -> int:
    """Characters and items in a value, shared parts counted each time they are met, as printing would meet them.

    Lists that hold one list twice, thirty levels deep, are small in memory and endless to print, compare or hash; a
    tuple in a tuple, 100,000 levels deep, ends the stack. `printed` refuses objects that are no data.
    """
    limit = budget.longest()
    total, depth = 0, 0
    level: list[object] = [value]
    while level:
        budget.tick()
        depth += 1
        total += len(level)
        inner: list[object] = []
        for item in level:
            if isinstance(item, str):
                total += len(item)
            elif isinstance(item, dict):
                inner += item.keys()
                inner += item.values()
            elif isinstance(item, (list, tuple)):
                inner += item
            elif printed and not (item is None or isinstance(item, (bool, int, float, Undefined))):
                raise RequestError(400, "chat_template_error", f"the chat template prints a {type(item).__name__}")
            if total + len(inner) > limit:
                raise over_budget(f"makes a value of more than {limit:,} characters and items")
        if depth > budget.MAX_DEPTH:
            raise over_budget(f"makes a value nested more than {budget.MAX_DEPTH} deep")
        level = inner
    return total


def admit(value: object) -> object:
    """Checks the result of an operation before the template gets it: strings get origins, containers are weighed.

    An iterator is run at once (a chain of thousands would end the stack) and stays one to the template: always true,
    without length, read once.
    """
    if value is None or isinstance(value, (TrackedText, bool, float)):
        return value
    if isinstance(value, str):
        return TrackedText(str.__str__(value))
    if isinstance(value, int):
        if value.bit_length() > budget.MAX_BITS:
            raise over_budget(f"makes a number of more than {budget.MAX_BITS} bits")
        return value
    if isinstance(value, (list, tuple, dict)):
        check_items(len(value))
        charge(4 * len(value))
        weight(value)
        return value
    if isinstance(value, Iterator) and not isinstance(value, LoopContext):
        items = [admit(item) for item in budget.bounded(value)]
        admit(items)
        return iter(items)
    return value


def _make(value: str, mask: bytes) -> TrackedText:
    result = str.__new__(TrackedText, value)
    result.mask = mask
    return result


def _between(items: list[TrackedText], new: str, count: int) -> Iterator[str]:
    """`str.replace("", new)`: `new` before each character and at the end, at most `count` times."""
    gaps = len(items) - 1
    put = gaps if count < 0 else min(count, gaps)
    for at, item in enumerate(items):
        if 0 < at <= put:
            yield new
        yield item


def _format(pattern: TrackedText, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Iterator[str]:
    numbers = iter(range(len(args)))
    trusted = 0 not in pattern.mask
    for before, name, spec, conversion in Formatter().parse(str.__str__(pattern)):
        yield literal(before) if trusted else TrackedText(before)
        if name is None:
            continue
        if "." in name or "[" in name:
            raise RequestError(
                400, "chat_template_error", f"the chat template formats {{{name}}}: only names are allowed"
            )
        check_width(spec or "")
        value = args[next(numbers)] if name == "" else args[int(name)] if name.isdecimal() else kwargs[name]
        if conversion == "r":
            value = repr(plain(value))
        yield format(plain(value), spec) if spec else text(value)
