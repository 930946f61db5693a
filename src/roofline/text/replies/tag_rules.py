"""Rules of grammars for arguments that stand between tags, each as text or as JSON, in the order of the schema."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from roofline.common.json_types import JsonObject
from roofline.text.replies.call_grammar import ANYTHING, CallGrammar, Schema, quoted, without
from roofline.text.replies.values import TEXT, allowed_types, json_value, target_of

_OF_OBJECTS = ("type", "properties", "required", "additionalProperties", "$defs", "definitions")
# What a schema has that says nothing about values.
_NOTES = frozenset(
    ("title", "description", "$schema", "$id", "$comment", "examples", "default", "strict", "deprecated", "nullable")
)
_DEFINITIONS = ("$defs", "definitions")
_FORMATS = {
    "date": "[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])",
    "time": "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])",
    "uuid": "[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}",
    "email": "[A-Za-z0-9_.+\\-]+@[A-Za-z0-9\\-]+(\\.[A-Za-z0-9\\-]+)+",
    "ipv4": "((25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])\\.){3}(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])",
    "uri": "[A-Za-z][A-Za-z0-9+.\\-]*:[^ \\n]+",
}
_FORMATS["date-time"] = f"{_FORMATS['date']}T{_FORMATS['time']}"
# A text that reads as JSON which is no string, or as Python's words for it.
_READS_AS_JSON = "/[ \\t\\r\\n]*(true|false|null|True|False|None|-?[0-9][-+.eE0-9]*|[\\[{](.|\\n)*)[ \\t\\r\\n]*/"
_MOST_BRANCHES = 32


@dataclass(frozen=True)
class ValueEnds:
    """What stands behind each value, and the marks that no text may have.

    quote: what stands around each text besides; "": nothing.
    """

    behind: str
    marks: Sequence[str]
    quote: str = ""


def properties_of(schema: Schema) -> Iterator[tuple[str, JsonObject, bool]]:
    """Return name, schema and whether it is required of each argument, the schema with what it refers to.

    Raises ValueError for what calls cannot be held to whose arguments are written one by one.
    """
    if schema is None:
        return
    for key in schema:
        if key not in _OF_OBJECTS and key not in _NOTES and not key.startswith("x-"):
            raise ValueError(f"{key}: arguments are written one by one, so no rule can be about all of them")
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise ValueError("its properties are no object, or what is required no list")
    for name in required:
        if name not in properties:
            raise ValueError(f"required.{name}: it is none of the properties")
    definitions = {key: schema[key] for key in _DEFINITIONS if key in schema}
    for name, part in properties.items():
        part = {} if part is True else part
        if not isinstance(part, dict):
            continue  # false: it is not allowed
        for reference in _references(part):
            if not reference.startswith(("#/$defs/", "#/definitions/")):
                raise ValueError(f"properties.{name}: {reference!r} refers to neither $defs nor definitions")
        yield name, ({**definitions, **part} if definitions else part), name in required


def _references(part: object) -> Iterator[str]:
    if isinstance(part, dict):
        if isinstance(part.get("$ref"), str):
            yield part["$ref"]
        for inner in part.values():
            yield from _references(inner)
    elif isinstance(part, list):
        for inner in part:
            yield from _references(inner)


def tagged_arguments(
    rule: str,
    schema: Schema,
    before: Callable[[str, JsonObject], str],
    ends: ValueEnds,
    grammar: CallGrammar | None = None,
) -> tuple[str, list[str]]:
    """Return what a rule has for the arguments of a call, and the rules that this needs. Raises ValueError.

    Args:
        rule: the begin of the names of these rules.
        before: what a rule has before the value of an argument, from its name and its schema.
        grammar: knows which marks are special tokens; None: none is.
    """
    grammar = grammar or CallGrammar()
    parts, rules = [], []
    for number, (name, part, required) in enumerate(properties_of(schema)):
        if any(character in name for character in '<>"\n') or name != name.strip() or not name:
            raise ValueError(f"properties.{name}: the format cannot write this name")
        argument = f"{rule}_{number}"
        parts.append(argument if required else f"{argument}?")
        rules.append(f"{argument}: {before(name, part)} {argument}_value")
        rules += value_rules(f"{argument}_value", part, ends, grammar)
    return " ".join(parts), rules


def value_rules(rule: str, schema: JsonObject, ends: ValueEnds, grammar: CallGrammar) -> list[str]:
    """Return the rules of a value and what stands behind it, the first of them named `rule`. Raises ValueError."""
    types, end, rules = allowed_types(schema), grammar.literal(ends.behind), list[str]()
    options, quote = [], grammar.literal(ends.quote)
    for number, option in enumerate(_options(schema, types, depth=0)):
        name = f"{rule}_{number}"
        if isinstance(option, _OneValue):
            is_text = isinstance(option.value, str)
            text = str(option.value) if is_text else json.dumps(option.value, ensure_ascii=False)
            if is_text and quote and not any(mark in text for mark in ends.marks):
                options.append(f"{quote} {quoted(text)} {quote} {end}")
            elif (quote and not is_text) or json_value(text, types) == json.dumps(option.value, ensure_ascii=False):
                options.append(f"{quoted(text)} {end}")
        elif allowed_types(option) in (TEXT, None):
            options.append(f"{quote} {name}")
            rules += _text_rules(name, option, ends, grammar, alone=bool(quote) or types in (TEXT, None))
        else:
            options.append(f"{name} {end}")
            rules.append(f"{name}: %json {json.dumps(option, ensure_ascii=False)}")
    if not options:
        raise ValueError("none of its values can be told from another as text")
    return [f"{rule}: {' | '.join(options)}", *rules]


class _OneValue(NamedTuple):
    """A value that stands for itself."""

    value: object


def _options(schema: JsonObject, types: frozenset[str] | None, depth: int) -> "list[_OneValue | JsonObject]":
    """What a value may be: one value, or any of a schema that allows texts alone or none at all.

    types: of all values, by which they are read.
    """
    if depth > _MOST_BRANCHES:
        raise ValueError("its references go round in a circle, or its branches are too deep")
    definitions = {key: schema[key] for key in _DEFINITIONS if key in schema}
    keys = schema.keys() - _NOTES - definitions.keys()
    joined = schema.get("allOf")
    if keys == {"$ref"} or (keys == {"allOf"} and isinstance(joined, list) and len(joined) == 1):
        part = joined[0] if isinstance(joined, list) else target_of(str(schema["$ref"]), schema)
        return _options({**definitions, **part}, types, depth + 1) if isinstance(part, dict) else []
    branches = schema.get("anyOf", schema.get("oneOf"))
    if len(keys) == 1 and isinstance(branches, list):
        parts = [{**definitions, **branch} for branch in branches if isinstance(branch, dict)]
        return [option for part in parts for option in _options(part, types, depth + 1)]
    types_here = allowed_types(schema)
    if types_here is not None and "string" not in types_here:
        return [schema]
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return [_OneValue(value) for value in values]
    if types_here is None and keys:
        raise ValueError(f"{', '.join(sorted(keys))}: its type has to be said")
    other_types = sorted((types_here or frozenset()) - TEXT)
    texts: list[_OneValue | JsonObject] = [{**schema, "type": "string"} if types_here is not None else schema]
    return [*texts, {**schema, "type": other_types}] if other_types else texts


def _text_rules(rule: str, schema: JsonObject, ends: ValueEnds, grammar: CallGrammar, *, alone: bool) -> list[str]:
    """The rules of a string that is written as it stands, with its end. alone: nothing else may stand in its place."""
    shortest, longest = schema.get("minLength", 0), schema.get("maxLength", "")
    parts = [ANYTHING if (shortest, longest) == (0, "") else f"/(.|\\n){{{shortest},{longest}}}/"]
    if "pattern" in schema:
        parts.append(f"/{_entire(str(schema['pattern']))}/")
    if "format" in schema:
        if schema["format"] not in _FORMATS:
            raise ValueError(f"format {schema['format']!r}: only texts of {', '.join(_FORMATS)} can be held to it")
        parts.append(f"/{_FORMATS[str(schema['format'])]}/")
    parts.append(without(*ends.marks).removeprefix(f"{ANYTHING} & "))
    parts += [] if alone else [f"~{_READS_AS_JSON}"]
    body = f"{rule.upper()}_BODY"
    bounds = [f"{body}: {' & '.join(parts)}"]
    if grammar.is_special(ends.quote) or grammar.is_special(ends.behind):
        return [f"{rule}: {body} {grammar.literal(ends.quote)} {grammar.literal(ends.behind)}", *bounds]
    return [f"{rule}[suffix={quoted(ends.quote + ends.behind)}]: {body}", *bounds]


def _entire(pattern: str) -> str:
    """A regular expression of texts that have a match of a pattern; \\d is 0 to 9."""
    anything = "(.|\\n)*"
    ends = pattern.endswith("$") and not pattern.endswith("\\$")
    inner = pattern.removeprefix("^")
    inner = inner[:-1] if ends else inner
    in_class, parts = False, list[str]()
    for part in re.findall(r"\\.|[^\\]", inner, re.DOTALL):
        in_class = part == "[" or (in_class and part != "]")
        if part in "^$" and not (in_class or parts[-1:] == ["["]):
            raise ValueError(f"pattern {pattern!r}: {part} within it")
        parts.append({"\\d": "0-9" if in_class else "[0-9]", "/": "\\/"}.get(part, part))
    return f"{'' if pattern.startswith('^') else anything}({''.join(parts)}){'' if ends else anything}"
