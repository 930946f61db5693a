"""Reads string arrays of GGUF metadata fast: a vocabulary has 100,000 strings, and start-up waits for them.

A string is a uint64 length and that many bytes of UTF-8, so the place of each depends on all before it. Lengths below
256 show as a byte followed by seven zero bytes; numpy finds all such places in a window at once, and the run of places
that form an unbroken chain from the known start is the walk itself. Where the chain breaks, plain steps continue.
"""

import struct

import numpy as np

_LENGTH = struct.Struct("<Q")
_WINDOW = 1 << 18
_MIN_YIELD = 64


class StringArray:
    """The strings of an array, located in the file but not decoded.

    Args:
        data: uint8, the whole file.
        first: where the first string's length stands.
        starts: int64 [count], where each string's bytes begin.
        end: where the last string's bytes end.
    """

    def __init__(self, data: np.ndarray, first: int, starts: np.ndarray, end: int) -> None:
        self._data, self._first, self._starts, self.end = data, first, starts, end

    def __len__(self) -> int:
        return len(self._starts)

    def decode(self) -> list[str]:
        """All strings. Raises UnicodeDecodeError when one is not UTF-8."""
        region = self._data[self._first : self.end].copy()
        headers = self._starts - (8 + self._first)
        keep = np.ones(len(region), bool)
        for k in range(1, 8):
            keep[headers + k] = False
        region[headers] = 0  # one NUL in place of each length
        joined = region[keep].tobytes()
        if joined.count(0) == len(self):
            return joined.decode("utf-8").split("\0")[1:]
        stops = np.append(self._starts[1:] - 8, self.end)  # some string holds a NUL itself
        return [bytes(self._data[a:b]).decode("utf-8") for a, b in zip(self._starts, stops, strict=True)]


def find_strings(data: np.ndarray, position: int, count: int) -> StringArray | None:
    """Locate `count` strings from `position` on; None when the file ends before they do."""
    first, located = position, 0
    chunks: list[np.ndarray] = []
    plain_steps = 16
    while located < count:
        starts, position = _chain(data, position, count - located)
        if len(starts) < _MIN_YIELD and located + len(starts) < count:
            # Long strings, or bytes that look like lengths: walk. The walk doubles while windows yield little, so no
            # file can make us scan a window per few strings for ever.
            walked, position = _walk(data, position, min(plain_steps, count - located - len(starts)))
            starts = np.append(starts, walked)
            plain_steps = min(plain_steps * 2, 1 << 20)
        else:
            plain_steps = 16
        if position > len(data):
            return None
        chunks.append(starts)
        located += len(starts)
    return StringArray(data, first, np.concatenate(chunks) if chunks else np.empty(0, np.int64), position)


def _chain(data: np.ndarray, position: int, count: int) -> tuple[np.ndarray, int]:
    """Starts of at most `count` strings shorter than 256 bytes, and the position after them (may be past the end)."""
    window = data[position : position + _WINDOW]
    zero = window == 0
    pairs = zero[:-1] & zero[1:]
    fours = pairs[:-2] & pairs[2:]
    sevens = fours[:-3] & fours[3:]  # sevens[p]: bytes p .. p + 6 are zero
    places = np.flatnonzero(sevens[1:])[:count]
    if not len(places) or places[0] != 0:
        return np.empty(0, np.int64), position
    ends = places + 8 + window[places]
    broken = np.flatnonzero(places[1:] != ends[:-1])
    length = int(broken[0]) + 1 if len(broken) else len(places)
    return places[:length] + (position + 8), position + int(ends[length - 1])


def _walk(data: np.ndarray, position: int, count: int) -> tuple[np.ndarray, int]:
    """Starts of `count` strings one by one; stops with a position past the end when the file ends."""
    buffer, size, unpack = data.data, len(data), _LENGTH.unpack_from
    starts: list[int] = []
    for _ in range(count):
        position += 8
        if position > size:
            break
        starts.append(position)
        position += unpack(buffer, position - 8)[0]
    return np.array(starts, np.int64), position
