"""The stream that server tests answer through passes a right `TextStream` on, and catches planted faults of one."""

from dataclasses import replace

import pytest

from roofline.text.streaming.stops import TextStream
from tests.server.checked_stream import CheckedStream
from tests.server.conftest import BytesTokenizer

TEXT = "Grüße, 世界 – 🙂! end"


class LateStream(TextStream):
    """Holds back the last character of each push until the next one."""

    late = ""

    def push(self, ids):
        delta = super().push(ids)
        text, self.late = (self.late + delta.text)[:-1], (self.late + delta.text)[-1:]
        return replace(delta, text=text)

    def end(self, *, cut=False):
        return replace(delta := super().end(cut=cut), text=self.late + delta.text)


class RepeatingStream(TextStream):
    """Gives each character that takes several bytes twice."""

    def push(self, ids):
        delta = super().push(ids)
        return replace(delta, text=delta.text * (1 if delta.text.isascii() else 2))


def stream_all(kind, stops, size):
    """The whole text that a stream of this kind gives for TEXT in portions of so many bytes."""
    tokenizer, ids = BytesTokenizer(), TEXT.encode()
    stream = CheckedStream(kind(tokenizer, stops), tokenizer, stops)
    text = ""
    for start in range(0, len(ids), size):
        delta = stream.push(ids[start : start + size])
        text += delta.text
        if delta.stopped is not None:
            return text
    return text + stream.finish()


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize("stops", [(), ("界 – 🙂",), ("nothing", "end of it"), ("! e", "! end")])
def test_a_right_stream_is_passed_on(stops, size):
    cuts = [TEXT.index(stop) for stop in stops if stop in TEXT]
    assert stream_all(TextStream, stops, size) == TEXT[: min(cuts, default=None)]


@pytest.mark.parametrize("kind", [LateStream, RepeatingStream])
@pytest.mark.parametrize("stops", [(), ("nothing",)])
def test_characters_that_come_late_or_twice_are_caught(kind, stops):
    with pytest.raises(AssertionError, match="the client has"):
        stream_all(kind, stops, 1)


def test_a_character_that_is_cut_at_the_end_is_caught_where_it_is_left_out():
    class Silent(TextStream):
        """Says nothing of a character that is not complete."""

        def end(self, *, cut=False):
            return replace(super().end(cut=cut), text="")

    for kind, fails in ((TextStream, False), (Silent, True)):
        stream = CheckedStream(kind(BytesTokenizer()), BytesTokenizer())
        stream.push("世".encode()[:2])
        if fails:
            with pytest.raises(AssertionError, match="the client has"):
                stream.finish()
        else:
            assert stream.finish() == "\ufffd"
