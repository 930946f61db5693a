"""Whether the texts of an answer, beside its receipt, are those of the receipt's ids, and end where it says.

A receipt has no text. What a server tells depends on things that no receipt has: which special tokens were shown,
which tools were offered, how reasoning is marked. So the ids are turned into text in every way that a server has, or
that the request leaves open, and an answer is changed where none gives what it tells.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING

from roofline.cli.run.answer_layout import NoTextError, Parts, ToldAnswer, ToldChoice, parts_of, read_told
from roofline.cli.run.told_beginnings import MOST_BEGINNINGS, possible_beginnings
from roofline.common.json_types import JsonObject

if TYPE_CHECKING:
    from roofline.engine.receipts.receipt import Receipt, ReceiptChoice
    from roofline.server.generation import Generation
    from roofline.server.text_side import TextSide
    from roofline.text.replies.parser import Delta, ReplyParser

PREFIXES = ("chatcmpl-", "cmpl-", "resp_")  # of the ids of answers
DETAILS = ("prompt_tokens_details", "input_tokens_details", "output_tokens_details")  # of caches and cuts: not proven
COUNTED = {"prompt": ("prompt_tokens", "input_tokens"), "answer": ("completion_tokens", "output_tokens")}


def changed_text(answer: JsonObject, receipt: "Receipt", text: "TextSide", request: "Generation | None") -> str | None:
    """What an answer tells that its receipt does not say, in a sentence; None: all is as the receipt says.

    Raises NoTextError where the texts cannot be compared.
    """
    reading = read_told(answer)
    problem = _other_facts(reading, receipt, request)
    if problem is not None or reading.silent:
        return problem
    choices = sorted(receipt.choices, key=lambda choice: (choice.prompt, choice.sample))
    best = request.best if request is not None else None
    count = len(choices) if best is None else best * len(receipt.prompts)
    some = request is None and len(reading.choices) < count  # perhaps by best_of
    if len(reading.choices) != count and not some:
        return f"The answer has {len(reading.choices)} choices, and {count} were asked for."
    remaining = list(choices)
    for number, reply in enumerate(reading.choices):
        # Of best_of the best are told, in an order that no receipt has.
        possible = [choices[number]] if best is None else [each for each in remaining if each.prompt == number // best]
        choice, problem = _choice_of(number, reply, remaining if some else possible, receipt, text, request)
        if choice is None:
            return problem
        remaining.remove(choice)
    if some:
        raise NoTextError(f"{len(reading.choices)} of {count} answers are told; whether by best_of, --request says")
    return None


def _choice_of(
    number: int,
    reply: ToldChoice,
    possible: Sequence["ReceiptChoice"],
    receipt: "Receipt",
    text: "TextSide",
    request: "Generation | None",
) -> tuple["ReceiptChoice | None", str]:
    """Which of the receipt's choices a reply tells, or a sentence about what is wrong. Raises NoTextError."""
    problem = (
        f"The text of answer {number} is not that of the receipt's ids: it was changed, or another model has them."
    )
    readings: list[Parts] = []
    for choice in possible:
        readings = list(_readings(choice, reply, receipt, text, request))
        if reply.parts not in readings:
            continue
        pairs = (reply.finish_reason, choice.finish_reason), (reply.token_ids, choice.ids)
        other = next((pair for pair in pairs if pair[0] is not None and pair[0] != pair[1]), None)
        if other is None and _has_prompt(reply, choice, receipt):
            return choice, ""
        return None, f"Why answer {number} ended, or its ids, are told otherwise than the receipt has them."
    if request is None and not reply.parsed and any(reply.parts[0][1].endswith(each[0][1]) for each in readings):
        raise NoTextError("they may begin with their prompts, which --request says")
    if request is None and reply.parsed:
        prompts = (receipt.prompts[choice.prompt].ids for choice in possible)
        if any(len(possible_beginnings(prompt, text)) > MOST_BEGINNINGS for prompt in prompts):
            raise NoTextError("they may go on from a beginning in their prompts, which --request says")
    return None, problem


