"""The binary form of a vocabulary, a bundle's tokenizer.bin: only its header is read before more is needed.

`RLTOK2`, the header's length (uint32) and JSON, then the sections whose sizes it gives: tokens and merges as
separated text, scores (float64), where each token begins in its section (uint32), the short text encoder's tables.
"""

import json
import struct
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from typing import overload

from roofline.common.errors import ConfigError
from roofline.text.tokenizers.short_text import ShortTextEncoder, little, tables
from roofline.text.tokenizers.vocabulary import AddedToken, Vocabulary

_MAGIC = b"RLTOK2\n"
_TEXTS = ("tokens", "lefts", "rights")


def to_bytes(vocabulary: Vocabulary) -> bytes:
    """The fast form. Read back by `from_bytes`."""
    texts = {name: list(getattr(vocabulary, name)) for name in _TEXTS}
    used = set().union(*(map(set, texts["tokens"]))) if texts["tokens"] else set()
    separator = next(chr(c) for c in range(0x110000) if chr(c) not in used)
    sections = [separator.join(texts[name]).encode("utf-8") for name in _TEXTS]
    sections.append(little(array("d", vocabulary.scores)))
    starts, width, at = array("I", [0]), len(separator.encode()), 0
    for token in texts["tokens"]:
        at += len(token.encode()) + width
        starts.append(at)
    sections.append(little(starts))
    left_out = (*_TEXTS, "scores", "added")
    header = {f.name: getattr(vocabulary, f.name) for f in fields(vocabulary) if f.name not in left_out}
    quick = tables(vocabulary)
    sections += quick[2:] if quick is not None else (b"", b"")
    header |= {
        "added": [asdict(token) for token in vocabulary.added],
        "quick": None if quick is None else quick[:2],
        "separator": separator,
        "counts": [len(texts[name]) for name in _TEXTS],
        "bytes": [len(section) for section in sections],
    }
    packed = json.dumps(header).encode("utf-8")
    return b"".join([_MAGIC, struct.pack("<I", len(packed)), packed, *sections])


def from_bytes(data: bytes | memoryview) -> tuple[Vocabulary, ShortTextEncoder | None]:
    """The vocabulary, whose texts are split at their first use, and its encoder of short texts, where it has one.

    Raises ConfigError on anything that `to_bytes` did not write.
    """
    data = memoryview(data)
    if bytes(data[: len(_MAGIC)]) != _MAGIC:
        raise ConfigError("not a stored tokenizer: it does not begin with RLTOK2")
    try:
        at = len(_MAGIC) + 4
        (length,) = struct.unpack("<I", data[len(_MAGIC) : at])
        header = json.loads(bytes(data[at : at + length]))
        at += length
        separator, counts, sizes = header.pop("separator"), header.pop("counts"), header.pop("bytes")
        quick = header.pop("quick")
        if at + sum(sizes) != len(data):
            raise ValueError(f"{len(data)} bytes instead of {at + sum(sizes)}")
        sections = []
        for size in sizes:
            sections.append(data[at : at + size])
            at += size
        *texts, scores, starts, pairs, results = sections
        for name, count, section in zip(_TEXTS, counts, texts, strict=True):
            header[name] = Texts(name, section, separator, count, starts if name == "tokens" else None)
        header["scores"] = _floats(scores)
        header["added"] = [AddedToken(**token) for token in header["added"]]
        for name in ("eos_ids", "prefix", "suffix"):
            header[name] = tuple(header[name])
        encoder = None
        if quick is not None and sys.byteorder == "little":
            patterns, bytes_ids = quick
            encoder = ShortTextEncoder(patterns, bytes_ids, pairs, results)
        return Vocabulary(**header), encoder
    except (ValueError, TypeError, KeyError, IndexError, struct.error) as error:
        raise ConfigError(f"the stored tokenizer is damaged: {error}") from error


class Texts(Sequence[str]):
    """Strings stored as one text with separators. A single one is read at the offset that `starts` gives for it."""

    def __init__(self, name: str, data: memoryview, separator: str, count: int, starts: memoryview | None) -> None:
        self._name, self._data, self._separator, self._count = name, data, separator, count
        self._starts = starts
        self._list: list[str] | None = None
        if starts is not None and len(starts) != 4 * (count + 1):
            raise ValueError(f"{count} {name} with {len(starts)} bytes of places")

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, at: int) -> str: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[str]: ...

    def __getitem__(self, at: int | slice) -> str | Sequence[str]:
        if self._list is None and self._starts is not None and isinstance(at, int) and 0 <= at < self._count:
            first, end = struct.unpack_from("<II", self._starts, 4 * at)
            return str(self._data[first : end - len(self._separator.encode())], "utf-8")
        return self._all()[at]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def _all(self) -> list[str]:
        """Raises ConfigError when there are not as many as there should be."""
        if self._list is None:
            texts = str(self._data, "utf-8", "replace").split(self._separator) if self._count else []
            if len(texts) != self._count:
                raise ConfigError(
                    f"the stored tokenizer is damaged: {self._name} has {len(texts)} entries instead of {self._count}"
                )
            self._list = texts
        return self._list


def _floats(data: memoryview) -> "array[float]":
    numbers = array("d", bytes(data))
    if sys.byteorder != "little":
        numbers.byteswap()
    return numbers
