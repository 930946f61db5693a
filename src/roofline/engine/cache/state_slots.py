"""Slots of recurrent state beside the pages: who holds which, and which hold a snapshot that can be found.

A slot holds what all recurrent layers have of one sequence at one position. A running sequence has one of its own,
which its steps write; a snapshot is a slot that nobody writes any more. Its name is the key of the page chain at its
position, so fingerprint, adapter and tenant hold for it as they do for pages.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from roofline.engine.cache.paged import PagedCache
from roofline.ops.batch import NO_SLOT, PAGE_TOKENS

SNAPSHOT_PAGES = 4
SNAPSHOT_TOKENS = SNAPSHOT_PAGES * PAGE_TOKENS  # snapshots lie at multiples of it


class StateSlots(PagedCache):
    """The accounting of slots: that of pages, but that each is found by itself instead of along a chain."""

    def take(self) -> int:
        """A slot that nobody else has: a free one, or else the snapshot that was used least recently; NO_SLOT where all
        are held."""
        slots: list[int] = []
        return slots[0] if self.grow(slots, PAGE_TOKENS) else NO_SLOT

    def hold(self, slot: int) -> None:
        """Hold a slot once more."""
        self.share([slot])

    def drop(self, slot: int) -> None:
        """Hold a slot once less; NO_SLOT is nobody's."""
        if slot != NO_SLOT:
            self.release([slot])

    def name(self, slot: int, key: bytes) -> None:
        """Make a slot a snapshot, unless there is one of this key: the first stays findable."""
        assert self.is_writable(slot), "a slot that somebody else has"
        if self.prefix and key not in self._page_of:
            self._page_of[key], self._key_of[slot] = slot, key

    def adopt(self, slot: int) -> None:
        """Turn a snapshot that only the caller holds into a slot that can be written."""
        assert self.refs[slot] == 1, "a snapshot that others read"
        key, self._key_of[slot] = self._key_of[slot], None
        if key is not None:
            del self._page_of[key]

    def is_writable(self, slot: int) -> bool:
        """Whether a step may write a slot: one holder has it, and nobody finds it."""
        return self.refs[slot] == 1 and self._key_of[slot] is None

    def knows(self, key: bytes) -> bool:
        """Whether there is a snapshot of this key."""
        return key in self._page_of

    def snapshot(self, key: bytes) -> int:
        """The slot of a snapshot that there is."""
        return self._page_of[key]

    def usable_pages(self, keys: Items[bytes], pages: int) -> int:
        """How many of the first `pages` pages can be used: those up to the last snapshot within them."""
        last = pages - pages % SNAPSHOT_PAGES
        return next((n for n in range(last, 0, -SNAPSHOT_PAGES) if keys[n - 1] in self._page_of), 0)


@dataclass(slots=True, eq=False)
class SequenceSlots:
    """The slots of a running sequence. slot: its own; source: what its next step reads, which is its own but for the
    first step: that reads a snapshot, or begins with zeros (NO_SLOT).

    spare: a second one, for the latest snapshot of its answer, which lies at `spare_at` (0: it holds nothing), or will,
    once a step has landed, at `spare_due`;
    junction: where a snapshot would have let it use more of the pages that were found, 0 if nowhere; reserved: slots
    for the step that is being planned; under_way: those that steps under way write, for as long as these are;
    live: until the sequence ends or loses its pages.
    """

    slot: int
    source: int
    junction: int = 0
    spare: int = NO_SLOT
    spare_at: int = 0
    spare_due: int = 0
    reserved: list[int] = field(default_factory=list)
    under_way: list[int] = field(default_factory=list)
    live: bool = True
