"""What a recording of steps is made of: entries in MessagePack, each after its length and its CRC-32, behind a line
that says so.

A file stands alone: what lay in the cache before it, as far as its steps read it, is a `Lead`, which is computed before
them. The last entry of a file that is complete is an `End`. A file that a crash cut off ends with the step that was
under way.
"""

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from roofline.common.errors import ConfigError
from roofline.common.files import read_regular

MAGIC = b"roofline steps 4\n"
OLDER = b"roofline steps 3\n"  # without recurrent state; as long as MAGIC
PREFIX = struct.Struct("<II")  # of an entry: its length, and the CRC-32 of what follows
MOST_END = 64  # bytes of the last entry
SUFFIX = ".steps"
MAX_FILE = 1 << 30  # bytes


class Head(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The engine. Sizes of its largest step and of its cache; began: Unix time; with_ids: whether token ids, and so the
    texts of prompts and answers, are in the file; adapter_rank: the largest rank that an adapter may have, 0 where the
    engine has no places for adapters; state_slots: slots of recurrent state."""

    fingerprint: str
    tokens: int
    segments: int
    rows: int
    pages: int
    num_pages: int
    vocab_size: int
    with_ids: bool
    began: float
    max_adapters: int
    adapter_rank: int
    state_slots: int = 0


class Arrival(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A request came. at: seconds since the file's `began`, as of steps; answers: how many it wants."""

    request_id: str
    at: float
    prompt_tokens: int
    max_tokens: int
    answers: int


class AdapterPlaced(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """From now on the slot holds the adapter with this digest, which was read from `path`."""

    slot: int
    digest: str
    path: str


class Lead(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The first `count` positions of an answer were computed before: in these pages, of these ids.

    slot: of the adapter they were computed with, 0 for none; state_slot: where the recurrent state behind them lay, -1:
    the model has none.
    """

    count: int
    pages: list[int]
    ids: list[int] | None
    slot: int
    state_slot: int = -1


class AnswerPart(msgspec.Struct, frozen=True, array_like=True):
    """One answer's part of a step: `count` ids from position `first` on.

    answer: its number in the file; pages: those of its table from the one of `first` on, the ones before are as they
    were; ids: those that are computed, drafted ones among them; state: the slots of recurrent state that it reads and
    writes, as `StateMove` has them in its order, empty where the model has none.
    """

    answer: int
    first: int
    count: int
    pages: list[int]
    ids: list[int] | None
    state: tuple[int, ...] = ()


class Named(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """An answer has this number from now on; lead_pages: the page table of its lead; slot: of its adapter, or 0."""

    answer: int
    request_id: str
    index: int
    lead_pages: list[int]
    slot: int


class Step(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A step, written before it runs. rows: which of its tokens have logits, ascending."""

    number: int
    at: float
    parts: list[AnswerPart]
    rows: list[int]


class Landed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What came of a step: a digest of each of its logit rows; error: why there is none."""

    number: int
    digests: list[bytes]
    error: str | None = None


class End(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Nothing more was written to the file, which has so many entries before this one."""

    entries: int


Entry = Head | Arrival | AdapterPlaced | Lead | Named | Step | Landed | End
encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Entry] = msgspec.msgpack.Decoder(Entry)


def frame(entry: Entry) -> bytes:
    """An entry as it stands in a file."""
    body = encoder.encode(entry)
    return PREFIX.pack(len(body), zlib.crc32(body)) + body


def has_end(path: Path) -> bool:
    """Whether a recording was written to its end, so that nothing of it was cut off."""
    with path.open("rb") as stream:
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - MOST_END))
        return _ends(stream.read())


def _ends(data: bytes) -> bool:
    """Whether the last entry of a file is its end."""
    tail = data[-MOST_END:]
    for start in range(len(tail) - PREFIX.size):
        length, checksum = PREFIX.unpack_from(tail, start)
        body = tail[start + PREFIX.size :]
        if length == len(body) and checksum == zlib.crc32(body):
            return isinstance(_decoder.decode(body), End)
    return False


def files_of(place: Path) -> list[Path]:
    """The recordings in a folder, oldest first, or the one file. Raises ConfigError where there is none.

    A folder without recordings of its own has those of its subfolders: each replica writes into one.
    """
    if place.is_file():
        return [place]
    files = sorted(place.glob(f"*{SUFFIX}")) or sorted(place.glob(f"*/*{SUFFIX}"), key=lambda path: path.name)
    if not files:
        raise ConfigError(f"{place} has no recording: a server with --record {place} writes one")
    return files


def read_entries(path: Path) -> tuple[Head, Iterator[Entry]]:
    """A recording's head, and its other entries in order; one that a crash cut off is left out.

    Raises ConfigError for a file that is no recording, in the iterator too.
    """
    data = read_regular(path, MAX_FILE)
    if not data.startswith((MAGIC, OLDER)):
        raise ConfigError(f"{path} is no recording of this version: it does not begin with {MAGIC.decode().strip()!r}")
    entries = _entries(path, data)
    head = next(entries, None)
    if not isinstance(head, Head):
        raise ConfigError(f"{path} is no recording: it does not say of which engine")
    return head, entries


def _entries(path: Path, data: bytes) -> Iterator[Entry]:
    at, count = len(MAGIC), 0
    while len(data) - at >= PREFIX.size:
        length, checksum = PREFIX.unpack_from(data, at)
        start = at + PREFIX.size
        if len(data) < start + length:
            if _ends(data):  # so it was not cut off
                raise ConfigError(f"{path} is damaged after {at} bytes: an entry has no such length")
            return
        body = data[start : start + length]
        if zlib.crc32(body) != checksum:
            raise ConfigError(f"{path} is damaged after {at} bytes: an entry does not fit its checksum")
        try:
            entry = _decoder.decode(body)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is damaged after {at} bytes: {error}") from error
        at = start + length
        if isinstance(entry, End) and (entry.entries != count or at != len(data)):
            raise ConfigError(f"{path} is damaged: it has {count} entries, and its end tells of {entry.entries}")
        count += 1
        yield entry
