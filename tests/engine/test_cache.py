"""The same random life on both caches: books balance after every rule, and what is found is what was written."""

import pytest
from engine_fakes import check_pages
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from roofline.engine.cache.naive import NaiveCache
from roofline.engine.cache.paged import PagedCache, PageKeys, root_key
from roofline.ops.batch import PAGE_TOKENS

PAGES = 12


class CacheMachine(RuleBasedStateMachine):
    """Sequences over a tiny alphabet of pages, so that prefixes repeat. `content` is what lies in each page."""

    make = staticmethod(lambda: PagedCache(PAGES))

    def __init__(self):
        super().__init__()
        self.cache = self.make()
        self.live = []  # [ids, keys, pages, published]
        self.content = {}

    @rule(blocks=st.lists(st.integers(0, 1), min_size=1, max_size=5), tail=st.integers(0, PAGE_TOKENS - 1))
    def start(self, blocks, tail):
        ids = [b for block in blocks for b in [block] * PAGE_TOKENS] + [9] * tail
        keys = PageKeys(root_key("f"))
        before = self.cache.available
        pages = self.cache.match(keys, ids)
        assert len(pages) * PAGE_TOKENS < len(ids), "the last token is always computed"
        for i, page in enumerate(pages):
            assert self.content[page] == tuple(ids[: (i + 1) * PAGE_TOKENS]), "found a page of another prefix"
        found = len(pages)
        held = {page for _, _, table, _ in self.live for page in table}
        if not self.cache.grow(pages, len(ids)):
            needed = -(-len(ids) // PAGE_TOKENS) - found
            assert needed > before - len(set(pages) - held), "refused though it would have fitted"
            self.cache.release(pages)
            return
        assert not held & set(pages[found:]), "a fresh page has another holder"
        for i in range(found, len(pages)):
            self.content[pages[i]] = tuple(ids[: (i + 1) * PAGE_TOKENS])
        self.live.append([ids, keys, pages, found])

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def publish(self, data):
        ids, keys, pages, done = entry = data.draw(st.sampled_from(self.live))
        full = len(ids) // PAGE_TOKENS
        if full > done:
            self.cache.publish(keys, ids, pages, done, full)
            entry[3] = full

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fork(self, data):
        ids, keys, pages, done = data.draw(st.sampled_from(self.live))
        shared = self.cache.share(pages[:done])
        if shared:
            self.live.append([ids[: done * PAGE_TOKENS], keys, shared, done])

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data):
        entry = data.draw(st.sampled_from(self.live))
        self.live = [other for other in self.live if other is not entry]
        self.cache.release(entry[2])
        assert entry[2] == []

    @invariant()
    def books_balance(self):
        tables = [pages for _, _, pages, _ in self.live]
        check_pages(self.cache, tables)
        held = len({page for table in tables for page in table})
        assert self.cache.used == held
        assert self.cache.available == PAGES - held


class PlainMachine(CacheMachine):
    make = staticmethod(lambda: PagedCache(PAGES, prefix=False))


class NaiveMachine(CacheMachine):
    make = staticmethod(lambda: NaiveCache(PAGES))


LIFE = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestPaged, TestPlain, TestNaive = CacheMachine.TestCase, PlainMachine.TestCase, NaiveMachine.TestCase
TestPaged.settings = TestPlain.settings = TestNaive.settings = LIFE


def fill(cache, ids, keys=None):
    keys = keys or PageKeys(root_key("f"))
    pages = cache.match(keys, ids)
    assert cache.grow(pages, len(ids))
    cache.publish(keys, ids, pages, 0, len(ids) // PAGE_TOKENS)
    return pages


def test_the_least_recently_used_page_goes_first_and_tails_before_heads():
    cache = PagedCache(4)
    old, new = [1] * 32, [2] * 32
    pages = fill(cache, old)
    cache.release(pages)
    pages = fill(cache, new)
    cache.release(pages)
    assert cache.grow(pages, 16), "one page is taken"
    assert len(cache.match(PageKeys(root_key("f")), [*old, 0])) == 1, "the old chain lost its tail only"
    assert len(cache.match(PageKeys(root_key("f")), [*new, 0])) == 2


@pytest.mark.parametrize("other", [root_key("g"), root_key("f", adapter="a"), root_key("f", salt="tenant")])
def test_fingerprint_adapter_and_tenant_separate(other):
    cache = PagedCache(8)
    ids = [1] * 33
    fill(cache, ids)
    assert len(cache.match(PageKeys(root_key("f")), ids)) == 2
    assert cache.match(PageKeys(other), ids) == []


def test_root_keys_do_not_run_together():
    assert root_key("ab", "c") != root_key("a", "bc")


def test_releasing_twice_is_caught():
    cache = PagedCache(2)
    pages = []
    cache.grow(pages, 1)
    again = list(pages)
    cache.release(pages)
    with pytest.raises(AssertionError, match="more often"):
        cache.release(again)
