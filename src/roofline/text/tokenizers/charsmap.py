"""The compiled map of characters of a SentencePiece model: what it writes for the characters of a text.

The size of a trie (uint32), the trie, and texts that end with NUL. The trie is a double array of Darts: a unit holds a
label, whether the place after it holds a value, and by what its children's places differ from its own. Keys with equal
ends share them, so it is walked where a text needs it and never written out.
"""

import re
import sys
from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tokenizers

_VALUE = 1 << 31  # of a unit that holds where a text begins, and no label
_HAS_VALUE = 1 << 8
_FAR = 1 << 9  # the offset counts in blocks of 256
_LABEL = 0xFF  # the byte that leads to a place, from where its parent's offset points to
MAX_BYTES = 1 << 24  # the largest of a known model has 250,000
MAX_KEY = 64  # bytes of what is looked for; the longest of a known model has 12


class CharacterMap:
    """A normalizer of the library that does what sentencepiece does: of what is found at a place the longest counts.

    The library's own looks at a character together with its combining marks, and loses marks.
    Raises ValueError for bytes that are no such map, or one in which a walk could leave trie or texts.
    """

    def __init__(self, data: bytes) -> None:
        if len(data) > MAX_BYTES:
            raise ValueError(f"{len(data)} bytes, of {MAX_BYTES} that are allowed")
        size = int.from_bytes(data[:4], "little")
        if size % 4 or not 0 < size <= len(data) - 4:
            raise ValueError(f"a trie of {size} bytes in {len(data)}")
        self._texts = data[4 + size :]
        if self._texts[-1:] != b"\0":
            raise ValueError("its last text does not end")
        #: characters of the longest text that it writes for one
        self.longest_text = max(1, *map(len, self._texts.decode("utf-8").split("\0")))
        self._trie = array("I", data[4 : 4 + size])
        if sys.byteorder != "little":
            self._trie.byteswap()
        _check_walks(self._trie, self._texts)
        self._candidate = self._candidates()

    def normalize(self, normalized: "tokenizers.NormalizedString") -> None:
        """Normalise a text; the library calls this once a text."""
        text = normalized.normalized
        mapped = self.map(text)
        if mapped != text:
            normalized.clear()
            normalized.append(mapped)

    def map(self, text: str) -> str:
        """The text with the replacements in it."""
        data = text.encode("utf-8")
        parts: list[bytes] = []
        done = at = 0
        while candidate := self._candidate.search(data, at):
            start = candidate.start()
            end, replacement = self._longest(data, start)
            if replacement is None:
                first = data[start]
                at = start + (1 if first < 0xC0 else 2 if first < 0xE0 else 3 if first < 0xF0 else 4)
                continue
            parts += (data[done:start], replacement)
            done = at = end
        return b"".join((*parts, data[done:])).decode("utf-8")

    def _longest(self, data: bytes, start: int) -> tuple[int, bytes | None]:
        """Where the longest key ends that stands at a place, and what is written for it; None without one."""
        trie, end, value = self._trie, start, None
        base = trie[0] >> 10 << ((trie[0] & _FAR) >> 6)
        for at in range(start, min(start + MAX_KEY, len(data))):
            byte = data[at]
            place = base ^ byte
            unit = trie[place]
            if byte == 0 or unit & (_VALUE | _LABEL) != byte:
                break
            base = place ^ unit >> 10 << ((unit & _FAR) >> 6)
            if unit & _HAS_VALUE and (at + 1 == len(data) or data[at + 1] & 0xC0 != 0x80):
                end, value = at + 1, trie[base] & ~_VALUE
        return end, None if value is None else self._texts[value : self._texts.index(0, value)]

    def _candidates(self) -> re.Pattern[bytes]:
        """Where a key may stand: at a character beyond ASCII or before one, and at what is a key in ASCII alone."""
        ascii_bytes = [bytes((byte,)) for byte in range(1, 128)]
        alone = b"".join(byte for byte in ascii_bytes if self._longest(byte, 0)[1] is not None)
        base = self._trie[0] >> 10 << ((self._trie[0] & _FAR) >> 6)
        for byte in range(1, 128):  # the ASCII characters with another one behind them in a key
            unit = self._trie[base ^ byte]
            if unit & (_VALUE | _LABEL) == byte:
                after = base ^ byte ^ unit >> 10 << ((unit & _FAR) >> 6)
                if any(self._trie[after ^ other] & (_VALUE | _LABEL) == other for other in range(1, 128)):
                    alone += bytes((byte,))
        before = rb"|[\x00-\x7f](?=[\x80-\xff])"
        return re.compile(rb"[\x80-\xff" + re.escape(alone) + rb"]" + before)


def _check_walks(trie: "array[int]", texts: bytes) -> None:
    """Every place that a walk from the root reaches lies in the trie, and every value at the start of a character."""
    children: dict[int, list[int]] = {}  # by the place that their labels are added to
    for place, unit in enumerate(trie):
        if not unit & _VALUE and unit & _LABEL:
            children.setdefault(place ^ (unit & _LABEL), []).append(place)
    places = [0]
    while places:
        place = places.pop()
        unit = trie[place]
        base = place ^ ((unit >> 10) << ((unit & _FAR) >> 6))
        if base | _LABEL >= len(trie):
            raise ValueError(f"place {place} of the trie leads to {base}, of {len(trie)}")
        if unit & _HAS_VALUE:
            at = trie[base] & ~_VALUE
            if at >= len(texts) or texts[at] & 0xC0 == 0x80:
                raise ValueError(f"a text at byte {at} of {len(texts)}")
        places += children.pop(base, ())  # shared by all parents, and walked to once
