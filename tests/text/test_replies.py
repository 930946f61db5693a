"""Replies of models taken apart: text, reasoning and calls of tools, the same however the text is cut."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from roofline.text.replies.begun_reply import BegunReply
from roofline.text.replies.escapes import WholeEscapes
from roofline.text.replies.formats.hermes import HermesCalls
from roofline.text.replies.formats.mistral import MistralCalls
from roofline.text.replies.formats.objects import ObjectCalls
from roofline.text.replies.json_scanner import JsonScanner
from roofline.text.replies.parser import (
    CallDelta,
    PlainReply,
    ReasoningDelta,
    Reply,
    ReplyParser,
    ToolCall,
    complete_arguments,
)
from roofline.text.replies.reasoning import ThinkingReply

NAMES = {"weather", "add"}


def hermes() -> HermesCalls:
    return HermesCalls(NAMES)


FORMATS = {
    "plain": PlainReply,
    "hermes": lambda: HermesCalls(NAMES),
    "whole": lambda: WholeEscapes(HermesCalls(NAMES)),
    "object": lambda: ObjectCalls(NAMES),
    "mistral": lambda: MistralCalls(NAMES),
    "thinking hermes": lambda: ThinkingReply(hermes, open=False, within=hermes),
    "open thinking object": lambda: ThinkingReply(lambda: ObjectCalls(NAMES), open=True),
}
CALL = '{"name": "weather", "arguments": {"city": "Ulm", "days": [1, 2.5e3]}}'
LATE_NAME = '{"arguments": {"a": "}"}, "name": "add"}'
ARGUMENTS = '{"city": "Ulm", "days": [1, 2.5e3]}'


def parsed(parser: ReplyParser, pieces) -> Reply:
    reply = Reply()
    for piece in pieces:
        reply.add(parser.push(piece))
    reply.add(parser.finish())
    return reply


def whole(name: str, text: str) -> Reply:
    return parsed(FORMATS[name](), [text])


MARKS = "<tool_call> </tool_call> <tool_ call> [TOOL_CALLS] [ARGS] [TOOL <|python_tag|> <think> </think>"
LETTERS = '[ ] { } , ; " \\ é weather add{}'
OBJECTS = [
    CALL, CALL[:30], CALL[20:], LATE_NAME, '{"name": "add"}', '{"name": "none", "arguments": {}}',
    '{"name": "add", "parameters": "{\\"a\\": 1}"}', '{"name": "add", "arguments": {"x": nul}}',
]  # fmt: skip
LONGER = [
    f"[TOOL_CALLS] [{CALL}, ", f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}", f"<tool_call>\n{CALL}\n", f"[{CALL}, {CALL}",
    f"{CALL}; {CALL}", f"<think>a\n</think>\n{CALL}", f"<tool_call>{CALL[:50]}\\ud83d", "\\ude00", "\\\\",
]  # fmt: skip
PIECES = st.sampled_from([*MARKS.split(), *LETTERS.split(), *OBJECTS, *LONGER, " ", "\n", "a b", "\x00"])


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=100, deadline=None)
@given(st.lists(PIECES, max_size=12), st.data())
def test_a_reply_does_not_depend_on_how_it_is_cut(name, pieces, data):
    text = "".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=20)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    expected = whole(name, text)
    assert parsed(FORMATS[name](), parts) == expected
    assert parsed(FORMATS[name](), text) == expected  # a character at a time
    for call in expected.calls:
        assert call.name in NAMES


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=25, deadline=None)
@given(st.text(st.characters(blacklist_characters="<[{"), max_size=40))
def test_text_without_marks_is_passed_on(name, text):
    reply = whole(name, text)
    told = reply.reasoning if name.startswith("open") else reply.text
    assert told == text.strip(" \t\n\r") if name.startswith("open") else told.strip() == text.strip()
    assert not reply.calls


@pytest.mark.parametrize("calls", [HermesCalls, MistralCalls, ObjectCalls])
@settings(max_examples=100, deadline=None)
@given(st.lists(PIECES, max_size=8), st.data())
def test_a_reply_without_calls_is_told_to_the_letter(calls, pieces, data):
    """White space around what looked like a call is the text's too."""
    text = "".join(pieces)
    cut = data.draw(st.integers(0, len(text)))
    parser = calls(NAMES)
    deltas = [*parser.push(text[:cut]), *parser.push(text[cut:]), *parser.finish()]
    if not any(isinstance(delta, CallDelta) for delta in deltas):
        assert "".join(delta.text for delta in deltas) == text


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (
            "hermes",
            f"I look.\n<tool_call>\n{CALL}\n</tool_call>",
            Reply("I look.", "", [ToolCall("weather", ARGUMENTS)]),
        ),
        (
            "hermes",
            f"<tool_call>{CALL}</tool_call>\n<tool_call>\n" + LATE_NAME + "</tool_call>\nOk.",
            Reply("Ok.", "", [ToolCall("weather", ARGUMENTS), ToolCall("add", '{"a": "}"}')]),
        ),
        ("hermes", '<tool_call>{"name": "add"}', Reply("", "", [ToolCall("add", "{}")])),
        ("hermes", "<tool_call>", Reply("<tool_call>")),
        ("hermes", "<tool_call>no json</tool_call>", Reply("<tool_call>no json</tool_call>")),
        (
            "hermes",
            '<tool_call>{"name": "none", "arguments": {}}</tool_call>',
            Reply('<tool_call>{"name": "none", "arguments": {}}</tool_call>'),
        ),
        ("hermes", f"{CALL} <tool_ca", Reply(f"{CALL} <tool_ca")),
        ("hermes", 'A <tool_call>\n{"na', Reply('A <tool_call>\n{"na')),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1', Reply("", "", [ToolCall("add", '{"a": 1')])),
        ("hermes", '<tool_call>{"name": "add", "arguments": {x', Reply("", "", [ToolCall("add", "{")])),
        (
            "hermes",
            '<tool_call>{"name": "add", "arguments": {x</tool_call> Sorry.',
            Reply("Sorry.", "", [ToolCall("add", "{")]),
        ),
        ("object", f" {CALL}\n", Reply("", "", [ToolCall("weather", ARGUMENTS)])),
        ("object", f"<|python_tag|>{CALL}; {CALL}", Reply("", "", [ToolCall("weather", ARGUMENTS)] * 2)),
        ("object", f"[{CALL}, {CALL}]", Reply("", "", [ToolCall("weather", ARGUMENTS)] * 2)),
        ("object", '{"name": "add", "parameters": "{\\"a\\": 1}"}', Reply("", "", [ToolCall("add", '{"a": 1}')])),
        ("object", '{"answer": 42, "name": "add"}', Reply('{"answer": 42, "name": "add"}')),
        ("object", f"Here: {CALL}", Reply(f"Here: {CALL}")),
        ("object", "<|python_tag|>search.call()", Reply("<|python_tag|>search.call()")),
        ("object", "[1, 2]", Reply("[1, 2]")),
        ("mistral", f"[TOOL_CALLS] [{CALL}, {CALL}]", Reply("", "", [ToolCall("weather", ARGUMENTS)] * 2)),
        ("mistral", 'A [TOOL_CALLS]add[ARGS]{"a": 1}', Reply("A", "", [ToolCall("add", '{"a": 1}')])),
        (
            "mistral",
            '[TOOL_CALLS]add{"a": 1}[TOOL_CALLS]weather{}',
            Reply("", "", [ToolCall("add", '{"a": 1}'), ToolCall("weather", "{}")]),
        ),
        ("mistral", "[TOOL_CALLS]other{}", Reply("[TOOL_CALLS]other{}")),
        ("mistral", "[TOOL_CALLS] [", Reply("[TOOL_CALLS] [")),
        ("thinking hermes", "<think>\nHm.\n\nYes.\n</think>\n\nNo.", Reply("No.", "Hm.\n\nYes.")),
        ("thinking hermes", "No <think>", Reply("No <think>")),
        ("thinking hermes", "<thi", Reply("<thi")),
        ("thinking hermes", f"<think>a</think><tool_call>{CALL}", Reply("", "a", [ToolCall("weather", ARGUMENTS)])),
        ("open thinking object", "Hm.", Reply("", "Hm.")),
        ("open thinking object", "Hm. </thi \n", Reply("", "Hm. </thi")),
        ("open thinking object", " </thi", Reply("", "</thi")),
        ("open thinking object", f"Hm. </think>{CALL}", Reply("", "Hm.", [ToolCall("weather", ARGUMENTS)])),
    ],
)
def test_formats(name, text, expected):
    assert whole(name, text) == expected
    assert parsed(FORMATS[name](), text) == expected


