"""Patterns that look ahead, written as patterns that do not: llguidance knows no looking around.

What a pattern takes is a language: looking ahead keeps those of its words that another language has, or has not. The
words that are left are found by derivatives (Brzozowski 1964), state by state, and written as a regular expression
again by eliminating the states. `\\d` and `\\w` are those of ASCII, as in JSON Schema's dialect of patterns.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from itertools import pairwise
from re import _parser as syntax  # type: ignore[attr-defined]

MOST_PATTERNS = 8
MOST_STATES = 3000
MOST_GROUPS = 64  # of states that are told apart
MOST_REPEATS = 64
MOST_SIZE = 4000  # of a language: how many others it is made of
MOST_WORK = 50_000  # derivatives, some tenths of a second of a core
MOST_TEXT = 8192  # characters of what is written
TOO_COMPLEX = "the pattern that looks ahead is too complex"
LOOKING = re.compile(r"\(\?[=!]")
_LAST = 0x10FFFF
_SPACES = "\t\n\v\f\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
_CATEGORIES = {
    "DIGIT": frozenset(map(ord, "0123456789")),
    "WORD": frozenset(ord(c) for c in map(chr, range(128)) if c.isalnum() or c == "_"),
    "SPACE": frozenset(map(ord, _SPACES + "\u2028\u2029\u202f\u205f\u3000")),
}

KINDS = ("empty word", "character", "sequence", "any", "all", "not", "repeat")

Range = tuple[int, int]


@dataclass(frozen=True)
class Language:
    """A language. kind: one of KINDS. A "character" is one of `ranges`, a "sequence" has one part behind the other, and
    "any", "all" and "not" are of the languages that are its parts."""

    kind: str
    parts: tuple["Language", ...] = ()
    ranges: tuple[Range, ...] = ()
    size: int = field(init=False, compare=False, repr=False)
    key: int = field(init=False, compare=False, repr=False)  # that it is looked up and sorted by

    def __post_init__(self) -> None:
        key = hash((KINDS.index(self.kind), self.ranges, *(part.key for part in self.parts)))
        object.__setattr__(self, "key", key)
        object.__setattr__(self, "size", 1 + sum(part.size for part in self.parts))
        if self.size > MOST_SIZE:
            raise ValueError(TOO_COMPLEX)

    def __hash__(self) -> int:
        return self.key

    @property
    def nullable(self) -> bool:
        """Whether the empty word is one of its words."""
        match self.kind:
            case "sequence" | "all":
                return all(part.nullable for part in self.parts)
            case "any":
                return any(part.nullable for part in self.parts)
            case "not":
                return not self.parts[0].nullable
        return self.kind in ("empty word", "repeat")


NONE, EMPTY = Language("any"), Language("empty word")
ANY_CHARACTER = Language("character", ranges=((0, 0xD7FF), (0xE000, _LAST)))
EVERYTHING = Language("repeat", (ANY_CHARACTER,))


class Patterns:
    """Patterns without lookaheads of one form, each written once; few, since each takes its time."""

    def __init__(self) -> None:
        self._written: dict[str, str] = {}

    def of(self, pattern: str) -> str:
        """A pattern that finds something in the same texts. Raises ValueError where none is written."""
        if not LOOKING.search(pattern):
            return pattern
        if pattern not in self._written:
            if len(self._written) >= MOST_PATTERNS:
                raise ValueError(f"more than {MOST_PATTERNS} patterns look ahead")
            self._written[pattern] = without_lookaheads(pattern)
        return self._written[pattern]


def without_lookaheads(pattern: str) -> str:
    """A pattern that finds something in the same texts. Raises ValueError where none is written."""
    try:
        tree = syntax.parse(pattern, re.ASCII)
        if tree.state.flags != re.ASCII:
            raise ValueError("a pattern with flags cannot look ahead")
        items = list(tree)
        anchored = bool(items) and str(items[0][0]) == "AT"
        words = _followed(items, EVERYTHING, start=anchored, negated=False)
        return f"^(?:{_written(words if anchored else _concatenated(EVERYTHING, words))})$"
    except (re.error, OverflowError) as error:
        raise ValueError(f"the pattern cannot be read: {error}") from None
    except RecursionError:
        raise ValueError(TOO_COMPLEX) from None


def _followed(items: list, rest: Language, *, start: bool, negated: bool) -> Language:
    """The words of a sequence of parsed items with others behind them.

    start: nothing stands before; negated: it says what is not taken, so an end is also before a last line break, as it
    is in some dialects.
    """
    starts = [start]
    for kind, _ in items:
        starts.append(starts[-1] and str(kind) in ("AT", "ASSERT", "ASSERT_NOT"))
    for item, at_start in zip(reversed(items), reversed(starts[:-1]), strict=True):
        rest = _before(item, rest, start=at_start, negated=negated)
    return rest


def _before(item: tuple, rest: Language, *, start: bool, negated: bool) -> Language:
    kind, value = str(item[0]), item[1]
    if kind in ("ASSERT", "ASSERT_NOT"):
        if value[0] != 1:
            raise ValueError("a pattern that looks back is not supported")
        within = negated != (kind == "ASSERT_NOT")
        asserted = _followed(list(value[1]), EVERYTHING, start=start, negated=within)
        return _all((rest, asserted if kind == "ASSERT" else _not(asserted)))
    if kind == "AT":
        return _at(str(value), rest, start=start, negated=negated)
    if kind == "BRANCH":
        return _any(_followed(list(branch), rest, start=start, negated=negated) for branch in value[1])
    if kind == "SUBPATTERN":
        if value[1] or value[2]:
            raise ValueError("a pattern with flags cannot look ahead")
        return _followed(list(value[3]), rest, start=start, negated=negated)
    if kind in ("MAX_REPEAT", "MIN_REPEAT"):
        return _concatenated(_repeated(value), rest)
    return _concatenated(Language("character", ranges=_ranges(kind, value)), rest)


def _at(place: str, rest: Language, *, start: bool, negated: bool) -> Language:
    if place == "AT_BEGINNING" and start:
        return rest
    if place == "AT_END":
        line_break = _concatenated(Language("character", ranges=((10, 10),)), EMPTY)
        return _all((rest, _any((EMPTY, line_break)) if negated else EMPTY))
    raise ValueError("a pattern that looks ahead may have ^ at its begin, and $, and no other places")


def _repeated(value: tuple) -> Language:
    least, most = int(value[0]), value[1]
    items = list(value[2])
    inner = _followed(items, EMPTY, start=False, negated=False)
    if any(str(name) in ("ASSERT", "ASSERT_NOT", "AT") for name, _ in _within(items)):
        raise ValueError("a pattern cannot look ahead within what is repeated")
    if least > MOST_REPEATS or (most != syntax.MAXREPEAT and most > MOST_REPEATS):
        raise ValueError(f"a pattern that looks ahead repeats at most {MOST_REPEATS} times")
    words = Language("repeat", (inner,)) if most == syntax.MAXREPEAT else EMPTY
    for _ in range(0 if most == syntax.MAXREPEAT else most - least):
        words = _any((EMPTY, _concatenated(inner, words)))
    return reduce(lambda behind, _: _concatenated(inner, behind), range(least), words)


def _within(items: Iterable) -> Iterator[tuple]:
    """All parsed items, at any depth."""
    for item in items:
        if isinstance(item, tuple) and len(item) == 2 and type(item[0]).__name__ == "_NamedIntConstant":
            yield item
            yield from _within((item[1],))
        elif isinstance(item, tuple | list | syntax.SubPattern):
            yield from _within(item)


def _ranges(kind: str, value: object) -> tuple[Range, ...]:
    """The characters of a parsed item."""
    if kind == "LITERAL":
        return ((value, value),) if isinstance(value, int) else ()
    if kind == "NOT_LITERAL":
        return _outside(_ranges("LITERAL", value))
    if kind == "ANY":
        return _outside(((10, 10),))
    if kind == "RANGE" and isinstance(value, tuple):
        return (value,)
    if kind == "CATEGORY":
        name = str(value).removeprefix("CATEGORY_").removeprefix("UNI_")
        inside = tuple(_joined((code, code) for code in _CATEGORIES.get(name.removeprefix("NOT_"), ())))
        if not inside:
            raise ValueError("a pattern that looks ahead has a class of characters that is not supported")
        return _outside(inside) if name.startswith("NOT_") else inside
    if kind == "IN" and isinstance(value, list):
        negated = str(value[0][0]) == "NEGATE"
        inside = tuple(pair for name, each in value[negated:] for pair in _ranges(str(name), each))
        return _outside(inside) if negated else inside
    raise ValueError("a pattern that looks ahead has something in it that is not supported")


def _outside(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """All characters outside these ranges."""
    result: list[Range] = []
    at = 0
    for first, last in sorted(ranges):
        if first > at:
            result.append((at, first - 1))
        at = max(at, last + 1)
    return tuple([*result, (at, _LAST)] if at <= _LAST else result)


def _joined(ranges: Iterable[Range]) -> list[Range]:
    """Ranges in order, of which none begins where another ends."""
    result: list[Range] = []
    for first, last in sorted(ranges):
        if result and result[-1][1] + 1 == first:
            result[-1] = result[-1][0], last
        else:
            result.append((first, last))
    return result


def _concatenated(first: Language, second: Language) -> Language:
    if NONE in (first, second):
        return NONE
    if first == EMPTY:
        return second
    if second == EMPTY:
        return first
    if first.kind == "sequence":  # to the right, so that equal languages look the same
        return _concatenated(first.parts[0], _concatenated(first.parts[1], second))
    return Language("sequence", (first, second))


def _any(parts: Iterable[Language]) -> Language:
    flat = {inner for part in parts for inner in (part.parts if part.kind == "any" else (part,))}
    if EVERYTHING in flat:
        return EVERYTHING
    if EMPTY in flat and any(part.nullable for part in flat - {EMPTY}):
        flat.remove(EMPTY)
    flat -= {part for part in flat if part.kind == "all" and not flat.isdisjoint(part.parts)}  # of another one's words
    return flat.pop() if len(flat) == 1 else Language("any", tuple(sorted(flat, key=lambda part: part.key)))


def _all(parts: Iterable[Language]) -> Language:
    flat = {inner for part in parts for inner in (part.parts if part.kind == "all" else (part,))} - {EVERYTHING}
    if NONE in flat:
        return NONE
    if not flat:
        return EVERYTHING
    return flat.pop() if len(flat) == 1 else Language("all", tuple(sorted(flat, key=lambda part: part.key)))


def _not(words: Language) -> Language:
    if words in (NONE, EVERYTHING):
        return NONE if words == EVERYTHING else EVERYTHING
    return words.parts[0] if words.kind == "not" else Language("not", (words,))


class _Derivatives:
    """What may come behind characters; `work` counts what was not known yet."""

    def __init__(self) -> None:
        self._memo: dict[tuple[Language, int], Language] = {}
        self.work = 0

    def of(self, words: Language, code: int) -> Language:
        """What may come behind a character."""
        result = self._memo.get((words, code))
        if result is None:
            self.work += 1
            result = self._memo[words, code] = self._computed(words, code)
        return result

    def _computed(self, words: Language, code: int) -> Language:
        parts = words.parts
        match words.kind:
            case "character":
                return EMPTY if any(first <= code <= last for first, last in words.ranges) else NONE
            case "sequence":
                behind = _concatenated(self.of(parts[0], code), parts[1])
                return _any((behind, self.of(parts[1], code))) if parts[0].nullable else behind
            case "any":
                return _any(self.of(part, code) for part in parts)
            case "all":
                return _all(self.of(part, code) for part in parts)
            case "not":
                return _not(self.of(parts[0], code))
            case "repeat":
                return _concatenated(self.of(parts[0], code), words)
        return NONE


def _alphabet(words: Language) -> list[Range]:
    """Ranges of characters that no part of a language tells apart; halves of surrogate pairs are none."""
    starts, pending = {0, 0xD800, 0xE000}, [words]
    while pending:
        each = pending.pop()
        starts |= {code for first, last in each.ranges for code in (first, last + 1)}
        pending += each.parts
    bounds = [*sorted(code for code in starts if code <= _LAST), _LAST + 1]
    return [(a, b - 1) for a, b in pairwise(bounds) if not 0xD800 <= a < 0xE000]


def _written(words: Language) -> str:
    """A regular expression of exactly these words. Raises ValueError where it would be too large, or there is none."""
    alphabet = _alphabet(words)
    states, targets = _automaton(words, [first for first, _ in alphabet])
    groups = _merged([state.nullable for state in states], targets)
    if len(set(groups)) > MOST_GROUPS:
        raise ValueError(TOO_COMPLEX)
    edges: dict[tuple[int, int], set[Range]] = {}
    for number, row in enumerate(targets):
        for characters, target in zip(alphabet, row, strict=True):
            if states[target] != NONE:
                edges.setdefault((groups[number], groups[target]), set()).add(characters)
    start, end = -1, -2
    texts = {pair: _class(ranges) for pair, ranges in edges.items()} | {(start, groups[0]): ""}
    texts |= {(groups[number], end): "" for number, state in enumerate(states) if state.nullable}
    while inner := {number for pair in texts for number in pair if number >= 0}:
        _eliminate(texts, min(inner, key=lambda number: (_weight(texts, number), number)))
    if (start, end) not in texts:
        raise ValueError("nothing satisfies the pattern")
    return texts[start, end]


def _automaton(words: Language, codes: list[int]) -> tuple[list[Language], list[list[int]]]:
    """The states that these characters lead to, from the first on, and for each where each character leads."""
    states, numbers, targets, derivatives = [words], {words: 0}, list[list[int]](), _Derivatives()
    for state in states:  # which grows meanwhile
        row = []
        for code in codes:
            target = derivatives.of(state, code)
            if target not in numbers:
                numbers[target] = len(states)
                states.append(target)
            row.append(numbers[target])
            if len(states) > MOST_STATES or derivatives.work > MOST_WORK:
                raise ValueError(TOO_COMPLEX)
        targets.append(row)
    return states, targets


def _merged(accepting: list[bool], targets: list[list[int]]) -> list[int]:
    """A number for each state, the same for states that nothing behind them tells apart (Moore 1956)."""
    groups = [int(each) for each in accepting]
    count = 0
    while len(set(groups)) > count:
        count = len(set(groups))
        keys = [(groups[number], *(groups[target] for target in row)) for number, row in enumerate(targets)]
        names = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        groups = [names[key] for key in keys]
    return groups


def _weight(texts: Mapping[tuple[int, int], str], state: int) -> int:
    """How much text it takes to do without a state."""
    into = [text for (a, b), text in texts.items() if b == state != a]
    out = [text for (a, b), text in texts.items() if a == state != b]
    loop = len(texts.get((state, state), ""))
    return sum(map(len, into)) * len(out) + sum(map(len, out)) * len(into) + loop * len(into) * len(out)


def _eliminate(texts: dict[tuple[int, int], str], state: int) -> None:
    """Take a state out of what is between the first and the last."""
    loop = texts.pop((state, state), None)
    into = [(a, texts.pop((a, b))) for a, b in list(texts) if b == state]
    out = [(b, texts.pop((a, b))) for a, b in list(texts) if a == state]
    middle = "" if loop is None else f"(?:{loop})*"
    for source, before in into:
        for target, behind in out:
            text = before + middle + behind
            other = texts.get((source, target))
            texts[source, target] = text if other is None else f"(?:{other}|{text})"
            if len(texts[source, target]) > MOST_TEXT:
                raise ValueError(TOO_COMPLEX)


def _class(ranges: Iterable[Range]) -> str:
    """Characters as a class of a regular expression, in order and joined."""
    pairs = (_character(a) if a == b else f"{_character(a)}-{_character(b)}" for a, b in _joined(ranges))
    return f"[{''.join(pairs)}]"


def _character(code: int) -> str:
    return chr(code) if code < 128 and chr(code).isalnum() else f"\\x{{{code:x}}}"
