"""Which of several engines computes a request: the one that will be done with its prompt first.

An engine whose cache has the beginning of a prompt need not compute it again, but may be busy. Both costs are counted
in tokens: those the engine still has to compute for other requests, and those of this prompt. So a request goes to
the engine with its pages unless waiting there takes longer than computing them elsewhere.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from roofline.engine.cache.paged import PageKeys, root_key
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

    def add(self, keys: Sequence[bytes]) -> None:
        """A prompt of these pages is computed now."""
        for key in reversed(keys):  # a page is of no use without those before it: they are forgotten last
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

    @property
    def pages(self) -> CachedPages:
        """What its present process has computed; a fresh one begins with nothing."""
        description = self.engine.description
        if description is not None and description.pid != self._pid:
            self._pid = description.pid
            self._pages = CachedPages(description.num_pages)
        return self._pages

    def uncomputed(self, prompt: Sequence[int], keys: Sequence[bytes]) -> int:
        """Tokens of a prompt that it would have to compute: always the last one."""
        return len(prompt) - min(self.pages.leading(keys) * PAGE_TOKENS, len(prompt) - 1)

    def record(self, stream: EventStream, keys: Sequence[bytes], uncomputed: int, turn: int) -> None:
        """Remember a request that was sent to it."""
        stream.uncomputed, self.turn = uncomputed, turn
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
