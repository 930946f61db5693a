"""Constraint: the form that an answer must have, declared; `engine/constraints/` holds answers to it."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NoReturn, get_args

from roofline.common.errors import RequestError
from roofline.common.json_depth import json_depth_within

Kind = Literal["json", "json_schema", "regex", "choice", "lark"]
MAX_TEXT = 64 << 10  # bytes of a schema, a grammar, or all choices
MAX_REGEX = 4 << 10  # bytes
MAX_DEPTH = 32  # objects and lists of a schema inside each other
MAX_CHOICES = 1024
_NAMES = {"json": "JSON", "json_schema": "JSON schema", "regex": "regex", "choice": "choice", "lark": "Lark grammar"}


@dataclass(frozen=True)
class Constraint:
    """What an answer must be. Made by the functions below; its sizes are checked at construction.

    Args:
        kind: "json" (any JSON object), "json_schema", "regex", "choice" or "lark".
        text: the schema as JSON, the regex, a JSON list of the choices, or the grammar; "" for any JSON object.
        begun: a beginning that the answer goes on from: the two together have the form.
        behind: a mark that the form begins behind, and white space; what the answer has up to there is free. "": none.

    Raises RequestError with status 400, whose `param` is "constraint".
    """

    kind: Kind
    text: str = ""
    begun: str = ""
    behind: str = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            refuse(f"kind {self.kind!r} is none of {', '.join(get_args(Kind))}")
        if not isinstance(self.text, str):
            refuse(f"the {self.name} is not a text; Constraint.of_json_schema takes a mapping")
        try:
            size = len(self.text.encode("utf-8"))
        except UnicodeEncodeError:
            refuse(f"the {self.name} holds half a surrogate pair, which no answer can contain")
        most = MAX_REGEX if self.kind == "regex" else MAX_TEXT
        if size > most:
            refuse(f"the {self.name} has {size:,} bytes; {most:,} are the most")
        if self.kind == "json" and self.text:
            refuse("any JSON object needs no text; give Constraint.of_json_schema a schema")
        if self.kind != "json" and not self.text.strip():
            refuse(f"the {self.name} is empty")
        if len(self.begun) > MAX_TEXT:
            refuse(f"the beginning of the answer has {len(self.begun):,} characters; {MAX_TEXT:,} are the most")
        if self.kind in ("json_schema", "choice"):
            _parsed(self.text, self.name)

    @property
    def name(self) -> str:
        """Its kind in words."""
        return _NAMES[self.kind]

    @classmethod
    def of_json(cls) -> "Constraint":
        """Any JSON object."""
        return cls("json")

    @classmethod
    def of_json_schema(cls, schema: str | Mapping[str, object]) -> "Constraint":
        """JSON that a schema, as a text or as a mapping, is valid for."""
        return cls("json_schema", schema if isinstance(schema, str) else _json(schema))

    @classmethod
    def of_regex(cls, regex: str) -> "Constraint":
        """A text that a regular expression matches from its beginning to its end."""
        return cls("regex", regex)

    @classmethod
    def of_choice(cls, choices: Iterable[str]) -> "Constraint":
        """One of some texts."""
        if isinstance(choices, str) or not isinstance(choices, Iterable):
            refuse("the choices are not a list of texts")
        return cls("choice", _json(list(choices)))

    @classmethod
    def of_lark(cls, grammar: str) -> "Constraint":
        """A text of a grammar in Lark's notation, whose start rule is `start`."""
        return cls("lark", grammar)

    def choices(self) -> list[str]:
        """The texts of a choice."""
        texts: list[str] = json.loads(self.text)
        return texts


def refuse(problem: str) -> NoReturn:
    """Raise the error of a constraint that cannot be used."""
    raise RequestError(400, "invalid_value", f"constraint: {problem}", param="constraint")


def _json(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        refuse(f"is no JSON: {error}")


def _parsed(text: str, name: str) -> None:
    """Refuse what is no JSON of the right kind, or nests too deep; the latter before a parser sees it."""
    if not json_depth_within(text.encode("utf-8"), MAX_DEPTH):
        refuse(f"the {name} is not JSON nested at most {MAX_DEPTH} deep")
    try:
        value = json.loads(text)
    except ValueError as error:
        refuse(f"the {name} is not JSON: {error}")
    if name == _NAMES["choice"]:
        if not isinstance(value, list) or not all(isinstance(each, str) and each for each in value):
            refuse("the choices are not a list of non-empty texts")
        if not 1 <= len(value) <= MAX_CHOICES:
            refuse(f"there are {len(value):,} choices; from 1 to {MAX_CHOICES:,} are allowed")
    elif not isinstance(value, dict):
        refuse("the JSON schema is not an object")
