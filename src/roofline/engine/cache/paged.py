"""The paged KV cache: who holds which page, and which full pages can be found by their content.

    free ──grow──> held, mutable ──publish──> held, immutable, findable <──match── idle, findable
      ^                │ release                      │ last release                  ^  │
      ├────────────────┘                              └───────────────────────────────┘  │
      └───────────────────────────── evicted by grow, least recently used first ─────────┘

Only this file decides about pages; it never looks inside them.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence as Ids
from typing import Protocol

from roofline.ops.batch import PAGE_TOKENS


def root_key(fingerprint: str, adapter: str = "", salt: str = "") -> bytes:
    """The start of a key chain: pages are shared only under one fingerprint, adapter and tenant."""
    digest = hashlib.sha256()
    for part in (fingerprint, adapter, salt):
        text = part.encode()
        digest.update(len(text).to_bytes(8, "little") + text)
    return digest.digest()


class PageKeys:
    """The SHA-256 chain over a sequence's full pages, grown when asked: key[i] = SHA-256(key[i-1], ids of page i)."""

    __slots__ = ("keys", "root")

    def __init__(self, root: bytes) -> None:
        self.root = root
        self.keys: list[bytes] = []

    def upto(self, ids: Ids[int], pages: int) -> list[bytes]:
        """Keys of the first `pages` pages; all of them must be full. The list may be longer."""
        keys = self.keys
        while len(keys) < pages:
            at = len(keys) * PAGE_TOKENS
            previous = keys[-1] if keys else self.root
            keys.append(hashlib.sha256(previous + array("i", ids[at : at + PAGE_TOKENS]).tobytes()).digest())
        return keys


class Cache(Protocol):
    """Page accounting. Page lists belong to the caller's sequence and are changed in place."""

    num_pages: int
    prefix: bool  # whether pages are found by their content

    @property
    def available(self) -> int:
        """Pages that `grow` could hand out now."""

    @property
    def used(self) -> int:
        """Pages that some sequence holds."""

    def match(self, keys: PageKeys, ids: Ids[int]) -> list[int]:
        """Referenced pages holding the longest known prefix of `ids`, never all of it: the last token is computed."""

    def known(self, keys: PageKeys, ids: Ids[int]) -> int:
        """How many pages `match` would find now."""

    def share(self, pages: Ids[int]) -> list[int]:
        """Another reference on full pages of a running sequence, or [] if this cache never shares."""

    def grow(self, pages: list[int], tokens: int) -> bool:
        """Append fresh pages until they hold `tokens`; False, and nothing done, when there are not enough."""

    def publish(self, keys: PageKeys, ids: Ids[int], pages: Ids[int], start: int, stop: int) -> None:
        """Make pages[start:stop], full, committed and from now on immutable, findable."""

    def release(self, pages: list[int]) -> None:
        """Drop one reference on each page and clear the list."""


class PagedCache:
    """The clever cache: reference counts, prefix reuse, eviction of the least recently used unreferenced page.

    With prefix=False nothing is found by content, but the n answers of one request still share their prompt.
    """

    def __init__(self, num_pages: int, prefix: bool = True) -> None:
        self.num_pages, self.prefix = num_pages, prefix
        self.refs = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # findable, unreferenced, least recently used first
        self._page_of: dict[bytes, int] = {}
        self._key_of: list[bytes | None] = [None] * num_pages

    @property
    def available(self) -> int:
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        return self.num_pages - len(self._free) - len(self._idle)

    def match(self, keys: PageKeys, ids: Ids[int]) -> list[int]:
        return self.share([self._page_of[key] for key in keys.keys[: self.known(keys, ids)]])

    def known(self, keys: PageKeys, ids: Ids[int]) -> int:
        if not self.prefix or not self._page_of:
            return 0
        count = (len(ids) - 1) // PAGE_TOKENS
        return next((i for i in range(count) if keys.upto(ids, i + 1)[i] not in self._page_of), count)

    def share(self, pages: Ids[int]) -> list[int]:
        for page in pages:
            if self.refs[page] == 0:
                del self._idle[page]
            self.refs[page] += 1
        return list(pages)

    def grow(self, pages: list[int], tokens: int) -> bool:
        need = -(-tokens // PAGE_TOKENS) - len(pages)
        if need > self.available:
            return False
        for _ in range(need):
            page = self._free.pop() if self._free else self._evict()
            self.refs[page] = 1
            pages.append(page)
        return True

    def publish(self, keys: PageKeys, ids: Ids[int], pages: Ids[int], start: int, stop: int) -> None:
        if not self.prefix:
            return
        chain = keys.upto(ids, stop)
        for i in range(start, stop):
            # Two sequences may have computed the same page side by side: the first stays findable.
            if chain[i] not in self._page_of and self._key_of[pages[i]] is None:
                self._page_of[chain[i]] = pages[i]
                self._key_of[pages[i]] = chain[i]

    def release(self, pages: list[int]) -> None:
        # From the end, so that a chain is evicted from its tail: a page without its predecessors cannot be found.
        for page in reversed(pages):
            self.refs[page] -= 1
            assert self.refs[page] >= 0, "a page released more often than referenced"
            if self.refs[page] == 0:
                if self._key_of[page] is None:
                    self._free.append(page)
                else:
                    self._idle[page] = None
        pages.clear()

    def findable(self) -> list[tuple[bytes, int]]:
        """Keys and pages of all that `match` could find: those in use, then the others, most recently used first."""
        used = [page for page, key in enumerate(self._key_of) if key is not None and self.refs[page]]
        return [(key, page) for page in (*used, *reversed(self._idle)) if (key := self._key_of[page]) is not None]

    def restore(self, keys: Ids[bytes | None]) -> None:
        """Make page i findable by keys[i], where there is one, each used more recently than those that follow it. The
        pages are full; the cache has held nothing yet."""
        assert self.prefix, "only what is found by content can be restored"
        assert len(self._free) == self.num_pages, "a cache that is in use"
        for page, key in enumerate(keys):
            if key is not None and key not in self._page_of:
                self._page_of[key], self._key_of[page] = page, key
        self._free = [page for page in reversed(range(self.num_pages)) if self._key_of[page] is None]
        self._idle.update((page, None) for page in reversed(range(self.num_pages)) if self._key_of[page] is not None)

    def _evict(self) -> int:
        page, _ = self._idle.popitem(last=False)
        key = self._key_of[page]
        assert key is not None
        del self._page_of[key]
        self._key_of[page] = None
        return page
