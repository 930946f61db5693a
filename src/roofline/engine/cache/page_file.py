"""Pages of the prefix cache in a file: written when an engine closes, found by the next one that computes the same.

    MAGIC, FORMAT, length of the head | head (JSON) | SHA-256 of both | record of a page | record of a page | ...
    record: key | the page's bytes | SHA-256 of both

Records of snapshots follow those of the pages, in the same form, where the model has recurrent state: format 2. What
was used last comes first, so a smaller cache reads the beginning and leaves what it would evict. Pages and slots go
between the file and their own memory, one at a time: neither way needs memory for more of them.
"""

import fcntl
import hashlib
import os
import re
import struct
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import msgspec

from roofline.backends.base import ChecksWeights, CopiesState, Executable, IdentifiesWeights, KeepsPages
from roofline.common import log
from roofline.common.errors import ConfigError, UnsupportedError
from roofline.common.files import cause_of, open_regular
from roofline.engine.cache.paged import PagedCache
from roofline.engine.cache.state_slots import StateSlots
from roofline.ops.batch import PAGE_TOKENS

MAGIC, FORMAT, FORMAT_WITH_STATE = b"RFPAGES\n", 1, 2
LEAD = struct.Struct("<8sII")  # MAGIC, FORMAT, bytes of the head
MAX_HEAD = 4096  # bytes
DIGEST_BYTES = hashlib.sha256().digest_size  # of a key too
READERS = 4  # threads: one reads while others compute checksums
BUFFER = 1 << 20  # bytes


