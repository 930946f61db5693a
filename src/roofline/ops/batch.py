"""What `forward` receives: one flat int32 buffer at a fixed address, described by a table of fields.

A step is a list of segments (sequence, first position, query length). The table's order is the contract with every
backend: C++, Triton and WGSL offsets come from it, and `header` carries the step's counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

PAGE_TOKENS = 16


class Header(IntEnum):
    """Positions inside the `header` field."""

    TOKENS = 0
    SEGMENTS = 1
    ROWS = 2
    PAGES = 3


HEADER_SIZE = 16
STATE_FIELDS = ("state_in", "state_out", "save_at", "save_to")  # the last of all
FIELDS: tuple[str, ...] = (
    *("header", "ids", "positions", "seg_start", "context_len", "page_start", "pages", "logit_rows", "adapters"),
    *STATE_FIELDS,
)
NO_SLOT = -1


@dataclass(frozen=True)
class BatchLimits:
    """The largest step: query tokens, segments, logit rows, and page-table entries over all segments.

    state_slots: how many slots of recurrent state there are beside the pages; 0: the model has no such state.
    """

    tokens: int
    segments: int
    rows: int
    pages: int
    state_slots: int = 0


@dataclass(frozen=True)
class StateMove:
    """Which slots of recurrent state a segment reads and writes.

    A slot holds what all layers with state have of one sequence behind its first tokens, however many. source: the slot
    that holds the state behind the tokens before the segment, NO_SLOT: there are none, the state is zeros, and no
    memory is read. target: the slot that gets the state behind the segment's last token, NO_SLOT: nobody needs it. It
    may be the source. save_to: a further slot that gets the state as it is behind the first `save_at` tokens of the
    sequence, where save_at lies above the segment's first position and not above its end; NO_SLOT: none.
    """

    source: int = NO_SLOT
    target: int = NO_SLOT
    save_at: int = 0
    save_to: int = NO_SLOT


@dataclass(frozen=True)
class Segment:
    """A sequence's part of a step: `ids` at positions first_position.., its whole page table, adapter 0 = none.

    state: of a model with recurrent state; None: the slot with the segment's number holds that of its sequence, from
    zeros on where first_position is 0, as whoever computes the same sequences in every step would have it.
    """

    ids: Sequence[int]
    first_position: int
    pages: Sequence[int]
    adapter: int = 0
    state: StateMove | None = None

    def state_move(self, number: int) -> StateMove:
        """The slots of this segment, which is that number of its step."""
        return self.state or StateMove(number if self.first_position else NO_SLOT, number)


class Batch:
    """The buffer and a numpy view per field. Fields start on 64-byte boundaries.

    Views (int32): header [16], ids, positions, adapters [limits.tokens], seg_start, page_start [limits.segments + 1],
    context_len [limits.segments] (length after this step), pages [limits.pages], logit_rows [limits.rows]; state_in,
    state_out, save_at, save_to [limits.segments] are those of `StateMove`, and written of models with state alone.
    """

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = limits
        sizes = {
            "header": HEADER_SIZE,
            "ids": limits.tokens,
            "positions": limits.tokens,
            "seg_start": limits.segments + 1,
            "context_len": limits.segments,
            "page_start": limits.segments + 1,
            "pages": limits.pages,
            "logit_rows": limits.rows,
            "adapters": limits.tokens,
            **dict.fromkeys(STATE_FIELDS, limits.segments),
        }
        self.offsets: dict[str, int] = {}
        at = 0
        for name in FIELDS:
            self.offsets[name] = at
            at += -(-sizes[name] // 16) * 16
        raw = np.zeros(at + 16, dtype=np.int32)
        skip = (-raw.ctypes.data % 64) // 4
        self.buffer = raw[skip : skip + at]
        views = [self.buffer[self.offsets[name] : self.offsets[name] + sizes[name]] for name in FIELDS]
        self.header, self.ids, self.positions, self.seg_start, self.context_len, *rest = views
        self.page_start, self.pages, self.logit_rows, self.adapters, *moves = rest
        self.state_in, self.state_out, self.save_at, self.save_to = moves

    @property
    def tokens(self) -> int:
        return int(self.header[Header.TOKENS])

    @property
    def segments(self) -> int:
        return int(self.header[Header.SEGMENTS])

    @property
    def rows(self) -> int:
        return int(self.header[Header.ROWS])

    def fill(self, segments: Sequence[Segment], logit_rows: Sequence[int]) -> None:
        """Write a step. `logit_rows` are token rows of this step, ascending, whose logits are wanted.

        Exceeding a limit is a bug of the caller (the scheduler plans within limits), hence asserts.
        """
        token = page = 0
        self.seg_start[0] = self.page_start[0] = 0
        for i, segment in enumerate(segments):
            n, first, count = len(segment.ids), segment.first_position, len(segment.pages)
            assert n > 0, "an empty segment"
            assert count * PAGE_TOKENS >= first + n, "a segment without pages for its tokens"
            assert token + n <= self.limits.tokens, "more tokens than the batch holds"
            assert page + count <= self.limits.pages, "more pages than the batch holds"
            self.ids[token : token + n] = segment.ids
            if n == 1:
                self.positions[token] = first
            else:
                self.positions[token : token + n] = np.arange(first, first + n, dtype=np.int32)
            self.adapters[token : token + n] = segment.adapter
            self.pages[page : page + count] = segment.pages
            self.context_len[i] = first + n
            if self.limits.state_slots:
                self.write_move(i, segment.state_move(i))
            token, page = token + n, page + count
            self.seg_start[i + 1], self.page_start[i + 1] = token, page
        self.logit_rows[: len(logit_rows)] = logit_rows
        self.header[: len(Header)] = (token, len(segments), len(logit_rows), page)

    def write_move(self, segment: int, move: StateMove) -> None:
        """Write the slots of one segment of the step."""
        for slot in (move.source, move.target, move.save_to):
            assert NO_SLOT <= slot < self.limits.state_slots, "a slot of state that there is not"
        self.state_in[segment], self.state_out[segment] = move.source, move.target
        self.save_at[segment], self.save_to[segment] = move.save_at, move.save_to
