"""Grammars of answers that call tools, in the format that the model writes and its parser reads."""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from roofline.common.json_types import JsonObject
from roofline.engine.constraint import MAX_DEPTH, Constraint, refuse
from roofline.engine.constraints.schemas import check, pointer
from roofline.text.replies.call_formats import HermesCalls, MistralCalls
from roofline.text.replies.reasoning import CLOSE
from roofline.text.replies.reasoning import OPEN as THINK

Tool = Mapping[str, object]
OPEN, END = f"{HermesCalls.open}\n", f"\n{HermesCalls.close}"
# Of each format: what stands before the first call, between two, and after the last, and the key of the arguments.
FRAMES = {
    "hermes": (OPEN, f"{END}\n{OPEN}", END, "arguments"),
    "llama3": ("", "; ", "", "parameters"),
    "json": ("", "; ", "", "arguments"),
    "mistral": (f"{MistralCalls.open}[", ", ", "]", "arguments"),
}
ANYTHING = "/(.|\\n)*/"
MOST_CALLS = 16  # of an answer that calls alone: a small model calls again and again, and nothing else would end it
ANY_OBJECT = {"type": "object"}


def forced_calls(form: str, tools: Sequence[Tool], *, several: bool, thinking: bool) -> Constraint:
    """What an answer is that calls one of these tools, and nothing else.

    Args:
        form: a name of CALL_FORMATS.
        several: whether it may call more than one.
        thinking: the prompt ends within the reasoning, which comes first then.
    """
    before, _, after, _ = FRAMES[form]
    rules = [f"start: {'thoughts ' if thinking else ''}{_quoted(before)} {_calls(form, several)} {_quoted(after)}"]
    if thinking:
        rules.append(f"thoughts[suffix={_quoted(CLOSE)}]: {ANYTHING}")
    return Constraint.of_lark("\n".join([*rules, *_call_rules(form, tools, map(schema_of_calls, tools))]) + "\n")


def optional_calls(
    form: str,
    tools: Sequence[Tool],
    strict: Collection[str],
    *,
    several: bool,
    thinking: bool,
    mark_ids: Collection[int] = (),
) -> Constraint:
    """What an answer is that may call these tools, or none: text is free, and a call that begins is held to the schema
    of its tool, where that is strict, else to an object.

    In a format without a mark before calls, an answer in text begins with another character than an object does.

    Args:
        strict: names of tools. The others are as for `forced_calls`.
        mark_ids: special tokens that are Mistral's mark; its text is the mark too.
    """
    if form == "mistral":
        mark = MistralCalls.open
        opened = " | ".join(["opening", *(f"TEXT <[{token}]>" for token in sorted(mark_ids))])
        rules = [
            f'start: {"thoughts " if thinking else ""}(TEXT | ({opened}) "[" {_calls(form, several)} "]")',
            f"opening[suffix={_quoted(mark)}]: {ANYTHING}",
            f"TEXT: {ANYTHING} & ~/(.|\\n)*{re.escape(mark)}(.|\\n)*/",  # the latter alone would take special tokens
        ]
        if thinking:
            rules.append(f"thoughts[suffix={_quoted(CLOSE)}]: {ANYTHING}")
    elif form == "hermes":
        mark, rest = HermesCalls.open, _quoted("\n")
        rules = [
            f"start: {'thoughts ' if thinking else ''}(opening {rest} call {_quoted(END)})* TEXT",
            f"opening[suffix={_quoted(mark)}]: {ANYTHING}",
            f"TEXT: ~/(.|\\n)*{mark}(.|\\n)*/",
        ]
        if thinking:
            rules.append(f"thoughts[suffix={_quoted(CLOSE)}]: {ANYTHING}")
    else:
        thoughts = "thoughts GAP" if thinking else f"({_quoted(THINK)} thoughts GAP)?"
        rules = [
            f"start: {thoughts} ({_calls(form, several)} | TEXT)",
            f"thoughts[suffix={_quoted(CLOSE)}]: {ANYTHING}",
            "GAP: /[ \\t\\r\\n]*/",
            'TEXT: /[^ \\t\\r\\n{\\[<](.|\\n)*/ | ""',
        ]
    schemas = [schema_of_calls(tool) if _function(tool)["name"] in strict else ANY_OBJECT for tool in tools]
    return Constraint.of_lark("\n".join([*rules, *_call_rules(form, tools, schemas)]) + "\n")


