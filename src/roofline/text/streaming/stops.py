"""Ids to text while they are generated: whole characters, up to a stop string, also one that spans several tokens."""

import codecs
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

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
        self.stopped: str | None = None

    def push(self, text: str) -> str:
        """The text that is now certain. After `stopped` is set, always empty."""
        if self.stopped is not None:
            return ""
        self._pending += text
        ends = ((at + len(stop), at, stop) for stop in self._stops if (at := self._pending.find(stop)) >= 0)
        first = min(ends, default=None)
        if first is not None:
            sure, self._pending, self.stopped = self._pending[: first[1]], "", first[2]
            return sure
        keep = self._unsure()
        sure, self._pending = self._pending[: len(self._pending) - keep], self._pending[len(self._pending) - keep :]
        return sure

    def finish(self) -> str:
        """The text that was still pending; for when no more comes."""
        rest, self._pending = self._pending, ""
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
    """The result of a push: text that is certain, the stop string met or None, how many of the pushed ids were used."""

    text: str
    stopped: str | None
    used: int


class TextStream:
    """The text of one answer: detokenising and stop strings together.

    include_stop: end the text with the stop string instead of before it; at_start, shown: see `Detokenizer`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        *,
        include_stop: bool = False,
        at_start: bool = True,
        shown: Collection[int] = frozenset(),
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, at_start=at_start, shown=shown)
        self._stops = StopStrings(stops)
        self._has_stops = bool(stops)
        self._include_stop = include_stop

    @property
    def stopped(self) -> str | None:
        """The stop string met, None before."""
        return self._stops.stopped

    def push(self, ids: Iterable[int]) -> Delta:
        """Adds ids. Those after the one that completed a stop string are not used, and not to be billed."""
        ids = list(ids)
        if not self._has_stops:
            return Delta(self._detokenizer.push(ids), None, len(ids))
        texts: list[str] = []
        used = 0
        for token_id in ids:
            if self._stops.stopped is not None:
                break
            used += 1
            texts.append(self._add(self._detokenizer.push((token_id,))))
        return Delta("".join(texts), self._stops.stopped, used)

    def finish(self) -> str:
        """The rest of the text, when no more ids come; empty after a stop string."""
        if self._stops.stopped is not None:
            return ""
        return self._add(self._detokenizer.flush()) + self._stops.finish()

    def _add(self, text: str) -> str:
        sure = self._stops.push(text)
        if self._stops.stopped is not None and self._include_stop:
            sure += self._stops.stopped
        return sure
