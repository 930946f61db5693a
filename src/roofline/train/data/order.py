"""Which samples a global batch holds: a function of the configuration, the seed and the batch's number alone.

Not of ranks, workers, hosts or of where a run was resumed: those share a batch out, they do not choose it. Positions
are counted through all epochs, so batches run over the end of an epoch and each sample comes once in each, also where
the batch does not divide the data set.

Random bits are those of Philox (Salmon et al. 2011) as numpy's bit generator gives them raw: numpy promises that
stream, not what its Generator makes of it.
"""

import hashlib
import heapq
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import cached_property
from math import lcm
from typing import TYPE_CHECKING, TypeVar

from roofline.common.errors import ConfigError
from roofline.common.json_types import JsonMapping, JsonObject
from roofline.common.names import did_you_mean

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

K = TypeVar("K")
V = TypeVar("V")
BLOCK = 1 << 18  # samples that are shuffled with each other, at least: as many shards as hold them


@dataclass(frozen=True)
class Stream:
    """One data set in a mixture.

    Attributes:
        shards: samples of each shard, in the order of the index.
        weight: its share of each batch is weight / sum of weights: a whole number, or a decimal such as "0.3".
        shuffle: off: the order of the index, epoch after epoch.
        block: shards are put in random order; as many neighbours as hold this many samples are then shuffled as one.
            A reader needs no more of them at a time.
    """

    shards: tuple[int, ...]
    weight: str = "1"
    shuffle: bool = True
    block: int = BLOCK

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
        """Samples of an epoch."""
        return sum(self.shards)