BEGUN = {
    "hermes": ["<tool_call>\n" + CALL[:end] for end in range(18)] + ["<tool_call>"[:end] for end in range(1, 12)],
    "object": [CALL[:end] for end in range(1, 17)] + ["[", "[ {", "<|python_tag|>", "<|python_tag|>{", '{ "name" : "a'],
    "mistral": ["[TOOL_CALLS][" + CALL[:end] for end in range(16)] + ["[TOOL", "[TOOL_CALLS]", "[TOOL_CALLS]weath"],
    "thinking hermes": ["<thi", " <", "<think>", "<tool_c"],
    "open thinking object": ["</thi", "a</think>\n{"],
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in BEGUN.items() for text in texts])
def test_the_begin_of_a_call_or_a_mark_is_no_text_where_the_longest_answer_cut_it(name, text):
    for before in ("", "Hm. ") if name in ("hermes", "mistral") else ("",):
        for pieces in ([before + text], before + text):
            parser, reply = FORMATS[name](), Reply()
            for piece in pieces:
                reply.add(parser.push(piece))
            reply.add(parser.finish(cut=True))
            assert (reply.text, reply.reasoning, reply.calls) == (before.strip(), text[:1] * (text[0] == "a"), [])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("object", '{"type": "circle", "parameters": {"r'),
        ("object", '{"name": "nobo'),
        ("object", '{"a": [1, 2'),
        ("object", "[1, 2"),
        ("hermes", "a < b"),
        ("hermes", "a \n"),
        ("thinking hermes", "A <thi"),
        ("plain", "<tool_call>"),
    ],
)
def test_text_that_was_cut_stays_text(name, text):
    parser = FORMATS[name]()
    reply = Reply()
    reply.add([*parser.push(text), *parser.finish(cut=True)])
    assert (reply.text, reply.calls) == (text, [])


