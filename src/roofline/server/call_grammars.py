"""Grammars of answers that call tools, in the format that the model writes and its parser reads."""

import json
from collections.abc import Collection, Mapping, Sequence

from roofline.common.errors import RequestError
from roofline.engine.constraint import Constraint
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
    return Constraint.of_lark("\n".join([*rules, *_call_rules(form, tools)]) + "\n")


def optional_calls(
    form: str, tools: Sequence[Tool], strict: Collection[str], *, several: bool, thinking: bool
) -> Constraint:
    """What an answer is that may call these tools, or none: text is free, and a call that begins is held to the schema
    of its tool, where that is strict, else to an object.

    In a format without a mark before calls, an answer in text begins with another character than an object does.

    Args:
        strict: names of tools. The others are as for `forced_calls`.

    Raises RequestError for a format whose mark is a token of its own, which text cannot be told from.
    """
    if form == "mistral":
        message = "strict: calls in this model's format are held to a schema only where the answer must be a call. "
        remedy = 'Give tool_choice "required" or the name of the tool, or strict false.'
        raise RequestError(400, "unsupported_parameter", message + remedy, param="tools")
    if form == "hermes":
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
    free = [{"function": {**_function(tool), "parameters": None}} for tool in tools]
    schemas = [tool if _function(tool)["name"] in strict else other for tool, other in zip(tools, free, strict=True)]
    return Constraint.of_lark("\n".join([*rules, *_call_rules(form, schemas)]) + "\n")


def _calls(form: str, several: bool) -> str:
    return f"call ({_quoted(FRAMES[form][1])} call)*" if several else "call"


def _call_rules(form: str, tools: Sequence[Tool]) -> list[str]:
    key = FRAMES[form][3]
    rules = ["call: " + " | ".join(f"call_{number}" for number in range(len(tools)))]
    for number, tool in enumerate(tools):
        function = _function(tool)
        head = f'{{"name": {json.dumps(function["name"])}, "{key}": '
        schema = json.dumps(function.get("parameters") or {"type": "object"}, ensure_ascii=False)
        rules.append(f'call_{number}: {_quoted(head)} arguments_{number} "}}"')
        rules.append(f"arguments_{number}: %json {schema}")
    return rules


def _function(tool: Tool) -> Mapping[str, object]:
    function = tool["function"]
    assert isinstance(function, Mapping), "the reader of the API has checked it"
    return function


def _quoted(text: str) -> str:
    """A string of the grammar; the empty one stands for nothing."""
    return json.dumps(text, ensure_ascii=False) if text else ""
