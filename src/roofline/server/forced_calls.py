"""Answers that must call a tool: a grammar of the calls, in the format that the model writes and its parser reads."""

import json
from collections.abc import Mapping, Sequence

from roofline.engine.constraint import Constraint
from roofline.text.replies.call_formats import HermesCalls, MistralCalls
from roofline.text.replies.reasoning import CLOSE

Tool = Mapping[str, object]
OPEN, END = f"{HermesCalls.open}\n", f"\n{HermesCalls.close}"
# Of each format: what stands before the first call, between two, and after the last, and the key of the arguments.
FRAMES = {
    "hermes": (OPEN, f"{END}\n{OPEN}", END, "arguments"),
    "llama3": ("", "; ", "", "parameters"),
    "json": ("", "; ", "", "arguments"),
    "mistral": (f"{MistralCalls.open}[", ", ", "]", "arguments"),
}


def forced_calls(form: str, tools: Sequence[Tool], *, several: bool, thinking: bool) -> Constraint:
    """What an answer is that calls one of these tools, and nothing else.

    Args:
        form: a name of CALL_FORMATS.
        several: whether it may call more than one.
        thinking: the prompt ends within the reasoning, which comes first then.
    """
    before, between, after, key = FRAMES[form]
    calls = "call" if not several else f"call ({_quoted(between)} call)*"
    rules = [f"start: {'thoughts ' if thinking else ''}{_quoted(before)} {calls} {_quoted(after)}"]
    if thinking:
        rules.append(f"thoughts[suffix={_quoted(CLOSE)}]: /(.|\\n)*/")
    rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(tools))))
    for number, tool in enumerate(tools):
        function = tool["function"]
        assert isinstance(function, Mapping), "the reader of the API has checked it"
        head = f'{{"name": {json.dumps(function["name"])}, "{key}": '
        schema = json.dumps(function.get("parameters") or {"type": "object"}, ensure_ascii=False)
        rules.append(f'call_{number}: {_quoted(head)} arguments_{number} "}}"')
        rules.append(f"arguments_{number}: %json {schema}")
    return Constraint.of_lark("\n".join(rules) + "\n")


def _quoted(text: str) -> str:
    """A string of the grammar; the empty one stands for nothing."""
    return json.dumps(text, ensure_ascii=False) if text else ""