def _has_prompt(reply: ToldChoice, choice: "ReceiptChoice", receipt: "Receipt") -> bool:
    """Whether the ids of the prompt, where they are told, are those of the receipt."""
    from roofline.engine.receipts.receipt import hash_of_ids

    ids = reply.prompt_ids
    if ids is None:
        return True
    if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < 1 << 31 for token in ids):
        return False
    return hash_of_ids(ids) == receipt.prompts[choice.prompt].sha256


def _other_facts(answer: ToldAnswer, receipt: "Receipt", request: "Generation | None") -> str | None:
    """Which field beside the texts the receipt, or the request, has otherwise, in a sentence."""
    from roofline.server.routes.responses.read import ResponseGeneration

    expected: JsonObject = dict.fromkeys(("created", "created_at"), receipt.created)
    expected |= {"model": receipt.model, "system_fingerprint": receipt.fingerprint}
    if isinstance(request, ResponseGeneration):
        expected |= request.repeated
    else:
        expected |= {"temperature": receipt.sampling.temperature, "top_p": receipt.sampling.top_p}
        expected["max_output_tokens"] = receipt.sampling.max_tokens
    for name, value in answer.facts.items():
        if name == "id" and value not in [prefix + receipt.id for prefix in PREFIXES]:
            return f"The answer's id is {value!r:.200}, and the receipt is of {receipt.id!r:.100}."
        if name in expected and (
            value != expected[name] or isinstance(value, bool) != isinstance(expected[name], bool)
        ):
            return f"The answer's {name} is {value!r:.200}, and should be {expected[name]!r:.200}."
    usage = answer.facts.get("usage")
    if usage is None:
        return None
    if not isinstance(usage, dict):
        return "The answer's usage is no list of counts by name."
    known = {*COUNTED["prompt"], *COUNTED["answer"], "total_tokens", *DETAILS}
    others = sorted(name for name, value in usage.items() if name not in known and value is not None)
    if others:
        raise NoTextError(f"its usage has {others[0]!r}, which the answers of a server do not have")
    before = sum(prompt.tokens for prompt in receipt.prompts)
    after = sum(len(choice.ids) for choice in receipt.choices)
    counts = dict.fromkeys(COUNTED["prompt"], before) | dict.fromkeys(COUNTED["answer"], after)
    counts["total_tokens"] = before + after
    for name, count in counts.items():
        if usage.get(name, count) != count or isinstance(usage.get(name), bool):
            return f"The answer's usage is another than the {before} and {after} tokens of the receipt."
    return None


def ends_as_said(choice: "ReceiptChoice", receipt: "Receipt", text: "TextSide", request: "Generation | None") -> bool:
    """Whether the text of a choice's ids has its stop string where it ends, and passes none before.

    Whoever reasons or calls tools may pass one: a server need not look for stop strings there.
    """
    if request is not None and _server_ends_there(choice, receipt, text, request):
        return True
    for before, entire in _entire_texts(choice, text, request):
        at = _stop_at(choice, before, entire)
        if at is None:
            continue
        end = len(entire) if not isinstance(choice.stop, str) else len(before)
        if not _passes_stop(receipt, entire[:end], choice, text, request):
            return True
    return False


def _server_ends_there(choice: "ReceiptChoice", receipt: "Receipt", text: "TextSide", request: "Generation") -> bool:
    """Whether a server that reads the request as this ends an answer of these ids where, and by what, the choice says.

    Its parser knows whether the answer goes on within reasoning or a call, where no stop string ends it.
    """
    sampling, ids = receipt.sampling, _text_ids(choice)
    stopped = choice.stop if isinstance(choice.stop, str) else None
    for at_start, shown in _spellings(choice, text, request):
        stream = text.stream(
            sampling.stop, at_start=at_start, shown=shown, min_tokens=sampling.min_tokens, reply=request.parser()
        )
        stream.push(ids[:-1])
        if stream.stopped is None:
            stream.push(ids[-1:])
            stream.end(cut=choice.finish_reason == "length")
            if stream.stopped == stopped:
                return True
    return False