def test_reasoning_that_ended_with_white_space_has_no_more_to_tell():
    parser = ThinkingReply(PlainReply, open=True)
    assert (parser.push(" Hm. "), parser.finish()) == ([ReasoningDelta("Hm.")], [])


@pytest.mark.parametrize("text", ["", '{"a": 1', "[1]", "1", "[" * 100_000])
def test_arguments_that_are_no_whole_object_are_none(text):
    assert complete_arguments(text) == {}
    assert complete_arguments('{"a": {"b": 1}}') == {"a": {"b": 1}}


def test_arguments_stream_as_soon_as_the_name_is_known():
    parser = HermesCalls(NAMES)
    assert parser.push('<tool_call>{"name": "weather"') == [CallDelta(0, "weather", "")]
    assert parser.push(', "arguments": {"city": "U') == [CallDelta(0, None, '{"city": "U')]
    assert parser.push('lm"}}') == [CallDelta(0, None, 'lm"}')]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text(), JSON, max_size=4), st.booleans(), st.sampled_from([None, 2]))
def test_the_scanner_takes_all_json_and_arguments_come_through_unchanged(value, ascii_only, indent):
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    scanner = JsonScanner()
    assert all(scanner.feed(character) for character in text)
    assert scanner.complete
    for reply in (
        whole("hermes", f'<tool_call>{{"name": "add", "arguments": {text}}}</tool_call>'),
        whole("mistral", f"[TOOL_CALLS]add{text}"),
    ):
        assert reply == Reply("", "", [ToolCall("add", text)])


