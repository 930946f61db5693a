"""Numbers of a JSON schema that llguidance would round, written digit by digit: as rules of a grammar around them.

Of `enum` and `const` any number can be written so, and integers between bounds of any size, wherever what stands around
them is made of objects, lists, `anyOf` and references alone. Objects that are written so have no further properties.
"""

import json
from collections.abc import Callable, Collection, Mapping
from urllib.parse import unquote

from roofline.common.json_types import JsonObject
from roofline.engine.constraint import MAX_DEPTH
from roofline.engine.constraints.digits import integers
from roofline.engine.constraints.schema_numbers import KEYS, Refused, bounds, exact

SPACE = "EXACT_SPACE"
MOST_WORK = 50_000  # schemas that are looked at, some tenths of a second of a core
MOST_TEXT = 1 << 20  # characters of all rules
_EMPTY = '""'
_ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$schema", "$id", "$comment"}
)
_DEFINITIONS = ("$defs", "definitions")
_BOUNDS = frozenset(key for plain, strict, _ in KEYS for key in (plain, strict))
_HOLDS_ONE = ("additionalProperties", "items", "not")
_HOLDS_SEVERAL = ("allOf", "anyOf", "oneOf", "prefixItems")
_HOLDS_NAMED = ("properties", "patternProperties")
_TYPES: dict[str, type | tuple[type, ...]] = {
    **{"string": str, "number": (int, float), "boolean": bool, "null": type(None), "object": dict, "array": list},
}


class NotWrittenOut(Exception):
    """A schema around a number is none that rules are written for."""


class ExactValues:
    """Writes the rules of one schema.

    Args:
        document: the schema, which references lead into.
        name: what the names of rules begin with.
        as_library: the expression of a part that the library holds itself, which is a schema of its own.
    """

    def __init__(self, document: JsonObject, name: str, as_library: Callable[[JsonObject], str]) -> None:
        self._document, self._name, self._as_library = document, name, as_library
        self.rules: list[str] = []
        self._names: dict[int, str] = {}  # of rules, by the id of their schema in the document
        self._plain = set[int]()  # ids of schemas of which nothing is rounded
        self._work, self._size = 0, 0

    def expression(self) -> str | None:
        """What stands for the schema in a grammar with `rules`; None where the library rounds nothing of it, or no
        rules can be written. Raises ValueError for a part that cannot be held."""
        try:
            return self._written(self._document, ()) if self._is_rounded(self._document) else None
        except NotWrittenOut:
            return None

    def _is_rounded(self, schema: object) -> bool:
        """Whether the library would change a number of a schema, or of one that it refers to."""
        visited, pending = set[int](), [schema]
        while pending:
            part = pending.pop()
            if not isinstance(part, dict) or id(part) in visited or id(part) in self._plain:
                continue
            visited.add(id(part))
            self._work += 1
            if self._work > MOST_WORK:
                raise NotWrittenOut
            if _has_rounded(part):
                return True
            pending += _parts(part)
            if isinstance(part.get("$ref"), str):
                pending.append(self._referred(part["$ref"]))
        self._plain |= visited
        return False

    def _written(self, schema: object, passed: tuple[str, ...]) -> str:
        """The name of the rule of a schema, which is written once. passed: references on the way to it."""
        name = self._names.get(id(schema))
        if name is None:
            rounded = self._is_rounded(schema)
            name = self._rule(self._expression(schema, passed) if rounded else self._held_by_library(schema))
            self._names[id(schema)] = name
        return name

    def _expression(self, schema: object, passed: tuple[str, ...]) -> str:
        assert isinstance(schema, dict), "others have no numbers"
        keys = schema.keys() - _ANNOTATIONS - set(_DEFINITIONS)
        kind = schema.get("type")
        if keys == {"$ref"} and schema["$ref"] not in passed and len(passed) < MAX_DEPTH:
            reference = str(schema["$ref"])
            return self._written(self._referred(reference), (*passed, reference))
        if keys <= {"const", "type"} or keys <= {"enum", "type"}:
            return " | ".join(map(_quoted, _texts(schema)))
        if keys == {"anyOf"} and isinstance(schema["anyOf"], list):
            return " | ".join(self._written(part, passed) for part in schema["anyOf"])
        if kind == "integer" and keys <= _BOUNDS | {"type"}:
            return f"/{integers(*_integer_bounds(schema))}/"
        if kind == "object" and keys <= {"type", "properties", "required", "additionalProperties"}:
            return self._object(schema, passed)
        if kind == "array" and keys <= {"type", "items", "minItems", "maxItems"}:
            return self._list(schema, passed)
        raise NotWrittenOut

    def _object(self, schema: JsonObject, passed: tuple[str, ...]) -> str:
        """Its properties come in the schema's order, and those that it does not require may be left out."""
        properties, required = schema.get("properties"), schema.get("required", [])
        if not isinstance(properties, dict) or not isinstance(required, list) or not set(required) <= set(properties):
            raise NotWrittenOut
        first, following = "", ""  # what comes from a property on, where none came before, and where one did
        for key, part in reversed(properties.items()):
            value = self._written(part, passed)
            pair = f'{_quoted(json.dumps(key, ensure_ascii=False))} {SPACE}? ":" {SPACE}? {value} {SPACE}? {following}'
            later = f'"," {SPACE}? {pair}'
            if key not in required:
                pair, later = f"{pair} | {first or _EMPTY}", f"{later} | {following or _EMPTY}"
            first, following = self._rule(pair), self._rule(later)
        return f'"{{" {SPACE}? {first} "}}"'

    def _list(self, schema: JsonObject, passed: tuple[str, ...]) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if not _is_count(least) or not (most is None or (_is_count(most) and most > 0)):
            raise NotWrittenOut
        item = f"{self._written(schema.get('items', True), passed)} {SPACE}?"
        repeats = f"{{{max(0, least - 1)},{'' if most is None else most - 1}}}"
        items = f'{item} ("," {SPACE}? {item}){repeats}'
        return f'"[" {SPACE}? {items if least > 0 else f"({items})?"} "]"'

    def _held_by_library(self, schema: object) -> str:
        """The expression of a part in which the library rounds nothing, with the definitions that it refers to."""
        if not isinstance(schema, dict | bool):
            raise NotWrittenOut
        part: JsonObject = schema if isinstance(schema, dict) else {"anyOf": [schema]}
        references = list(_references(part))
        if not all(reference.startswith(("#/$defs/", "#/definitions/")) for reference in references):
            raise NotWrittenOut
        for key in _DEFINITIONS if references else ():
            definitions = self._document.get(key)
            if isinstance(definitions, dict):
                part = part | {key: {name: each for name, each in definitions.items() if not self._is_rounded(each)}}
        return self._as_library(part)

    def _referred(self, reference: str) -> object:
        """What a reference within the document leads to; None: it leads nowhere."""
        document, _, pointer = reference.partition("#")
        value: object = None if document else self._document
        for part in unquote(pointer).split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def _rule(self, expression: str) -> str:
        """The name of a further rule."""
        self._size += len(expression)
        if self._size > MOST_TEXT:
            raise NotWrittenOut
        name = f"{self._name}_{len(self.rules)}"
        self.rules.append(f"{name}: {expression}")
        return name