def _passes_stop(
    receipt: "Receipt", done: str, choice: "ReceiptChoice", text: "TextSide", request: "Generation | None"
) -> bool:
    """Whether a text has a stop string that should have ended it. done: what was there before the last id."""
    from roofline.text.replies.reply_format import REPLY_MARKS

    sampling = receipt.sampling
    if not sampling.stop:
        return False
    stream = text.stream((), at_start=True, shown=text.special_ids())
    spelling = stream.push(choice.ids).text + stream.finish()
    if any(mark in spelling for mark in REPLY_MARKS):
        return False
    if request is None:
        calls = spelling.lstrip().startswith(("{", "["))  # in formats without marks
        if calls or possible_beginnings(receipt.prompts[choice.prompt].ids, text):
            return False
    stream = text.stream((), at_start=False)
    early = len(stream.push(choice.ids[: sampling.min_tokens]).text) if sampling.min_tokens else 0
    return any(done.find(stop, max(0, early - len(stop) + 1)) >= 0 for stop in sampling.stop)


def _stop_at(choice: "ReceiptChoice", before: str, entire: str) -> int | None:
    """Where a text is cut: at its stop string, if the last id completes it, else at its end. None: it is not there."""
    if not isinstance(choice.stop, str):
        return len(entire)
    at = entire.find(choice.stop, max(0, len(before) - len(choice.stop) + 1))
    return at if at >= 0 else None


def _entire_texts(choice: "ReceiptChoice", text: "TextSide", request: "Generation | None") -> Iterator[tuple[str, str]]:
    """The texts of a choice's ids as they may be told, each before its last id, and whole."""
    ids = _text_ids(choice)
    for at_start, shown in _spellings(choice, text, request):
        stream = text.stream((), at_start=at_start, shown=shown)
        before = stream.push(ids[:-1]).text
        yield before, before + stream.push(ids[-1:]).text + stream.finish()


def _text_ids(choice: "ReceiptChoice") -> Sequence[int]:
    """The ids of a choice without one that only ends it, which is no text."""
    return choice.ids[:-1] if isinstance(choice.stop, int) else choice.ids


def _spellings(
    choice: "ReceiptChoice", text: "TextSide", request: "Generation | None"
) -> Iterator[tuple[bool, frozenset[int]]]:
    """Whether a choice's ids begin a text, and which special tokens among them are shown: once for each text."""
    from roofline.text.replies.parser import PlainReply
    from roofline.text.replies.reply_format import REPLY_MARKS, THOUGHT_MARKS

    marks, thoughts = (text.special_ids(each) for each in (REPLY_MARKS, THOUGHT_MARKS))
    shown_ids = dict.fromkeys((frozenset[int](), marks, thoughts, text.special_ids()))
    starts: tuple[bool, ...] = (True, False)
    if request is not None:
        starts = (request.at_start and request.params.constraint is None,)
        if request.parser is PlainReply:  # nothing else decides it
            shown_ids = {request.shown: None}
    texts: set[str] = set()
    for at_start, visible in product(starts, shown_ids):
        stream = text.stream((), at_start=at_start, shown=visible)
        raw = stream.push(_text_ids(choice)).text + stream.finish()
        if raw not in texts:
            texts.add(raw)
            yield at_start, visible


