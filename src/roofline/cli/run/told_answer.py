"""Whether the texts of an answer, beside its receipt, are those of the receipt's ids.

A receipt has no text. What a server tells depends on things that no receipt has: which special tokens were shown,
which tools were offered, how reasoning is marked. So the ids are turned into text in every way that a server has, and
an answer is changed where none gives what it tells.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from roofline.common.json_types import JsonObject

if TYPE_CHECKING:
    from roofline.engine.receipts.receipt import Choice, Receipt
    from roofline.server.generation import Generation
    from roofline.server.text_side import TextSide
    from roofline.text.replies.parser import ReplyParser


@dataclass(frozen=True)
class Told:
    """What an answer tells of a choice. calls: name and arguments of each call of a tool; parsed: whether reasoning and
    calls were taken out of the text."""

    text: str
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    parsed: bool = True


class NoTextError(Exception):
    """Texts cannot be compared; the message says why."""


def changed_text(answer: JsonObject, receipt: "Receipt", text: "TextSide", request: "Generation | None") -> str | None:
    """What an answer tells that its receipt's ids do not say, in a sentence; None: all texts are those of the ids.

    Raises NoTextError where they cannot be compared.
    """
    replies = _replies_of(answer)
    by_number = len(replies) == len(receipt.choices)  # else `best_of` left some out
    for number, each in enumerate(replies):
        choices = [receipt.choices[number]] if by_number else receipt.choices
        readings = [reading for choice in choices for reading in _readings(choice, each, receipt, text, request)]
        if each in readings:
            continue
        if request is None and not each.parsed and any(each.text.endswith(reading.text) for reading in readings):
            raise NoTextError("they may begin with their prompts, which --request says")
        return (
            f"The text of answer {number} is not that of the receipt's ids: it was changed, or another model has them."
        )
    return None


def _replies_of(answer: JsonObject) -> list[Told]:
    """The choices of an answer of one of OpenAI's three APIs. Raises NoTextError."""
    try:
        if "output" in answer:
            if "choices" in answer:
                raise ValueError("which of the two is the answer?")
            return [_of_items(answer["output"])]
        choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
        replies = [
            _of_message(each["message"]) if "message" in each else Told(each["text"], parsed=False) for each in choices
        ]
        if any("message" in each and "text" in each for each in choices):
            raise ValueError("which of the two is the text?")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise NoTextError("the file has no choices as an answer has them") from error
    if not replies:
        raise NoTextError("the answer tells none")
    return replies


def _of_message(message: JsonObject) -> Told:
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return Told(
        message.get("content") or "",
        message.get("reasoning_content") or "",
        tuple((call["name"], call["arguments"]) for call in calls),
    )


def _of_items(items: Sequence[JsonObject]) -> Told:
    """The items of a response, whose texts are joined."""
    texts = {"message": "", "reasoning": ""}
    for item in items:
        if item["type"] != "function_call":
            texts[item["type"]] += "".join(part["text"] for part in item["content"])
    calls = tuple((item["name"], item["arguments"]) for item in items if item["type"] == "function_call")
    return Told(texts["message"], texts["reasoning"], calls)


def _readings(
    choice: "Choice", reply: Told, receipt: "Receipt", text: "TextSide", request: "Generation | None"
) -> Iterator[Told]:
    """All that a server may tell of a choice's ids."""
    from roofline.text.replies.parser import PlainReply, Reply

    cut = choice.finish_reason == "length"
    for at_start, shown in _shown(choice, text):
        for include_stop in (False, True) if receipt.sampling.stop else (False,):
            for parser in _parsers(reply, request) if reply.parsed else [PlainReply()]:
                stream = text.stream(
                    receipt.sampling.stop,
                    at_start=at_start,
                    shown=shown,
                    include_stop=include_stop,
                    min_tokens=receipt.sampling.min_tokens,
                    reply=parser,
                )
                reading = Reply()
                reading.add([*stream.push(_text_ids(choice)).parts, *stream.end(cut=cut).parts])
                calls = tuple((call.name, call.arguments) for call in reading.calls)
                yield Told(reading.text, reading.reasoning, calls, reply.parsed)
                if not reply.parsed and request is not None and request.echo:
                    yield Told(request.echo[choice.prompt] + reading.text, parsed=False)


def _shown(choice: "Choice", text: "TextSide") -> Iterator[tuple[bool, frozenset[int]]]:
    """Whether a choice's ids begin a text, and which special tokens among them are shown: once for each raw text."""
    from roofline.text.replies.reasoning import CLOSE, OPEN
    from roofline.text.replies.reply_format import CALL_MARKS

    marks, thoughts = (text.special_ids(each) for each in ((OPEN, CLOSE, *CALL_MARKS), (OPEN, CLOSE)))
    texts: set[str] = set()
    shown_ids = dict.fromkeys((frozenset[int](), marks, thoughts, text.special_ids()))
    for at_start, visible in product((True, False), shown_ids):
        stream = text.stream((), at_start=at_start, shown=visible)
        raw = stream.push(_text_ids(choice)).text + stream.finish()
        if raw not in texts:
            texts.add(raw)
            yield at_start, visible


def _text_ids(choice: "Choice") -> Sequence[int]:
    """The ids of a choice without one that only ends it, which is no text."""
    return choice.ids[:-1] if isinstance(choice.stop, int) else choice.ids


def _parsers(reply: Told, request: "Generation | None") -> Iterator["ReplyParser"]:
    """What takes replies apart: the request's own, and those of servers that were told the format of a model."""
    from roofline.text.replies.parser import FirstCall, PlainReply
    from roofline.text.replies.reply_format import CALL_FORMATS, ReplyFormat

    yield PlainReply()
    if request is not None:
        yield request.parser()
    offered = frozenset(name for name, _ in reply.calls) | {""}  # no tool has an empty name: some were offered
    for calls, thinks, thinking, names in product(CALL_FORMATS, (False, True), (False, True), (offered, ())):
        form = ReplyFormat(calls, thinks, takes_tools=True)
        yield form.parser(names, thinking=thinking)
        if names:
            yield FirstCall(form.parser(names, thinking=thinking))
