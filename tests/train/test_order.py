"""The order of samples: each once an epoch, the same from anywhere, shared out without being changed."""

import hashlib
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline.common.errors import ConfigError
from roofline.train.data import order as module
from roofline.train.data.order import Order, Stream, apportion, share

WORLDS = (1, 2, 3, 4, 6, 8)
shards = st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(sum)
streams = st.builds(
    Stream,
    shards=shards.map(tuple),
    weight=st.sampled_from(["1", "2", "0.3", "1/7"]),
    shuffle=st.booleans(),
    block=st.integers(1, 200),
)


def order_of(*counts: int, batch: int = 8, seed: int = 17, **options: object) -> Order:
    return Order((Stream(counts, **options),), batch, seed)


@settings(deadline=None)
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=6), st.integers(0, 5000), st.integers(0, 300))
def test_seats_are_shared_in_proportion_and_never_taken_back(weights, seats, more):
    before, after = apportion(weights, seats), apportion(weights, seats + more)
    assert sum(before) == seats
    assert sum(after) == seats + more
    assert all(a <= b for a, b in zip(before, after, strict=True))
    for count, weight in zip(before, weights, strict=True):
        assert abs(count - seats * weight / sum(weights)) <= len(weights)


@settings(deadline=None)
@given(shards, st.integers(1, 70), st.integers(0, 2**40), st.integers(1, 300), st.booleans())
def test_every_sample_comes_once_in_each_epoch(counts, batch, seed, block, shuffle):
    order = Order((Stream(tuple(counts), shuffle=shuffle, block=block),), batch, seed)
    samples, epochs = sum(counts), 3
    steps = -(-epochs * samples // batch)
    seen = np.concatenate([order.batch(step) for step in range(steps)])
    for epoch in range(epochs):
        assert sorted(seen[epoch * samples : (epoch + 1) * samples]) == list(range(samples))
    assert order.epochs(steps) == [steps * batch / samples]


@settings(deadline=None, max_examples=40)
@given(st.lists(streams, min_size=1, max_size=4), st.integers(1, 50), st.integers(0, 1000))
def test_mixtures_keep_their_weights_and_each_streams_epochs(mixed, batch, seed):
    order = Order(tuple(mixed), batch, seed)
    steps = 12
    seen = np.concatenate([order.batch(step) for step in range(steps)])
    assert len(seen) == steps * batch
    first, shares = 0, apportion(order._weights, steps * batch)
    for stream, count in zip(order.streams, shares, strict=True):
        own = seen[(seen >= first) & (seen < first + stream.samples)] - first
        assert len(own) == count
        times = np.bincount(own, minlength=stream.samples)
        assert times.max() - times.min() <= 1
        first += stream.samples


@settings(deadline=None, max_examples=40)
@given(st.lists(streams, min_size=1, max_size=3), st.integers(1, 40), st.integers(0, 9), st.data())
def test_the_sequence_is_the_same_for_every_world_and_from_every_step(mixed, batch, seed, data):
    order = Order(tuple(mixed), batch, seed)
    wanted = [order.batch(step) for step in range(10)]
    resumed = data.draw(st.integers(0, 9))
    fresh = Order.from_record(order.record())
    for step in range(resumed, 10):
        assert np.array_equal(fresh.batch(step), wanted[step])
        for world in WORLDS:
            parts = [share(wanted[step], rank, world) for rank in range(world)]
            assert np.array_equal(np.concatenate(parts), wanted[step])
            assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_shuffled_samples_stay_with_their_block():
    """A reader needs the shards of one block at a time, whatever comes later."""
    order = order_of(*[10] * 20, batch=40, block=40)
    for step in range(15):
        assert len({sample // 10 for sample in order.batch(step).tolist()}) == 4
    epochs = [np.concatenate([order.batch(5 * e + i) for i in range(5)]) for e in range(3)]
    assert not np.array_equal(epochs[0], epochs[1])
    assert not np.array_equal(order.batch(0), order_of(*[10] * 20, batch=40, block=40, seed=18).batch(0))


def test_unshuffled_samples_are_in_the_order_of_the_index():
    order = order_of(3, 0, 4, batch=5, shuffle=False)
    assert [order.batch(i).tolist() for i in range(3)] == [[0, 1, 2, 3, 4], [5, 6, 0, 1, 2], [3, 4, 5, 6, 0]]


def test_the_order_is_for_ever():
    """Runs go on under later versions: these figures never change."""
    order = Order((Stream((100, 0, 57, 300), block=150), Stream((64,), "0.25")), 48, 17)
    digest = hashlib.sha256(b"".join(order.batch(step).astype("<i8").tobytes() for step in (0, 1, 7, 1000)))
    assert digest.hexdigest() == GOLDEN


def test_places():
    order = Order((Stream((2, 0, 3)), Stream((4,))), 1, 0)
    assert [order.place(i) for i in (0, 2, 4, 5, 8)] == [(0, 0, 0), (0, 2, 0), (0, 2, 2), (1, 0, 0), (1, 0, 3)]
    for beyond in (-1, 9):
        with pytest.raises(ConfigError, match="there are 9"):
            order.place(beyond)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"global_batch": 0}, "global_batch=0"),
        ({"streams": []}, "needs a stream"),
        ({"streams": [{"shards": []}]}, "shards that hold some"),
        ({"streams": [{"shards": [0, 0]}]}, "shards that hold some"),
        ({"streams": [{"shards": [3, -1]}]}, "shards that hold some"),
        ({"streams": [{"shards": [3], "weight": "0"}]}, "not above 0"),
        ({"streams": [{"shards": [3], "weight": "much"}]}, "is not a number"),
        ({"streams": [{"shards": [3], "block": 0}]}, "block=0"),
        ({"streams": [{"shards": [3], "wieght": "1"}]}, "did you mean 'weight'"),
        ({"sed": 1}, "did you mean 'seed'"),
        ({"streams": 5}, "no order of samples"),
    ],
)
def test_what_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        Order.from_record({"streams": [{"shards": [3]}], "global_batch": 4, "seed": 1} | change)
    with pytest.raises(ConfigError, match="step=-1"):
        order_of(4).batch(-1)


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=5), st.integers(0, 60))
def test_seats_are_those_of_websters_method(weights, seats):
    """Seat by seat to the one with the largest weight / (2 * seats + 1); ties go to the first."""
    counts = [0] * len(weights)
    for _ in range(seats):
        quotients = [Fraction(weight, 2 * count + 1) for weight, count in zip(weights, counts, strict=True)]
        counts[quotients.index(max(quotients))] += 1
    assert apportion(weights, seats) == counts


