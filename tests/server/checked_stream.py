"""A stream of text that is compared, push by push, with a decoder that knows nothing of it: slow and obvious."""

import codecs
from collections.abc import Iterable, Sequence

from roofline.text.streaming.stops import Delta, TextStream


class CheckedStream:
    """Passes on what a `TextStream` gives; raises AssertionError where a client should have got another text by then.

    The text so far is decoded anew, byte by byte, by Python's own incremental decoder. What a client should have of it
    is everything up to the first stop string, or else everything but an end that a stop string may begin with. Streams
    with a parser or with `min_tokens`, whose text depends on more than the bytes, are passed on without a comparison.
    """

    def __init__(
        self,
        stream: TextStream,
        tokenizer,
        stops: Sequence[str] = (),
        *,
        include_stop: bool = False,
        compares: bool = True,
    ) -> None:
        self._stream, self._tokenizer = stream, tokenizer
        self._stops, self._include_stop, self._compares = stops, include_stop, compares
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoded, self.received, self.stop = "", "", None

    @property
    def stopped(self) -> str | None:
        return self._stream.stopped

    def push(self, ids: Iterable[int]) -> Delta:
        ids = list(ids)
        delta = self._stream.push(ids)
        used = 0
        for token_id in ids:
            if self.stop is None:
                used += 1
                self._decoded += self._decoder.decode(self._tokenizer.token_bytes(token_id))
                self.stop = self._complete_stop()
        self._compare(delta, self._certain())
        if self._compares:
            assert (delta.used, delta.stopped) == (used, self.stop), "the ids that are billed, and the stop string"
        return delta

    def end(self, *, cut: bool = False) -> Delta:
        delta = self._stream.end(cut=cut)
        if self.stop is None:
            self._decoded += self._decoder.decode(b"", final=True)
            self.stop = self._complete_stop()
        self._compare(delta, self._decoded if self.stop is None else self._certain())
        return delta

    def finish(self) -> str:
        return self.end().text

    def _compare(self, delta: Delta, expected: str) -> None:
        self.received += delta.text
        if self._compares:
            assert self.received == expected, f"the client has {self.received!r} and should have {expected!r}"

    def _complete_stop(self) -> str | None:
        """The stop string that the last byte completed; the longest of several."""
        return max((stop for stop in self._stops if stop in self._decoded), key=len, default=None)

    def _certain(self) -> str:
        """The text that no later byte changes."""
        if self.stop is not None:
            return self._decoded[: self._decoded.index(self.stop)] + self.stop * self._include_stop
        lengths = range(len(self._decoded), 0, -1)
        unsure = next((n for n in lengths if any(stop.startswith(self._decoded[-n:]) for stop in self._stops)), 0)
        return self._decoded[: len(self._decoded) - unsure]
