"""Halves of surrogate pairs in JSON text, escapes such as `\\ud83d` alone: no encoding can carry the character.

Each becomes `\\ufffd`, Unicode's sign for a character that is none, as Go's and WebKit's decoders have it.
"""

import re
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")
REPLACEMENT = "\\ufffd"
_HIGH = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}")
_LOW = re.compile(r"\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_BEGINS_LOW = re.compile(r"(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?")  # and is not whole
UNIT = 6  # characters of an escape by its number


def whole_escapes(text: str) -> str:
    """JSON text without escapes of half a surrogate pair."""
    certain, tail = certain_escapes(text)
    return certain + (REPLACEMENT + tail[UNIT:] if _HIGH.match(tail) else tail)


def certain_escapes(text: str) -> tuple[str, str]:
    """As `whole_escapes`, of a text that may go on: what is certain, and the end that is not yet."""
    parts: list[str] = []
    at = 0
    while (start := text.find("\\", at)) >= 0:
        parts.append(text[at:start])
        if len(text) < start + (UNIT if text[start + 1 : start + 2] == "u" else 2):
            return "".join(parts), text[start:]
        at = start + (UNIT if text[start + 1] == "u" else 2)
        unit = text[start:at]
        if _HIGH.match(unit):
            if _LOW.match(text, at):
                unit += text[at : at + UNIT]
                at += UNIT
            elif _BEGINS_LOW.fullmatch(text, at):
                return "".join(parts), text[start:]
            else:
                unit = REPLACEMENT
        parts.append(REPLACEMENT if _LOW.fullmatch(unit) else unit)
    return "".join([*parts, text[at:]]), ""


def parsed(raw: bytes, parse: Callable[[bytes], Value]) -> Value:
    """What a parser makes of JSON, of which it need not know halves of surrogate pairs. Raises as the parser does."""
    try:
        return parse(raw)
    except ValueError:
        repaired = whole_escapes(raw.decode(errors="surrogateescape")).encode(errors="surrogateescape")
        if repaired == raw:
            raise
        return parse(repaired)
