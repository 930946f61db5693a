"""Tools for models whose chat template does not write them: told in the system message, in the model's own format.

Calls and results of earlier turns go to the template where it writes those, else they become plain text.
"""

import json
from collections.abc import Mapping, Sequence

from roofline.common.json_types import JsonObject
from roofline.text.replies.call_format import CallFormat
from roofline.text.replies.formats.table import CALL_FORMATS
from roofline.text.replies.reply_format import ReplyFormat
from roofline.text.templates.marked_text import MarkedText

Message = Mapping[str, object]


def with_tools_as_text(messages: Sequence[Message], tools: Sequence[Message], form: ReplyFormat) -> list[Message]:
    """The same conversation with its tools in the system message; form: how the model writes calls.

    Where calls become text: results in a row, and what the user says right behind them, are one turn of the user's,
    since many templates want roles to alternate.
    """
    calls = CALL_FORMATS[form.calls]
    plain = [_without_empty(message) for message in messages] if form.takes_calls else _as_texts(messages, calls)
    if not tools:
        return plain
    functions = [_function(tool) for tool in tools]
    told = calls.instructions(functions, own_results=form.takes_calls)
    if plain and plain[0].get("role") == "system":
        before = (f"{plain[0].get('content') or ''}\n\n", False)
        return [{**plain[0], "content": MarkedText.of((before, *told))}, *plain[1:]]
    return [{"role": "system", "content": MarkedText.of(told)}, *plain]


def _without_empty(message: Message) -> Message:
    """A message without a text that is empty beside calls: templates that ask whether there is one would take it."""
    if message.get("tool_calls") and message.get("content") == "":
        return {**message, "content": None}
    return message


def _as_texts(messages: Sequence[Message], calls: type[CallFormat]) -> list[Message]:
    plain: list[Message] = []
    behind_result = False
    for message in messages:
        turn, is_result = _as_text(message, calls), message.get("role") == "tool"
        behind_result = behind_result and turn.get("role") == "user"
        if behind_result:
            turn = {**turn, "content": f"{plain.pop()['content']}\n{turn.get('content') or ''}"}
        plain.append(turn)
        behind_result = behind_result or is_result
    return plain


def _as_text(message: Message, calls: type[CallFormat]) -> Message:
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"}
    made = message.get("tool_calls")
    if not isinstance(made, list) or not made:
        return message
    texts = [str(message["content"])] if message.get("content") else []
    functions = [_function(call) for call in made]
    texts += [calls.written(str(function["name"]), _arguments(function)) for function in functions]
    return {"role": message["role"], "content": "\n".join(texts)}


def _function(owner: Message) -> JsonObject:
    function = owner["function"]
    assert isinstance(function, dict), "whoever read the request or the file has checked it"
    return function


def _arguments(function: JsonObject) -> JsonObject:
    """The arguments of a call, which some files have as the text of an object."""
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    return dict(arguments) if isinstance(arguments, Mapping) else {}
