"""Grammars of answers that call tools, in the format that the model writes and its parser reads."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

from roofline.common.json_types import JsonObject
from roofline.engine.constraint import MAX_DEPTH, Constraint, refuse
from roofline.engine.constraints.schemas import check, pointer
from roofline.text.replies.call_format import CallFormat
from roofline.text.replies.call_grammar import CallGrammar, Schema, without
from roofline.text.replies.formats.table import CALL_FORMATS
from roofline.text.replies.reasoning import THINK, ThoughtMarks

Tool = Mapping[str, object]
MOST_CALLS = 16  # of an answer that calls alone: a small model calls again and again, and nothing else would end it
ANY_OBJECT = {"type": "object"}
NO_IDS: Mapping[str, int] = MappingProxyType({})


def forced_calls(
    form: str,
    tools: Sequence[Tool],
    *,
    several: bool,
    thinking: bool,
    thoughts: ThoughtMarks = THINK,
    special_ids: Mapping[str, int] = NO_IDS,
) -> Constraint:
    """What an answer is that calls one of these tools, and nothing else.

    Args:
        form: a name of CALL_FORMATS.
        several: whether it may call more than one.
        thinking: the prompt ends within the reasoning, which comes first then.
        thoughts: what stands around reasoning.
        special_ids: of marks that are special tokens.
    """
    calls, grammar = CALL_FORMATS[form], CallGrammar(special_ids)
    before, after = grammar.literal(calls.frame.before), grammar.literal(calls.frame.after)
    first, rules = _first(calls, grammar, thoughts, thinking=thinking)
    rules = [f"start: {first} {before} {_calls(calls, grammar, several)} {after}", *rules]
    return _constraint(rules, calls, grammar, tools, map(schema_of_calls, tools))


def optional_calls(
    form: str,
    tools: Sequence[Tool],
    strict: Collection[str],
    *,
    several: bool,
    thinking: bool,
    thoughts: ThoughtMarks = THINK,
    special_ids: Mapping[str, int] = NO_IDS,
) -> Constraint:
    """What an answer is that may call these tools, or none: text is free, and a call that begins is held to the schema
    of its tool, where that is strict, else to an object.

    In a format without a mark before calls, an answer in text begins with another character than an object does.

    Args:
        strict: names of tools. The others are as for `forced_calls`.
    """
    calls, grammar = CALL_FORMATS[form], CallGrammar(special_ids)
    if calls.tells_reasoning:
        first, rules = calls.prologue(grammar, thinking=thinking)
        forms = (f"{grammar.literal(calls.frame.before)} call", f"{grammar.literal(calls.text_before)} TEXT")
        rules = [f"start: {first} ({' | '.join(forms)})", *rules, f"TEXT: {without(*calls.marks)}"]
    elif calls.is_marked:
        mark = calls.openings[0]
        behind = grammar.literal(calls.frame.before.removeprefix(mark))
        after = grammar.literal(calls.frame.after)
        repeated = "*" if calls.frame.several else "?"
        first, rules = _first(calls, grammar, thoughts, thinking=thinking)
        rules = [
            f"start: {first} (opening {behind} {_calls(calls, grammar, several)} {after}){repeated} TEXT",
            *grammar.until("opening", mark),
            f"TEXT: {without(mark)}",
            *rules,
        ]
    else:
        thought = "thoughts GAP" if thinking else f"({grammar.literal(thoughts.open)} thoughts GAP)?"
        rules = [
            f"start: {thought} ({_calls(calls, grammar, several)} | TEXT)",
            *grammar.until("thoughts", thoughts.close),
            "GAP: /[ \\t\\r\\n]*/",
            'TEXT: /[^ \\t\\r\\n{\\[<](.|\\n)*/ | ""',
        ]
    schemas = [schema_of_calls(tool) if _function(tool)["name"] in strict else ANY_OBJECT for tool in tools]
    return _constraint(rules, calls, grammar, tools, schemas)


def _first(
    calls: type[CallFormat], grammar: CallGrammar, thoughts: ThoughtMarks, *, thinking: bool
) -> tuple[str, list[str]]:
    """What an answer begins with before it calls, and the rules that this needs."""
    if calls.tells_reasoning:
        return calls.prologue(grammar, thinking=thinking)
    return ("thoughts", grammar.until("thoughts", thoughts.close)) if thinking else ("", [])


def _calls(calls: type[CallFormat], grammar: CallGrammar, several: bool) -> str:
    if not (several and calls.frame.several):
        return "call"
    return f"call ({grammar.literal(calls.frame.between)} call){{0,{MOST_CALLS - 1}}}"


def _constraint(
    rules: list[str], calls: type[CallFormat], grammar: CallGrammar, tools: Sequence[Tool], schemas: Iterable[Schema]
) -> Constraint:
    """The grammar with a rule for the calls of each tool. schemas: of their arguments; None: it has no parameters."""
    rules = [*rules, "call: " + " | ".join(f"call_{number}" for number in range(len(tools)))]
    for number, (tool, schema) in enumerate(zip(tools, schemas, strict=True)):
        name = str(_function(tool)["name"])
        try:
            rules += calls.call_rules(f"call_{number}", name, schema, grammar)
        except ValueError as error:
            refuse(f"calls of {name!r} cannot be kept to it in the format of this model: {error}")
    return Constraint.of_lark("\n".join(rules) + "\n")


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
