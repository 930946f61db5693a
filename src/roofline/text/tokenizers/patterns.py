"""Which patterns of untrusted files are safe to search with: Oniguruma, which the library uses, backtracks.

A pattern whose repetition repeats something of several lengths, as in (a+)+$, can need time exponential in the text's
length, and several repetitions in a row need a power of it. Both are found from the pattern alone. What follows no such
repetition cannot fail after it, so that one at the very end of an alternative is fine.
"""

import re
from dataclasses import dataclass

MAX_PATTERN = 1 << 14  # characters; the longest of a known model has 700
MAX_DEPTH = 16  # of groups
MAX_COUNT = 1000  # of all counts around one place, multiplied: the library compiles each copy
MAX_UNBOUNDED = 4  # repetitions without an end in one alternative

_ATOM = re.compile(r"\\[pPx]\{\^?\w+\}|\\[pPxusSdDwWbBrntfvehHAzZ0]|\\[^A-Za-z0-9]|[^\\()\[\]*+?{|]", re.DOTALL)
_GROUP = re.compile(r"\(\?(?:[ims]*(?:-[ims]+)?:|=|!|<=|<!|>)|\((?!\?)")
_FLAGS = re.compile(r"\(\?[ims]+(?:-[ims]+)?\)")
_REPEAT = re.compile(r"([*+?]|\{(\d*)(,?)(\d*)\})([?+]?)")


class PatternError(ValueError):
    """Why a pattern is not searched with."""


@dataclass
class _Part:
    """What an alternative may match: least: characters; varies: texts of several lengths; unbounded: repetitions;
    copies: how often the library compiles the place inside that it compiles most often."""

    least: int = 0
    varies: bool = False
    unbounded: int = 0
    copies: int = 1


def least_length(pattern: str) -> int:
    """The least number of characters that a pattern of Oniguruma matches. Raises PatternError for an unsafe one."""
    if len(pattern) > MAX_PATTERN:
        raise PatternError(f"it has {len(pattern)} characters, of {MAX_PATTERN} that are allowed")
    reader = _Reader(pattern)
    part = reader.alternatives(0)
    if reader.at != len(pattern):
        raise PatternError("it closes a group that it does not open")
    return part.least


class _Reader:
    """Reads a pattern from the left; `at` is the next character."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self.at = 0

    def alternatives(self, depth: int) -> _Part:
        """Up to the end of the group. The parts of several alternatives: any of them may be what matches."""
        if depth > MAX_DEPTH:
            raise PatternError(f"its groups are nested deeper than {MAX_DEPTH}")
        parts, starts = [], []
        while True:
            starts.append(self._pattern[self.at : self.at + 1])
            parts.append(self._sequence(depth))
            if self._pattern[self.at : self.at + 1] != "|":
                break
            self.at += 1
        # Alternatives that begin with different letters are never tried at the same place with success.
        letters = all(start.isalnum() for start in starts) and len(set(starts)) == len(starts)
        varies = any(part.varies for part in parts) or (len(parts) > 1 and not letters)
        unbounded, copies = max(part.unbounded for part in parts), max(part.copies for part in parts)
        return _Part(min(part.least for part in parts), varies, unbounded, copies)

    def _sequence(self, depth: int) -> _Part:
        total, unsafe = _Part(), False
        while self.at < len(self._pattern) and self._pattern[self.at] not in "|)":
            if unsafe:
                raise PatternError("it repeats what may match in several ways, with something after it")
            start = self.at
            part = self._atom(depth)
            while repeat := _REPEAT.match(self._pattern, self.at):
                self.at = repeat.end()
                part, ambiguous = _repeated(part, repeat)
                if ambiguous and depth:
                    raise PatternError("it repeats what may match in several ways, inside a group")
                unsafe |= ambiguous
            total.least += part.least
            total.varies |= part.varies
            total.unbounded += part.unbounded
            total.copies = max(total.copies, part.copies)
            if total.unbounded > MAX_UNBOUNDED:
                raise PatternError(f"it has more than {MAX_UNBOUNDED} repetitions without an end in a row")
            if self.at == start:
                raise PatternError(f"what follows {self._pattern[start : start + 20]!r} is not understood here")
        return total

    def _atom(self, depth: int) -> _Part:
        text = self._pattern
        if flags := _FLAGS.match(text, self.at):
            self.at = flags.end()
            return _Part()
        if text[self.at] == "[":
            self._skip_class()
            return _Part(1)
        if text[self.at] == "(":
            group = _GROUP.match(text, self.at)
            if group is None:
                raise PatternError(f"the group {text[self.at : self.at + 6]!r} is not understood here")
            self.at = group.end()
            inside = self.alternatives(depth + 1)
            if text[self.at : self.at + 1] != ")":
                raise PatternError("it opens a group that it does not close")
            self.at += 1
            looks = group[0].endswith(("=", "!"))
            return _Part(0, False, inside.unbounded, inside.copies) if looks else inside
        atom = _ATOM.match(text, self.at)
        if atom is None:
            raise PatternError(f"{text[self.at : self.at + 6]!r} is not understood here")
        self.at = atom.end()
        return _Part(0 if atom[0] in ("^", "$", *(rf"\{c}" for c in "bBAzZ")) else 1)

    def _skip_class(self) -> None:
        """Past a class of characters, which may hold others; the first character may be a bracket itself."""
        text, depth = self._pattern, 0
        while self.at < len(text):
            character = text[self.at]
            self.at += 2 if character == "\\" else 1
            if character == "[":
                depth += 1
                self.at += text[self.at : self.at + 1] == "^"
                self.at += text[self.at : self.at + 1] == "]"
            elif character == "]":
                depth -= 1
                if depth == 0:
                    return
        raise PatternError("it opens a class of characters that it does not close")


def _repeated(part: _Part, repeat: re.Match[str]) -> tuple[_Part, bool]:
    """A part that is repeated, and whether that can match one text in more ways than can be tried."""
    least, most = _bounds(repeat)
    copies = part.copies * max(1, least, most or 0)
    if copies > MAX_COUNT:
        raise PatternError(f"its counts multiply to more than {MAX_COUNT}")
    # After a count, + is no sign that what was matched is kept, but one more repetition (of Ruby's syntax).
    keeps = repeat[5] == "+" and repeat[2] is None
    again = repeat[5] == "+" and not keeps
    endless = most is None or again
    varies = part.varies or least != most
    ambiguous = not keeps and (endless or (most or 0) > 1) and (part.varies or (again and least != most))
    return _Part(part.least * least, varies, part.unbounded + endless, copies), ambiguous


def _bounds(repeat: re.Match[str]) -> tuple[int, int | None]:
    if repeat[2] is None:
        return {"*": (0, None), "+": (1, None), "?": (0, 1)}[repeat[1]]
    if len(repeat[2]) > 6 or len(repeat[4]) > 6:
        raise PatternError(f"its counts multiply to more than {MAX_COUNT}")
    least = int(repeat[2] or 0)
    return least, int(repeat[4]) if repeat[4] else (None if repeat[3] else least)
