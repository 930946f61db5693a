"""Every format of tool calls: what it writes is read back, however it is cut, and its marks are never text."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reply_cases import SCHEMAS, WRITERS

from roofline.text.replies.begun_reply import BegunReply
from roofline.text.replies.formats.table import CALL_FORMATS
from roofline.text.replies.formats.tagged import TaggedCalls
from roofline.text.replies.parser import Reply, ReplyParser
from roofline.text.replies.reply_format import ReplyFormat

MARKED = sorted(name for name, form in CALL_FORMATS.items() if form.is_marked)
ARGUMENTS = {
    "city": "Köln <b>\n \"'\\ 🙂",
    "days": 3,
    "hot": True,
    "limit": None,
    "places": ["a</x>", 2.5],
    "more": {"k": [1]},
}


def form_of(name: str, *, thinks: bool = False) -> ReplyFormat:
    return ReplyFormat(name, thinks, True, CALL_FORMATS[name].thoughts)


def read(parser: ReplyParser, pieces, *, cut: bool = False) -> Reply:
    reply = Reply()
    for piece in pieces:
        reply.add(parser.push(piece))
    reply.add(parser.finish(cut=cut))
    return reply


def parsed(name: str, text: str, *, cut: bool = False, thinking: bool | None = None, tools=SCHEMAS) -> Reply:
    """A reply read at once, and the same in single characters."""
    form = form_of(name, thinks=thinking is not None)
    whole = read(form.parser(tools, thinking=bool(thinking)), [text], cut=cut)
    assert read(form.parser(tools, thinking=bool(thinking)), text, cut=cut) == whole
    return whole


def calls_of(reply: Reply) -> list[tuple[str, object]]:
    return [(call.name, json.loads(call.arguments)) for call in reply.calls]


def test_every_format_has_a_writer_here():
    assert WRITERS.keys() == CALL_FORMATS.keys()


@pytest.mark.parametrize("name", CALL_FORMATS)
def test_what_a_format_writes_itself_is_read_back(name):
    arguments = {**ARGUMENTS, "more": {"k": [1, None]}}
    assert calls_of(parsed(name, CALL_FORMATS[name].written("weather", arguments))) == [("weather", arguments)]
    example = parsed(name, CALL_FORMATS[name].example().replace(" VALUE", ' "VALUE"'), tools={"NAME": {}})
    assert calls_of(example) == [("NAME", {"ARGUMENT": "VALUE"})]


@pytest.mark.parametrize("name", CALL_FORMATS)
def test_a_call_is_read_as_it_was_written(name):
    text = WRITERS[name]("weather", ARGUMENTS)
    reply = parsed(name, text)
    assert (reply.text, calls_of(reply)) == ("", [("weather", ARGUMENTS)])


@pytest.mark.parametrize("name", MARKED)
def test_text_before_several_calls_and_behind_them(name):
    calls = WRITERS[name]("weather", {"city": "Ulm"}) + WRITERS[name]("now", {})
    reply = parsed(name, f"I look.\n\n{calls}\nDone.")
    assert calls_of(reply) == [("weather", {"city": "Ulm"}), ("now", {})]
    assert reply.text in ("I look.Done.", "I look.\n\nDone.")
    assert parsed(name, f"I look.\n\n{calls}\n").text == "I look."


@pytest.mark.parametrize("name", MARKED)
def test_every_cut_into_two_and_every_end_that_came_too_early(name):
    """No mark is text, and a call that was cut has a begin of its arguments."""
    before = f"Ä {WRITERS[name]('now', {})}\n"
    text = before + WRITERS[name]("weather", {"city": "Ulm <b>", "days": 12})
    expected = parsed(name, text)
    marks = CALL_FORMATS[name].marks
    for end in range(len(text) + 1):
        assert read(form_of(name).parser(SCHEMAS, thinking=False), [text[:end], text[end:]]) == expected
        cut = read(form_of(name).parser(SCHEMAS, thinking=False), [text[:end]], cut=True)
        assert cut.text.rstrip() == text[: min(end, 1)]
        for whole, part in zip(expected.calls, cut.calls, strict=False):
            assert part.name == whole.name
            assert whole.arguments.startswith(part.arguments)
        whole_reply = read(form_of(name).parser(SCHEMAS, thinking=False), [text[:end]])
        if len(whole_reply.calls) > 1:
            json.loads(whole_reply.calls[0].arguments)
            assert not any(mark in whole_reply.text for mark in marks)


PIECES = sorted(
    {"call:", "call:weather{", "city:", ",", "<|tool_call>call:weather{"}
    | {mark for form in CALL_FORMATS.values() for mark in (*form.marks, *form.openings)}
    | {
        "weather",
        "now",
        "none",
        "city",
        "Ulm",
        "\n",
        " ",
        "{",
        "}",
        '"',
        ":",
        "<",
        ">",
        "=",
        "[",
        "]",
        "(",
        ")",
        "'",
        "é",
        "5",
    }
    | {"<function=", "<function=weather>", "<parameter=city>", "</parameter>", "</function>", "<parameter=", "\\"}
    | {'{"city": "Ulm"}', "weather{", '<invoke name="weather">', "</invoke>", '<parameter name="city">', "</think>"}
)


@pytest.mark.parametrize("name", CALL_FORMATS)
@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(PIECES) | st.sampled_from([0, 1]), max_size=14), st.randoms(use_true_random=False))
def test_a_reply_does_not_depend_on_how_it_is_cut(name, pieces, random):
    written = [WRITERS[name]("weather", {"city": "Ulm", "days": 1}), WRITERS[name]("now", {})]
    text = "".join(written[piece] if isinstance(piece, int) else piece for piece in pieces)
    for thinking in (None, False, True):
        for cut in (False, True):
            whole = parsed(name, text, cut=cut, thinking=thinking)
            cuts = sorted(random.randint(0, len(text)) for _ in range(6))
            parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
            form = form_of(name, thinks=thinking is not None)
            assert read(form.parser(SCHEMAS, thinking=bool(thinking)), parts, cut=cut) == whole
            if not cut and issubclass(CALL_FORMATS[name], TaggedCalls):
                for call in whole.calls:
                    assert isinstance(json.loads(call.arguments), dict)


@pytest.mark.parametrize("name", MARKED)
@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=10), st.data())
def test_a_reply_without_calls_is_told_to_the_letter(name, pieces, data):
    text = "".join(pieces)
    if CALL_FORMATS[name].tells_reasoning:
        return
    reply = parsed(name, text)
    if not reply.calls:
        assert reply.text == text


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def without_marks(name: str, value: str) -> bool:
    return not any(mark in value for mark in ("<", "[", "\u200b"))


@pytest.mark.parametrize("name", CALL_FORMATS)
@settings(max_examples=30, deadline=None)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "city": st.text(st.characters(blacklist_characters="<[", blacklist_categories=["Cs"])),
            "days": st.integers(-(2**70), 2**70),
            "hot": st.booleans(),
            "limit": st.none() | st.floats(allow_nan=False, allow_infinity=False),
            "places": st.lists(VALUES, max_size=3),
            "more": st.dictionaries(st.text(max_size=5), VALUES, max_size=3),
        },
    )
)
def test_arguments_of_all_types_are_read_as_they_were_written(name, arguments):
    reply = parsed(name, WRITERS[name]("weather", arguments))
    assert calls_of(reply) == [("weather", arguments)]


@pytest.mark.parametrize("name", MARKED)
def test_a_call_within_open_reasoning_ends_it(name):
    marks = CALL_FORMATS[name].thoughts
    call = WRITERS[name]("weather", {"city": "Ulm" if name == "lfm2" else "</think> [/THINK] Ulm"})
    for behind in ("", marks.close, f"\n{marks.close}\n\nDone."):
        reply = parsed(name, f"I think.\n{call}{behind}", thinking=True)
        assert (reply.reasoning, reply.text) == ("I think.", "Done." if "Done" in behind else "")
        assert [call.name for call in reply.calls] == ["weather"]


@pytest.mark.parametrize("name", [name for name in MARKED if not CALL_FORMATS[name].tells_reasoning])
def test_a_mark_that_is_talked_about_in_reasoning_ends_nothing(name):
    thought = f"I may write {CALL_FORMATS[name].openings[0]} here"
    reply = parsed(name, f"{thought}. {CALL_FORMATS[name].thoughts.close}Yes.", thinking=True)
    assert (reply.reasoning, reply.text, reply.calls) == (f"{thought}.", "Yes.", [])


@pytest.mark.parametrize("name", CALL_FORMATS)
def test_a_reply_goes_on_from_every_beginning_of_it(name):
    """Nothing of the beginning is told again but the call that it ends in, and nothing behind it is lost."""
    call = WRITERS[name]("weather", {"city": "Ulm", "days": 12})
    text = f"Hello. {call}\n{WRITERS[name]('now', {})}" if CALL_FORMATS[name].is_marked else call
    entire = parsed(name, text)
    for end in range(len(text)):
        told = read(BegunReply(form_of(name).parser(SCHEMAS, thinking=False), text[:end]), [text[end:]])
        count = len(told.calls)
        assert told.calls == (entire.calls[-count:] if count else [])
        assert entire.text.endswith(told.text)
        begun = read(form_of(name).parser(SCHEMAS, thinking=False), [text[:end]], cut=True)
        assert len(begun.calls) + count >= len(entire.calls)
