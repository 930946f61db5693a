"""The incremental n-gram index equals a search of the whole text, and is cheap."""

import time

from hypothesis import given
from hypothesis import strategies as st

from roofline.engine.speculation.ngram import LONGEST, SHORTEST, NgramIndex

RUNS = st.integers(1, 3).flatmap(lambda shortest: st.tuples(st.integers(shortest, 5), st.just(shortest)))


def naive_guess(ids: list[int], count: int, longest: int = LONGEST, shortest: int = SHORTEST) -> list[int]:
    """What `NgramIndex.guess` returns, found by looking at every place: the oracle."""
    for n in range(min(longest, len(ids) - 1), shortest - 1, -1):
        for place in range(len(ids) - 1, n - 1, -1):
            if ids[place - n : place] == ids[len(ids) - n :]:
                text = list(ids)
                while len(text) < len(ids) + count:
                    text.append(text[len(text) - (len(ids) - place)])
                return text[len(ids) :]
    return []


@given(
    ids=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    cuts=st.sets(st.integers(1, 60)),
    count=st.integers(1, 9),
    runs=RUNS,
)
def test_the_index_finds_what_a_search_finds(ids, cuts, count, runs):
    index = NgramIndex(*runs)
    for length in sorted({*(cut for cut in cuts if cut < len(ids)), len(ids)}):
        assert index.guess(ids[:length], count) == naive_guess(ids[:length], count, *runs)


@given(ids=st.lists(st.sampled_from([0, 1, 2**31 - 1]), min_size=1, max_size=40))
def test_ids_of_any_size_and_leading_zeros_are_told_apart(ids):
    assert NgramIndex(3, 2).guess(ids, 4) == naive_guess(ids, 4, 3, 2)


def test_the_longest_run_and_its_latest_place_decide():
    assert NgramIndex(4, 2).guess([1, 2, 3, 9, 8, 2, 3, 7, 1, 2, 3], 2) == [9, 8], (
        "three ids agree there, two elsewhere"
    )
    assert NgramIndex(4, 2).guess([2, 3, 9, 0, 2, 3, 7, 0, 2, 3], 1) == [7]
    assert NgramIndex(4, 2).guess([1, 2, 3], 4) == []


def test_a_place_near_the_end_is_a_period():
    assert NgramIndex(4, 2).guess([5, 1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]
    assert NgramIndex(4, 2).guess([7, 7, 7], 3) == [7, 7, 7]


def test_a_token_costs_less_than_five_microseconds():
    ids = [(i * i) % 1009 for i in range(20000)]
    fastest = 1.0
    for _ in range(3):
        index = NgramIndex()
        index.guess(ids[:10000], 4)
        started = time.process_time()
        for length in range(10001, 12001):
            index.guess(_Upto(ids, length), 4)
        fastest = min(fastest, (time.process_time() - started) / 2000)
    assert fastest < 15e-6, "three times the aim: machines differ"


class _Upto(list):
    """The first `length` ids without copying them, as a growing sequence has them."""

    def __init__(self, ids, length):
        self.ids, self.length = ids, length

    def __len__(self):
        return self.length

    def __getitem__(self, at):
        return self.ids[at]
