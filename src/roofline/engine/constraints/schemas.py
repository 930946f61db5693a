"""How a JSON schema is handed to llguidance, whose numbers are 64-bit floats: so that nothing of it is changed there.

`for_library` is the one way from a schema to the library, also for the `%json { ... }` of grammars. An answer that the
library lets through is valid for the schema as it came: what the library would round, or could not hold, is put in
another way that is at least as strict, or refused with its place.
"""

import json
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from itertools import count as count_up

from roofline.common.json_depth import json_depth_within
from roofline.common.json_types import JsonObject
from roofline.engine.constraint import MAX_DEPTH
from roofline.engine.constraints.dates import PATTERNS
from roofline.engine.constraints.exact_values import SPACE, ExactValues
from roofline.engine.constraints.lookaheads import Patterns
from roofline.engine.constraints.schema_numbers import Refused, bounds, count, exact, multiple, refuse_products

# Spaces and line breaks between two elements of JSON: as many as indentation needs, not as many as a model may repeat.
JSON_SPACE = r"[ \t\r\n]{1,64}"
# No \u escapes: a key that is written with them is another text and the same key, which would pass for a further one.
ESCAPES = 'nrbtf\\"'
OPTIONS = {
    **{"whitespace_pattern": JSON_SPACE, "json_allowed_escapes": ESCAPES},
    **{"lenient": False, "coerce_one_of": False},
}
FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)  # that the library holds strings to; all others are annotations (JSON Schema 2020-12, 7.2.3)
# Keywords of JSON Schema from draft 4 to 2020-12, and of OpenAPI's schemas.
KEYWORDS = frozenset(
    (
        *("$schema", "$id", "$ref", "$defs", "$anchor", "$dynamicRef", "$dynamicAnchor", "$recursiveRef"),
        *("$recursiveAnchor", "$vocabulary", "$comment", "id", "definitions", "dependencies", "type", "enum", "const"),
        *("multipleOf", "maximum", "exclusiveMaximum", "minimum", "exclusiveMinimum", "maxLength", "minLength"),
        *("pattern", "maxItems", "minItems", "uniqueItems", "maxContains", "minContains", "maxProperties"),
        *("minProperties", "required", "dependentRequired", "allOf", "anyOf", "oneOf", "not", "if", "then", "else"),
        *("dependentSchemas", "prefixItems", "items", "additionalItems", "contains", "properties"),
        *("patternProperties", "additionalProperties", "propertyNames", "unevaluatedItems", "unevaluatedProperties"),
        *("format", "contentEncoding", "contentMediaType", "contentSchema", "title", "description", "default"),
        *("deprecated", "readOnly", "writeOnly", "examples", "example", "nullable", "discriminator", "xml"),
        *("externalDocs", "components"),
    )
)
CLOSE = 0.85  # of two words, by difflib: as "maxLenght" and "maxLength"
_ONE = frozenset({"additionalItems", "additionalProperties", "items"})
_SEVERAL = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_BOUNDS = frozenset({"minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"})
_COUNTS = frozenset({"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"})
_COMBINING = frozenset({"allOf", "anyOf", "oneOf", "$ref", "patternProperties"})
# In a grammar of Lark's notation: what may hold a %json that is none, then one itself.
_LARK = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\])+/|(?:\#|//)[^\n]*|<[^<>\s]+>|(?P<json>%json)\s*')

Place = tuple[str, ...]


def check(schema: JsonObject) -> None:
    """Raise ValueError for a schema that `for_library` refuses, but for its patterns, which take longer."""
    if _written_out(schema, "value", None) is None:
        _Preparation(schema, None).schema(schema, ())


def for_library(schema: JsonObject, patterns: Patterns | None = None) -> JsonObject:
    """A schema as the library holds answers to it. Raises ValueError with the place of what it could not.

    patterns: of the form that the schema is a part of.
    """
    options = {"x-guidance": OPTIONS}
    prepared = _Preparation(schema, patterns or Patterns()).schema(schema, ())
    return (prepared if isinstance(prepared, dict) else {"anyOf": [prepared]}) | options


def grammar_of_schema(schema: JsonObject) -> str | None:
    """A grammar in Lark's notation of a schema whose numbers the library would round; None where `for_library` does.
    Raises ValueError."""
    grammar = f"start: %json {json.dumps(schema, ensure_ascii=False)}"
    return None if _written_out(schema, "value", Patterns()) is None else grammar_for_library(grammar)


def grammar_for_library(grammar: str) -> str:
    """A grammar in Lark's notation whose JSON schemas are as `for_library` has them. Raises ValueError."""
    parts, rules, patterns = list[str](), list[str](), Patterns()
    names = (name for number in count_up() if (name := f"exact{number}") not in grammar)
    at = 0
    while (token := _LARK.search(grammar, at)) is not None:
        parts.append(grammar[at : token.start("json") if token["json"] else token.end()])
        at = token.end()
        if token["json"] is None:
            continue
        try:
            schema, end = json.JSONDecoder().raw_decode(grammar, at)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"what follows %json is no JSON: {error}") from None
        if not json_depth_within(grammar[at:end].encode(), MAX_DEPTH):
            raise ValueError(f"a JSON schema is nested more than {MAX_DEPTH} deep")
        written = _written_out(schema, next(names), patterns) if isinstance(schema, dict) else None
        if written is not None:
            expression, more = written
            rules += more
        else:
            expression = _json_part(for_library(schema, patterns) if isinstance(schema, dict) else schema)
        parts.append(expression if written is not None else grammar[token.start("json") : at] + expression)
        at = end
    text = "".join([*parts, grammar[at:]])
    return "\n".join([text, f"{SPACE}: /{JSON_SPACE}/", *rules]) + "\n" if rules else text


