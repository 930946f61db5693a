"""A streamed answer reads the same however its bytes are cut."""

import itertools
import json

from hypothesis import given
from hypothesis import strategies as st

from roofline.bench.load.answer_stream import AnswerStream
from roofline.bench.load.events import RequestEvents


def event(**fields):
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def read(pieces):
    record = RequestEvents(request=0, scheduled=0, dispatched=0)
    stream = AnswerStream(record)
    for moment, data in enumerate(pieces, start=1):
        stream.feed(data, moment)
    return record, stream


def delta(**fields):
    return event(choices=[{"index": 0, "delta": fields}])


CHAT = b"".join(
    [
        delta(role="assistant", content=""),
        b": ping\n\n",
        delta(reasoning_content="hm"),
        delta(content="é"),
        delta(content="llo"),
        event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}]),
        event(
            choices=[],
            usage={"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}},
        ),
        b"data: [DONE]\n\n",
    ]
)


@given(st.lists(st.integers(0, len(CHAT)), max_size=12))
def test_any_cut_gives_the_same(cuts):
    places = [0, *sorted(cuts), len(CHAT)]
    record, stream = read([CHAT[a:b] for a, b in itertools.pairwise(places)])
    assert (stream.text, stream.complete, record.characters) == ("éllo", True, [2, 1, 3])
    assert (record.prompt_tokens, record.completion_tokens, record.cached_tokens, record.finish) == (5, 3, 2, "stop")
    assert record.chunks == sorted(record.chunks)
    assert record.error is None


def test_moments_are_those_of_what_they_say():
    lines = CHAT.split(b"\n\n")
    record, _ = read([line + b"\n\n" for line in lines])
    assert (record.first_byte, record.first_reasoning, record.first_text, record.chunks) == (1, 3, 4, [3, 4, 5])


def test_negative_counts_are_refused():
    for usage in ({"prompt_tokens": 5, "completion_tokens": -3}, {"prompt_tokens": -1, "completion_tokens": 3}):
        record, _ = read([event(choices=[], usage=usage)])
        assert record.error.startswith("the usage cannot be: ")
        assert (record.prompt_tokens, record.completion_tokens) == (None, None)


def test_errors_in_the_stream():
    record, _ = read([event(error={"message": "out of memory"}), event(choices=[])])
    assert "out of memory" in record.error
    record, _ = read([b"data: {nonsense\n\n"])
    assert "cannot be read" in record.error
    record, _ = read([b'data: {"choices": [], "error": null}\n\n'])
    assert record.error is None
