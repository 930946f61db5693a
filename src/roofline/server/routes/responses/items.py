"""Items of a conversation, as clients write them and as they are kept -> turns, as chat templates read them.

Items that follow each other and were written by the assistant are one turn: what it thought, said and called. The turns
depend on the items alone, so a conversation that goes on from a kept response is read as one that is sent at once.
"""

from collections.abc import Mapping, Sequence

from roofline.common.errors import RequestError
from roofline.common.json_types import JsonObject
from roofline.server.body import refuse_unsupported, typed
from roofline.server.routes.openai.messages import arguments_of, object_of
from roofline.server.routes.responses.schema import (
    INSTEAD,
    ITEMS,
    NEUTRAL_ITEM,
    NEUTRAL_PART,
    TEXT_PARTS,
    CallItem,
    CallOutputItem,
    MessageItem,
    Part,
    ReasoningItem,
)
from roofline.server.unanswered import UnansweredCalls

Turn = dict[str, object]


def normal_items(given: str | Sequence[Mapping[str, object]], request: str) -> list[JsonObject]:
    """Items as they are kept and listed: every one has a type, an id and a status, and text stands in parts.

    request: what the ids of items without one are made of. Raises RequestError for items that no model here reads.
    """
    several = [{"role": "user", "content": given}] if isinstance(given, str) else given
    return [_normal(f"input.{number}", f"{request}{number}", item) for number, item in enumerate(several)]


def _normal(where: str, name: str, fields: Mapping[str, object]) -> JsonObject:
    kind = fields.get("type") or "message"
    if not isinstance(kind, str) or kind not in ITEMS:
        remedy = " Give the item itself, or previous_response_id." if kind == "item_reference" else ""
        raise _unsupported(f"{where}.type", f"items of type {str(kind)[:64]!r} are not supported.{remedy}")
    values: dict[str, object] = {**fields, "type": kind}
    refuse_unsupported(values, NEUTRAL_ITEM, INSTEAD, f"{where}.")
    item = typed(ITEMS[kind], values, where)
    common: JsonObject = {"type": kind, "status": item.status or "completed"}
    if isinstance(item, MessageItem):
        part = "output_text" if item.role == "assistant" else "input_text"
        content = _parts(f"{where}.content", item.content or (), part)
        return {"id": item.id or f"msg_{name}", **common, "role": item.role, "content": content}
    if isinstance(item, CallItem):
        called = {"call_id": item.call_id, "name": item.name, "arguments": item.arguments}
        return {"id": item.id or f"fc_{name}", **common, **called}
    if isinstance(item, CallOutputItem):
        output = item.output or ""
        if not isinstance(output, str):
            output = _parts(f"{where}.output", output, "input_text")
        return {"id": item.id or f"fco_{name}", **common, "call_id": item.call_id, "output": output}
    parts = {"summary": item.summary or [], "content": item.content or []}
    thoughts = {name: [part.model_dump() for part in several] for name, several in parts.items()}
    return {"id": item.id or f"rs_{name}", **common, **thoughts}


def _parts(where: str, content: str | Sequence[Mapping[str, object]], kind: str) -> list[JsonObject]:
    """The parts of a content, all of them text of this kind. Raises RequestError for parts that are none."""
    texts = [content] if isinstance(content, str) else []
    for number, fields in enumerate(() if isinstance(content, str) else content):
        place, part = f"{where}.{number}", fields.get("type")
        if isinstance(part, str) and part not in TEXT_PARTS:
            raise _unsupported(place, f"the model reads text, and no parts of type {part[:64]!r}.")
        values = dict(fields)
        refuse_unsupported(values, NEUTRAL_PART, INSTEAD, f"{place}.")
        texts.append(typed(Part, values, place).text)
    more: JsonObject = {"annotations": []} if kind == "output_text" else {}
    return [{"type": kind, "text": text, **more} for text in texts]


def _unsupported(field: str, problem: str) -> RequestError:
    return RequestError(400, "unsupported_parameter", f"{field}: {problem}", param=field)


def turns_of(instructions: str | None, kept: Sequence[JsonObject], new: Sequence[JsonObject]) -> list[Turn]:
    """The turns of a conversation: its instructions, items that were kept, and those of the request.

    Items are as `normal_items` makes them. Raises RequestError for a result of a tool that nobody called, and for a
    call that has none, unless it was cut off, or several.
    """
    turns: list[Turn] = [] if instructions is None else [{"role": "system", "content": instructions}]
    open_turn: Turn | None = None  # the assistant's, which more items may belong to
    unanswered = UnansweredCalls("an item of type function_call_output with this call_id")
    for number, fields in enumerate([*kept, *new], -len(kept)):
        item = ITEMS[fields["type"]].model_validate(fields)
        if isinstance(item, MessageItem) and item.role != "assistant":
            open_turn = None
            role = "system" if item.role == "developer" else item.role
            turns.append({"role": role, "content": _text(item.content or ())})
        elif isinstance(item, CallOutputItem):
            unanswered.answer(item.call_id, f"input.{number}.call_id")
            open_turn = None
            turns.append({"role": "tool", "content": _text(item.output or ()), "tool_call_id": item.call_id})
        else:
            assert not isinstance(item, CallOutputItem), "it has its branch above"
            if isinstance(item, CallItem):
                field = f"input.{number}.call_id" if number >= 0 else "input"
                cut = item.status == "incomplete" or object_of(item.arguments) is None
                unanswered.call(item.call_id, field, cut=cut)
            if open_turn is None or _begins_turn(item, open_turn):
                open_turn = {"role": "assistant", "content": None}
                turns.append(open_turn)
            _add(open_turn, item)
    unanswered.check()
    for turn in turns:
        if turn["content"] is None and "tool_calls" not in turn:  # thoughts alone: the answer was cut off in them
            turn["content"] = ""
    return turns


def _begins_turn(item: MessageItem | CallItem | ReasoningItem, turn: Turn) -> bool:
    """Whether an item of the assistant's cannot belong to its turn so far: thoughts come first, and a second text
    belongs to it only beside calls."""
    if isinstance(item, ReasoningItem):
        return turn["content"] is not None or "tool_calls" in turn
    return isinstance(item, MessageItem) and turn["content"] is not None and "tool_calls" not in turn


def _add(turn: Turn, item: MessageItem | CallItem | ReasoningItem) -> None:
    if isinstance(item, ReasoningItem):
        thoughts = "\n".join(part.text for part in item.content or item.summary or ())
        if thoughts:
            before = turn.get("reasoning_content")
            turn["reasoning_content"] = f"{before}\n{thoughts}" if before else thoughts
    elif isinstance(item, MessageItem):
        turn["content"] = str(turn["content"] or "") + _text(item.content or ())
    else:
        calls = turn.setdefault("tool_calls", [])
        assert isinstance(calls, list), "made here"
        function = {"name": item.name, "arguments": arguments_of(item.arguments)}
        calls.append({"id": item.call_id, "type": "function", "function": function})


def _text(content: str | Sequence[Mapping[str, object]]) -> str:
    """The text of a content; parts are joined by line breaks, as those of messages in chats are."""
    return content if isinstance(content, str) else "\n".join(str(part["text"]) for part in content)
