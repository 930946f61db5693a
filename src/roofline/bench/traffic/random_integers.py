"""Random numbers of integer arithmetic alone, so that a seed gives the same traffic on every system and Python.

The generator is SplitMix64 (Steele, Lea and Flood 2014): a counter whose values are mixed. Lengths are drawn from
tables of quantiles (`lengths.toml`), between whose entries it interpolates in integers.
"""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio


class RandomIntegers:
    """A stream of random integers. stream: its name; streams of one seed are independent of each other, so that more
    draws of lengths do not change any text."""

    def __init__(self, seed: int, stream: str = "") -> None:
        state = seed & _MASK
        for byte in stream.encode():
            state = _mix((state ^ byte) * _STEP & _MASK)
        self._state = state

    def bits(self) -> int:
        """64 random bits."""
        self._state = (self._state + _STEP) & _MASK
        return _mix(self._state)

    def below(self, bound: int) -> int:
        """An integer from 0 up to `bound`, without it; uneven by less than `bound` in 2^64."""
        return self.bits() * bound >> 64

    def one_of(self, values: Sequence[T]) -> T:
        """One of the values."""
        return values[self.below(len(values))]

    def some_of(self, values: Sequence[T], count: int) -> list[T]:
        """So many of the values, fewer than 2^32: what as many calls of `one_of` return, in a tenth of their time."""
        counters = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_STEP) + np.uint64(self._state)
        self._state = (self._state + count * _STEP) & _MASK
        bits = _mixed(counters)
        # The upper 64 bits of a product of 96, from products of its halves.
        high, low, bound = bits >> np.uint64(32), bits & np.uint64(0xFFFFFFFF), np.uint64(len(values))
        places = high * bound + (low * bound >> np.uint64(32)) >> np.uint64(32)
        return [values[place] for place in places.tolist()]

    def length(self, quantiles: Sequence[int]) -> int:
        """A draw from a distribution of integers, of which evenly spaced quantiles are listed, both ends included."""
        place = self.below((len(quantiles) - 1) << 32)
        at, part = place >> 32, place & 0xFFFFFFFF
        low, high = quantiles[at], quantiles[at + 1]
        return low + ((high - low) * part + (1 << 31) >> 32)


def _mix(value: int) -> int:
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """What `_mix` makes of each value; arrays of 64 bits lose what is above them by themselves."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)
