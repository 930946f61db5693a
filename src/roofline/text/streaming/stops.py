"""Ids to text while they are generated: whole characters, up to a stop string, also one that spans several tokens."""

import codecs
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from roofline.text.replies.parser import Delta as ReplyPart
from roofline.text.replies.parser import PlainReply, ReplyParser, TextDelta, joined
from roofline.text.tokenizers.tokenizer import Tokenizer


class Detokenizer:
    """Turns the ids of one answer into text, whole characters only.

    For any ids in any portions, the pushes and the flush joined are ``tokenizer.decode`` of all ids. Special tokens
    are left out; bytes that can never become a character give U+FFFD.

    at_start: the ids begin a text, so SentencePiece's first space is dropped; False: they go on from a prompt.
    shown: special tokens that are not left out.
    """

    def __init__(self, tokenizer: Tokenizer, *, at_start: bool = True, shown: Collection[int] = frozenset()) -> None:
        self._spell = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids.difference(shown) if shown else tokenizer.special_ids
        self._drop_space = tokenizer.strip_space and at_start
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` complete."""
        data = b"".join([self._spell(token_id) for token_id in ids if token_id not in self._skipped])
        if self._drop_space and data:
            self._drop_space = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def flush(self) -> str:
        """What is left of an unfinished character, as U+FFFD. Ends the text."""
        return self._decoder.decode(b"", final=True)


class StopStrings:
    """Cuts a text at the stop string that is complete first (of those complete at once, the longest).

    The text that `push` returns holds no part of a stop string that may still become complete, so the result does not
    depend on the portions in which the text came.

    stops: strings that end the text; none may be empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise ValueError("an empty stop string would end every text before it begins")
        self._stops = tuple(dict.fromkeys(stops))
        self._longest = max(map(len, self._stops), default=0)
        self._pending = ""
        self._exempt = 0  # characters of the pending text within which no stop string may become complete
        self.stopped: str | None = None

    def push(self, text: str, *, counts: bool = True) -> str:
        """The text that is now certain. After `stopped` is set, always empty.

        counts: False for text in which no stop string becomes complete; one that begins in it may.
        """
        if self.stopped is not None:
            return ""
        self._pending += text
        self._exempt = self._exempt if counts else len(self._pending)
        starts = ((stop, max(0, self._exempt - len(stop) + 1)) for stop in self._stops)
        ends = ((at + len(stop), at, stop) for stop, start in starts if (at := self._pending.find(stop, start)) >= 0)
        first = min(ends, default=None)
        if first is not None:
            sure, self._pending, self.stopped = self._pending[: first[1]], "", first[2]
            return sure
        at = len(self._pending) - self._unsure()
        sure, self._pending, self._exempt = self._pending[:at], self._pending[at:], max(0, self._exempt - at)
        return sure

    def finish(self) -> str:
        """The text that was still pending: what comes after it, if anything does, completes no stop string with it."""
        rest, self._pending, self._exempt = self._pending, "", 0
        return rest

    def _unsure(self) -> int:
        """Length of the longest end of the pending text that begins a stop string."""
        for length in range(min(self._longest - 1, len(self._pending)), 0, -1):
            tail = self._pending[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0


@dataclass(frozen=True, slots=True)
class Delta:
    """The result of a push: text that is certain, the stop string met or None, how many of the pushed ids were used.

    parts: the text among the reasoning and the calls that a model wrote, where they were told apart.
    """

    text: str
    stopped: str | None
    used: int
    parts: Sequence[ReplyPart] = ()


class TextStream:
    """The text of one answer: detokenising, telling its parts apart, and stop strings together.

    Stop strings end the text that is told. They are not looked for in reasoning and in calls, nor across these.

    Args:
        include_stop: end the text with the stop string instead of before it.
        at_start, shown: see `Detokenizer`.
        min_tokens: a stop string that is complete with one of so many first tokens ends nothing.
        reply: tells text, reasoning and calls apart; None: all is text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        *,
        include_stop: bool = False,
        at_start: bool = True,
        shown: Collection[int] = frozenset(),
        min_tokens: int = 0,
        reply: ReplyParser | None = None,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, at_start=at_start, shown=shown)
        self._stops = StopStrings(stops)
        self._has_stops = bool(stops)
        self._include_stop = include_stop
        self._reply = PlainReply() if reply is None else reply
        self._waits = min_tokens  # tokens until stop strings count

    @property
    def stopped(self) -> str | None:
        """The stop string met, None before."""
        return self._stops.stopped

    def push(self, ids: Iterable[int]) -> Delta:
        """Adds ids. Those after the one that completed a stop string are not used, and not to be billed."""
        ids = list(ids)
        if not self._has_stops:
            parts = self._reply.push(self._detokenizer.push(ids))
            return Delta(_text_of(parts), None, len(ids), parts)
        parts, used = [], 0
        for token_id in ids:
            if self._stops.stopped is not None:
                break
            used += 1
            self._waits -= 1
            parts += self._until_stop(self._reply.push(self._detokenizer.push((token_id,))))
        parts = joined(parts)
        return Delta(_text_of(parts), self._stops.stopped, used, parts)

    def finish(self) -> str:
        """The rest of the text, when no more ids come; empty after a stop string."""
        return self.end().text

    def end(self, *, cut: bool = False) -> Delta:
        """What is left when no more ids come; nothing after a stop string. cut: the longest answer ended it."""
        if self._stops.stopped is not None:
            return Delta("", self._stops.stopped, 0)
        last = [*self._reply.push(self._detokenizer.flush()), *self._reply.finish(cut=cut)]
        parts = joined([*self._until_stop(last), TextDelta(self._stops.finish())])
        return Delta(_text_of(parts), self._stops.stopped, 0, parts)

    def _until_stop(self, parts: Iterable[ReplyPart]) -> list[ReplyPart]:
        """What is certain of further parts, up to the stop string."""
        certain: list[ReplyPart] = []
        for part in parts:
            if self._stops.stopped is not None:
                break
            if not isinstance(part, TextDelta):
                certain += [TextDelta(self._stops.finish()), part]
                continue
            text = self._stops.push(part.text, counts=self._waits < 0)
            if self._stops.stopped is not None and self._include_stop:
                text += self._stops.stopped
            certain.append(TextDelta(text))
        return certain


def _text_of(parts: Iterable[ReplyPart]) -> str:
    return "".join(part.text for part in parts if isinstance(part, TextDelta))
