"""Maps the files of shards into memory, from their folder or from a cache that they are fetched or unpacked into."""

import functools
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from roofline.common import log
from roofline.common.errors import ConfigError
from roofline.train.data.mds_index import INDEX, File, Shard
from roofline.train.data.shard_codecs import codec
from roofline.train.data.shard_versions import ShardVersions
from roofline.train.storage.file_cache import FileCache
from roofline.train.storage.local import file_tag, store_errors
from roofline.train.storage.store import MissingError, Store

THREADS = 4  # that prefetch
CLOSE_SECONDS = 5.0  # that `close` waits for them
Fetch = Callable[[int, threading.Event], None]


class _Stopped(Exception):
    """The shard that is being fetched is no longer needed."""


class ShardFiles:
    """The raw files of shards as memory maps. Uncompressed files in a local folder are mapped there, without a cache.

    Args:
        store: holds index and shards.
        versions: what the shards' files have to be where the index has no hashes.
        key: 32 hexadecimal digits that identify the source: the shards' folder in the cache.
        folder, limit: of the cache (see `file_cache.Cache`).
    """

    def __init__(
        self,
        store: Store,
        shards: Sequence[Shard],
        versions: ShardVersions,
        key: str,
        folder: Path | None,
        limit: int | None,
    ) -> None:
        self._store, self._shards, self._versions, self._key = store, shards, versions, key
        needed = store.path(INDEX) is None or any(shard.packed is not None for shard in shards)
        self._cache = FileCache(folder, limit) if needed else None
        self._checked: set[int] = set()  # shards in the cache whose hashes have been checked
        self._in_place: dict[int, tuple[str, str]] = {}  # path and tag of shards as they were when they were mapped
        self._prefetcher = _Prefetcher(self._fetch, [shard.raw.size for shard in shards], limit)

    def map(self, at: int) -> tuple[mmap.mmap, str]:
        """The checked raw bytes of a shard, and their file's name; the cache keeps the file while the map is open."""
        shard = self._shards[at]
        path = self._store.path(shard.raw.basename)
        if path is None:
            if self._cache is None:
                raise ConfigError(f"{self._where(shard.raw)} is missing")
            data, where = self._cached(self._cache, at)
            self._checked.add(at)
        else:
            data, where = self._mapped(at, path)
        self._prefetcher.mark_read(at)
        return data, where

    def is_current(self, at: int) -> bool:
        """Whether a mapped shard's file is still the one that was mapped; one in the cache is."""
        if at not in self._in_place:
            return True
        path, tag = self._in_place[at]
        with store_errors(Path(path)):
            return file_tag(os.stat(path)) == tag

    def prefetch(self, shards: Sequence[int]) -> None:
        """Begin to fetch these shards, instead of those of earlier calls."""
        self._prefetcher.request([at for at in shards if self._store.path(self._shards[at].raw.basename) is None])

    def close(self) -> None:
        """Stop fetching, and close the cache."""
        self._prefetcher.close()
        if self._cache is not None:
            self._cache.close()

    def _mapped(self, at: int, path: Path) -> tuple[mmap.mmap, str]:
        """The map of a shard's own file, which is checked as often as it changes."""
        shard, where = self._shards[at].raw, str(path)
        expected = self._versions.tag(shard)
        with store_errors(path), path.open("rb") as file:
            tag = file_tag(os.fstat(file.fileno()))
            if expected not in (None, tag):
                raise self._versions.refusal(shard)
            data = _map(file, path)
        shard.check(data, where, self._in_place.get(at) != (where, tag))
        self._in_place[at] = where, tag
        return data, where

    def _cached(self, cache: FileCache, at: int) -> tuple[mmap.mmap, str]:
        shard, name = self._shards[at].raw, f"{self._key}/{self._shards[at].raw.basename}"
        where = str(cache.folder / name)
        while True:
            file, is_new = cache.open(name, shard.size, functools.partial(self._make, at, None))
            with file:  # the map keeps the file's lock
                try:
                    data = _map(file, where)
                    # A new file has been checked when it was made; an old one may be damaged.
                    shard.check(data, where, not is_new and at not in self._checked)
                    return data, where
                except ConfigError:
                    if is_new:
                        raise
                    cache.drop(name)

    def _fetch(self, at: int, stop: threading.Event) -> None:
        """Put a shard into the cache."""
        if self._cache is not None:
            shard, make = self._shards[at].raw, functools.partial(self._make, at, stop)
            self._cache.have(f"{self._key}/{shard.basename}", shard.size, make)

    def _make(self, at: int, stop: threading.Event | None, file: BinaryIO) -> None:
        """Fetch or unpack a shard into a new file of the cache, and check it."""
        shard = self._shards[at]
        for data in self._raw_pieces(shard, stop):
            file.write(data)
        file.flush()
        if shard.raw.hashes:
            with _map(file, self._where(shard.raw)) as mapped:
                shard.raw.check(mapped, self._where(shard.raw))

    def _raw_pieces(self, shard: Shard, stop: threading.Event | None) -> Iterator[bytes]:
        """The bytes of a shard, unpacked from its compressed file where the store has that one."""
        if shard.packed is not None:
            try:
                packed = b"".join(self._pieces(shard.packed, stop))
            except MissingError:
                if not self._store.exists(shard.raw.basename):
                    raise
            else:
                yield from self._unpacked(shard, shard.packed, packed)
                return
        yield from self._pieces(shard.raw, stop)

    def _unpacked(self, shard: Shard, packed: File, data: bytes) -> Iterator[bytes]:
        where = self._where(packed)
        packed.check(data, where)
        try:
            yield from codec(shard.compression or "")[1](data, shard.raw.size)
        except (OSError, EOFError, ValueError) as error:
            raise ConfigError(f"{where} cannot be unpacked: {error}") from error

    def _pieces(self, file: File, stop: threading.Event | None) -> Iterator[bytes]:
        """The chunks of a file in the store. Raises ConfigError if its size is not that of the index."""
        count = 0
        for data in self._versions.chunks(file):
            if stop is not None and stop.is_set():
                raise _Stopped
            count += len(data)
            if count > file.size:
                break
            yield data
        if count != file.size:
            more = "" if count < file.size else " or more"
            raise ConfigError(
                f"{self._where(file)} has {count:,}{more} bytes instead of {file.size:,}: it is cut or another file"
            )

    def _where(self, file: File) -> str:
        return f"{self._store.url}/{file.basename}"