def test_the_difference_of_two_orders_is_named():
    order = Order((Stream((3, 4), identity="a"), Stream((5,))), 2, 1)
    for change, message in (
        ({"seed": 2}, "seed is 1 there and 2 here"),
        ({"global_batch": 3}, "global_batch is 2 there and 3 here"),
        ({"streams": order.streams[:1]}, "its data sets are others"),
        ({"streams": (order.streams[0], Stream((5,), shuffle=False))}, "its data sets are others"),
        ({"streams": (Stream((3, 4), identity="b"), order.streams[1])}, "the index of data set 0 is another one"),
    ):
        assert message in order.difference(replace(order, **change))
    for identity in ("a", ""):  # one that is not known proves nothing
        assert order.difference(replace(order, streams=(Stream((3, 4), identity=identity), order.streams[1]))) is None
    unknown = replace(order, streams=(Stream((3, 4)), order.streams[1]))
    assert unknown.difference(order) is None
    other = replace(order, streams=(order.streams[0], Stream((5,), identity="c")))
    assert replace(other, streams=(order.streams[0], Stream((5,), identity="d"))).difference(other) == (
        "the index of data set 1 is another one, though it has as many samples"
    )


def test_a_reader_that_goes_on_shuffles_each_block_once(monkeypatch):
    made = []
    plain = module._permutation

    def permutation(key, count):
        made.append(key)
        return plain(key, count)

    monkeypatch.setattr(module, "_permutation", permutation)
    order = order_of(*[10] * 8, batch=5, block=20)
    for step in range(3 * 80 // 5):
        order.batch(step)
    epochs = [[f"17/0/{e}/shards", *(f"17/0/{e}/block/{at}" for at in range(4))] for e in range(3)]
    assert made == [key for keys in epochs for key in keys]


def test_defaults_and_smallest_values():
    assert (Stream((1,)).weight, Stream((1,)).shuffle, Stream((1,)).block) == ("1", True, 1 << 18)
    assert order_of(1, batch=1, block=1).batch(0).tolist() == [0]
    assert order_of(4, batch=3).epochs(2) == [1.5]
    assert Stream((0, 2)).samples == 2
    with pytest.raises(ConfigError, match="not above 0"):
        Stream((1,), "-0.5")
    with pytest.raises(ConfigError, match=r"weight='1/0' of a stream is not a number"):
        Stream((1,), "1/0")


GOLDEN = "f358479a9e1fd79fd65a738acf2896e5c01f3ab226e75e31a355ee71cb91d748"