def _written_out(schema: JsonObject, name: str, patterns: Patterns | None) -> tuple[str, list[str]] | None:
    """An expression of a schema in a grammar, and the rules that it needs, where the library would round its numbers.

    patterns: None: they are not read.
    """

    def as_library(part: JsonObject) -> str:
        if patterns is None:
            return str(_Preparation(part, None).schema(part, ()))
        return f"%json {_json_part(for_library(part, patterns))}"

    values = ExactValues(schema, name, as_library)
    expression = values.expression()
    return None if expression is None else (expression, values.rules)


def _json_part(schema: object) -> str:
    return json.dumps(schema, ensure_ascii=False)


class _Preparation:
    """Goes through one schema, and knows which parts of it references make schemas."""

    def __init__(self, document: JsonObject, patterns: Patterns | None) -> None:
        self._patterns = patterns
        self._referred = {pointer(reference) for reference in _references(document)}
        factors = [value for key, value in _pairs(document) if key == "multipleOf"]
        if len(factors) > 1 and any(key in _COMBINING for key, _ in _pairs(document)):
            refuse_products(factors)

    def schema(self, value: object, place: Place) -> object:
        """A schema at a place, prepared."""
        if not isinstance(value, dict):
            return value
        try:
            self._check_keywords(value, place)
            value = _names_held(value)
            prepared = {
                key: self._keyword(key, item, (*place, key)) for key, item in value.items() if key not in _BOUNDS
            }
            prepared |= bounds(value)
            prepared = _with_real_days(prepared)
            _check_repeated_names(prepared)
        except Refused as refused:
            raise ValueError(f"{'.'.join((*place, *refused.place))}: {refused}") from None
        if prepared.get("not") is True or prepared.get("not") == {}:
            return False
        for key, empty in (("format", None), ("uniqueItems", False), ("not", False)):
            if key in prepared and prepared[key] is empty:
                del prepared[key]
        return prepared

    def _check_keywords(self, schema: JsonObject, place: Place) -> None:
        """Raise Refused for a misspelt keyword, which would hold nothing. Others that are none are annotations."""
        for key in schema.keys() - KEYWORDS:
            leads = any(target[: len(place) + 1] == (*place, key) for target in self._referred)
            nearest = get_close_matches(key, KEYWORDS, 1, CLOSE)
            if nearest and not leads and not key.startswith("x-"):
                raise Refused(f"is no keyword of JSON Schema; {nearest[0]!r} is", (key,))

    def _keyword(self, key: str, value: object, place: Place) -> object:
        if key == "patternProperties" and isinstance(value, dict):
            return {self._pattern(name, (key,)): self.schema(item, (*place, name)) for name, item in value.items()}
        if key in _NAMED and isinstance(value, dict):
            return {name: self.schema(item, (*place, name)) for name, item in value.items()}
        if key in _SEVERAL or (key in _ONE and isinstance(value, list)):
            items = value if isinstance(value, list) else []
            return [self.schema(item, (*place, str(number))) for number, item in enumerate(items)] or value
        if key in _ONE:
            return self.schema(value, place)
        if key == "const":
            return exact(value, (key,))
        if key == "enum" and isinstance(value, list):
            return [exact(item, (key, str(number))) for number, item in enumerate(value)]
        if key == "pattern" and isinstance(value, str):
            return self._pattern(value, (key,))
        if key == "multipleOf":
            return multiple(value)
        if key in _COUNTS:
            return count(value, (key,))
        if key == "format":
            return value if not isinstance(value, str) or value in FORMATS else None
        return self._unknown(value, place)

    def _pattern(self, pattern: str, place: Place) -> str:
        try:
            return pattern if self._patterns is None else self._patterns.of(pattern)
        except ValueError as error:
            raise Refused(str(error), place) from None

    def _unknown(self, value: object, place: Place) -> object:
        """The value of a keyword that holds no schemas, unless a reference leads into it."""
        if place in self._referred:
            return self.schema(value, place)
        if isinstance(value, dict):
            return {key: self._unknown(item, (*place, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [self._unknown(item, (*place, str(number))) for number, item in enumerate(value)]
        return value


def _names_held(schema: JsonObject) -> JsonObject:
    """A schema whose `propertyNames` is put as other keywords, where that is the same."""
    if "propertyNames" not in schema:
        return schema
    names = schema["propertyNames"]
    without = {key: item for key, item in schema.items() if key != "propertyNames"}
    if names is True or names in ({}, {"type": "string"}):
        return without
    if not isinstance(names, dict) or schema.get("patternProperties"):
        return schema
    further = schema.get("additionalProperties", True)
    texts, pattern, declared = names.get("enum"), names.get("pattern"), schema.get("properties", {})
    if names.get("type", "string") != "string" or not isinstance(declared, dict):
        return schema
    limits = names.keys() - {"type", "title", "description"}
    if limits == {"enum"} and isinstance(texts, list) and all(isinstance(text, str) for text in texts):
        allowed = {text: declared.get(text, further) for text in texts}
        return without | {"properties": allowed, "additionalProperties": False}
    if limits == {"pattern"} and isinstance(pattern, str) and not (schema.keys() & {"properties", "required"}):
        return without | {"patternProperties": {pattern: further}, "additionalProperties": False}
    return schema


def _with_real_days(schema: JsonObject) -> JsonObject:
    """A schema whose formats of dates and times are patterns."""
    pattern = PATTERNS.get(str(schema.get("format")))
    if pattern is None:
        return schema
    schema = {key: value for key, value in schema.items() if key != "format"}
    if "pattern" not in schema:
        return schema | {"pattern": pattern}
    conditions = schema.get("allOf", [])
    return schema | {"allOf": [*conditions, {"pattern": pattern}]} if isinstance(conditions, list) else schema


def _check_repeated_names(schema: Mapping[str, object]) -> None:
    """Refuse a least number of properties that one property, written twice, would seem to fulfil."""
    least, required = schema.get("minProperties"), schema.get("required")
    counted = len(required) if isinstance(required, list) else 0
    closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    if isinstance(least, int) and least > counted + 1 and not closed:
        problem = f"{least} properties cannot be counted where the same one may come twice; name them in required"
        raise Refused(problem, ("minProperties",))


def _pairs(value: object) -> Iterator[tuple[str, object]]:
    """All keys with their values, at any depth."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield key, item
            yield from _pairs(item)
    elif isinstance(value, list):
        for item in value:
            yield from _pairs(item)


def _references(document: JsonObject) -> list[str]:
    return [value for key, value in _pairs(document) if key == "$ref" and isinstance(value, str)]


def pointer(reference: str) -> Place:
    """The place that a reference within a document leads to."""
    from urllib.parse import unquote

    parts = unquote(reference.partition("#")[2]).split("/")[1:]
    return tuple(part.replace("~1", "/").replace("~0", "~") for part in parts)
