"""Tells shards that were replaced while a run reads them, where no hash in the index does."""

import hashlib
import threading
from collections.abc import Iterator, Sequence

from roofline.common.errors import ConfigError
from roofline.train.data.mds_index import INDEX, File, Shard
from roofline.train.storage.store import ChangedError, Store, StoreError, UnreachableError


class ShardVersions:
    """What the files of shards without hashes were when their index was read; others under their names are refused.

    One listing of the folder tells the versions of all. A file that no listing names, as where the keys do not permit
    listing, counts from its first use on.

    Attributes:
        unhashed: whether there are files whose index has no hash.
        unlisted: why versions are not known from the beginning; None: they are.
        digest: of the versions of all files, which is another one once any of them was replaced; empty if not known.
    """

    def __init__(self, store: Store, shards: Sequence[Shard]) -> None:
        self._store, self._lock = store, threading.Lock()
        self._packed = all(shard.packed is not None for shard in shards)
        names = [file.basename for shard in shards for file in (shard.raw, shard.packed) if file and not file.hashes]
        self.unhashed = bool(names)
        self.unlisted: str | None = None
        self._tags: dict[str, str] = {}
        if names:
            try:
                listed = store.tags()
            except UnreachableError:
                raise
            except StoreError as error:
                self.unlisted = str(error)
            else:
                self._tags = {name: listed[name] for name in names if name in listed}
                absent = [shard for shard in shards if not self._is_known(shard)]
                if absent:
                    self.unlisted = f"{absent[0].raw.basename} is not in the listing of {store.url}"
        tags = sorted(self._tags.items())
        self.digest = hashlib.sha256(repr(tags).encode()).hexdigest()[:32] if tags else ""

    def tag(self, file: File) -> str | None:
        """The version that a file must have; None: its hashes are checked. Raises StoreError."""
        if file.hashes:
            return None
        with self._lock:
            tag = self._tags.get(file.basename)
        if tag is None:
            tag = self._store.tag(file.basename)
            with self._lock:
                tag = self._tags.setdefault(file.basename, tag)
        return tag

    def chunks(self, file: File) -> Iterator[bytes]:
        """The chunks of a file. Raises ConfigError if it has been replaced."""
        try:
            yield from self._store.chunks(file.basename, self.tag(file))
        except ChangedError as error:
            raise self.refusal(file) from error

    def notice(self) -> str | None:
        """What an index without hashes means, as a sentence; None if it has them."""
        if not self.unhashed:
            return None
        since = "the version that was there when its index was read"
        if self.unlisted is not None:
            since = f"the version of its first use here, or what the cache had ({self.unlisted})"
        damage = "noticed only where unpacking fails" if self._packed else "not noticed"
        return (
            f"the index of {self._store.url} has no hashes: damage within its shards is {damage}, and of each "
            f"shard {since} counts as the right one (mosaicml-streaming writes hashes with hashes=['xxh64'])"
        )

    def refusal(self, file: File) -> ConfigError:
        """The error for a file that has been replaced."""
        return ConfigError(
            f"{self._store.url}/{file.basename} was replaced after its {INDEX} was read, so its samples may be others: "
            "put back the file that was there, or begin a new run with the new shards. (The index has no hashes, by "
            "which equal content would be known.)"
        )

    def _is_known(self, shard: Shard) -> bool:
        return any(f is not None and (f.hashes or f.basename in self._tags) for f in (shard.raw, shard.packed))
