"""What the file of an answer tells, read by the layouts in which the server writes answers.

Nothing is passed over: a field that answers have not, and one that is missing, make it unknown what a reader of the
file takes for the answer. Fields that are null say nothing and may stand anywhere.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from roofline.common.json_types import JsonObject

HEAD = frozenset(("id", "object", "created", "model", "system_fingerprint", "choices", "usage", "receipt"))
CHOICE = frozenset(("index", "finish_reason", "logprobs", "prompt_logprobs", "token_ids", "prompt_token_ids"))
MESSAGE = frozenset(("role", "content", "reasoning_content", "tool_calls"))
RESPONSE = frozenset(
    ("id", "object", "created_at", "completed_at", "status", "incomplete_details", "model", "output", "store")
) | frozenset(("system_fingerprint", "usage", "receipt"))
REPEATED = frozenset(  # of its request
    (
        *("background", "instructions", "max_output_tokens", "max_tool_calls", "metadata", "parallel_tool_calls"),
        *("previous_response_id", "prompt_cache_key", "reasoning", "safety_identifier", "service_tier"),
        *("temperature", "text", "tool_choice", "tools", "top_logprobs", "top_p", "truncation", "user"),
    )
)
ITEMS = {
    "message": (
        {"id", "type", "status", "role", "content"},
        "output_text",
        {"type", "text", "annotations", "logprobs"},
    ),
    "reasoning": ({"id", "type", "status", "summary", "content"}, "reasoning_text", {"type", "text"}),
}
CALL_ITEM = frozenset(("id", "type", "status", "call_id", "name", "arguments"))
Parts = tuple[tuple[str, ...], ...]  # ("text", ...), ("reasoning", ...), ("call", name, arguments)


class NoTextError(Exception):
    """Texts cannot be compared; the message says why."""


@dataclass(frozen=True)
class ToldChoice:
    """What an answer tells of a choice. parsed: whether reasoning and calls were taken out of the text; items: whether
    their order is told; finish_reason: as the receipt has it, None: it is not told; token_ids, prompt_ids: where they
    are told."""

    parts: Parts
    parsed: bool = True
    items: bool = False
    finish_reason: object = None
    token_ids: object = None
    prompt_ids: object = None


@dataclass(frozen=True)
class ToldAnswer:
    """A complete answer. facts: its other fields that a receipt or a request says something of, by name; silent:
    whether it is the last event of a stream, which has no text."""

    choices: list[ToldChoice]
    facts: JsonObject = field(default_factory=dict)
    silent: bool = False


def read_told(answer: JsonObject) -> ToldAnswer:
    """What an answer of one of OpenAI's three APIs tells. Raises NoTextError."""
    fields = {name: value for name, value in answer.items() if value is not None}
    try:
        if "output" in fields and "choices" not in fields:
            return _of_response(_fields_of("the answer", answer, RESPONSE | REPEATED))
        return _of_choices(_fields_of("the answer", answer, HEAD))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise NoTextError("the file has no choices as an answer has them") from error


def _fields_of(where: str, value: object, names: Collection[str]) -> JsonObject:
    """The fields of an object that are not null. Raises NoTextError for one that is not among `names`."""
    if not isinstance(value, dict):
        raise TypeError
    fields = {name: field_value for name, field_value in value.items() if field_value is not None}
    for name in fields:
        if name not in names:
            raise NoTextError(f"{where} has a field {name[:100]!r}, and answers have none of this name there")
    return fields


def _expect(where: str, value: object, *expected: str) -> None:
    if value is not None and value not in expected:
        raise NoTextError(f"{where} is {str(value)[:100]!r}")


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _of_choices(fields: JsonObject) -> ToldAnswer:
    """An answer of chats or completions."""
    _expect("its object", fields.get("object"), "chat.completion", "text_completion", "chat.completion.chunk")
    choices = [_of_choice(number, choice) for number, choice in enumerate(fields["choices"])]
    facts = {name: value for name, value in fields.items() if name not in ("object", "choices", "receipt")}
    if not choices:
        if "usage" in fields or fields.get("object") not in ("chat.completion.chunk", "text_completion"):
            raise NoTextError("the answer tells none")
        return ToldAnswer([], facts, silent=True)
    parsed = {choice.parsed for choice in choices}
    if len(parsed) > 1:
        raise NoTextError("it mixes chats and completions")
    _expect("its object", fields.get("object"), "chat.completion" if parsed.pop() else "text_completion")
    return ToldAnswer(choices, facts)


