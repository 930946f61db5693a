"""Chat templates that add the arguments of calls to a text, as DeepSeek's do: they take them as the text of JSON.

transformers gives templates what a caller has, most templates write an object themselves (`tojson`), and an object is
what conversations have here.
"""

import json
from collections.abc import Callable, Mapping, Sequence

from roofline.common.errors import RequestError

_PROBE = "roofline_probe"
Messages = Sequence[Mapping[str, object]]


def reads_arguments_as_text(source: str, render: Callable[[Messages], str]) -> bool:
    """Whether a template writes the arguments of a call when they are a text, and fails on them as an object.

    source: Jinja, which is rendered only where it reads arguments; render: what it makes of messages.
    """
    if "tool_calls" not in source or "arguments" not in source:
        return False
    return not _writes(render, {_PROBE: 1}) and _writes(render, json.dumps({_PROBE: 1}))


def with_texts(messages: Messages) -> list[Mapping[str, object]]:
    """The messages with the arguments of each call as the text of JSON."""
    return [_with_texts(message) for message in messages]


def _with_texts(message: Mapping[str, object]) -> Mapping[str, object]:
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    if not isinstance(calls, Sequence):
        return message
    return {**message, "tool_calls": [_call_with_text(call) for call in calls]}


def _call_with_text(call: object) -> object:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if not isinstance(arguments, Mapping):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}}


def _writes(render: Callable[[Messages], str], arguments: object) -> bool:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages: list[Mapping[str, object]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "b"},
    ]
    try:
        return _PROBE in render(messages)
    except RequestError:  # it fails on such a call
        return False
