"""The naive cache: every page has one holder, nothing is found, nothing is kept. The oracle for `paged.PagedCache`."""

from collections.abc import Sequence as Ids

from roofline.engine.cache.paged import PageKeys
from roofline.ops.batch import PAGE_TOKENS


class NaiveCache:
    """A set of free pages behind the interface of `cache.Cache`."""

    prefix = False

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = set(range(num_pages))

    @property
    def available(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.num_pages - len(self._free)

    def match(self, keys: PageKeys, ids: Ids[int]) -> list[int]:
        return []

    def known(self, keys: PageKeys, ids: Ids[int]) -> int:
        return 0

    def share(self, pages: Ids[int]) -> list[int]:
        return []

    def grow(self, pages: list[int], tokens: int) -> bool:
        need = -(-tokens // PAGE_TOKENS) - len(pages)
        if need > len(self._free):
            return False
        pages.extend(self._free.pop() for _ in range(need))
        return True

    def publish(self, keys: PageKeys, ids: Ids[int], pages: Ids[int], start: int, stop: int) -> None:
        """Nothing is ever found here."""

    def release(self, pages: list[int]) -> None:
        assert not self._free.intersection(pages), "a page released twice"
        self._free.update(pages)
        pages.clear()
