"""The order of samples: which ones a global batch holds, from the configuration, the seed and its number alone.

Ranks, workers, hosts and the step a run was resumed at do not matter: they divide a batch, they do not choose it.
Positions are counted through all epochs. So batches run over the end of an epoch, and each sample comes exactly once in
each epoch even if the batch size does not divide the data set.

Random numbers are the raw output of numpy's Philox bit generator (Salmon et al. 2011): numpy keeps that stream stable
between versions, but not what its Generator derives from it.
"""

import hashlib
import heapq
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from functools import cached_property
from math import lcm
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from roofline.common.errors import ConfigError
from roofline.common.json_types import JsonMapping, JsonObject
from roofline.common.names import did_you_mean

K = TypeVar("K")
V = TypeVar("V")
BLOCK = 1 << 18  # least samples that are shuffled together, in whole shards


@dataclass(frozen=True)
class Stream:
    """One data set in a mixture.

    Attributes:
        shards: the number of samples in each shard, in the order of the index.
        weight: a whole number or a decimal such as "0.3"; the share of each batch is weight / sum of weights.
        shuffle: False: the order of the index in every epoch.
        block: shards are put in random order, then groups of neighbours with at least this many samples are shuffled
            together. So a reader needs only the shards of one group at a time.
        identity: a hash of what the index says of the samples (`mds.Shards.identity`); "" where it is not known. It
            does not change which numbers a batch has, so orders that differ in it alone are equal.
    """

    shards: tuple[int, ...]
    weight: str = "1"
    shuffle: bool = True
    block: int = BLOCK
    identity: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shards", tuple(self.shards))
        if not sum(self.shards) or min(self.shards) < 0:
            raise ConfigError("a stream of samples needs shards that hold some")
        if self.block < 1:
            raise ConfigError(f"block={self.block} is not at least 1")
        if _fraction(self.weight) <= 0:
            raise ConfigError(f"weight={self.weight!r} of a stream is not above 0")

    @property
    def samples(self) -> int:
        """The number of samples in an epoch."""
        return sum(self.shards)