def _readings(
    choice: "ReceiptChoice", reply: ToldChoice, receipt: "Receipt", text: "TextSide", request: "Generation | None"
) -> Iterator[Parts]:
    """All that a server may tell of a choice's ids."""
    from roofline.text.replies.parser import PlainReply, TextDelta

    sampling, cut = receipt.sampling, choice.finish_reason == "length"
    includes = (False, True) if request is None else (request.include_stop,)
    begun = possible_beginnings(receipt.prompts[choice.prompt].ids, text)[:MOST_BEGINNINGS] if request is None else ()
    stopped = choice.stop if isinstance(choice.stop, str) else None
    for (at_start, shown), include_stop in product(_spellings(choice, text, request), includes):
        for parser in _parsers(reply, request, begun) if reply.parsed else (PlainReply(),):
            stream = text.stream(
                sampling.stop,
                at_start=at_start,
                shown=shown,
                include_stop=include_stop,
                min_tokens=sampling.min_tokens,
                reply=parser,
            )
            parts = [*stream.push(_text_ids(choice)).parts, *stream.end(cut=cut).parts]
            if stream.stopped != stopped:
                continue
            if reply.parsed:
                yield _in_parts(parts, in_order=reply.items)
            else:
                echo = request.echo[choice.prompt] if request is not None and request.echo else ""
                yield (("text", echo + "".join(part.text for part in parts if isinstance(part, TextDelta))),)


def _in_parts(deltas: Sequence["Delta"], in_order: bool) -> Parts:
    """A reply as an answer tells it: in its order, or reasoning, text and calls each by itself."""
    from roofline.text.replies.parser import CallDelta, ReasoningDelta, Reply

    if not in_order:
        reply = Reply()
        reply.add(deltas)
        calls = [("call", call.name, call.arguments) for call in reply.calls]
        return parts_of([("reasoning", reply.reasoning), ("text", reply.text), *calls])
    parts: list[tuple[str, ...]] = []
    latest: object = None
    for delta in deltas:
        key = delta.number if isinstance(delta, CallDelta) else type(delta)
        if isinstance(delta, CallDelta):
            name, arguments = parts.pop()[1:] if key == latest else (delta.name or "", "")
            parts.append(("call", name, arguments + delta.arguments))
        else:
            kind = "reasoning" if isinstance(delta, ReasoningDelta) else "text"
            parts.append((kind, (parts.pop()[1] if key == latest else "") + delta.text))
        latest = key
    return parts_of(parts)


def _parsers(reply: ToldChoice, request: "Generation | None", beginnings: Sequence[str]) -> Iterator["ReplyParser"]:
    """What takes replies apart: the request's own, and those of servers that were told the format of a model.

    beginnings: from which the reply may go on.
    """
    from roofline.text.replies.begun_reply import BegunReply
    from roofline.text.replies.formats.table import CALL_FORMATS
    from roofline.text.replies.parser import FirstCall, PlainReply
    from roofline.text.replies.reply_format import ReplyFormat

    yield PlainReply()
    if request is not None:
        yield request.parser()
    offered = {"\0": None, **_schemas_of(reply.parts)}  # no tool has that name: some were offered
    tools: tuple[Mapping[str, object], ...] = (offered, {})
    for calls, thinks, thinking, names in product(CALL_FORMATS, (False, True), (False, True), tools):
        form = ReplyFormat(calls, thinks, True, CALL_FORMATS[calls].thoughts)
        for begun in ("", *beginnings):
            for first_alone in (False, True) if names else (False,):
                parser: ReplyParser = form.parser(names, thinking=thinking)
                parser = BegunReply(parser, begun) if begun else parser
                yield FirstCall(parser) if first_alone else parser


def _schemas_of(parts: Parts) -> dict[str, object]:
    """What tools have parameters that calls with these arguments are valid for, by the types of their values: formats
    without types read values by those."""
    from roofline.text.replies.parser import complete_arguments

    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    schemas: dict[str, object] = {}
    for kind, name, *arguments in parts:
        if kind == "call":
            values = complete_arguments("".join(arguments))
            types = {key: {"type": kinds.get(type(value), "null")} for key, value in values.items()}
            schemas[name] = {"type": "object", "properties": types}
    return schemas