def _has_rounded(schema: JsonObject) -> bool:
    """Whether the library would change a number that stands in a schema itself."""
    try:
        exact([schema.get("const"), schema.get("enum")], ())
        if schema.get("type") == "integer":
            bounds(schema)
    except Refused:
        return True
    return False


def _parts(schema: JsonObject) -> list[object]:
    """The schemas that are parts of one."""
    parts = [schema.get(key) for key in _HOLDS_ONE]
    parts += [part for key in _HOLDS_SEVERAL if isinstance(several := schema.get(key), list) for part in several]
    for key in _HOLDS_NAMED:
        by_name = schema.get(key)
        parts += by_name.values() if isinstance(by_name, dict) else ()
    return parts


def _texts(schema: JsonObject) -> list[str]:
    """The values of `enum` or `const` as JSON."""
    values = schema["enum"] if "enum" in schema else [schema["const"]]
    kinds = schema.get("type")
    if kinds is not None:
        names = [kinds] if isinstance(kinds, str) else kinds
        if not isinstance(names, list):
            raise NotWrittenOut
        values = [value for value in values if any(_is_of(value, kind) for kind in names)]
    try:
        texts = [json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")) for value in values]
    except ValueError:
        raise NotWrittenOut from None
    if not texts or any("\\u" in text for text in texts):
        raise NotWrittenOut
    return texts


def _is_of(value: object, kind: object) -> bool:
    """Whether a value is of a type of JSON Schema's."""
    if kind == "integer":
        return _is_of(value, "number") and isinstance(value, int | float) and value == value // 1
    types = _TYPES.get(str(kind), ())
    return isinstance(value, types) and (kind == "boolean" or not isinstance(value, bool))


def _integer_bounds(schema: JsonObject) -> tuple[int | None, int | None]:
    """The least and the largest integer that the bounds of a schema allow; None: there is no bound."""
    ends: dict[str, int | None] = {"least": None, "most": None}
    for plain, strict, side in KEYS:
        sign = 1 if side == "least" else -1  # where the numbers within the bound lie
        for key, step in ((plain, 0), (strict, 1)):
            value = schema.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise NotWrittenOut
            bound, other = value + sign * step, ends[side]
            ends[side] = bound if other is None else sign * max(sign * bound, sign * other)
    return ends["least"], ends["most"]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _references(value: object) -> Collection[str]:
    if isinstance(value, dict):
        here = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return [*here, *(reference for item in value.values() for reference in _references(item))]
    if isinstance(value, list):
        return [reference for item in value for reference in _references(item)]
    return []


def _quoted(text: str) -> str:
    """A text of the grammar."""
    return json.dumps(text, ensure_ascii=False)