@dataclass(frozen=True)
class Order:
    """The order of a run's samples, which are numbered through all streams: the first stream's samples come first."""

    streams: tuple[Stream, ...]
    global_batch: int
    seed: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "streams", tuple(self.streams))
        if not self.streams:
            raise ConfigError("an order of samples needs a stream")
        if self.global_batch < 1:
            raise ConfigError(f"global_batch={self.global_batch} is not at least 1")

    @classmethod
    def from_record(cls, mapping: JsonMapping) -> "Order":
        """The order that `record` described. Raises ConfigError on anything else."""
        try:
            _check_fields(mapping, ("streams", "global_batch", "seed"), "order")
            streams = [dict(stream) for stream in mapping["streams"]]
            for stream in streams:
                _check_fields(stream, ("shards", "weight", "shuffle", "block", "identity"), "stream")
            return cls(tuple(Stream(**s) for s in streams), int(mapping["global_batch"]), int(mapping["seed"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"this is no order of samples: {error!r}") from error

    def record(self) -> JsonObject:
        """The order as plain data, for JSON."""
        return asdict(self)

    def difference(self, other: "Order") -> str | None:
        """What makes `other` read other samples, as far as the orders tell; None: nothing."""
        for key in ("seed", "global_batch"):
            a, b = getattr(self, key), getattr(other, key)
            if a != b:
                return f"{key} is {a} there and {b} here"
        if self != other:
            return "its data sets are others (shards, weights or shuffling)"
        for index, (a, b) in enumerate(zip(self.streams, other.streams, strict=True)):
            if a.identity and b.identity and a.identity != b.identity:
                return f"the index of data set {index} is another one, though it has as many samples"
        return None

    def batch(self, step: int) -> NDArray[np.int64]:
        """The sample numbers of global batch `step`, counted from 0, in order: int64 [global_batch]."""
        if step < 0:
            raise ConfigError(f"step={step} is not at least 0")
        begin, end = (apportion(self._weights, self.global_batch * at) for at in (step, step + 1))
        parts = [
            offset + epochs.positions(a, b)
            for epochs, offset, a, b in zip(self._epochs, self._offsets, begin, end, strict=True)
        ]
        ids = np.concatenate(parts)
        return ids[_permutation(f"{self.seed}/batch/{step}", len(ids))] if len(parts) > 1 else ids

    def epochs(self, step: int) -> list[float]:
        """The epochs of each stream that have been read before global batch `step`."""
        counts = apportion(self._weights, self.global_batch * step)
        return [count / stream.samples for count, stream in zip(counts, self.streams, strict=True)]

    def place(self, sample: int) -> tuple[int, int, int]:
        """(stream, shard, index in the shard) of a sample number. Raises ConfigError if there is no such sample."""
        for index, (stream, offset) in enumerate(zip(self.streams, self._offsets, strict=True)):
            rest = sample - offset
            for shard, count in enumerate(stream.shards if 0 <= rest < stream.samples else ()):
                if rest < count:
                    return index, shard, rest
                rest -= count
        raise ConfigError(f"there is no sample {sample}: there are {sum(s.samples for s in self.streams)}")

    @cached_property
    def _weights(self) -> tuple[int, ...]:
        shares = [_fraction(stream.weight) for stream in self.streams]
        scale = lcm(*(share.denominator for share in shares))
        return tuple(int(share * scale) for share in shares)

    @cached_property
    def _epochs(self) -> "list[_Epochs]":
        return [_Epochs(stream, f"{self.seed}/{index}") for index, stream in enumerate(self.streams)]

    @cached_property
    def _offsets(self) -> list[int]:
        return [sum(stream.samples for stream in self.streams[:i]) for i in range(len(self.streams))]


def share(ids: NDArray[np.int64], rank: int, world: int) -> NDArray[np.int64]:
    """The part of a global batch that one of `world` ranks computes: the parts in rank order are the batch."""
    return ids[len(ids) * rank // world : len(ids) * (rank + 1) // world]


def apportion(weights: Sequence[int], seats: int) -> list[int]:
    """Divides seats in proportion to whole weights, by Webster's method; ties go to the first.

    With more seats no count ever becomes smaller, so the samples that a stream has contributed before any batch are
    known without counting through the earlier batches.
    """
    total, few = sum(weights), max(0, seats - len(weights))
    counts = [(2 * w * few + total) // (2 * total) for w in weights]  # rounding gives Webster's counts for their sum
    queue = [(Fraction(2 * count + 1, w), i) for i, (count, w) in enumerate(zip(counts, weights, strict=True))]
    heapq.heapify(queue)
    for _ in range(seats - sum(counts)):
        _, i = queue[0]
        counts[i] += 1
        heapq.heapreplace(queue, (Fraction(2 * counts[i] + 1, weights[i]), i))
    return counts


class _Epochs:
    """The samples of a stream at positions counted through all epochs; the last shuffles are cached."""

    def __init__(self, stream: Stream, key: str) -> None:
        self.stream, self.key = stream, key
        self._cuts: OrderedDict[int, _Cut] = OrderedDict()
        self._blocks: OrderedDict[tuple[int, int], NDArray[np.int64]] = OrderedDict()

    def positions(self, begin: int, end: int) -> NDArray[np.int64]:
        """The samples at positions begin to end: int64 [end - begin]."""
        out = np.empty(end - begin, np.int64)
        at = begin
        while at < end:
            epoch, inside = divmod(at, self.stream.samples)
            part = self._inside(epoch, inside, min(end - at, self.stream.samples - inside))
            out[at - begin : at - begin + len(part)] = part
            at += len(part)
        return out

    def _inside(self, epoch: int, begin: int, count: int) -> NDArray[np.int64]:
        """At most `count` samples from position `begin` of an epoch on, all from one block."""
        if not self.stream.shuffle:
            return np.arange(begin, begin + count)
        cut = _cached_value(self._cuts, epoch, lambda: self._cut(epoch), 2)
        at = int(np.searchsorted(cut.ends, begin, side="right"))
        first = int(cut.ends[at - 1]) if at else 0
        block = _cached_value(self._blocks, (epoch, at), lambda: self._block(cut, epoch, at), 4)
        return block[begin - first : begin - first + count]

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        return np.cumsum((0, *self.stream.shards))

    def _cut(self, epoch: int) -> "_Cut":
        """An epoch's shards in random order, divided into blocks."""
        shards = self.stream.shards
        shuffled = [i for i in _permutation(f"{self.key}/{epoch}/shards", len(shards)).tolist() if shards[i]]
        groups: list[list[int]] = [[]]
        samples = 0
        for shard in shuffled:
            if samples >= self.stream.block:
                groups.append([])
                samples = 0
            groups[-1].append(shard)
            samples += shards[shard]
        ends = np.cumsum([sum(shards[i] for i in group) for group in groups])
        return _Cut([np.array(group) for group in groups], ends)

    def _block(self, cut: "_Cut", epoch: int, at: int) -> NDArray[np.int64]:
        """The samples of a block in shuffled order."""
        starts = self._starts
        ids = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in cut.shards[at]])
        return ids[_permutation(f"{self.key}/{epoch}/block/{at}", len(ids))]


@dataclass(frozen=True)
class _Cut:
    shards: list[NDArray[np.int64]]  # of each block
    ends: NDArray[np.int64]  # positions behind each block


def _cached_value(cache: OrderedDict[K, V], key: K, make: Callable[[], V], most: int) -> V:
    """The value from a cache of `most` entries. Two threads may both make a value, with the same result."""
    value = cache.get(key)
    if value is None:
        value = cache[key] = make()
        while len(cache) > most:
            cache.popitem(last=False)
    return value


def _permutation(key: str, count: int) -> NDArray[np.int64]:
    """A permutation of `count` numbers: the order that sorts as many random ones."""
    words = np.frombuffer(hashlib.sha256(key.encode()).digest()[:16], "<u8")
    return np.argsort(np.random.Philox(key=words).random_raw(count), kind="stable")


def _fraction(weight: str) -> Fraction:
    try:
        return Fraction(str(weight))
    except (ValueError, ZeroDivisionError) as error:
        raise ConfigError(f"weight={weight!r} of a stream is not a number") from error


def _check_fields(mapping: JsonMapping, fields: Sequence[str], what: str) -> None:
    for name in mapping:
        if name not in fields:
            raise ConfigError(f"{what}: unknown field {name!r}{did_you_mean(name, fields)}")
