"""Values of arguments that a model writes as text between tags, typed by the schema of the tool's parameters.

A value that may only be a string is the text as it stands. Where other types are allowed, the text is the JSON that it
is, or that a Python literal is, if the schema allows that type; else it stays text where a string is allowed. What
neither reads as JSON nor may be a string is a string all the same, so that nothing is lost and the client sees it.
"""

import json
from collections.abc import Iterator

from roofline.text.replies.json_scanner import MAX_DEPTH
from roofline.text.replies.literals import LiteralReader

TEXT = frozenset({"string"})
_WORDS = {"True": "true", "False": "false", "None": "null"}
_KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
_MOST_STEPS = 64  # references and branches of a schema that are followed


def allowed_types(schema: object, document: object = None) -> frozenset[str] | None:
    """Return the JSON types that values of a schema have; None: the schema does not say.

    document: the schema that references point into.
    """
    return _types(schema, schema if document is None else document, [_MOST_STEPS])


def parameter_schema(schema: object, name: str) -> object:
    """Return the schema of one parameter of a tool whose parameters have a schema; None: that says nothing of it."""
    for part in _parts(schema, schema, [_MOST_STEPS]):
        properties = part.get("properties")
        if isinstance(properties, dict) and name in properties:
            return properties[name]
        if isinstance(part.get("additionalProperties"), dict):
            return part["additionalProperties"]
    return None


def json_value(text: str, types: frozenset[str] | None) -> str:
    """Return the JSON of a value that a model wrote as text. types: as `allowed_types` has them."""
    if types == TEXT:
        return json.dumps(text, ensure_ascii=False)
    written = _as_json(text)
    if written is None:
        return json.dumps(text, ensure_ascii=False)
    value, spelling = written
    kind = _KINDS.get(type(value), "null")
    if types is None:
        return spelling if kind != "string" else json.dumps(text, ensure_ascii=False)
    if "string" in types and not _is_one_of(kind, value, types - TEXT):
        return json.dumps(text, ensure_ascii=False)
    return spelling


def _is_one_of(kind: str, value: object, types: frozenset[str]) -> bool:
    if kind in types or (kind == "integer" and "number" in types):
        return True
    return isinstance(value, float) and value.is_integer() and "integer" in types


def _as_json(text: str) -> tuple[object, str] | None:
    """The value that a text is in JSON or as a Python literal, and its spelling in JSON; None: it is none."""
    text = text.strip()
    text = _WORDS.get(text, text)
    try:
        return json.loads(text, parse_constant=_no_number), text
    except (ValueError, RecursionError):
        pass
    if not text.startswith(("{", "[")):
        return None
    try:
        value = json.loads(text, strict=False, parse_constant=_no_number)  # lines break within its strings
    except (ValueError, RecursionError):
        try:
            value = LiteralReader(text).entire()
        except ValueError:
            return None
    try:
        return value, json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):  # a number that no float holds
        return None


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _types(schema: object, document: object, steps: list[int]) -> frozenset[str] | None:
    """The types of a schema; steps: how many parts may still be looked at, one number that all calls share."""
    steps[0] -= 1
    if not isinstance(schema, dict) or steps[0] < 0:
        return None
    types = _own_types(schema)
    for branches in (schema.get("anyOf"), schema.get("oneOf")):
        if isinstance(branches, list) and branches:
            types = _intersection(types, _union([_types(branch, document, steps) for branch in branches]))
    joined = schema.get("allOf")
    parts = list(joined) if isinstance(joined, list) else []
    if isinstance(schema.get("$ref"), str):
        parts.append(target_of(schema["$ref"], document))
    for part in parts:
        types = _intersection(types, _types(part, document, steps))
    return types


def _own_types(schema: dict[str, object]) -> frozenset[str] | None:
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return frozenset({kinds})
    if isinstance(kinds, list) and kinds:
        return frozenset(kind for kind in kinds if isinstance(kind, str))
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and values:
        return frozenset(_KINDS.get(type(value), "null") for value in values)
    return None


def _union(kinds: list[frozenset[str] | None]) -> frozenset[str] | None:
    if any(types is None for types in kinds):
        return None
    return frozenset().union(*(types for types in kinds if types is not None))


def _intersection(types: frozenset[str] | None, more: frozenset[str] | None) -> frozenset[str] | None:
    if types is None or more is None:
        return more if types is None else types
    return types & more or types


def _parts(schema: object, document: object, steps: list[int]) -> Iterator[dict[str, object]]:
    """A schema and those that it is put together from."""
    steps[0] -= 1
    if not isinstance(schema, dict) or steps[0] < 0:
        return
    yield schema
    for key in ("allOf", "anyOf", "oneOf"):
        branches = schema.get(key)
        for branch in branches if isinstance(branches, list) else ():
            yield from _parts(branch, document, steps)
    if isinstance(schema.get("$ref"), str):
        yield from _parts(target_of(str(schema["$ref"]), document), document, steps)


def target_of(reference: str, document: object) -> object:
    """Return what a reference within a schema points at; None: nothing."""
    if not reference.startswith("#"):
        return None
    target = document
    for part in reference.removeprefix("#").split("/")[1:][:MAX_DEPTH]:
        key = part.replace("~1", "/").replace("~0", "~")
        target = target.get(key) if isinstance(target, dict) else None
    return target


class ArgumentWriter:
    """Writes the JSON of a call's arguments while their values come. A name that comes twice keeps its first value.

    schema: of the tool's parameters.
    """

    def __init__(self, schema: object) -> None:
        self._schema = schema
        self._names: set[str] = set()
        self._types: frozenset[str] | None = None
        self._name, self._is_dropped = "", False
        self._value: list[str] = []

    @property
    def is_text(self) -> bool:
        """Whether the value that comes is text as it stands."""
        return self._types == TEXT

    def begin(self, name: str, types: frozenset[str] | None = None) -> str:
        """Begin a value: the JSON before it, as far as it is certain. types: that it has whatever the schema says."""
        self._name, self._is_dropped = name, name in self._names
        self._types = types or allowed_types(parameter_schema(self._schema, name), self._schema)
        self._value = []
        if self._is_dropped:
            return ""
        head = f"{', ' if self._names else ''}{json.dumps(name, ensure_ascii=False)}: "
        self._names.add(name)
        if self.is_text:
            return f'{head}"'
        self._value.append(head)
        return ""

    def feed(self, text: str) -> str:
        """Take more of the value: what of its JSON is certain."""
        if self._is_dropped:
            return ""
        if self.is_text:
            return json.dumps(text, ensure_ascii=False)[1:-1]
        self._value.append(text)
        return ""

    def end(self) -> str:
        """End the value: the rest of its JSON."""
        if self._is_dropped:
            return ""
        if self.is_text:
            return '"'
        head, *text = self._value
        return head + json_value("".join(text), self._types)