def _of_choice(number: int, value: object) -> ToldChoice:
    parsed = isinstance(value, dict) and value.get("message") is not None
    fields = _fields_of(f"choice {number}", value, CHOICE | {"message" if parsed else "text"})
    if type(fields["index"]) is not int or fields["index"] != number:
        raise NoTextError(f"choice {number} has the index {str(fields['index'])[:100]}")
    reason = fields.get("finish_reason")
    if not parsed:
        parts: Parts = (("text", _text(fields["text"])),)
    else:
        parts = _of_message(fields["message"])
        if reason == "tool_calls" and any(part[0] == "call" for part in parts):
            reason = "stop"
        elif reason == "stop" and any(part[0] == "call" for part in parts):
            reason = "stop with calls"  # no server says that
    ids = fields.get("token_ids"), fields.get("prompt_token_ids")
    return ToldChoice(parts, parsed, False, reason, *ids)


def _of_message(value: object) -> Parts:
    fields = _fields_of("a message", value, MESSAGE)
    _expect("the role of a message", fields.get("role"), "assistant")
    calls: list[tuple[str, ...]] = []
    for call in fields.get("tool_calls", ()):
        call = _fields_of("a call", call, ("id", "type", "function"))
        _expect("the type of a call", call.get("type"), "function")
        function = _fields_of("a call", call["function"], ("name", "arguments"))
        calls.append(("call", _text(function["name"]), _text(function["arguments"])))
    texts = (("reasoning", fields.get("reasoning_content", "")), ("text", fields.get("content", "")))
    return parts_of([*((kind, _text(text)) for kind, text in texts), *calls])


def parts_of(parts: Iterable[tuple[str, ...]]) -> Parts:
    """Those that say something."""
    return tuple(part for part in parts if part[0] == "call" or part[1])


def _of_response(fields: JsonObject) -> ToldAnswer:
    """An answer of the Responses API."""
    _expect("its object", fields.get("object"), "response")
    parts, statuses = [], []
    for number, item in enumerate(fields["output"]):
        part, status = _of_item(number, item)
        parts.append(part)
        statuses.append(status)
    facts = {name: value for name, value in fields.items() if name not in ("object", "output", "receipt", "status")}
    reason = {"completed": "stop", "incomplete": "length"}.get(fields.get("status", ""), fields.get("status"))
    last = statuses[-1] if statuses and statuses[-1] is not None else None
    if any(status not in (None, "completed") for status in statuses[:-1]):
        raise NoTextError("an item before the last is not completed")
    if last is not None and reason is not None and last != fields["status"]:
        raise NoTextError(f"its status is {str(fields['status'])[:100]!r}, and that of its last item another")
    details = facts.pop("incomplete_details", None)
    if details is not None and (reason != "length" or details != {"reason": "max_output_tokens"}):
        raise NoTextError(f"its incomplete_details do not fit its status, {str(fields.get('status'))[:100]!r}")
    return ToldAnswer([ToldChoice(parts_of(parts), True, True, reason)], facts)


def _of_item(number: int, item: Mapping[str, object]) -> tuple[tuple[str, ...], object]:
    """What an item says, and its status."""
    where, kind = f"output {number}", item["type"]
    if kind == "function_call":
        fields = _fields_of(where, item, CALL_ITEM)
        return ("call", _text(fields["name"]), _text(fields["arguments"])), fields.get("status")
    if kind not in ITEMS:
        raise NoTextError(f"{where} is of type {str(kind)[:100]!r}")
    names, content_type, content_names = ITEMS[str(kind)]
    fields = _fields_of(where, item, names)
    _expect(f"the role of {where}", fields.get("role"), "assistant")
    text = ""
    for part in fields["content"]:
        content = _fields_of(where, part, content_names)
        _expect(f"the content of {where}", content.get("type"), content_type)
        text += _text(content["text"])
        if content.get("annotations"):
            raise NoTextError(f"{where} has annotations, and answers have none")
    if fields.get("summary"):
        raise NoTextError(f"{where} has a summary, and answers have none")
    return ("text" if kind == "message" else "reasoning", text), fields.get("status")
