"""The binary form of a vocabulary, a bundle's tokenizer.bin: only its header is read before more is needed.

`RLTOK2`, the header's length (uint32) and JSON, then the sections whose sizes it gives: tokens and merges as
separated text, scores (float64), where each token begins in its section (uint32), the short text encoder's tables.
"""

import json
import re
import struct
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from typing import overload

from roofline.common.errors import ConfigError
from roofline.common.fields import Fields, describe
from roofline.common.json_files import parse_object
from roofline.text.tokenizers.patterns import least_length
from roofline.text.tokenizers.short_text import ShortTextEncoder, little, tables
from roofline.text.tokenizers.vocabulary import MAX_ID, MODEL_KINDS, Vocabulary, added_token

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
        fields = Fields("the stored tokenizer", parse_object("the stored tokenizer", bytes(data[at : at + length])))
        at += length
        sections = []
        for size in _numbers(fields, "bytes", len(_TEXTS) + 4):
            sections.append(data[at : at + size])
            at += size
        if at != len(data):
            raise ValueError(f"{len(data)} bytes instead of {at}")
        return _vocabulary(fields, sections), _encoder(fields, *sections[-2:])
    except ConfigError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, struct.error, re.error) as error:
        raise ConfigError(f"the stored tokenizer is damaged: {error}") from error


def _vocabulary(fields: Fields, sections: Sequence[memoryview]) -> Vocabulary:
    *texts, scores, starts, _, _ = sections
    counts, separator = _numbers(fields, "counts", len(_TEXTS)), fields.need("separator", str)
    tokens, lefts, rights = (
        Texts(name, section, separator, count, starts if name == "tokens" else None)
        for name, count, section in zip(_TEXTS, counts, texts, strict=True)
    )
    stored = fields.need("model", str)
    kind = next((known for known in MODEL_KINDS if known == stored), None)
    if kind is None:
        fields.refuse("model", f"is {describe(stored)}, not one of {', '.join(MODEL_KINDS)}")
    around = {name: tuple(fields.elements(name, int) or ()) for name in ("eos_ids", "prefix", "suffix")}
    return Vocabulary(
        model=kind,
        tokens=tokens,
        lefts=lefts,
        rights=rights,
        scores=_floats(scores),
        leftmost=fields.get("leftmost", bool, False),
        options=fields.need("options", dict),
        pipeline=fields.need("pipeline", dict),
        added=[added_token(entry, MAX_ID) for entry in fields.objects("added")],
        charsmap=fields.get("charsmap", str, ""),
        byte_level=fields.need("byte_level", bool),
        continues=fields.get("continues", str),
        joins_signs=fields.get("joins_signs", bool, False),
        strip_space=fields.need("strip_space", bool),
        bos_id=fields.get("bos_id", int),
        **around,
    )


def _encoder(fields: Fields, pairs: memoryview, results: memoryview) -> ShortTextEncoder | None:
    quick = fields.get("quick", list)
    if quick is None or sys.byteorder != "little":
        return None
    if len(quick) != 2:
        fields.refuse("quick", f"has {len(quick)} elements instead of 2")
    ids = quick[1]
    patterns = Fields(fields.path, {"quick[0]": quick[0]}).elements("quick[0]", str) or []
    for pattern in patterns:
        least_length(pattern)  # Python's own patterns have no limit of tries
    starts = _numbers(Fields(fields.path, {"quick[1]": ids}), "quick[1]", 256, least=-1)
    return ShortTextEncoder(patterns, starts, pairs, results)


def _numbers(fields: Fields, key: str, count: int, least: int = 0) -> list[int]:
    """A list of so many whole numbers, none below `least`."""
    numbers = fields.elements(key, int)
    if numbers is None or len(numbers) != count or min(numbers) < least:
        fields.refuse(key, f"is not a list of {count} numbers of at least {least}")
    return numbers


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
        """Raises ConfigError for one that is no UTF-8."""
        if self._list is None and self._starts is not None and isinstance(at, int) and 0 <= at < self._count:
            first, end = struct.unpack_from("<II", self._starts, 4 * at)
            try:
                return str(self._data[first : end - len(self._separator.encode())], "utf-8")
            except UnicodeDecodeError as error:
                raise ConfigError(f"the stored tokenizer is damaged: entry {at} of {self._name} is no text") from error
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
