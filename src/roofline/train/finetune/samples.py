"""Samples as all forms of data are read into: chats, texts with a continuation, and plain texts."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from roofline.common.errors import ConfigError
from roofline.common.fields import describe
from roofline.common.json_files import RepeatedKeyError, unique_keys
from roofline.train.data.record_fields import RecordFields
from roofline.train.finetune.sample_weights import SWITCHES, is_trained

Message = Mapping[str, object]
ROLES = ("system", "user", "assistant", "tool")
SHAREGPT_ROLES = ("system", "human", "gpt", "function_call", "observation")  # those of its own documentation
_ROLES = {
    **{name: name for name in ROLES},
    **{"developer": "system", "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bard": "assistant"},
    **{
        "bing": "assistant",
        "model": "assistant",
        "bot": "assistant",
        "function_call": "assistant",
        "observation": "tool",
        "function": "tool",
    },
    **{"function_response": "tool", "tool_response": "tool"},
}
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_KEPT = ("name", "tool_call_id", *REASONING_KEYS)


@dataclass(frozen=True)
class Chat:
    """A conversation for the model's chat template. answers: places of the messages whose text is trained on."""

    messages: tuple[Message, ...]
    tools: tuple[Message, ...] = ()
    answers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Continuation:
    """A text without a template, and what goes on from it, which is trained on."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Text:
    """A plain text; all of it is trained on."""

    text: str


Sample = Chat | Continuation | Text


def text(record: Mapping[str, object], key: str, where: str, empty: bool = False) -> str:
    """The text under a key. Raises ConfigError where there is none; empty: it may be missing or without characters."""
    value = record.get(key)
    if value is None and empty:
        return ""
    if isinstance(value, str) and not (value.strip() or empty):
        raise ConfigError(f"{where}: {key} is empty; remove the record, or give it a text")
    if value is None and key not in record:
        raise ConfigError(f"{where}: there is no {key}: give the record one, or remove it")
    if not isinstance(value, str):
        raise ConfigError(f"{where}: {key} is {describe(value)}, not a text")
    return value


def question(prompt: str, answer: str, system: str = "") -> Chat:
    """A chat of a question and its answer."""
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    return Chat(tuple(messages), answers=(len(messages) - 1,))


def chat(turns: object, tools: object, where: str, last_only: bool = False, remarks: set[str] | None = None) -> Chat:
    """A chat of OpenAI's messages, or of ShareGPT's turns (`from` and `value`).

    An assistant's message with a `weight` of 0, or whose `train`, `training` or `loss` is false, is not trained on;
    last_only: nor is any but the last. What follows the last answer is left out. remarks: gets what of the messages is
    not used. Raises ConfigError that names the message.
    """
    if not isinstance(turns, list):
        raise ConfigError(f"{where}: the messages are {describe(turns)}, not a list")
    remarks = set() if remarks is None else remarks
    messages, answers = [], []
    for number, turn in enumerate(turns):
        place = f"{where}: message {number}"
        if not isinstance(turn, Mapping):
            raise ConfigError(f"{place} is {describe(turn)}, not an object")
        fields = RecordFields(turn)
        messages.append(_message(fields, place))
        if messages[-1]["role"] == "assistant":
            if is_trained(fields, place, remarks):
                answers.append(number)
        else:
            fields.use_where(SWITCHES, lambda value: value in (0, "0", "false"))  # nor would it be trained on
        remarks |= {f"{key} of messages" for key in fields.unread}
    if not answers:
        raise ConfigError(f"{where}: {_without_answers(messages)}")
    if last_only:
        answers = answers[-1:]
    if answers[-1] + 1 < len(messages):
        remarks.add("messages behind the last answer that is trained on")
    return Chat(tuple(messages[: answers[-1] + 1]), tools_of(tools, where), tuple(answers))


def _without_answers(messages: Sequence[Message]) -> str:
    """Why nothing of a chat is to be trained on."""
    count = sum(message["role"] == "assistant" for message in messages)
    if not count:
        return "no message of an assistant is there to train on"
    each = "its answer has" if count == 1 else f"all {count} answers have"
    return f"{each} a weight of 0 (or false under train, training or loss), so nothing of it is trained on: remove it"


def is_empty(message: Message) -> bool:
    """Whether an answer says nothing: no text, no call of a tool and no reasoning."""
    texts = (message.get(key) for key in ("content", *REASONING_KEYS))
    return not message.get("tool_calls") and not any(str(text or "").strip() for text in texts)


def role_of(turn: object) -> str | None:
    """The role of a message in OpenAI's words, however it is written; None where it has none that is known."""
    return _ROLES.get(str(turn.get("role", turn.get("from")))) if isinstance(turn, Mapping) else None