@settings(max_examples=300, deadline=None)
@given(st.text(st.sampled_from('{}[]",:0123456789.-+eEtrufalsn\\ub \n'), max_size=14))
@example('{"a": 01}')
@example('{"a": "\n"}')
@example('{"a" 1}')
@example('{"a": 1,}')
@example('{"a": "\\x"}')
@example('{"a": "\\u00g0"}')
@example('{"a":.5}')
@example("[1}")
@example('{"a": tru}')
def test_the_scanner_takes_nothing_else(text):
    text = "{" + text
    scanner = JsonScanner()
    fits = all(scanner.feed(character) for character in text)
    try:
        value = json.loads(text)
    except ValueError:
        assert not (fits and scanner.complete)
    else:
        assert fits == isinstance(value, dict)


def is_within(text: str, longer: str) -> bool:
    """Whether all characters of a text are in another one, in that order."""
    characters = iter(longer)
    return all(character in characters for character in text)


@pytest.mark.parametrize("name", sorted(FORMATS.keys() - {"whole"}))  # which stands around a beginning
@settings(max_examples=150, deadline=None)
@example(["<think> </think>", "<tool_call>", CALL], 60, 3)
@example(["a ", "<tool_call>", " x"], 9, 1)
@given(st.lists(PIECES, max_size=8), st.integers(0, 200), st.integers(1, 5))
def test_behind_a_beginning_a_reply_is_the_end_of_the_whole_one(name, pieces, length, step):
    """Nothing of the beginning is told again but the call that it ends in, and nothing behind it is lost."""
    text = "".join(pieces)
    begun, behind = text[:length], text[length:]
    complete = whole(name, text)
    parts = [behind[at : at + step] for at in range(0, len(behind), step)]
    told = parsed(BegunReply(FORMATS[name](), begun), parts)
    for ours, theirs in ((told.text, complete.text), (told.reasoning, complete.reasoning)):
        assert theirs.endswith(ours)
        assert is_within(ours, behind)
        assert is_within(theirs.removesuffix(ours), begun)
    count = len(told.calls)
    assert told.calls == (complete.calls[-count:] if count else [])
    parser = FORMATS[name]()
    begun_calls = {delta.number for delta in parser.push(begun) if isinstance(delta, CallDelta)}
    assert len(complete.calls) - count == len(begun_calls - {getattr(parser, "open_call", None)})


OPENED = '<tool_call>\n{"name": "weather", "arguments": {"city": "U'
BEGINNINGS = [
    ("thinking hermes", "<think>I wo", "nder.</think>Yes.", ("Yes.", "nder.", [])),
    ("thinking hermes", "<think>I ", "wonder</think> Yes.", ("Yes.", "wonder", [])),
    ("thinking hermes", "<think>a</thi", "nk>b", ("b", "", [])),
    ("thinking hermes", "<thi", "nk>a</think>b", ("b", "a", [])),
    ("thinking hermes", "<thi", "s", ("s", "", [])),
    ("open thinking object", "Hm", "m.</think>Yes.", ("Yes.", "m.", [])),
    ("hermes", OPENED, 'lm"}}\n</tool_call> Wait.', ("Wait.", "", [("weather", '{"city": "Ulm"}')])),
    ("hermes", '<tool_call>{"na', 'me": "add"}</tool_call>', ("", "", [("add", "{}")])),
    ("hermes", '<tool_call>{"na', "x", ("x", "", [])),
    ("hermes", f"<tool_call>{CALL}", "</tool_call>", ("", "", [("weather", ARGUMENTS)])),
    ("hermes", f"<tool_call>{CALL}</tool_call>", f"<tool_call>{LATE_NAME}", ("", "", [("add", '{"a": "}"}')])),
    ("hermes", "So <tool", " x", (" x", "", [])),
    ("hermes", "So ", "far", ("far", "", [])),
    ("object", CALL[:40], CALL[40:], ("", "", [("weather", ARGUMENTS)])),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a"', ": 1}", ("", "", [("add", '{"a": 1}')])),
    ("plain", "So ", "far", ("far", "", [])),
]  # fmt: skip


@pytest.mark.parametrize(("name", "begun", "behind", "expected"), BEGINNINGS, ids=range(len(BEGINNINGS)))
def test_a_reply_goes_on_within_what_its_beginning_opened(name, begun, behind, expected):
    for parts in ([behind], list(behind)):
        told = parsed(BegunReply(FORMATS[name](), begun), parts)
        assert (told.text, told.reasoning, [(call.name, call.arguments) for call in told.calls]) == expected