def _calls(form: str, several: bool) -> str:
    return f"call ({_quoted(FRAMES[form][1])} call){{0,{MOST_CALLS - 1}}}" if several else "call"


def _call_rules(form: str, tools: Sequence[Tool], schemas: Iterable[Mapping[str, object] | None]) -> list[str]:
    """schemas: of the arguments of each tool; None: it has no parameters."""
    key = FRAMES[form][3]
    rules = ["call: " + " | ".join(f"call_{number}" for number in range(len(tools)))]
    for number, (tool, schema) in enumerate(zip(tools, schemas, strict=True)):
        head = f'{{"name": {json.dumps(_function(tool)["name"])}, "{key}": '
        arguments = '"{}"' if schema is None else f"%json {json.dumps(schema, ensure_ascii=False)}"
        rules.append(f'call_{number}: {_quoted(head)} arguments_{number} "}}"')
        rules.append(f"arguments_{number}: {arguments}")
    return rules


def schema_of_calls(tool: Tool) -> JsonObject | None:
    """The schema of a tool's arguments, which are an object; None where it has no parameters, as OpenAI's reference
    says of leaving them out. Raises RequestError for one that answers cannot be held to."""
    function = _function(tool)
    schema = function.get("parameters")
    if not schema or _names_none(schema):
        return None
    assert isinstance(schema, dict), "the reader of the API has checked it"
    try:
        check(schema)
    except ValueError as error:
        refuse(f"calls of {function['name']!r} cannot be kept to it: {error}")
    return schema if schema.get("type") == "object" else schema | {"type": "object"}


def describes_object(schema: object, document: JsonObject | None = None, depth: int = MAX_DEPTH) -> bool:
    """Whether an object can be valid for a schema of parameters, as far as its types, values and branches say.

    document: the schema that it is a part of; depth: references and branches that are followed.
    """
    if not isinstance(schema, dict) or depth == 0:
        return schema is not False
    document = schema if document is None else document
    kinds, values = schema.get("type", "object"), schema.get("enum", [schema["const"]] if "const" in schema else None)
    if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        return False
    if isinstance(values, list) and not any(isinstance(value, dict) for value in values):
        return False
    for key in ("anyOf", "oneOf"):
        branches = schema.get(key)
        if isinstance(branches, list) and not any(describes_object(part, document, depth - 1) for part in branches):
            return False
    conditions = schema.get("allOf")
    conditions = [*conditions] if isinstance(conditions, list) else []
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: object = document
        for part in pointer(reference):
            target = target.get(part) if isinstance(target, dict) else None
        conditions.append(target)
    return all(describes_object(part, document, depth - 1) for part in conditions)


def _names_none(schema: object) -> bool:
    """Whether a schema is what clients write for a function without parameters: an object whose properties are none."""
    if not isinstance(schema, dict) or schema.get("type") != "object" or schema.get("properties") != {}:
        return False
    allows = schema.get("additionalProperties", False)  # others are allowed where that is said
    return allows is False and not any(schema.get(key) for key in ("required", "patternProperties", "minProperties"))


def _function(tool: Tool) -> Mapping[str, object]:
    function = tool["function"]
    assert isinstance(function, Mapping), "the reader of the API has checked it"
    return function


def _quoted(text: str) -> str:
    """A string of the grammar; the empty one stands for nothing."""
    return json.dumps(text, ensure_ascii=False) if text else ""
