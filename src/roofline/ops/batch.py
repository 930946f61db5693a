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
FIELDS = ("header", "ids", "positions", "seg_start", "context_len", "page_start", "pages", "logit_rows", "adapters")


@dataclass(frozen=True)
class BatchLimits:
    """The largest step: query tokens, segments, logit rows, and page-table entries over all segments."""

    tokens: int
    segments: int
    rows: int
    pages: int


@dataclass(frozen=True)
class Segment:
    """A sequence's part of a step: `ids` at positions first_position.., its whole page table, adapter 0 = none."""

    ids: Sequence[int]
    first_position: int
    pages: Sequence[int]
    adapter: int = 0


class Batch:
    """The buffer and a numpy view per field. Fields start on 64-byte boundaries.

    Views (int32): header [16], ids, positions, adapters [limits.tokens], seg_start, page_start [limits.segments + 1],
    context_len [limits.segments] (length after this step), pages [limits.pages], logit_rows [limits.rows].
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
        self.page_start, self.pages, self.logit_rows, self.adapters = rest

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
            token, page = token + n, page + count
            self.seg_start[i + 1], self.page_start[i + 1] = token, page
        self.logit_rows[: len(logit_rows)] = logit_rows
        self.header[: len(Header)] = (token, len(segments), len(logit_rows), page)