@dataclass(frozen=True)
class Order:
    """The order of a run. Samples are numbered through all streams: those of the second follow those of the first."""

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
        """What `record` gave. Raises ConfigError on anything else."""
        try:
            _only(mapping, ("streams", "global_batch", "seed"), "order")
            streams = [dict(stream) for stream in mapping["streams"]]
            for stream in streams:
                _only(stream, ("shards", "weight", "shuffle", "block"), "stream")
            return cls(tuple(Stream(**s) for s in streams), int(mapping["global_batch"]), int(mapping["seed"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"this is no order of samples: {error!r}") from error

    def record(self) -> JsonObject:
        """As plain data."""
        return asdict(self)

    def batch(self, step: int) -> "NDArray[np.int64]":
        """Sample numbers of global batch `step`, counted from 0, in their order: int64 [global_batch]."""
        import numpy as np

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
        """How often each stream's samples have been seen before global batch `step`."""
        counts = apportion(self._weights, self.global_batch * step)
        return [count / stream.samples for count, stream in zip(counts, self.streams, strict=True)]

    def place(self, sample: int) -> tuple[int, int, int]:
        """(stream, shard, place in the shard) of a sample's number. Raises ConfigError."""
        for stream, (of, offset) in enumerate(zip(self.streams, self._offsets, strict=True)):
            rest = sample - offset
            for shard, count in enumerate(of.shards if 0 <= rest < of.samples else ()):
                if rest < count:
                    return stream, shard, rest
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


def share(ids: "NDArray[np.int64]", rank: int, world: int) -> "NDArray[np.int64]":
    """What one of `world` ranks computes of a global batch: neighbours, so the shares in rank order are the batch."""
    return ids[len(ids) * rank // world : len(ids) * (rank + 1) // world]


def apportion(weights: Sequence[int], seats: int) -> list[int]:
    """Seats in proportion to whole weights, by Webster's method: with more seats nobody ever has fewer.

    So what a stream has given up to any batch is known without counting through the batches before it. Ties go to the
    first.
    """
    total, few = sum(weights), max(0, seats - len(weights))
    counts = [(2 * w * few + total) // (2 * total) for w in weights]  # rounded: Webster's for as many as they sum to
    queue = [(Fraction(2 * count + 1, w), i) for i, (count, w) in enumerate(zip(counts, weights, strict=True))]
    heapq.heapify(queue)
    for _ in range(seats - sum(counts)):
        _, i = queue[0]
        counts[i] += 1
        heapq.heapreplace(queue, (Fraction(2 * counts[i] + 1, weights[i]), i))
    return counts


class _Epochs:
    """The samples of a stream at positions counted through all of its epochs; what was shuffled last is kept."""

    def __init__(self, stream: Stream, key: str) -> None:
        self.stream, self.key = stream, key
        self._cuts: OrderedDict[int, _Cut] = OrderedDict()
        self._blocks: OrderedDict[tuple[int, int], NDArray[np.int64]] = OrderedDict()

    def positions(self, begin: int, end: int) -> "NDArray[np.int64]":
        """int64 [end - begin]."""
        import numpy as np

        out = np.empty(end - begin, np.int64)
        at = begin
        while at < end:
            epoch, inside = divmod(at, self.stream.samples)
            part = self._inside(epoch, inside, min(end - at, self.stream.samples - inside))
            out[at - begin : at - begin + len(part)] = part
            at += len(part)
        return out

    def _inside(self, epoch: int, begin: int, count: int) -> "NDArray[np.int64]":
        """At most `count` samples from position `begin` of one epoch on: those of one block."""
        import numpy as np

        if not self.stream.shuffle:
            return np.arange(begin, begin + count)
        cut = _kept(self._cuts, epoch, lambda: self._cut(epoch), 2)
        at = int(np.searchsorted(cut.ends, begin, side="right"))
        first = int(cut.ends[at - 1]) if at else 0
        block = _kept(self._blocks, (epoch, at), lambda: self._block(cut, epoch, at), 4)
        return block[begin - first : begin - first + count]

    @cached_property
    def _starts(self) -> "NDArray[np.int64]":
        import numpy as np

        return np.cumsum((0, *self.stream.shards))

    def _cut(self, epoch: int) -> "_Cut":
        """An epoch's shards in random order, cut into blocks."""
        import numpy as np

        shards = self.stream.shards
        filled = [i for i in _permutation(f"{self.key}/{epoch}/shards", len(shards)).tolist() if shards[i]]
        groups: list[list[int]] = [[]]
        held = 0
        for shard in filled:
            if held >= self.stream.block:
                groups.append([])
                held = 0
            groups[-1].append(shard)
            held += shards[shard]
        ends = np.cumsum([sum(shards[i] for i in group) for group in groups])
        return _Cut([np.array(group) for group in groups], ends)

    def _block(self, cut: "_Cut", epoch: int, at: int) -> "NDArray[np.int64]":
        """The samples of one block, in the order of the epoch."""
        import numpy as np

        starts = self._starts
        ids = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in cut.shards[at]])
        return ids[_permutation(f"{self.key}/{epoch}/block/{at}", len(ids))]


@dataclass(frozen=True)
class _Cut:
    shards: "list[NDArray[np.int64]]"  # of each block
    ends: "NDArray[np.int64]"  # positions behind each block


def _kept(held: OrderedDict[K, V], key: K, make: Callable[[], V], most: int) -> V:
    """From `held`, or made and kept there. Threads may make the same twice: it is the same."""
    found = held.get(key)
    if found is None:
        found = held[key] = make()
        while len(held) > most:
            held.popitem(last=False)
    return found


def _permutation(key: str, count: int) -> "NDArray[np.int64]":
    """A permutation of `count` numbers: the order of as many random ones, ties (one in 2^64) to the first."""
    import numpy as np

    words = np.frombuffer(hashlib.sha256(key.encode()).digest()[:16], "<u8")
    return np.argsort(np.random.Philox(key=words).random_raw(count), kind="stable")


def _fraction(weight: str) -> Fraction:
    try:
        return Fraction(str(weight))
    except (ValueError, ZeroDivisionError) as error:
        raise ConfigError(f"weight={weight!r} of a stream is not a number") from error


def _only(mapping: JsonMapping, known: Sequence[str], what: str) -> None:
    for name in mapping:
        if name not in known:
            raise ConfigError(f"{what}: unknown field {name!r}{did_you_mean(name, known)}")