def _message(turn: Mapping[str, object], where: str) -> dict[str, object]:
    name = turn.get("role") if "role" in turn else turn.get("from")
    role = _ROLES.get(str(name))
    if role is None:
        names = ROLES if "role" in turn else SHAREGPT_ROLES
        raise ConfigError(f"{where}: its role is {describe(name)}, not one of {', '.join(names)}")
    content = turn.get("content") if "content" in turn else turn.get("value")
    if isinstance(content, list):
        content = "\n".join(_part(part, where) for part in content)
    calls = [_call(call, where) for call in _calls(turn, name, content, where)]
    if calls and name == "function_call":
        content = None
    if content is None and not calls:
        is_there = any(key in turn for key in ("content", "value"))
        what = "its content is null" if is_there else "it has no content"
        also = ", or calls of tools" if role == "assistant" else ""
        raise ConfigError(f"{where}: {what}: give it a text{also}, or remove the message")
    if not isinstance(content, str) and not calls:
        raise ConfigError(f"{where}: its content is {describe(content)}, not a text")
    message: dict[str, object] = {"role": role, "content": content or ""}
    message |= {key: turn[key] for key in _KEPT if isinstance(turn.get(key), str)}
    return message | ({"tool_calls": calls} if calls else {})


def _part(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
        raise ConfigError(f"{where}: a part of its content is no text; images and audio are not trained on")
    return str(part["text"])


def _calls(turn: Mapping[str, object], name: object, content: object, where: str) -> list[object]:
    """The calls of tools in a message, which older files write otherwise."""
    if name == "function_call":  # ShareGPT: the value is the call
        return [{"function": _parsed(content, where)}]
    if isinstance(turn.get("function_call"), Mapping):
        return [{"function": turn["function_call"]}]
    calls = turn.get("tool_calls")
    if isinstance(calls, str) and calls.strip():
        calls = _parsed(calls, f"{where}: its tool_calls")
    if calls and not isinstance(calls, list):
        raise ConfigError(f"{where}: its tool_calls are {describe(calls)}, not a list")
    return calls if isinstance(calls, list) else []


def _call(call: object, where: str) -> dict[str, object]:
    """Templates write the arguments as JSON themselves, so they get an object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ConfigError(f"{where}: a call of a tool has no function with a name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _parsed(arguments or "{}", f"{where}: arguments of {function['name']}")
    if not isinstance(arguments, Mapping | None):
        raise ConfigError(f"{where}: the arguments of {function['name']} are {describe(arguments)}, not an object")
    number = call.get("id") if isinstance(call, Mapping) else None
    own = {"id": number} if isinstance(number, str) else {}
    return own | {"type": "function", "function": {"name": function["name"], "arguments": dict(arguments or {})}}


def _parsed(value: object, where: str) -> object:
    try:
        return json.loads(value, object_pairs_hook=unique_keys) if isinstance(value, str) else value
    except RepeatedKeyError as error:
        raise ConfigError(f"{where}: {error}") from error
    except ValueError as error:
        raise ConfigError(f"{where}: it is no JSON: {error}") from error


def tools_of(tools: object, where: str) -> tuple[Message, ...]:
    """The tools of a record, as OpenAI's API has them: a list, its JSON, or functions without their type."""
    value = _parsed(tools, f"{where}: tools") if isinstance(tools, str) and tools.strip() else tools
    if not value:
        return ()
    if not isinstance(value, Sequence) or not all(isinstance(each, Mapping) for each in value):
        raise ConfigError(f"{where}: tools are {describe(value)}, not a list of objects")
    wrapped = tuple(each if "function" in each else {"type": "function", "function": each} for each in value)
    for each in wrapped:
        function = each["function"]
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ConfigError(f"{where}: a tool has no name")
    return wrapped
