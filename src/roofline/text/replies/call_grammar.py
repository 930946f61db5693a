"""Texts of grammars in llguidance's notation, for answers that must be calls."""

import json
import re
from collections.abc import Mapping
from types import MappingProxyType

from roofline.common.json_types import JsonObject

Schema = JsonObject | None
ANYTHING = "/(.|\\n)*/"


class CallGrammar:
    """Writes the parts of rules that are marks.

    special_ids: of marks that the tokenizer has as special tokens, which no text of the grammar stands for.
    """

    def __init__(self, special_ids: Mapping[str, int] = MappingProxyType({})) -> None:
        self._special_ids = special_ids
        marks = sorted(special_ids, key=len, reverse=True)
        self._marks = re.compile("|".join(map(re.escape, marks))) if marks else None

    def literal(self, text: str) -> str:
        """Return what a rule has for a text, in which each mark may be its special token; "" for an empty one."""
        if self._marks is None:
            return quoted(text)
        parts, at = [], 0
        for match in self._marks.finditer(text):
            parts += [quoted(text[at : match.start()]), f"({quoted(match[0])} | <[{self._special_ids[match[0]]}]>)"]
            at = match.end()
        return " ".join(part for part in (*parts, quoted(text[at:])) if part)

    def is_special(self, mark: str) -> bool:
        """Return whether the tokenizer has a mark as a special token."""
        return mark in self._special_ids

    def until(self, rule: str, mark: str) -> list[str]:
        """Return the rules of anything up to a mark, and of the mark."""
        if mark not in self._special_ids:
            return [f"{rule}[suffix={quoted(mark)}]: {ANYTHING}"]
        terminal = f"{rule.upper()}_TEXT"
        return [
            f"{rule}: {rule}_end | {terminal} <[{self._special_ids[mark]}]>",
            f"{rule}_end[suffix={quoted(mark)}]: {ANYTHING}",
            f"{terminal}: {without(mark)}",
        ]


def quoted(text: str) -> str:
    """Return a text as the grammar has it; the empty one stands for nothing."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def without(*marks: str) -> str:
    """Return what a terminal is that is any text but one with a mark.

    The complement alone would take special tokens too.
    """
    alternatives = "|".join(escaped(mark) for mark in marks)
    return f"{ANYTHING} & ~/(.|\\n)*({alternatives})(.|\\n)*/"


def escaped(text: str) -> str:
    """Return a regular expression of the grammar that a text alone matches."""
    return re.escape(text).replace("/", "\\/").replace("\n", "n")


def json_rule(schema: Schema) -> str:
    """Return what a rule has for the JSON of arguments; None: there are none."""
    return '"{}"' if schema is None else f"%json {json.dumps(schema, ensure_ascii=False)}"
