"""Which of several engines computes a request: the one that will be done with its prompt first.

An engine whose cache has the beginning of a prompt need not compute it again, but may be busy. Both costs are counted
in tokens: those the engine still has to compute for other requests, and those of this prompt. So a request goes to
the engine with its pages unless waiting there takes longer than computing them elsewhere.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from roofline.engine.cache.paged import PageKeys, root_key
from roofline.engine.cache.state_slots import SNAPSHOT_PAGES
from roofline.engine.process.remote import RemoteEngine
from roofline.engine.process.stream import EventStream
from roofline.ops.batch import PAGE_TOKENS

MAX_PAGES = 1 << 16  # remembered of one engine: a million tokens


class CachedPages:
    """What an engine's cache of `size` pages is assumed to hold: the pages of the latest prompts."""

    def __init__(self, size: int) -> None:
        self._size = min(size, MAX_PAGES)
        self._keys: OrderedDict[bytes, None] = OrderedDict()  # the latest last

    def __len__(self) -> int:
        return len(self._keys)

    def leading(self, keys: Sequence[bytes]) -> int:
        """How many of these pages, from the first one on, are cached."""
        return next((i for i, key in enumerate(keys) if key not in self._keys), len(keys))

    def last_snapshot(self, keys: Sequence[bytes], pages: int) -> int:
        """How many of the first `pages` pages lie before the last of these keys, where they name snapshots."""
        ends = range(pages - pages % SNAPSHOT_PAGES, 0, -SNAPSHOT_PAGES)
        return next((end for end in ends if keys[end - 1] in self._keys), 0)

    def add(self, keys: Sequence[bytes]) -> None:
        """A prompt of these pages is computed now."""
        # A page is of no use without those before it: they are forgotten last.
        for key in reversed(keys):
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._size:
            self._keys.popitem(last=False)


class Candidate:
    """An engine that requests may go to, and what is known of its cache."""

    def __init__(self, engine: RemoteEngine) -> None:
        self.engine = engine
        self.turn = 0  # number of the latest request it was given
        self._pid, self._pages = 0, CachedPages(0)  # of the process whose cache is meant
        self._snapshots: CachedPages | None = None  # of its recurrent state, where the model has one

    @property
    def pages(self) -> CachedPages:
        """What its present process has computed; a fresh one begins with nothing."""
        description = self.engine.description
        if description is not None and description.pid != self._pid:
            self._pid = description.pid
            self._pages = CachedPages(description.num_pages)
            self._snapshots = CachedPages(description.state_slots) if description.state_slots else None
        return self._pages

    def reusable(self, keys: Sequence[bytes]) -> int:
        """How many of these pages it need not compute again; with recurrent state, those up to the last snapshot."""
        pages = self.pages.leading(keys)
        return pages if self._snapshots is None else self._snapshots.last_snapshot(keys, pages)

    def uncomputed(self, prompt: Sequence[int], keys: Sequence[bytes]) -> int:
        """Tokens of a prompt that it would have to compute: always the last one."""
        return len(prompt) - min(self.reusable(keys) * PAGE_TOKENS, len(prompt) - 1)

    def record(self, stream: EventStream, keys: Sequence[bytes], uncomputed: int, turn: int) -> None:
        """Remember a request that was sent to it."""
        stream.uncomputed, self.turn = uncomputed, turn
        if self._snapshots is not None:  # one at the end of what was found, and one at the end of the prompt
            for pages in (self.pages.leading(keys), len(keys)):
                end = pages - pages % SNAPSHOT_PAGES
                self._snapshots.add(keys[max(0, end - 1) : end])
        self.pages.add(keys)


def keys_of(prompt: list[int], salt: str, adapter: str = "") -> list[bytes]:
    """The keys of a prompt's full pages, as caches make them. salt: of whoever shares prefixes."""
    return PageKeys(root_key("", adapter, salt)).upto(prompt, len(prompt) // PAGE_TOKENS)


def choose(candidates: Iterable[Candidate], prompt: Sequence[int], keys: Sequence[bytes]) -> tuple[Candidate, int]:
    """The candidate that will be done first with its other requests and this prompt, and how much of the prompt it
    computes. Of equal ones the one that has waited longest for a request."""
    costs = ((candidate.uncomputed(prompt, keys), candidate) for candidate in candidates)
    uncomputed, best = min(costs, key=lambda cost: (cost[1].engine.outstanding + cost[0], cost[1].turn))
    return best, uncomputed
