"""Values of untrusted files: each has the type that its reader needs, or an error names file, key and both types."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar, cast, overload

from roofline.common.errors import ConfigError, UnsupportedError
from roofline.common.mistaken_files import unreadable

T = TypeVar("T")
D = TypeVar("D")
_MOST_BITS = 64  # of a whole number; sizes are multiplied and become floats long before they are checked one by one
_HALF_A_PAIR = re.compile("[\ud800-\udfff]")
_NOUNS: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}


def refuse(path: Path | str, field: str, reason: str) -> NoReturn:
    """Raise the ConfigError that names file and field, or what stands in place of the file by mistake."""
    raise unreadable(path, f"{path}: {field}: {reason}")


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Around work on what a file says: an error that does not name the file yet, does then."""
    try:
        yield
    except UnsupportedError as error:
        if str(path) in str(error):
            raise
        raise UnsupportedError(f"{path}: {error.what}", error.reason, error.alternatives) from error
    except ConfigError as error:
        if str(path) in str(error) or type(error) is not ConfigError:  # other kinds have fields of their own
            raise
        raise ConfigError(f"{path}: {error}") from error


def shorten(text: str) -> str:
    """A name from an untrusted file, fit for an error message: printable and at most 80 characters."""
    start = "".join(c if c.isprintable() else "?" for c in text[:80])
    return start + "..." if len(text) > 80 else start


def describe(value: object) -> str:
    """What a value is, in the words of JSON."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case str():
            return f"the string '{shorten(value)}'"
        case int() | float():
            is_short = isinstance(value, float) or value.bit_length() < 200
            return f"the number {value if is_short else 'of hundreds of digits'}"
        case Mapping():
            return "an object"
        case Sequence():
            return "a list"
    return f"a {type(value).__name__}"


def has_type(value: object, kind: type) -> bool:
    """Whether a value is of a kind of JSON: true and false are no numbers, and whole numbers are numbers too."""
    if kind is dict:
        return isinstance(value, Mapping)
    if kind is list:
        return isinstance(value, Sequence) and not isinstance(value, str | bytes)
    if kind is float:
        # Beyond a float's range, a number is not finite either.
        return isinstance(value, int | float) and not isinstance(value, bool) and -1e308 < value < 1e308
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


class _ChangedValues(Mapping[str, object]):
    """A table in which some keys have other values. The table is asked for a key only when somebody asks for it."""

    def __init__(self, table: Mapping[str, object], changes: Mapping[str, object]) -> None:
        self._table, self._changes = table, changes

    def __getitem__(self, key: str) -> object:
        return self._changes[key] if key in self._changes else self._table[key]

    def __contains__(self, key: object) -> bool:
        return key in self._changes or key in self._table

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self._table, *self._changes)))

    def __len__(self) -> int:
        return len({*self._table, *self._changes})


@dataclass(frozen=True)
class Fields:
    """A mapping of an untrusted file, read key by key. null counts as absent.

    path: the file; within: what errors put before a key, such as "model.". All that raise raise ConfigError.
    """

    path: Path | str
    values: Mapping[str, object]
    within: str = ""

    @overload
    def get(self, key: str, kind: type[T]) -> T | None: ...

    @overload
    def get(self, key: str, kind: type[T], default: D) -> T | D: ...

    def get(self, key: str, kind: type[T], default: object = None) -> object:
        """The value of a key, `default` where it is absent. kind: bool, int, float, str, list or dict."""
        value = self.values.get(key)
        return default if value is None else self.checked(key, value, kind)

    def need(self, key: str, kind: type[T]) -> T:
        """The value of a key that must be there."""
        if self.values.get(key) is None:
            self.refuse(key, "is missing" if key not in self.values else f"is null, not {_NOUNS[kind]}")
        return self.checked(key, self.values[key], kind)

    def inside(self, key: str) -> "Fields":
        """The fields of the object at a key, none where it is absent."""
        return Fields(self.path, self.get(key, dict, {}), f"{self.within}{key}.")

    def changed(self, changes: Mapping[str, object]) -> "Fields":
        """The same fields with other values of some keys; None takes a key away."""
        return Fields(self.path, _ChangedValues(self.values, changes), self.within)

    def elements(self, key: str, kind: type[T]) -> list[T] | None:
        """The list at a key, whose elements are all of one kind."""
        values = self.get(key, list)
        if values is not None and set(map(type, values)) != {kind}:  # a vocabulary has 100,000, nearly always right
            return [self.checked(f"{key}[{i}]", value, kind) for i, value in enumerate(values)]
        return values

    def objects(self, key: str) -> "list[Fields]":
        """The list of objects at a key, none where it is absent."""
        values = self.elements(key, dict) or []
        return [Fields(self.path, value, f"{self.within}{key}[{i}].") for i, value in enumerate(values)]

    def checked(self, key: str, value: object, kind: type[T]) -> T:
        """The value itself, as a float where a number is asked for."""
        if not has_type(value, kind):
            finite = "a finite number" if kind is float and isinstance(value, float) else _NOUNS[kind]
            self.refuse(key, f"is {describe(value)}, not {finite}")
        if isinstance(value, int) and value.bit_length() > _MOST_BITS:
            self.refuse(key, f"is {describe(value)}, more than {_MOST_BITS} bits hold")
        if isinstance(value, str) and _HALF_A_PAIR.search(value):
            self.refuse(key, "holds half a surrogate pair, which is no character")
        return cast(T, float(cast(float, value)) if kind is float else value)

    def positive(self, key: str) -> float | None:
        """The number above 0 at a key."""
        value = self.get(key, float)
        if value is not None and not 0 < value < math.inf:
            self.refuse(key, f"is {describe(value)}, not a number above 0")
        return value

    def refuse(self, key: str, reason: str) -> NoReturn:
        """Raise the ConfigError that names file and key."""
        refuse(self.path, self.within + shorten(key), reason)