class PageFileHead(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the pages belong to: the executable's fingerprint, on which all bits depend, and what names the cause where
    it differs. weights: as `IdentifiesWeights` has it; pages: records that follow; slots: records of snapshots behind
    them, of `slot_bytes` each."""

    fingerprint: str
    weights: str
    page_tokens: int
    page_bytes: int
    pages: int
    slot_bytes: int = 0
    slots: int = 0


Views = Callable[[int], Sequence[memoryview]]  # of a page or slot, by its number


class PageFile:
    """The file at `path`, for the pages of one executable's cache. No other program should write it meanwhile.

    Raises UnsupportedError for an executable whose pages cannot be copied, ConfigError for a place that cannot be
    written.
    """

    def __init__(self, path: Path, executable: Executable) -> None:
        if not isinstance(executable, KeepsPages):
            reason = "the pages of its cache do not lie in the memory of the engine's process"
            raise UnsupportedError("cache_file with this model's backend", reason, ("backend=cpu",))
        has_state = executable.limits.state_slots > 0
        if has_state and not isinstance(executable, CopiesState):
            reason = "its backend does not give out the recurrent state of the model"
            raise UnsupportedError("cache_file with this model", reason, ("leave it out",))
        self._path, self._executable = path.resolve(), executable  # what is written is the file behind a link
        self._page_views: Views = executable.page_views
        self._slot_views: Views | None = executable.slot_views if isinstance(executable, CopiesState) else None
        self._slot_bytes = executable.slot_bytes if has_state and isinstance(executable, CopiesState) else 0
        self._format = FORMAT_WITH_STATE if has_state else FORMAT
        self._record_bytes = executable.page_bytes + 2 * DIGEST_BYTES
        special = path.exists() and not path.is_file()
        if special or not os.access(self._path.parent, os.W_OK | os.X_OK):
            remedy = "give the name of a file in a folder that exists and can be written"
            raise ConfigError(f"cache_file={str(path)!r} cannot be written: {remedy}")

    def restore(self, cache: PagedCache, slots: StateSlots | None = None) -> int:
        """Fill a cache that has held nothing yet, with as many pages as it has room for; how many those were. slots: of
        a model with recurrent state, likewise.

        A file that is of no use is left alone, and a line in the log says why.
        """
        self._remove_leftovers()
        if not self._path.exists():
            return 0
        started = time.perf_counter()
        try:
            with open_regular(self._path) as stream:
                start, head = self._read_head(stream)
                keys = self._read_records(stream.fileno(), start, min(head.pages, cache.num_pages), self._page_views)
                snapshots: list[bytes | None] = []
                if slots is not None and self._slot_views is not None:
                    behind = start + head.pages * self._record_bytes
                    count = min(head.slots, slots.num_pages)
                    snapshots = self._read_records(stream.fileno(), behind, count, self._slot_views)
        except (ConfigError, OSError) as error:
            cause = f"{self._path}: cannot be read: {cause_of(error)}" if isinstance(error, OSError) else error
            log.get("engine").warning("no pages of the prefix cache were restored: %s", cause)
            return 0
        cache.restore(keys)
        if slots is not None:
            slots.restore(snapshots)
        good, seconds = len(keys) - keys.count(None), time.perf_counter() - started
        for kind, found_keys in (("pages", keys), ("snapshots", snapshots)):
            if damaged := found_keys.count(None):
                text = "%s: %d of %d %s are damaged or missing; they are left out and computed again"
                log.get("engine").warning(text, self._path, damaged, len(found_keys), kind)
        log.get("engine").info("%d pages of the prefix cache restored from %s in %.3f s", good, self._path, seconds)
        return good

    def save(self, cache: PagedCache, slots: StateSlots | None = None) -> None:
        """Replace the file with the pages that can be found now. Where that is impossible a line in the log says why,
        and the file stays as it was, as it does where there are none."""
        entries = cache.findable()
        executable = self._executable
        if isinstance(executable, ChecksWeights) and executable.weights_check and executable.weights_check.problem:
            log.get("engine").warning("prefix cache not saved to %s: its weights are not the model's", self._path)
            return
        if not entries:
            return
        part = self._path.with_name(f"{self._path.name}.{os.getpid()}.part")
        try:
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb", buffering=BUFFER) as stream:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it is not a dead process's (_remove_leftovers)
                self._write(stream, entries, slots.findable() if slots is not None else [])
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(part, self._path)
        except OSError as error:
            log.get("engine").warning("prefix cache not saved to %s: %s", self._path, cause_of(error))
        finally:
            with suppress(OSError):
                part.unlink(missing_ok=True)

    def _head(self, pages: int, slots: int) -> PageFileHead:
        """The head of a file of this executable."""
        executable = self._executable
        return PageFileHead(
            fingerprint=executable.fingerprint,
            weights=executable.weights_identity if isinstance(executable, IdentifiesWeights) else "",
            page_tokens=PAGE_TOKENS,
            page_bytes=executable.page_bytes,
            pages=pages,
            slot_bytes=self._slot_bytes,
            slots=slots,
        )

    def _write(self, stream: BinaryIO, entries: list[tuple[bytes, int]], snapshots: list[tuple[bytes, int]]) -> None:
        body = msgspec.json.encode(self._head(len(entries), len(snapshots)))
        lead = LEAD.pack(MAGIC, self._format, len(body)) + body
        stream.write(lead + hashlib.sha256(lead).digest())
        for key, page in entries:
            _write_record(stream, key, self._page_views(page))
        for key, slot in snapshots:
            assert self._slot_views is not None, "`__init__` refuses others"
            _write_record(stream, key, self._slot_views(slot))

    def _read_head(self, stream: BinaryIO) -> tuple[int, PageFileHead]:
        """Where the first record begins, and the head. Raises ConfigError, with the cause, for a file that is not of
        this executable."""
        lead = stream.read(LEAD.size)
        if len(lead) < LEAD.size or not lead.startswith(MAGIC):
            raise ConfigError(f"{self._path} is no file of a prefix cache")
        _, number, length = LEAD.unpack(lead)
        if number != self._format:
            formats = f"this version of roofline reads {self._format} for such a model"
            raise ConfigError(f"{self._path} has format {number}, {formats}")
        body, checksum = stream.read(min(length, MAX_HEAD)), stream.read(DIGEST_BYTES)
        if hashlib.sha256(lead + body).digest() != checksum:
            raise ConfigError(f"{self._path} is damaged: the checksum of its head differs")
        try:
            head = msgspec.json.decode(body, type=PageFileHead)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{self._path} is damaged: {error}") from error
        expected_head = self._head(head.pages, head.slots)
        if head.weights != expected_head.weights:
            raise ConfigError(f"{self._path} is of another model")
        if (head.page_tokens, head.page_bytes) != (expected_head.page_tokens, expected_head.page_bytes):
            sizes = f"{head.page_tokens} tokens in {head.page_bytes} bytes"
            here = f"{expected_head.page_tokens} in {expected_head.page_bytes}"
            raise ConfigError(f"{self._path} has pages of {sizes}, not {here}: another format of the key-value cache")
        if head != expected_head or min(head.pages, head.slots) < 0:
            cause = "this model computed with other settings, by another build or on another kind of chip"
            raise ConfigError(f"{self._path} is of {cause}: their bits may differ")
        return LEAD.size + length + DIGEST_BYTES, head

    def _read_records(self, descriptor: int, start: int, count: int, views: Views) -> list[bytes | None]:
        """Read records into the pages or slots of the same numbers; the key of each, None: it is damaged or missing."""
        record_bytes = sum(view.nbytes for view in views(0)) + 2 * DIGEST_BYTES if count else 0

        def read(first: int) -> list[bytes | None]:
            numbers = range(first, count, READERS)
            return [_read_record(descriptor, start + number * record_bytes, views(number)) for number in numbers]

        keys: list[bytes | None] = [None] * count
        with ThreadPoolExecutor(READERS) as pool:
            for first, part in enumerate(pool.map(read, range(READERS))):
                keys[first::READERS] = part
        return keys

    def _remove_leftovers(self) -> None:
        """Remove what processes that were killed while they saved have left; one that lives has its file locked."""
        ours = re.compile(re.escape(self._path.name) + r"\.[0-9]+\.part")
        with suppress(OSError):
            for part in [part for part in self._path.parent.iterdir() if ours.fullmatch(part.name)]:
                with suppress(OSError), part.open("rb") as stream:
                    fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    part.unlink()


def _write_record(stream: BinaryIO, key: bytes, views: Sequence[memoryview]) -> None:
    checksum = hashlib.sha256(key)
    stream.write(key)
    for view in views:
        checksum.update(view)
        stream.write(view)
    stream.write(checksum.digest())


def _read_record(descriptor: int, start: int, views: Sequence[memoryview]) -> bytes | None:
    """Read a record into where its bytes belong; its key, None: it is damaged or missing."""
    key, digest = bytearray(DIGEST_BYTES), bytearray(DIGEST_BYTES)
    try:
        os.preadv(descriptor, [key, *views, digest], start)  # where less is read, the checksum is another
    except (OSError, OverflowError):  # a head of another hand's may count pages beyond what a file can have
        return None
    checksum = hashlib.sha256(key)
    for view in views:
        checksum.update(view)
    return bytes(key) if checksum.digest() == digest else None
