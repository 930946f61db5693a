"""Keys of PEFT's rank_pattern and alpha_pattern: which modules they fit, without running a stranger's expression."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

Value = TypeVar("Value", int, float)
# PEFT takes any regular expression; what it writes, and people use, are dotted names, perhaps from the start, and of
# the experts of transformers 5 such names behind anything.
NAME = re.compile(r"(?:\^|\.\*\\\.)?(?:\w+\\?\.)*\w+")
_ANYTHING = ".*\\."
_DOT = re.compile(r"\\?\.")
# Of keys: what they begin with, which says where in a name they do, their length, the places where any character fits.
_Shape = tuple[str, int, tuple[int, ...]]


@dataclass(frozen=True)
class ModulePatterns(Generic[Value]):
    """Values for modules, by keys that PEFT (0.21.2) reads as regular expressions: "." is any character and "\\." a
    dot, a key fits the end of a name that begins behind a dot, or all of it; one with ".*\\." the former alone, and one
    with "^" the latter. The first that fits counts.

    values: by keys that `NAME` fits. Keys of one shape are found together, so that thousands of them take no longer
    than a few.
    """

    values: Mapping[str, Value]

    @cached_property
    def _by_shape(self) -> dict[_Shape, dict[str, list[tuple[int, str]]]]:
        shapes: dict[_Shape, dict[str, list[tuple[int, str]]]] = {}
        for number, key in enumerate(self.values):
            begin = next((begin for begin in ("^", _ANYTHING) if key.startswith(begin)), "")
            text = key.removeprefix(begin)
            dots = list(_DOT.finditer(text))
            escapes = [dot.start() for dot in dots if len(dot[0]) == 2]
            places = (dot.start() - sum(start < dot.start() for start in escapes) for dot in dots if len(dot[0]) == 1)
            plain = text.replace("\\", "")
            alike = shapes.setdefault((begin, len(plain), tuple(places)), {})
            alike.setdefault(plain, []).append((number, key))
        return shapes

    def keys_of(self, module: str) -> list[str]:
        """All keys that fit a module's full name, in their order."""
        numbered: list[tuple[int, str]] = []
        for (begin, length, places), names in self._by_shape.items():
            start = len(module) - length
            if begin == _ANYTHING if start == 0 else begin == "^" or start < 0 or module[start - 1] != ".":
                continue
            end = list(module[start:])
            for place in places:
                end[place] = "."
            numbered += names.get("".join(end), ())
        return [key for _, key in sorted(numbered)]

    def value_of(self, module: str, otherwise: Value) -> Value:
        """The value of the first key that fits."""
        keys = self.keys_of(module)
        return self.values[keys[0]] if keys else otherwise

    def without_module(self, modules: Iterable[str]) -> list[str]:
        """The keys that fit none of some modules."""
        fitting = {key for module in modules for key in self.keys_of(module)} if self.values else set()
        return [key for key in self.values if key not in fitting]