def _map(file: BinaryIO, where: object) -> mmap.mmap:
    if not os.fstat(file.fileno()).st_size:
        raise ConfigError(f"{where} is empty")
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


class _Prefetcher:
    """Threads that fetch the shards that will be read next, into half of the cache's limit: the rest is for reads."""

    def __init__(self, fetch: Fetch, sizes: Sequence[int], limit: int | None) -> None:
        self._fetch, self._sizes, self._limit = fetch, sizes, limit
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._queue: list[int] = []
        self._unread: set[int] = set()  # fetched or being fetched, but not read yet
        self._threads: list[threading.Thread] = []
        self._changed, self._stop = threading.Condition(), threading.Event()

    def request(self, shards: Sequence[int]) -> None:
        """Replace what waits to be fetched."""
        if self._process != os.getpid():
            self._begin()  # a forked process has no threads, but the locks that they held
        with self._changed:
            self._unread &= set(shards)
            self._queue = [at for at in shards if at not in self._unread]
            while len(self._threads) < min(THREADS, len(self._queue)) and not self._stop.is_set():
                self._threads.append(threading.Thread(target=self._work, name="roofline-shards", daemon=True))
                self._threads[-1].start()
            self._changed.notify_all()

    def mark_read(self, at: int) -> None:
        """A shard has been read, which makes room for others."""
        if self._threads and self._process == os.getpid():
            with self._changed:
                self._unread.discard(at)
                self._queue = [other for other in self._queue if other != at]
                self._changed.notify_all()

    def close(self) -> None:
        if self._process != os.getpid():
            return
        self._stop.set()
        with self._changed:
            self._changed.notify_all()
        until = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _next(self) -> int | None:
        if not self._queue:
            return None
        size = sum(self._sizes[at] for at in (*self._unread, self._queue[0]))
        if self._unread and self._limit is not None and size > self._limit // 2:
            return None
        at = self._queue.pop(0)
        self._unread.add(at)
        return at

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._stop.is_set() and (at := self._next()) is None:
                    self._changed.wait()
                if self._stop.is_set():
                    return
            assert at is not None
            try:
                self._fetch(at, self._stop)
            except Exception as error:
                # Reading this shard will fetch it again, and raise.
                log.get("train").info("shard %d could not be fetched ahead: %s", at, error)
                with self._changed:
                    self._unread.discard(at)
